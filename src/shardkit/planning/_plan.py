"""The result of a dry run: `RunPlan`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._events import StepEvent, edges_of
from shardkit._text import shown_nbytes
from shardkit.planning._allocator import reserved_nbytes
from shardkit.planning._time import StepTime, time_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardkit.planning._meter import HeldMemory, IssuedCollective, MemoryMeter
    from shardkit.planning._profile import HardwareProfile
    from shardkit.planning._run import Run

_NUM_OWNERS = 10
_NUM_INSTANTS = 8


# --- records --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """Memory of one owner at an instant.

    Attributes:
        kind: Kind of its content, such as ``activations``.
        name: Name of the module, parameter or group to which it belongs.
        nbytes: Size in bytes.
    """

    kind: str
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Instant:
    """A part of a step, named by what runs in it, with the most memory in it.

    Attributes:
        where: Name of the part, such as ``backward of blocks.31 while blocks.30 is gathered``.
        nbytes: The most bytes of the device that exist at one time in it.
        by_kind: Bytes of each kind at that time.
        owners: The ten largest owners at that time, the largest first.
    """

    where: str
    nbytes: int
    by_kind: dict[str, int]
    owners: tuple[OwnedMemory, ...]


@dataclass(frozen=True, slots=True)
class SentTotal:
    """Collectives of one kind in a step.

    Attributes:
        op: Name of the collective that torch issues. gloo's all-gathers are exchanges or
            broadcasts, and its reduce-scatters exchanges.
        num_ranks: Number of ranks that take part.
        count: Number of these collectives.
        nbytes: Bytes of all whole tensors together.
    """

    op: str
    num_ranks: int
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that was tried in its own dry run.

    Attributes:
        change: Change in words.
        costs: Costs in words.
        peak_nbytes: The most bytes of the device with this change.
        fits: Whether the peak is within the budget.
    """

    change: str
    costs: str
    peak_nbytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to shard that was tried in its own dry run.

    Attributes:
        changes: Differences from the requested run; empty for that run itself.
        seconds: Time of a step.
        exposed_s: Part of this time that collectives cost.
        peak_nbytes: The most bytes of the device.
        why: Reason in words: the changes of time and memory.
    """

    changes: tuple[str, ...]
    seconds: float
    exposed_s: float
    peak_nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What one rank holds and sends in a step: the second step, and all later ones.

    Attributes:
        mesh: Size of each axis.
        rank: Number of the rank.
        device: Type of the devices.
        num_params: Number of elements of all parameters, over all ranks.
        param_dtypes: Names of the dtypes of parameters, such as ``bfloat16``.
        peak: Instant at which the most memory exists.
        instants: Instants with the most memory, the largest first.
        between_steps: Bytes of each kind that exist between two steps.
        most_of_kind: The most bytes of each kind that exist at one time; each at its own time.
        padding_nbytes: Bytes of this rank's shards that belong to no parameter.
        host_nbytes: The most bytes on the host, if shards are offloaded.
        collectives: Collectives of a step.
        reserved_nbytes: Bytes that torch's caching allocator reserves, with its default settings;
            None: the device is not ``cuda``.
        budget_nbytes: Bytes that the device may hold; None: no budget was given.
        advice: Changes that were tried because the run does not fit, the cheapest first.
        time: Time of a step; None: no hardware was named.
        choices: The three fastest of the tried ways to shard that fit.
    """

    mesh: tuple[int, ...]
    rank: int
    device: str
    num_params: int
    param_dtypes: tuple[str, ...]
    peak: Instant
    instants: tuple[Instant, ...]
    between_steps: dict[str, int]
    most_of_kind: dict[str, int]
    padding_nbytes: int
    host_nbytes: int
    collectives: tuple[SentTotal, ...]
    reserved_nbytes: int | None = None
    budget_nbytes: int | None = None
    advice: tuple[Advice, ...] = ()
    time: StepTime | None = None
    choices: tuple[Choice, ...] = ()

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of the device that exist at one time."""
        return self.peak.nbytes

    @property
    def margin_nbytes(self) -> int | None:
        """Bytes that the budget leaves; negative if the run does not fit. None without a budget."""
        return None if self.budget_nbytes is None else self.budget_nbytes - self.peak.nbytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget; True without a budget."""
        return self.margin_nbytes is None or self.margin_nbytes >= 0

    def __str__(self) -> str:
        """Return the plan as text."""
        return "\n".join(_lines(self))


