"""Collectives of frozen and unused parameters, of buckets, small groups and recomputation."""

from __future__ import annotations

import typing

import pytest
import torch
from recorded import MLP, Recorded, listed
from step_lists import (
    BACKWARD,
    FIRST_FORWARD,
    FORWARD,
    RESHARDING,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable


# --- frozen parameters --------------------------------------------------------------------------


def freeze(index: int) -> Callable[[MLP], object]:
    return lambda model: model.layers[index].requires_grad_(requires_grad=False)


def test_a_frozen_first_layer_is_out_of_backward() -> None:
    recorded = Recorded(prepare=freeze(0))
    recorded.step()
    assert recorded.step() == FORWARD + listed("""
        backward 2, gather 1, reduce 2,
        wait 1, backward 1, reduced 2, reduce 1,
        reduced 1, reduce root,
        start check, reduced root, wait check,
    """)


def test_a_frozen_layer_in_the_middle_is_gathered_for_backward_and_not_reduced() -> None:
    recorded = Recorded(prepare=freeze(1))
    recorded.step()
    assert recorded.step() == FORWARD + listed("""
        backward 2, gather 1, reduce 2,
        wait 1, gather 0, backward 1,
        wait 0, backward 0, reduced 2, reduce 0,
        reduced 0, reduce root,
        start check, reduced root, wait check,
    """)
    has_grad = [grad is not None for grad in recorded.grads()]
    assert has_grad == [True, True, True, False, False, True, True]


def test_freezing_between_steps_takes_effect() -> None:
    recorded = Recorded()
    recorded.step()
    recorded.model.zero_grad()
    recorded.model.layers[1].requires_grad_(requires_grad=False)
    words = recorded.step()
    reductions = [word for word in words if word.startswith("reduce ")]
    assert reductions == ["reduce 2", "reduce 0", "reduce root"]
    recorded.model.layers[1].requires_grad_(requires_grad=True)
    assert recorded.step() == FORWARD + BACKWARD


def test_an_entirely_frozen_model_reduces_and_checks_nothing() -> None:
    recorded = Recorded(prepare=lambda model: model.requires_grad_(requires_grad=False))
    recorded.run()
    assert recorded.read() == FIRST_FORWARD
    recorded.run()
    assert recorded.read() == FORWARD[2:]  # the root is kept and has not changed


# --- unused parameters --------------------------------------------------------------------------


def add_unused(model: MLP) -> None:
    """Give every group parameters that no forward uses, without elements, so that sizes stay."""
    for module in (model, *model.layers):
        for index in range(3):
            module.register_parameter(f"unused{index}", nn.Parameter(torch.empty(0)))


@RESHARDING
def test_ranks_that_use_fewer_parameters_issue_the_same(
    *, reshard_after_forward: bool | None, backward: list[str]
) -> None:
    """What a rank waits for before it prefetches or reduces must not change the order."""
    recorded = Recorded(prepare=add_unused, reshard_after_forward=reshard_after_forward)
    assert recorded.step() == FIRST_FORWARD + backward
    assert recorded.step() == FORWARD + backward
    assert recorded.model.memory_stats()["unsharded_nbytes"] == 0
    has_grad = {name: p.grad is not None for name, p in recorded.model.named_parameters()}
    assert has_grad == {name: "unused" not in name for name in has_grad}


# --- buckets ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """One layer's worth of parameters of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(6, 6))
        self.narrow = nn.Parameter(torch.randn(10).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(21), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.single).sum() * self.narrow.sum() * self.frozen.sum()


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_other_storage_dtypes_or_frozen_are_buckets_of_their_own(
    param_dtype: torch.dtype,
) -> None:
    """Each is cut and padded by itself; the log adds them up. Frozen ones are not reduced."""
    mesh, log = recording_mesh((4,))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = fully_shard(Mixed(), mesh, policy)
    single, half, frozen = (48, 32, 32) if param_dtype == torch.float32 else (64, 32, 32)
    for _ in range(2):
        log.clear()
        model(torch.ones(2, 6)).backward()
        assert [entry for entry in log if entry[0] != "all_reduce_max"] == [
            ("start all_gather", single + half + frozen),
            ("wait all_gather", single + half + frozen),
            ("start reduce_scatter", single + half),
            ("start check", 3 + 4),
            ("wait reduce_scatter", single + half),
            ("wait check", 3 + 4),
        ]
    assert model.single.grad.dtype == torch.float32
    assert model.narrow.grad.dtype == torch.bfloat16
    assert model.frozen.grad is None


# --- small groups travel together ---------------------------------------------------------------


def test_small_groups_share_gathers_and_reductions(batch_of: Callable[[int], None]) -> None:
    """All of this model is small: one gather a pass besides the root's, one reduction."""
    batch_of(1 << 20)
    recorded = Recorded()
    recorded.step()
    words = recorded.step()
    assert [word for word in words if word.split()[0] in ("gather", "reduce", "start")] == [
        "gather root",
        "gather 0+1+2",
        "gather 0+1",
        "reduce root+0+1+2",
        "start check",
    ]


def test_sharing_changes_no_gradient(batch_of: Callable[[int], None]) -> None:
    """Neither of several steps, nor of unsynced ones, nor on two axes."""
    for mesh_shape in ((4,), (2, 4)):
        grads = []
        for nbytes in (0, 2048, 1 << 20):
            batch_of(nbytes)
            recorded = Recorded(mesh_shape)
            for seed in range(4):
                recorded.model.set_requires_gradient_sync(seed != 2)
                recorded.step(seed=seed)
            grads.append(recorded.grads())
        for other in grads[1:]:
            for mine, theirs in zip(grads[0], other, strict=True):
                assert torch.equal(mine, theirs)


def test_sharing_leaves_nothing_unsharded(batch_of: Callable[[int], None]) -> None:
    batch_of(2048)  # layers 0 and 1 together, layer 2 alone
    recorded = Recorded()
    for seed in range(3):
        recorded.run(seed=seed).backward()
        assert recorded.model.memory_stats()["unsharded_nbytes"] == 0


# --- activation checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_communicates_nothing_more(*, use_reentrant: bool) -> None:
    """Each layer is gathered for its recomputation, and still there for its backward."""
    recorded = Recorded(reshard_after_forward=True)
    plain = [recorded.step() for _ in range(2)][-1]
    checkpointed = Recorded(reshard_after_forward=True)
    layers = checkpointed.model.layers

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()  # Without it reentrant checkpointing gives layer 0 no gradient.
        for layer in layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=use_reentrant))
        return x * checkpointed.model.scale.sum()

    checkpointed.model.forward = forward
    for _ in range(2):
        checkpointed.log.clear()
        checkpointed.run().backward()
        words = checkpointed.read()
    for verb in ("gather ", "reduce "):
        issued = sorted(word for word in words if word.startswith(verb))
        assert issued == sorted(word for word in plain if word.startswith(verb))
    for mine, other in zip(checkpointed.grads(), recorded.grads(), strict=True):
        assert torch.equal(mine, other)
