"""Training cases: the time and memory of a whole step, of every contender."""

from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from contenders import BESIDE, CONTENDERS, DDP, FLOOR, FSDP2, SHARDKIT, Workload
from measure import PeakBytes
from report import ABSENT, Report, Spread, Target
from rounds import Settings, Timing, able, count_memory, time_interleaved

_COLUMNS = (
    "contender",
    "fwd+bwd ms",
    "optimizer ms",
    "step ms",
    "step / FSDP2",
    "step / DDP",
    "optimizer / FSDP2",
    "peak MiB",
    "peak / FSDP2",
    "RSS MiB",
)
_OPTIMIZER_LIMIT = 0.95
_MEMORY_LIMIT = 0.95


@dataclass(frozen=True)
class TrainingCase:
    """One workload for all contenders."""

    summary: str  # The workload in words.
    workload: Workload  # The model and the batch.
    # The target for shardkit's step over FSDP2's on CPU ranks, if there is one.
    step_limit: float | None = None
    ddp_limit: float | None = None  # The target for the same step over DDP's.
    num_ranks: int = 2  # Number of CPU ranks.

    def run(self, settings: Settings) -> Report:
        """Time the contenders in turns, then count their memory one by one."""
        settings = self._on_ranks(settings)
        names = able(CONTENDERS)
        found = _Found(
            time_interleaved(names, self.workload, settings),
            # The floor holds a whole model and whole gradients: its memory is no bound.
            count_memory([name for name in names if name != FLOOR], self.workload, settings),
        )
        return Report(
            title=self.summary,
            columns=_COLUMNS,
            rows=[found.row(name) for name in names],
            notes=[*self._verdicts(found, settings), found.losses()],
            measured=found.as_dict(),
        )

    def run_beside(self, settings: Settings) -> Report:
        """Compare shardkit with the source that ``--beside`` names, in turns."""
        settings = self._on_ranks(settings)
        names = able((SHARDKIT, BESIDE))
        found = _Found(
            time_interleaved(names, self.workload, settings),
            count_memory(names, self.workload, settings),
        )
        phases = {"forward_backward_s": "fwd+bwd", "optimizer_s": "optimizer", "step_s": "step"}
        return Report(
            title=self.summary,
            columns=(
                "contender",
                *(f"{name} ms" for name in phases.values()),
                *(f"{name} / beside" for name in phases.values()),
                "peak MiB",
            ),
            rows=[
                [
                    name,
                    *(f"{found.milliseconds(name, phase):.1f}" for phase in phases),
                    *(f"{found.ratio(name, BESIDE, phase):.3f}" for phase in phases),
                    _mebibytes(found.peaks[name].steady),
                ]
                for name in names
            ],
            notes=[found.losses()],
            measured=found.as_dict(),
        )

    def _on_ranks(self, settings: Settings) -> Settings:
        is_cpu = settings.device_type == "cpu"
        return replace(settings, world_size=self.num_ranks) if is_cpu else settings

    def _verdicts(self, found: "_Found", settings: Settings) -> list[str]:
        if SHARDKIT not in found.timings or settings.device_type != "cpu":
            return []
        optimizer = Target("optimizer / FSDP2", _OPTIMIZER_LIMIT)
        memory = Target("peak / FSDP2", _MEMORY_LIMIT)
        verdicts = [
            optimizer.verdict(found.ratio(SHARDKIT, FSDP2, "optimizer_s").median),
            memory.verdict(found.peak_ratio(SHARDKIT)),
        ]
        for reference, limit in ((FSDP2, self.step_limit), (DDP, self.ddp_limit)):
            if limit is not None:
                step = Target(f"step / {reference.removeprefix('torch ')}", limit)
                verdicts.append(step.verdict(found.ratio(SHARDKIT, reference, "step_s").median))
        return verdicts


@dataclass(frozen=True)
class _Found:
    """All measurements of one case, by contender."""

    timings: dict[str, Timing]
    peaks: dict[str, PeakBytes]

    def row(self, name: str) -> list[str]:
        """Write a contender's cells."""
        counted = name in self.peaks
        return [
            name,
            f"{self.milliseconds(name, 'forward_backward_s'):.1f}",
            f"{self.milliseconds(name, 'optimizer_s'):.1f}",
            f"{self.milliseconds(name, 'step_s'):.1f}",
            f"{self.ratio(name, FSDP2, 'step_s'):.2f}",
            f"{self.ratio(name, DDP, 'step_s'):.2f}",
            f"{self.ratio(name, FSDP2, 'optimizer_s'):.2f}",
            _mebibytes(self.peaks[name].steady) if counted else ABSENT,
            f"{self.peak_ratio(name):.2f}" if counted else ABSENT,
            _mebibytes(self.timings[name].resident_peak) if counted else ABSENT,
        ]

    def milliseconds(self, name: str, phase: str) -> float:
        """Return the median time of a phase."""
        return Spread.of(self._seconds(name, phase)).median * 1e3

    def ratio(self, name: str, reference: str, phase: str) -> Spread:
        """Return the ratios of a phase to another contender's, round by round."""
        return Spread.of_ratios(self._seconds(name, phase), self._seconds(reference, phase))

    def peak_ratio(self, name: str) -> float:
        """Return the ratio of the steady peak of memory to FSDP2's."""
        return self.peaks[name].steady / self.peaks[FSDP2].steady

    def losses(self) -> str:
        """Write the losses, which show that the contenders train alike."""
        losses = (
            f"{name} {timing.final_loss:.4f}"
            for name, timing in self.timings.items()
            if name != FLOOR
        )
        return f"Loss after equally many steps: {', '.join(losses)}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers."""
        return asdict(self)

    def _seconds(self, name: str, phase: str) -> list[float]:
        return [attrgetter(phase)(times) for times in self.timings[name].rounds]


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"
