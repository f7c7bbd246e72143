"""The records of all ranks together, and the results from them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardkit._errors import StateError
from shardkit.tracing.exposed import TimeSlice, Waits, seconds_by, slices_of
from shardkit.tracing.late import LateRank, late_ranks
from shardkit.tracing.records import RankRecord, read_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardkit._events import StepEvent


class Share(NamedTuple):
    """A part of all ranks' time."""

    group: str  # Name of the group; "" for no group.
    cause: str  # Cause, as in `exposed`.
    seconds: float  # Seconds of a step, on average over steps and ranks.


@dataclass(slots=True)
class Trace:
    """The records of all ranks."""

    records: list[RankRecord]  # Records in rank order.
    slices: dict[int, list[TimeSlice]]  # Slices of each rank's steps, by rank.
    late: list[LateRank]  # Ranks that are late.

    @classmethod
    def read(cls, folder: Path) -> Trace:
        """Read the files in a folder.

        Raises:
            StateError: There are no files, a file is no record, or there is no step.
        """
        return cls.of(read_folder(folder))

    @classmethod
    def of(cls, records: list[RankRecord]) -> Trace:
        """Return the trace of some records.

        Raises:
            StateError: No rank has recorded a step.
        """
        waits = Waits(records)
        slices = {record.header.rank: slices_of(record, waits) for record in records}
        if not any(slices.values()):
            msg = (
                "no step is in the record: a step ends with the step of an optimizer, or with a "
                "backward before the next forward. Record some steps of training."
            )
            raise StateError(msg)
        return cls(records, slices, late_ranks(slices))

    @property
    def missing(self) -> list[int]:
        """Ranks of the run whose files are missing."""
        there = {record.header.rank for record in self.records}
        return sorted({*range(self.records[0].header.world_size)} - there)

    def num_steps(self) -> int:
        """Return the number of steps that some rank has recorded."""
        return 1 + max(each.step for slices in self.slices.values() for each in slices)

    def step_s(self) -> float:
        """Return the median step in seconds, without the first one if there are others."""
        steps = (seconds_by(slices, "step").values() for slices in self._counted())
        return statistics.median(seconds for of_rank in steps for seconds in of_rank)

    def shares(self) -> list[Share]:
        """Return the parts of all ranks' time, by group and cause; the largest first.

        The first step is left out if there are others. The shares sum up to a mean step.
        """
        counted = self._counted()
        total = sum(len({each.step for each in slices}) for slices in counted)
        sums = seconds_by((each for of in counted for each in of), "group", "cause")
        shares = [Share(group, cause, seconds / total) for (group, cause), seconds in sums.items()]
        return sorted(shares, key=lambda share: -share.seconds)

    def _counted(self) -> list[list[TimeSlice]]:
        """Return each rank's slices, without those of the first step if there are others."""
        first = 0 if self.num_steps() == 1 else 1
        return [[e for e in slices if e.step >= first] for slices in self.slices.values()]

    def peak_nbytes(self) -> int:
        """Return the most memory of shardkit's buffers on a rank, in bytes."""
        curves = (memory_of(record.events) for record in self.records)
        return max((nbytes for curve in curves for _, nbytes in curve), default=0)


def memory_of(events: Iterable[StepEvent]) -> list[tuple[float, int]]:
    """Return the memory of shardkit's buffers, in bytes, as points (time, bytes from then on).

    Memory from before the record counts if it is given back during the record.
    """
    now, least, curve = 0, 0, []
    for event in events:
        if event.kind in {"take", "return"}:
            now += event.nbytes if event.kind == "take" else -event.nbytes
            least = min(least, now)
            curve.append((event.begin, now))
    return [(at, nbytes - least) for at, nbytes in curve]
