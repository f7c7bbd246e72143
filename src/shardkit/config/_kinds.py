"""Kinds of values that only fields of a config have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit._errors import nearest
from shardkit._kinds import Kind, NotOfKindError
from shardkit.config._source import Section, plain

if TYPE_CHECKING:
    from collections.abc import Mapping


class Text(Kind):
    """Any scalar, as text."""

    def parse(self, value: Any) -> str:
        """See `Kind.parse`."""
        if isinstance(value, (list, Section)):
            msg = "must be one value"
            raise NotOfKindError(msg)
        return str(value)


class Pattern(Text):
    """A regular expression."""

    def parse(self, value: Any) -> str:
        """See `Kind.parse`."""
        pattern = super().parse(value)
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            msg = "must be a regular expression"
            raise NotOfKindError(msg, f"It is none: {error}.") from error
        return pattern


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
        return plain(value)


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
        msg = f"must be one of {', '.join(self.words)}"
        for word, remedy in (self.refused or {}).items():
            if text.lower() == word.lower():
                raise NotOfKindError(msg, f"shardkit does not carry this out. {remedy}")
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
            allowed = "".join(f"{word}, or " for word in self.unset)
            msg = f"must be {allowed}left out"
            raise NotOfKindError(msg, f"shardkit does not carry it out. {self.remedy}")
