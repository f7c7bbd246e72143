"""Norms of one tensor or a list, and the check for overflow: one collective for all."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._tensor.global_norm import as_norm
from shardkit._tensor.ops.reductions import reduce_extremes, reduction
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._tensor.spec import Axis


_INF = float("inf")


def sharded_norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return the global norm of each tensor as plain 0-dim tensors.

    Powers are summed in fp64, so that neither many ranks nor squares of large values lose the
    norm. Right also where this rank owns nothing of a tensor.

    Cost: one all-reduce of 8 bytes per tensor (16 for max and min) per process group: one, as a
    rule.
    """
    neutral = _INF if order < 0 else 0.0
    pieces = [
        t.spec.without_padding(t.local_piece, neutral) if type(t) is ShardedTensor else t
        for t in tensors
    ]
    norms = _local_norms(pieces, order, dtype)
    is_power = order not in (0.0, _INF, -_INF)
    if is_power:
        norms.pow_(order)
        for i, piece in enumerate(pieces):
            if order < 0 and piece.numel() == 0:
                norms[i] = 0  # Not 0 ** order: there is nothing to add.
    for axis, indices in by_axis(tensors).items():
        # Not by a list of indices, which would be copied to the device, and waited for.
        is_whole = len(indices) == len(tensors)
        picked = norms if is_whole else torch.stack([norms[i] for i in indices])
        if abs(order) == _INF:
            reduce_extremes(picked, axis, "max" if order > 0 else "min")
        else:
            axis.all_reduce(picked, "sum")
        if not is_whole:
            _compat.foreach_copy([norms[i] for i in indices], picked.unbind())
    if is_power:
        norms.pow_(1.0 / order)
    wanted = [dtype or tensor.dtype.to_real() for tensor in tensors]
    by_dtype = {each: norms.to(each).unbind() for each in dict.fromkeys(wanted)}
    return [by_dtype[each][i] for i, each in enumerate(wanted)]


def _local_norms(pieces: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> Tensor:
    """Return the norms of the pieces in fp64; that of no element leaves the global one as it is."""
    empty = _INF if order == -_INF else 0.0
    pieces = [piece.abs() if piece.is_complex() else piece for piece in pieces]
    dtype = None if dtype is None else dtype.to_real()
    filled = [i for i, piece in enumerate(pieces) if piece.numel() > 0]
    if not filled:
        return torch.full((len(pieces),), empty, dtype=torch.float64, device=pieces[0].device)
    if order in (1.0, 2.0, _INF):
        wide = None
        kinds = {piece.dtype for piece in pieces}
        widest = functools.reduce(torch.promote_types, kinds)
        if dtype is not None or len(kinds) > 1 or widest.itemsize < torch.float32.itemsize:
            wide = torch.promote_types(dtype or widest, torch.float32)
        values = _compat.foreach_norm([pieces[i] for i in filled], order, wide)
    else:
        values = [torch.linalg.vector_norm(pieces[i], order, dtype=dtype) for i in filled]
    if len(filled) < len(pieces):
        # Put between them on the device: a list of indices would be copied there, and waited for.
        neutral = torch.full_like(values[0], empty)
        at = dict(zip(filled, values, strict=True))
        values = [at.get(i, neutral) for i in range(len(pieces))]
    return torch.stack(list(values)).to(torch.float64)


def by_axis(tensors: Sequence[Tensor]) -> dict[Axis, list[int]]:
    """Return the indices of the sharded tensors by each process group they are cut over."""
    by_axis: dict[Axis, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) is ShardedTensor:
            for axis in tensor.spec.axes:
                if axis.size > 1:
                    by_axis.setdefault(axis, []).append(i)
    return by_axis


def total_norm(tensors: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of all elements of tensors, sharded or plain: 0-dim, fp32 or wider.

    A `GlobalNorm`, as what torch computes of sharded gradients.

    Cost: see `sharded_norms`, for each dtype.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms: list[Tensor] = []
    for alike in kinds.values():
        wide = torch.promote_types(alike[0].dtype.to_real(), torch.float32)
        norms += [norm.to(tensors[0].device, wide) for norm in sharded_norms(alike, order, wide)]
    if not norms:
        return as_norm(torch.zeros(()))
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    stacked = torch.stack([norm.to(widest) for norm in norms])
    return as_norm(torch.linalg.vector_norm(stacked, order))


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    del func
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")  # noqa: PLR2004 - (self, ord, dtype)
    first, *others = sharded_norms(args[0], float(order), dtype)
    return [as_norm(first), *others]  # One of them makes their stack a norm, and costs least.


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    del func
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    order = float(2 if order is None else order)
    return as_norm(sharded_norms([args[0]], order, kwargs.get("dtype"))[0])


vector_norm = reduction(_vector_norm, dims_at=2, takes_complex=True)


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients of a GradScaler; an overflow on one rank is one on all."""
    grads, found_inf, inv_scale = args
    pieces = [grad.local_piece if type(grad) is ShardedTensor else grad for grad in grads]
    func(pieces, found_inf, inv_scale, **kwargs)
    for axis in by_axis(grads):
        axis.all_reduce(found_inf, "max")


def share_overflow(optimizer: torch.optim.Optimizer, found_inf: dict[Any, Tensor]) -> None:
    """Let an overflow of a plain parameter, which each rank has for itself, be one on all ranks.

    Its gradient may be of another dtype or device than those that are sharded, and other on each
    replica. Else some ranks would skip the step.

    Cost: where an optimizer has both kinds, an all-reduce of 4 bytes on each axis of the mesh.
    """
    sharded, plain = [], []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, ShardedTensor):
                sharded.append(param)
            elif param.requires_grad:
                plain.append(param)
    if not sharded or not plain or sharded[0].spec.is_traced:
        return
    for device in dict.fromkeys(param.device for param in plain):
        # Where no gradient came on this rank there is none.
        found_inf.setdefault(device, torch.zeros((), device=device))
    meshes = {id(param.spec.mesh.backend): param.spec.mesh for param in sharded}
    axes = [mesh.backend.axis(i) for mesh in meshes.values() for i in range(mesh.ndim)]
    for device in sorted(found_inf, key=str):
        for axis in dict.fromkeys(axes):
            if axis.size > 1:
                axis.all_reduce(found_inf[device], "max")
