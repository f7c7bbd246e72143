"""What is made once in a process, though ranks may be threads of it; how functions are replaced."""

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


def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `original` that calls ``wrapper(original, *args, **kwargs)``."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    call.wraps_torch = True  # type: ignore[attr-defined]
    return call


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function of torch, or a method, by ``wrapper(original, *args, **kwargs)``."""
    setattr(owner, name, wrapped(getattr(owner, name), wrapper))


def is_wrapped(owner: Any, name: str) -> bool:
    """Whether `wrap` has replaced a function."""
    return hasattr(getattr(owner, name), "wraps_torch")
