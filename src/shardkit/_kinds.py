"""Kinds of values that people write as text, in the environment, config files and command lines."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import Any

Kind = Callable[[Any], Any]
"""Reads a value, and returns what is meant, or raises `NotOfKindError`."""

_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")


class NotOfKindError(Exception):
    """A value is not what a field takes.

    Args:
        expected: The values that are allowed; goes on from the field's name: ``"must ..."``.
        hint: A sentence that follows.
    """

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint

    def sentence(self, name: str, value: object) -> str:
        """Return what is said of a field that got a value."""
        try:
            got = reprlib.repr(value)
        except ValueError:  # Of an integer of more digits than Python prints.
            got = f"a {type(value).__name__} that is too long to print"
        return f"{name} {self.expected}, got {got}. {self.hint}".rstrip()


def is_of_kind(kind: Kind, value: object) -> bool:
    """Whether a kind of field takes a value."""
    try:
        kind(value)
    except NotOfKindError:
        return False
    return True


def flag(value: Any) -> bool:
    """Read yes or no; also as words, as commands pass it."""
    word = str(value).strip().lower()
    if word not in {*_TRUE, *_FALSE}:
        raise NotOfKindError(expected="must be true or false (or yes, on, 1; no, off, 0)")
    return word in _TRUE


def number(
    least: int = 0, most: int | None = None, *, also: tuple[int, ...] = ()
) -> Callable[[Any], int]:
    """Return the kind of integers; also as words such as ``1e8``, which YAML takes for text.

    Args:
        least: The smallest one.
        most: The largest one; None: there is none.
        also: Other ones that are allowed.
    """
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    expected = f"must be an integer {allowed}" + "".join(f", or {n}" for n in also)

    def parse(value: Any) -> int:
        found = _float(value)
        is_in = least <= found <= (math.inf if most is None else most)
        if not (is_in or found in also) or not found.is_integer():
            raise NotOfKindError(expected)
        return int(found)

    return parse


def seconds(value: Any) -> float:
    """Read a positive number, maybe infinite."""
    found = _float(value)
    if not found > 0:
        raise NotOfKindError(expected="must be a positive number of seconds (inf: never)")
    return found


def _float(value: Any) -> float:
    """Return a number; not a number if it is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
