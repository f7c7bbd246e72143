"""`ShardedTensor`: this rank's flat piece of a tensor that has a global shape.

What parameters, gradients and optimizer state of a sharded module are between forwards. What
operators do on it is in `_tensor.ops`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._tensor import dcp_protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit._mesh import DeviceMesh
    from shardkit._tensor.spec import ShardSpec


_OWN_ATTRIBUTES = ("spec", "local_piece", "flat", "flat_start")


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a tensor by others than shardkit and torch."""
    return {k: v for k, v in tensor.__dict__.items() if k not in (*_OWN_ATTRIBUTES, "_is_param")}


_dispatcher: Callable[[Any, Any, Any], Any]


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

    def repoint(self, local: Tensor, spec: ShardSpec, flat: Tensor | None) -> None:
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
        return dcp_protocol.create_chunk_list(self.spec, self.local_piece)

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
