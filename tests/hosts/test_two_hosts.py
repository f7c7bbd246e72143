"""Training on two hosts: the same numbers as on one, and what happens when one of them is lost."""

from __future__ import annotations

import os
import sys
import typing

import host_training
import pytest
import torch

from shardkit import checkpoint
from two_hosts import Host, Running, run, two_hosts

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.hosts

SCRIPT = host_training.__file__
LIMIT_S = 240  # Of a run; an idle machine takes a tenth.
TOLD_S = 40  # Of SILENT 10, and a second for each rank that is not there, on an idle machine.
STEPS = 12
Hosts = tuple[Host, Host]


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with two_hosts(getattr(request, "param", ("host-a", "host-b"))) as found:
        yield found


def launch(
    host: Host, folder: pathlib.Path, options: Sequence[str], script: Sequence[str], **more: str
) -> Running:
    """Start the script on a host."""
    words = (sys.executable, "-m", "shardkit", "launch", *options, SCRIPT, str(folder), *script)
    path = os.pathsep.join(sys.path)
    environment = {"OMP_NUM_THREADS": "1", "SHARDKIT_ASK_AFTER_S": "2", "PYTHONPATH": path, **more}
    return host.start(*words, cwd=folder, environment=environment)


def launch_both(
    hosts: Hosts,
    folder: pathlib.Path,
    *,
    options: Sequence[str] = ("--num_machines", "2", "--num_processes", "4"),
    script: Sequence[str] = (),
    **more: str,
) -> list[Running]:
    """Start it on both, with two ranks each by default."""
    common = ("--main_process_ip", hosts[0].address)
    return [
        launch(host, folder, (*common, "--machine_rank", str(number), *options), script, **more)
        for number, host in enumerate(hosts)
    ]


ONE_RANK_EACH = ("--num_machines", "2", "--num_processes", "2")
PAUSED = ("--pause", "2", "--pause-at", "6")
SILENT = {"SHARDKIT_SILENT_AFTER_S": "10"}
ELASTIC = ("--nnodes", "1:2", "--max-restarts", "2", "--rdzv-conf", "last_call_timeout=5")


