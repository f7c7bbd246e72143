"""Which machine this is, and what other processes of it do."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def machine_id() -> str:
    """Return `boot_and_namespace`; where that is not known the host name, which may mislead."""
    return boot_and_namespace() or socket.gethostname()


def boot_and_namespace() -> str:
    """Return what processes have in common that can look at each other by their ids.

    Host names do not tell: clones and containers may all have the same one. Empty: it is not
    known, where there is no Linux or no /proc.
    """
    try:
        return f"{_BOOT.read_text()}{_PROCESSES.readlink()}"
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """Return ``"gone"``, ``"stopped"`` or ``"busy"``; ``"silent"`` where it cannot be known."""
    try:
        os.kill(pid, 0)
        letter = _fields(pid)[0]
    except ProcessLookupError:
        return "gone"
    except OSError:  # Another user's, or no /proc.
        return "silent"
    if letter in "ZXx":
        return "gone"
    return "stopped" if letter in "Tt" else "busy"


def start_of(pid: int) -> str:
    """Return when a process began, which tells it from later ones with its id; empty: it ended.

    Of this process it is ``"0"`` where there is no /proc.
    """
    try:
        fields = _fields(pid)
    except OSError:
        return "0" if pid == os.getpid() else ""
    return "" if fields[0] in "ZX" else fields[19]


def _fields(pid: int) -> list[str]:
    """Return what the system says behind the command: its state, ..., and as the 20th the start."""
    content = Path(f"/proc/{pid}/stat").read_bytes()
    return content.rpartition(b")")[2].decode().split()
