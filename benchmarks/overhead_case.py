"""The overhead case: the host's cost of sharding for each group, without communication."""

from dataclasses import asdict, dataclass, replace

from contenders import FLOOR, FSDP2, SHARDKIT, Workload
from report import Report, Spread
from rounds import Settings, Timing, able, time_interleaved

_PHASES = ("forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class OverheadCase:
    """A model with almost no compute, on one CPU rank."""

    summary: str  # The workload in words.
    workload: Workload  # The model and the batch; the blocks and the root are the groups.

    def run(self, settings: Settings) -> Report:
        """Time the wrapped models and the plain one in turns; report the overhead per group."""
        names = able((SHARDKIT, FSDP2, FLOOR))
        alone = replace(settings, device_type="cpu", world_size=1)
        timings = time_interleaved(names, self.workload, alone)
        return Report(
            title=self.summary,
            columns=("contender", "forward µs/group", "backward µs/group", "optimizer µs/group"),
            rows=[
                [name, *(f"{self._overhead(timings, name, phase):.0f}" for phase in _PHASES)]
                for name in names
                if name != FLOOR
            ],
            measured={name: asdict(timing) for name, timing in timings.items()},
        )

    def _overhead(self, timings: dict[str, Timing], name: str, phase: str) -> Spread:
        """Subtract the plain model's time in the same round; divide by the number of groups."""
        num_groups = self.workload.shape.num_layers + 1
        rounds = zip(timings[name].rounds, timings[FLOOR].rounds, strict=True)
        extra_s = (getattr(wrapped, phase) - getattr(plain, phase) for wrapped, plain in rounds)
        return Spread.of([seconds * 1e6 / num_groups for seconds in extra_s])
