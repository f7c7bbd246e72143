"""Python processes of their own, for what can be chosen only before torch_xla is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import typing

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


def run_python(
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    *,
    most_seconds: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run Python with what can be imported here, not in SPMD mode."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=_environment(environment or {}),
        capture_output=True,
        text=True,
        timeout=most_seconds,
        check=False,
    )


def start_python(
    arguments: Sequence[str], environment: dict[str, str], log: typing.IO[str]
) -> subprocess.Popen[bytes]:
    """Start such a process; what it prints goes to a file."""
    return subprocess.Popen(
        [sys.executable, *arguments], env=_environment(environment), stdout=log, stderr=log
    )


def _environment(own: dict[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_USE_SPMD"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(sys.path), **own}
