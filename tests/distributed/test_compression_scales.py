"""PowerSGD under loss scales and autocast, with unused parameters, and what dtypes travel."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from test_compression import Counting, Matrix, slopes
from torch import Tensor, nn

import shardkit.checkpoint
from reference import (
    make_mesh,
)
from shardkit import GradientPiece, MixedPrecisionPolicy, StateError
from shardkit.compression import PowerSGD, compress_gradients
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


pytestmark = pytest.mark.helpers


class Two(nn.Module):
    """Two matrices whose gradients are what is passed; None: not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Matrix(), Matrix()

    def forward(self, first: Tensor | None, second: Tensor | None) -> Tensor:
        result = torch.zeros(())
        for matrix, slope in ((self.first, first), (self.second, second)):
            out = matrix(torch.ones(12, 10) if slope is None else slope)  # All layers run.
            result = result if slope is None else result + out
        return result


def two_matrices(mesh: tuple[int, ...], *, groups: bool) -> tuple[typing.Any, PowerSGD]:
    model: typing.Any = Two()
    if groups:
        for layer in (model.first, model.second):
            shardkit.fully_shard(layer, make_mesh(mesh))
    shardkit.fully_shard(model, make_mesh(mesh))
    hook = PowerSGD(1, start_after=0, min_compression_rate=1.0)
    compress_gradients(model, hook)
    return model, hook


def both_slopes(step: int) -> tuple[Tensor, Tensor]:
    return slopes(step, dist.get_rank()), slopes(step, 10 + dist.get_rank())


def take_gradients(model: nn.Module) -> list[Tensor | None]:
    grads = [p.grad if p.grad is None else p.grad.full_tensor().clone() for p in model.parameters()]
    model.zero_grad()
    return grads


