"""Where the stores of runs on this host are, for who looks from another terminal.

Each rank leaves a small file in the temporary folder of its user while it runs. A final verdict
leaves one that stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.backends.watch.answer import Answer

_MAX_VERDICTS = 20


@dataclass(frozen=True, slots=True)
class Run:
    """One rank of a run, on this host.

    Attributes:
        name: Of the run.
        host: Of the store.
        port: Of the store.
        world_size: Number of ranks.
        rank: This one.
        pid: Of its process.
        started: Seconds since 1970.
    """

    name: str
    host: str
    port: int
    world_size: int
    rank: int
    pid: int
    started: float


def folder() -> Path:
    """Return where the files are."""
    return Path(tempfile.gettempdir(), f"shardkit-{getpass.getuser()}")


def register(run: Run) -> Path | None:
    """Leave a file about a rank; return it. None: this host has no place for it."""
    path = folder() / f"{run.name}-{run.rank}.run"
    try:
        folder().mkdir(mode=0o700, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(run)))
    except OSError:
        return None
    return path


def running() -> list[Run]:
    """Return the ranks on this host, the latest first; files of processes that are gone go."""
    found = []
    for path in folder().glob("*.run"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            run = Run(**json.loads(path.read_text()))
            if _is_alive(run.pid):
                found.append(run)
            else:
                path.unlink()
    return sorted(found, key=lambda run: (-run.started, run.rank))


def keep_verdict(name: str, text: str, answers: Sequence[Answer]) -> None:
    """Leave a file with the verdict on a run, and what the ranks answered."""
    content = {"text": text, "answers": [answer.dump() for answer in answers], "at": time.time()}
    with contextlib.suppress(OSError):
        folder().mkdir(mode=0o700, exist_ok=True)
        (folder() / f"{name}.verdict").write_text(json.dumps(content))
        for old in _verdicts()[_MAX_VERDICTS:]:
            old.unlink()


def last_verdict() -> dict[str, Any] | None:
    """Return the latest verdict on this host: its text, its answers and its time."""
    for path in _verdicts():
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(path.read_text())
            return found
    return None


def _verdicts() -> list[Path]:
    return sorted(folder().glob("*.verdict"), key=lambda path: -path.stat().st_mtime)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
