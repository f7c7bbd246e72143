"""The heap of the host, in which whole parameters that are freed leave holes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_LEAST_NBYTES = 2**20


@functools.cache
def _trim() -> Any:
    """Return glibc's ``malloc_trim``; None: another C library, which has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def give_back(freed_nbytes: int) -> None:
    """Give the pages of freed memory back to the system, where much was freed on the host.

    glibc keeps freed tensors of up to 32 MiB, and often cannot use their place for the next ones:
    what torch asks for is aligned, so a hole of exactly its size is too small. A model whose layers
    are made, cut and freed one after the other would keep most of them in memory.
    """
    trim = _trim()
    if trim is not None and freed_nbytes >= _LEAST_NBYTES:
        trim(0)
