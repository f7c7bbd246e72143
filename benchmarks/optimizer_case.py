"""Cases of the optimizer's step alone, compared with FSDP2's and with plain tensors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from contenders import Workload
from report import Report, Spread, Target
from rounds import Settings, Timing, able, time_interleaved


@dataclass(frozen=True)
class OptimizerCase:
    """One workload; only the optimizer's step counts."""

    summary: str  # The workload in words.
    workload: Workload  # The model and the batch.
    subject: str  # The contender whose step is judged.
    # The largest ratios of its step to those of other contenders, by contender.
    limits: Mapping[str, float]
    others: tuple[str, ...] = ()  # Contenders that are measured as well.

    def run(self, settings: Settings) -> Report:
        """Time whole steps of the contenders in turns, and report the time of the optimizer."""
        names = able((*self.others, self.subject, *self.limits))
        timings = time_interleaved(names, self.workload, settings)
        rows = [
            [
                name,
                f"{Spread.of(_seconds(timings[name])).median * 1e3:.1f}",
                *(f"{_ratio(timings, name, reference):.2f}" for reference in self.limits),
            ]
            for name in names
        ]
        notes = []
        if self.subject in timings:
            notes = [
                Target(f"{self.subject}'s optimizer / {reference}", limit).verdict(
                    _ratio(timings, self.subject, reference).median
                )
                for reference, limit in self.limits.items()
            ]
        columns = ("contender", "optimizer ms", *(f"optimizer / {name}" for name in self.limits))
        measured = {name: asdict(timing) for name, timing in timings.items()}
        return Report(self.summary, columns, rows, notes, measured)


def _seconds(timing: Timing) -> list[float]:
    return [times.optimizer_s for times in timing.rounds]


def _ratio(timings: dict[str, Timing], name: str, reference: str) -> Spread:
    return Spread.of_medians(_seconds(timings[name]), _seconds(timings[reference]))
