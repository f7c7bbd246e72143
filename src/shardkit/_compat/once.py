"""What is made or replaced once in a process, though ranks may be threads of it."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function run once for its arguments; later calls, and other threads, get its result.

    With `functools.cache` alone, threads that call it first at the same time would each run it, and
    get different classes, or replace a function of torch twice.
    """
    lock = threading.RLock()
    made: Any = functools.cache(function)

    @functools.cache  # Calls that find a result take no lock.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return made(*args, **kwargs)

    return cast("Callable[P, T]", call)
