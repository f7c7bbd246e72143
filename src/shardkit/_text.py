"""Text for people, and values that people write as text: in the environment, files, commands."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# --- for people -----------------------------------------------------------------------------------

_NUM_NEAREST = 3
_MAX_NAMED = 8
_KIB = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PIPE_WIDTH = 240


def console_of_tables() -> Console:
    """Return the console on which a command prints tables. It needs the extra ``cli``.

    Lines for other programs are not folded, since there is no terminal width.
    """
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table_of(columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table for `console_of_tables`.

    Args:
        columns: Place of the texts of each column by its title: ``left``, ``right``, or ``fold``,
            where long texts continue on the next line.
        rows: Texts of each row.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title, place in columns.items():
        if place == "fold":
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right" if place == "right" else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def listed(items: Iterable[object], show: Callable[[Any], str] = repr) -> str:
    """Return names for a sentence of an error: the first ones, and how many more there are."""
    known = [*items]
    more = len(known) - _MAX_NAMED
    return ", ".join(map(show, known[:_MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


def listed_lines(lines: Sequence[str], more: str = "and {} more") -> list[str]:
    """Return the first lines for an error, and a line that says how many more there are."""
    left = len(lines) - _MAX_NAMED
    return [*lines[:_MAX_NAMED], *([more.format(left)] if left > 0 else [])]


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Return a sentence with the names whose spelling is most similar to `wanted`."""
    known = list(dict.fromkeys(names))
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(wanted.lower(), list(lowered), n=_NUM_NEAREST, cutoff=0.4)
    found = [lowered[name] for name in close] or known[:_NUM_NEAREST]
    return f"The nearest ones are {', '.join(map(repr, found))}." if found else "It has none."


def counted(number: object, things: str) -> str:
    """Return a number of things, such as ``"2 ranks"``, or ``"1 rank"`` for one of them."""
    return f"{number} {things.removesuffix('s') if str(number) == '1' else things}"


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; the last one only counts corrections."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype in torch, e.g. ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def shown_nbytes(nbytes: int) -> str:
    """Return a number of bytes as text, in a suitable unit."""
    value, unit = float(nbytes), 0
    while value >= _KIB and unit < len(_UNITS) - 1:
        value, unit = value / _KIB, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


# --- from people ----------------------------------------------------------------------------------

Kind = Callable[[Any], Any]
"""Function that reads a value and returns its meaning, or raises `NotOfKindError`."""

_SIZE = re.compile(r"\s*([\d.e+_-]+)\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)
_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")


class NotOfKindError(Exception):
    """A value is not what a field takes."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        # The values that are allowed, as text after the field's name: ``"must ..."``.
        self.expected = expected
        self.hint = hint  # A sentence that follows.

    def sentence(self, name: str, value: object) -> str:
        """Return the sentence of an error about a field and its value."""
        try:
            got = reprlib.repr(value)
        except ValueError:  # The integer has more digits than Python prints.
            got = f"a {type(value).__name__} that is too long to print"
        return f"{name} {self.expected}, got {got}. {self.hint}".rstrip()


def read_as(kind: Kind, name: str, value: object, error: type[Exception]) -> Any:
    """Return the meaning of a value; raise an error about `name` if it is not of the kind."""
    try:
        return kind(value)
    except NotOfKindError as found:
        raise error(found.sentence(name, value)) from None


def is_of_kind(kind: Kind, value: object) -> bool:
    """Whether a field of this kind takes a value."""
    try:
        kind(value)
    except NotOfKindError:
        return False
    return True


def flag(value: Any) -> bool:
    """Read yes or no, also as the words that commands pass."""
    word = str(value).strip().lower()
    if word not in {*_TRUE, *_FALSE}:
        raise NotOfKindError(expected="must be true or false (or yes, on, 1; no, off, 0)")
    return word in _TRUE


def number(
    least: int = 0, most: int | None = None, *, also: tuple[int, ...] = ()
) -> Callable[[Any], int]:
    """Return a kind for integers, also written as ``1e8``, which YAML reads as text.

    Args:
        least: The smallest integer.
        most: The largest integer; None: there is none.
        also: Other integers that are allowed.
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
    """Return a value as a number, or NaN if it is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def byte_size(value: Any) -> int:
    """Read a number of bytes above 0, such as ``80GiB``, ``5GB``, ``1.5 MiB``, ``1e9`` or ``7``."""
    size = 0
    with contextlib.suppress(ValueError, OverflowError):  # Not a number, or too large.
        if found := _SIZE.fullmatch(str(value)):
            power = " KMGT".index((found[2] or " ").upper())
            size = int(float(found[1]) * (_KIB if found[3] else 1000) ** power)
    if size < 1:
        raise NotOfKindError(expected="must be a number of bytes such as 5000000000, 5GB or 80GiB")
    return size
