"""What the core tells of a step: which events, in which order, how many bytes."""

from __future__ import annotations

import itertools
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recording import recording_mesh
from shardkit import _events, fully_shard
from shardkit._events import StepEvent, StepLog, StepObserver, observed_by

_LAYER_NBYTES = 768 * 768 * 4


class Net(nn.Module):
    """Two layers that are groups, and a head of the root's own."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(768, 768, bias=False)
        self.second = nn.Linear(768, 768, bias=False)
        self.head = nn.Linear(768, 8, bias=False)
        self._recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=False) if self._recomputes else layer(x)
        return self.head(x)


def _sharded(shape: tuple[int, ...] = (4,), *, recomputes: bool = False) -> nn.Module:
    mesh, _ = recording_mesh(shape)
    model = Net(recomputes=recomputes)
    fully_shard(model.first, mesh)
    fully_shard(model.second, mesh)
    return fully_shard(model, mesh)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 768, requires_grad=True)).sum().backward()


def _events_of(model: nn.Module, steps: int = 1) -> list[StepEvent]:
    events: list[StepEvent] = []
    with observed_by(StepObserver(events.append, lambda: 0.0)) as observer:
        for _ in range(steps):
            _step(model)
        assert observer.under_way == []
    return events


def _in_order(events: list[StepEvent], *kinds: str) -> list[str]:
    chosen = sorted((e for e in events if e.kind in kinds), key=lambda e: e.opened)
    return [f"{e.kind} {e.name} {e.phase}" for e in chosen]


def test_each_gather_compute_and_reduction_is_told_in_order() -> None:
    model = _sharded()
    _step(model)
    events = _events_of(model)
    assert _in_order(events, "gather", "compute", "reduce_scatter", "pass", "reshard") == [
        "pass the root forward",
        "gather the root forward",
        "gather first forward",
        "compute the root forward",
        "gather second forward",
        "compute first forward",
        "reshard first forward",
        "compute second forward",
        "pass the root backward",
        "compute the root backward",
        "compute second backward",
        "gather first backward",
        "reshard second backward",
        "reduce_scatter second backward",
        "compute first backward",
        "reshard first backward",
        "reduce_scatter first backward",
        "reshard the root backward",
        "reduce_scatter the root backward",
    ]


def test_bytes_are_those_of_the_buffers() -> None:
    events = _events_of(_sharded())
    layers = [e for e in events if e.name in ("first", "second")]
    told = {e.kind: e.nbytes for e in layers if e.kind not in ("compute", "wait")}
    assert told == dict.fromkeys(("gather", "reduce_scatter", "reshard"), _LAYER_NBYTES)
    assert {(e.axis, e.num_ranks) for e in layers if e.kind == "gather"} == {("shard", 4)}
    (numbers,) = [e for e in events if e.kind == "all_reduce"]
    assert (numbers.group, numbers.nbytes) == (-1, (3 + 4) * 8)


def test_a_replicate_axis_has_an_all_reduce_of_the_sums() -> None:
    events = _events_of(_sharded((2, 2)))
    found = {(e.name, e.nbytes, e.axis, e.num_ranks) for e in events if e.kind == "all_reduce"}
    assert ("first", _LAYER_NBYTES // 2, "replicate", 2) in found


def test_a_forward_in_backward_is_a_recompute() -> None:
    events = _events_of(_sharded(recomputes=True))
    phases = [(e.name, e.phase) for e in events if e.kind == "compute"]
    assert phases.count(("first", "recompute")) == 1
    assert phases.count(("second", "recompute")) == 1
    first = {e.phase: e for e in events if e.kind == "compute" and e.name == "first"}
    assert first["recompute"].closed < first["backward"].closed


def test_memory_that_is_allocated_is_freed_and_what_is_taken_returned() -> None:
    events = _events_of(_sharded(), steps=2)
    for given, back in (("allocate", "free"), ("take", "return")):
        nbytes = [e.nbytes for e in events if e.kind == given]
        assert nbytes
        assert sum(nbytes) == sum(e.nbytes for e in events if e.kind == back)
    taken = {e.name for e in events if e.kind == "take"}
    assert {f"{kind} first.weight" for kind in ("unsharded", "send", "receive")} <= taken


def test_a_forward_that_raises_leaves_nothing_open_after_the_next() -> None:
    model = _sharded()

    def fail(*_: object) -> None:
        msg = "no"
        raise ValueError(msg)

    hook = model.second.register_forward_pre_hook(fail)
    events: list[StepEvent] = []
    with observed_by(StepObserver(events.append)) as observer:
        with pytest.raises(ValueError, match="no"):
            _step(model)
        hook.remove()
        _step(model)
        assert observer.under_way == []
    assert all(0 < e.begin <= e.end and e.opened <= e.closed for e in events)


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_log_makes_the_same_events_later(*, is_failing: bool) -> None:
    model = _sharded((2, 2), recomputes=True)
    _step(model)

    def clock() -> typing.Callable[[], float]:
        return (lambda: 0.0) if is_failing else map(float, itertools.count()).__next__

    def steps() -> None:
        _step(model)
        if is_failing:
            hook = model.second.register_forward_pre_hook(lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                _step(model)
            hook.remove()
        _step(model)

    events: list[StepEvent] = []
    with observed_by(StepObserver(events.append, clock())):
        steps()
    parts: list[list[StepEvent]] = []
    log = StepLog(clock(), 20, lambda: parts.append(log.take()))
    with observed_by(log):
        steps()
    assert len(parts) > 2
    later = [event for part in (*parts, log.take()) for event in part]
    assert [*map(tuple, later)] == [*map(tuple, events)]
    assert log.take() == []


def test_nobody_observes_after_the_context_and_two_do_not_at_once() -> None:
    with (
        observed_by(StepObserver(lambda _: None)),
        pytest.raises(RuntimeError, match="observed already"),
        observed_by(StepObserver(lambda _: None)),
    ):
        pass
    assert _events.observer is None


def test_two_roots_of_one_backward_are_told_apart() -> None:
    """Groups are numbered from 0 in each root, and events know them by other numbers."""
    first, second = _sharded(), _sharded()
    x = torch.ones(2, 768, requires_grad=True)
    events: list[StepEvent] = []
    with observed_by(StepObserver(events.append, lambda: 0.0)) as observer:
        for _ in range(2):
            (first(x) + second(x)).sum().backward()
            assert observer.phase == "optimizer"
        assert observer.under_way == []
    reductions = [e for e in events if e.kind == "reduce_scatter"]
    assert {e.phase for e in reductions} == {"backward"}
    assert len({e.group for e in reductions}) == 6
    assert [e.phase for e in events if e.kind == "pass"].count("backward") == 4
