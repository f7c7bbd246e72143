"""Operators of torch_xla 2.9.0 that are put right: in a forward, and for the whole process.

In a forward (`put_right`, which a dispatch mode calls):

- XLA ends the process if a tensor from outside of the region, such as an attribute of a module or a
  constant, is sorted there, or its largest element or its singular values are found. So the
  operand is marked as a rank's.
- Indices of `max_pool2d` and `cummax` have 32 bits, although torch_xla says 64. Conversions of them
  fail when the graph is made.

When tensors leave the region (`as_declared`): some have other dtypes in XLA than torch_xla says,
such as those indices, and 32-bit integers plus a number of 64 bits. XLA would end the process.

For the whole process (`install`): torch_xla computes wrong gradients of `elu`, `celu` and `selu`.
Without dims its `amax` and `amin` return their operand, and its `norm` takes an infinite order for
another one. Its batch normalization fails for several dtypes, and in the backward of eval mode. Its
`nll_loss` of one example without a batch ends the process, and its `where` returns another dtype in
XLA than in torch if one operand is a number.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import Tensor

from shardkit._compat.once import once
from shardkit._tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_aten = torch.ops.aten
_XLAC: Any = torch_xla._XLAC

# --- in a forward ---------------------------------------------------------------------------------

_MARKED = {
    _aten.sort.default,
    _aten.sort.stable,
    _aten.topk.default,
    _aten.kthvalue.default,
    _aten.argmax.default,
    _aten.argmin.default,
    _aten.max.dim,
    _aten.min.dim,
    _aten.cummax.default,
    _aten._linalg_svd.default,
}
"""Operators whose first operand is marked."""
_NARROW = {
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool3d_with_indices.default,
    _aten.adaptive_max_pool2d.default,
    _aten.cummax.default,
}
"""Operators whose indices have 32 bits."""


def is_put_right(func: Any) -> bool:
    """Whether `put_right` changes an operator."""
    return func in _MARKED or func in _NARROW


def put_right(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_spmd: bool) -> Any:
    """Run an operator inside a forward."""
    if is_spmd and func in _MARKED:
        args = (as_of_a_rank(args[0]), *args[1:])
    result = func(*args, **kwargs)
    return map_tensors(as_declared, result) if func in _NARROW else result


@functools.cache
def _manual() -> Any:
    return _XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)


def as_of_a_rank(tensor: Tensor) -> Tensor:
    """Return a tensor as one of the region, which it may be already."""
    if tensor.device.type != "xla":
        return tensor
    # What an earlier graph has computed cannot be marked, but a view of it can.
    marked = tensor.detach().unsqueeze(0)
    _XLAC._mark_manual_sharding(marked, _manual())
    return marked.squeeze(0)


_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_XLA_NAMES = {
    torch.bool: "pred",
    torch.uint8: "u8",
    torch.int8: "s8",
    torch.int16: "s16",
    torch.int32: "s32",
    torch.int64: "s64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def as_declared(tensor: Tensor) -> Tensor:
    """Return a tensor that has the dtype in XLA that it has in torch."""
    dtype = tensor.dtype
    name = _XLA_NAMES.get(dtype)
    if name is None or tensor.device.type != "xla":
        return tensor
    if _XLAC._get_xla_tensor_shape_type(tensor) == name:
        return tensor
    if dtype in _WIDER:
        return tensor.to(_WIDER[dtype]).to(dtype)
    # A conversion would rely on the dtype that torch_xla says.
    wide = tensor + tensor.new_zeros((1,) * tensor.ndim, dtype=torch.int64)
    return wide.to(dtype)


# --- for the whole process ------------------------------------------------------------------------


def _elu_backward(
    grad: Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,  # noqa: FBT001 - torch's signature
    tensor: Tensor,
) -> Tensor:
    """Torch_xla takes the operand for the result."""
    below = tensor + alpha * scale if is_result else (tensor * input_scale).exp() * (alpha * scale)
    return grad * torch.where(tensor > 0, scale, below * input_scale)


def _of_all(kernel: Any, keys: Any, tensor: Tensor, dim: Sequence[int] = (), *keepdim: bool) -> Any:
    """Reduce by `amax` or `amin`; no dims are all dims."""
    return kernel.call_boxed(keys, tensor, dim or [*range(tensor.ndim)], *keepdim)


def _norm(kernel: Any, keys: Any, tensor: Tensor, p: Any = 2, *args: Any, **options: Any) -> Any:
    """Compute a norm, which may have an infinite order."""
    if p is not None and math.isinf(p):
        return torch.linalg.vector_norm(tensor, p, *args, **options)
    return kernel.call_boxed(keys, tensor, p, *args, **options)


def _batch_norm(kernel: Any, keys: Any, *args: Any) -> Any:
    """Normalize a batch; the operands may have several dtypes."""
    x, _, _, _, running_var, is_training, momentum, eps = args
    wide = _of_one_dtype(args)
    y, mean, invstd = kernel.call_boxed(keys, *wide)
    if is_training and running_var is not None:
        # torch_xla takes the variance of the batch itself, torch the estimate of that of all.
        rest = x.numel() // x.shape[1] - 1
        wide[4].add_((invstd.square().reciprocal() - eps) * (momentum / max(rest, 1)))
    for own, written in zip(args[3:5], wide[3:5], strict=True):
        if written is not own:
            own.copy_(written)
    return y.to(x.dtype), mean, invstd


def _batch_norm_backward(kernel: Any, keys: Any, *args: Any) -> Any:
    """Return gradients of several dtypes, and in eval mode, in which torch_xla's kernel fails."""
    _, x, weight, *_, wanted = args
    dtypes = (x.dtype, None if weight is None else weight.dtype)
    wide = _of_one_dtype(args)
    is_training = wide[7]
    grads = kernel.call_boxed(keys, *wide) if is_training else _batch_norm_backward_in_eval(*wide)
    dtype_of_each = (dtypes[0], dtypes[1], dtypes[1])
    return tuple(
        grad.to(dtype) if is_wanted and dtype is not None else None
        for grad, dtype, is_wanted in zip(grads, dtype_of_each, wanted, strict=True)
    )


