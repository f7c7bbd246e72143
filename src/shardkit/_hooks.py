"""Module hooks: from a module's forward to the runtime's events.

One `ModuleState` per `fully_shard` call, kept on its module; the hooks are its bound methods and
hold no state of their own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat
from shardkit._runtime import Runtime
from shardkit._tree import iter_tensors, map_tensors

if TYPE_CHECKING:
    from shardkit._group import Group
    from shardkit._policy import MixedPrecisionPolicy
    from shardkit._runtime import ForwardRecord

STATE_ATTRIBUTE = "_shardkit_state"


def get_state(module: nn.Module) -> ModuleState | None:
    """Return the state that `fully_shard` put on `module`, or None."""
    state: ModuleState | None = module.__dict__.get(STATE_ATTRIBUTE)
    return state


@dataclass(slots=True)
class _OpenForward:
    """A forward of a module that has begun.

    Attributes:
        record: Of its group.
        is_root: It is the outermost one.
        is_recompute: It runs inside backward.
        handled: The exception that the caller was handling when it began, if any.
    """

    record: ForwardRecord | None
    is_root: bool
    is_recompute: bool
    handled: BaseException | None


class ModuleState:
    """What `fully_shard` knows about one module.

    Attributes:
        module: The module.
        group: Its parameters, or None if there were none left to take.
        policy: Dtypes.
        runtime: Shared by all groups of the root; made at the root's first forward.
    """

    def __init__(
        self, module: nn.Module, group: Group | None, policy: MixedPrecisionPolicy
    ) -> None:
        self.module = module
        self.group = group
        self.policy = policy
        self.runtime: Runtime | None = None
        self._open: list[_OpenForward] = []

    def install(self) -> None:
        """Put the state and the hooks on the module."""
        self.module.__dict__[STATE_ATTRIBUTE] = self
        self.module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        self.module.register_forward_hook(self.post_forward, always_call=True)
        self.module.register_state_dict_pre_hook(self.pre_state_dict)
        self.module.register_load_state_dict_pre_hook(self.pre_load_state_dict)

    def owns_hook(self, hook: Any) -> bool:
        """Whether a forward hook is one of this state's."""
        hook = getattr(hook, "hook", hook)  # torch wraps those of load_state_dict.
        return getattr(hook, "__self__", None) is self

    def without_own_hooks(self, hooks: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict of forward hooks, of the same class, without this state's."""
        return type(hooks)((k, hook) for k, hook in hooks.items() if not self.owns_hook(hook))

    def make_runtime(self) -> Runtime | None:
        """Make this module the root of all sharded modules in it.

        Returns:
            The runtime; None if no module in it has a parameter.
        """
        states = [s for m in self.module.modules() if (s := get_state(m)) is not None]
        groups = [state.group for state in states if state.group is not None]
        if not groups:
            return None
        entered = []
        for runtime in {id(s.runtime): s.runtime for s in states if s.runtime}.values():
            entered += runtime.hand_over()  # An inner module ran alone before, as its own root.
        self._name_params(groups)
        for state in states:
            if state.group is not None:
                state.group.is_root = state is self
                inner = [get_state(m) for m in state.module.modules() if m is not state.module]
                state.group.is_innermost = all(s is None or s.group is None for s in inner)
        runtime = Runtime(groups)
        for group in entered:
            runtime.reduce_order.enter_forward(group.index)
        for state in states:
            state.runtime = runtime
        return runtime

    def _name_params(self, groups: list[Group]) -> None:
        """Give every parameter and group its name as seen from the root."""
        names: dict[int, str] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), name)
        modules = {id(module): name for name, module in self.module.named_modules()}
        for group in groups:
            group.name = ", ".join(modules.get(id(m)) or "the root" for m in group.modules)
            for bucket in group.buckets:
                for index, found in enumerate(bucket.found):
                    shown = bucket.unsharded[index]
                    full_name = names.get(id(found.param)) or names.get(id(shown))
                    bucket.rename(index, full_name or found.name)

    # --- hooks ---

    def pre_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        """Show the sharded parameters: a state dict holds those, at any time."""
        del module, prefix, keep_vars
        if self.group is not None:
            self.group.show(unsharded=False)

    def pre_load_state_dict(self, module: nn.Module, *args: Any) -> None:
        """Show the sharded parameters: a state dict is loaded into those, at any time."""
        del module, args
        if self.group is not None:
            self.group.show(unsharded=False)

    @_compat.untraced
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshard the group, cast the inputs, watch those that require gradients."""
        del module
        runtime = self.runtime or self.make_runtime()
        policy = self.policy
        is_recompute = runtime is not None and _compat.in_backward()
        is_root = False
        if runtime is not None and not is_recompute and runtime.pass_root in (None, self):
            is_root = True
            self._open.clear()
            runtime.begin_pass(self)
            if runtime.device.type != "cpu":
                args, kwargs = _map_inputs(_Mover(runtime.device), args, kwargs)
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = _map_inputs(_Caster(policy.param_dtype), args, kwargs)
        record = None
        if runtime is not None and self.group is not None:
            enter = runtime.enter_recompute if is_recompute else runtime.enter_forward
            record = enter(self.group)
            if record is not None and (
                self.group.needs_memory or not self.group.gradients.is_local
            ):
                args, kwargs = self._watch_inputs(runtime, record, args, kwargs)
        self._open.append(_OpenForward(record, is_root, is_recompute, sys.exception()))
        return args, kwargs

    def _watch_inputs(
        self, runtime: Runtime, record: ForwardRecord, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        found: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                found[id(tensor)] = tensor
            return tensor

        map_tensors(note, args)
        map_tensors(note, kwargs)
        if not found:
            return args, kwargs
        watched = runtime.watch_inputs(record, list(found.values()))
        stand_ins = dict(zip(found, watched, strict=True))
        return _map_inputs(lambda tensor: stand_ins.get(id(tensor), tensor), args, kwargs)

    @_compat.untraced
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook the outputs for backward, reshard, cast the outputs.

        Also called when an exception ends the forward.
        """
        del module, args
        if not self._open:
            return output
        forward = self._open.pop()
        runtime, group, record = self.runtime, self.group, forward.record
        if sys.exception() is not forward.handled:
            if runtime is not None:
                runtime.interrupt_forward(
                    group, record, is_root=forward.is_root, is_recompute=forward.is_recompute
                )
            return output
        outputs = []
        if torch.is_grad_enabled():
            outputs = [t for t in iter_tensors(output) if t.requires_grad]
        if runtime is not None:
            if group is not None:
                leave = runtime.exit_recompute if forward.is_recompute else runtime.exit_forward
                leave(group, record, outputs)
            if forward.is_root:
                runtime.end_pass(needs_backward=bool(outputs))
        if self.policy.output_dtype is not None:
            output = map_tensors(_Caster(self.policy.output_dtype), output)
        return output


class _Caster:
    """Casts floating-point tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


class _Mover:
    """Moves tensors to the device of the parameters."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def _map_inputs(fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return map_tensors(fn, args), map_tensors(fn, kwargs)
