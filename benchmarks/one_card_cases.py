"""Cases for one card: a world of one rank, and one rank of a world that does not exist."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from contenders import FSDP2, PLAIN, SHARDKIT, Workload
from llama import LlamaShape
from one_card import OneCardRank
from ranks import Ranks
from report import ABSENT, Report, Spread, Target
from rounds import Settings, able, turns

_log = logging.getLogger(__name__)

_FIRST_STEPS = 4
_COUNTED_STEPS = 2
_MIB = 2**20

LOSS_TOLERANCE = 0.01
_PLAIN_LIMIT = 1.02
_FAKE_STEP_LIMIT = 0.93
_FAKE_PEAK_LIMIT = 0.9
_HOST_LIMIT = 0.5
_TARGET_SIZE = 64  # Ranks of the fake group for which step and peak have targets.

_TINY = LlamaShape(dim=32, hidden=88, num_layers=2, num_heads=2, batch=1, sequence=8, vocab=64)


@dataclass(frozen=True)
class OneRankCase:
    """A world of one rank: the work beyond plain torch is the cost of sharding."""

    summary: str  # The workload in words.
    workload: Workload  # The model and the batch.
    contenders: Sequence[str]  # Names of the contenders that train it.

    def run(self, settings: Settings) -> Report:
        """Let the contenders take turns, and compare their first losses."""
        names = able(self.contenders)
        workload = _sized(self.workload, settings)
        with ExitStack() as stack:
            ranks = _start(stack, names, workload, settings, fake_size=None)
            losses = {name: _only(ranks[name], "first_losses", _FIRST_STEPS) for name in names}
            found = _measure_steps(ranks, settings)
        return Report(
            title=_title(self.summary, settings),
            columns=(
                "contender",
                "step ms",
                "step / plain",
                "step / FSDP2",
                "peak MiB",
                "peak / FSDP2",
            ),
            rows=[
                [
                    name,
                    found.milliseconds(name),
                    found.step_ratio(name, PLAIN),
                    found.step_ratio(name, FSDP2),
                    *found.peak_cells(name),
                ]
                for name in names
            ],
            notes=[*self._verdicts(found, settings), _losses(losses)],
            measured={"steps_s": found.steps, "peak_bytes": found.peaks, "losses": losses},
            failures=disagreements(losses),
        )

    def _verdicts(self, found: "Steps", settings: Settings) -> list[str]:
        if settings.small or not {SHARDKIT, PLAIN} <= found.steps.keys():
            return []
        return [_verdict("step / plain torch", _PLAIN_LIMIT, found.spread(SHARDKIT, PLAIN))]


@dataclass(frozen=True)
class FakeCase:
    """A fake process group: one rank does all of its own work, and nothing is communicated."""

    summary: str  # The workloads in words.
    workload: Workload  # The workload whose time and memory are measured on the card.
    small: Workload  # The workload for the host's time: small layers, which leave the card idle.
    sizes: Sequence[int]  # Numbers of ranks of the group.

    def run(self, settings: Settings) -> Report:
        """Measure steps, then the host's time, for one size after the other."""
        rows: list[Sequence[str]] = []
        notes: list[str] = []
        measured: dict[str, Any] = {}
        names = able((FSDP2, SHARDKIT))
        if settings.device_type == "cpu" and SHARDKIT in names:
            names.remove(SHARDKIT)
            notes.append(
                "shardkit is left out on the CPU: there it makes groups of gloo, "
                "for which a fake group has no store"
            )
        for size in self.sizes:
            with ExitStack() as stack:
                workload = _sized(self.workload, settings)
                ranks = _start(stack, names, workload, settings, fake_size=size)
                for rank in ranks.values():
                    _only(rank, "first_losses", _FIRST_STEPS)
                steps = _measure_steps(ranks, settings)
            host = self._measure_host(names, size, settings)
            rows += [self._row(size, name, steps, host) for name in names]
            notes += [] if settings.small else fake_verdicts(size, steps, host)
            measured[str(size)] = {
                "steps_s": steps.steps,
                "peak_bytes": steps.peaks,
                "host_s": host.issue,
                "copies_s": host.copies,
            }
        return Report(
            title=_title(self.summary, settings),
            columns=(
                "ranks",
                "contender",
                "step ms",
                "step / FSDP2",
                "peak MiB",
                "peak / FSDP2",
                "host µs/group",
                "host / FSDP2",
                "above layer and copies µs/group",
                "the same / FSDP2",
            ),
            rows=rows,
            notes=notes,
            measured=measured,
        )

    def _measure_host(self, names: Sequence[str], size: int, settings: Settings) -> "Host":
        workload = _sized(self.small, settings)
        assert isinstance(workload.shape, LlamaShape)
        num_groups = workload.shape.num_layers + 1
        found = Host(num_groups, {name: [] for name in (*names, PLAIN)}, [])
        with ExitStack() as stack:
            ranks = _start(stack, (*names, PLAIN), workload, settings, fake_size=size)
            for name in turns((*names, PLAIN), settings.num_rounds):
                found.issue[name].append(median(_only(ranks[name], "issue", settings.num_steps)))
                if name == PLAIN:
                    numel = workload.shape.block_numel
                    found.copies.append(_only(ranks[name], "copies", numel, num_groups))
        return found

    def _row(self, size: int, name: str, steps: "Steps", host: "Host") -> list[str]:
        return [
            str(size),
            name,
            steps.milliseconds(name),
            steps.step_ratio(name, FSDP2),
            *steps.peak_cells(name),
            f"{host.microseconds(host.issue[name]):.0f}",
            f"{Spread.of_medians(host.issue[name], host.issue[FSDP2]):.2f}",
            f"{host.microseconds(host.own(name)):.0f}",
            f"{Spread.of_medians(host.own(name), host.own(FSDP2)):.2f}",
        ]


