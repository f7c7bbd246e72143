"""`ShardedTensor`: this rank's flat piece of a tensor that has a global shape.

Parameters, gradients and optimizer state of a sharded module are such tensors between forwards.
`_tensor.ops` has the operators on them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shardkit._compat import torch_autograd, torch_tensors
from shardkit._errors import ShardedTensorError
from shardkit._host_values import HostValues
from shardkit._tensor import dcp_protocol
from shardkit._tensor.client_answers import ClientAnswers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit._mesh import DeviceMesh
    from shardkit._tensor.spec import ShardSpec

    _Map = Callable[[Any], Any]


# --- hooks on gradients ---------------------------------------------------------------------------
#
# A forward computes with the unsharded parameter, so gradients arrive there. As soon as the sharded
# parameter has a hook, the unsharded one gets a hook that runs it. Without hooks there is no cost.

_RELAYED = "_shardkit_relays"
"""Attribute where an unsharded parameter keeps the parameter whose hooks it runs."""


class OwnHook:
    """Base of hooks that shardkit itself puts on sharded tensors: they are not relayed."""


def _relay(hooks_ref: weakref.ref[Any], grad: Tensor) -> Tensor:
    """Run the hooks in torch's own list, as torch would; removed hooks have left that list."""
    for hook in list((hooks_ref() or {}).values()):
        if not isinstance(hook, OwnHook):
            result = hook(grad)
            grad = grad if result is None else result
    return grad


def relay_hooks(param: Tensor, unsharded: nn.Parameter) -> None:
    """Let an unsharded parameter's gradients pass through the hooks of the sharded one."""
    hooks = torch_autograd.tensor_hooks(param)
    if hooks is None or unsharded.__dict__.get(_RELAYED) is hooks:
        return
    if all(isinstance(hook, OwnHook) for hook in hooks.values()):
        return
    unsharded.__dict__[_RELAYED] = hooks
    with while_trainable(unsharded):
        # Weak: a hook may hold the model.
        unsharded.register_hook(functools.partial(_relay, weakref.ref(hooks)))


def refused_hook(hook: Any) -> str | None:
    """Return why a hook on a sharded parameter's gradient would never be called; None: it will."""
    if not torch_autograd.is_of_several_tensors(hook):
        return None
    return (
        "cannot have a hook of register_multi_grad_hook(mode='all'), which would never be called: "
        "it awaits parameters that are themselves in the graph, and unsharded ones are there "
        "instead. Call register_hook, or register_post_accumulate_grad_hook, on each parameter."
    )


@contextlib.contextmanager
def while_trainable(param: nn.Parameter) -> Iterator[None]:
    """Allow hooks on a parameter, even if it is frozen for now or has no memory."""
    was_frozen = not param.requires_grad
    with torch_tensors.plain_torch_functions():
        if was_frozen:
            param.requires_grad_(True)
        yield
        if was_frozen:
            param.requires_grad_(False)


# --- replicas -------------------------------------------------------------------------------------


class ReplicatedTensor(Tensor):
    """A whole tensor that acts like a plain one: results of operators on it are plain tensors."""

    spec: ShardSpec
    __torch_function__ = torch_tensors.disabled_torch_function

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the sharded tensor."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """`Replicate` for each mesh axis."""
        return self.spec.replicas

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor; see `ShardedTensor.full_tensor`."""
        whole = self.as_subclass(Tensor)
        return whole if grad_placements is None else _summing(whole, self.spec, grad_placements)

    full_tensor = to_local


def is_replica(placements: Any) -> bool:
    """Whether placements, ours or torch's, ask for the same tensor on each rank."""
    return all(type(placement).__name__ == "Replicate" for placement in placements)


# --- sharded tensors ------------------------------------------------------------------------------

_OWN_ATTRIBUTES = (
    "spec",
    "local_piece",
    "flat",
    "flat_start",
    "cut_for",
    "cut_by",
    "last_cut",
    "lost_gradient",
    "data_refs",
)