def losses_of(folder: pathlib.Path) -> dict[int, list[tuple[int, float]]]:
    """Return for each step with how many ranks it ran, and its loss; some ran more than once."""
    found: dict[int, list[tuple[int, float]]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, ranks, loss = line.split()
        found.setdefault(int(step), []).append((int(ranks), float(loss)))
    return found


def plain_training() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with whole batches in this process; return all losses, and the parameters."""
    model = host_training.model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x = host_training.batch_of(step)
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_all_steps_are_plain(folder: pathlib.Path) -> None:
    expected, parameters = plain_training()
    found = losses_of(folder)
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, ran in found.items():
        for _, loss in ran:
            # fp32, and the mean of the ranks' means is summed in another order.
            assert loss == pytest.approx(expected[step - 1], rel=1e-5)
    model = host_training.model_of()
    checkpoint.load(folder / "checkpoints" / f"step-{STEPS}", model)
    for name, value in model.state_dict().items():
        # AdamW divides by the root of small sums.
        torch.testing.assert_close(value, parameters[name], rtol=1e-3, atol=1e-4)


def test_two_hosts_train_as_one_does(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    for folder in (both, one):
        folder.mkdir()
    for running in launch_both(hosts, both, script=["--hybrid"]):
        ended = running.wait(LIMIT_S)
        assert ended.code == 0, ended.output
    alone = launch(hosts[0], one, ("--nproc-per-node", "4"), ["--hybrid", "--ranks-per-copy", "2"])
    ended = alone.wait(LIMIT_S)
    assert ended.code == 0, ended.output
    assert losses_of(both) == losses_of(one)
    assert_all_steps_are_plain(both)


def test_a_host_that_is_killed(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """The ranks of the other one are told which it was, and go on without it."""
    options = (*ELASTIC, "--nproc-per-node", "2")
    a, b = launch_both(hosts, tmp_path, options=options, script=PAUSED, **SILENT)
    lost = a.wait_for("step 6 of 4 ranks", LIMIT_S)
    b.kill()
    told = a.wait_for("RankMismatchError: ", LIMIT_S)
    ended = a.wait(LIMIT_S)
    assert ended.code == 0, ended.output
    assert told - lost < TOLD_S
    assert "rank 2 has not answered" in ended.output
    assert "on host-b, or that host is lost" in ended.output
    assert "going on from step 4 with 2 ranks on host-a" in ended.output
    assert {ranks for ranks, _ in losses_of(tmp_path)[STEPS]} == {2}
    assert_all_steps_are_plain(tmp_path)


@pytest.mark.parametrize("hosts", [("localhost", "localhost")], indirect=True)
def test_a_cable_that_is_cut(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """Also where both hosts have one name, and the same process ids."""
    # One rank is each host's only one: it is the fourth process there, on both.
    options = (*ELASTIC, "--nproc-per-node", "1")
    a, b = launch_both(hosts, tmp_path, options=options, script=PAUSED, **SILENT)
    lost = a.wait_for("step 6 of 2 ranks", LIMIT_S)
    hosts[1].cut()
    told = [each.wait_for("RankMismatchError: ", LIMIT_S) for each in (a, b)]
    assert max(told) - lost < 2 * TOLD_S
    a.wait_for("going on from step 4 with 1 ranks", LIMIT_S)
    ended = a.wait(LIMIT_S)
    assert ended.code == 0, ended.output
    assert "rank 1 has not answered" in ended.output
    assert "the store of the process group does not answer" in b.output()
    b.kill()
    assert_all_steps_are_plain(tmp_path)


def test_a_slow_cable(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """It takes its time, and nothing is an error."""
    for host in hosts:
        host.slow_down("1mbit")
    a, b = launch_both(hosts, tmp_path, options=ONE_RANK_EACH)
    for running in (a, b):
        ended = running.wait(LIMIT_S)
        assert ended.code == 0, ended.output
        assert "RankMismatchError" not in ended.output
    assert_all_steps_are_plain(tmp_path)


def test_hosts_without_ipv4(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """They train, and doctor finds nothing wrong."""
    a, b = (host._replace(address=f"fd00:77::{number}") for number, host in enumerate(hosts, 1))
    for host in (a, b):
        inside = ("ip", "-n", host.namespace, "addr")
        run(*inside, "flush", "dev", host.interface)
        run(*inside, "add", f"{host.address}/64", "dev", host.interface, "nodad")
    for running in launch_both((a, b), tmp_path, options=ONE_RANK_EACH):
        ended = running.wait(LIMIT_S)
        assert ended.code == 0, ended.output
    assert_all_steps_are_plain(tmp_path)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": a.address, "MASTER_PORT": "29600"}
    command = (sys.executable, "-m", "shardkit", "doctor")
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    own = [
        {"RANK": str(rank), "GLOO_SOCKET_IFNAME": host.interface, **common, **path}
        for rank, host in enumerate((a, b))
    ]
    started = [
        host.start(*command, cwd=tmp_path, environment=each)
        for host, each in zip((a, b), own, strict=True)
    ]
    examined, other = (running.wait(LIMIT_S) for running in started)
    assert (examined.code, other.code) == (0, 0), examined.output + other.output
    assert f"{b.interface} {b.address}" in examined.output
    assert "ERROR" not in examined.output


def test_an_interface_that_leads_nowhere(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    wrong = {"GLOO_SOCKET_IFNAME": "lo"}
    for running in launch_both(hosts, tmp_path, options=ONE_RANK_EACH, **wrong):
        ended = running.wait(LIMIT_S)
        assert ended.code == 1, ended.output
        assert "GLOO_SOCKET_IFNAME=lo: lo leads to no other host (host-" in ended.output


def test_a_meeting_place_that_nobody_reaches(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    ways = {"--main_process_ip=10.99.0.1": "no route leads", "--main_process_ip=nobody": "know"}
    for way, expected in ways.items():
        options = ("--num_machines=2", "--machine_rank=1", "--num_processes=2", way)
        ended = launch(hosts[1], tmp_path, options, []).wait(LIMIT_S)
        assert ended.code == 1
        assert expected in ended.output, ended.output
        assert "--main_process_ip" in ended.output
