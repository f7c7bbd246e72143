"""Kinds of values that only fields of a config have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shardkit._errors import nearest
from shardkit._kinds import NotOfKindError
from shardkit.config._source import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def text(value: Any) -> str:
    """Read any scalar, as text."""
    if isinstance(value, (list, Section)):
        raise NotOfKindError(expected="must be one value")
    return str(value)


def pattern(value: Any) -> str:
    """Read a regular expression."""
    found = text(value)
    try:
        re.compile(found)
    except (re.error, OverflowError, RecursionError) as error:
        hint = f"It is none: {error}."
        raise NotOfKindError(expected="must be a regular expression", hint=hint) from error
    return found


def names(value: Any) -> tuple[str, ...]:
    """Read names, as a list or with commas between them."""
    parts = value if isinstance(value, list) else str(value).split(",")
    found = tuple(str(part).strip() for part in parts if str(part).strip())
    if isinstance(value, Section) or not found:
        raise NotOfKindError(expected="must be one or more names with commas between them")
    return found


def choice(
    *words: str, from_1: bool = False, refused: Mapping[str, str] | None = None
) -> Callable[[Any], str]:
    """Return the kind of one of several words, in upper or lower case, or its number.

    Args:
        words: The words as Accelerate writes them.
        from_1: Whether the number of a word counts, from 1 on.
        refused: Other words that Accelerate knows, and what to do instead.
    """
    expected = f"must be one of {', '.join(words)}"
    by_word = {word.lower(): word for word in words}
    remedies = {word.lower(): remedy for word, remedy in (refused or {}).items()}

    def parse(value: Any) -> str:
        # YAML takes a bare `no` for False.
        written = "no" if value is False else str(value).strip()
        if written.lower() in by_word:
            return by_word[written.lower()]
        if from_1 and written.isdecimal() and 1 <= int(written) <= len(words):
            return words[int(written) - 1]
        hint = nearest(written, words)
        if written.lower() in remedies:
            hint = f"shardkit does not carry this out. {remedies[written.lower()]}"
        raise NotOfKindError(expected, hint)

    return parse


def unused(remedy: str, *unset: str) -> Callable[[Any], None]:
    """Return the kind of a field or a section that must not be used.

    Args:
        remedy: A sentence on what to do instead.
        unset: Values that count as nothing.
    """

    def parse(value: Any) -> None:
        is_nothing = value is False or (isinstance(value, Section) and not value.entries)
        if not is_nothing and str(value).strip().lower() not in unset:
            expected = f"must be {''.join(f'{word}, or ' for word in unset)}left out"
            raise NotOfKindError(expected, f"shardkit does not carry it out. {remedy}")

    return parse
