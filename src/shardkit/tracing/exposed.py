"""Where the time of a step goes: by group and cause, on each rank.

A **step** ends at the end of an optimizer's step that a forward follows; the next step begins
there. Without optimizers of torch, a step begins with a forward that follows a backward. Events
after the last end belong to no step. If an optimizer's step calls a closure, as in Lightning and
for LBFGS, it counts from the end of the last backward in it.

The step of a rank is cut into slices without overlaps or gaps, so their sum is the step. The rank's
compute stream (on the CPU the process itself) decides what a slice is, in this order:

| at an instant, the rank | cause | group |
| --- | --- | --- |
| waits for a collective that its own host or device has not begun | ``host`` | that of the collective |
| waits for one that another rank has not issued | ``rank N``, see below | that of the collective |
| waits for one that all ranks have issued | ``network``, or ``link`` | that of the collective |
| is inside the forward or backward of a group; of nested ones the innermost counts | ``compute`` | this group |
| is in an optimizer's step, or between a backward and that | ``optimizer`` | none |
| is before a forward, and in none of these | ``data`` | none |
| is elsewhere in a forward or backward, or between them: the loss, hooks | ``outside`` | none |

``host``, ``rank N``, ``network`` and ``link`` are the **exposed** time of communication.

**A link is slow.** Suppose that one rank finishes a collective later than all others, which also
waited for it. Then the time after the last of the others is ``link``, of this rank. The same holds,
among three or more ranks, while only one rank has finished and all others wait: they wait for data
from that rank. Both count only if the time is longer than 0.1 ms, than the difference of clocks,
and than half of the time for which the ranks that finished before waited for the network
themselves: collectives never end everywhere at once. With three ranks, if only one has finished,
the cause may be its link or those of both others. Of a reduction over two axes only the second half
is seen, because the first has no wait of its own.

**Rank N came late.** A collective moves nothing until the last of its ranks has issued it. Until
then the others wait for that rank, L. But L may be late because it waited before, for a third rank
or for the network. So a wait for L is compared with the waits of L and of the waiting rank since
they last met in a collective. As far as L waited longer for a third rank than the waiting rank did,
the cause is that rank. As far as L waited longer for the network, the cause is ``network``. Only
the rest is ``rank L``. (If these sum up to more than the wait, they share it in proportion.) The
earlier waits of L have been divided in the same way before, so a delay is followed through any
number of ranks.

Collectives of different ranks are the same one if they go over the same ranks, are of the same
kind, and have the same number of predecessors since the record began. An all-reduce that follows a
reduce-scatter counts as issued when the reduce-scatter has its data from all of its ranks; on the
CPU, where the process issues it while it waits, not before the wait.
"""  # noqa: E501 - a table

from __future__ import annotations

import bisect
import collections
import heapq
import itertools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardkit._events import StepEvent
    from shardkit.tracing.records import RankRecord

COMPUTE, OUTSIDE, DATA, OPTIMIZER = "compute", "outside", "data", "optimizer"
HOST, NETWORK, LINK = "host", "network", "link"
FORWARD, BACKWARD = "forward", "backward"
_LEAST_LINK_S, _LINK_SHARE = 1e-4, 0.5
_NO_TIME_S = 1e-7  # Less than clocks can distinguish.
_FIRST, _SECOND = frozenset({"gather", "reduce_scatter"}), "all_reduce"


class TimeSlice(NamedTuple):
    """A part of a rank's step."""

    begin: float  # Time in seconds of rank 0's clock.
    end: float  # Time in seconds of rank 0's clock.
    step: int  # Number of the step.
    phase: str  # Name of the phase: data, forward, backward or optimizer.
    group: str  # Name of the group; "" for no group.
    cause: str  # Cause, as in the module's table.
    # Number of the rank that came late, or whose link is slow; -1 for other causes.
    late_rank: int = -1

    @property
    def seconds(self) -> float:
        """Length of the slice."""
        return self.end - self.begin

    @property
    def is_exposed(self) -> bool:
        """Whether the slice is exposed communication."""
        return self.cause in {HOST, NETWORK} or self.late_rank >= 0


