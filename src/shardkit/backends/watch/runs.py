"""Where the stores of runs on this host are, for who looks from another terminal.

Each rank leaves a small file in a folder of its user while it runs. A diagnosis that ended a run
leaves one that stays. Nothing depends on these files: where there is no place for them, as on a
read-only disk, there are none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.backends.watch.status import RankStatus


# --- processes of this machine --------------------------------------------------------------------

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def machine_id() -> str:
    """Return what processes have in common that can look at each other by their ids.

    Host names do not tell: clones and containers may all have the same one.
    """
    try:
        return f"{_BOOT.read_text().strip()} {_PROCESSES.readlink()}"
    except OSError:  # No Linux, or no /proc.
        return socket.gethostname()


def process_state(pid: int) -> str:
    """Return what a process of this machine does that does not answer, as `RankStatus.state`."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return "gone"
    except OSError:  # Another user's, or no /proc.
        return "silent"
    letter = status.rsplit(")", 1)[1].split()[0]
    if letter in "ZXx":
        return "gone"
    return "stopped" if letter in "Tt" else "busy"


# --- runs of this host ----------------------------------------------------------------------------

_MAX_DIAGNOSES = 20
_MAX_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank of a run, on this host.

    Attributes:
        name: Name of the run.
        host: Host of the store, whose port it is.
        started: Seconds since 1970.
        machine: Machine on which the process id means something.
    """

    name: str
    host: str
    port: int
    world_size: int
    rank: int
    pid: int
    started: float
    machine: str = ""


def folder() -> Path:
    """Return where the files are. By number: not each user has a name."""
    return Path(tempfile.gettempdir(), f"shardkit-{os.getuid()}")


def _own_folder(*, make: bool = False) -> Path | None:
    """Return the folder if it is this user's alone; None: it is another's, or a link, or missing.

    Others may make folders and links of this name where all users write.
    """
    path = folder()
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return path if is_own and not found.st_mode & 0o077 else None


def register(run: RankFile) -> Path | None:
    """Leave a file about a rank; return it. None: this host has no place for it."""
    own = _own_folder(make=True)
    if own is None:
        return None
    path = own / f"{run.name}-{run.rank}.run"
    try:
        path.write_text(json.dumps(dataclasses.asdict(run)))
    except OSError:
        return None
    return path


def running() -> list[RankFile]:
    """Return the ranks on this host, the latest first; files of processes that are gone go."""
    found = []
    for path in _files("*.run"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            run = RankFile(**json.loads(_read(path)))
            # Of processes of other machines nobody can tell.
            if run.machine not in ("", machine_id()) or process_state(run.pid) != "gone":
                found.append(run)
            else:
                path.unlink()
    return sorted(found, key=lambda run: (-run.started, run.rank))


def process_of(name: str, rank: int) -> int | None:
    """Return the process of a rank of a run if it is on this machine, though it may be gone."""
    for path in _files(f"{name}-{rank}.run"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            run = RankFile(**json.loads(_read(path)))
            return run.pid if run.machine == machine_id() else None
    return None


def keep_diagnosis(name: str, text: str, statuses: Sequence[RankStatus]) -> None:
    """Leave a file with what ended a run, and what the ranks answered."""
    own = _own_folder(make=True)
    if own is None:
        return
    content = {"text": text, "answers": [status.dump() for status in statuses], "at": time.time()}
    with contextlib.suppress(OSError):
        (own / f"{name}.diagnosis").write_text(json.dumps(content))
        for old in _diagnoses()[_MAX_DIAGNOSES:]:
            old.unlink()


def last_diagnosis() -> dict[str, Any] | None:
    """Return what ended the last run on this host: its text, its answers and its time."""
    for path in _diagnoses():
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(_read(path))
            return found
    return None


def _files(pattern: str) -> list[Path]:
    own = _own_folder()
    return [*own.glob(pattern)] if own is not None else []


def _read(path: Path) -> str:
    """Return the text of a file of sensible size.

    Raises:
        OSError: It cannot be read, or is no such file.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_NBYTES:
        msg = f"{path} is no file of a run"
        raise OSError(msg)
    return path.read_text()


def _diagnoses() -> list[Path]:
    def age(path: Path) -> float:
        try:
            return -path.stat().st_mtime
        except OSError:
            return 0.0

    return sorted(_files("*.diagnosis"), key=age)
