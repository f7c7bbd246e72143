"""Whole parameters for users: `summon_full_params` and `apply_full`."""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from shardkit._compat import torch_autograd, torch_modules, torch_tensors
from shardkit._errors import StateError, WrapError
from shardkit._module.hooks import get_state, groups_in
from shardkit._params.flat_store import FlatStore
from shardkit._settings import refuse_texts
from shardkit._tensor.sharded import ShardedTensor, user_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardkit._params.bucket import Bucket
    from shardkit._runtime.group import ParamGroup
    from shardkit._runtime.runtime import Runtime


# --- whole parameters of a bucket -----------------------------------------------------------------
#
# A forward uses other tensors: the unsharded parameters are in compute dtype, may be DTensors,
# and their memory belongs to the schedule. The whole parameters here are copies in memory of
# their own.


class WholeBucket:
    """Copies of a bucket's whole parameters, which the modules hold until `hide`. Collective.

    A rank that does not keep the copies only takes part in the gathers.

    Cost: one all-gather of the bucket in storage dtype, two with gradients, and the collectives of
    tensor parallelism; memory for the bucket. Where operators are traced, one all-gather of each
    parameter, in the graph.
    """

    @torch_modules.untraced
    def __init__(self, bucket: Bucket, options: _Options, *, keep: bool) -> None:
        self._bucket = bucket
        self._options = options
        self.params = [
            self._new_param(index, whole)
            for index, whole in self._gather(bucket.sharded, keep=keep).items()
        ]
        if options.with_grads:
            grads = [param.grad for param in bucket.sharded]
            for index, grad in self._gather(grads, keep=keep).items():
                self.params[index].grad = grad
        self._shapes = [tuple(param.shape) for param in self.params]
        self._version = bucket.store.shard_version
        bucket.sites.show_others(self.params or None)

    @torch.no_grad()
    def _gather(self, tensors: Sequence[Tensor | None], *, keep: bool) -> dict[int, Tensor]:
        """Gather parameters or gradients; return those that exist, by index."""
        store = self._bucket.store
        given = {i: each for i, each in enumerate(tensors) if isinstance(each, ShardedTensor)}
        if isinstance(store, FlatStore):
            # Gradients may have another dtype than the shard.
            dtype = next((each.dtype for each in given.values()), None)
            values = torch.zeros_like(store.shard, dtype=dtype)
            for index, each in given.items():
                store.piece(values, index).copy_(each.local_piece)
            full = store.gather_values(values)
            wholes = {index: store.whole_of(index, full) for index in range(len(tensors))}
        else:
            wholes = {i: each.spec.gather(each.local_piece).clone() for i, each in given.items()}
        if not keep:
            return {}
        return {i: wholes[i].cpu() if self._options.offload_to_cpu else wholes[i] for i in given}

    def _new_param(self, index: int, whole: Tensor) -> nn.Parameter:
        sharded, store = self._bucket.sharded[index], self._bucket.store
        grad = sharded.requires_grad
        if isinstance(store, FlatStore):
            param = store.as_parameter(index, whole, requires_grad=grad)
        else:
            param = nn.Parameter(whole, requires_grad=grad)
        param.__dict__.update({**user_attributes(sharded), **param.__dict__})
        torch_tensors.keep_grad_dtype(param, sharded)
        return param

    @torch_modules.untraced
    def hide(self) -> None:
        """Let the modules hold the sharded parameters again; no communication.

        Raises:
            StateError: Something else was put in the place of a parameter, or its shard was written
                meanwhile. The modules then hold the sharded parameters, unchanged.
        """
        held: list[nn.Parameter] = []
        try:
            if self._options.writeback:
                held = [self._found(index) for index in range(len(self.params))]
                if self._bucket.store.shard_version != self._version:
                    name = self._bucket.entries[0].name
                    msg = (
                        f"the shard of {name!r} was written inside of summon_full_params, which "
                        f"would now be lost. Step optimizers outside of it, or pass "
                        f"writeback=False."
                    )
                    raise StateError(msg)
        finally:
            self._bucket.sites.show_others(None)
        for index, param in enumerate(held):
            self._write(index, param)

    def _found(self, index: int) -> nn.Parameter:
        """Return the parameter that modules hold: the whole one, or another of its shape."""
        entry, whole = self._bucket.entries[index], self.params[index]
        shape = self._shapes[index]  # Not that of `whole`, which ``.data = ...`` changes.
        places = self._bucket.sites.held(index)
        found = next((param for param in places if param is not whole), whole)
        if not isinstance(found, nn.Parameter) or tuple(found.shape) != shape:
            what = type(found).__name__
            if isinstance(found, Tensor):
                what = f"a {what} of shape {tuple(found.shape)}"
            msg = (
                f"inside of summon_full_params parameter {entry.name!r} of shape {shape} was "
                f"replaced by {what}, which cannot be cut as it is. Write to the parameter in "
                f"place (copy_(), nn.init), or change the model before fully_shard."
            )
            raise StateError(msg)
        packing = self._bucket.store.specs[index].packing
        if packing is not None:
            try:
                packing.check(found)
            except WrapError as error:
                msg = f"inside of summon_full_params: {error}"
                raise StateError(msg) from None
        return found

    @torch.no_grad()
    def _write(self, index: int, whole: nn.Parameter) -> None:
        """Copy this rank's piece of values, `requires_grad` and, if wanted, the gradient."""
        param: Any = self._bucket.sharded[index]
        is_traced = param.spec.is_traced  # Elsewhere only this rank's piece of a value is moved.
        if param.spec.packing is None:
            param.detach().copy_(whole.to(param.device) if is_traced else whole)
        else:  # Bytes; `detach` would leave attributes of its class out.
            param.local_piece.copy_(param.spec.slice_full(whole))
        if param.requires_grad != whole.requires_grad:
            param.requires_grad_(whole.requires_grad)
        if self._options.with_grads and whole.grad is None:
            param.grad = None
        elif self._options.with_grads:
            grad = whole.grad.detach()  # type: ignore[union-attr]
            if param.grad is None:
                param.grad = torch.zeros_like(param.detach(), dtype=grad.dtype)
            param.grad.copy_(grad.to(param.device) if is_traced else grad)


