"""Says at the end how much was tried."""

from __future__ import annotations

import typing

from fuzzing import outcomes


def pytest_terminal_summary(terminalreporter: typing.Any) -> None:
    counts = ", ".join(f"{outcomes[name]} {name}" for name in ("accepted", "refused", *BAD))
    terminalreporter.write_line(f"fuzzed: {counts}")


BAD = ("raw", "silent", "hung")
