"""Names of groups in profiles: ranges of torch.profiler, and of NVTX by `emit_nvtx`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from shardkit._runtime.group import ParamGroup

_NOTHING = contextlib.nullcontext()


def names_of(groups: Sequence[ParamGroup]) -> str:
    """Return the names of groups that travel together."""
    return ", ".join(group.name for group in groups)


def named_range(what: str, *groups: ParamGroup) -> AbstractContextManager[Any]:
    """Return a context that a profile shows as ``what`` and the groups' names.

    Without a profiler it does nothing, and makes no name.
    """
    if not _compat.is_profiling():
        return _NOTHING
    return record_function(f"{what} {names_of(groups)}")