@dataclass(frozen=True)
class Steps:
    """Seconds of a step in every turn, and bytes, by contender."""

    steps: dict[str, list[float]]
    peaks: dict[str, int]

    def milliseconds(self, name: str) -> str:
        """Write the median time of a step."""
        return f"{median(self.steps[name]) * 1e3:.2f}"

    def spread(self, name: str, reference: str) -> Spread:
        """Compare a step with another contender's."""
        return Spread.of_medians(self.steps[name], self.steps[reference])

    def peak_cells(self, name: str) -> tuple[str, str]:
        """Write a contender's peak, and its ratio to FSDP2's."""
        peak = self.peaks[name]
        return f"{peak / _MIB:.1f}", f"{peak / self.peaks[FSDP2]:.3f}"

    def step_ratio(self, name: str, reference: str) -> str:
        """Write the ratio of a step to another contender's, if that one takes part."""
        return f"{self.spread(name, reference):.3f}" if reference in self.steps else ABSENT


@dataclass(frozen=True)
class Host:
    """Seconds that the host takes to issue a forward and a backward, in every turn."""

    num_groups: int
    issue: dict[str, list[float]]
    copies: list[float]

    def microseconds(self, seconds: Sequence[float]) -> float:
        """Return the median of turns, for one group."""
        return median(seconds) * 1e6 / self.num_groups

    def own(self, name: str) -> list[float]:
        """Subtract the time of the plain layers, and that of the fake group's copies."""
        turns = zip(self.issue[name], self.issue[PLAIN], self.copies, strict=True)
        return [whole - layers - copies for whole, layers, copies in turns]


def disagreements(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """Say which contenders' losses differ from the first one's, by more than the tolerance."""
    (first, expected), *others = losses.items()
    return [
        f"losses of {name} differ from those of {first} by more than {LOSS_TOLERANCE:.0%}"
        for name, got in others
        if not all(
            abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in zip(got, expected, strict=True)
        )
    ]


def _losses(losses: Mapping[str, Sequence[float]]) -> str:
    shown = "; ".join(
        f"{name} {', '.join(f'{loss:.4f}' for loss in first)}" for name, first in losses.items()
    )
    return f"Losses of the first steps, to agree within {LOSS_TOLERANCE:.0%}: {shown}"


def _verdict(what: str, limit: float, ratio: Spread) -> str:
    verdict = Target(what, limit).verdict(ratio.median, digits=3)
    return f"{verdict} ({ratio.low:.3f}..{ratio.high:.3f})"


def fake_verdicts(size: int, steps: Steps, host: Host) -> list[str]:
    """Compare shardkit's figures with the targets for this number of ranks."""
    if SHARDKIT not in steps.steps:
        return []
    at = f"at {size} ranks"
    verdicts = []
    if size == _TARGET_SIZE:
        peak = steps.peaks[SHARDKIT] / steps.peaks[FSDP2]
        verdicts += [
            _verdict(f"step / FSDP2 {at}", _FAKE_STEP_LIMIT, steps.spread(SHARDKIT, FSDP2)),
            Target(f"peak / FSDP2 {at}", _FAKE_PEAK_LIMIT).verdict(peak, digits=3),
        ]
    ratios: dict[str, Callable[[str], list[float]]] = {
        "host time per group": host.issue.__getitem__,
        "the same above layer and copies": host.own,
    }
    for what, of in ratios.items():
        ratio = Spread.of_medians(of(SHARDKIT), of(FSDP2))
        verdicts.append(_verdict(f"{what} / FSDP2 {at}", _HOST_LIMIT, ratio))
    return verdicts


def _sized(workload: Workload, settings: Settings) -> Workload:
    return replace(workload, shape=_TINY) if settings.small else workload


def _title(summary: str, settings: Settings) -> str:
    return f"{summary} (tiny sizes on {settings.device_type})" if settings.small else summary


def _start(
    stack: ExitStack,
    names: Sequence[str],
    workload: Workload,
    settings: Settings,
    *,
    fake_size: int | None,
) -> dict[str, Ranks]:
    """Start a process for each contender."""
    started = {}
    for name in names:
        begin = time.monotonic()
        ranks = Ranks(1, settings.device_type, OneCardRank, name, workload, fake_size=fake_size)
        started[name] = stack.enter_context(ranks)
        _log.info("%s has started in %.1f s", name, time.monotonic() - begin)
    return started


def _measure_steps(ranks: Mapping[str, Ranks], settings: Settings) -> Steps:
    peaks = {name: _only(rank, "peak", _COUNTED_STEPS) for name, rank in ranks.items()}
    steps: dict[str, list[float]] = {name: [] for name in ranks}
    for name in turns(list(ranks), settings.num_rounds):
        steps[name].append(median(_only(ranks[name], "steps", settings.num_steps)))
        _log.info("%s: %.2f ms", name, steps[name][-1] * 1e3)
    return Steps(steps, peaks)


def _only(ranks: Ranks, method: str, *args: object) -> Any:
    """Call a method of the only rank."""
    (result,) = ranks.call(method, *args)
    return result
