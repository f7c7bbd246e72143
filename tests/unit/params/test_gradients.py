"""Gradients of a group: collected, sent, reduced and assigned, or put off, or dropped."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from torch import Tensor

from models import Parameters
from recording import RecordingStreams, recording_mesh
from shardkit import ShardedTensor, fully_shard
from shardkit._module.hooks import get_state
from shardkit._params.gradients import GroupGradients, start_reduce
from shardkit._params.memory import SlotPool
from shardkit.backends import gloo
from shardkit.backends.base import end_to_end

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (2,), "c": (4, 4)}
NAMES = list(SHAPES)


class Collecting:
    """The gradients of one group, and what reduces them as if all ranks had sent the same."""

    def __init__(self, mesh_shape: tuple[int, ...] = (4,), *, rank: int = 0) -> None:
        self.mesh, self.log = recording_mesh(mesh_shape, rank=rank)
        self.model: typing.Any = fully_shard(Parameters(SHAPES), self.mesh)
        group = get_state(self.model).group
        self.gradients: GroupGradients = group.gradients
        (self.bucket,) = group.buckets
        self.streams: typing.Any = RecordingStreams(self.log)
        self.pool = SlotPool(self.streams)

    def take(self, name: str, value: float, *, hold: bool = True) -> Tensor:
        """Let the gradient of a parameter come: that value everywhere."""
        grad = torch.full(SHAPES[name], value)
        index = NAMES.index(name)
        self.gradients.buckets[0].collect(index, grad, self.streams, self.pool, hold=hold)
        return grad

    def send(self) -> dict[str, set[float]]:
        """Return what would be sent of each parameter; anything may lie between them."""
        (reduction,) = self.gradients.prepare(self.streams, self.pool, all_reduce=True)
        layout = self.bucket.store.layout
        places = zip(NAMES, layout.offsets, layout.numels, strict=True)
        return {name: set(reduction.send[at : at + n].tolist()) for name, at, n in places}

    def start(self, *, all_reduce: bool = True) -> None:
        start_reduce([(self.gradients, all_reduce)], self.streams, self.pool, "group")

    def reduce(self, *, all_reduce: bool = True) -> None:
        self.start(all_reduce=all_reduce)
        self.gradients.finish_reduce(self.pool)

    def grads(self) -> dict[str, set[float] | None]:
        """Return the values in this rank's piece of each gradient."""
        found: dict[str, set[float] | None] = {}
        for name in NAMES:
            grad = getattr(self.model, name).grad
            assert grad is None or isinstance(grad, ShardedTensor)
            found[name] = None if grad is None else set(grad.to_local().tolist())
        return found


def rank_with_all_parameters() -> Collecting:
    """Return a group on one axis of one rank, beside another of two: it owns whole parameters."""
    return Collecting((2, 1))


# --- collecting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", [True, False])
def test_what_came_is_sent_and_zeros_for_the_rest(hold: bool) -> None:
    collecting = Collecting()
    collecting.take("a", 2.0, hold=hold)
    assert collecting.send() == {"a": {2.0}, "b": {0.0}, "c": {0.0}}


@pytest.mark.parametrize("hold", [True, False])
def test_gradients_of_one_parameter_add_up(hold: bool) -> None:
    collecting = Collecting()
    for value in (1.0, 2.0):
        collecting.take("b", value, hold=hold)
    assert collecting.send() == {"a": {0.0}, "b": {3.0}, "c": {0.0}}


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_parts_lie_end_to_end_as_in_the_send_buffer(num_ranks: int) -> None:
    collecting = Collecting((num_ranks,))
    (gradients,), layout = collecting.gradients.buckets, collecting.bucket.store.layout
    grads = {i: torch.rand(shape) for i, shape in enumerate(SHAPES.values())}
    grads[0] = torch.rand(5, 3).T  # Its elements lie in another order.
    expected = torch.zeros(layout.padded_numel)
    for i, grad in grads.items():
        gradients.collect(i, grad, collecting.streams, collecting.pool, hold=True)
        at = layout.offsets[i]
        expected[at : at + grad.numel()] = grad.reshape(-1)
    parts = collecting.bucket.store.parts_by_rank(gradients.held)
    (reduction,) = collecting.gradients.prepare(
        collecting.streams, collecting.pool, all_reduce=True
    )
    in_parts = dataclasses.replace(reduction, parts=parts)
    assert torch.equal(in_parts.whole(), expected)
    reduction.send.copy_(expected)
    rows = expected.view(num_ranks, -1)
    both = torch.cat([rows, rows], 1).view(-1)
    assert torch.equal(end_to_end([reduction, in_parts]), both)
    assert torch.equal(gloo._joined([reduction, in_parts]).send, both)  # noqa: SLF001
    assert not any(parts), "dropped before there is memory for what others send"


def test_a_gradient_that_is_not_held_is_copied_at_once() -> None:
    collecting = Collecting()
    collecting.take("b", 1.0, hold=False).fill_(9.0)
    assert collecting.send() == {"a": {0.0}, "b": {1.0}, "c": {0.0}}


def test_what_waits_is_told() -> None:
    collecting = Collecting()
    gradients = collecting.gradients
    assert not gradients.has_collected
    collecting.take("a", 1.0)
    assert gradients.has_collected
    assert gradients.buffer_nbytes == 0, "held, not copied"
    gradients.write_held(collecting.streams, collecting.pool)
    assert gradients.has_collected
    assert gradients.buffer_nbytes == gradients.send_nbytes > 0
    collecting.reduce()
    assert not gradients.has_pending
    assert gradients.buffer_nbytes == 0


