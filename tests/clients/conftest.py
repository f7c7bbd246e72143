"""Clients beside FSDP2: their table, their ranks, and what is not collected where they are not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import typing

import pytest
import rich.console
import rich.table

import workers

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

Tell = typing.Callable[[str, str, str], None]  # What the fixture ``tell`` is.

_NEEDS = {
    "test_accelerate": ("accelerate", "transformers"),
    "test_torchtitan": ("torchtitan",),
    "test_torchtune": ("torchtune", "torchao"),
    "test_trl": ("trl", "peft"),
}
"""Packages by the beginning of a file's name."""

collect_ignore_glob = [
    f"{prefix}*.py"
    for prefix, needs in _NEEDS.items()
    if not all(map(importlib.util.find_spec, needs))
]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table that is printed at the end."""

    client: str  # Name of the package.
    case: str  # What was run.
    outcome: str  # Difference from FSDP2, or why there is none.


_rows: list[Row] = []


@pytest.fixture
def tell() -> Tell:
    """``tell(client, case, outcome)``: put a line into the table at the end of the session."""

    def put(client: str, case: str, outcome: str) -> None:
        _rows.append(Row(client, case, outcome))

    return put


@pytest.fixture(scope="session")
def pools_by_sharder() -> Iterator[dict[str, workers.Pools]]:
    """Worker processes by what shards in them: FSDP2, or shardkit in its place."""
    with workers.Pools() as fsdp2, workers.Pools() as shardkit:
        yield {"fsdp2": fsdp2, "shardkit": shardkit}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of clients."""
    if not _rows:
        return
    table = rich.table.Table(title="Who runs on shardkit")
    for title in ("client", "version", "case", "largest difference from FSDP2"):
        table.add_column(title)
    for row in _rows:
        table.add_row(row.client, importlib.metadata.version(row.client), row.case, row.outcome)
    console = rich.console.Console(width=110)
    with console.capture() as shown:
        console.print(table)
    terminalreporter.ensure_newline()
    terminalreporter.write(shown.get())
