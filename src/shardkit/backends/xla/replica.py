"""Replica mode: under `torch_xla.launch` each replica traces its own program, and is one rank.

As on other backends a replica has its part of the batch and its own loss. XLA has one more
condition: replicas that communicate must trace the same graph. So values that depend on the rank
are data on the device, never numbers in the graph.
"""

from __future__ import annotations

import math
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from shardkit._errors import StateError
from shardkit.backends.xla.backend import XlaBackend
from shardkit.backends.xla.random_numbers import DrawApart, GraphOrder, draw_seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


# --- replicas that are threads --------------------------------------------------------------------

_WAIT_SECONDS = 300

_lock = threading.Lock()
_gate: threading.Barrier | None = None


def run_graph() -> None:
    """Run what this replica has traced; if graphs hold collectives, call it on all replicas.

    On the CPU replicas are threads, whose collectives match only if they come from one compiled
    program. So one thread compiles, the others find its program, and none traces meanwhile.

    Raises:
        StateError: Another replica did not come (on the CPU).
    """
    num_threads = xr.addressable_device_count()
    if xr.device_type() != "CPU" or num_threads == 1 or xr.world_size() == 1:
        torch_xla.sync()
        return
    gate = _gate_of(num_threads)
    try:
        gate.wait(_WAIT_SECONDS)
        with _lock:
            torch_xla.sync()
        gate.wait(_WAIT_SECONDS)
        xm.wait_device_ops()
        gate.wait(_WAIT_SECONDS)
    except threading.BrokenBarrierError as error:
        msg = (
            f"another replica has not come to run its graph within {_WAIT_SECONDS} s, or has "
            f"failed there: look for its error. All replicas must take the same steps."
        )
        raise StateError(msg) from error
    except BaseException:
        gate.abort()  # The other replicas would wait in vain.
        raise


def _gate_of(num_threads: int) -> threading.Barrier:
    global _gate  # noqa: PLW0603 - one for all threads
    with _lock:
        if _gate is None or _gate.broken:
            _gate = threading.Barrier(num_threads)
        return _gate


# --- replica mode ---------------------------------------------------------------------------------

_REDUCE_TYPES = {
    "sum": xm.REDUCE_SUM,
    "max": xm.REDUCE_MAX,
    "min": xm.REDUCE_MIN,
    "product": xm.REDUCE_MUL,
}


