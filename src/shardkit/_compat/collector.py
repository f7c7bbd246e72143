"""Python's garbage collector, which code may pause for a moment, in several threads at once."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.RLock()
_num_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Let no thread collect garbage in the ``with`` block; the last block to end undoes it."""
    global _num_pauses, _was_enabled  # noqa: PLW0603 - of the process, as the collector is
    with _lock:
        if not _num_pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_pauses += 1
    try:
        yield
    finally:
        with _lock:
            _num_pauses -= 1
            if _was_enabled and not _num_pauses:
                gc.enable()