# --- from a dry run -------------------------------------------------------------------------------


def plan_of(
    run: Run, meter: MemoryMeter, budget_nbytes: int | None, profile: HardwareProfile | None
) -> RunPlan:
    """Return the plan from the records of a step; with a profile also its time."""
    totals = meter.totals()
    best: dict[str, int] = {}
    for where, begin, end in _segments(meter):
        at = max(range(begin, end + 1), key=totals.__getitem__)
        if where not in best or totals[at] > totals[best[where]]:
            best[where] = at
    ranked = sorted(best, key=lambda where: -totals[best[where]])[:_NUM_INSTANTS]
    instants = tuple(_instant(where, meter.at(best[where])) for where in ranked)
    return RunPlan(
        mesh=run.mesh,
        rank=run.rank,
        device=run.device,
        num_params=sum(param.numel() for param in run.model.parameters()),
        param_dtypes=meter.param_dtypes,
        peak=instants[0],
        instants=instants,
        between_steps=_by_kind(meter.at(meter.begin)),
        most_of_kind=_most_of_kind(meter),
        padding_nbytes=meter.padding_nbytes,
        host_nbytes=meter.peak_nbytes(on_host=True),
        collectives=_sent(meter.collectives),
        reserved_nbytes=reserved_nbytes(meter.memories) if run.device == "cuda" else None,
        budget_nbytes=budget_nbytes,
        time=None if profile is None else time_of(run, meter, profile),
    )


def _segments(meter: MemoryMeter) -> Iterable[tuple[str, int, int]]:
    """Yield the parts of the step with the same events under way, and their positions."""
    edges = edges_of(event for event in meter.events if event.closed > event.opened)
    active: dict[int, StepEvent] = {}
    after, between = meter.begin, "before the first forward"
    for _, event, is_begin in sorted(edges, key=lambda edge: edge[0]):
        at = int(event.begin if is_begin else event.end)
        if at > after:
            yield _where(active.values(), between), after, at
            after = at
        if is_begin:
            active[event.opened] = event
        else:
            del active[event.opened]
        if event.kind == "pass":
            between = "loss" if event.phase == "forward" else "optimizer step"
    if meter.position > after:
        yield _where(active.values(), between), after, meter.position


def _where(active: Iterable[StepEvent], between: str) -> str:
    """Return the name of a part from the events under way; `between` if no pass is."""
    found = list(active)
    computing = [event for event in found if event.kind == "compute"]
    passes = [event for event in found if event.kind == "pass"]
    if computing:
        inner = computing[-1]
        text = f"{inner.phase} of {inner.name}"
        own = inner.group
    else:
        text = f"{passes[-1].phase}, outside of groups" if passes else between
        own = -1
    parts = []
    for kind, verb in (("gather", "gathered"), ("reduce_scatter", "reduced")):
        names = [event.name for event in found if event.kind == kind and event.group != own]
        if names:
            shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            parts.append(f"{shown} {'is' if len(names) == 1 else 'are'} {verb}")
    return f"{text} while {' and '.join(parts)}" if parts else text


def _instant(where: str, memories: Sequence[HeldMemory]) -> Instant:
    owned: Counter[tuple[str, str]] = Counter()
    for memory in memories:
        owned[memory.kind, memory.name] += memory.nbytes
    owners = tuple(OwnedMemory(*key, nbytes) for key, nbytes in owned.most_common(_NUM_OWNERS))
    return Instant(where, sum(memory.nbytes for memory in memories), _by_kind(memories), owners)


def _by_kind(memories: Iterable[HeldMemory]) -> dict[str, int]:
    """Return the bytes of each kind, the largest first."""
    found: Counter[str] = Counter()
    for memory in memories:
        found[memory.kind] += memory.nbytes
    return {kind: nbytes for kind, nbytes in found.most_common() if nbytes}


def _most_of_kind(meter: MemoryMeter) -> dict[str, int]:
    """Return the most bytes of each kind at one time, the largest first."""
    kinds = dict.fromkeys(memory.kind for memory in meter.memories)
    most = Counter({kind: meter.peak_nbytes(kind) for kind in kinds})
    return {kind: nbytes for kind, nbytes in most.most_common() if nbytes}


