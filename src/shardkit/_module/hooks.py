"""Module hooks: from a module's forward to the runtime's events.

Each `fully_shard` call puts one `ModuleState` on its module. The hooks are bound methods of that
object and hold no state of their own.
"""

from __future__ import annotations

import itertools
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._compat import torch_autograd, torch_fsdp2, torch_modules, torch_tensors
from shardkit._errors import StateError
from shardkit._module.on_meta import Emptied, NotedConversion, check_has_values, warn_of_emptied
from shardkit._module.optimizers import note_groups
from shardkit._params.subclass_store import refuse_hooks_of_piece
from shardkit._runtime.group import STATE_ATTRIBUTE, ParamGroup, refuse_summoned
from shardkit._runtime.runtime import Runtime
from shardkit._settings import MixedPrecisionPolicy, RootSettings
from shardkit._text import counted, listed
from shardkit._tree import Undo, iter_tensors, map_inputs, map_tensors, put_back

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable, Sequence

    from shardkit._runtime.events import ForwardRecord

_logger = logging.getLogger("shardkit")
_MIB = 2**20
_num_installed = 0
_NEAR = 12  # Frames in which `functional_call` calls a root or a model around it.


def get_state(module: nn.Module) -> ModuleState | None:
    """Return the state that `fully_shard` put on `module`, or None."""
    state: ModuleState | None = module.__dict__.get(STATE_ATTRIBUTE)
    return state


def state_of(module: Any) -> ModuleState:
    """Return the state of a sharded module."""
    state = get_state(module)
    assert state is not None, "an FSDPModule has a state"
    return state


def groups_in(module: Any, *, recurse: bool) -> Iterable[ParamGroup]:
    """Return the groups of a module and, with `recurse`, of the sharded modules in it."""
    modules = module.modules() if recurse else [module]
    states = map(get_state, modules)
    return dict.fromkeys(s.group for s in states if s is not None and s.group is not None)


@dataclass(slots=True)
class _OpenForward:
    """A forward of a module that has begun."""

    record: ForwardRecord | None  # The record of its group, if there may be a backward.
    is_root: bool  # Whether the forward is the outermost one.
    is_recompute: bool  # Whether the forward runs inside backward.
    handled: BaseException | None  # The exception that the caller was handling at the start.
    # Frame that called the hook, if `is_root`: on the stack as long as the forward runs.
    frame: types.FrameType | None
    undo: Undo  # Puts the caller's tensors back into containers among the inputs.