# --- reducing -------------------------------------------------------------------------------------


def test_reduced_gradients_are_means_and_add_to_what_is_there() -> None:
    collecting = rank_with_all_parameters()
    for expected in (2.0, 4.0):
        for name in NAMES:
            collecting.take(name, 2.0)
        collecting.reduce()
        assert collecting.grads() == {key: {expected} for key in NAMES}
        collecting.gradients.forget_fired()


def test_a_factor_takes_the_place_of_the_number_of_ranks() -> None:
    collecting = rank_with_all_parameters()
    collecting.model.set_gradient_divide_factor(8.0)
    for name in NAMES:
        collecting.take(name, 2.0)
    collecting.reduce()
    assert collecting.grads() == {key: {2.0 * 2 / 8} for key in NAMES}


def test_groups_are_reduced_by_one_call() -> None:
    one, other = Collecting(), Collecting()
    for each in (one, other):
        each.take("a", 1.0)
    both = [(each.gradients, True) for each in (one, other)]
    start_reduce(both, one.streams, one.pool, "group")
    assert [what for what, _ in one.log] == ["start reduce_scatter"]
    assert other.log == []
    for each in (one, other):
        assert each.gradients.is_reducing
        each.gradients.finish_reduce(one.pool)
        assert each.grads()["a"] == {1.0}
        assert not each.gradients.is_reducing


def test_hooks_run_once_the_gradient_is_there() -> None:
    collecting = rank_with_all_parameters()
    seen: list[set[float]] = []
    collecting.model.b.register_post_accumulate_grad_hook(
        lambda param: seen.append(set(param.grad.to_local().tolist()))
    )
    collecting.take("b", 3.0)
    collecting.reduce()
    assert seen == [{3.0}]


def test_one_rank_assigns_at_once() -> None:
    collecting = Collecting((1,))
    assert collecting.gradients.is_local
    for expected in (5.0, 10.0):
        collecting.gradients.assign([(collecting.gradients.buckets[0], 1, torch.full((2,), 5.0))])
        assert collecting.grads() == {"a": None, "b": {expected}, "c": None}
    collecting.model.set_all_reduce_hook(lambda flat: flat.mul_(1))
    assert not collecting.gradients.is_local, "the hook sees reduced buffers"


# --- parameters that did not fire here ------------------------------------------------------------


@pytest.mark.parametrize("is_used_elsewhere", [True, False])
def test_a_parameter_unused_here_gets_a_gradient_if_any_rank_used_it(
    is_used_elsewhere: bool,
) -> None:
    collecting = rank_with_all_parameters()
    collecting.take("a", 1.0)
    collecting.reduce()
    gradients = collecting.gradients
    assert collecting.grads() == {"a": {1.0}, "b": None, "c": None}
    assert [list(fired) for fired in (each.fired for each in gradients.buckets)] == [[1, 0, 0]]
    assert gradients.needs_settling
    gradients.settle([[1, int(is_used_elsewhere), 0]])
    assert collecting.grads() == {"a": {1.0}, "b": {0.0} if is_used_elsewhere else None, "c": None}
    assert not gradients.needs_settling
    gradients.forget_fired()
    assert [list(fired) for fired in (each.fired for each in gradients.buckets)] == [[0, 0, 0]]


# --- sums that wait for an all-reduce -------------------------------------------------------------


def test_partial_sums_wait_and_are_carried_along() -> None:
    collecting = Collecting((2, 2))
    gradients = collecting.gradients
    for _ in range(2):
        for name in NAMES:
            collecting.take(name, 1.0)
        collecting.reduce(all_reduce=False)
        gradients.forget_fired()
        assert collecting.grads() == dict.fromkeys(NAMES)
        assert gradients.has_pending
        assert not gradients.has_collected
        assert gradients.buffer_nbytes == gradients.send_nbytes // 2, "one shard of sums in fp32"
        assert [list(fired) for fired in (each.fired for each in gradients.buckets)] == [
            [1, 1, 1]
        ], "not assigned yet"
    (reduction,) = gradients.prepare(collecting.streams, collecting.pool, all_reduce=True)
    assert reduction.carry is not None
    pieces = [collecting.bucket.store.piece(reduction.carry, i) for i in range(len(NAMES))]
    assert set(torch.cat(pieces).tolist()) == {2.0}
    assert reduction.scale == 1 / 4
    assert not gradients.has_pending


# --- exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["held", "written", "under way", "partial"])
def test_reset_drops_what_is_in_no_gradient_yet(when: str) -> None:
    collecting = Collecting((2, 2))
    gradients = collecting.gradients
    collecting.take("a", 1.0, hold=when == "held")
    if when == "under way":
        collecting.start()
    elif when == "partial":
        collecting.reduce(all_reduce=False)
    gradients.reset(collecting.pool)
    assert not gradients.has_pending
    assert not gradients.is_reducing
    assert not gradients.needs_settling
    assert gradients.buffer_nbytes == 0
    assert [list(fired) for fired in (each.fired for each in gradients.buckets)] == [[0, 0, 0]]
    assert collecting.grads() == dict.fromkeys(NAMES)
    collecting.take("b", 1.0)
    assert collecting.send() == {"a": {0.0}, "b": {1.0}, "c": {0.0}}
