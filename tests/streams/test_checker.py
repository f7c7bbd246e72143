"""The checker itself: what it must find, by name, and what it must not."""

from __future__ import annotations

import typing

import pytest
import torch
from clocks import DEVICE, HOST, Checker, Clock, Memory
from simulated_device import SimulatedDevice, Simulation
from simulation import StreamError, raise_findings
from watching import Watch

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


# --- clocks ---------------------------------------------------------------------------------------


def test_a_read_after_a_write_on_another_stream_needs_an_edge() -> None:
    checker = Checker()
    one, two = checker.new_line("one"), checker.new_line("two")
    memory = Memory("the buffer", DEVICE)
    checker.run(one, "fill", [], [memory])
    checker.run(two, "sum", [memory], [])
    (finding,) = checker.findings
    assert finding == (
        "sum on two reads the buffer, which fill on one writes, and nothing orders them. two must "
        "wait for an event that one records after it."
    )


def test_an_edge_orders_what_came_before_it_and_nothing_else() -> None:
    checker = Checker()
    one, two = checker.new_line("one"), checker.new_line("two")
    first, second = Memory("first", DEVICE), Memory("second", DEVICE)
    checker.run(one, "fill", [], [first])
    event = Clock(one.clock)
    checker.run(one, "fill", [], [second])
    two.clock.merge(event)
    checker.run(two, "sum", [first], [])
    assert not checker.findings
    checker.run(two, "sum", [second], [])
    assert len(checker.findings) == 1


def test_a_write_needs_an_edge_to_every_reader() -> None:
    checker = Checker()
    lines = [checker.new_line(name) for name in ("one", "two", "three")]
    memory = Memory("the buffer", DEVICE)
    for line in lines[:2]:
        checker.run(line, "sum", [memory], [])
    lines[2].clock.merge(lines[0].clock)
    checker.run(lines[2], "fill", [], [memory])
    (finding,) = checker.findings
    assert "sum on two reads" in finding


def test_reads_on_different_streams_need_no_edge() -> None:
    checker = Checker()
    memory = Memory("the buffer", DEVICE)
    for name in ("one", "two"):
        checker.run(checker.new_line(name), "sum", [memory], [])
    assert not checker.findings


def test_an_edge_carries_what_its_stream_waited_for() -> None:
    checker = Checker()
    one, two, three = (checker.new_line(name) for name in ("one", "two", "three"))
    memory = Memory("the buffer", DEVICE)
    checker.run(one, "fill", [], [memory])
    two.clock.merge(one.clock)
    three.clock.merge(two.clock)
    checker.run(three, "sum", [memory], [])
    assert not checker.findings


def test_the_host_must_wait_for_what_it_reads() -> None:
    checker = Checker()
    one = checker.new_line("one")
    memory = Memory("the result", HOST)
    checker.run(one, "copy", [], [memory])
    checker.run(checker.host, "add", [memory], [])
    assert "The host must wait for" in checker.findings[0]


def test_memory_goes_back_when_its_owner_has_waited_for_all_users() -> None:
    checker = Checker()
    owner, other = checker.new_line("compute"), checker.new_line("side")
    memory = Memory("the buffer", DEVICE, owner)
    checker.run(other, "sum", [memory], [])
    checker.give_back(memory, "the allocator")
    assert "goes back to the allocator while sum on side may still use it" in checker.findings[0]
    owner.clock.merge(other.clock)
    checker.findings.clear()
    checker.give_back(memory, "the allocator")
    assert not checker.findings


# --- the device -----------------------------------------------------------------------------------


class Bench:
    """A simulation with a side stream."""

    def __init__(self) -> None:
        self.simulation = Simulation()
        self.device = SimulatedDevice(self.simulation)
        self.side = self.simulation.new_stream("side")
        self.watch = Watch(self.simulation)

    def empty(self, numel: int = 4) -> Tensor:
        return self.device.empty(numel, torch.float32)

    @property
    def findings(self) -> list[str]:
        return self.simulation.checker.findings


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    with made.watch:
        yield made
        made.simulation.close()


def test_work_on_a_side_stream_runs_when_something_waits_for_it(bench: Bench) -> None:
    ours = bench.empty().fill_(1.0)
    bench.side.wait_event(bench.simulation.compute.record_event())
    with bench.simulation.on(bench.side):
        ours.add_(1.0)
    assert ours.tolist() == [1.0] * 4
    bench.simulation.compute.wait_event(bench.side.record_event())
    assert ours.tolist() == [2.0] * 4
    assert not bench.findings


def test_a_missing_wait_gives_wrong_numbers_and_a_finding(bench: Bench) -> None:
    ours = bench.empty().fill_(1.0)
    with bench.simulation.on(bench.side):
        ours.add_(1.0)
    doubled = ours * 2
    assert doubled.tolist() == [2.0] * 4
    assert any("add_ on side" in finding for finding in bench.findings)
    with pytest.raises(StreamError, match="must wait for an event"):
        raise_findings(bench.simulation)


def test_freed_memory_is_overwritten_at_once(bench: Bench) -> None:
    source, target = bench.empty().fill_(1.0), bench.empty().fill_(0.0)
    bench.side.wait_event(bench.simulation.compute.record_event())
    with bench.simulation.on(bench.side):
        target.copy_(source)
    del source
    bench.simulation.compute.wait_event(bench.side.record_event())
    assert target.isnan().all()
    assert any("goes back to the allocator" in finding for finding in bench.findings)


def test_new_memory_may_still_be_in_use_on_its_stream(bench: Bench) -> None:
    bench.empty().fill_(0.0)  # Freed at once.
    ours = bench.empty()
    with bench.simulation.on(bench.side):
        ours.fill_(1.0)
    assert "whose it was before on compute" in bench.findings[0]


def test_a_blocking_copy_and_a_value_that_is_read_are_waits_of_the_host(bench: Bench) -> None:
    ours = bench.empty().fill_(1.0)
    pinned = bench.device.empty_on_host(4, torch.float32, pinned=True)
    pinned.copy_(ours)
    assert ours[0].item() == 1.0
    assert [sync.what for sync in bench.simulation.syncs] == [
        "a blocking copy to the host",
        "aten::_local_scalar_dense",
    ]
    assert not bench.findings


def test_the_host_must_not_read_what_is_being_copied_to_it(bench: Bench) -> None:
    ours = bench.empty().fill_(1.0)
    pinned = bench.device.empty_on_host(4, torch.float32, pinned=True)
    pinned.copy_(ours, non_blocking=True)
    pinned.add_(1.0)
    assert "aten::add_ on the host writes" in bench.findings[0]


def test_operators_of_the_library_do_not_mix_memory_of_host_and_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = bench.empty().fill_(1.0)
    pinned = bench.device.empty_on_host(4, torch.float32, pinned=True).fill_(1.0)
    ours + pinned  # A test may, to compare them.
    assert not bench.findings
    monkeypatch.setattr("watching._in_shardkit", lambda: True)
    ours + pinned
    assert "mixes memory of the host and of the device" in bench.findings[0]
