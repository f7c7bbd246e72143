"""The store of a bucket on a backend that traces operators into a graph, which runs later.

[Note: tensors of a traced store]
Traced tensors have no storage, so no memory is swapped behind them. The store has these tensors:
- piece: 1-D, storage dtype, one per parameter, padded. If one process has the pieces of all ranks
  (`Backend.is_spmd`), it is `padded_part_numel` long: the parts of all ranks end to end, which the
  backend spreads over the devices (`region.spread`). Else it is ``sizes[index]`` long, and has
  a rank's own part.
- unsharded parameter: one object for life, as on other backends; its contents come and go by
  ``.data``. Without contents it is empty, and of class `FreedParameter`.
- gradients: the gradients that came, flattened and padded; laid side by side when all have come.
A graph that ends returns every tensor that is alive: tensors that are not needed are dropped at
once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._compat import torch_tensors
from shardkit._errors import WrapError
from shardkit._layout import EvenLayout
from shardkit._params.flat_store import BucketPlan, Store
from shardkit._params.packing import packing_of
from shardkit._params.subclass_store import subclass_of
from shardkit._settings import AllGather, CPUOffloadPolicy
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.spec import padded, traced_spec
from shardkit.backends import tensor_parallel_of
from shardkit.backends.base import CommStreams, TracedGather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardkit._params.memory import SlotPool
    from shardkit._params.sites import ParamEntry
    from shardkit.backends.device import Event


class TracedStore(Store):
    """See the module's docstring."""

    keeps_flats = False
    why_lost = "which meshes of traced devices (XLA) do not take over"
    layout: EvenLayout

    def __init__(
        self, plan: BucketPlan, entries: Sequence[ParamEntry], layout: EvenLayout | None = None
    ) -> None:
        super().__init__(plan, entries)
        self.layout = layout or self.plan_layout(plan, entries)
        self.bucket_id = plan.mesh.backend.next_bucket_id()
        # Whether the unsharded parameters are those outside of the region, which the code that runs
        # the model sees, and not one rank's.
        self.is_outside = False
        self._job: TracedGather | None = None
        self._has_memory = False
        self.specs = [traced_spec(self.layout, i, plan.mesh, e.name) for i, e in enumerate(entries)]
        self._pieces = [self._cut_piece(i, e.param.detach()) for i, e in enumerate(entries)]
        self.unsharded = [self._new_unsharded(i, self._empty()) for i in range(len(entries))]
        self._note_classes()
        self._refuse_use()

    @classmethod
    def plan_layout(cls, plan: BucketPlan, entries: Sequence[ParamEntry]) -> EvenLayout:
        """Lay out the parameters, if a store of this kind can hold them."""
        cls._check(plan, entries)
        shapes = [tuple(entry.param.shape) for entry in entries]
        return EvenLayout.plan(shapes, world_size=plan.axis.size)

    @staticmethod
    def shard_nbytes_of(plan: BucketPlan, layout: EvenLayout) -> int:
        """Return the bytes of the parameters' parts on one rank."""
        return sum(layout.sizes) * plan.orig_dtype.itemsize

    @classmethod
    def _check(cls, plan: BucketPlan, entries: Sequence[ParamEntry]) -> None:
        """Raise if parameters are of a kind that is not traced."""
        for entry in entries:
            kind = type(entry.param).__name__
            if tensor_parallel_of(entry.param) is not None:
                cls._refuse(plan, entry, "a DTensor", ". Shard it by fully_shard alone.")
            if subclass_of(entry) is not None:
                what = f"a {kind} that gathers itself (fsdp_pre_all_gather)"
                remedy = "Make it a plain parameter, or pass it in ignored_params of fully_shard."
                cls._refuse(plan, entry, what, f". {remedy}")
            if packing_of(entry) is not None:
                remedy = "Do not quantize it, or pass it in ignored_params of fully_shard."
                rest = f": they have no views of bytes. {remedy}"
                cls._refuse(plan, entry, f"a {kind} over several tensors", rest)
        if isinstance(plan.offload, CPUOffloadPolicy):
            rest = ". Leave out offload_policy."
            cls._refuse(plan, entries[0], "offloaded to the host", rest)

    @staticmethod
    def _refuse(plan: BucketPlan, entry: ParamEntry, what: str, rest: str) -> None:
        msg = (
            f"parameter {entry.name!r} is {what}, which meshes of {plan.mesh.device_type!r} "
            f"devices do not support{rest}"
        )
        raise WrapError(msg)

    def _cut_piece(self, index: int, param: Tensor) -> Tensor:
        if isinstance(param, ShardedTensor):
            piece = param.local_piece
        else:
            piece = self.specs[index].slice_full(param).clone()
        if piece.device.type != "meta":
            self.plan.mesh.backend.region.spread(piece)
        return piece

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=self.plan.param_dtype, device=self.plan.device)

    # --- the shard ---

    def sharded(self, index: int) -> ShardedTensor:
        """Return parameter `index` as a tensor over its piece."""
        return ShardedTensor(self._pieces[index], self.specs[index])

    def sharded_grad(self, index: int, grad: Tensor) -> ShardedTensor:
        """Return this rank's piece of a whole gradient of parameter `index`, copied."""
        return ShardedTensor(self._cut_piece(index, grad), self.specs[index])

    def has_piece_of(self, index: int) -> bool:
        """Whether parameter `index` still has its piece here; not after ``.to(dtype)``."""
        piece = getattr(self.entries[index].param, "local_piece", None)  # None after a swap.
        return piece is self._pieces[index]

    def piece(self, reduced: Tensor, index: int) -> Tensor:
        """Return the part of parameter `index` in a reduced shard, in the format of pieces."""
        start, stop = self.layout.columns(index)
        piece: Tensor = self.plan.mesh.backend.region.leave_piece(reduced[start:stop])
        return piece

    @property
    def shard_version(self) -> int:
        """Sum of the pieces' version counters, which every write to a piece raises."""
        return sum(piece._version for piece in self._pieces)  # noqa: SLF001 - documented for this

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the parameters' parts on one rank."""
        return self.shard_nbytes_of(self.plan, self.layout)

    # --- the unsharded parameters ---

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters while they exist."""
        return self.layout.padded_numel * self.plan.param_dtype.itemsize

    @property
    def has_memory(self) -> bool:
        """Whether the unsharded parameters have contents, or will have them."""
        return self._has_memory

    def acquire(self, pool: SlotPool) -> Event | None:
        """Note the version of the shard to gather; there is no memory to get."""
        del pool
        self._has_memory = True
        self._gathered_version = self.shard_version
        self._allow_use()
        return None

    def gather_jobs(self, comm: AllGather | None) -> list[TracedGather]:
        """Return the gathers for the backend."""
        del comm
        pieces = [entry.param.local_piece.detach() for entry in self.entries]  # type: ignore[attr-defined]
        self._job = TracedGather(
            pieces, self.plan.param_dtype, self.layout.tail_numel, self.bucket_id
        )
        return [self._job]

    @torch_tensors.without_dispatch_modes
    @torch.no_grad()
    def finish_gather(self) -> None:
        """Give the unsharded parameters their contents."""
        job, self._job = self._job, None
        assert job is not None
        assert job.wholes is not None
        layout = self.layout
        for param, whole, numel, shape in zip(
            self.unsharded, job.wholes, layout.numels, layout.shapes, strict=True
        ):
            flat = whole if whole.numel() == numel else whole[:numel]
            param.data = flat.view(shape)
        self.is_outside = False

    @torch.no_grad()
    def move(self, fn: Callable[[Tensor], Tensor], *, outside: bool) -> None:
        """Take the contents of the unsharded parameters out of the ranks' region, or into it."""
        if self._has_memory and self._job is None and self.is_outside != outside:
            if self.is_outside:
                self._end_outside()
            for param in self.unsharded:
                param.data = fn(param.data)
            self.is_outside = outside

    def _end_outside(self) -> None:
        """Let autograd refuse the backward of earlier uses of parameters outside of the region.

        Such a backward would read tensors gathered in the region in place of those it saved.
        """
        for param in self.unsharded:
            torch.autograd.graph.increment_version(param)
        self.is_outside = False

    @torch_tensors.without_dispatch_modes
    def release(self, pool: SlotPool, fence: Event | None) -> None:
        """Drop the contents."""
        del pool, fence
        self._job = None
        self._has_memory = False
        empty = self._empty()
        if self.is_outside:
            self._end_outside()
        for param in self.unsharded:
            param.data = empty
        self._refuse_use()

    # --- gradients ---

    def new_gradient_buffer(self, receive_chunks: int) -> TracedSend:
        """Return a buffer that collects gradients; it has no receive buffer."""
        assert receive_chunks == 0
        return TracedSend(self.layout, self.plan)


