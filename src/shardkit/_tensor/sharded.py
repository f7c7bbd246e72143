"""`ShardedTensor`: this rank's flat piece of a tensor that has a global shape.

What parameters, gradients and optimizer state of a sharded module are between forwards. What
operators do on it is in `_tensor.ops`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._tensor import dcp_protocol

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from shardkit._layout.flat import FlatLayout
    from shardkit._mesh import DeviceMesh


@dataclass(frozen=True)
class Replicate:
    """Every rank of the mesh axis holds the same."""


@dataclass(frozen=True)
class FlatShard:
    """Along the mesh axis each rank holds a contiguous range of the flattened tensor, maybe none.

    Not torch's ``Shard(0)``: a cut may fall inside a row.
    """


class ShardSpec:
    """How one parameter is cut, shared by the parameter, its gradient and its optimizer state.

    Attributes:
        layout: The bucket's layout.
        index: The parameter's position in it.
        mesh: The mesh.
        axis: Communicates along the shard axis (`shardkit.backends.AxisComm`).
        name: The parameter's name, for errors; the root's first forward sets the full one.
        start: First owned element of the flattened tensor on this rank.
        stop: Its end; equal to `start` where this rank owns nothing.
        piece_range: [start, stop) of this rank's piece in its shard.
        state_allocator: Open flats of the bucket (`_tensor.ops.FlatMaker`).
        shard_device: Device of the pieces; None: the mesh's.
        subclass: How it is gathered, if it says so itself (`_params.subclass_bucket.Subclass`).
        tensor_parallel: How it is split over axes of another mesh before it is cut here
            (`shardkit.backends.dtensor.TensorParallel`); the layout, `start` and `stop`
            are those of this rank's part. None: not at all.
        axes: The axes over which ranks hold different elements.
        is_written_here: Whether this rank offers its piece to checkpoints. Not where ranks hold
            the same elements, cut in another way: then one of them does.
        entry: Weak: the parameter and every place that its group found it in (`ParamEntry`).
    """

    __slots__ = (
        "axes",
        "axis",
        "entry",
        "index",
        "is_written_here",
        "layout",
        "mesh",
        "name",
        "piece_range",
        "shard_device",
        "start",
        "state_allocator",
        "stop",
        "subclass",
        "tensor_parallel",
    )

    def __init__(  # noqa: PLR0913 - a record, made in one place
        self,
        layout: FlatLayout,
        index: int,
        *,
        mesh: DeviceMesh,
        axis: Any,
        name: str,
        state_allocator: Any = None,
        shard_device: torch.device | None = None,
        tensor_parallel: Any = None,
        subclass: Any = None,
    ) -> None:
        self.state_allocator = state_allocator
        self.shard_device = shard_device
        self.entry: weakref.ref[Any] | None = None
        self.layout = layout
        self.index = index
        self.mesh = mesh if tensor_parallel is None else tensor_parallel.join(mesh)
        self.axis = axis
        self.tensor_parallel = tensor_parallel
        self.subclass = subclass
        self.axes = (axis,) if tensor_parallel is None else (axis, *tensor_parallel.axes)
        self.is_written_here = True
        self.name = name
        self.start, self.stop = layout.owned_range(index, axis.rank)
        self.piece_range = layout.shard_range(index, axis.rank)

    is_traced = False
    """Operators on pieces are traced, and there may be padding behind the pieces."""

    @property
    def piece_numel(self) -> int:
        """Elements of this rank's piece."""
        return self.stop - self.start

    def trim(self, piece: Tensor) -> Tensor:
        """Return a piece without padding behind it; there is none here."""
        return piece

    def without_padding(self, piece: Tensor, neutral: Any) -> Tensor:
        """Return a piece for a reduction, to which elements of value `neutral` do nothing."""
        del neutral
        return self.trim(piece)

    def gather(self, piece: Tensor) -> Tensor:
        """Return the whole tensor of which `piece` is this rank's. Collective."""
        full = self._gather_part(piece)
        if self.tensor_parallel is None:
            return full
        whole: Tensor = self.tensor_parallel.to_whole(full)
        return whole

    def _gather_part(self, piece: Tensor) -> Tensor:
        layout, index, axis = self.layout, self.index, self.axis
        owners = layout.owners(index)
        full = piece.new_empty(layout.numels[index])
        if len(owners) * 2 < axis.size:
            for owner in owners:
                start, stop = layout.owned_range(index, owner)
                if owner == axis.rank:
                    full[start:stop] = piece
                axis.broadcast(full[start:stop], src=owner)
        elif len(owners) > 0:
            ranges = [layout.owned_range(index, rank) for rank in range(axis.size)]
            longest = max(stop - start for start, stop in ranges)
            pieces = piece.new_zeros(axis.size, longest)
            pieces[axis.rank, : piece.numel()] = piece
            axis.all_gather(pieces.view(-1), pieces[axis.rank])
            for rank, (start, stop) in enumerate(ranges):
                full[start:stop] = pieces[rank, : stop - start]
        return full.view(layout.shapes[index])

    def annotate_sharding(self, piece: Tensor) -> None:
        """Have a piece spread over devices of this process; there is only one here."""

    def check_saved(self) -> None:
        """Raise if this rank's piece cannot be written to a file of its own."""

    def __deepcopy__(self, memo: object) -> ShardSpec:
        """Return itself: copies of a tensor are cut alike, on the same mesh."""
        del memo
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        if self.tensor_parallel is not None:
            shape: tuple[int, ...] = self.tensor_parallel.shape
            return shape
        return self.layout.shapes[self.index]

    @property
    def placements(self) -> tuple[Any, ...]:
        """One placement per mesh axis: the last of the axes sharded here is sharded.

        Those of a DTensor follow, as torch's.
        """
        inner = () if self.tensor_parallel is None else self.tensor_parallel.placements
        replicated = self.mesh.ndim - len(inner) - 1
        return (*(Replicate() for _ in range(replicated)), FlatShard(), *inner)

    @property
    def device(self) -> torch.device:
        """Where pieces are: the mesh's device, or the host if they are offloaded."""
        device: torch.device = (
            self.shard_device if self.shard_device is not None else self.mesh.backend.device
        )
        return device

    def same_cut(self, other: ShardSpec) -> bool:
        """Whether pieces of both line up on every rank."""
        return self is other or (
            self.shape == other.shape
            and (self.axis is other.axis or self.mesh == other.mesh)
            and self.tensor_parallel == other.tensor_parallel
            and self.layout.cut(self.index) == other.layout.cut(other.index)
        )

    def slice_full(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a tensor of the global shape: 1-D, a view if it can be."""
        if self.tensor_parallel is not None:
            full = self.tensor_parallel.to_part(full)
        return full.reshape(-1)[self.start : self.stop]

    def local_indices(self, places: Tensor) -> Tensor:
        """Return where elements of the flattened whole lie in this rank's piece.

        What is not in it is below 0 or beyond its end.
        """
        if self.tensor_parallel is not None:
            places = self.tensor_parallel.part_indices(places)
        return places - self.start


_OWN_ATTRIBUTES = ("spec", "local_piece", "flat", "flat_start")


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a tensor by others than shardkit and torch."""
    return {k: v for k, v in tensor.__dict__.items() if k not in (*_OWN_ATTRIBUTES, "_is_param")}


def _no_dispatcher(func: Any, args: Any, kwargs: Any) -> Any:
    raise NotImplementedError(func, args, kwargs)


_dispatcher: Callable[[Any, Any, Any], Any] = _no_dispatcher


def set_dispatcher(dispatcher: Callable[[Any, Any, Any], Any]) -> None:
    """Say who runs operators on sharded tensors (`_tensor.ops` does, when it is imported)."""
    global _dispatcher  # noqa: PLW0603 - set once, at import
    _dispatcher = dispatcher


class ShardedTensor(Tensor):
    """A tensor of a global shape of which this rank holds a flat range.

    Looks like FSDP2's DTensor parameters: `shape` is global, `placements` and `device_mesh` say
    how it is spread, `to_local()` is this rank's piece, `full_tensor()` the whole. Made by
    `fully_shard`.

    Elementwise operators (also `_foreach` and `_fused` ones) cost no communication; reductions
    over the whole tensor return the global value on every rank for one small all-reduce (a
    `_foreach_norm` over a list costs one for the list) and so must be called by all ranks. Random
    in-place fills give the same full tensor at every world size, from generators in equal state.
    """

    local_piece: Tensor
    spec: ShardSpec
    flat: Tensor | None
    flat_start: int
    __torch_function__ = _compat.disabled_torch_function

    @staticmethod
    def __new__(  # noqa: D417 - the class needs no description
        cls: type[Self],
        local: Tensor,
        spec: ShardSpec,
        flat: Tensor | None = None,
        flat_start: int = 0,
    ) -> Self:
        """Wrap a piece, not copied.

        Args:
            local: 1-D, ``spec.stop - spec.start`` elements.
            spec: How the tensor is cut.
            flat: 1-D, what `local` is a view of together with the pieces of other parameters of
                the bucket, laid out as in the shard; lets list operators run on all at once.
            flat_start: Position in the shard of the flat's first element.
        """
        self: Self = _compat.make_wrapper(cls, local, spec.shape)
        self.local_piece = local
        self.spec = spec
        self.flat = flat
        self.flat_start = flat_start
        return self

    def __init__(
        self, local: Tensor, spec: ShardSpec, flat: Tensor | None = None, flat_start: int = 0
    ) -> None:
        """Nothing is left to do after `__new__`."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the name, the global shape and this rank's range; no communication."""
        spec = self.spec
        return (
            f"ShardedTensor({spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"local=[{spec.start}:{spec.stop}], mesh={spec.mesh.shape})"
        )

    @property
    def data(self) -> Tensor:
        """This tensor without its history; the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take over values and dtype of `value`: sharded alike, or of the global shape."""
        self.copy_values(value)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor is spread over."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """One placement per mesh axis."""
        return self.spec.placements

    def repoint(self, local: Tensor, spec: ShardSpec, flat: Tensor) -> None:
        """Let this tensor's piece lie in another flat that holds the same numbers."""
        self.local_piece, self.spec, self.flat, self.flat_start = local, spec, flat, 0

    @torch.no_grad()
    def copy_values(self, value: Tensor) -> None:
        """Take over values and dtype of a tensor: sharded alike, or of the global shape.

        Copies into this rank's piece; if the dtype is another, or this tensor is on meta, into a
        new piece on the mesh's device, which the group takes up at its next forward.
        """
        if value.dtype == self.dtype and not self.is_meta:
            self.copy_(value)
            return
        spec = self.spec
        piece = torch.empty(spec.piece_numel, dtype=value.dtype, device=spec.device)
        ShardedTensor(piece, spec).copy_(value)
        self.replace_piece(piece)

    @torch.no_grad()
    def replace_piece(self, piece: Tensor) -> None:
        """Let this tensor have another piece, not copied, maybe of another dtype or device."""
        new: Tensor = ShardedTensor(piece, self.spec)
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=self.requires_grad)
        new.__dict__.update(user_attributes(self))
        grad, self.grad = self.grad, None
        torch.utils.swap_tensors(self, new)
        if grad is not None:
            self.grad = grad.to(self.dtype)

    def to_local(self) -> Tensor:
        """Return this rank's piece: 1-D, maybe empty, shares memory with this tensor.

        Differentiable: the gradient of the piece becomes this rank's piece of the gradient.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            result: Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
            return result
        return self.local_piece

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, global shape, on every rank.

        Call it on all ranks of the shard axis, and of the axes that a tensor-parallel parameter
        is split over. Differentiable: each rank keeps its piece of the
        gradient it computed, so the ranks must compute the same from it.

        Cost: one all-gather of at most twice the tensor's bytes, or a broadcast per owner where
        few ranks own it; then one more for each axis of tensor parallelism that it is split over.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            result: Tensor = _FullTensor.apply(self)  # type: ignore[no-untyped-call]
            return result
        return self.spec.gather(self.local_piece)

    def share_memory_(self) -> Self:
        """Move this rank's piece, and what shares its storage, to shared memory."""
        self.local_piece.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether this rank's piece is in shared memory."""
        return bool(self.local_piece.is_shared())

    def module_load(self, other: Tensor, assign: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        """Return what `load_state_dict` swaps this parameter with, if torch is set to do so."""
        del assign  # Done before, see `_state.state_dict`.
        if other is not self:
            self.copy_(other)
        result = torch.nn.Parameter(self.detach(), requires_grad=self.requires_grad)
        result.__dict__.update(user_attributes(self))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """Copy this rank's piece; the copy is cut in the same way on the same mesh."""
        if id(self) in memo:
            done: ShardedTensor = memo[id(self)]
            return done
        with torch.no_grad():
            result = ShardedTensor(self.local_piece.detach().clone(), self.spec)
        memo[id(self)] = result
        result.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            if name not in _OWN_ATTRIBUTES:
                result.__dict__[name] = copy.deepcopy(value, memo)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __create_write_items__(self, fqn: str, tensor: object) -> list[Any]:
        """Tell a distributed checkpoint what this rank writes; see `dcp_protocol`."""
        del tensor
        spec = self.spec
        boxes = dcp_protocol.boxes_to_write(spec)
        return dcp_protocol.create_write_items(fqn, self.local_piece, spec.shape, boxes, spec.name)

    def __create_chunk_list__(self) -> list[Any]:
        """Tell a distributed checkpoint what this rank wants to load; see `dcp_protocol`."""
        return dcp_protocol.create_chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Give a distributed checkpoint the memory to read or write; see `dcp_protocol`."""
        spec = self.spec
        boxes = dcp_protocol.boxes_of_piece(spec)
        return dcp_protocol.get_tensor_shard(index, self.local_piece, spec.shape, boxes, spec.name)

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        """Name the inner tensor, so that `module.to(dtype)` and torch.compile see it."""
        return ["local_piece"], self.spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], spec: ShardSpec, outer_size: object, outer_stride: object
    ) -> ShardedTensor:
        """Put the inner tensor back."""
        del outer_size, outer_stride
        return ShardedTensor(inner["local_piece"], spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` by the handler of its kind."""
        del types
        return _dispatcher(func, args, kwargs or {})


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: ShardedTensor) -> Tensor:
        ctx.spec = sharded.spec
        return sharded.spec.gather(sharded.local_piece)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        return ShardedTensor(ctx.spec.slice_full(grad).clone(), ctx.spec)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: ShardedTensor) -> Tensor:
        ctx.spec = sharded.spec
        return sharded.local_piece.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> ShardedTensor:
        return ShardedTensor(grad, ctx.spec)
