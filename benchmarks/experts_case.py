"""The mixture of experts: one group for each block, or one for experts and one for the rest."""

import math
from dataclasses import asdict, dataclass, replace

from contenders import EXPERTS, FSDP2_EXPERTS, Workload
from report import Report, Spread, Target
from rounds import Settings, able, time_interleaved

_RANKS = 4
_APART = 1e-4  # Sums are added in another order.
_PHASES = ("forward_s", "backward_s", "optimizer_s", "step_s")


@dataclass(frozen=True)
class ExpertsCase:
    """One mixture of experts, sharded by shardkit and by FSDP2.

    Attributes:
        summary: The workload in words.
        workload: The model and the batch.
        step_limit: The target for shardkit's step over FSDP2's.
    """

    summary: str
    workload: Workload
    step_limit: float

    def run(self, settings: Settings) -> Report:
        """Time both in turns, always on four ranks."""
        names = able((EXPERTS, FSDP2_EXPERTS))
        found = time_interleaved(names, self.workload, replace(settings, world_size=_RANKS))
        seconds = {
            name: {phase: [getattr(each, phase) for each in timing.rounds] for phase in _PHASES}
            for name, timing in found.items()
        }
        ratios = {
            name: Spread.of_medians(times["step_s"], seconds[FSDP2_EXPERTS]["step_s"])
            for name, times in seconds.items()
        }
        losses = {name: timing.final_loss for name, timing in found.items()}
        alike = all(
            math.isclose(loss, losses[FSDP2_EXPERTS], rel_tol=_APART) for loss in losses.values()
        )
        target = Target("step / FSDP2", self.step_limit)
        return Report(
            title=self.summary,
            columns=(
                "contender",
                *(f"{phase.removesuffix('_s')} ms" for phase in _PHASES),
                "step / FSDP2",
            ),
            rows=[
                [
                    name,
                    *(f"{Spread.of(times[phase]).median * 1e3:.1f}" for phase in _PHASES),
                    f"{ratios[name]:.2f}",
                ]
                for name, times in seconds.items()
            ],
            notes=[
                *([target.verdict(ratios[EXPERTS].median)] if EXPERTS in ratios else []),
                "Loss after equally many steps: "
                + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()),
            ],
            measured={name: asdict(timing) for name, timing in found.items()},
            failures=[] if alike else [f"the losses differ: {losses}"],
        )