def _batch_norm_backward_in_eval(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, eps, _ = args
    by_channel = (1, -1, *(1 for _ in x.shape[2:]))
    others = [dim for dim in range(x.ndim) if dim != 1]
    invstd = (var + eps).rsqrt()
    scale = invstd if weight is None else invstd * weight
    normed = (x - mean.view(by_channel)) * invstd.view(by_channel)
    return grad * scale.view(by_channel), (grad * normed).sum(others), grad.sum(others)


def _of_one_dtype(args: Sequence[Any]) -> list[Any]:
    """Return arguments whose tensors have the widest dtype of them, each itself if it has it."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)}
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in args]


def _nll_loss(
    kernel: Any, keys: Any, x: Tensor, target: Tensor, weight: Tensor | None, *options: Any
) -> Any:
    """Take one example without a batch, too."""
    if x.ndim > 1:
        return kernel.call_boxed(keys, x, target, weight, *options)
    loss, total = kernel.call_boxed(keys, x[None], target.reshape(1), weight, *options)
    return loss.reshape(()), total


def _nll_loss_backward(
    kernel: Any, keys: Any, grad: Tensor, x: Tensor, target: Tensor, *args: Any
) -> Any:
    """Take one example without a batch, too."""
    if x.ndim > 1:
        return kernel.call_boxed(keys, grad, x, target, *args)
    if args[1] == 0:  # Without a reduction each example has its own.
        grad = grad.reshape(1)
    return kernel.call_boxed(keys, grad, x[None], target.reshape(1), *args)[0]


def _where(kernel: Any, keys: Any, condition: Tensor, x: Tensor, y: Tensor) -> Any:
    """Return a result that has the dtype in XLA that it has in torch."""
    if x.dtype != y.dtype and (x.ndim == 0) != (y.ndim == 0):
        dtype = torch.result_type(x, y)
        x, y = x.to(dtype), y.to(dtype)
    return kernel.call_boxed(keys, condition, x, y)


_WRONG: dict[str, Callable[..., Any]] = {
    "elu_backward": lambda _kernel, _keys, *args: _elu_backward(*args),
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "amax": _of_all,
    "amin": _of_all,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "where.self": _where,
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dim": _norm,
    "norm.ScalarOpt_dtype": _norm,
    "norm.ScalarOpt_dim_dtype": _norm,
}


@once
def install() -> None:
    """Put right kernels in the place of wrong ones, once per process."""
    replace_kernels(_WRONG)


def replace_kernels(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Replace kernels of torch_xla by functions, which get the kernel and the key set first."""
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that another kernel is there.
        for name, function in kernels.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "XLA")
            library.impl(name, functools.partial(function, kernel), "XLA", with_keyset=True)


_kept: list[object] = []  # What torch forgets if nobody keeps it.
