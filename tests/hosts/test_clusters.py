"""The pages about SLURM, Kubernetes and Ray: what they show is carried out."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import typing

import code_blocks
import host_training
import pytest

from launching import free_port
from shardkit.launch.slurm import host_names
from two_hosts import two_hosts

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.hosts

LIMIT_S = 240
PAGES = code_blocks.ROOT / "docs" / "howto"


def blocks(page: str, language: str) -> list[str]:
    found = code_blocks.blocks_of(PAGES / page)
    return [block.source for block in found if block.language == language]


def environment() -> dict[str, str]:
    """Return what runs `python` of this environment, with this shardkit."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


# --- SLURM --------------------------------------------------------------------------------------

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
NodeName=node001 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8 State=UNKNOWN
NodeName=node002 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
"""


class Slurm(typing.NamedTuple):
    """A cluster of two nodes on this machine, with daemons of its own."""

    environment: dict[str, str]

    def run(self, *command: str, cwd: pathlib.Path) -> str:
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and SLURM's daemons; missing: {missing}")
    with tempfile.TemporaryDirectory(prefix="slurm") as name, contextlib.ExitStack() as daemons:
        folder = pathlib.Path(name)  # Short: sockets have short names.
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        config = CONFIG.format(
            folder=folder,
            host=os.uname().nodename,
            controller=free_port(),
            first=free_port(),
            second=free_port(),
        )
        (folder / "slurm.conf").write_text(config)
        # Names of its nodes are known to SLURM alone.
        known = {"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}
        found = Slurm(environment() | known)

        def start(*command: str) -> None:
            with (folder / "daemons").open("a") as log:
                process = subprocess.Popen(command, env=found.environment, stdout=log, stderr=log)
            daemons.callback(process.wait)
            daemons.callback(process.terminate)

        files = [
            f"--{kind}={folder}/munge-{kind}" for kind in ("pid-file", "log-file", "seed-file")
        ]
        key = (f"--socket={folder}/munge", f"--key-file={folder}/key")
        start("munged", "--foreground", "--force", *key, *files)
        time.sleep(1)
        start("slurmctld", "-D")
        for node in ("node001", "node002"):
            start("slurmd", "-D", "-N", node)
        end = time.monotonic() + 60
        while "idle" not in (states := found.run("sinfo", "-h", "-o", "%t", cwd=folder)):
            logs = "".join(file.read_text() for file in folder.glob("*.log"))
            assert time.monotonic() < end, states + logs + (folder / "daemons").read_text()
            time.sleep(0.5)
        yield found


def script(folder: pathlib.Path, *arguments: str) -> None:
    """Write the training script that pages call train.py."""
    (folder / "train.py").write_text(
        f"import sys, runpy\nsys.argv[1:] = {[str(folder), *arguments]}\n"
        f"runpy.run_path({host_training.__file__!r}, run_name='__main__')\n"
    )


def assert_trained(folder: pathlib.Path, ranks: int, output: str = "") -> None:
    lines = (folder / "losses").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [
        [str(step), str(ranks)] for step in range(1, 13)
    ], output


def test_names_of_hosts_are_slurms(slurm: Slurm, tmp_path: pathlib.Path) -> None:
    text = "node[001-003,007],gpu-a,r[1-2]n[01-02],n[098-101]"
    shown = slurm.run("scontrol", "show", "hostnames", text, cwd=tmp_path)
    assert host_names(text) == tuple(shown.split())


def test_the_batch_script(slurm: Slurm, tmp_path: pathlib.Path) -> None:
    """One task on each host."""
    script(tmp_path)
    batch = next(block for block in blocks("slurm.md", "sh") if "#SBATCH" in block)
    (tmp_path / "job.sh").write_text(batch)
    slurm.run("sbatch", "--wait", "--output=out", "job.sh", cwd=tmp_path)
    assert_trained(tmp_path, 2, (tmp_path / "out").read_text())


def test_one_task_for_each_rank(slurm: Slurm, tmp_path: pathlib.Path) -> None:
    """By `launch`, and by a script that sets the variables itself."""
    command, own = (block.split() for block in blocks("slurm.md", "sh") if block[:4] == "srun")
    few = [word if word != "4" else "2" for word in command]
    script(tmp_path, "--hybrid")
    assert_trained(tmp_path, 4, slurm.run(*few, cwd=tmp_path))
    assert own[-2:] == ["python", "train.py"]
    [page] = blocks("slurm.md", "python")
    (tmp_path / "train.py").write_text(f"{page}\nprint('rank', mesh.get_rank(), mesh.shape)\n")
    few = [word if word != "4" else "1" for word in own]
    shown = slurm.run(*few, cwd=tmp_path)
    assert sorted(line for line in shown.splitlines() if line.startswith("rank")) == [
        "rank 0 (2,)",
        "rank 1 (2,)",
    ]


# --- Kubernetes ---------------------------------------------------------------------------------


def test_the_indexed_job(tmp_path: pathlib.Path) -> None:
    """Its command runs on two hosts, each with the variable that Kubernetes sets."""
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(blocks("kubernetes.md", "yaml")[0])
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pods = job["spec"]["template"]["spec"]
    assert pods["subdomain"] == service["metadata"]["name"] == "train"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    [container] = pods["containers"]
    [command] = container["args"]
    script(tmp_path)
    with two_hosts(("train-0", "train-1")) as hosts:
        name = f"{job['metadata']['name']}-0.{pods['subdomain']}"
        assert command.count(name) == 1
        command = command.replace(name, hosts[0].address)
        started = [
            host.start(
                *container["command"],
                command,
                cwd=tmp_path,
                environment={**environment(), "JOB_COMPLETION_INDEX": str(index)},
            )
            for index, host in enumerate(hosts)
        ]
        for running in started:
            ended = running.wait(LIMIT_S)
            assert ended.code == 0, ended.output
    assert_trained(tmp_path, 2)


# --- Ray ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs the package ray")
def test_ray_train(tmp_path: pathlib.Path) -> None:
    (tmp_path / "page.py").write_text(blocks("ray.md", "python")[0])
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # Ray puts sockets there.
        own = {"RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": short, "HOME": short}
        done = subprocess.run(
            [sys.executable, "page.py"],
            env=environment() | own,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * LIMIT_S,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "a worker fails once" in done.stderr + done.stdout
