"""Sharded training against plain training on the concatenated batch."""

from __future__ import annotations

import copy
import itertools
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models import CASES
from parity import Ranks, Run, compare_training, on_meshes
from parity_cases import (
    ACCUMULATED,
    ADAMW_TOLERANCE,
    CLIPPED,
    TRAINING,
    accumulate,
    train_checkpointed,
    train_clipped,
    train_in_every_mode,
    train_sharded,
)
from reference import (
    OPTIMIZERS,
    SGD_TOLERANCE,
    STEPS,
    TRAINED,
    Differences,
    assert_within,
    full_parameters,
    shard,
    step_all,
    step_batches,
    train,
)
from shardkit import ShardedTensor, fully_shard
from workers import on_ranks

MESHES = ((2,), (4,), (2, 2))

# --- plain training -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@on_meshes(*MESHES)
def test_training_equals_plain_training(run: Run, name: str, optimizer: str) -> None:
    """Whatever `reshard_after_forward` is: the three ways are compared with one plain run."""
    found = run(train_in_every_mode, name, optimizer)
    for mode in (True, False, None):
        by_rank = [differences[mode] for differences in found]
        assert_within(by_rank, f"reshard_after_forward={mode}", **TRAINING[optimizer])


@pytest.mark.parametrize("name", ["tiny", "frozen", "unused", "tied"])
@on_meshes((1,), (3,), (4,), (2, 2))
def test_unusual_parameters_train_as_in_plain_training(run: Run, name: str) -> None:
    found = run(train_sharded, name, None, "sgd")
    assert_within(found, **TRAINING["sgd"])


@on_meshes((2,), (2, 2), xla=[(4,)])
def test_blocks_that_keep_their_inputs_only_train_as_others(run: Run) -> None:
    assert_within(run(train_checkpointed), **TRAINING["sgd"])


def train_in_float64(ranks: Ranks, name: str) -> Differences:
    torch.set_default_dtype(torch.float64)
    return train_sharded(ranks, name, None, "adamw")


@on_meshes((4,), (2, 2))
def test_training_in_float64_leaves_rounding_errors_only(run: Run) -> None:
    """An error that fp32 tolerances might hide is far above those of fp64."""
    assert_within(run(train_in_float64, "mlp"), loss=1e-12, grad=1e-12, parameter=1e-12)


@on_meshes((4,), (2, 2), xla=())  # XLA's gelu has constants in fp32: 5e-9 off.
def test_training_gpt_in_float64_leaves_rounding_errors_only(run: Run) -> None:
    assert_within(run(train_in_float64, "gpt"), loss=1e-12, grad=1e-12, parameter=1e-12)


def train_one_group(ranks: Ranks, name: str) -> Differences:
    case = CASES[name]
    plain = case.make()
    return compare_training(case, fully_shard(ranks.put(plain)), plain, ranks=ranks)


@on_meshes((2,))
def test_one_group_on_the_default_mesh(run: Run) -> None:
    assert_within(run(train_one_group, "gpt"), **TRAINED)


@pytest.mark.parametrize("mesh_shape", MESHES[1:], ids=str)
@on_ranks(4)
def test_a_mesh_of_torch_is_accepted(mesh_shape: tuple[int, ...]) -> None:
    case = CASES["mlp"]
    reference = case.make()
    mesh = dist.init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :]
    )
    assert_within(
        [compare_training(case, shard(case, copy.deepcopy(reference), mesh), reference)], **TRAINED
    )


@on_ranks(2)
def test_another_default_device_changes_nothing() -> None:
    """What ranks tell each other is memory of the host."""
    case = CASES["mlp"]
    plain = case.make()
    with torch.device("meta"):
        model = shard(case, copy.deepcopy(plain))
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = Differences()
    for batch, whole in step_batches(case, range(2)):
        for each in (model, plain):
            with torch.no_grad(), torch.device("meta"):
                for param in each.parameters():
                    param.mul_(0.5)
        with torch.device("meta"):
            with torch.no_grad():
                model(batch[0])
            case.loss(model, batch).backward()
        case.loss(plain, whole).backward()
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    assert_within([differences], grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def train_while_switching_reshard(ranks: Ranks) -> Differences:
    case = CASES["gpt"]
    reference = case.make()
    model = ranks.shard(case, reference)
    differences = Differences()
    optimizer, plain_optimizer = (
        OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)
    )
    for step, recurse in itertools.product(range(3), (True, False)):
        model.set_reshard_after_forward(step % 2 == 0, recurse=recurse)
        next_loss = train(case, model, optimizer, [ranks.batch(case, step)], ranks.end_step)
        next_expected = train(case, reference, plain_optimizer, [ranks.global_batch(case, step)])
        for _ in zip(next_loss, next_expected, strict=True):
            differences.note_grads(model, reference)
    differences.note_parameters(model, reference)
    return differences


