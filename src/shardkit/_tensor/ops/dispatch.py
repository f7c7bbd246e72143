"""Which operator is of which kind. An operator is put into its kind when it is first seen.

The rule: an operator on pieces if it is elementwise, one collective if it reduces all there is, a
view if it is one, else the whole tensors. A random one runs on the whole tensors as well, but for
those that look at nothing but the shape. What has its own handler below is one of these, told to be
so because torch does not say it.
"""

from __future__ import annotations

from typing import Any

import torch

from shardkit import _compat
from shardkit._tensor.ops.common import cut_gradients
from shardkit._tensor.ops.lists import foreach, largest, one_by_one
from shardkit._tensor.ops.norms import foreach_norm, unscale, vector_norm
from shardkit._tensor.ops.pointwise import mutating, pointwise, pointwise_mutating
from shardkit._tensor.ops.reductions import agree, extreme, item, mean, reduce_by, truth
from shardkit._tensor.ops.structural import (
    copy_into,
    fills_by_shape,
    new_like,
    plain_empty,
    random,
    refuse_resize,
    same_memory,
    state_like,
    structural,
)
from shardkit._tensor.ops.views import view, view_of_size, write
from shardkit._tensor.ops.wholes import whole

_HANDLERS: dict[Any, Any] = {}
_aten = torch.ops.aten


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` by the handler of its kind."""
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = _classify(func)
    if torch.is_grad_enabled() and handler is not same_memory:
        cut_gradients(args, kwargs)
    return handler(func, args, kwargs)


def nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do nothing."""


def _classify(func: Any) -> Any:
    """Choose the handler of an operator seen for the first time."""
    name = func.name().split("::")[-1].split(".")[0]
    if _is_list_of_elementwise(name):
        return foreach
    if name.startswith("_foreach_"):
        return one_by_one
    if func.is_view:
        return view
    if torch.Tag.nondeterministic_seeded in func.tags:
        # Those that read values run on wholes: so may do how many numbers they draw.
        return random if fills_by_shape(func) else whole
    if torch.Tag.pointwise in func.tags:
        return pointwise_mutating if _compat.is_mutable_op(func) else pointwise
    return whole


_FUSED_OPTIMIZERS = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
_COPIES = ("clone", "copy", "zero")  # Elementwise, though torch does not tag them so.


def _is_list_of_elementwise(name: str) -> bool:
    """Whether an operator on lists does to each entry what an elementwise one does to one tensor.

    Torch tags the operators on single tensors only.
    """
    single = name.removesuffix("_")
    if not single.startswith("_foreach_"):
        return single in _FUSED_OPTIMIZERS
    single = single.removeprefix("_foreach_")
    packet = getattr(_aten, single, None)
    overloads = () if packet is None else packet.overloads()
    return single in _COPIES or any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads
    )


def _register(handler: Any, *funcs: Any) -> None:
    for func in funcs:
        _HANDLERS[func] = handler


_register(same_memory, _aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
_register(structural, _aten.clone.default, _aten.empty_like.default, _compat.copy_to_op)
_register(state_like, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default)
_register(mutating, _aten.zero_.default, _aten.fill_.Scalar)
_register(pointwise_mutating, _aten.fill_.Tensor)
_register(pointwise, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor)
_register(pointwise_mutating, _aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor)
_register(plain_empty, _aten.new_empty.default, _aten.new_empty_strided.default)
_register(refuse_resize, _aten.set_.source_Tensor, _aten.set_.source_Storage)
_register(refuse_resize, _aten.set_.source_Storage_storage_offset, _aten.resize_.default)
_register(refuse_resize, _aten.resize_as_.default)
_register(view_of_size, _aten.view.default, _compat.unsafe_view_op, _aten.expand.default)
_register(write, _aten.index_put_.default, _aten.index_fill_.int_Scalar)
_register(write, _aten.index_fill_.int_Tensor)
_register(
    new_like,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
)
_register(copy_into, _aten.copy_.default)
_register(reduce_by("sum", torch.sum), _aten.sum.default, _aten.sum.dim_IntList)
_register(reduce_by("sum", torch.count_nonzero), _aten.count_nonzero.default)
_register(reduce_by("product", torch.prod), _aten.prod.default)
_register(extreme("max"), _aten.max.default, _aten.amax.default)
_register(extreme("min"), _aten.min.default, _aten.amin.default)
_register(truth("max"), _aten.any.default)
_register(truth("min"), _aten.all.default)
_register(mean, _aten.mean.default, _aten.mean.dim)
_register(agree, _aten.equal.default, _aten.allclose.default)
_register(item, _compat.item_op)
_register(vector_norm, _aten.linalg_vector_norm.default, _aten.norm.Scalar)
_register(vector_norm, _aten.norm.ScalarOpt_dim)  # What torch_xla's `clip_grad_norm_` calls.
_register(nothing, _compat.propagate_xla_data_op)
_register(foreach_norm, _compat.foreach_norm_op)
_register(largest, _compat.foreach_max_op)
_register(unscale, _compat.unscale_op)
