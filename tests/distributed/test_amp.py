"""`torch.autocast` and stock gradient scalers around sharded models."""

from __future__ import annotations

import contextlib
import copy
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

from allocated import peaks_of, start_counting
from models import CASES, Case
from parity import in_turns
from reference import (
    OPTIMIZERS,
    Differences,
    assert_within,
    full_grads,
    full_parameters,
    make_mesh,
    my_batch,
    rank_batch,
    shard,
    step_all,
)
from shardkit import MixedPrecisionPolicy, checkpoint_activations, fully_shard
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable


def mean_gradients(model: nn.Module, loss_of_rank: Callable[[int], Tensor]) -> None:
    """Leave in a plain model's ``.grad`` the mean over ranks, in the order that shardkit adds in.

    Gradients are computed rank by rank with the batch of one, so that what is rounded is rounded
    as on the rank itself: the result is exact.
    """
    world_size = dist.get_world_size()
    sums: dict[str, Tensor] = {}
    for rank in range(world_size):
        model.zero_grad()
        loss_of_rank(rank).backward()
        for name, param in model.named_parameters():
            sums[name] = sums[name] + param.grad if name in sums else param.grad
    for name, param in model.named_parameters():
        param.grad = sums[name] / world_size


# --- autocast -------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputes the forward of the module inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def make_checkpointed() -> nn.Module:
    model = CASES["gpt"].make()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Checkpointed(block)
    return model


AUTOCAST_CASES = {
    "mlp": CASES["mlp"],
    "gpt": CASES["gpt"],
    "checkpointed": Case(
        make_checkpointed,
        lambda model: [block.inner for block in model.blocks],
        CASES["gpt"].batch,
        CASES["gpt"].loss,
    ),
}


@pytest.mark.parametrize(
    ("name", "reshard_after_forward", "around_the_loop"),
    in_turns(AUTOCAST_CASES, [True, None], [False, True]),
)
@on_ranks(2)
def test_autocast_is_exact(
    name: str, around_the_loop: bool, reshard_after_forward: bool | None
) -> None:
    """Parameters and gradients stay fp32; each rank rounds as plain training on its batch does.

    Autocast is entered anew in every step or once around them all.
    """
    case = AUTOCAST_CASES[name]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = Differences()

    def autocast_loss(each: nn.Module, rank: int, step: int) -> Tensor:
        # Without the cache where autocast never ends: its copies would be those of the first step.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=not around_the_loop):
            return case.loss(each, rank_batch(case, rank, step))

    outer = (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        if around_the_loop
        else contextlib.nullcontext()
    )
    with outer:
        for step in range(5):
            loss = autocast_loss(model, dist.get_rank(), step)
            loss.backward()
            own = autocast_loss(plain, dist.get_rank(), step)
            differences.note("loss", loss.detach(), own.detach())
            mean_gradients(plain, lambda rank, step=step: autocast_loss(plain, rank, step))
            differences.note_grads(model, plain)
            step_all(optimizers)
    differences.note_parameters(model, plain)
    assert_within([differences], loss=0.0, grad=0.0, parameter=0.0)


def autocast_dtypes(policy: MixedPrecisionPolicy | None) -> list[torch.dtype]:
    """Return dtypes of: a layer's weight and output in forward, the model's output, gradients."""
    case = CASES["mlp"]
    options = {} if policy is None else {"mp_policy": policy}
    model = shard(case, case.make(), **options)
    seen: list[torch.dtype] = []
    layer = model.layers[1]
    layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.dtype))
    layer.register_forward_hook(lambda layer, _, output: seen.append(output.dtype))  # noqa: ARG005
    with torch.autocast("cpu", torch.bfloat16):
        output = model(my_batch(case, 0)[0])
    output.float().square().mean().backward()
    grads = {grad.dtype for grad in full_grads(model).values() if grad is not None}
    return [*seen, output.dtype, *grads]


def test_autocast_with_a_policy_and_without(spawn: Spawn) -> None:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    in_bf16 = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)
    in_fp16 = MixedPrecisionPolicy(param_dtype=fp16, reduce_dtype=fp32, output_dtype=fp32)
    # The hook sees what the layer returns after the policy's cast.
    assert spawn(autocast_dtypes, 2, None) == [[fp32, bf16, bf16, fp32]] * 2
    assert spawn(autocast_dtypes, 2, in_bf16) == [[bf16, bf16, bf16, fp32]] * 2
    assert spawn(autocast_dtypes, 2, in_fp16) == [[fp16, fp32, fp32, fp32]] * 2


