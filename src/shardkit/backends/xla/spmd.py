"""SPMD mode: one process traces the program of all ranks and has the pieces of all of them."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch import Tensor

from shardkit.backends.xla import host_reads, operators
from shardkit.backends.xla.backend import XlaBackend
from shardkit.backends.xla.random_numbers import DrawApart, GraphOrder, draw_seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Function = Callable[[Tensor], Tensor]


# --- regions --------------------------------------------------------------------------------------

_XLAC: Any = torch_xla._XLAC
_REPLICATE, _SHARD = "replicate", "shard"
_GATHER_CHANNEL, _REDUCE_CHANNEL = 1, 2
"""First number of a collective; the numbers of buckets are two apart."""
_MOST_DIMS = 5  # Dims of the largest tensor whose parts torch_xla describes rightly.


class SpmdRegion(GraphOrder):
    """`Region` of a mesh over all devices of this process: (shard,) or (replicate, shard)."""

    is_spmd = True

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        host_reads.install_refusals()
        names = (_SHARD,) if len(shape) == 1 else (_REPLICATE, _SHARD)
        self.num_ranks = math.prod(shape)
        self.device: torch.device = torch_xla.device()
        ids = np.arange(self.num_ranks)
        self._mesh = xs.Mesh(ids, tuple(shape), names)
        grid = ids.reshape(shape)
        self._shard_groups = grid.reshape(-1, shape[-1]).tolist()
        self._replicate_groups = grid.reshape(-1, shape[-1]).T.tolist()
        self._manual = _XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)
        self._all: Any = names if len(names) > 1 else _SHARD

    # --- outside and inside ---

    def enter(self, tensor: Tensor, axes: Any) -> Tensor:
        """Return a rank's part of a tensor whose dim 0 is split over mesh axes; None: all of it."""
        if axes is None and tensor.ndim == 0:
            return self.enter(tensor.reshape(1), None).reshape(())
        if tensor.ndim > _MOST_DIMS:
            flat = self.enter(tensor.flatten(1), axes)
            return flat.view(len(flat), *tensor.shape[1:])
        # A clone, since the tensor is annotated in place; and not marked, as by torch_xla's
        # `enable_manual_sharding`, which takes what is whole on the devices to the host and back
        # (and looks for JAX on the disk, every time).
        whole = operators.as_declared(tensor.detach()).clone()
        _XLAC._xla_annotate_custom_sharding(whole, self._sharding(axes, tensor.ndim))
        local: Tensor = _XLAC._spmd_full_to_shard_shape(whole)
        return local

    def leave(self, tensor: Tensor, axes: Any, num_parts: int) -> Tensor:
        """Return the whole of which `tensor` is a rank's part."""
        if tensor.ndim > _MOST_DIMS:
            flat = self.leave(tensor.flatten(1), axes, num_parts)
            return flat.view(len(flat), *tensor.shape[1:])
        tensor = operators.as_declared(tensor)
        shape = torch.Size((tensor.shape[0] * num_parts, *tensor.shape[1:]) if tensor.ndim else ())
        local = tensor.detach()
        _XLAC._mark_manual_sharding(local, self._manual)
        sharding = self._sharding(axes, tensor.ndim)
        whole: Tensor = _XLAC._spmd_shard_to_full_shape(local, sharding, shape, local.dtype)
        return whole

    def _sharding(self, axes: Any, ndim: int) -> Any:
        """Return XLA's description of a tensor whose dim 0 is split over mesh axes."""
        return self._mesh.get_op_sharding((axes, *(None for _ in range(ndim - 1)))[:ndim])

    def enter_batch(self, tensor: Tensor) -> Tensor:
        """See `Region`."""
        there = functools.partial(self.enter, axes=self._all)
        return _move(there, self.leave_batch, tensor.to(self.device))

    def leave_batch(self, tensor: Tensor) -> Tensor:
        """See `Region`."""
        there = functools.partial(self.leave, axes=self._all, num_parts=self.num_ranks)
        return _move(there, self.enter_batch, tensor)

    def enter_shared(self, tensor: Tensor) -> Tensor:
        """See `Region`."""
        there = functools.partial(self.enter, axes=None)
        return _move(there, self.leave_sum, tensor.to(self.device))

    def leave_sum(self, tensor: Tensor) -> Tensor:
        """See `Region`."""
        return _move(lambda t: self.leave_shared(self.sum_of_all(t)), self.enter_shared, tensor)

    def leave_shared(self, tensor: Tensor) -> Tensor:
        """See `Region`."""
        # What an earlier graph has computed cannot be annotated, but a view of it can.
        return self.leave(tensor.unsqueeze(0), None, 1).squeeze(0)

    def leave_mean(self, tensor: Tensor) -> Tensor:
        """See `Region`."""
        return self.leave_batch(tensor.reshape(1)).mean()

    def enter_piece(self, piece: Tensor) -> Tensor:
        """Return a rank's part of a piece."""
        return self.enter(piece, _SHARD)

    def leave_piece(self, part: Tensor) -> Tensor:
        """Return the piece of which a rank has `part`."""
        return self.leave(part, _SHARD, len(self._shard_groups[0]))

    def spread(self, piece: Tensor) -> None:
        """Keep a piece in parts, one per rank of the shard axis."""
        if _XLAC._get_xla_sharding_spec(piece):
            xs.clear_sharding(piece)  # Writes may have left it whole on every device.
        _XLAC._xla_mark_sharding(piece, self._sharding(_SHARD, 1))

    # --- collectives ---

    def all_gather(self, parts: list[Tensor], tail_numel: int, bucket_id: int) -> list[Tensor]:
        """Return the 1-D parts of all ranks of the shard axis, end to end, by one all-gather.

        They travel side by side, since torch_xla's all-gather of a list has no channels.
        """
        sizes = [*(part.numel() for part in parts), tail_numel]
        tail = torch.zeros(tail_numel, dtype=parts[0].dtype, device=self.device)
        gathered: Tensor = xm.all_gather(
            torch.cat([*parts, tail]),
            0,
            groups=self._shard_groups,
            pin_layout=False,
            channel_id=2 * bucket_id + _GATHER_CHANNEL,
            use_global_device_ids=True,
        )
        num_rows = len(self._shard_groups[0])
        wholes = [w.reshape(-1) for w in gathered.view(num_rows, -1).split(sizes, 1)[:-1]]
        # With one row a reshape does not copy, and a view would keep the whole bucket alive.
        return [whole.clone() for whole in wholes] if num_rows == 1 else wholes

    def reduce_scatter(self, whole: Tensor, scale: float, bucket_id: int) -> Tensor:
        """Return this rank's part of the sum of 1-D tensors over the shard axis, times `scale`."""
        part: Tensor = xm.reduce_scatter(
            xm.REDUCE_SUM,
            whole,
            scale,
            0,
            len(self._shard_groups[0]),
            groups=self._shard_groups,
            pin_layout=False,
            channel_id=2 * bucket_id + _REDUCE_CHANNEL,
            use_global_device_ids=True,
        )
        return part

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the replicate axis."""
        result: Tensor = _XLAC._xla_spmd_all_reduce(
            xm.REDUCE_SUM, tensor, 1.0, self._replicate_groups
        )
        return result

    def sum_of_all(self, tensor: Tensor, op: str = xm.REDUCE_SUM, scale: float = 1.0) -> Tensor:
        """Return the reduction over all ranks."""
        everyone = [[*range(self.num_ranks)]]
        result: Tensor = _XLAC._xla_spmd_all_reduce(op, tensor, scale, everyone)
        return result

    def agree(self, tensor: Tensor) -> Tensor:
        """See `Region`."""
        if tensor.is_floating_point():
            return self.sum_of_all(tensor, scale=1.0 / self.num_ranks)
        return self.sum_of_all(tensor.to(torch.int64), xm.REDUCE_MAX).to(tensor.dtype)

    # --- the rest ---

    def draw_apart(self) -> DrawApart:
        """See `Region`."""
        seeds = draw_seeds(self.num_ranks).to(self.device)
        drawing = self.drawing = DrawApart(self.enter(seeds, self._all))
        return drawing

    def finish_graph(self) -> None:
        """See `Region`."""
        torch_xla.sync()


class _Move(torch.autograd.Function):
    """Function that calls `there`. Its derivative is `back`, which has its own derivative."""

    @staticmethod
    def forward(ctx: Any, there: _Function, back: _Function, tensor: Tensor) -> Tensor:
        ctx.back = back
        ctx.set_materialize_grads(False)  # Behind a hook an unused output has no gradient, not 0.
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None, None, None if grad is None else ctx.back(grad)


def _move(there: _Function, back: _Function, tensor: Tensor) -> Tensor:
    moved: Tensor = _Move.apply(there, back, tensor)  # type: ignore[no-untyped-call]
    return moved


# --- SPMD mode ------------------------------------------------------------------------------------


class SpmdAxis:
    """One axis for all of whose ranks this process computes: what it knows, all ranks know."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """One process has everything."""
        full.copy_(own)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """One process has everything."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """One process has everything."""

    def exchange(self, item: Any) -> list[Any]:
        """Return the item of the only process."""
        return [item]


class SpmdBackend(XlaBackend):
    """`Backend` of all XLA devices of this process."""

    is_spmd = True
    why_no_groups = "one process computes for all ranks"

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(SpmdRegion(shape), [SpmdAxis(size) for size in shape])
        self.process_axis = SpmdAxis(1)
        # The loss is computed outside, from the outputs of all ranks, as a mean over all ranks.
        self.gradient_weight = float(self.region.num_ranks)