_NUM_REFS_TO_PRUNE = 32
"""Length of a list of weak references at which dead ones leave it, and at each multiple of it."""


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor that neither shardkit nor torch has set."""
    return {k: v for k, v in tensor.__dict__.items() if k not in (*_OWN_ATTRIBUTES, "_is_param")}


class ShardedTensor(ClientAnswers):
    """A tensor of a global shape of which this rank holds a flat range.

    It looks like FSDP2's DTensor parameters: `shape` is global, `placements` and `device_mesh` say
    how it is spread, `to_local()` returns this rank's shard, and `full_tensor()` the whole tensor.
    `fully_shard` makes it.

    Elementwise operators (also `_foreach` and `_fused` ones) cost no communication. Reductions over
    the whole tensor return the global value on every rank, so all ranks must call them. They cost
    one small all-reduce (a `_foreach_norm` over a list costs one for the list). Random in-place
    fills give the same full tensor at every world size, if the generators are in equal states.
    """

    spec: ShardSpec
    flat: Tensor | None
    flat_start: int
    cut_for: Any
    cut_by: _GradientCut
    last_cut: Any
    lost_gradient: str  # Why no gradient may arrive here; usually absent.
    data_refs: list[weakref.ref[ShardedTensor]]
    """What `data` returned over this memory, and its views of the same shape; they share it."""
    __torch_function__ = torch_tensors.disabled_torch_function

    dispatch: ClassVar[Callable[[Any, Any, Any], Any]]
    """Function that runs operators on sharded tensors; importing `_tensor.ops` sets this and it."""
    dispatch_mixed: ClassVar[Callable[[Any, Any, Any], Any]]
    """Function that runs operators on sharded tensors and tensors of other classes, e.g. views."""

    @staticmethod
    def __new__(  # noqa: D417 - the class needs no description
        cls: type[Self],
        local: Tensor,
        spec: ShardSpec,
        flat: Tensor | None = None,
        flat_start: int = 0,
    ) -> Self:
        """Wrap a piece without a copy.

        Args:
            local: Piece of this rank, 1-D, ``spec.stop - spec.start`` elements.
            spec: Cut of the tensor.
            flat: 1-D tensor of which `local` is a view. It also has the pieces of the bucket's
                other parameters, laid out as in the shard, so that list operators run on all
                pieces at once.
            flat_start: Position in the shard of the flat's first element.
        """
        self: Self = torch_tensors.make_wrapper(
            cls, spec.shape, dtype=local.dtype, device=local.device
        )
        self.local_piece = local
        self.spec = spec
        self.flat = flat
        self.flat_start = flat_start
        return self

    @classmethod
    def over(cls, flat: Tensor, spec: ShardSpec, flat_start: int = 0) -> Self:
        """Wrap the piece that a spec cuts from a flat; the first access to it makes its view.

        List operators run on flats, so most gradients need no view.
        """
        self: Self = torch_tensors.make_wrapper(
            cls, spec.shape, dtype=flat.dtype, device=flat.device
        )
        self.spec = spec
        self.flat = flat
        self.flat_start = flat_start
        return self

    @functools.cached_property
    @torch_tensors.without_dispatch_modes
    def local_piece(self) -> Tensor:  # type: ignore[override]  # It can be written.
        """The piece of this rank, 1-D: the given one, or the view of the flat."""
        assert self.flat is not None
        start, stop = self.spec.piece_range
        return self.flat[start - self.flat_start : stop - self.flat_start]

    def cut_gradient(self, *, is_gathered: bool = False) -> None:
        """Let the gradient of this tensor arrive as this rank's piece of it.

        Each operator that autograd records calls this. So do operators that return plain tensors,
        because in the forward of a user's `autograd.Function` none is recorded. A gradient that
        comes back through a plain tensor is whole, and different on each rank. So may be what a
        user's hook computes from the gradient and a plain tensor. A leaf stores the result, so
        there the result is cut once more.

        Args:
            is_gathered: Whether the whole tensor is used, together with each rank's own data.
        """
        if not self.requires_grad:
            return
        try:
            made_by = self.grad_fn or True  # A write in place makes it another operator's result.
        except RuntimeError:
            return  # A view made without gradients, and written since: torch records nothing on it.
        if self.__dict__.get("cut_for") is not made_by:
            self.cut_for = made_by
            self.cut_by = _GradientCut(self.spec, refusal=self.__dict__.get("lost_gradient"))
            torch_autograd.add_first_hook(self, self.cut_by)
            if self.is_leaf:
                last = _GradientCut(self.spec, may_be_number=False)
                self.last_cut = self.register_hook(last)
        if is_gathered:
            self.cut_by.may_be_number = False

    def _is_followed(self) -> bool:
        """Whether autograd records operators on this tensor; refuse forbidden gradients."""
        is_followed = torch.is_grad_enabled() and self.requires_grad
        if is_followed and "lost_gradient" in self.__dict__:
            self.cut_gradient()
        return is_followed

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call a function with this tensor's gradient, which it may replace.

        The hook of a parameter gets this rank's whole gradient in each backward, before ranks
        reduce it.

        Raises:
            ShardedTensorError: It is torch's hook that awaits the gradients of several parameters.
        """
        refusal = refused_hook(hook) if self.unsharded is not None else None
        if refusal is not None:
            msg = f"sharded {self.spec.name!r} {refusal}"
            raise ShardedTensorError(msg)
        handle: Any = super().register_hook(hook)  # type: ignore[no-untyped-call]
        if "last_cut" in self.__dict__:
            torch_autograd.run_last(self, self.last_cut)
        unsharded = self.unsharded
        if unsharded is not None:
            # `swap_tensors` removes the hooks.
            torch_autograd.share_hooks(self, torch_autograd.tensor_hooks(self))
            relay_hooks(self, unsharded)
        return handle

    @property
    def unsharded(self) -> nn.Parameter | None:
        """Parameter that modules hold while this one is in use; None: this is not in a group."""
        entry, unsharded = self.spec.entry, self.spec.unsharded
        of: Any = None if entry is None else entry()
        is_own = of is not None and of.param is self
        return unsharded() if is_own and unsharded is not None else None

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the name, the global shape and this rank's range; no communication."""
        spec = self.spec
        packed = ""
        if spec.packing is not None:
            packed = f"packed={spec.packing.cls.__name__}{spec.packing.shape}, "
        return (
            f"ShardedTensor({spec.name!r}, {packed}shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"local=[{spec.start}:{spec.stop}], mesh={spec.mesh.shape})"
        )

    @property
    def data(self) -> Tensor:
        """This tensor without its history; the same memory, until `data` is set."""
        result: Any = self.detach()
        result.share_data(self)
        return result  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take over values and dtype of `value`, sharded in the same way or of global shape.

        As with a plain tensor, what `data` returned before keeps its values. Here they move to
        memory of their own, because the piece has its place in the shard.
        """
        if type(value) is ShardedTensor and value.local_piece is self.local_piece:
            return
        if value.shape == self.shape and value.dtype == self.dtype:
            self._part_from_data()
        self.copy_values(value)

    def share_data(self, other: ShardedTensor) -> None:
        """Note that this tensor is the data of another one, or shares it, until `data` is set."""
        try:
            refs = other.data_refs
        except AttributeError:
            refs = other.data_refs = []
        self.data_refs = refs
        refs.append(weakref.ref(self))
        if not len(refs) % _NUM_REFS_TO_PRUNE:
            refs[:] = [ref for ref in refs if ref() is not None]

    def _part_from_data(self) -> None:
        """Move what `data` returned to memory of its own, with its values.

        If this tensor is such data itself, only this one is moved.
        """
        before = self.local_piece
        alive = [each for ref in self.__dict__.get("data_refs", ()) if (each := ref()) is not None]
        same = [each for each in alive if each.local_piece is before]
        moved = [each for each in same if each is self] or same
        self._forget_data_refs()
        if moved:
            with torch.inference_mode(mode=False), torch.no_grad():
                piece = before.clone()
            for each in moved:
                each.repoint(piece, each.spec, None)

    def _forget_data_refs(self) -> None:
        refs = self.__dict__.pop("data_refs", None)
        if refs:
            refs[:] = [ref for ref in refs if ref() is not self]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor is spread over."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """One placement per mesh axis."""
        return self.spec.placements

    def repoint(self, local: Tensor, spec: ShardSpec, flat: Tensor | None) -> None:
        """Move this tensor's piece to another flat that holds the same numbers."""
        self.local_piece, self.spec, self.flat, self.flat_start = local, spec, flat, 0

    @torch.no_grad()
    def copy_values(self, value: Tensor) -> None:
        """Take over values and dtype of a tensor, sharded in the same way or of global shape.

        The values are copied into this rank's piece. If the dtype differs, or this tensor is on
        meta, they go into a new piece on the mesh's device, which the group uses from its next
        forward on. From a tensor on meta, one on meta takes the dtype only.

        Raises:
            ShardedTensorError: The shapes differ.
        """
        if value.shape != self.shape:
            msg = (
                f"sharded {self.spec.name!r} of shape {tuple(self.shape)} cannot take values of "
                f"shape {tuple(value.shape)}: it is cut for its shape. Resize a model "
                f"(resize_token_embeddings) before fully_shard, or make a new module of "
                f"full_tensor(), call fully_shard on it and put it into the model."
            )
            raise ShardedTensorError(msg)
        if value.dtype == self.dtype and not self.is_meta:
            self.copy_(value)
            return
        spec, before, grad = self.spec, self.local_piece, self.grad
        flat, flat_start = self.flat, self.flat_start
        device = self.device if value.is_meta and self.is_meta else spec.device
        piece = torch.empty(spec.piece_numel, dtype=value.dtype, device=device)
        self.replace_piece(piece)
        try:
            self.copy_(value)  # The operator notes that a parameter was written.
        except BaseException:
            self.grad = None
            self.replace_piece(before)
            self.grad, self.flat, self.flat_start = grad, flat, flat_start
            raise

    @torch.no_grad()
    def replace_piece(self, piece: Tensor) -> None:
        """Give this tensor another piece without a copy, maybe of another dtype or device."""
        self._forget_data_refs()  # `swap_tensors` refuses weak references.
        new: Tensor = ShardedTensor(piece, self.spec)
        if isinstance(self, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=self.requires_grad)
        new.__dict__.update(user_attributes(self))
        torch_tensors.keep_grad_dtype(new, self)
        grad, self.grad = self.grad, None
        torch.utils.swap_tensors(self, new)
        if grad is not None:
            self.grad = grad.to(torch_tensors.grad_dtype_of(self) or grad.dtype)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return this rank's shard: 1-D, maybe empty; it shares memory with this tensor.

        It is differentiable: the gradient of the shard becomes this rank's shard of the gradient.

        Args:
            grad_placements: Placements of the gradient: the tensor's own, or None.

        Raises:
            ShardedTensorError: They are others.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            msg = (
                f"to_local of sharded {self.spec.name!r} cannot take grad_placements="
                f"{tuple(grad_placements)}: the gradient of a shard is a shard, so only the "
                f"tensor's own placements are possible. full_tensor takes others."
            )
            raise ShardedTensorError(msg)
        if self._is_followed():
            spec = self.spec
            return _linear(
                self, lambda own: own.local_piece.detach(), lambda grad: ShardedTensor(grad, spec)
            )
        return self.local_piece

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor, in its global shape, on every rank.

        Call it on all ranks of the shard axis, and of the axes that a tensor-parallel parameter is
        split over. It is differentiable: the gradients that the ranks computed from it, each with
        its own data, are averaged, and each rank keeps its shard. That costs an all-reduce of the
        tensor's bytes in backward.
        For a frozen parameter over several tensors (quantized weights) the result is a tensor of
        the parameter's own class, in memory of its own.

        Args:
            grad_placements: Placements of the gradient, as for a DTensor: one of torch for each
                axis of the mesh. Over axes with ``Partial()`` gradients are summed, not averaged.

        Raises:
            ShardedTensorError: The placements are not ``Partial()`` or ``Replicate()``, or there is
                a ``Partial()`` for an axis of tensor parallelism.

        Cost: one all-gather of at most twice the tensor's bytes, or a broadcast per owner if few
        ranks own the tensor; then one more for each axis of tensor parallelism that splits it.
        """
        if self._is_followed():
            # Gradients differ between ranks: they are averaged and cut.
            cut = _GradientCut(self.spec, may_be_number=False)
            whole = _linear(self, ShardedTensor.whole_values, cut)
            return whole if grad_placements is None else _summing(whole, self.spec, grad_placements)
        whole = self.whole_values()
        packing = self.spec.packing
        if packing is not None and whole.dtype == torch.uint8:
            whole = packing.unpack(whole.untyped_storage(), 0)
        return whole

    def whole_values(self) -> Tensor:
        """Return the whole tensor, like `full_tensor`; bytes if the parameter's bytes are cut."""
        return self.spec.gather(self.local_piece)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, **options: Any
    ) -> Tensor:
        """Return the tensor with other placements, as DTensor's method does.

        Args:
            device_mesh: Mesh of the tensor, or None.
            placements: Placements to reach. `Replicate` for each mesh axis, ours or torch's: return
                the whole on every rank, differentiable, with ``to_local()``. The tensor's own, or
                None: return the tensor.
            **options: Options such as DTensor's ``async_op``, which change nothing here.

        Raises:
            ShardedTensorError: The placements are others. Flat ranges cannot become rows.

        Cost: that of `full_tensor`.
        """
        del options
        wanted = self.placements if placements is None else tuple(placements)
        is_here = device_mesh is None or tuple(device_mesh.shape) == tuple(self.device_mesh.shape)
        if is_here and wanted == self.placements:
            return self
        if not is_here or len(wanted) != len(self.placements) or not is_replica(wanted):
            msg = (
                f"sharded {self.spec.name!r} cannot be redistributed to {wanted} on "
                f"{device_mesh if not is_here else self.device_mesh}: it has {self.placements}, "
                f"and can be gathered by placements={list(self.spec.replicas)}. For rows call "
                f"full_tensor() and slice it."
            )
            raise ShardedTensorError(msg)
        whole = self.full_tensor().as_subclass(ReplicatedTensor)
        whole.spec = self.spec
        return whole

    def share_memory_(self) -> Self:
        """Move this rank's piece, and all tensors on its storage, to shared memory."""
        self.local_piece.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether this rank's piece is in shared memory."""
        return bool(self.local_piece.is_shared())

    def module_load(self, other: Tensor, assign: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        """Return the tensor that `load_state_dict` swaps in, if torch is set to swap parameters."""
        del assign  # `_params.state_dicts` has done it before.
        if other is not self:
            self.copy_(other)
        return copy.copy(self)

    def __copy__(self) -> ShardedTensor:
        """Return another tensor with the memory of this one, and without its history, as torch."""
        is_param = isinstance(self, torch.nn.Parameter)
        result: Any = torch.nn.Parameter(self.detach()) if is_param else self.detach()
        result.requires_grad_(self.requires_grad)
        result.__dict__.update(user_attributes(self))
        if self.is_leaf:
            torch_tensors.keep_grad_dtype(result, self)
        # The same object: `xm.save` of torch_xla tells tensors apart by their ids.
        result.local_piece = self.local_piece
        copied: ShardedTensor = result
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        """Copy this rank's piece; the copy is cut in the same way on the same mesh."""
        if id(self) in memo:
            done: ShardedTensor = memo[id(self)]
            return done
        if not self.is_leaf:
            msg = (
                f"a result of operators on sharded {self.spec.name!r} cannot be deep-copied: as in "
                f"torch, only tensors without a history can. Copy its detach()."
            )
            raise ShardedTensorError(msg)
        with torch.no_grad():
            result = ShardedTensor(self.local_piece.detach().clone(), self.spec)
        memo[id(self)] = result
        result.requires_grad_(self.requires_grad)
        torch_tensors.keep_grad_dtype(result, self)
        for name, value in self.__dict__.items():
            if name not in _OWN_ATTRIBUTES:
                result.__dict__[name] = copy.deepcopy(value, memo)
        # As torch: a copy of a parameter has no gradient.
        if self.grad is not None and not isinstance(self, torch.nn.Parameter):
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __create_write_items__(self, fqn: str, tensor: object) -> list[Any]:
        """Return what this rank writes to a distributed checkpoint; see `dcp_protocol`."""
        del tensor
        spec = self.spec
        boxes = dcp_protocol.boxes_to_write(spec)
        return dcp_protocol.create_write_items(fqn, self.local_piece, spec.shape, boxes, spec.name)

    def __create_chunk_list__(self) -> list[Any]:
        """Return what this rank loads from a distributed checkpoint; see `dcp_protocol`."""
        return dcp_protocol.create_chunk_list(self.spec, self.local_piece)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the memory that a distributed checkpoint reads or writes; see `dcp_protocol`."""
        spec = self.spec
        boxes = dcp_protocol.boxes_of_piece(spec)
        return dcp_protocol.get_tensor_shard(index, self.local_piece, spec.shape, boxes, spec.name)

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        """Name the inner tensor, so that `module.to(dtype)` swaps parameters and keeps them."""
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
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` by the handler of its kind."""
        run = cls.dispatch_mixed if len(types) > 1 else cls.dispatch
        return run(func, args, kwargs or {})


class _Linear(torch.autograd.Function):
    """A linear function of a tensor, and the function that takes gradients back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: _Map, back: _Map) -> Any:
        ctx.back = back
        return function(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
        return ctx.back(grad), None, None


def _linear(tensor: Tensor, function: _Map, back: _Map) -> Tensor:
    result: Tensor = _Linear.apply(tensor, function, back)  # type: ignore[no-untyped-call]
    return result


def _summing(whole: Tensor, spec: ShardSpec, grad_placements: Any) -> Tensor:
    """Return a whole tensor whose gradients are summed over axes with Partial(), not averaged."""
    axes, placements = spec.data_parallel_axes, tuple(grad_placements)
    summed = [getattr(placement, "reduce_op", None) for placement in placements]
    of_data = zip(axes, summed, strict=False)
    is_possible = len(placements) == spec.mesh.ndim and all(
        placement.is_replicate() or (op in ("sum", "avg") and index < len(axes))
        for index, (placement, op) in enumerate(zip(placements, summed, strict=True))
    )
    if not is_possible:
        msg = (
            f"full_tensor of sharded {spec.name!r} got grad_placements={placements}: expected "
            f"{spec.mesh.ndim} of Partial() and Replicate(), and Partial() for the first "
            f"{len(axes)} only. Without them gradients are averaged over the ranks."
        )
        raise ShardedTensorError(msg)
    number = math.prod(axis.size for axis, op in of_data if op == "sum")
    return _linear(whole, lambda each: each.view_as(each), lambda grad: grad * number)


def _cut(whole: Tensor, spec: ShardSpec, *, may_be_number: bool) -> Tensor:
    """Return the average of whole tensors over the ranks, cut; differentiable."""
    return _linear(
        whole,
        lambda each: ShardedTensor(_averaged_piece(each, spec, may_be_number=may_be_number), spec),
        lambda grad: grad.full_tensor() if isinstance(grad, HostValues) else grad,
    )


@dataclass(slots=True, eq=False)
class _GradientCut(OwnHook):
    """Hook that turns any gradient of a sharded tensor into a sharded one."""

    spec: ShardSpec  # Cut of the tensor.
    _: KW_ONLY
    # Whether a gradient that is one number, expanded to the shape, is one on every rank. That is so
    # if the tensor was reduced. If the whole tensor was used with data, it is one number only on
    # ranks whose batch has one sample.
    may_be_number: bool = True
    refusal: str | None = None  # Reason why no gradient may arrive; None: it may.

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        spec = self.spec
        if self.refusal is not None:
            raise ShardedTensorError(self.refusal)
        if grad is None:
            return None
        if type(grad) is ShardedTensor and grad.spec.same_cut(spec):
            return grad
        if grad.layout is not torch.strided:  # Autograd lets no hook make it dense.
            msg = (
                f"sharded {spec.name!r} got a sparse gradient ({grad.layout}), of which ranks "
                f"cannot keep shards: expected a dense one. Look it up with sparse=False."
            )
            raise ShardedTensorError(msg)
        if hasattr(grad, "full_tensor"):  # Also a DTensor, as of a loss of tensor parallelism.
            grad = grad.full_tensor()
        return _cut(grad, spec, may_be_number=self.may_be_number)


def _averaged_piece(whole: Tensor, spec: ShardSpec, *, may_be_number: bool) -> Tensor:
    """Return this rank's piece of the average. Cost: an all-reduce of `whole` per axis of data."""
    if whole.layout is not torch.strided:
        whole = whole.to_dense()
    is_number = may_be_number and whole.numel() > 0 and not any(whole.stride())
    values = whole[(0,) * whole.ndim] if is_number else whole
    axes = [axis for axis in spec.data_parallel_axes if axis.size > 1]
    if axes and whole.numel() > 0:
        wide = torch.promote_types(values.dtype, torch.float32)
        total = values.to(wide, copy=True, memory_format=torch.contiguous_format)
        for axis in axes:
            axis.all_reduce(total.view(-1), "sum")
        values = (total / math.prod(axis.size for axis in axes)).to(whole.dtype)
    return spec.slice_full(values.expand(spec.shape) if is_number else values).clone()


def averaged(whole: Tensor, like: ShardedTensor) -> Tensor:
    """Return the average over the ranks of whole gradients of a tensor, cut as the tensor is.

    Differentiable. Cost: an all-reduce of the tensor's bytes per axis of data.
    """
    if like.spec.tensor_parallel is not None and hasattr(whole, "full_tensor"):
        whole = whole.full_tensor()
    result = _cut(whole.to(like.dtype), like.spec, may_be_number=False)
    return result if result.device == like.device else result.to(like.device)


def from_piece(piece: Tensor, spec: ShardSpec) -> Tensor:
    """Return the sharded tensor of which this rank has a piece, without a copy; differentiable."""
    return _linear(
        piece, lambda own: ShardedTensor(own.detach(), spec), lambda grad: grad.to_local()
    )


def cut_whole(whole: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's part, in new memory, of a tensor that is equal on all ranks.

    Differentiable. Cost of backward: that of `full_tensor`.
    """
    return _linear(
        whole,
        lambda each: ShardedTensor(spec.slice_full(each).to(spec.device, copy=True), spec),
        lambda grad: grad.full_tensor(),
    )
