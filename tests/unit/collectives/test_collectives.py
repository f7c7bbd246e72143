"""Exactly which collectives a step issues, in which order, and beside which computation.

In the lists ``gather``, ``reduce``, ``all-reduce`` and ``check`` start something, ``wait``,
``reduced`` and ``wait check`` wait for it.
"""

from __future__ import annotations

import typing

import pytest
import torch
from recorded import Recorded, fail
from step_lists import (
    BACKWARD,
    FIRST_FORWARD,
    FORWARD,
    KEPT_BACKWARD,
    REGATHERED_BACKWARD,
    RESHARDING,
    unreduced,
    with_all_reduce,
)
from torch.utils.checkpoint import checkpoint

if typing.TYPE_CHECKING:
    from collections.abc import Callable


# --- a step -------------------------------------------------------------------------------------


@RESHARDING
def test_first_step(*, reshard_after_forward: bool | None, backward: list[str]) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    assert recorded.step() == FIRST_FORWARD + backward


@RESHARDING
def test_later_steps(*, reshard_after_forward: bool | None, backward: list[str]) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    recorded.step()
    for seed in range(3):
        assert recorded.step(seed=seed) == FORWARD + backward


def test_elements_on_the_wire() -> None:
    """The whole padded bucket in each gather and reduction; 7 flags in the check."""
    recorded = Recorded()
    recorded.step()
    recorded.run().backward()
    log = recorded.log
    gathers = [16, 80, 144, 416, 144, 80]
    assert [numel for what, numel in log if what == "start all_gather"] == gathers
    assert [numel for what, numel in log if what == "wait all_gather"] == gathers
    reductions = [416, 144, 80, 16]
    assert [numel for what, numel in log if what == "start reduce_scatter"] == reductions
    assert [numel for what, numel in log if what == "wait reduce_scatter"] == reductions
    assert ("start check", 7 + 4) in log  # Each parameter, and two numbers with their negatives.


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4)])
def test_all_ranks_issue_the_same(mesh_shape: tuple[int, ...]) -> None:
    logs = []
    for rank in (0, 1, 3):
        recorded = Recorded(mesh_shape, rank=rank)
        logs.append([recorded.step() for _ in range(2)])
    assert logs[0] == logs[1] == logs[2]


def test_set_reshard_after_forward_holds_from_the_next_forward() -> None:
    recorded = Recorded()
    recorded.step()
    recorded.model.set_reshard_after_forward(False)
    assert recorded.step() == FORWARD + KEPT_BACKWARD
    recorded.model.set_reshard_after_forward(True)
    assert recorded.step() == FORWARD + REGATHERED_BACKWARD


def test_a_step_after_an_exception_is_a_usual_one() -> None:
    recorded = Recorded()
    recorded.step()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recorded.model(torch.ones(2, 5))
    assert recorded.read() == [*FORWARD[: FORWARD.index("forward 0")], "forward 0"]
    # The order is learnt anew; the models have been compared before.
    assert recorded.step() == ["wait 1", *FIRST_FORWARD[1:], *BACKWARD]
    assert recorded.step() == FORWARD + BACKWARD


@pytest.mark.parametrize("batch_nbytes", [0, 2048, 1 << 20])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_exception_in_backward_leaves_nothing_behind(
    batch_of: Callable[[int], None], batch_nbytes: int, layer: int
) -> None:
    """Neither memory, nor a gradient, nor a collective that was put off."""
    batch_of(batch_nbytes)
    recorded, untouched = Recorded(), Recorded()
    untouched.step()
    expected = untouched.grads()
    usual = untouched.step()
    recorded.step()
    optimizer = torch.optim.SGD(recorded.model.parameters())
    hook = recorded.model.layers[layer].linear.register_full_backward_pre_hook(fail)
    loss = recorded.run()
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward()
    hook.remove()
    optimizer.zero_grad()
    recorded.step()
    for mine, other in zip(recorded.grads(), expected, strict=True):
        assert torch.equal(mine, other)
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    assert recorded.step() == usual


# --- passes without backward --------------------------------------------------------------------


COMPARING = ["start check", "wait check"]
"""What ranks wrote is compared in the first, second, fourth, ... of these passes that gathers."""


def test_a_pass_without_grad_gathers_once_and_keeps_nothing() -> None:
    recorded = Recorded(reshard_after_forward=True)
    recorded.step()
    for compares in (True, True, False, True):
        with torch.no_grad():
            recorded.run()
        assert recorded.read() == [*(COMPARING if compares else ()), *FORWARD]
        assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    assert recorded.step() == FORWARD + REGATHERED_BACKWARD


def test_a_kept_root_is_gathered_once_for_several_passes_without_grad() -> None:
    """Until the optimizer changes it."""
    recorded = Recorded()
    recorded.step()
    without_root = FORWARD[2:]
    with torch.no_grad():
        recorded.run()
        assert recorded.read() == COMPARING + FORWARD
        recorded.run()
        assert recorded.read() == COMPARING + without_root
        recorded.model.scale.mul_(2)
        recorded.run()
        assert recorded.read() == FORWARD
    assert recorded.step() == without_root + BACKWARD


def test_inference_mode_is_a_pass_without_grad() -> None:
    recorded = Recorded(reshard_after_forward=True)
    with torch.inference_mode():
        recorded.run()
    assert recorded.read() == FIRST_FORWARD
    assert recorded.step() == FORWARD + REGATHERED_BACKWARD