# --- summon_full_params and apply_full ------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _Options:
    """How whole parameters are shown; see `summon_full_params`."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def check_inside(self, outer: _Options, name: str) -> None:
        """Refuse options that a ``with`` block around this one does not have."""
        wanted, same = ("writeback", "with_grads"), ("rank0_only", "offload_to_cpu")
        lacks = [n for n in wanted if getattr(self, n) and not getattr(outer, n)]
        lacks += [n for n in same if getattr(self, n) != getattr(outer, n)]
        if lacks:
            shown = ", ".join(f"{option}={getattr(self, option)}" for option in lacks)
            msg = (
                f"summon_full_params with {shown} inside of one without, which shows "
                f"{name!r} already and decides what becomes of it. Pass the outer one the same."
            )
            raise StateError(msg)


# --- what users call ------------------------------------------------------------------------------


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show whole parameters in the ``with`` block, like the function of FSDP1 and fairscale.

    ``module.named_parameters()``, ``parameters()``, ``state_dict()`` and attributes give plain
    `nn.Parameter` objects: global shape, original names, the dtype of the shard (not that of
    mixed precision). The sharded parameters, which optimizers hold, are other objects. They come
    back as the same objects when the block ends, also if an exception ends it. Call it on all
    ranks, between steps or before the first forward. A parameter that tensor parallelism splits is
    whole, too. Tied names give one object.

    When the block ends with `writeback`, each rank copies its own shard of ITS values (and
    ``requires_grad``) to its shard. Nothing is sent: ranks that wrote different values keep shards
    of different tensors, and replicas of a hybrid mesh diverge. So write the same on all ranks. If
    the block replaced a parameter by another of its shape, the new values are taken as well.

    Args:
        module: A sharded module, or one with sharded modules in it.
        recurse: Whether to show the parameters of the sharded modules inside, too. If False, those
            of `module`'s own group; if it has none, those of the outermost sharded modules in it.
        writeback: Whether to keep what was written. Not between a forward and its backward, because
            that backward would raise an error.
        rank0_only: Whether only the first rank of the mesh gets whole parameters; the others take
            part in the gathers and show sharded ones. Not with `writeback`.
        offload_to_cpu: Whether the whole parameters are in the memory of the host.
        with_grads: Whether ``.grad`` is the whole gradient, or None; it is written back as values
            are.

    Raises:
        StateError: It is called in a forward or backward, or with `rank0_only` and `writeback`; a
            parameter is on the meta device, or belongs to a group around `module`; the block tries
            a forward, backward, `unshard`, conversion or copy. When the block ends: a parameter was
            replaced by something of another shape, or the shard was written (by an optimizer).

    Cost: one all-gather per bucket in storage dtype, two with gradients, one group after the other;
    none at the end. On XLA one for each parameter, in the graph. Memory: all whole parameters that
    are shown; on a rank that gets none, those of one bucket. A block inside another gathers nothing
    again.
    """
    if rank0_only and writeback:
        msg = (
            "summon_full_params: rank0_only=True with writeback=True would keep what rank 0 wrote "
            "of its own shard only. Pass writeback=False, or rank0_only=False."
        )
        raise StateError(msg)
    options = _Options(writeback, rank0_only, offload_to_cpu, with_grads)
    refuse_texts(StateError, recurse=recurse, **dataclasses.asdict(options))
    groups = _groups_to_show(module, recurse=recurse)
    _check_idle(module, groups, "summon_full_params")
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(_shown(group, options))
        yield


