"""Which machine a process is on: where its process id means something."""

from __future__ import annotations

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
