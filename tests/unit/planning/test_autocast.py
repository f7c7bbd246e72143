"""Autocast on meta converts what autocast converts on a device."""

from __future__ import annotations

import contextlib
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardkit
from shardkit import ConfigError
from shardkit.planning._autocast import Autocast
from wrapped_models import Stack

if typing.TYPE_CHECKING:
    from collections.abc import Callable


def _without(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x @ w


def _in_half(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.half):
        return x @ w


_OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, w: x @ w,
    "product in place": lambda x, w: x.clone().addmm_(x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "convolution": lambda x, w: F.conv1d(x[None], w[..., None]),
    "convolution that keeps the size": lambda x, w: F.conv1d(x[None], w[..., None], padding="same"),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "prelu": lambda x, w: F.prelu(x, w[0]),
    "layer norm": lambda x, w: F.layer_norm(x, (8,), w[0]),
    "group norm": lambda x, w: F.group_norm(x, 2, w[0]),
    "softmax": lambda x, w: F.softmax(x @ w, -1),
    "logarithm of softmax": lambda x, w: F.log_softmax(x @ w, -1),
    "sum": lambda x, w: (x @ w).sum(),
    "sum in bf16": lambda x, w: (x @ w).sum(0, dtype=torch.bfloat16),
    "cumulative sum": lambda x, w: (x @ w).cumsum(0),
    "product": lambda x, w: (x @ w).prod(),
    "norm": lambda x, w: (x @ w).norm(),
    "power": lambda x, w: (x @ w) ** 2,
    "exponential": lambda x, w: (x @ w).exp(),
    "gelu": lambda x, w: F.gelu(x @ w),
    "cat of both": lambda x, w: torch.cat([x, x @ w]),
    "cat": lambda x, w: torch.cat([x @ w, x @ w]),
    "stack": lambda x, w: torch.stack([x, x @ w]),
    "addcmul": lambda x, w: torch.addcmul(x, x @ w, x @ w),
    "mean squared error": lambda x, w: F.mse_loss(x @ w, x),
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, x.new_zeros(8, dtype=torch.long)),
    "binary cross entropy": lambda x, w: F.binary_cross_entropy_with_logits(x @ w, x),
    "pad": lambda x, w: F.pad((x @ w)[None], (1, 1), "reflect"),
    "fp64": lambda x, w: x.double() @ w.double(),
    "interpolation": lambda x, w: F.interpolate((x @ w)[None], scale_factor=2.0),
    "without": _without,
    "in half precision": _in_half,
}


def _dtypes(
    operator: Callable[[Tensor, Tensor], Tensor], device: str
) -> tuple[torch.dtype, torch.dtype, list[tuple[torch.dtype, ...]]]:
    """Return the dtypes of the result, of the gradient, and of what is kept for backward."""
    x, w = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device, requires_grad=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = operator(x, w)
    [grad] = torch.autograd.grad(out.sum(), w)
    return out.dtype, grad.dtype, sorted((str(t.dtype), tuple(t.shape)) for t in saved)


@pytest.mark.parametrize("name", list(_OPERATORS))
def test_inputs_are_converted_as_on_the_cpu(name: str) -> None:
    operator = _OPERATORS[name]
    with torch.autocast("cpu", torch.bfloat16):
        real = _dtypes(operator, "cpu")
    with Autocast("cpu").on_meta(), torch.autocast("cpu", torch.bfloat16):
        assert _dtypes(operator, "meta") == real


_ON_CUDA = {
    "linear": torch.bfloat16,
    "layer norm": torch.float32,
    "softmax": torch.float32,
    "sum": torch.float32,
    "sum in bf16": torch.bfloat16,
    "power": torch.float32,
    "gelu": torch.bfloat16,
    "cat": torch.bfloat16,
    "cat of both": torch.float32,
    "addcmul": torch.float32,
    "cross entropy": torch.float32,
    "fp64": torch.float64,
    "without": torch.float32,
    "in half precision": torch.float16,
}
"""Results of operators in autocast of CUDA, as the documentation of torch.amp says."""


@pytest.mark.parametrize("name", list(_ON_CUDA))
def test_inputs_are_converted_as_documented_for_cuda(name: str) -> None:
    with Autocast("cuda").on_meta(), torch.autocast("cuda", torch.bfloat16):
        dtype, grad_dtype, _ = _dtypes(_OPERATORS[name], "meta")
    assert (dtype, grad_dtype) == (_ON_CUDA[name], torch.float32)


def test_a_weight_is_converted_once_until_autocast_ends() -> None:
    weight, x = torch.ones(4, 4, device="meta", requires_grad=True), torch.ones(4, 4, device="meta")

    def conversion() -> object:
        """Return the node of autograd that converted the weight."""
        return typing.cast("typing.Any", torch.mm(x, weight).grad_fn).next_functions[1][0]

    with Autocast("cuda").on_meta():
        with torch.autocast("cuda", torch.bfloat16):
            first = conversion()
            assert "ToCopy" in repr(first)
            assert conversion() is first
        with torch.autocast("cuda", torch.bfloat16):
            assert conversion() is not first
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            assert conversion() is not conversion()


def test_autocast_of_other_devices_changes_nothing() -> None:
    x = torch.ones(4, 4, device="meta")
    with Autocast("cuda").on_meta():
        with torch.autocast("cpu", torch.bfloat16):
            assert (x @ x).dtype == torch.float32
            assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == torch.bfloat16
        with torch.autocast("cuda", torch.bfloat16):
            assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype == torch.float32


def test_nothing_is_left_of_it() -> None:
    with contextlib.suppress(KeyError), Autocast("cuda").on_meta():
        raise KeyError
    x = torch.ones(4, 4, device="meta")
    assert (x @ x).dtype == torch.float32
    with pytest.raises(RuntimeError, match="unsupported"):
        torch.autocast("meta")


def _peak(dtype: torch.dtype | None, **options: typing.Any) -> int:
    tokens = torch.zeros(16, 40, dtype=torch.long)
    model = Stack(dim=128, num_blocks=4)
    return shardkit.plan(model, tokens, mesh=4, autocast=dtype, **options).peak_nbytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations_of_autocast_are_smaller(device: str) -> None:
    assert 0.5 < _peak(torch.bfloat16, device=device) / _peak(None, device=device) < 0.9


def test_activations_are_recomputed_in_autocast() -> None:
    whole, recomputed = _peak(torch.bfloat16), _peak(torch.bfloat16, recompute=True)
    assert recomputed < 0.8 * whole
    assert recomputed < _peak(None, recompute=True)


class Own(nn.Module):
    """A layer in autocast of its own, and a copy of it without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            assert self.layer(x).dtype == torch.bfloat16
            with torch.autocast(x.device.type, enabled=False):
                return self.layer(x)


def test_a_model_may_enter_autocast_itself() -> None:
    assert shardkit.plan(Own(), torch.ones(4, 64), mesh=2, device="cpu").peak_nbytes


def test_an_autocast_that_is_no_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"autocast must be a dtype such as torch\.bfloat16"):
        _peak(typing.cast("torch.dtype", "bf16"))