class ModuleState:
    """State that `fully_shard` keeps of one module."""

    def __init__(
        self, module: nn.Module, group: ParamGroup | None, policy: MixedPrecisionPolicy
    ) -> None:
        self.module = module  # The module.
        self.group = group  # The group of its parameters, or None if there were none left to take.
        self.policy = policy  # Dtypes.
        # Runtime that all groups of the root share; made at the root's first forward.
        self.runtime: Runtime | None = None
        self.settings = RootSettings()  # The choices of users, in effect if this is the root.
        # Another root whose streams and memory this one uses.
        self.share: ModuleState | None = None
        # Buffers that a conversion of this module gave memory but no values.
        self.emptied: list[Emptied] = []
        self._open: list[_OpenForward] = []
        self._num_known = 0
        self._children: list[_Children] = []
        self._has_values = False

    def install(self) -> None:
        """Put the state and the hooks on the module."""
        global _num_installed  # noqa: PLW0603 - tells roots that there may be new modules in them
        _num_installed += 1
        self.module.__dict__[STATE_ATTRIBUTE] = self
        torch_fsdp2.note_stage(self.module, self.finish_step)
        self.module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self.post_forward, always_call=True)

    def finish_step(self) -> None:
        """Finish the step; a pipeline calls this after the last backward of its stage."""
        if self.runtime is not None:
            self.runtime.finish_step()

    def without_own_hooks(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return attributes of the module without this state and what it installed."""
        own = {key for each in attributes.values() for key in self._installed_in(each)}
        result: dict[str, Any] = {}
        for name, value in attributes.items():
            # Only torch's flags go by the number of a hook: users may keep dicts with numbers, too.
            gone = own if name in torch_modules.FLAGS_OF_HOOKS else self._installed_in(value)
            if gone:
                result[name] = type(value)((k, v) for k, v in value.items() if k not in gone)
            elif name not in (STATE_ATTRIBUTE, torch_modules.COMPILED_CALL):
                result[name] = value
        return result

    def _installed_in(self, value: Any) -> set[Any]:
        """Return the keys of a dict with what this state installed: hooks, and for pipelines."""
        entries = value.items() if isinstance(value, dict) else ()
        return {key for key, entry in entries if getattr(entry, "__self__", None) is self}

    @torch_tensors.unseen_by_transforms
    def make_runtime(self) -> Runtime | None:
        """Make this module the root of all sharded modules in it; None if none has a parameter.

        Modules of a list share a group, so modules of the list outside of this one belong to the
        same runtime. A forward of one of them is a root's, too.
        """
        roots, states, groups = _contents_of(self.module)
        if not groups:
            return None
        refuse_summoned(groups, "a forward, or unshard(), was called")
        _refuse_mesh_of_pipeline(groups)
        self._refuse_inner_choices(states)
        awaited = self._gone_and_awaited(groups)
        entered = []
        for runtime in {id(s.runtime): s.runtime for s in states if s.runtime}.values():
            entered += runtime.hand_over()  # An inner module ran alone before, as its own root.
        self.name_params(groups, roots)
        for group in groups:
            group.is_root = group is self.group
            inner = [get_state(m) for module in group.modules for m in module.modules()]
            group.is_innermost = all(s is None or s.group in (None, group) for s in inner)
        share = self.share.runtime or self.share.make_runtime() if self.share else None
        groups += awaited
        runtime = Runtime(groups, self.settings, share)
        note_groups(groups)
        before = self.runtime  # The loop below may take it from this module, too.
        if before is not None:
            runtime.optimizer_event = before.optimizer_event
            before.optimizer_event = None
            _let_go(before, groups)
        for group in filter(groups.__contains__, entered):
            runtime.reductions.order.enter_forward(group.index)
        if self.runtime is None and groups[0].mesh.is_first_rank:
            _log_groups(self.module, groups)
        for state in states:
            state.runtime = runtime
        self._note_groups(roots, is_settled=not awaited)
        return runtime

    def _refuse_inner_choices(self, states: Sequence[ModuleState]) -> None:
        if any(state.settings.finalizes_by_hand for state in states if state is not self):
            msg = (
                "set_manual_backward_finalization() was called on a module inside of another "
                "sharded one. Call it on the outermost one."
            )
            raise StateError(msg)

    def _gone_and_awaited(self, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
        """Return groups of the runtime that are not in `groups` and may still run a backward."""
        if self.runtime is None:
            return []
        awaits = self.runtime.schedule.awaits_backward
        return [g for g in self.runtime.groups if g not in groups and awaits(g.index)]

    def _note_groups(self, roots: Sequence[nn.Module], *, is_settled: bool) -> None:
        """Note which groups are in this root; unless settled, the next forward looks again."""
        self._num_known = _num_installed if is_settled else -1
        self._children = _children_with_groups(roots, self._children)

    def _follow_changes(self) -> None:
        """Make the root anew if sharded modules were added or removed since the last forward.

        Otherwise the memory of removed modules would live as long as the root.
        """
        for children, known in self._children:
            if tuple(children.values()) != known:
                break
        else:
            if self._num_known == _num_installed:
                return
        assert self.runtime is not None
        roots, states, groups = _contents_of(self.module)
        awaited = self._gone_and_awaited(groups)
        is_same = {*groups, *awaited} == {*self.runtime.groups}
        if is_same and all(s.runtime is self.runtime for s in states if s.group is not None):
            self._note_groups(roots, is_settled=not awaited)
        else:
            self.make_runtime()

    def name_params(self, groups: Iterable[ParamGroup], roots: Sequence[nn.Module]) -> None:
        """Name every parameter and group as seen from the root; number the roots if several."""
        names: dict[int, str] = {}
        modules: dict[int, str] = {}
        for number, root in enumerate(roots):
            prefix = f"{number}." if len(roots) > 1 else ""
            for name, param in root.named_parameters(remove_duplicate=False):
                names.setdefault(id(param), prefix + name)
            for name, module in root.named_modules():
                modules.setdefault(id(module), (prefix + name).removesuffix("."))
        order = {name: place for place, name in enumerate(names.values())}
        for group in groups:
            group.name = ", ".join(modules.get(id(m)) or "the root" for m in group.modules)
            for bucket in group.buckets:
                for index, entry in enumerate(bucket.entries):
                    shown = bucket.store.unsharded[index]
                    full_name = names.get(id(entry.param)) or names.get(id(shown))
                    bucket.rename(index, full_name or entry.name)
                    entry.order = order.get(full_name or "", 0)

    # --- hooks ---

    @torch_modules.untraced
    def pre_forward(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard the group, cast the inputs, and watch inputs that require gradients.

        Containers among the inputs stay the same objects, because the forward may write to them.
        """
        undo: Undo = []
        try:
            return self._enter(args, kwargs, undo)
        except BaseException:
            put_back(undo)
            raise

    def _enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], undo: Undo
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if (self.runtime is None or self.runtime.pass_root is None) and (
            torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        ):
            refuse_export()
        runtime = self.runtime or self.make_runtime()
        policy = self.policy
        is_recompute = runtime is not None and torch_autograd.in_backward()
        is_root = False
        if runtime is not None and not is_recompute and self._starts_pass(runtime):
            is_root = True
            runtime = self._begin_pass(runtime)
            if runtime.is_on_part:
                runtime.note_inputs((args, kwargs))
            args, kwargs = runtime.passes.enter(self.module, args, kwargs, undo)
        elif runtime is not None and not is_recompute:
            runtime.passes.progress((args, kwargs))
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = map_inputs(_cast_to(policy.param_dtype), args, kwargs, undo)
        record = None
        if runtime is not None and self.group is not None:
            enter = runtime.enter_recompute if is_recompute else runtime.enter_forward
            record = enter(self.group)
            is_told = not self.group.is_local and not torch_tensors.has_other_graphs()
            if record is not None and is_told:
                args, kwargs = self._watch_inputs(runtime, record, args, kwargs, undo)
        # Not the frames of this function and `pre_forward`, which would then hold themselves.
        caller = sys._getframe(2) if is_root else None  # noqa: SLF001 - documented for this use
        opened = _OpenForward(record, is_root, is_recompute, sys.exception(), caller, undo)
        self._open.append(opened)
        return args, kwargs

    def _begin_pass(self, runtime: Runtime) -> Runtime:
        """Begin a pass of this root; return its runtime, which is a new one if modules changed."""
        # Ctrl-C ends a pass without hooks.
        for each in [self] if runtime.pass_root is None else _contents_of(self.module)[1]:
            each._open.clear()  # noqa: SLF001 - own class
        if runtime.settings is self.settings:  # Not a part of a root that runs alone.
            self._follow_changes()
            runtime = self.runtime or runtime
        refuse_summoned(runtime.groups, "a forward was called")
        if not self._has_values:
            self._check_has_values(runtime.groups)
        runtime.begin_pass(self)
        return runtime

    def _check_has_values(self, groups: Sequence[ParamGroup]) -> None:
        """Raise if something in this root has no values; warn of buffers that may have none.

        Also raise if the user has set hooks on pieces.
        """
        check_has_values(self.module, groups)
        for bucket in (bucket for group in groups for bucket in group.buckets):
            for param in bucket.sharded:
                refuse_hooks_of_piece(param)
        self._has_values = True
        states = [s for m in self.module.modules() if (s := get_state(m)) is not None]
        warn_of_emptied(self.module, [each for state in states for each in state.emptied])
        for state in states:
            state.emptied.clear()

    def note_emptied(self, conversion: NotedConversion) -> None:
        """Note buffers that a conversion of the module gave memory but no values."""
        emptied = conversion.emptied()
        if emptied:
            self.emptied += emptied
            self._has_values = False

    def _starts_pass(self, runtime: Runtime) -> bool:
        """Whether a forward of this module is that of a root and not inside another forward.

        If a root is entered again while its pass is open, either it calls itself, or the pass ended
        in an exception. In the second case the caller of the first forward has left the stack.
        """
        if runtime.pass_root is None:
            return True
        if runtime.pass_root is not self:
            return False
        opened = next((entry.frame for entry in self._open if entry.is_root), None)
        frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001
        while frame is not None:
            if frame is opened:
                return False
            frame = frame.f_back
        return True

    def is_in_pass(self) -> bool:
        """Whether a forward of the root around this module is under way."""
        runtime = self.runtime
        if runtime is None or not isinstance(runtime.pass_root, ModuleState):
            return False
        return not runtime.pass_root._starts_pass(runtime)  # noqa: SLF001 - own class

    def _watch_inputs(
        self, runtime: Runtime, record: ForwardRecord, args: Any, kwargs: Any, undo: Undo
    ) -> tuple[Any, Any]:
        found: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                found[id(tensor)] = tensor
            return tensor

        map_inputs(note, args, kwargs, undo)
        if not found:
            return args, kwargs
        watched = runtime.watch_inputs(record, list(found.values()))
        stand_ins = dict(zip(found, watched, strict=True))
        return map_inputs(lambda each: stand_ins.get(id(each), each), args, kwargs, undo)

    @torch_modules.untraced
    def post_forward(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Hook the outputs for backward, reshard, and cast the outputs.

        It is also called when an exception ends the forward.
        """
        if not self._open:
            self._abandon()  # An exception ended `pre_forward`.
            return output
        forward = self._open.pop()
        try:
            return self._leave(module, output, forward)
        except BaseException:
            if forward.is_root:
                self._abandon()  # This hook is not called again.
            raise
        finally:
            put_back(forward.undo)

    def _leave(self, module: nn.Module, output: Any, forward: _OpenForward) -> Any:
        runtime, group, record = self.runtime, self.group, forward.record
        if sys.exception() is not forward.handled:
            if runtime is not None:
                runtime.interrupt_forward(
                    group,
                    record,
                    error=sys.exception(),
                    is_root=forward.is_root,
                    is_recompute=forward.is_recompute,
                )
            return output
        tensors = [*iter_tensors(output)]
        outputs = []
        if torch.is_grad_enabled():
            # Not a parameter that it returns as it is: a hook would stay on that for ever.
            outputs = [t for t in tensors if t.requires_grad and not t.is_leaf]
        if runtime is not None:
            if group is not None:
                if views := [t for t in tensors if t._is_view()]:  # noqa: SLF001 - documented
                    group.note_views(views)
                leave = runtime.exit_recompute if forward.is_recompute else runtime.exit_forward
                leave(group, record, outputs, module)
            if forward.is_root:
                is_functional = torch_modules.in_functional_call(_NEAR)
                runtime.end_pass(needs_backward=bool(outputs), is_functional=is_functional)
                output = runtime.passes.leave(output, runtime.schedule.in_use)
        if self.policy.output_dtype is not None:
            output = map_tensors(_cast_to(self.policy.output_dtype), output)
        return output

    def _abandon(self) -> None:
        """Close the trace, and if this is the root its pass, after an error in a hook."""
        runtime = self.runtime
        if runtime is not None and runtime.pass_root is self:
            runtime.abandon_pass()
        elif runtime is not None:
            runtime.passes.abandon()

    def run_method(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a method of the module as a forward; it may call the module's forward."""
        args, kwargs = self.pre_forward(self.module, args, kwargs)
        record = self._open[-1].record
        if record is not None:
            record.may_lack_outputs = True  # For example `generate`, which returns tokens.
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self.post_forward(self.module, args, None)
            raise
        return self.post_forward(self.module, args, output)


def _refuse_mesh_of_pipeline(groups: Sequence[ParamGroup]) -> None:
    """Refuse a stage of a pipeline whose mesh has ranks of other stages, which never run it."""
    stages = torch_fsdp2.ranks_of_pipeline(sys._getframe())  # noqa: SLF001 - documented for this use
    for group in groups:
        both = sorted({*stages} & {*group.mesh.ranks})
        if len(both) > 1:
            msg = (
                f"{group.name!r} runs in a stage of a pipeline, and it is sharded over ranks "
                f"{listed(group.mesh.ranks)}; of these, {listed(both)} run different stages, and "
                f"would wait for each other. Pass fully_shard a mesh without the pipeline's axis, "
                f"such as mesh['dp']."
            )
            raise StateError(msg)


def _log_groups(root: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Log what is sharded, how, and its peak memory, when the first forward of a root begins."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    buckets = [bucket for group in groups for bucket in group.buckets]
    numels = [sum(entry.param.numel() for entry in bucket.entries) for bucket in buckets]
    plans = [bucket.plan for bucket in buckets]
    nbytes = sum(n * plan.orig_dtype.itemsize for n, plan in zip(numels, plans, strict=True))
    largest = max(groups, key=lambda group: group.unsharded_nbytes)
    trained = sum(bucket.store.shard_nbytes for bucket in buckets if bucket.is_trainable)
    freed = sorted(group.unsharded_nbytes for group in groups if group.reshards_after_forward)
    kept = sum(group.unsharded_nbytes for group in groups if not group.reshards_after_forward)
    meshes = dict.fromkeys(plan.mesh for plan in plans)
    shapes = dict.fromkeys(
        " x ".join(map(str, mesh.shape))
        + (f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else "")
        for mesh in meshes
    )

    def dtypes(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(plan, name))[6:] for plan in plans))

    _logger.info(
        "%s: %s of %.1f million parameters, %.1f MiB; %.1f MiB are on this rank. The mesh "
        "of %s ranks is %s. The largest group (%s) takes %.1f MiB while it is unsharded. Computed "
        "in %s, reduced in %s. Expected at the peak of a step: %.1f MiB of parameters and "
        "gradients, %.1f MiB unsharded; the optimizer's state, activations and buffers of "
        "collectives come on top, and shardkit.plan counts them.",
        type(root).__name__.removeprefix("FSDP"),
        counted(len(groups), "groups"),
        sum(numels) / 1e6,
        nbytes / _MIB,
        sum(bucket.store.shard_nbytes for bucket in buckets) / _MIB,
        groups[0].mesh.device_type,
        " and ".join(shapes),
        largest.name,
        largest.unsharded_nbytes / _MIB,
        dtypes("param_dtype"),
        dtypes("reduce_dtype"),
        (sum(bucket.store.shard_nbytes for bucket in buckets) + trained) / _MIB,
        (kept + sum(freed[-2:])) / _MIB,  # Two freed groups: one computes, one is gathered.
    )


