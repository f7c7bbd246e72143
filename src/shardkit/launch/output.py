"""What a terminal shows of the ranks: each line behind the number of its rank, in its colour."""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

TEMPLATE = "[rank ${rank}] "
"""What torchrun's agent puts before each piece of a rank's output."""

_HEADER = re.compile(r"\[rank (\d+)\] ")
_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
# Of a terminal's own palette, readable on a dark and on a light background.
_COLOURS = tuple(f"\x1b[{code}m" for code in (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91))


def wants_colour(choice: str, stream: TextIO) -> bool:
    """Say whether a stream gets colours.

    Args:
        choice: ``"always"``, ``"never"`` or ``"auto"``: on a terminal, unless the environment has
            ``NO_COLOR``.
        stream: Stream that is written to.
    """
    if choice == "auto":
        return not os.environ.get("NO_COLOR") and stream.isatty()
    return choice == "always"


def bold(text: str) -> str:
    """Return a text that stands out."""
    return f"{_BOLD}{text}{_RESET}"


class RankLines:
    """A stream that torchrun's agent writes the output of ranks to, from several threads.

    The agent writes what it finds in a rank's file, maybe half a line. Here a line is kept until
    it is whole, so that lines of different ranks do not mix.

    Args:
        stream: Stream that gets the lines.
        colour: Whether the header of each has its rank's colour.
    """

    def __init__(self, stream: TextIO, *, colour: bool) -> None:
        self._stream = stream
        self._colour = colour
        self._unfinished: dict[int, str] = {}
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Write a piece of a rank's output, or a line of this process."""
        with self._lock:
            found = _HEADER.match(text)
            if found is None:
                return self._stream.write(text)
            rank = int(found[1])
            line = self._unfinished.pop(rank, "") + text[found.end() :]
            if line.endswith("\n"):
                self._show(rank, line)
            else:
                self._unfinished[rank] = line
        return len(text)

    def flush(self) -> None:
        """Show what is written so far, up to the last whole line of each rank."""
        self._stream.flush()

    def close(self) -> None:
        """Show lines without an end. The stream below stays open."""
        with self._lock:
            for rank, line in sorted(self._unfinished.items()):
                self._show(rank, f"{line}\n")
            self._unfinished.clear()
            self._stream.flush()

    def isatty(self) -> bool:
        """Say what the stream below says."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return that of the stream below."""
        return self._stream.fileno()

    def _show(self, rank: int, line: str) -> None:
        header = f"[rank {rank}]"
        if self._colour:
            header = f"{_COLOURS[rank % len(_COLOURS)]}{header}{_RESET}"
        self._stream.write(f"{header} {line}")
        self._stream.flush()
