"""Each finding is made where there is cause, on the machine that has it, and nowhere else."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from machines import GIB, HEALTHY, group

from shardkit._doctor.facts import Checkup, Link, RankFacts, Timing
from shardkit._doctor.rules import examine

MIB = 2**20
LOOPBACK = ["127.0.1.1"]


def links_of(num_ranks: int, **of_last: typing.Any) -> list[Link]:
    """Return a ring of links, alike but for the last one."""
    ring = [
        Link(
            source=rank,
            target=(rank + 1) % num_ranks,
            interface="eth0",
            address=f"10.0.0.{rank + 1}",
            is_primary=True,
            latency_s=1e-4,
            bytes_per_s=1e9,
            clock_offset_s=0.001,
        )
        for rank in range(num_ranks)
    ]
    return [*ring[:-1], dataclasses.replace(ring[-1], **of_last)]


def timings_of(num_ranks: int) -> list[Timing]:
    return [
        Timing(rank=rank, collective="all_reduce", nbytes=4, seconds=1e-3)
        for rank in range(num_ranks)
    ]


def checkup(ranks: list[RankFacts], **known: typing.Any) -> Checkup:
    number = known.pop("world_size", len(ranks))
    known = {"links": links_of(len(ranks)), "timings": timings_of(len(ranks)), **known}
    return Checkup(number, "10.0.0.1:29500", ranks, backend="nccl", **known)


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
def test_a_healthy_group_has_none(num_hosts: int) -> None:
    assert examine(checkup(group(num_hosts))) == []


def test_several_ranks_of_one_healthy_host_have_none() -> None:
    both = {"local_world_size": 2, "devices": ["H200"] * 2, "host_addresses": LOOPBACK}
    ranks = [dataclasses.replace(HEALTHY, rank=r, local_rank=r, **both) for r in range(2)]
    assert examine(checkup(ranks)) == []


OF_ONE: dict[str, tuple[dict[str, typing.Any], str, str]] = {
    "torch-old": ({"torch": "2.8.1"}, "error", "2.9"),
    "torch-build": ({"build": "cpu", "devices": [], "device_type": None}, "error", "CPU only"),
    "no-devices": ({"devices": [], "device_type": None}, "error", "sees none"),
    "too-few-devices": ({"local_world_size": 8}, "error", "8 ranks share 1 devices"),
    "no-backend": ({"backends": ["gloo"]}, "error", "no nccl"),
    "xla": ({"torch_xla": "2.13.0"}, "note", "not checked"),
    "xla-version": ({"torch_xla": "2.9.0"}, "error", "another torch"),
    "no-shm": ({"shm_nbytes": None, "shm_free_nbytes": None}, "warning", "no /dev/shm"),
    "shm-small": (
        {"shm_nbytes": 256 * MIB, "shm_free_nbytes": 250 * MIB},
        "warning",
        "256 MiB",
    ),
    "shm-full": ({"shm_nbytes": 64 * GIB, "shm_free_nbytes": 3 * MIB}, "error", "3 MiB free"),
    "memlock": (
        {"limits": {"memlock": 65536, "nofile": 65536, "nproc": None}},
        "error",
        "64 KiB",
    ),
    "nofile": ({"limits": {"memlock": None, "nofile": 1024, "nproc": None}}, "warning", "1024"),
    "nproc": ({"limits": {"memlock": None, "nofile": 65536, "nproc": 512}}, "warning", "512"),
    "threads": (
        {"local_world_size": 8, "devices": ["H200"] * 8, "num_threads": 64},
        "warning",
        "share 64 cores",
    ),
    "host-loopback": ({"host_addresses": LOOPBACK}, "error", "127.0.1.1"),
    "host-unknown": ({"host_addresses": []}, "error", "no address"),
    "interface-unknown": (
        {"environment": {"NCCL_SOCKET_IFNAME": "ib0"}},
        "error",
        "has lo, eth0",
    ),
    "slow-rank": ({"compute_s": 0.1}, "warning", "100.0 ms"),
}


@pytest.mark.parametrize("check", OF_ONE)
def test_what_is_wrong_with_one_machine_is_found_there(check: str) -> None:
    fields, level, text = OF_ONE[check]
    found = [finding for finding in examine(checkup(group(4, **fields))) if finding.check == check]
    [finding] = found
    assert finding.level == level
    assert text in finding.what
    assert "node3" in finding.where
    assert finding.remedy


@pytest.mark.parametrize(
    ("num_threads", "remedy"), [(64, "OMP_NUM_THREADS=8"), (1, "start fewer ranks on this host")]
)
def test_a_remedy_is_not_what_is_there(num_threads: int, remedy: str) -> None:
    """Ranks with a thread each have no fewer."""
    num_ranks = 64 // 8 if num_threads > 1 else 64 * 3
    fields = {"local_world_size": num_ranks, "devices": ["H200"] * num_ranks}
    found = examine(checkup(group(1, **fields, num_threads=num_threads)))
    [finding] = [finding for finding in found if finding.check == "threads"]
    assert finding.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("text", "is_known"),
    [("eth0", True), ("eth0,lo", True), ("eth", False), ("eth0,ib0", False), ("^lo", False)],
)
def test_gloo_takes_whole_names_of_interfaces(text: str, is_known: bool) -> None:
    found = examine(checkup(group(2, environment={"GLOO_SOCKET_IFNAME": text})))
    assert ("interface-unknown" not in {finding.check for finding in found}) is is_known


@pytest.mark.parametrize("check", ["host-loopback"])
def test_a_host_alone_may_be_its_own_loopback(check: str) -> None:
    found = examine(checkup(group(1, host_addresses=LOOPBACK)))
    assert check not in {finding.check for finding in found}


@pytest.mark.parametrize("addresses", [LOOPBACK, []])
def test_a_chosen_interface_makes_the_host_name_unimportant(addresses: list[str]) -> None:
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    ranks = group(4, host_addresses=addresses, environment=variables)
    assert examine(checkup(ranks)) == []


@pytest.mark.parametrize(
    ("fields", "level", "text"),
    [
        ({"torch": "2.12.0"}, "error", "torch is 2.12.0 (cuda 13.0), and 2.13.0 (cuda 13.0) on"),
        ({"build": "cuda 12.8"}, "error", "torch is 2.13.0 (cuda 12.8)"),
        ({"shardkit": "0.0.9"}, "error", "shardkit is 0.0.9, and 0.1.0 on ranks 0, 1, 2"),
        ({"python": "3.12.1"}, "warning", "python is 3.12"),
        ({"devices": ["A100"]}, "warning", "devices is 1 x A100, and 1 x H200"),
        ({"environment": {"NCCL_ALGO": "Ring"}}, "warning", "NCCL_ALGO is Ring, and not set"),
    ],
)
def test_who_is_unlike_the_others_is_named(
    fields: dict[str, typing.Any], level: str, text: str
) -> None:
    [finding] = examine(checkup(group(4, **fields)))
    assert (finding.check, finding.level) == ("unlike", level)
    assert finding.where == "rank 3 on node3"
    assert text in finding.what


def test_who_did_not_come_is_named() -> None:
    [finding] = examine(checkup(group(3), world_size=5))
    assert (finding.check, finding.level) == ("missing", "error")
    assert finding.where == "ranks 3, 4"
    assert "10.0.0.1:29500" in finding.remedy


def test_who_fell_silent_is_named_with_the_step_and_the_process() -> None:
    [finding] = examine(checkup(group(3), silent={"links": [1]}))
    assert (finding.check, finding.where) == ("silent", "rank 1")
    assert "'links'" in finding.what
    assert "1 on node1" in finding.remedy


def test_a_closed_way_is_named_with_its_interface() -> None:
    links = links_of(4, error="timed out", latency_s=None, bytes_per_s=None)
    [finding] = examine(checkup(group(4), links=links))
    assert (finding.check, finding.level) == ("unreachable", "error")
    assert finding.where == "rank 3 (node3) to rank 0 (node0)"
    assert "10.0.0.4 (eth0): timed out" in finding.what
    assert "firewall" in finding.remedy or "open all TCP ports" in finding.remedy


def test_a_way_that_is_closed_on_one_side_says_so() -> None:
    closed = links_of(2, error="timed out")
    [finding] = examine(checkup(group(2), links=closed))
    assert finding.what.endswith("The way back is open.")


def test_another_interface_that_is_closed_is_a_warning() -> None:
    links = links_of(4, error="timed out", is_primary=False, interface="eth1")
    [finding] = examine(checkup(group(4), links=links))
    assert (finding.check, finding.level) == ("interface-closed", "warning")
    assert "NCCL_SOCKET_IFNAME=^eth1" in finding.remedy


@pytest.mark.parametrize("slow", [{"bytes_per_s": 1e8}, {"latency_s": 0.02}])
def test_one_slow_link_is_named(slow: dict[str, float]) -> None:
    [finding] = examine(checkup(group(4), links=links_of(4, **slow)))
    assert (finding.check, finding.level) == ("slow-link", "warning")
    assert finding.where == "rank 3 (node3) to rank 0 (node0)"


@pytest.mark.parametrize(("offset_s", "side"), [(10.0, "behind"), (-10.0, "ahead of")])
def test_a_clock_that_is_off_is_named(offset_s: float, side: str) -> None:
    [finding] = examine(checkup(group(4), links=links_of(4, clock_offset_s=offset_s)))
    assert (finding.check, finding.where) == ("clock", "node3")
    assert f"10.0 s {side} that of rank 0 on node0" in finding.what


def test_two_ranks_on_one_device_are_named() -> None:
    ranks = group(2, host="node0", devices=["H200", "H200"], local_rank=0)
    found = {finding.check: finding for finding in examine(checkup(ranks))}
    assert found["same-device"].where == "ranks 0, 1 on node0"


@pytest.mark.parametrize(
    ("ids", "checks"), [(["a", "b"], set()), (["a", "a"], {"too-few-devices"})]
)
def test_ranks_may_each_see_a_device_of_their_own(ids: list[str], checks: set[str]) -> None:
    ranks = [
        dataclasses.replace(HEALTHY, rank=r, local_rank=r, local_world_size=2, device_ids=[each])
        for r, each in enumerate(ids)
    ]
    assert {finding.check for finding in examine(checkup(ranks))} == checks


def test_ranks_that_the_doctor_started_may_share_a_device() -> None:
    ranks = [
        dataclasses.replace(HEALTHY, rank=r, local_rank=r, local_world_size=2) for r in range(2)
    ]
    assert [each.check for each in examine(checkup(ranks))] == ["too-few-devices"]
    assert examine(checkup(ranks, is_alone=True)) == []


def test_what_is_wrong_with_a_host_is_said_once() -> None:
    limits: dict[str, int | None] = {"memlock": None, "nofile": 1024, "nproc": None}
    both = {"local_world_size": 2, "devices": ["H200"] * 2, "limits": limits, "torch": "2.8.0"}
    ranks = [dataclasses.replace(HEALTHY, rank=r, local_rank=r, **both) for r in range(2)]
    assert [each.check for each in examine(checkup(ranks))] == ["torch-old", "nofile"]


def test_the_empty_shared_memory_of_a_container_is_small_and_not_full() -> None:
    small = {"shm_nbytes": 64 * MIB, "shm_free_nbytes": 64 * MIB}
    assert [each.check for each in examine(checkup(group(1, **small)))] == ["shm-small"]
    full = {"shm_nbytes": 64 * MIB, "shm_free_nbytes": 1 * MIB}
    assert [each.check for each in examine(checkup(group(1, **full)))] == ["shm-full"]


def test_shared_memory_of_other_systems_is_no_folder() -> None:
    none = {"shm_nbytes": None, "shm_free_nbytes": None}
    assert examine(checkup(group(1, system="Darwin", **none))) == []


def test_a_collective_that_failed_is_named_once_with_its_ranks() -> None:
    failed = [dataclasses.replace(t, seconds=None, error="timed out") for t in timings_of(3)]
    [finding] = examine(checkup(group(3), timings=failed))
    assert (finding.check, finding.where) == ("collective", "ranks 0, 1, 2")
    assert "all_reduce of 4 bytes on nccl failed: timed out" in finding.what


def test_errors_come_first() -> None:
    ranks = group(4, compute_s=0.1, shm_nbytes=None, torch="2.12.0", torch_xla="2.12.0")
    levels = [finding.level for finding in examine(checkup(ranks))]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert len(set(levels)) == 3