class _Span(NamedTuple):
    begin: float
    end: float
    group: str
    cause: str
    late_rank: int = -1


# --- waits ----------------------------------------------------------------------------------------

_Key = tuple[int, str, int]
"""A collective: the number of its set of ranks, its kind, and the number of those before it."""


class _Issued(NamedTuple):
    """The start of a collective on a rank, and its key; None if no other rank takes part."""

    begin: float
    key: _Key | None


class _Awaited(NamedTuple):
    """A wait, and its collectives: one, or a reduce-scatter and the all-reduce after it."""

    begin: float
    end: float
    group: str
    first: _Issued | None
    second: _Issued | None


class Waits:
    """The waits of all ranks, cut by their causes."""

    def __init__(self, records: Sequence[RankRecord]) -> None:
        self._sets: dict[tuple[int, ...], int] = {}
        self._came: dict[_Key, dict[int, float]] = collections.defaultdict(dict)
        self._last_of: dict[_Key, tuple[float, int]] = {}
        awaited = {record.header.rank: self._awaited_of(record) for record in records}
        self._note_second(records, awaited)
        self._cuts: dict[int, list[_Span]] = {rank: [] for rank in awaited}
        self._members = [frozenset(ranks) for ranks in self._sets]
        self._met: dict[int, dict[int, float]] = {rank: {} for rank in awaited}
        self._done: dict[_Key, dict[int, tuple[float, int]]] = collections.defaultdict(dict)
        # A wait for a rank is divided by the earlier waits of that rank, so these come first.
        in_order = []
        for rank, of in awaited.items():
            for number, wait in enumerate(of):
                for part, each in enumerate((wait.first, wait.second)):
                    if each is not None or part == 0:
                        last = wait.begin if each is None else self._last(each, rank)[0]
                        at = max(wait.begin, min(last, wait.end))
                        in_order.append((at, part, rank, number))
        for _, part, rank, number in sorted(in_order):
            self._cut(rank, awaited[rank][number], part)
        errors = (record.header.clock.error_s for record in records)
        self._note_links(max(_LEAST_LINK_S, 2 * max(errors, default=0.0)))

    def of(self, rank: int) -> Sequence[_Span]:
        """Return the parts of a rank's waits, in order."""
        return self._cuts[rank]

    # --- who came when ---

    def _awaited_of(self, record: RankRecord) -> list[_Awaited]:
        """Return a rank's waits with their collectives, and note when it issued these."""
        rank = record.header.rank
        # Nothing waits for an axis of one rank.
        sets = {
            name: self._sets.setdefault(tuple(ranks), len(self._sets))
            for name, ranks in record.header.axes.items()
            if len(ranks) > 1
        }
        counts: collections.Counter[tuple[int, str]] = collections.Counter()
        issued: dict[int, _Issued] = {}
        for event in record.events:  # In the order of their start.
            if event.kind not in _FIRST and event.kind != _SECOND:
                continue
            number = sets.get(f"{event.axis} {event.num_ranks}")
            key = None
            if number is not None:
                key = (number, event.kind, counts[number, event.kind])
                counts[number, event.kind] += 1
                self._came[key][rank] = event.begin
            issued[event.opened] = _Issued(event.begin, key)
        # A collective ends when it has been awaited: it owns the earlier waits since its start.
        open_waits: dict[int, list[StepEvent]] = collections.defaultdict(list)
        seconds: dict[int, _Issued] = {}
        found: list[_Awaited] = []
        for event in sorted(record.events, key=lambda each: each.closed):
            if event.kind == "wait":
                open_waits[event.group].append(event)
            elif event.kind == _SECOND and event.group >= 0:
                seconds[event.group] = issued[event.opened]
            elif event.kind in _FIRST or event.kind == _SECOND:
                waits = open_waits.get(event.group, [])
                mine = [wait for wait in waits if wait.opened > event.opened]
                open_waits[event.group] = [wait for wait in waits if wait.opened < event.opened]
                is_reduction = event.kind == "reduce_scatter"
                second = seconds.pop(event.group, None) if is_reduction else None
                for wait in mine:
                    also = second if wait is mine[-1] else None
                    place = (wait.begin, wait.end, wait.name)
                    found.append(_Awaited(*place, issued[event.opened], also))
        left = (wait for waits in open_waits.values() for wait in waits)
        found += [_Awaited(wait.begin, wait.end, wait.name, None, None) for wait in left]
        return sorted(found, key=lambda each: each.begin)

    def _note_second(
        self, records: Sequence[RankRecord], awaited: Mapping[int, Sequence[_Awaited]]
    ) -> None:
        """Correct the times at which ranks issued all-reduces that follow a reduce-scatter."""
        for record in records:
            rank = record.header.rank
            for wait in awaited[rank]:
                if wait.first is None or wait.second is None or wait.second.key is None:
                    continue
                after, _ = self._last(wait.first, rank)
                at = max(after, wait.begin) if record.header.device == "cpu" else after
                self._came[wait.second.key][rank] = max(at, wait.second.begin)

    def _last(self, issued: _Issued, rank: int) -> tuple[float, int]:
        """Return when the last rank issued a collective, and the number of that rank."""
        if issued.key is None:
            return issued.begin, rank
        last = self._last_of.get(issued.key)
        if last is None:
            late, at = max(self._came[issued.key].items(), key=lambda item: item[1])
            last = self._last_of[issued.key] = (at, late)
        return last

    # --- what a wait was for ---

    def _cut(self, rank: int, wait: _Awaited, part: int) -> None:
        """Cut a wait of a rank; of a wait for two collectives, cut the first or the second part."""
        cuts = self._cuts[rank]
        begin = max(wait.begin, cuts[-1].end) if cuts else wait.begin
        of = (wait.first, wait.second)[part]
        bounds: list[tuple[float, str, int]] = []
        if of is not None:
            last, late = self._last(of, rank)
            if part == 0:
                bounds += [(of.begin, HOST, -1), (last, "", late)]
            elif of.key is not None and late != rank:
                bounds += [(self._came[of.key][rank], NETWORK, -1), (last, "", late)]
        if part == 1 or wait.second is None:
            bounds.append((wait.end, NETWORK, -1))
        for until, cause, late in bounds:
            end = min(until, wait.end)
            if begin >= end:
                continue
            if late < 0:
                cuts.append(_Span(begin, end, wait.group, cause))
            else:
                cuts += self._divide(rank, late, _Span(begin, end, wait.group, ""))
            begin = end
        if of is not None and of.key is not None:
            is_end = bool(cuts) and cuts[-1].cause == NETWORK and cuts[-1].end == wait.end
            self._done[of.key][rank] = (wait.end, len(cuts) - 1 if is_end else -1)
            last, _ = self._last(of, rank)
            if last <= wait.end:  # Otherwise only for a part, such as one of several axes.
                self._met[rank][of.key[0]] = last

    def _note_links(self, least_s: float) -> None:
        """Separate the waits of one rank alone, and those of all ranks but one."""
        links: dict[int, dict[int, _Span]] = collections.defaultdict(dict)

        def note(rank: int, at: int, since: float, until: float, late: int) -> None:
            cut = self._cuts[rank][at]
            begin, end = max(cut.begin, since), min(cut.end, until)
            if begin < end:
                links[rank][at] = _Span(begin, end, cut.group, LINK, late)

        for key, done in self._done.items():
            if len(done) < len(self._members[key[0]]):
                continue
            order = sorted(done, key=lambda rank: done[rank][0])
            (first_s, first_at), (second_s, _) = done[order[0]], done[order[1]]
            (before_s, before_at), (last_s, at) = done[order[-2]], done[order[-1]]
            if len(order) == 2 or last_s - before_s > second_s - first_s:  # noqa: PLR2004 - a pair
                if at >= 0 and last_s - before_s > self._least(least_s, order[-2], before_at):
                    note(order[-1], at, before_s, last_s, order[-1])
            elif all(done[rank][1] >= 0 for rank in order):
                least = self._least(least_s, order[0], first_at)
                for rank in order[1:] if second_s - first_s > least else ():
                    note(rank, done[rank][1], first_s, second_s, order[0])
        for rank, of in links.items():
            cuts = self._cuts[rank]
            self._cuts[rank] = [
                part
                for at, cut in enumerate(cuts)
                for part in ([cut] if at not in of else _split(cut, of[at]))
            ]

    def _least(self, least_s: float, rank: int, at: int) -> float:
        """Return the least time of a slow link, beyond the time of `rank` with its network wait."""
        cut = self._cuts[rank][at] if at >= 0 else None
        return max(least_s, _LINK_SHARE * (cut.end - cut.begin) if cut else 0.0)

    def _divide(self, rank: int, late: int, span: _Span) -> Iterator[_Span]:
        """Yield the parts of a wait for `late`, by what made that rank late."""
        met = [at for number, at in self._met[rank].items() if late in self._members[number]]
        since = max(met, default=float("-inf"))
        causes = _seconds_waited(self._cuts.get(late, ()), since)
        causes.subtract(_seconds_waited(self._cuts[rank], since))
        owed = {cause: seconds for cause, seconds in causes.items() if seconds > _NO_TIME_S}
        owed.pop(late, None)
        owed.pop(rank, None)  # No rank waits for itself.
        whole = span.end - span.begin
        share = min(1.0, whole / sum(owed.values())) if owed else 0.0
        at = span.begin
        for cause in sorted(owed):
            end = at + owed[cause] * share
            if end > span.end - _NO_TIME_S:
                end = span.end
            if at < end:
                yield _of_cause(span, at, end, cause)
            at = end
        if at < span.end:
            yield _of_cause(span, at, span.end, late)


