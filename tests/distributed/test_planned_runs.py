"""What a dry run foretells is what ranks do: collectives, buffers, and the most bytes at once."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest
import torch
from simulation import simulated

from allocated import Issued, peak_of, start_counting
from planned_runs import CASES, NUM_CHEAP, Case
from shardkit import init_device_mesh
from shardkit._events import StepEvent, observe
from shardkit._params.memory import SlotPool
from shardkit.planning._run import Run, batch_on_meta, dry_run, on_meta

if typing.TYPE_CHECKING:
    from workers import Spawn

_MEMORY = ("allocate", "free", "take", "return")
_TRAFFIC = ("gather", "reduce_scatter", "all_reduce", "reshard")


@dataclasses.dataclass
class Seen:
    """What a step did: collectives, what the core told of memory and traffic, the peak."""

    collectives: list[tuple[str, int]]
    events: list[tuple[typing.Any, ...]]
    peak_nbytes: int


def _told(events: list[StepEvent]) -> list[tuple[typing.Any, ...]]:
    found = sorted((e for e in events if e.kind in _MEMORY + _TRAFFIC), key=lambda e: e.opened)
    first: dict[int, int] = {}  # Groups of other models came before.
    groups = [first.setdefault(e.group, len(first)) for e in found]
    return [
        (e.kind, e.name, group, e.phase, e.nbytes, e.axis, e.num_ranks)
        for e, group in zip(found, groups, strict=True)
    ]


def run_case(name: str) -> Seen:
    """Train as people do, and count the third step."""
    case = CASES[name]
    start_counting()
    before = peak_of(lambda: None)
    mesh = init_device_mesh("cpu", case.mesh)
    model, batch = case.model(), case.batch()
    case.prepare(model)
    case.shard(model, mesh)
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    output = loss = None

    def step() -> None:
        nonlocal output, loss
        for number in range(case.accumulate):
            if case.accumulate > 1:
                model.set_requires_gradient_sync(number == case.accumulate - 1)
            output = model(batch)
            loss = output.sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    peak = peak_of(step) - before
    events: list[StepEvent] = []
    with Issued() as issued, observe(events.append):
        step()
    return Seen(issued.found, _told(events), peak)


def run_case_with_another_buffer(name: str) -> Seen:
    """The same with a runtime that holds 1 MiB more from its first reduction on."""
    original, held = SlotPool.acquire, []

    def acquire(self: SlotPool, *args: typing.Any) -> typing.Any:
        if not held:
            held.append(torch.empty(2**20, dtype=torch.uint8))
        return original(self, *args)

    SlotPool.acquire = acquire  # type: ignore[method-assign]
    try:
        return run_case(name)
    finally:
        SlotPool.acquire = original  # type: ignore[method-assign]


def run_case_on_streams(name: str) -> Seen:
    """The same on a simulated accelerator."""
    return simulated(run_case, name)


def planned(case: Case, rank: int, device: str = "cpu") -> Seen:
    """Plan the same."""

    def shard(model: typing.Any, mesh: typing.Any) -> None:
        case.prepare(model)
        case.shard(model, mesh)

    run = Run(
        on_meta(case.model()),
        batch_on_meta(case.batch()),
        case.mesh,
        device=device,
        rank=rank,
        shard=shard,
        optimizer=case.optimizer,
        loss=torch.sum,
        accumulate=case.accumulate,
    )
    seen = dry_run(run)
    meter = seen.meter
    collectives = [(c.op, c.nbytes) for c in meter.collectives[seen.first_collective :]]
    second = next(e.opened for e in meter.events if e.kind == "step" and e.name == "2")
    events = _told([e for e in meter.events if e.opened > second])
    return Seen(collectives, events, max(meter.totals()[seen.begin :]))


def _check(name: str, spawn: Spawn) -> None:
    case = CASES[name]
    for rank, real in enumerate(spawn(run_case, math.prod(case.mesh), name, timeout_s=300)):
        plan = planned(case, rank)
        assert plan.collectives == real.collectives
        assert plan.events == real.events
        assert real.peak_nbytes <= plan.peak_nbytes <= 1.03 * real.peak_nbytes


@pytest.mark.parametrize("name", list(CASES)[:NUM_CHEAP])
def test_a_plan_is_what_ranks_do(name: str, spawn: Spawn) -> None:
    _check(name, spawn)


@pytest.mark.helpers
@pytest.mark.parametrize("name", list(CASES)[NUM_CHEAP:])
def test_a_plan_is_what_ranks_do_in_more_cases(name: str, spawn: Spawn) -> None:
    _check(name, spawn)


def test_a_buffer_that_the_plan_does_not_know_is_found(spawn: Spawn) -> None:
    real = spawn(run_case_with_another_buffer, 2, "experts", timeout_s=300)[0]
    plan = planned(CASES["experts"], 0)
    assert plan.collectives == real.collectives
    assert plan.peak_nbytes < real.peak_nbytes


@pytest.mark.streams
@pytest.mark.parametrize("name", ["bf16", "hybrid", "accumulation"])
def test_a_plan_for_an_accelerator_is_what_its_ranks_do(name: str, spawn: Spawn) -> None:
    case = CASES[name]
    for rank, real in enumerate(
        spawn(run_case_on_streams, math.prod(case.mesh), name, timeout_s=300)
    ):
        plan = planned(case, rank, "cuda")
        assert plan.collectives == real.collectives
        assert plan.events == real.events