def _contents_of(
    module: nn.Module,
) -> tuple[list[nn.Module], list[ModuleState], list[ParamGroup]]:
    """Return the contents of a root: modules (`_with_lists`), their states and their groups."""
    roots = _with_lists(module)
    states = [s for m in _modules_in(roots) if (s := get_state(m)) is not None]
    return roots, states, list(dict.fromkeys(s.group for s in states if s.group is not None))


def _with_lists(module: nn.Module) -> list[nn.Module]:
    """Return a module, and modules outside of it that share a group with modules in it.

    Modules of its own group come in the order of the list, whichever of them ran first.
    """
    own = get_state(module)
    roots = [module] if own is None or own.group is None else list(own.group.modules)
    inside = set(_modules_in(roots))
    for root in roots:  # The list grows meanwhile.
        for inner in root.modules():
            state = get_state(inner)
            others = () if state is None or state.group is None else state.group.modules
            for other in others:
                if other not in inside:
                    roots.append(other)
                    inside.update(other.modules())
    return roots


_Children = tuple[dict[str, nn.Module | None], tuple[nn.Module | None, ...]]
"""The dict where a module keeps its children, and the children that were in it."""


def _children_with_groups(
    roots: Iterable[nn.Module], known: Sequence[_Children] = ()
) -> list[_Children]:
    """Return the children of each module that has a child with groups now or had one before."""
    before = {id(children) for children, _ in known}
    found: list[_Children] = []
    seen: dict[nn.Module, bool] = {}

    def look(module: nn.Module) -> bool:
        if module in seen:
            return seen[module]
        state = get_state(module)
        seen[module] = state is not None and state.group is not None
        children = module._modules  # noqa: SLF001 - past `named_children`, which skips copies
        has_groups = [look(child) for child in children.values() if child is not None]
        if any(has_groups) or id(children) in before:
            found.append((children, tuple(children.values())))
        seen[module] |= any(has_groups)
        return seen[module]

    for root in roots:
        look(root)
    return found


def _let_go(before: Runtime, groups: Sequence[ParamGroup]) -> None:
    """Let go of the groups of a runtime that its successor, which has these groups, lacks."""
    gone = [group for group in before.groups if group not in groups]
    for group in groups:
        group.settings.stop_prefetching(gone)
    for module in _modules_in(itertools.chain.from_iterable(group.modules for group in gone)):
        left = get_state(module)
        if left is not None and left.runtime is before:
            left.runtime = None  # The module is a root of its own if it runs again.


def _modules_in(roots: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Return modules and the modules in them, each once."""
    return dict.fromkeys(inner for root in roots for inner in root.modules())


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that casts floating-point tensors."""
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def refuse_export() -> None:
    msg = (
        "a sharded model cannot be exported or traced, because it gathers its parameters while it "
        "runs. Export a plain model: make one, and load the file that "
        "shardkit.checkpoint.save_full(path, model) writes."
    )
    raise StateError(msg)