def _split(cut: _Span, inner: _Span) -> list[_Span]:
    """Return a span in which another one replaces a part."""
    before, after = cut._replace(end=inner.begin), cut._replace(begin=inner.end)
    return [each for each in (before, inner, after) if each.begin < each.end]


def _seconds_waited(cuts: Sequence[_Span], since: float) -> collections.Counter[int]:
    """Return how long a rank has waited since a time, by the late rank; -1 is the network."""
    sums: Any = collections.Counter()
    for cut in reversed(cuts):
        if cut.end <= since:
            break
        if cut.cause != HOST:
            sums[cut.late_rank] += cut.end - max(cut.begin, since)
    return sums  # type: ignore[no-any-return]


def _of_cause(span: _Span, begin: float, end: float, late: int) -> _Span:
    return _Span(begin, end, span.group, NETWORK if late < 0 else f"rank {late}", late)


# --- slices ---------------------------------------------------------------------------------------


def slices_of(record: RankRecord, waits: Waits) -> list[TimeSlice]:
    """Return a rank's steps as slices, in order."""
    computing = (
        _Span(event.begin, event.end, event.name, COMPUTE)
        for event in record.events
        if event.kind == "compute" and event.phase != OPTIMIZER
    )
    inner = _topmost(computing, waits.of(record.header.rank))
    result: list[TimeSlice] = []
    number = 0
    for begin, end, step, phase in _parts(record):
        at, outside = begin, phase if phase in {DATA, OPTIMIZER} else OUTSIDE
        while number < len(inner) and inner[number].end <= begin:
            number += 1
        for index in range(number, len(inner)):
            span = inner[index]
            if span.begin >= end:
                break
            left, right = max(span.begin, at), min(span.end, end)
            if at < left:
                result.append(TimeSlice(at, left, step, phase, "", outside))
            result.append(TimeSlice(left, right, step, phase, *span[2:]))
            at = right
        if at < end:
            result.append(TimeSlice(at, end, step, phase, "", outside))
    return result


