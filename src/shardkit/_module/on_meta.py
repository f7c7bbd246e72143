"""Which tensors of a model are on the meta device: they have a shape, and no values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from shardkit._runtime.group import ParamGroup

_MAX_NAMED = 8


def params_on_meta(module: nn.Module) -> list[str]:
    """Return the names of parameters on meta, of tied ones the first."""
    return [name for name, param in module.named_parameters() if param.is_meta]


def buffers_on_meta(module: nn.Module) -> list[str]:
    """Return the names of buffers on meta, persistent or not."""
    return [name for name, buffer in module.named_buffers() if buffer.is_meta]


def listed(names: list[str]) -> str:
    """Return names for an error, of many the first ones."""
    shown = ", ".join(map(repr, names[:_MAX_NAMED]))
    more = len(names) - _MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def check_has_values(module: nn.Module, groups: Iterable[ParamGroup]) -> None:
    """Refuse a forward that would compute with tensors on meta.

    Raises:
        StateError: There are such; it names them.
    """
    for group in groups:
        group.check_materialized()
    params, buffers = params_on_meta(module), buffers_on_meta(module)
    if params:
        msg = (
            f"on the meta device, without values: {listed(params)}, which no group of fully_shard "
            f"has taken. Before the first forward call shardkit.materialize(model), or load them "
            f"(shardkit.checkpoint.load_full)."
        )
        raise StateError(msg)
    if buffers:
        msg = (
            f"on the meta device, without values: buffers {listed(buffers)}. State dicts leave out "
            f"those that were registered with persistent=False, so loading does not fill them. "
            f"Before the first forward call shardkit.materialize(model), which has their modules "
            f"compute them again, or set them by hand."
        )
        raise StateError(msg)