@on_ranks(2)
def test_autocast_over_bf16_weights_is_exact() -> None:
    """The policy's bf16 weights need no cast by autocast; all else is as with autocast alone."""
    case = CASES["gpt"]
    plain = case.make()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    model = shard(case, copy.deepcopy(plain), mp_policy=policy)
    differences = Differences()
    losses = []
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    narrow = copy.deepcopy(plain).to(torch.bfloat16)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = case.loss(model, my_batch(case, step))
            with torch.no_grad():
                for name, value in full_parameters(model).items():
                    narrow.get_parameter(name).copy_(value)
            losses.append((loss.detach(), case.loss(narrow, my_batch(case, step)).detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for loss, expected in losses:
        differences.note("loss", loss, expected)
    assert_within([differences], loss=0.0)


# --- gradient scalers -----------------------------------------------------------------------------

OVERFLOW_STEP = 2


def train_scaled(mesh_shape: tuple[int, ...], bad_rank: int, clip: bool) -> tuple[typing.Any, ...]:
    """Train with a stock scaler; in one step the loss of one rank is infinite."""
    case = CASES["mlp"]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), make_mesh(mesh_shape))
    differences = Differences()
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    scaler, plain_scaler = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    scales, skipped = [], []

    def scaled_loss(each: nn.Module, rank: int, step: int, own: torch.amp.GradScaler) -> Tensor:
        loss = case.loss(each, rank_batch(case, rank, step))
        if step == OVERFLOW_STEP and rank == bad_rank:
            loss = loss * math.inf
        return own.scale(loss)

    for step in range(5):
        before = full_parameters(model)
        scaled_loss(model, dist.get_rank(), step, scaler).backward()
        mean_gradients(plain, lambda rank, step=step: scaled_loss(plain, rank, step, plain_scaler))
        for each, own, optimizer in zip(
            (model, plain), (scaler, plain_scaler), optimizers, strict=True
        ):
            if clip:
                own.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(each.parameters(), 0.05)
                if each is plain and step != OVERFLOW_STEP:
                    assert norm > 0.05, "nothing to clip"
            own.step(optimizer)
            own.update()
            optimizer.zero_grad()
        after = full_parameters(model)
        skipped.append(all(torch.equal(after[name], before[name]) for name in after))
        scales.append(scaler.get_scale())
    differences.note_parameters(model, plain)
    return differences, scales, skipped, plain_scaler.get_scale()


@pytest.mark.parametrize(
    ("bad_rank", "mesh_shape", "clip"),
    in_turns([0, 1, 3], [(2,), (2, 2)], [False, True]),
    ids=str,
)
def test_an_overflow_of_one_rank_skips_the_step_of_all(
    spawn: Spawn, mesh_shape: tuple[int, ...], bad_rank: int, clip: bool
) -> None:
    world_size = math.prod(mesh_shape)
    found = spawn(train_scaled, world_size, mesh_shape, bad_rank % world_size, clip)
    for _, scales, skipped, plain_scale in found:
        assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
        assert skipped == [False, False, True, False, False]
        assert plain_scale == 512.0
    # Clipping divides by a norm whose sum is taken in another order; with four ranks the mean too
    # is. Scales are powers of two and round nothing.
    assert_within([entry[0] for entry in found], parameter=1e-6)


@on_ranks(2)
def test_scaled_gradients_accumulate() -> None:
    """Scaled gradients of three micro-batches, unsynced but for the last."""
    case = CASES["mlp"]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    reference = OPTIMIZERS["sgd"](plain.parameters())
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        scaler.scale(case.loss(model, my_batch(case, micro)) / 3).backward()
    for micro in range(3):
        for rank in range(2):
            (case.loss(plain, rank_batch(case, rank, micro)) / 6).backward()
    scaler.unscale_(optimizer)
    differences = Differences()
    differences.note_grads(model, plain)
    scaler.step(optimizer)
    scaler.update()
    reference.step()
    differences.note_parameters(model, plain)
    assert_within([differences], grad=1e-6, parameter=1e-6)