def scaled_gradients(
    mesh: tuple[int, ...], options: dict[str, typing.Any], overflows: Sequence[int], micros: int
) -> None:
    """Gradients are those of a run without scaler that never saw the skipped steps."""
    model, hook = two_matrices(mesh, groups=True)
    plain, _ = two_matrices(mesh, groups=True)
    scaler = torch.amp.GradScaler("cpu", **options)
    hook.set_loss_scale(scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scales = set()
    for step in range(7):
        scales.add(scaler.get_scale())
        for micro in range(micros):
            slope, other = both_slopes(10 * step + micro)
            if step not in overflows:
                plain(slope, other).backward()
            elif micro == micros - 1 and dist.get_rank() == 1:
                other[-1, -1] = float("inf")
            scaler.scale(model(slope, other)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        grads, expected = take_gradients(model), take_gradients(plain)
        if step not in overflows:
            for grad, wanted in zip(grads, expected, strict=True):
                assert torch.allclose(grad, wanted, atol=1e-4), step
    assert len(scales) > 1
    assert hook.state_dict()["error"]["first.weight"].full_tensor().norm() > 0.1


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("overflows", [(), (0,), (2, 3)], ids=str)
def test_a_loss_scale_that_changes(spawn: Spawn, overflows: tuple[int, ...], micros: int) -> None:
    options = {"init_scale": 1024.0, "growth_interval": 2}
    spawn(scaled_gradients, 2, (2, 1), options, overflows, micros)


def test_a_loss_scale_with_shards(spawn: Spawn) -> None:
    options = {"init_scale": 1024.0, "growth_interval": 1}
    spawn(scaled_gradients, 4, (2, 2), options, (2,), 1)


@on_ranks(2)
def test_a_loss_scale_that_is_a_number() -> None:
    model, hook = two_matrices((2, 1), groups=True)
    plain, _ = two_matrices((2, 1), groups=True)
    for step, scale in enumerate((1024.0, 1024, 1.0, 1.0)):
        hook.set_loss_scale(scale)
        (model(*both_slopes(step)) * scale).backward()
        plain(*both_slopes(step)).backward()
        for grad, wanted in zip(take_gradients(model), take_gradients(plain), strict=True):
            assert grad is not None
            assert torch.allclose(grad / scale, wanted, atol=1e-4), step
    hook.drop_errors()
    assert all(not each.full_tensor().any() for each in hook.state_dict()["error"].values())
    for scale in (0.0, float("inf"), float("nan"), None):
        with pytest.raises(StateError, match="takes a GradScaler, or a finite number above 0, got"):
            hook.set_loss_scale(scale)


def leave_unused(mesh: tuple[int, ...], groups: bool, users: Sequence[int]) -> None:
    """In the second step `users` alone use the second matrix."""
    model, hook = two_matrices(mesh, groups=groups)
    plain, _ = two_matrices(mesh, groups=groups)
    for step in range(4):
        slope, other = both_slopes(step)
        if step == 1:
            before = hook.state_dict()["error"]["second.weight"].full_tensor()
            is_user = dist.get_rank() in users
            model(slope, other if is_user else None).backward()
            if users:
                plain(slope, other if is_user else torch.zeros_like(other)).backward()
            else:
                assert model.second.weight.grad is None
                after = hook.state_dict()["error"]["second.weight"].full_tensor()
                assert before.norm() > 0.1
                assert torch.allclose(before, after, atol=1e-5)
                plain(slope, None).backward()
                plain.second.weight.grad = None
        else:
            model(slope, other).backward()
            plain(slope, other).backward()
        grads, expected = take_gradients(model), take_gradients(plain)
        for grad, wanted in zip(grads, expected, strict=True):
            assert (grad is None) == (wanted is None)
            assert grad is None or torch.allclose(grad, wanted, atol=1e-4), step
    factors = hook.state_dict()["second_factors"]["second.weight"]
    assert all(factor.norm() > 0 for factor in factors.values())


@pytest.mark.parametrize("users", [(), (1,)], ids=str)
@pytest.mark.parametrize("groups", [False, True])
def test_errors_of_what_nobody_used_stay(
    spawn: Spawn, groups: bool, users: tuple[int, ...]
) -> None:
    spawn(leave_unused, 2, (2, 1), groups, users)
    spawn(leave_unused, 4, (2, 2), groups, users)


@on_ranks(2)
def test_errors_of_what_nobody_used_in_two_backwards() -> None:
    """Two backwards are settled together: what one of them used is used."""
    model, hook = two_matrices((2, 1), groups=False)
    model(*both_slopes(0)).backward()
    model.zero_grad()
    before = hook.state_dict()["error"]["second.weight"].full_tensor()
    for is_last in (False, True):
        model.set_is_last_backward(is_last)
        model(both_slopes(1)[0], None).backward()
    assert model.second.weight.grad is None
    after = hook.state_dict()["error"]["second.weight"].full_tensor()
    assert torch.allclose(before, after, atol=1e-5)


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_hook", [False, True])
@on_ranks(2)
def test_a_backward_inside_of_autocast(with_hook: bool) -> None:
    found = []

    def own(tensor: Tensor, pieces: typing.Any, axis: typing.Any, unit: float) -> None:
        del pieces, unit
        found.append(torch.is_autocast_enabled("cpu"))
        axis.all_reduce(tensor, "sum")

    models = [two_matrices((2, 1), groups=False)[0] for _ in range(2)]
    if with_hook:
        compress_gradients(models[0], own)
        compress_gradients(models[1], None)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            models[0](*both_slopes(step)).backward()
            assert torch.is_autocast_enabled("cpu")
        models[1](*both_slopes(step)).backward()
        for grad, wanted in zip(*map(take_gradients, models), strict=True):
            assert torch.equal(grad, wanted)
    assert found == [False] * 3 * with_hook


# --- dtypes on the wire ---------------------------------------------------------------------------


class Noting(PowerSGD):
    """Notes what goes over the axis."""

    def __call__(
        self, tensor: Tensor, pieces: Sequence[GradientPiece], axis: typing.Any, unit: float
    ) -> None:
        self.log: list[tuple[torch.dtype, int]] = []
        super().__call__(tensor, pieces, Counting(axis, self.log), unit)


def narrow_wire(mesh: tuple[int, ...], dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    torch.manual_seed(0)
    models: list[typing.Any] = [nn.Linear(64, 32)]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        shardkit.fully_shard(model, make_mesh(mesh), mp_policy=policy)
    hook = Noting(2, start_after=1)
    compress_gradients(models[0], hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, 64, generator=generator)
    for model in models:
        model(x).sum().backward()
    numel = 2080 // mesh[1]
    assert hook.log == [(dtype, numel)]
    for grad, wanted in zip(*map(take_gradients, models), strict=True):
        assert torch.equal(grad, wanted)
    models[0](x).sum().backward()
    assert [each for each, _ in hook.log] == [dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_compressed_travels_in_reduce_dtype(spawn: Spawn, dtype: torch.dtype) -> None:
    spawn(narrow_wire, 4, (2, 2), dtype)
    spawn(narrow_wire, 2, (2, 1), dtype)


# --- state ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_factors_are_not_loaded_without_warm_start() -> None:
    model, hook = two_matrices((2, 1), groups=False)
    model(*both_slopes(0)).backward()
    saved = hook.state_dict()
    assert saved["second_factors"]
    grads = []
    for factors in (saved["second_factors"], {}):
        other: typing.Any = shardkit.fully_shard(Two(), make_mesh((2, 1)))
        cold = PowerSGD(1, start_after=0, min_compression_rate=1.0, warm_start=False)
        compress_gradients(other, cold)
        cold.load_state_dict({**saved, "second_factors": factors})
        other(*both_slopes(1)).backward()
        grads.append(take_gradients(other))
        assert not cold.state_dict()["second_factors"]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