# --- gradient accumulation ----------------------------------------------------------------------


@RESHARDING
def test_micro_batches_without_sync_reduce_nothing(
    *, reshard_after_forward: bool | None, backward: list[str]
) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    recorded.step()
    recorded.model.zero_grad()
    recorded.model.set_requires_gradient_sync(False)
    for seed in range(2):
        assert recorded.step(seed=seed) == FORWARD + unreduced(backward)
        assert all(grad is None for grad in recorded.grads())
    recorded.model.set_requires_gradient_sync(True)
    assert recorded.step(seed=2) == FORWARD + backward


def test_unsynced_gradients_are_added_up() -> None:
    accumulated, synced = Recorded(), Recorded()
    for seed in range(3):
        accumulated.model.set_requires_gradient_sync(seed == 2)
        accumulated.step(seed=seed)
        synced.step(seed=seed)
    for mine, other in zip(accumulated.grads(), synced.grads(), strict=True):
        assert torch.equal(mine, other)


def test_unsynced_gradients_are_counted_in_the_memory() -> None:
    recorded = Recorded()
    recorded.model.set_requires_gradient_sync(False)
    for _ in range(2):
        recorded.step()
        nbytes = recorded.model.memory_stats()["unsynced_grad_nbytes"]
        assert nbytes == 4 * (16 + 80 + 144 + 416)
    recorded.model.set_requires_gradient_sync(True)
    recorded.step()
    assert recorded.model.memory_stats()["unsynced_grad_nbytes"] == 0


def test_sync_of_one_module_only() -> None:
    """``recurse=False``: the modules in it keep what they have."""
    recorded = Recorded()
    recorded.model.set_requires_gradient_sync(False)
    recorded.model.layers[1].set_requires_gradient_sync(True, recurse=False)
    words = recorded.step()
    assert [word for word in words if word.startswith("reduce ")] == ["reduce 1"]
    has_grad = [grad is not None for grad in recorded.grads()]
    assert has_grad == [False, False, False, True, True, False, False]
    recorded.model.set_requires_gradient_sync(True, recurse=False)
    words = recorded.step()
    assert [word for word in words if word.startswith("reduce ")] == ["reduce 1", "reduce root"]


# --- hybrid sharding ----------------------------------------------------------------------------


@RESHARDING
def test_hybrid_sharding_adds_an_all_reduce_of_each_shard(
    *, reshard_after_forward: bool | None, backward: list[str]
) -> None:
    recorded = Recorded((2, 4), reshard_after_forward=reshard_after_forward)
    first = recorded.step()
    assert first == ["all_reduce_max", *FIRST_FORWARD, *with_all_reduce(backward)]  # on both axes
    assert recorded.step() == FORWARD + with_all_reduce(backward)
    recorded.run().backward()
    shards = [numel for what, numel in recorded.log if what == "start all_reduce"]
    assert shards == [104, 36, 20, 4]


def test_hybrid_sharding_without_all_reduce_keeps_partial_sums() -> None:
    recorded = Recorded((2, 4))
    recorded.step()
    recorded.model.zero_grad()
    recorded.model.set_requires_all_reduce(False)
    for _ in range(2):
        assert recorded.step() == FORWARD + BACKWARD
        assert all(grad is None for grad in recorded.grads())
        partial_nbytes = recorded.model.memory_stats()["unsynced_grad_nbytes"]
        assert partial_nbytes == recorded.model.memory_stats()["shard_nbytes"] == 4 * 164
    recorded.model.set_requires_all_reduce(True)
    assert recorded.step() == FORWARD + with_all_reduce(BACKWARD)
    assert not any(grad is None for grad in recorded.grads())
    assert recorded.model.memory_stats()["unsynced_grad_nbytes"] == 0


@pytest.mark.parametrize("is_last", [True, False])
def test_hybrid_sharding_waits_for_reductions_in_the_order_of_their_start(*, is_last: bool) -> None:
    """Each wait is an all-reduce, of which ranks may have different numbers before them.

    The gradients of layer 0 come twice, a second time while three reductions are under way.
    """
    recorded = Recorded((2, 4))
    recorded.model.set_reduce_scatter_max_input_buffers(3)
    recorded.model.set_is_last_backward(is_last)
    layers = recorded.model.layers

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(layers[0], x, use_reentrant=True))
        return layers[2](layers[1](x)) * recorded.model.scale.sum()

    recorded.model.forward = forward
    for _ in range(2):
        words = recorded.step()
        if not is_last:
            recorded.model.set_is_last_backward(True)
            words += recorded.step()
        started = [word.removeprefix("reduce ") for word in words if word.startswith("reduce ")]
        finished = [word.removeprefix("reduced ") for word in words if word.startswith("reduced ")]
        assert started[:5] == ["2", "1", "root", "0", "0"]
        assert finished == started


def test_hybrid_sharding_without_sync_communicates_on_no_axis() -> None:
    recorded = Recorded((2, 4))
    recorded.step()
    recorded.model.set_requires_gradient_sync(False)
    assert recorded.step() == FORWARD + unreduced(BACKWARD)


def test_a_replicate_axis_of_one_rank_is_not_used() -> None:
    recorded = Recorded((1, 4))
    assert recorded.step() == FIRST_FORWARD + BACKWARD
    assert recorded.step() == FORWARD + BACKWARD