SCALERS = {"torch's": torch.amp.GradScaler, "FSDP1's": ShardedGradScaler}


def scales_of_an_overflow_in_one_piece(mesh_shape: tuple[int, ...], scaler_of: str) -> list[float]:
    """Let what the last rank of each shard axis holds overflow; return scales, and steps taken."""
    case = CASES["mlp"]
    mesh = make_mesh(mesh_shape)
    model = shard(case, case.make(), mesh)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = SCALERS[scaler_of]("cpu", init_scale=1024.0)
    found = []
    for step in range(3):
        scaler.scale(case.loss(model, my_batch(case, step))).backward()
        if step == 1 and mesh.get_coordinate()[-1] == mesh_shape[-1] - 1:
            max((param.grad.to_local() for param in model.parameters()), key=len)[0] = math.inf
        before = full_parameters(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = full_parameters(model)
        found += [
            scaler.get_scale(),
            float(any((after[name] != before[name]).any() for name in after)),
        ]
    return found


@pytest.mark.parametrize("scaler_of", SCALERS)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_an_overflow_in_what_one_rank_holds_skips_the_step_of_all(
    spawn: Spawn, mesh_shape: tuple[int, ...], scaler_of: str
) -> None:
    expected = [1024.0, 1.0, 512.0, 0.0, 512.0, 1.0]
    world_size = math.prod(mesh_shape)
    for found in spawn(scales_of_an_overflow_in_one_piece, world_size, mesh_shape, scaler_of):
        assert found == expected


class WithPlainHead(nn.Module):
    """Half of it is to be sharded; the head, in another dtype, is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).double())


def scales_with_a_plain_head(mesh_shape: tuple[int, ...], bad_rank: int) -> list[float]:
    """Let a plain parameter's gradient overflow on one rank; return scales, and steps taken."""
    torch.manual_seed(0)
    model = WithPlainHead()
    fully_shard(model, make_mesh(mesh_shape), ignored_params=set(model.head.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for step in range(3):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if step == 1 and dist.get_rank() == bad_rank:
            model.head.weight.grad[0, 0] = math.inf
        before = model.head.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [scaler.get_scale(), float((model.head.weight != before).any())]
    return found


@pytest.mark.helpers
@pytest.mark.parametrize(("mesh_shape", "bad_rank"), [((2,), 1), ((2, 2), 3), ((2, 2), 0)])
def test_an_overflow_of_a_plain_parameter_is_one_on_all_ranks(
    spawn: Spawn, mesh_shape: tuple[int, ...], bad_rank: int
) -> None:
    expected = [1024.0, 1.0, 512.0, 0.0, 512.0, 1.0]
    for found in spawn(scales_with_a_plain_head, math.prod(mesh_shape), mesh_shape, bad_rank):
        assert found == expected


# --- memory ---------------------------------------------------------------------------------------

_WIDTH, _NUM_LAYERS = 512, 12
_LAYER_NBYTES = 4 * _WIDTH * _WIDTH


def most_nbytes_in_autocast(way: str) -> int:
    """Return the bytes that a forward of many layers takes at most in autocast."""
    start_counting()
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)]
    model = nn.Sequential(*(nn.Sequential(layer) for layer in layers))
    if way == "recomputed":
        checkpoint_activations(model, classes=nn.Linear)
    for layer in model:
        fully_shard(layer, make_mesh((2,)))
    fully_shard(model, make_mesh((2,)))
    x = torch.ones(1, _WIDTH)

    def forward() -> None:
        with torch.set_grad_enabled(way != "evaluated"), torch.autocast("cpu", torch.bfloat16):
            if way == "recomputed around groups":
                checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)
            else:
                model(x.clone().requires_grad_())

    forward()
    before = max(peaks_of(lambda: None))
    return max(peaks_of(forward)) - before


@pytest.mark.parametrize("way", ["evaluated", "recomputed", "recomputed around groups"])
def test_autocast_keeps_no_copies_of_weights_that_no_backward_reads(way: str, spawn: Spawn) -> None:
    for nbytes in spawn(most_nbytes_in_autocast, 2, way):
        assert nbytes < 4 * _LAYER_NBYTES  # All copies together are half of 12 layers.
