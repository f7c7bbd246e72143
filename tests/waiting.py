"""Waiting for what another thread or process does a moment later: until it is so."""

from __future__ import annotations

import time
import typing

if typing.TYPE_CHECKING:
    from collections.abc import Callable


def until(is_so: Callable[[], bool], within_s: float = 30.0) -> bool:
    """Ask until it is so; return whether it was, in a time that a loaded machine does not need."""
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