class TracedSend:
    """Buffer that collects one bucket's gradients on a backend that traces."""

    def __init__(self, layout: EvenLayout, plan: BucketPlan) -> None:
        self._layout, self._plan = layout, plan
        self.written: dict[int, Tensor] = {}  # The gradients that came, by parameter.
        # Gradients, 1-D, ``layout.padded_numel``, `reduce_dtype`, after `complete`.
        self.flat: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that are kept."""
        return sum(grad.nbytes for grad in self.written.values())

    def write(self, index: int, grad: Tensor, streams: CommStreams, pool: SlotPool) -> None:
        """Take a gradient, or add it to the present one."""
        del streams, pool
        flat = grad.detach().to(self._plan.reduce_dtype).reshape(-1)
        flat = padded(flat, self._layout.padded_part_numel(index))
        self.written[index] = self.written[index] + flat if index in self.written else flat

    def write_all(self, grads: Mapping[int, Tensor], streams: CommStreams, pool: SlotPool) -> None:
        """Take several gradients, or add them to the present ones."""
        for index, grad in grads.items():
            self.write(index, grad, streams, pool)

    @torch.no_grad()
    def complete(self, streams: CommStreams, pool: SlotPool) -> None:
        """Lay the gradients side by side, with zeros for missing ones."""
        del streams, pool
        plan, layout = self._plan, self._layout
        num_ranks = layout.world_size

        def zeros(columns: int) -> Tensor:
            return torch.zeros(num_ranks, columns, dtype=plan.reduce_dtype, device=plan.device)

        columns = [
            self.written[i].view(num_ranks, -1) if i in self.written else zeros(size)
            for i, size in enumerate(layout.sizes)
            if size
        ]
        if layout.tail_numel:
            columns.append(zeros(layout.tail_numel))
        self.written = {}
        self.flat = torch.cat(columns, 1).reshape(-1) if columns else zeros(0).reshape(-1)

    def close_send(self, pool: SlotPool, fence: Event | None, *, by_compute: bool = False) -> None:
        """Drop the gradients, which were sent, or which an exception has left."""
        del pool, fence, by_compute
        self.flat = None
        self.written = {}

    def room(self, streams: CommStreams, pool: SlotPool) -> Tensor:
        """Refuse, since nothing is received."""
        raise NotImplementedError

    def close_receive(self, pool: SlotPool) -> None:
        """Do nothing, since nothing was received."""
