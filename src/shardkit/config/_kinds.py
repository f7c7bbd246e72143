"""Kinds of values that fields of a config have, and how each is read from what was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit._errors import nearest
from shardkit.config._source import Section

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRUE = {"true", "yes", "on", "1", "t", "y"}
_FALSE = {"false", "no", "off", "0", "f", "n"}


class NotOfKindError(Exception):
    """A value is not what a field takes.

    Args:
        expected: Goes on from the field's name; ``"must ..."`` where another value would do.
        hint: A sentence that follows.
    """

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint


class Kind:
    """How a value is read. `parse` raises `NotOfKindError`."""

    def parse(self, value: Any) -> Any:
        """Return the value that is meant."""
        raise NotImplementedError


class Flag(Kind):
    """Yes or no; also as words, as commands pass it."""

    def parse(self, value: Any) -> bool:
        """See `Kind.parse`."""
        word = str(value).strip().lower()
        if word not in _TRUE | _FALSE:
            msg = "must be true or false"
            raise NotOfKindError(msg)
        return word in _TRUE


@dataclass(frozen=True)
class Number(Kind):
    """An integer; also as words such as ``1e8``, which YAML takes for text.

    Attributes:
        least: The smallest one.
        also: Other ones that are allowed.
    """

    least: int = 0
    also: tuple[int, ...] = ()

    def parse(self, value: Any) -> int:
        """See `Kind.parse`."""
        msg = f"must be an integer of at least {self.least}"
        if isinstance(value, bool):
            raise NotOfKindError(msg)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise NotOfKindError(msg) from None
        if not number.is_integer() or (number < self.least and number not in self.also):
            raise NotOfKindError(msg)
        return int(number)


class Text(Kind):
    """Any scalar, as text."""

    def parse(self, value: Any) -> str:
        """See `Kind.parse`."""
        if isinstance(value, (list, Section)):
            msg = "must be one value"
            raise NotOfKindError(msg)
        return str(value)


class Names(Kind):
    """Names, as a list or with commas between them."""

    def parse(self, value: Any) -> tuple[str, ...]:
        """See `Kind.parse`."""
        parts = value if isinstance(value, list) else str(value).split(",")
        names = tuple(str(part).strip() for part in parts if str(part).strip())
        if isinstance(value, Section) or not names:
            msg = "must be one or more names with commas between them"
            raise NotOfKindError(msg)
        return names


class Anything(Kind):
    """Whatever was written."""

    def parse(self, value: Any) -> Any:
        """See `Kind.parse`."""
        return value.plain() if isinstance(value, Section) else value


@dataclass(frozen=True)
class Choice(Kind):
    """One of several words, in upper or lower case, or its number.

    Attributes:
        words: As Accelerate writes them.
        from_1: Whether the number of a word counts, from 1 on.
        refused: Other words that Accelerate knows, and what to do instead.
    """

    words: tuple[str, ...]
    from_1: bool = False
    refused: Mapping[str, str] | None = None

    def parse(self, value: Any) -> str:
        """See `Kind.parse`."""
        # YAML takes a bare `no` for False.
        text = "no" if value is False else str(value).strip()
        by_word = {word.lower(): word for word in self.words}
        if text.lower() in by_word:
            return by_word[text.lower()]
        if self.from_1 and text.isdecimal() and 1 <= int(text) <= len(self.words):
            return self.words[int(text) - 1]
        for word, remedy in (self.refused or {}).items():
            if text.lower() == word.lower():
                msg = f"is one that shardkit does not carry out. {remedy}"
                raise NotOfKindError(msg)
        msg = f"must be one of {', '.join(self.words)}"
        raise NotOfKindError(msg, nearest(text, self.words))


@dataclass(frozen=True)
class Empty(Kind):
    """Nothing: a field or a section that must not be used.

    Attributes:
        remedy: What to do instead.
        unset: Values that count as nothing.
    """

    remedy: str
    unset: tuple[str, ...] = ()

    def parse(self, value: Any) -> None:
        """See `Kind.parse`."""
        is_nothing = value is False or (isinstance(value, Section) and not value.entries)
        if not is_nothing and str(value).strip().lower() not in self.unset:
            msg = f"is not carried out by shardkit. {self.remedy}"
            raise NotOfKindError(msg)