class ReplicaAxis:
    """`AxisComm` of one axis through this replica; traced, except for tensors on the host."""

    def __init__(self, groups: list[list[int]], rank: int, device: torch.device) -> None:
        self.size = len(groups[0])
        self.rank = rank  # This replica's position in its group.
        self.rank_on_device = torch.tensor([rank], device=device)
        self.groups = groups  # All groups of ranks in the mesh that communicate with each other.
        self._device = device  # This replica's device.

    def gather(self, part: Tensor) -> Tensor:
        """Return the 1-D parts of all ranks, as rows."""
        if self.size == 1:
            return part.view(1, -1)
        whole: Tensor = xm.all_gather(part, 0, groups=self.groups, pin_layout=False)
        return whole.view(self.size, -1)

    def reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Return a reduction of a tensor on the device."""
        if self.size == 1:
            return tensor
        kind = _REDUCE_TYPES[op]
        result: Tensor = xm.all_reduce(kind, tensor, groups=self.groups, pin_layout=False)
        return result

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm`."""
        full.copy_(self._run(full, lambda: self.gather(own.to(self._device)).view(-1)))

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm`."""
        if self.size > 1:
            tensor.copy_(self._run(tensor, lambda: self.reduce(tensor.to(self._device), op)))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm`."""
        flat = tensor.reshape(-1)
        rows = self._run(tensor, lambda: self.gather(flat.to(self._device)))
        tensor.copy_(rows[src].view(tensor.shape))

    def exchange(self, item: Any) -> list[Any]:
        """See `AxisComm`. This runs what has been traced."""
        payload = torch.from_numpy(np.frombuffer(pickle.dumps(item), dtype=np.uint8).copy())
        numels = torch.empty(self.size, dtype=torch.int64)
        self.all_gather(numels, torch.tensor([payload.numel()]))
        longest = int(numels.max())
        padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
        received = torch.empty(self.size * longest, dtype=torch.uint8)
        self.all_gather(received, padded)
        rows = received.view(self.size, longest)
        return [
            pickle.loads(row[:numel].numpy().tobytes())  # noqa: S301 - of ranks of this run
            for row, numel in zip(rows, numels.tolist(), strict=True)
        ]

    def _run(self, like: Tensor, trace: Callable[[], Tensor]) -> Tensor:
        """Trace a collective, in a separate graph if its operand is on the host."""
        if like.device.type == "xla":
            return trace()
        run_graph()
        traced = trace()
        run_graph()
        return traced.cpu()


class ReplicaRegion(GraphOrder):
    """`Region` of one replica: it has the same tensors inside and outside."""

    is_spmd = False
    num_ranks = 1

    def __init__(self, axes: Sequence[ReplicaAxis], rank: int, num_replicas: int) -> None:
        super().__init__()
        self.device: torch.device = torch_xla.device()
        self._axes = axes
        self._rank = rank
        self._num_replicas = num_replicas

    def enter_piece(self, piece: Tensor) -> Tensor:
        """Return a piece, of which a replica has its own."""
        return piece.detach()

    def leave_piece(self, part: Tensor) -> Tensor:
        """Return a piece, of which a replica has its own."""
        return part

    def spread(self, piece: Tensor) -> None:
        """Do nothing: a replica's piece is on its device."""

    def enter_shared(self, tensor: Tensor) -> Tensor:
        """Return a copy, which may be written."""
        return tensor.clone()

    def all_gather(self, parts: list[Tensor], tail_numel: int, bucket_id: int) -> list[Tensor]:
        """Return the 1-D parts of all ranks of the shard axis, end to end, by one all-gather.

        It gathers a list, so the results are the parameters, and nothing has to be cut out.
        """
        if self._axes[-1].size == 1:
            return [part.clone() for part in parts]
        wholes = list(parts)
        filled = [i for i, part in enumerate(parts) if part.numel()]
        sent = [parts[i] for i in filled]
        gathered = xm.all_gather(sent, 0, groups=self._axes[-1].groups, pin_layout=False)
        for i, whole in zip(filled, gathered, strict=True):
            wholes[i] = whole
        return wholes

    def reduce_scatter(self, whole: Tensor, scale: float, bucket_id: int) -> Tensor:
        """Return this rank's part of the sum of 1-D tensors over the shard axis, times `scale`."""
        axis = self._axes[-1]
        if axis.size == 1:
            return whole * scale
        part: Tensor = xm.reduce_scatter(
            xm.REDUCE_SUM, whole, scale, 0, axis.size, groups=axis.groups, pin_layout=False
        )
        return part

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the replicate axis."""
        return self._axes[0].reduce(tensor, "sum")

    def draw_apart(self) -> DrawApart:
        """See `Region`. With equal seeds replicas draw the same numbers as ranks of SPMD mode."""
        seeds = draw_seeds(self._num_replicas)[self._rank : self._rank + 1]
        drawing = self.drawing = DrawApart(seeds.to(self.device), may_read=True)
        return drawing

    def finish_graph(self) -> None:
        """See `Region`."""
        run_graph()


class ReplicaBackend(XlaBackend):
    """`Backend` of one replica, in a mesh of shape (shard,) or (replicate, shard)."""

    why_no_groups = "collectives are part of the graph"

    def __init__(self, shape: Sequence[int], rank: int) -> None:
        grid = np.arange(math.prod(shape)).reshape(-1, shape[-1])
        row, column = divmod(rank, shape[-1])
        lines = [(grid.T, row), (grid, column)][-len(shape) :]
        axes = [ReplicaAxis(groups.tolist(), at, torch_xla.device()) for groups, at in lines]
        super().__init__(ReplicaRegion(axes, rank, grid.size), axes)
