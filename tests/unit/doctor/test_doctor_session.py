"""Ranks that meet in threads, on machines that are healthy or sick, over a store in memory."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import typing

import pytest
import torch.distributed as dist
from machines import FakeMachine, has_ipv6

from shardkit._doctor import facts
from shardkit._doctor.command import (
    Answerer,
    NoStoreError,
    Session,
    as_json,
    lines_of,
    open_store,
    place_of,
)
from shardkit._doctor.facts import Checkup, LaunchPlace, Machine, cores_of_quota
from shardkit._doctor.rules import examine
from shardkit._errors import LaunchError
from shardkit.backends.watch.runs import RunStore
from shardkit.launch import here_towards

if typing.TYPE_CHECKING:
    import pathlib

TIMEOUT_S = 3.0


def place(rank: int, world_size: int, **fields: typing.Any) -> LaunchPlace:
    values = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": 0,
        "local_world_size": 1,
        "master_addr": "node0",
        "master_port": 1,
        "hosts_store": False,
    }
    return LaunchPlace(**{**values, **fields})


def meet(machines: dict[int, FakeMachine], world_size: int, **fields: typing.Any) -> Checkup:
    """Let ranks with these machines meet; return what rank 0 knows."""
    store = RunStore("doctor", dist.HashStore())
    results: dict[int, typing.Any] = {}

    def run(rank: int) -> None:
        session = Session(
            machines[rank],
            place(rank, world_size, **fields),
            store,
            timeout_s=TIMEOUT_S,
            times_collectives=False,
        )
        results[rank] = session.run()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == sorted(machines)
    assert all(results[rank] is None for rank in machines if rank != 0)
    found: Checkup = results[0]
    return found


def hosts(number: int) -> dict[int, FakeMachine]:
    return {rank: FakeMachine(f"node{rank}") for rank in range(number)}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_healthy_machines_have_no_errors(world_size: int) -> None:
    found = meet(hosts(world_size), world_size)
    # Threads of one busy process may well differ in their speed.
    names = {finding.check for finding in examine(found)} - {"slow-link"}
    # All share an address, so names resolve to loopback: with several hosts that is an error.
    assert names == ({"host-loopback"} if world_size > 1 else set())
    assert [facts.rank for facts in found.ranks] == list(range(world_size))
    partners = {(link.source, link.target) for link in found.links}
    every = {(a, b) for a in range(world_size) for b in range(world_size) if a != b}
    assert partners == every
    assert all(link.error is None for link in found.links)


def test_ranks_of_a_host_are_counted_if_the_launcher_does_not_say_how_many_there_are() -> None:
    said = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n", "MASTER_PORT": "5"}
    at = place_of(said)
    assert at is not None
    seen = ("cuda", ["H200"] * 2)
    machines = {rank: FakeMachine(f"node{rank % 2}", seen=seen) for rank in range(4)}
    found = meet(machines, 4, local_world_size=at.local_world_size)
    assert [facts.local_world_size for facts in found.ranks] == [2] * 4
    assert "too-few-devices" not in {finding.check for finding in examine(found)}


def test_a_clock_that_is_off_is_measured() -> None:
    machines = hosts(2)
    machines[1].offset_s = 10.0
    [finding] = [f for f in examine(meet(machines, 2)) if f.check == "clock"]
    assert finding.where == "node1"
    assert "10.0 s ahead of" in finding.what


def test_a_firewall_is_found_from_the_side_that_it_stops() -> None:
    machines = hosts(3)
    machines[2].closed = True
    found = [f for f in examine(meet(machines, 3)) if f.check == "unreachable"]
    assert {f.where for f in found} == {
        "rank 2 (node2) to rank 0 (node0)",
        "rank 2 (node2) to rank 1 (node1)",
    }
    assert all("The way back is open." in f.what for f in found)


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    machines = hosts(3)
    del machines[1]
    start = time.monotonic()
    found = meet(machines, 3)
    assert time.monotonic() - start < TIMEOUT_S + 5
    assert found.missing == [1]


def test_what_machines_say_is_what_is_reported() -> None:
    machines = hosts(1)
    machines[0].memory = (2**26, 2**20)
    machines[0].known = {"torch": "2.8.0", "torch_xla": "2.8.0"}
    machines[0].soft_limits["nofile"] = 256
    found = meet(machines, 1)
    findings = examine(found)
    assert {f.check for f in findings} == {"shm-full", "torch-old", "nofile", "xla"}
    text = "\n".join(lines_of(found, findings))
    assert "ERROR shm-full: node0: " in text
    assert "2 errors, 1 warnings" in text
    assert '"healthy": false' in as_json(found, findings)


# --- where ranks meet -----------------------------------------------------------------------------


def refusal(machine: FakeMachine, at: LaunchPlace) -> typing.Any:
    start = time.monotonic()
    with pytest.raises(NoStoreError) as caught:
        open_store(machine, at, 1.0)
    assert time.monotonic() - start < 10
    return caught.value.finding


def test_a_master_without_an_address_is_named() -> None:
    finding = refusal(FakeMachine(names={"node0": []}), place(1, 2))
    assert finding.check == "master-unknown"
    assert "'node0' resolves to no address" in finding.what


def test_a_master_that_cannot_be_reached_is_named_in_time() -> None:
    finding = refusal(FakeMachine(closed=True), place(1, 2))
    assert finding.check == "master-unreachable"
    assert finding.where == "rank 1 on node0"
    assert "MASTER_ADDR node0, port 1 (MASTER_PORT)" in finding.what


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        at = place(0, 1, master_addr="127.0.0.1", master_port=port, hosts_store=True)
        finding = refusal(FakeMachine(), at)
    assert finding.check == "master-port"


def test_ranks_that_can_meet_get_a_store() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    known = {"master_addr": "127.0.0.1", "master_port": port}
    mine = open_store(FakeMachine(), place(0, 2, hosts_store=True, **known), 5.0)
    theirs = open_store(FakeMachine(), place(1, 2, **known), 5.0)
    mine.set("word", "said")
    assert theirs.get("word") == b"said"


def test_a_launcher_says_where_a_rank_stands() -> None:
    said = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n", "MASTER_PORT": "5"}
    assert place_of({}) is None
    assert place_of({**said, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == place(
        3, 4, local_rank=1, local_world_size=2, master_addr="n", master_port=5
    )
    first = {**said, "RANK": "0"}
    alone, under_agent = (
        place_of(first),
        place_of({**first, "TORCHELASTIC_USE_AGENT_STORE": "True"}),
    )
    assert alone is not None
    assert under_agent is not None
    assert (alone.hosts_store, under_agent.hosts_store) == (True, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "x"),
        ("RANK", "4"),
        ("WORLD_SIZE", "-1"),
        ("LOCAL_RANK", ""),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "99999"),
    ],
)
def test_a_variable_that_no_launcher_sets_is_refused_by_name(name: str, text: str) -> None:
    said = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n", "MASTER_PORT": "5"}
    with pytest.raises(LaunchError, match=rf"^{name} must be a number from .*, got {text!r}"):
        place_of({**said, name: text})


@pytest.mark.parametrize("name", ["a" * 64, "a..b", ".a"])
def test_a_name_that_no_host_may_have_resolves_to_nothing(name: str) -> None:
    assert Machine().addresses_of(name) == []
    assert Machine().address_towards(name) == "127.0.0.1"
    with pytest.raises(LaunchError, match="does not know"):
        here_towards(name, 1)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/job/task", {"cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        ("0::/job/task", {"job/cpu.max": "400000 100000", "job/task/cpu.max": "1000 9000"}, 1),
        ("0::/elsewhere", {"cpu.max": "200000 100000"}, 2),
        (
            "3:cpu,cpuacct:/job\n2:cpuset:/other\n0::/",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "500000\n",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        ("", {"cpu.max": "100000 100000"}, math.inf),
    ],
    ids=["none", "no quota", "root", "above", "both", "container", "version 1", "no groups"],
)
def test_a_container_has_the_cores_of_its_quota(
    own: str, files: dict[str, str], cores: float, tmp_path: pathlib.Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores_of_quota(tmp_path, own) == cores


def test_cores_where_processes_are_bound_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(facts, "cores_of_quota", lambda: math.inf)
    assert Machine().facts()["num_cores"] == 3


def test_ranks_answer_over_both_kinds_of_addresses() -> None:
    answerer = Answerer(FakeMachine())
    try:
        for address in ("127.0.0.1", "::1") if has_ipv6() else ("127.0.0.1",):
            with socket.create_connection((address, answerer.port), timeout=10) as rank:
                rank.sendall(b"t")
                assert rank.recv(64)
    finally:
        answerer.close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_the_address_is_ipv6_where_there_is_no_other() -> None:
    machine = Machine()
    assert machine.address_towards("::1") == "::1"
    assert machine.address_towards("127.0.0.1") == "127.0.0.1"


def test_a_stranger_gets_no_more_threads_than_others() -> None:
    answerer = Answerer(FakeMachine())
    before = threading.active_count()
    strangers = [socket.create_connection(("127.0.0.1", answerer.port)) for _ in range(100)]
    try:
        time.sleep(0.2)
        assert threading.active_count() - before <= 64
        for stranger in strangers:
            stranger.close()
        with socket.create_connection(("127.0.0.1", answerer.port), timeout=10) as rank:
            rank.sendall(b"t")
            assert len(rank.recv(8)) == 8
    finally:
        answerer.close()