def _topmost(*layers: Iterable[_Span]) -> list[_Span]:
    """Return spans without overlaps: the last layer wins, and in it the span that began last."""
    spans = sorted(
        (span.begin, -level, -span.begin, span.end, -number, span)
        for level, layer in enumerate(layers)
        for number, span in enumerate(layer)
    )
    edges = sorted({edge for *_, span in spans for edge in (span.begin, span.end)})
    result: list[_Span] = []
    under_way: list[tuple[Any, ...]] = []  # A heap with the topmost span first.
    top: tuple[Any, ...] = ()
    since, number = 0.0, 0
    for begin, end in itertools.pairwise(edges):
        while number < len(spans) and spans[number][0] <= begin:
            heapq.heappush(under_way, spans[number][1:])
            number += 1
        while under_way and under_way[0][-1].end <= begin:
            heapq.heappop(under_way)
        if not under_way:
            continue
        if under_way[0] is not top:
            top, since = under_way[0], begin
            result.append(top[-1])
        result[-1] = _Span(since, end, *top[-1][2:])
    return result


def _parts(record: RankRecord) -> Iterator[tuple[float, float, int, str]]:
    """Yield begin, end, step and phase of the parts of each step."""
    spans = [
        _Span(event.begin, event.end, "", event.phase)
        for event in record.events
        if event.kind == "pass"
    ]
    passes = sorted((span.end, span.begin) for span in spans)
    for event in record.events:
        if event.kind == "compute" and event.phase == OPTIMIZER:
            # A closure runs passes inside of the step, as Lightning's loop does.
            number = bisect.bisect_right(passes, event.end, key=operator.itemgetter(0))
            end, begin = passes[number - 1] if number else (event.begin, event.begin)
            at = end if begin >= event.begin else event.begin
            spans.append(_Span(at, event.end, "", OPTIMIZER))
    phases = _topmost(spans)
    ends = _ends(phases, {span.end for span in spans if span.cause == OPTIMIZER})
    if not ends:
        return
    at, step = phases[0].begin, 0
    for phase in phases:
        if at < min(phase.begin, ends[-1]):
            before = {FORWARD: DATA, BACKWARD: FORWARD}.get(phase.cause, phase.cause)
            yield at, phase.begin, step, before
        if phase.begin >= ends[-1]:
            return
        step += phase.begin >= ends[step]
        yield phase.begin, phase.end, step, phase.cause
        at = phase.end
        step += at >= ends[step]


def _ends(phases: Sequence[_Span], optimizer_ends: Collection[float]) -> list[float]:
    """Return the ends of steps. An optimizer's step inside of a backward ends no step."""
    after = [each.cause for each in phases[1:]]
    ends = [
        phase.end
        for phase, next_one in zip(phases, [*after, FORWARD], strict=False)
        if phase.cause == OPTIMIZER and phase.end in optimizer_ends and next_one == FORWARD
    ]
    return ends or [
        phases[number + 1].begin
        for number, next_one in enumerate(after)
        if phases[number].cause == BACKWARD and next_one == FORWARD
    ]


# --- sums -----------------------------------------------------------------------------------------


def seconds_by(slices: Iterable[TimeSlice], *names: str) -> dict[Any, float]:
    """Return the seconds of slices, summed by some fields such as ``"group", "cause"``."""
    sums: dict[Any, float] = collections.defaultdict(float)
    for each in slices:
        sums[tuple(getattr(each, name) for name in names)] += each.seconds
    return dict(sums)