@on_meshes((2,))
def test_resharding_after_forward_can_be_switched_between_steps(run: Run) -> None:
    assert_within(run(train_while_switching_reshard), grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


# --- accumulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", [None, "set_requires_gradient_sync"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@on_meshes((2,), (2, 2))
def test_micro_batches_add_up(run: Run, name: str, switch: str | None) -> None:
    assert_within(run(accumulate, name, switch), **ACCUMULATED)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@on_meshes((2, 2))
def test_partial_sums_of_micro_batches_add_up(run: Run, name: str) -> None:
    assert_within(run(accumulate, name, "set_requires_all_reduce"), **ACCUMULATED)


def switch_sync_of_the_root_only(ranks: Ranks) -> list[str]:
    case = CASES["mlp"]
    model = ranks.shard(case, case.make())
    model.set_requires_gradient_sync(False, recurse=False)
    case.loss(model, ranks.batch(case, 0)).backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


@on_meshes((2,))
def test_switching_sync_without_recurse_leaves_children_as_they_are(run: Run) -> None:
    """All parameters of this model belong to children."""
    assert not any(run(switch_sync_of_the_root_only))


# --- optimizers ---------------------------------------------------------------------------------


def decay_groups(model: nn.Module) -> list[dict[str, typing.Any]]:
    """Return two parameter groups: matrices with weight decay, all else without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def train_parameter_groups(ranks: Ranks, made: str) -> Differences:
    """Train with parameter groups, the optimizer being made before or after sharding."""
    case = CASES["gpt"]
    reference = case.make()
    model = ranks.put(reference)
    before = list(model.parameters())
    if made == "before":
        optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-3)
        shard(case, model, ranks.mesh)
    else:
        shard(case, model, ranks.mesh)
        optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-3)
    after = list(model.parameters())
    assert all(old is new for old, new in zip(before, after, strict=True)), (
        "parameters are the user's own"
    )
    assert all(isinstance(parameter, ShardedTensor) for parameter in before)
    in_optimizer = {
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    }
    assert in_optimizer == {id(parameter) for parameter in after}

    plain_optimizer = torch.optim.AdamW(decay_groups(reference), lr=1e-3)
    differences = Differences()
    batches = (ranks.batch(case, step) for step in range(STEPS))
    losses = train(case, model, optimizer, batches, ranks.end_step)
    expected = train(
        case, reference, plain_optimizer, (ranks.global_batch(case, step) for step in range(STEPS))
    )
    for _ in zip(losses, expected, strict=True):
        pass
    differences.note_parameters(model, reference)
    return differences


@pytest.mark.parametrize("made", ["before", "after"])
@on_meshes((2,))
def test_an_optimizer_made_before_or_after_sharding_keeps_its_groups(run: Run, made: str) -> None:
    assert_within(run(train_parameter_groups, made), parameter=ADAMW_TOLERANCE)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_meshes((4,), (2, 2))
def test_clipped_gradients_are_those_of_plain_training(run: Run, norm_type: float) -> None:
    assert_within(run(train_clipped, "mlp", norm_type), **CLIPPED)


# --- state dicts --------------------------------------------------------------------------------


def load_and_train(ranks: Ranks) -> Differences:
    """Load a plain model's state into another one, sharded, that has trained; train both on."""
    case = CASES["gpt"]
    plain, other = case.make(), case.make()
    model = ranks.shard(case, other)
    case.loss(model, ranks.batch(case, 7)).backward()
    model.zero_grad()
    model.load_state_dict(plain.state_dict())
    differences = Differences()
    differences.note_parameters(model, plain)
    assert differences == {"parameter": 0.0}
    differences = compare_training(case, model, plain, steps=3, ranks=ranks)
    other.load_state_dict(full_parameters(model), strict=False)  # No tied weight's second name.
    differences.note_parameters(model, other)
    return differences


@on_meshes((2,), (2, 2), xla=[(4,)])
def test_a_state_dict_is_loaded_and_trained_on(run: Run) -> None:
    assert_within(run(load_and_train), **TRAINED)