def _sent(collectives: Iterable[IssuedCollective]) -> tuple[SentTotal, ...]:
    found: dict[tuple[str, int], list[int]] = {}
    for each in collectives:
        found.setdefault((each.op, each.num_ranks), []).append(each.nbytes)
    totals = [SentTotal(*key, len(sizes), sum(sizes)) for key, sizes in found.items()]
    return tuple(sorted(totals, key=lambda total: -total.nbytes))


# --- as text --------------------------------------------------------------------------------------


def _lines(plan: RunPlan) -> list[str]:
    shape, dtypes = "x".join(map(str, plan.mesh)), ", ".join(plan.param_dtypes)
    of_params = f"{plan.num_params:,} parameters ({dtypes})"
    lines = [
        f"{of_params} on a mesh of {shape} ({plan.device}), rank {plan.rank}",
        "",
        f"peak {shown_nbytes(plan.peak.nbytes)}: {plan.peak.where}",
        *(f"  {shown_nbytes(o.nbytes):>12}  {o.kind}: {o.name}" for o in plan.peak.owners),
        "",
        "by kind           at the peak   at most   between steps",
    ]
    for kind, most in plan.most_of_kind.items():
        at_peak, between = plan.peak.by_kind.get(kind, 0), plan.between_steps.get(kind, 0)
        cells = [shown_nbytes(nbytes) for nbytes in (at_peak, most, between)]
        lines.append(f"  {kind:<16} {cells[0]:>10} {cells[1]:>10} {cells[2]:>14}")
    lines.append(f"  padding in shards: {shown_nbytes(plan.padding_nbytes)}")
    if plan.reserved_nbytes is not None:
        lines.append(f"  reserved by the allocator: {shown_nbytes(plan.reserved_nbytes)}")
    if plan.host_nbytes:
        lines.append(f"  on the host: {shown_nbytes(plan.host_nbytes)}")
    lines += ["", "instants with the most memory"]
    lines += [f"  {shown_nbytes(each.nbytes):>12}  {each.where}" for each in plan.instants]
    lines += ["", "collectives of a step"]
    lines += [
        f"  {each.count:>6} x {each.op} over {each.num_ranks} ranks, {shown_nbytes(each.nbytes)}"
        for each in plan.collectives
    ]
    return [*lines, *_time_lines(plan), *_verdict(plan)]


def _time_lines(plan: RunPlan) -> list[str]:
    """Return the time of a step, and the choices that were tried, as text."""
    time = plan.time
    if time is None:
        return []
    total = f"a step on {time.hardware}: {time.seconds * 1e3:.1f} ms"
    exposed = f"of which collectives cost {time.exposed_s * 1e3:z.1f} ms"
    lines = [
        "",
        f"{total}, {exposed}; utilization {time.utilization:.1%}",
        *(
            f"  {cost.seconds * 1e3:>10.2f} ms  {cost.flops / 1e9:>12.1f} GFLOP  {cost.name}"
            for cost in time.modules
        ),
    ]
    for place, each in enumerate(plan.choices, 1):
        lines.append(f"choice {place}: {', '.join(each.changes) or 'as it is'}: {each.why}")
    return lines


def _verdict(plan: RunPlan) -> list[str]:
    """Return whether the run fits, and the advice, as text."""
    margin, budget = plan.margin_nbytes, plan.budget_nbytes
    if margin is None or budget is None:
        return []
    if margin >= 0:
        lines = ["", f"It fits into {shown_nbytes(budget)}: {shown_nbytes(margin)} are left."]
        if plan.reserved_nbytes is not None and plan.reserved_nbytes > budget:
            lines.append(
                f"The allocator would reserve {shown_nbytes(plan.reserved_nbytes)}. When the "
                f"device is full, it gives back what is unused, which takes time in a step."
            )
        return lines
    lines = ["", f"It does NOT fit into {shown_nbytes(budget)}: {shown_nbytes(-margin)} too much."]
    for each in plan.advice:
        word = "fits" if each.fits else "does not fit"
        peak = shown_nbytes(each.peak_nbytes)
        lines.append(f"  {peak:>12}  {word}: {each.change} ({each.costs})")
    return lines
