"""Deep copies and pickles of sharded modules; `_module.fsdp_module` gives them their class."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardkit._module.hooks import ModuleState
from shardkit._module.optimizers import watch_optimizers
from shardkit._settings import RootSettings

if TYPE_CHECKING:
    from shardkit._policy import MixedPrecisionPolicy
    from shardkit._runtime.group import ParamGroup

Written = tuple[dict[str, Any], "ParamGroup | None", "MixedPrecisionPolicy", dict[str, Any]]
"""What is pickled of a module: its attributes, its group, its policy, its `RootSettings`."""


def deep_copy(state: ModuleState, original: type[nn.Module], memo: dict[int, Any]) -> Any:
    """Return an independent copy of a module, of the class it had before it was sharded.

    Args:
        state: The state of the module.
        original: The class.
        memo: The memo of `copy.deepcopy`. With a module of a list come the others.
    """
    result: Any = new_module(original)
    memo[id(state.module)] = result
    for name, value in state.without_own_hooks(state.module.__dict__).items():
        result.__dict__[name] = copy.deepcopy(value, memo)
    copied = ModuleState(result, None, state.policy)
    copied.settings = dataclasses.replace(state.settings)
    copied.install()
    if state.group is not None:
        _copy_group(state.group, copied, memo)
    return result


def _copy_group(group: ParamGroup, copied: ModuleState, memo: dict[int, Any]) -> None:
    """Copy a group for the copy of one of its modules; with it come the other modules of a list."""
    key: Any = ("copies of a group", id(group))
    is_first = key not in memo
    states: list[ModuleState] = memo.setdefault(key, [])
    states.append(copied)
    if is_first:
        for module in group.modules:
            copy.deepcopy(module, memo)
        result = group.copy_for(memo)
        for state in states:
            state.group = result


def new_module(original: type[nn.Module]) -> nn.Module:
    """Return a module without attributes."""
    return nn.Module.__new__(original)


def write(state: ModuleState) -> Written:
    """Return what is pickled of a module."""
    module: Any = state.module
    attributes = state.without_own_hooks(dict(module.__getstate__()))
    return attributes, state.group, state.policy, dataclasses.asdict(state.settings)


def restore(module: Any, written: Written) -> None:
    """Give a new module what was written of another."""
    attributes, group, policy, settings = written
    module.__setstate__(attributes)
    # Hooks keep the numbers they had in another process; new ones must not take their places.
    numbers = [
        number
        for child in module.modules()
        for name, hooks in child.__dict__.items()
        if name.endswith("hooks") and isinstance(hooks, dict)
        for number in hooks
    ]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(n + 1 for n in numbers)])
    state = ModuleState(module, group, policy)
    state.settings = RootSettings.restored(settings)
    state.install()
    watch_optimizers()
    if group is not None:
        group.note_restored()
