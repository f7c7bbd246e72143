"""Cases of two or more contenders that train alike, of which one is judged by another."""

import math
from dataclasses import asdict, dataclass, replace

from contenders import Workload
from report import Report, Spread, Target
from rounds import Settings, able, time_interleaved

_APART = 1e-4  # Sums are added in another order.
_PHASES = ("forward_s", "backward_s", "optimizer_s", "step_s")


@dataclass(frozen=True)
class PairCase:
    """One workload, sharded in several ways on CPU ranks."""

    summary: str  # The workload in words.
    workload: Workload  # The model and the batch.
    subject: str  # The contender that is judged.
    reference: str  # The contender by which it is judged.
    step_limit: float  # The target for the subject's step over that of the reference.
    num_ranks: int  # Number of ranks.
    others: tuple[str, ...] = ()  # Contenders that are measured as well.

    def run(self, settings: Settings) -> Report:
        """Time all in turns, and compare the losses of the two."""
        names = able((self.subject, self.reference, *self.others))
        found = time_interleaved(names, self.workload, replace(settings, world_size=self.num_ranks))
        seconds = {
            name: {phase: [getattr(each, phase) for each in timing.rounds] for phase in _PHASES}
            for name, timing in found.items()
        }
        of = seconds[self.reference]["step_s"]
        ratios = {name: Spread.of_medians(times["step_s"], of) for name, times in seconds.items()}
        losses = {name: found[name].final_loss for name in names if name not in self.others}
        alike = all(
            math.isclose(loss, losses[self.reference], rel_tol=_APART) for loss in losses.values()
        )
        ratio = f"step / {self.reference.removeprefix('torch ').partition(',')[0]}"
        target = Target(ratio, self.step_limit)
        return Report(
            title=self.summary,
            columns=("contender", *(f"{phase.removesuffix('_s')} ms" for phase in _PHASES), ratio),
            rows=[
                [
                    name,
                    *(f"{Spread.of(times[phase]).median * 1e3:.1f}" for phase in _PHASES),
                    f"{ratios[name]:.2f}",
                ]
                for name, times in seconds.items()
            ],
            notes=[
                *([target.verdict(ratios[self.subject].median)] if self.subject in ratios else []),
                "Loss after equally many steps: "
                + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()),
            ],
            measured={name: asdict(timing) for name, timing in found.items()},
            failures=[] if alike else [f"the losses differ: {losses}"],
        )
