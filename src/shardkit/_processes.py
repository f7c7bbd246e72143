"""Which machine this is, and what other processes on it do."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import zlib
from pathlib import Path

_PROCESSES = Path("/proc")
_START = 19  # Place in /proc/PID/stat after the command, in ticks since the host started.


def machine_id() -> str:
    """Return `boot_and_namespace`; if that is unknown, the host name, which may mislead."""
    return boot_and_namespace() or socket.gethostname()


def boot_and_namespace() -> str:
    """Return a text that is equal for processes that see each other under their process ids.

    They also see the same start of each process (`start_of`), which depends on the namespace for
    time. macOS has no such namespaces. Host names are not enough: clones and containers may all
    have the same one. The text is empty, for unknown, on a Linux without /proc.
    """
    namespaces = _PROCESSES / "self/ns"
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text("utf-8")
        text = f"{boot}{(namespaces / 'pid').readlink()}"
    except OSError:
        return _output_of("sysctl", "-n", "kern.bootsessionuuid")
    with contextlib.suppress(OSError):  # Linux before 5.6 has none for time.
        text += str((namespaces / "time").readlink())
    return text


def process_state(pid: int, start: str) -> str:
    """Return ``"gone"``, ``"stopped"`` or ``"busy"``; ``"silent"`` if that cannot be known.

    Args:
        pid: Process id, which a later process may have taken over.
        start: Start of the process (`start_of`); empty: unknown.
    """
    try:
        os.kill(pid, 0)
        state, found = _state_and_start(pid)
    except ProcessLookupError:
        return "gone"
    except OSError:  # It is another user's process, or the system shows none.
        return "silent"
    if state in "ZXx" or (start and found != start):
        return "gone"
    return "stopped" if state in "Tt" else "busy"


def start_of(pid: int) -> str:
    """Return when a process began, to tell it from later ones with its id; empty: it has ended.

    The text has digits only. It is ``"0"`` for this process if the system does not show it.
    """
    try:
        state, start = _state_and_start(pid)
    except OSError:
        return "0" if pid == os.getpid() else ""
    return "" if state in "ZXx" else start


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


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state, and when it began; raise `OSError` if unknown."""
    if (_PROCESSES / "self").exists():
        content = (_PROCESSES / str(pid) / "stat").read_bytes()
        fields = content.rpartition(b")")[2].decode().split()
        return fields[0], fields[_START]
    shown = _output_of("ps", "-o", "state=", "-o", "lstart=", "-p", str(pid))
    state, _, start = shown.partition(" ")
    if not start:
        msg = f"ps does not show process {pid}"
        raise OSError(msg)
    return state[0], str(zlib.crc32(start.strip().encode()))


def _output_of(*command: str) -> str:
    """Return what a program of macOS prints, the same for all processes; empty: it fails."""
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    try:
        found = subprocess.run(  # noqa: S603 - fixed programs
            command, env=environment, capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
