"""Progress of an action that may take minutes, on rank 0's terminal or through a function."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = bool | Callable[[int, int], None] | None

_SHOWN_AFTER_S = 1.0


class Meter:
    """A counter of bytes, which shows them if the action takes longer than about a second."""

    def __init__(self, progress: Progress, what: str, *, rank: int) -> None:
        """Show nothing yet.

        Args:
            progress: Function of the bytes done and of all bytes, which each rank calls with its
                own numbers; False: show nothing; else a bar on rank 0's terminal, if rich is
                installed.
            what: Name of the action, for the bar.
            rank: Number of this process.
        """
        self._call = progress if callable(progress) else None
        wanted = self._call is None and progress is not False and rank == 0
        self._bar_wanted = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._what = what
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._done = 0
        self._total = 0
        self._lock = threading.Lock()

    def expect(self, nbytes: int) -> None:
        """Set how many bytes there will be."""
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        """Count bytes; called from any thread."""
        with self._lock:
            self._done += nbytes
            # `expect` did not count the bytes around tensors in a file.
            done = min(self._done, self._total)
            if self._call is not None:
                self._call(done, self._total)
            elif self._bar_wanted and time.monotonic() - self._began > _SHOWN_AFTER_S:
                self._show(done)

    def _show(self, done: int) -> None:
        if self._bar is None:
            try:
                from rich.console import Console
                from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
            except ImportError:
                self._bar_wanted = False
                return
            columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._what, total=self._total)
        self._bar.update(self._task, completed=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
