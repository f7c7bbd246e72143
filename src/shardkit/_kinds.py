"""Kinds of values that people write as text, in the environment, config files and command lines."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any

_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")


class NotOfKindError(Exception):
    """A value is not what a field takes.

    Args:
        expected: What is allowed; goes on from the field's name: ``"must ..."``.
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


class Kind:
    """How a value is read. `parse` raises `NotOfKindError`."""

    def parse(self, value: Any) -> Any:
        """Return the value that is meant."""
        raise NotImplementedError


def is_of_kind(kind: Kind, value: object) -> bool:
    """Whether a kind of field takes a value."""
    try:
        kind.parse(value)
    except NotOfKindError:
        return False
    return True


class Flag(Kind):
    """Yes or no; also as words, as commands pass it."""

    def parse(self, value: Any) -> bool:
        """See `Kind.parse`."""
        word = str(value).strip().lower()
        if word not in {*_TRUE, *_FALSE}:
            msg = "must be true or false (or yes, on, 1; no, off, 0)"
            raise NotOfKindError(msg)
        return word in _TRUE


@dataclass(frozen=True)
class Number(Kind):
    """An integer; also as words such as ``1e8``, which YAML takes for text.

    Attributes:
        least: The smallest one.
        most: The largest one; None: there is none.
        also: Other ones that are allowed.
    """

    least: int = 0
    most: int | None = None
    also: tuple[int, ...] = ()

    def parse(self, value: Any) -> int:
        """See `Kind.parse`."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        is_in = self.least <= number <= (math.inf if self.most is None else self.most)
        if not (is_in or number in self.also) or not number.is_integer():
            allowed = (
                f"of at least {self.least}"
                if self.most is None
                else f"from {self.least} to {self.most}"
            )
            msg = f"must be an integer {allowed}" + "".join(f", or {n}" for n in self.also)
            raise NotOfKindError(msg)
        return int(number)


class Seconds(Kind):
    """A positive number, maybe infinite."""

    def parse(self, value: Any) -> float:
        """See `Kind.parse`."""
        try:
            seconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if not seconds > 0:
            msg = "must be a positive number of seconds (inf: never)"
            raise NotOfKindError(msg)
        return seconds
