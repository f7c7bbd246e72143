"""Whole parameters for users: `summon_full_params` and `apply_full`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from shardkit import _compat
from shardkit._errors import StateError
from shardkit._module.hooks import get_state, groups_in
from shardkit._params.whole import WholeBucket
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardkit._runtime.group import ParamGroup
    from shardkit._runtime.runtime import Runtime

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class _Options:
    """How whole parameters are shown; see `summon_full_params`."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def check_inside(self, outer: _Options, name: str) -> None:
        """Refuse what a with block around this one does not give.

        Raises:
            StateError: The outer one does not write back, or shows something else.
        """
        lacks = [
            f"{option}={getattr(self, option)}"
            for option in ("writeback", "with_grads")
            if getattr(self, option) and not getattr(outer, option)
        ]
        lacks += [
            f"{option}={getattr(self, option)}"
            for option in ("rank0_only", "offload_to_cpu")
            if getattr(self, option) != getattr(outer, option)
        ]
        if lacks:
            msg = (
                f"summon_full_params with {', '.join(lacks)} inside of one without, which shows "
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
    """Show whole parameters in the ``with`` block, as FSDP1's and fairscale's function does.

    ``module.named_parameters()``, ``parameters()``, ``state_dict()`` and attributes give plain
    `nn.Parameter` objects: global shape, original names, the dtype of the shard (not that of
    mixed precision). They are other objects than the sharded ones, which optimizers hold and which
    come back, as the same objects, when the block ends, also by an exception. Call it on all ranks,
    between steps, also before the first forward. A parameter that tensor parallelism splits is
    whole, too. Tied names give one object.

    When the block ends with `writeback`, each rank copies its own piece of ITS values (and
    ``requires_grad``) to its shard. Nothing is sent: ranks that wrote different values keep pieces
    of different tensors, and replicas of a hybrid mesh part. So write the same on all ranks. A
    parameter that was replaced in the block by another of its shape is taken up as well.

    Args:
        module: Sharded, or with sharded modules in it.
        recurse: Also the sharded modules inside. Without it those of `module`'s own group; if it
            has none, those of the outermost sharded modules in it.
        writeback: Keep what was written. Not between a forward and its backward, which would
            refuse to go on.
        rank0_only: Only the first rank of the mesh gets whole parameters; the others take part in
            the gathers and show sharded ones. Not with `writeback`.
        offload_to_cpu: The whole parameters are in the memory of the host.
        with_grads: ``.grad`` is the whole gradient, or None; written back as values are.

    Raises:
        StateError: It is called in a forward or backward, or with `rank0_only` and `writeback`; a
            parameter is on the meta device, or belongs to a group around `module`; a forward,
            backward, `unshard`, conversion or copy is tried in the block. When the block ends: a
            parameter was replaced by something of another shape, or the shard was written (by an
            optimizer).

    Cost: one all-gather per bucket in storage dtype, two with gradients, one group after the other;
    none at the end. On XLA one for each parameter, in the graph. Memory: all of the whole
    parameters shown, on a rank that gets none those of one bucket. A block inside of another
    gathers nothing again.
    """
    if rank0_only and writeback:
        msg = (
            "summon_full_params: rank0_only=True with writeback=True would keep what rank 0 wrote "
            "of its own piece only. Pass writeback=False, or rank0_only=False."
        )
        raise StateError(msg)
    options = _Options(writeback, rank0_only, offload_to_cpu, with_grads)
    groups = _groups_to_show(module, recurse=recurse)
    _check_idle(module, groups, "summon_full_params")
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(_shown(group, options))
        yield


def apply_full(module: M, fn: Callable[[nn.Module], object]) -> M:
    """Call `fn` on each module in it and on itself, with whole parameters; as ``Module.apply``.

    What fairscale's and FSDP1's ``apply(init_fn)`` do. The order is that of ``nn.Module.apply``,
    children first, so one seed on all ranks gives the parameters that a plain model gets. The
    parameters of a group are whole from the first of its modules that holds one to the module that
    `fully_shard` was called on; what each rank wrote is cut back to its shard then, as by
    `summon_full_params`. A module inside of the group's sees parameters of other groups sharded.

    Args:
        module: Sharded, or with sharded modules in it. Parameters on the meta device need memory
            first (``to_empty``).
        fn: Changes the module's parameters in place or replaces them by others of their shapes.
            All ranks must do the same, with one seed.

    Returns:
        `module`.

    Raises:
        StateError: As `summon_full_params`.

    Cost: one all-gather per bucket in storage dtype. Memory: one group, beside the groups of the
    modules around it of which `fn` has seen a part.
    """
    groups = _groups_to_show(module, recurse=True)
    _check_idle(module, groups, "apply_full")
    order = list(_post_order(module))
    first, last = _ranges(order, groups)
    with contextlib.ExitStack() as stack:
        open_groups: dict[ParamGroup, contextlib.ExitStack] = {}
        for position, each in enumerate(order):
            for group in groups:
                if first.get(group) == position:
                    own = open_groups[group] = stack.enter_context(contextlib.ExitStack())
                    own.enter_context(_shown(group, _Options()))
            fn(each)
            for group in [g for g in open_groups if last[g] == position]:
                open_groups.pop(group).close()
    return module


# --- which groups ---------------------------------------------------------------------------------


def _groups_to_show(module: nn.Module, *, recurse: bool) -> list[ParamGroup]:
    """Return groups, and refuse parameters that belong to none of them.

    Raises:
        StateError: The group of a parameter is that of a module around this one.
    """
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
    tops = [module] if _has_group(module) else _outermost(module)
    return list(dict.fromkeys(g for top in tops for g in groups_in(top, recurse=False)))


def _outermost(module: nn.Module) -> list[nn.Module]:
    """Return the modules with a group in a module that are in no other such one."""
    found: list[nn.Module] = []
    for child in module.children():
        found += [child] if _has_group(child) else _outermost(child)
    return found


def _has_group(module: nn.Module) -> bool:
    """Whether parameters are sharded in a module's name; a root may have left none for itself."""
    state = get_state(module)
    return state is not None and state.group is not None


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules as ``nn.Module.apply`` comes to them."""
    for child in module.children():
        yield from _post_order(child)
    yield module


def _ranges(
    order: list[nn.Module], groups: Iterable[ParamGroup]
) -> tuple[dict[ParamGroup, int], dict[ParamGroup, int]]:
    """Return the positions at which groups are first and last needed."""
    first: dict[ParamGroup, int] = {}
    last: dict[ParamGroup, int] = {}
    for group in groups:
        entries = [entry for bucket in group.buckets for entry in bucket.entries]
        holders = {id(module) for entry in entries for module, _ in entry.sites}
        holders |= {id(module) for module in group.modules}
        places = [position for position, module in enumerate(order) if id(module) in holders]
        first[group], last[group] = places[0], places[-1]
    return first, last


# --- when -----------------------------------------------------------------------------------------


def _check_idle(module: nn.Module, groups: Iterable[ParamGroup], what: str) -> None:
    """Refuse to show parameters that a step uses, or that cannot be shown; clean up after errors.

    Raises:
        StateError: See `summon_full_params`.
    """
    if _compat.in_backward():
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
    """Show the whole parameters of a group, unless a block around this one does."""
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
        runtime.gathers.wait(group)  # It reads the shard, which may be written below.
    was_visible = [bucket.sites.is_visible for bucket in group.buckets]
    keep = not options.rank0_only or group.mesh.rank == group.mesh.ranks[0]
    with contextlib.ExitStack() as stack:
        for bucket in group.buckets:
            whole = WholeBucket(
                bucket,
                keep=keep,
                to_cpu=options.offload_to_cpu,
                with_grads=options.with_grads,
            )
            whole.show()
            stack.callback(whole.hide, write_back=options.writeback, with_grads=options.with_grads)
        if runtime is not None:  # Shards on the host may be written: what was issued has read them.
            stack.callback(runtime.gathers.settle_host_reads)
        group.summoned = options
        stack.callback(setattr, group, "summoned", None)
        yield
    if not options.writeback:
        for bucket, visible in zip(group.buckets, was_visible, strict=True):
            bucket.sites.show(unsharded=visible)
