"""`python -m shardkit launch`: real ranks, restarts, and the last word where they fail."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import typing

import launched_training
import pytest
from torch.distributed.launcher import LaunchConfig

from launching import ASK_SOON, start_ranks
from shardkit.launch import worker

if typing.TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.helpers

SCRIPT = launched_training.__file__
LIMIT_S = 400  # An idle machine takes a tenth.


def launch(
    folder: pathlib.Path, *options: str, what: str = "nothing"
) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "shardkit", "launch", "--nproc-per-node", "2", *options)
    environment = {**os.environ, **ASK_SOON, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, SCRIPT, what, str(folder)],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=folder.parent,
    )


def losses_of(output: str) -> dict[tuple[str, str], set[str]]:
    """Return the losses of each rank and step, as often as it ran."""
    found: dict[tuple[str, str], set[str]] = {}
    for rank, step, loss in re.findall(r"^\[rank (\d)\] loss (\d+) (\S+)$", output, re.MULTILINE):
        found.setdefault((rank, step), set()).add(loss)
    return found


def test_a_killed_run_goes_on_with_the_same_losses(tmp_path: pathlib.Path) -> None:
    """The same script, unchanged, is sharded by shardkit."""
    in_a_rank = (worker.__file__, "--install", SCRIPT, "nothing", str(tmp_path / "whole"))
    ranks = start_ranks(in_a_rank, 2, limit_s=LIMIT_S, TORCHELASTIC_RESTART_COUNT="0")
    killed = launch(tmp_path / "killed", "--install", "--max-restarts", "1", what="kill")
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert killed.returncode == 0, killed.stderr
    assert "[rank 1] rank 1 begins at 3, attempt 1" in killed.stdout
    assert "[rank 0] shardkit launch: restart 1 of 1, with 2 ranks" in killed.stderr
    whole = [f"[rank {i}] {line}" for i, r in enumerate(ranks) for line in r.output.splitlines()]
    expected = losses_of("\n".join(whole))
    assert len(expected) == 2 * launched_training.STEPS
    assert losses_of(killed.stdout) == expected
    assert "shardkit._module.fsdp_module" in killed.stdout
    attempts = killed.stderr.split("restart 1 of 1")
    assert [each.count("shardkit is in the place of FSDP2") for each in attempts] == [1, 1]


def test_the_first_failing_rank_comes_last(tmp_path: pathlib.Path) -> None:
    found = launch(tmp_path / "x", "--install", "--log-dir", str(tmp_path / "logs"), what="raise")
    assert found.returncode == 1
    last = found.stderr.split("shardkit launch: ")[-1]
    assert "first rank 1 at" in last
    assert last.rstrip().endswith("ValueError: this batch is bad")
    assert f'{SCRIPT}", line' in last
    assert "worker.py" not in found.stderr
    (kept,) = (tmp_path / "logs").iterdir()
    assert list(kept.glob("*/attempt_0/1/error.json"))


def test_a_diagnosis_comes_last_where_ranks_part(tmp_path: pathlib.Path) -> None:
    found = launch(tmp_path / "x", "--install", what="part")
    assert found.returncode == 1
    last = found.stderr.split("shardkit launch: ")[-1]
    assert "RankMismatchError: ranks parted" in last
    assert "rank 1: " in last
    assert "launched_training.py" in last
    assert "`go_wrong`, in " in last


_ALONE = """
import os, signal, sys, time

print("one", flush=True)
if "--hang-up" in sys.argv:
    os.kill(os.getppid(), signal.SIGHUP)
time.sleep(1)
print("two", flush=True)
print("three", file=sys.stderr, flush=True)
"""


def test_a_run_goes_on_without_its_terminal(tmp_path: pathlib.Path) -> None:
    """As by `nohup` and a pipe whose other end is closed, such as that of `head`."""
    script = tmp_path / "alone.py"
    script.write_text(_ALONE)
    # Older torch has no choice of signals: it takes the hang-up for an order to end.
    option = ["--hang-up"] if "signals_to_handle" in LaunchConfig.__dataclass_fields__ else []
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        ["nohup", sys.executable, "-m", "shardkit", "launch", str(script), *option],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] three" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_begins_without_an_output(tmp_path: pathlib.Path) -> None:
    """As where a service closes its streams; Python has none then."""
    script = tmp_path / "alone.py"
    script.write_text(_ALONE)
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "shardkit", "launch", script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "[rank 0] three" in done.stderr


_WAITING = """
import fcntl, os, sys, time

files = [open(f"{sys.argv[1]}/{rank}", "w") for rank in "01"]
rank = int(os.environ["RANK"])
fcntl.flock(files[rank], fcntl.LOCK_EX)
print(f"rank {rank} is here", flush=True)
time.sleep(120)
files[rank].write("went on")
"""


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(_WAITING)
    command = [sys.executable, "-m", "shardkit", "launch", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, str(script), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as launcher:
        assert launcher.stdout is not None
        said = {launcher.stdout.readline() for _ in range(2)}
        assert said == {"[rank 0] rank 0 is here\n", "[rank 1] rank 1 is here\n"}
        launcher.kill()
    for rank in "01":
        with (tmp_path / rank).open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # It waits until the rank ends.
            assert not held.read()


def test_options_and_errors_are_told(tmp_path: pathlib.Path) -> None:
    found = launch(tmp_path / "x", "--num_machines", "2")
    assert found.returncode == 1
    assert "2 hosts must know where to meet" in found.stderr
    assert "Traceback" not in found.stderr
