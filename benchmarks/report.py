"""Measurements as text: spreads, markdown tables, and the machine of the run."""

import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch

ABSENT = "-"


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, with the range they took."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Summarize at least one value."""
        return cls(median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], references: Sequence[float]) -> Self:
        """Summarize ratios of values to the references taken in the same rounds."""
        pairs = zip(values, references, strict=True)
        return cls.of([value / reference for value, reference in pairs])

    @classmethod
    def of_medians(cls, values: Sequence[float], references: Sequence[float]) -> Self:
        """Divide the medians; the range is that of the ratios taken in the same rounds."""
        paired = cls.of_ratios(values, references)
        return cls(median(values) / median(references), paired.low, paired.high)

    def __format__(self, spec: str) -> str:
        """Show the median and the range, each by a format for floats."""
        return f"{self.median:{spec}} ({self.low:{spec}}..{self.high:{spec}})"


@dataclass(frozen=True)
class Target:
    """An upper limit that shardkit set itself."""

    what: str  # The quantity, a ratio.
    limit: float  # The largest value that meets the target.

    def verdict(self, got: float, digits: int = 2) -> str:
        """Say whether a measurement is within the limit."""
        met = "met" if got <= self.limit else "not met"
        return f"Target: {self.what} at most {self.limit:.2f}. Measured: {got:.{digits}f}, {met}"


@dataclass(frozen=True)
class Report:
    """What one case found."""

    title: str  # The case, in words.
    columns: Sequence[str]  # Heads of the table.
    rows: Sequence[Sequence[str]]  # Cells, by row.
    notes: Sequence[str] = ()  # Sentences below the table.
    # All measurements behind the table, ready for JSON.
    measured: dict[str, Any] = field(default_factory=dict)
    failures: Sequence[str] = ()  # Reasons not to trust the table; with any, the run fails.

    def markdown(self) -> str:
        """Write the title, the table and the notes."""
        rule = ["---", *("---:" for _ in self.columns[1:])]
        table = ("| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows))
        failures = (f"FAILED: {failure}" for failure in self.failures)
        notes = (f"- {note}" for note in (*failures, *self.notes))
        return "\n".join([f"### {self.title}", "", *table, "", *notes, ""])


def environment() -> dict[str, str]:
    """Describe the run: when, what and on which machine."""
    described = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shardkit": _shardkit_version(),
        "cpu": _cpu_model(),
        "cores": str(torch.multiprocessing.cpu_count()),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
        described["cuda"] = str(torch.version.cuda)
        described["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return described


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607 - whichever git is in use
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def _shardkit_version() -> str:
    try:
        return version("shardkit")
    except PackageNotFoundError:
        return "source tree"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())
