"""Captures on the simulated device: what a card refuses raises, replays compute what eager does."""

from __future__ import annotations

import typing

import captured_steps
import pytest
import torch
from capturing import CaptureError
from simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream, Simulation
from simulation import simulation
from watching import Watch

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers import Spawn


class Bench:
    """A device with two streams beside compute, and what lies outside of a capture."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.device = SimulatedDevice(simulation)
        self.compute = simulation.compute
        self.side, self.other = self.device.new_stream(), self.device.new_stream()
        self.value = self.device.empty(4, torch.float32).fill_(1.0)
        self.outside = self.record(self.other)
        self.graph = self.device.new_graph()

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        return stream.record_event()

    def capture(self, issue: Callable[[Bench], object]) -> None:
        with self.device.capturing(self.graph, self.compute):
            issue(self)


@pytest.fixture
def bench() -> Iterator[Bench]:
    device = Simulation()
    with Watch(device):
        yield Bench(device)
        device.close()


# --- what a card refuses --------------------------------------------------------------------------


def wait_outside(bench: Bench) -> None:
    bench.compute.wait_event(bench.outside)


def leave_unjoined(bench: Bench) -> None:
    bench.side.wait_event(bench.record(bench.compute))
    with bench.device.on(bench.side):
        bench.value.mul_(2)


def work_apart(bench: Bench) -> None:
    with bench.device.on(bench.side):
        bench.value.mul_(2)


def copy_from_host(bench: Bench) -> None:
    source = bench.device.empty_on_host(4, torch.float32, pinned=False)
    bench.value.copy_(source, non_blocking=True)


def copy_to_host(bench: Bench) -> None:
    bench.device.empty_on_host(4, torch.float32, pinned=False).copy_(bench.value)


REFUSED: dict[str, tuple[Callable[[Bench], object], str]] = {
    "a value is read": (lambda bench: bench.value.sum().item(), "the host waits for the device"),
    "an event is waited for": (
        lambda bench: bench.record(bench.compute).synchronize(),
        "the host waits for the device",
    ),
    "an event is asked for": (
        lambda bench: bench.record(bench.compute).query(),
        "an event is asked for",
    ),
    "an event of before": (wait_outside, "dependency created on uncaptured work"),
    "a stream is left": (leave_unjoined, "unjoined work: nobody waits for the gather stream"),
    "a stream has not joined": (work_apart, "the gather stream, which has not joined"),
    "a copy from the host": (copy_from_host, "memory that is not page-locked"),
    "a copy to the host": (copy_to_host, "a blocking copy to the host"),
    "memory outside of the pool": (
        lambda bench: bench.device.empty_on_host(4, torch.float32, pinned=True),
        "page-locked",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_card_refuses_raises(bench: Bench, name: str) -> None:
    issue, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        bench.capture(issue)


def test_an_event_of_a_graph_is_nothing_outside_of_it(bench: Bench) -> None:
    events: list[SimulatedEvent] = []
    bench.capture(lambda bench: events.append(bench.record(bench.compute)))
    with pytest.raises(CaptureError, match="was captured is used outside"):
        bench.side.wait_event(events[0])


# --- what a replay does ---------------------------------------------------------------------------


def double_on_a_stream(bench: Bench) -> None:
    bench.side.wait_event(bench.record(bench.compute))
    with bench.device.on(bench.side):
        bench.value.mul_(2)
    bench.compute.wait_event(bench.record(bench.side))
    bench.value.add_(1)


def test_a_capture_runs_nothing_and_each_replay_runs_all_of_it(bench: Bench) -> None:
    bench.capture(double_on_a_stream)
    assert bench.value.tolist() == [1.0] * 4
    bench.graph.replay()
    bench.graph.replay()
    assert bench.value.tolist() == [7.0] * 4
    assert not bench.simulation.checker.findings


def test_memory_from_before_that_is_freed_spoils_a_replay(bench: Bench) -> None:
    memory = [bench.device.empty(4, torch.float32).fill_(3.0)]
    bench.capture(lambda bench: bench.value.copy_(memory[0]))
    memory.clear()
    bench.graph.replay()
    assert bench.value.isnan().all()


# --- steps ----------------------------------------------------------------------------------------


def complaints_of_many(name: str, num_replays: int) -> list[str]:
    make_step = getattr(captured_steps, name)
    with simulation(batches=True) as run:
        pair = captured_steps.Pair(run, make_step, reshard_after_forward=True)
        return pair.train(num_replays=num_replays).complaints


@pytest.mark.streams
@pytest.mark.parametrize(
    ("name", "num_replays"), [("whole_step", 100), ("accumulating_step", 34)]
)  # About as many forwards of each.
def test_many_replays_are_what_eager_steps_are(spawn: Spawn, name: str, num_replays: int) -> None:
    assert spawn(complaints_of_many, 2, name, num_replays, timeout_s=300) == [[], []]
