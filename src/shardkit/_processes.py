"""Which machine this is, and what other processes on it do."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
_START = 19  # Its place in `_fields`, in ticks since the host started.


def machine_id() -> str:
    """Return `boot_and_namespace`; if that is unknown, the host name, which may mislead."""
    return boot_and_namespace() or socket.gethostname()


def boot_and_namespace() -> str:
    """Return a text that is equal for processes that see each other under their process ids.

    They also see the same start of each process (`start_of`), which depends on the namespace for
    time. Host names are not enough: clones and containers may all have the same one. The text is
    empty, for unknown, without Linux or /proc.
    """
    try:
        text = f"{_BOOT.read_text('utf-8')}{(_NAMESPACES / 'pid').readlink()}"
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # Linux before 5.6 has none for time.
        text += str((_NAMESPACES / "time").readlink())
    return text


def process_state(pid: int, start: str) -> str:
    """Return ``"gone"``, ``"stopped"`` or ``"busy"``; ``"silent"`` if that cannot be known.

    Args:
        pid: Process id, which a later process may have taken over.
        start: Start of the process (`start_of`); empty: unknown.
    """
    try:
        os.kill(pid, 0)
        fields = _fields(pid)
    except ProcessLookupError:
        return "gone"
    except OSError:  # It is another user's process, or there is no /proc.
        return "silent"
    if fields[0] in "ZXx" or (start and fields[_START] != start):
        return "gone"
    return "stopped" if fields[0] in "Tt" else "busy"


def start_of(pid: int) -> str:
    """Return when a process began, to tell it from later ones with its id; empty: it has ended.

    Without /proc it is ``"0"`` for this process.
    """
    try:
        fields = _fields(pid)
    except OSError:
        return "0" if pid == os.getpid() else ""
    return "" if fields[0] in "ZXx" else fields[_START]


def allow_open_files(pid: int, number: int) -> int:
    """Let a process of this user open more files, as far as its hard limit goes.

    Returns:
        Number of files that it may have open; `number` if that cannot be known.
    """
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= number:
            return number
        most = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
    except (AttributeError, OSError, ValueError):  # It is not Linux, or not allowed.
        return number
    return most


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command; the first is the state."""
    content = Path(f"/proc/{pid}/stat").read_bytes()
    return content.rpartition(b")")[2].decode().split()
