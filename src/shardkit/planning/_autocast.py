"""Autocast on meta, where torch has none: inputs of operators are converted as on the device.

The operators are those that torch lists for the device. The names are those of
ATen/autocast_mode.h and autocast_mode.cpp.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._compat.torch_autograd import autocast_on_meta, autocast_operators
from shardkit._compat.torch_tensors import argument_names
from shardkit._tree import iter_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_LOWER = frozenset(
    {
        *("_addmm_activation", "_convolution", "_native_multi_head_attention"),
        *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d"),
        *("conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
        *("einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear", "lstm_cell"),
        *("matmul", "mkldnn_rnn_layer", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell"),
        "scaled_dot_product_attention",
    }
)
"""Operators that compute in autocast's dtype."""
_WIDEST = frozenset(
    {
        *("addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "grid_sampler"),
        *("index_copy", "index_put", "scatter_add", "stack", "tensordot", "vdot"),
    }
)
"""Operators that compute in the widest dtype of their inputs; on CPUs `grid_sampler` does not."""
_SUMS = frozenset(
    {
        *("cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "prod"),
        *("softmax", "sum"),
    }
)
"""Operators of CUDA that are told to return fp32. All others compute in fp32."""


class Autocast:
    """Autocast on meta, as on a device."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type  # Type of the device.
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def on_meta(self) -> AbstractContextManager[None]:
        """Return a context in which `torch.autocast` has an effect on meta tensors."""
        operators = autocast_operators(self._device_type)
        conversions = {operator: self._conversion_of(operator) for operator in operators}
        return autocast_on_meta(self._device_type, conversions, self._casts.clear)

    def lowered(self, tree: Any) -> Any:
        """Return containers with their tensors in autocast's dtype, where autocast is on."""
        if not torch.is_autocast_enabled(self._device_type):
            return tree
        dtype = torch.get_autocast_dtype(self._device_type)
        return map_tensors(functools.partial(self._cast, dtype), tree)

    def _conversion_of(self, operator: Any) -> Callable[..., Any]:
        """Return the function that converts the arguments of an operator."""
        name, on_cpu = operator.overloadpacket.__name__, self._device_type == "cpu"
        to_fp32 = functools.partial(self._cast, torch.float32)

        def lower(*args: Any, **options: Any) -> Any:
            return self.lowered((args, options))

        def widen(*args: Any, **options: Any) -> Any:
            return map_tensors(to_fp32, (args, options))

        def promote(*args: Any, **options: Any) -> Any:
            inputs = filter(_is_eligible, iter_tensors((args, options)))
            are_wide = any(tensor.dtype == torch.float32 for tensor in inputs)
            return (widen if are_wide else lower)(*args, **options)

        def sum_in_fp32(*args: Any, **options: Any) -> Any:
            given = dict(zip(argument_names(operator), args, strict=False)) | options
            if _is_eligible(args[0]) and given.get("dtype") is None:
                given["dtype"] = torch.float32
            return (), given

        if name in _LOWER:
            return lower
        if name in _WIDEST and not (on_cpu and name == "grid_sampler"):
            return promote
        return sum_in_fp32 if name in _SUMS and not on_cpu else widen

    def _cast(self, dtype: torch.dtype, tensor: Tensor) -> Tensor:
        """Convert a tensor; the weights of a module are converted once until autocast ends."""
        if not _is_eligible(tensor) or tensor.dtype == dtype:
            return tensor
        is_weight = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()  # noqa: SLF001
        is_lower = dtype == torch.get_autocast_dtype(self._device_type)
        is_kept = is_weight and is_lower and tensor.dtype == torch.float32
        if not (is_kept and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        known, cast = self._casts.get(id(tensor), (None, None))
        if known is None or cast is None or known() is not tensor:
            cast = tensor.to(dtype)
            self._casts[id(tensor)] = weakref.ref(tensor), cast
        return cast


def _is_eligible(tensor: Any) -> bool:
    is_floating = isinstance(tensor, Tensor) and tensor.is_meta and tensor.is_floating_point()
    return is_floating and tensor.dtype != torch.float64
