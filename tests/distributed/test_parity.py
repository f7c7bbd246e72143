"""Sharded training against plain training on the concatenated batch."""

from __future__ import annotations

import copy
import itertools
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models import CASES, Case
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    SGD_TOLERANCE,
    STEPS,
    Differences,
    assert_within,
    compare_training,
    full_parameters,
    global_batch,
    make_mesh,
    my_batch,
    rank_batch,
    shard,
    train,
)
from shardkit import MixedPrecisionPolicy, ShardedTensor, fully_shard

Spawn = typing.Callable[..., list[typing.Any]]

MESHES = ((2,), (4,), (2, 2))

# Adam divides the gradient by its own size, so where that is small its rounding error counts for
# more.
ADAMW_TOLERANCE = 2e-5
TOLERANCES = {"sgd": SGD_TOLERANCE, "adamw": ADAMW_TOLERANCE}


def world_size_of(mesh_shape: tuple[int, ...]) -> int:
    return torch.Size(mesh_shape).numel()


# --- plain training -----------------------------------------------------------------------------


def train_sharded(
    name: str, mesh_shape: tuple[int, ...], reshard_after_forward: bool | None, optimizer: str
) -> Differences:
    case = CASES[name]
    reference = case.make()
    model = shard(
        case,
        copy.deepcopy(reference),
        make_mesh(mesh_shape),
        reshard_after_forward=reshard_after_forward,
    )
    return compare_training(case, model, reference, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_training_equals_plain_training(
    spawn: Spawn,
    name: str,
    mesh_shape: tuple[int, ...],
    reshard_after_forward: bool | None,
    optimizer: str,
) -> None:
    found = spawn(
        train_sharded, world_size_of(mesh_shape), name, mesh_shape, reshard_after_forward, optimizer
    )
    # Gradients are compared along the whole run: those of late steps belong to parameters that
    # already differ.
    tolerance = TOLERANCES[optimizer]
    assert_within(found, loss=max(LOSS_TOLERANCE, tolerance), grad=tolerance, parameter=tolerance)


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["tiny", "frozen", "unused", "tied"])
def test_unusual_parameters_train_as_in_plain_training(
    spawn: Spawn, name: str, mesh_shape: tuple[int, ...]
) -> None:
    found = spawn(train_sharded, world_size_of(mesh_shape), name, mesh_shape, None, "sgd")
    assert_within(found, loss=LOSS_TOLERANCE, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def train_in_float64(name: str, mesh_shape: tuple[int, ...]) -> Differences:
    torch.set_default_dtype(torch.float64)
    return train_sharded(name, mesh_shape, None, "adamw")


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_training_in_float64_leaves_rounding_errors_only(
    spawn: Spawn, name: str, mesh_shape: tuple[int, ...]
) -> None:
    """An error that fp32 tolerances might hide is far above those of fp64."""
    found = spawn(train_in_float64, 4, name, mesh_shape)
    assert_within(found, loss=1e-12, grad=1e-12, parameter=1e-12)


def train_one_group(name: str) -> Differences:
    case = CASES[name]
    reference = case.make()
    return compare_training(case, fully_shard(copy.deepcopy(reference)), reference)


def test_one_group_on_the_default_mesh(spawn: Spawn) -> None:
    assert_within(
        spawn(train_one_group, 2, "gpt"),
        loss=LOSS_TOLERANCE,
        grad=SGD_TOLERANCE,
        parameter=SGD_TOLERANCE,
    )


def train_on_a_mesh_of_torch(mesh_shape: tuple[int, ...]) -> Differences:
    case = CASES["mlp"]
    reference = case.make()
    mesh = dist.init_device_mesh(
        "cpu", mesh_shape, mesh_dim_names=("outer", "inner")[-len(mesh_shape) :]
    )
    return compare_training(case, shard(case, copy.deepcopy(reference), mesh), reference)


@pytest.mark.parametrize("mesh_shape", MESHES[1:], ids=str)
def test_a_mesh_of_torch_is_accepted(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    found = spawn(train_on_a_mesh_of_torch, 4, mesh_shape)
    assert_within(found, loss=LOSS_TOLERANCE, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def train_while_switching_reshard() -> Differences:
    case = CASES["gpt"]
    reference = case.make()
    model = shard(case, copy.deepcopy(reference))
    differences = Differences()
    optimizer, plain_optimizer = (
        OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)
    )
    for step, recurse in itertools.product(range(3), (True, False)):
        model.set_reshard_after_forward(step % 2 == 0, recurse=recurse)
        next_loss = train(case, model, optimizer, [my_batch(case, step)])
        next_expected = train(case, reference, plain_optimizer, [global_batch(case, step)])
        for _ in zip(next_loss, next_expected, strict=True):
            differences.note_grads(model, reference)
    differences.note_parameters(model, reference)
    return differences


def test_resharding_after_forward_can_be_switched_between_steps(spawn: Spawn) -> None:
    assert_within(
        spawn(train_while_switching_reshard, 2), grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE
    )


# --- accumulation -------------------------------------------------------------------------------


def accumulate(name: str, mesh_shape: tuple[int, ...], switch: str | None) -> Differences:
    """Train with three micro-batches per step.

    Args:
        name: The case.
        mesh_shape: The mesh.
        switch: The method that turns communication off for all micro-batches but the last; None:
            none is.
    """
    case, micro_batches = CASES[name], 3
    reference = case.make()
    model = shard(case, copy.deepcopy(reference), make_mesh(mesh_shape))
    optimizer, plain_optimizer = (
        OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)
    )
    differences = Differences()
    for step in range(4):
        for micro in range(micro_batches):
            if switch is not None:
                getattr(model, switch)(micro == micro_batches - 1)
            number = step * micro_batches + micro
            (case.loss(model, my_batch(case, number)) / micro_batches).backward()
            (case.loss(reference, global_batch(case, number)) / micro_batches).backward()
            if switch is None:
                differences.note_grads(model, reference)
            elif micro == 0:
                assert all(parameter.grad is None for parameter in model.parameters()), (
                    "not yet averaged"
                )
        differences.note_grads(model, reference)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    differences.note_parameters(model, reference)
    return differences


@pytest.mark.parametrize(
    ("mesh_shape", "switch"),
    [
        ((2,), None),
        ((2,), "set_requires_gradient_sync"),
        ((2, 2), None),
        ((2, 2), "set_requires_gradient_sync"),
        ((2, 2), "set_requires_all_reduce"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_micro_batches_add_up(
    spawn: Spawn, name: str, mesh_shape: tuple[int, ...], switch: str | None
) -> None:
    found = spawn(accumulate, world_size_of(mesh_shape), name, mesh_shape, switch)
    assert_within(found, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def switch_sync_of_the_root_only() -> list[str]:
    case = CASES["mlp"]
    model = shard(case, case.make())
    model.set_requires_gradient_sync(False, recurse=False)
    case.loss(model, my_batch(case, 0)).backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_switching_sync_without_recurse_leaves_children_as_they_are(spawn: Spawn) -> None:
    """All parameters of this model belong to children."""
    assert spawn(switch_sync_of_the_root_only, 2) == [[], []]


# --- optimizers ---------------------------------------------------------------------------------


def decay_groups(model: nn.Module) -> list[dict[str, typing.Any]]:
    """Return two parameter groups: matrices with weight decay, all else without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def train_parameter_groups(made: str) -> Differences:
    """Train with parameter groups, the optimizer being made before or after sharding."""
    case = CASES["gpt"]
    reference = case.make()
    model = copy.deepcopy(reference)
    before = list(model.parameters())
    if made == "before":
        optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-3)
        shard(case, model)
    else:
        shard(case, model)
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
    losses = train(case, model, optimizer, (my_batch(case, step) for step in range(STEPS)))
    expected = train(
        case, reference, plain_optimizer, (global_batch(case, step) for step in range(STEPS))
    )
    for _ in zip(losses, expected, strict=True):
        pass
    differences.note_parameters(model, reference)
    return differences


@pytest.mark.parametrize("made", ["before", "after"])
def test_an_optimizer_made_before_or_after_sharding_keeps_its_groups(
    spawn: Spawn, made: str
) -> None:
    assert_within(spawn(train_parameter_groups, 2, made), parameter=ADAMW_TOLERANCE)


# --- mixed precision ----------------------------------------------------------------------------


def policy_step(
    case: Case, master: nn.Module, policy: MixedPrecisionPolicy, step: int
) -> list[Tensor]:
    """Put into the fp32 ``master`` the gradients that the policy means, of all ranks' batches.

    A rank computes on a copy of the parameters in ``param_dtype``. Its gradients are cast to
    ``reduce_dtype``, then summed in fp32 and divided by the number of ranks.

    Returns:
        The loss of each rank.
    """
    world_size = dist.get_world_size()
    reduce_dtype = policy.reduce_dtype or policy.param_dtype
    sums = [torch.zeros_like(parameter) for parameter in master.parameters()]
    losses = []
    for rank in range(world_size):
        compute = copy.deepcopy(master).to(policy.param_dtype)
        x, y = rank_batch(case, rank, step)
        if policy.cast_forward_inputs and x.is_floating_point():
            x = x.to(policy.param_dtype)
        loss = case.loss(compute, (x, y))
        loss.backward()
        losses.append(loss.detach())
        for total, parameter in zip(sums, compute.parameters(), strict=True):
            total.add_(parameter.grad.to(reduce_dtype).float())
    for parameter, total in zip(master.parameters(), sums, strict=True):
        parameter.grad = total / world_size
    return losses


def train_mixed_precision(
    name: str, mesh_shape: tuple[int, ...], reduce_dtype: torch.dtype | None
) -> Differences:
    """Compare single steps from equal parameters: another bf16 rounding is 2**-9 off at once."""
    case = CASES[name]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    reference = case.make()
    model = shard(case, copy.deepcopy(reference), make_mesh(mesh_shape), mp_policy=policy)
    optimizer, plain_optimizer = (
        OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)
    )
    differences = Differences()
    for step in range(STEPS):
        reference.load_state_dict(
            full_parameters(model), strict=False
        )  # No tied weight's second name.
        expected = policy_step(case, reference, policy, step)
        for loss in train(case, model, optimizer, [my_batch(case, step)]):
            differences.note("loss", loss, expected[dist.get_rank()])
            differences.note_grads(model, reference)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        differences.note_parameters(model, reference)
    return differences


# Casts are exact, and so are fp32 sums of bf16 numbers in any order, unless they differ by 2**16:
# then the last bits of a gradient below 0.01 may.
MIXED_TOLERANCES = {"loss": 0.0, "grad": 1e-9, "parameter": 1e-7}


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_bf16_compute_with_fp32_reduction(
    spawn: Spawn, name: str, mesh_shape: tuple[int, ...]
) -> None:
    found = spawn(train_mixed_precision, world_size_of(mesh_shape), name, mesh_shape, torch.float32)
    assert_within(found, **MIXED_TOLERANCES)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("mesh_shape", [(2,), (4,)], ids=str)
def test_bf16_reduction_sums_in_fp32(
    spawn: Spawn, mesh_shape: tuple[int, ...], reduce_dtype: torch.dtype | None
) -> None:
    """None means ``param_dtype``."""
    found = spawn(train_mixed_precision, world_size_of(mesh_shape), "gpt", mesh_shape, reduce_dtype)
    assert_within(found, **MIXED_TOLERANCES)


class DtypeProbe(nn.Module):
    """Records the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.dtype, self.linear.weight.dtype, self.offset.dtype)
        return self.linear(x.to(self.linear.weight.dtype)) + self.offset.to(
            self.linear.weight.dtype
        )


def observed_dtypes(policy: MixedPrecisionPolicy) -> list[torch.dtype]:
    """Return the dtypes of forward's input, weight, buffer, its output, the shard, its gradient."""
    model = fully_shard(DtypeProbe(), mp_policy=policy)
    output = model(torch.ones(2, 4))
    output.float().sum().backward()
    weight = model.linear.weight
    return [*model.seen, output.dtype, weight.dtype, weight.grad.dtype]


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (MixedPrecisionPolicy(), [FP32] * 6),
        (MixedPrecisionPolicy(param_dtype=BF16), [BF16, BF16, FP32, BF16, FP32, FP32]),
        (
            MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32),
            [BF16, BF16, FP32, FP32, FP32, FP32],
        ),
        (
            MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16),
            [BF16, BF16, BF16, BF16, FP32, FP32],
        ),
        (
            MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),
            [FP32, BF16, FP32, BF16, FP32, FP32],
        ),
        (MixedPrecisionPolicy(output_dtype=FP16), [FP32, FP32, FP32, FP16, FP32, FP32]),
    ],
    ids=["default", "param", "output", "buffer", "no-input-cast", "output-only"],
)
def test_each_dtype_of_the_policy_is_where_it_belongs(
    spawn: Spawn, policy: MixedPrecisionPolicy, expected: list[torch.dtype]
) -> None:
    assert spawn(observed_dtypes, 2, policy) == [expected, expected]


