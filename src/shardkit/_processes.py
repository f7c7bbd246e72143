"""Which machine this is, and what other processes on it do."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def machine_id() -> str:
    """Return `boot_and_namespace`; if that is unknown, the host name, which may mislead."""
    return boot_and_namespace() or socket.gethostname()


def boot_and_namespace() -> str:
    """Return a text that is equal for processes that see each other under their process ids.

    Host names are not enough: clones and containers may all have the same one. The text is empty,
    for unknown, without Linux or /proc.
    """
    try:
        return f"{_BOOT.read_text()}{_PROCESSES.readlink()}"
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """Return ``"gone"``, ``"stopped"`` or ``"busy"``; ``"silent"`` if that cannot be known."""
    try:
        os.kill(pid, 0)
        letter = _fields(pid)[0]
    except ProcessLookupError:
        return "gone"
    except OSError:  # It is another user's process, or there is no /proc.
        return "silent"
    if letter in "ZXx":
        return "gone"
    return "stopped" if letter in "Tt" else "busy"


def start_of(pid: int) -> str:
    """Return when a process began, to tell it from later ones with its id; empty: it has ended.

    Without /proc it is ``"0"`` for this process.
    """
    try:
        fields = _fields(pid)
    except OSError:
        return "0" if pid == os.getpid() else ""
    return "" if fields[0] in "ZX" else fields[19]


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command: first the state, 20th the start."""
    content = Path(f"/proc/{pid}/stat").read_bytes()
    return content.rpartition(b")")[2].decode().split()
