"""Carries a plan out: prepares each unit, puts it in its place, shards it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardkit._errors import WrapError
from shardkit._module.fully_shard import fully_shard
from shardkit._module.hooks import get_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._wrapping.units import Unit


def shard_units(
    model: nn.Module,
    units: Sequence[Unit],
    arguments: Sequence[dict[str, Any]],
    prepare: Callable[[nn.Module, dict[str, Any]], Any] | None,
) -> None:
    """Shard the units of a model in their order, the root last.

    Args:
        model: The root.
        units: The units, inner ones first.
        arguments: The arguments of `fully_shard`, for each unit.
        prepare: A function of each module of a unit that is not the root, and with its arguments,
            before it is sharded. What it returns takes the module's place. It may have sharded the
            module by itself.

    Raises:
        WrapError: It returned no module.
    """
    for unit, given in zip(units, arguments, strict=True):
        modules = unit.modules
        if prepare is not None and not unit.is_root:
            modules = [_prepared(model, module, prepare, given) for module in modules]
            unit.modules = modules
        is_done = any(get_state(module) is not None for module in modules)
        if (unit.entries or unit.is_root) and not is_done:
            fully_shard(modules if len(modules) > 1 else modules[0], **given)


def _prepared(
    model: nn.Module,
    module: nn.Module,
    prepare: Callable[[nn.Module, dict[str, Any]], Any],
    arguments: dict[str, Any],
) -> nn.Module:
    """Call `prepare`; put what it returns where the module was."""
    result = prepare(module, arguments)
    if result is None or result is module:
        return module
    if not isinstance(result, nn.Module):
        msg = (
            f"what was to be called before sharding returned {result!r} for a "
            f"{type(module).__name__}. Return the module, another one for its place, or None."
        )
        raise WrapError(msg)
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()  # noqa: SLF001 - keeps places of a shared one apart
        if child is module
    ]
    for parent, name in places:
        setattr(parent, name, result)
    return result