# --- DDP ----------------------------------------------------------------------------------------


def train_beside_ddp(mesh_shape: tuple[int, ...]) -> Differences:
    """Train with statistics per rank, as in DDP without broadcast of buffers."""
    case = CASES["conv"]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), make_mesh(mesh_shape))
    peer = DistributedDataParallel(plain, broadcast_buffers=False)
    batches = [my_batch(case, step) for step in range(STEPS)]
    differences = Differences()
    runs = (
        train(case, each, OPTIMIZERS["sgd"](each.parameters()), batches) for each in (model, peer)
    )
    for loss, expected in zip(*runs, strict=True):
        differences.note("loss", loss, expected)
        differences.note_grads(model, plain)
    differences.note_parameters(model, plain)
    differences.note_all("buffer", dict(model.named_buffers()), dict(plain.named_buffers()))
    return differences


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_batch_normalization_trains_as_in_ddp(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    found = spawn(train_beside_ddp, world_size_of(mesh_shape), mesh_shape)
    # Only the order of the sum over ranks differs, and with it the parameters that later batches
    # see.
    assert_within(
        found,
        loss=LOSS_TOLERANCE,
        grad=SGD_TOLERANCE,
        parameter=SGD_TOLERANCE,
        buffer=SGD_TOLERANCE,
    )