def apply_full(module: M, fn: Callable[[nn.Module], object]) -> M:
    """Call `fn` with whole parameters on `module` and all modules in it, like ``Module.apply``.

    It does what ``apply(init_fn)`` of fairscale and FSDP1 does. The order is that of
    ``nn.Module.apply``, children first, so one seed on all ranks gives the parameters that a plain
    model gets. The parameters of a group are whole from the first of its modules that holds one to
    the module that `fully_shard` was called on. Then each rank keeps its shard of what it wrote, as
    in `summon_full_params`. A module inside the group sees parameters of other groups sharded.

    Args:
        module: A sharded module, or one with sharded modules in it. Parameters on the meta device
            need memory first (``to_empty``).
        fn: Function that changes the module's parameters in place, or replaces them by others of
            their shapes. All ranks must do the same, with one seed.

    Returns:
        `module`.

    Raises:
        StateError: For the reasons that `summon_full_params` gives.

    Cost: one all-gather per bucket in storage dtype. Memory: one group, and the groups of the
    modules around it of which `fn` has seen a part.
    """
    groups = _groups_to_show(module, recurse=True)
    if not callable(fn):
        msg = f"fn must be a function of a module, got {reprlib.repr(fn)}."
        raise StateError(msg)
    _check_idle(module, groups, "apply_full")
    order = list(_post_order(module))
    spans = {group: _span(order, group) for group in groups}
    with contextlib.ExitStack() as stack:
        open_groups: dict[ParamGroup, contextlib.ExitStack] = {}
        for position, each in enumerate(order):
            for group in groups:
                if spans[group][0] == position:
                    own = open_groups[group] = stack.enter_context(contextlib.ExitStack())
                    own.enter_context(_shown(group, _Options()))
            fn(each)
            for group in [g for g in open_groups if spans[g][1] == position]:
                open_groups.pop(group).close()
    return module


# --- which groups ---------------------------------------------------------------------------------


def _groups_to_show(module: nn.Module, *, recurse: bool) -> list[ParamGroup]:
    """Return the groups to show; refuse parameters that belong to none of them."""
    if not isinstance(module, nn.Module):
        msg = (
            f"expected a module, got {module!r}. It comes first: apply_full(module, fn), "
            f"summon_full_params(module)."
        )
        raise StateError(msg)
    every = list(groups_in(module, recurse=True))
    known = {id(param) for group in every for b in group.buckets for param in b.sharded}
    for name, param in module.named_parameters():
        if isinstance(param, ShardedTensor) and id(param) not in known:
            msg = (
                f"parameter {name!r} was sharded together with those of a module around this "
                f"{type(module).__name__}. Pass the module that fully_shard was called on."
            )
            raise StateError(msg)
    if recurse:
        return every
    return list(dict.fromkeys(_outermost_groups(module)))


def _outermost_groups(module: nn.Module) -> Iterator[ParamGroup]:
    """Yield the group of a module; if it has none, as a root may, the groups of modules in it."""
    own = groups_in(module, recurse=False)
    yield from own
    for child in module.children() if not own else ():
        yield from _outermost_groups(child)


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules in the order of ``nn.Module.apply``; they may override that method."""
    for child in module.children():
        yield from _post_order(child)
    yield module


def _span(order: list[nn.Module], group: ParamGroup) -> tuple[int, int]:
    """Return the positions at which a group is first and last needed."""
    entries = [entry for bucket in group.buckets for entry in bucket.entries]
    holders = {id(module) for entry in entries for module, _ in entry.sites}
    holders |= {id(module) for module in group.modules}
    places = [position for position, module in enumerate(order) if id(module) in holders]
    return places[0], places[-1]


# --- when -----------------------------------------------------------------------------------------


def _check_idle(module: nn.Module, groups: Iterable[ParamGroup], what: str) -> None:
    """Refuse parameters that a step uses or that cannot be shown; clean up after errors."""
    if torch_autograd.in_backward():
        msg = f"{what} was called in a backward. Call it between steps."
        raise StateError(msg)
    states = [state for each in module.modules() if (state := get_state(each)) is not None]
    for state in states:
        if state.is_in_pass():
            msg = (
                f"{what} was called in a forward, which uses the parameters of "
                f"{type(state.module).__name__}. Call it between steps."
            )
            raise StateError(msg)
    for runtime in {id(s.runtime): s.runtime for s in states if s.runtime is not None}.values():
        runtime.tidy_up()
    for group in groups:
        group.check_materialized()


# --- one group ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shown(group: ParamGroup, options: _Options) -> Iterator[None]:
    """Show the whole parameters of a group, unless a block around this one shows them."""
    if group.summoned is not None:
        options.check_inside(group.summoned, group.name)
        yield
        return
    state: Any = get_state(group.modules[0])
    runtime: Runtime | None = state.runtime
    if group.was_replaced:
        if runtime is not None:
            runtime.reshard(group)
        group.refresh()
    if runtime is not None:
        runtime.gathers.wait(group)  # The gather reads the shard, which may be written below.
    was_visible = [bucket.sites.is_visible for bucket in group.buckets]
    keep = not options.rank0_only or group.mesh.rank == group.mesh.ranks[0]
    with contextlib.ExitStack() as stack:
        for bucket in group.buckets:
            stack.callback(WholeBucket(bucket, options, keep=keep).hide)
        if runtime is not None:  # Shards on the host may be written: all issued reads are done.
            stack.callback(runtime.gathers.settle_host_reads)
        group.summoned = options
        stack.callback(setattr, group, "summoned", None)
        yield
    if not options.writeback:
        for bucket, visible in zip(group.buckets, was_visible, strict=True):
            bucket.sites.show(unsharded=visible)
