"""Which machine a process is on, and what a process of this machine does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

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
