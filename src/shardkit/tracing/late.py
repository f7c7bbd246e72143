"""The ranks that are late, with phase and group, from what all ranks did.

A rank's own work in a phase of a step is compared with the median of the other ranks in the same
step. If all ranks take longer at once, as for a longer batch, no rank is late. The time for which a
rank's link makes that rank or others wait (`exposed`) is compared in the same way, separately.

- A rank is **slow** if the median of the last five steps is behind by 2 % of a step, and by 3.1
  standard deviations of this difference. The deviation is the larger one of that of all ranks
  together and that of the rank itself. Each of these is the largest of three: of changes from step
  to step, of changes within four steps, and of distances from the medians, in and outside of the
  steps in which the rank seems to be slow. A jump needs only changes from step to step, because a
  drift does not jump: each of three steps is behind more than each of the three before them, by 5
  deviations of these. If distances are larger than changes, adjacent steps are alike, and five of
  them count as fewer.
  So a delay of 3 % of a step is found within five steps, if times vary by less than 0.2 % of a
  step. If they vary more, it takes more steps: in the last 10, 20, 40, ... steps, and in all of
  them, the deviations count less, by the root of their number. Windows before the end count only
  if they are a quarter of all steps: on processors that also do other work, a rank is behind for
  some steps now and then. The widest window in which a rank is slow defines the delay, and so
  where it begins and ends.
- A rank is **irregular** if it is not slow, and in some steps is behind by 5 % of a step and by 5
  deviations, by more than 2 % of all time together. If that holds for more than three quarters of
  all steps, the rank is slow.

Less than 1 ms is no delay: processes that are alike differ by so much for hundreds of steps, for
example by page faults. If a rank is slow in several phases, as when its processor is slower, each
phase is named.

Three of five independent normal values are above 3.1 deviations once in 100 million windows. This
is not the rate of false alarms: a deviation is an estimate, and times are neither independent nor
normal. `tests/unit/tracing/test_late.py` counts alarms among ranks that are alike.
"""

from __future__ import annotations

import collections
import functools
import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

from shardkit.tracing.exposed import (
    BACKWARD,
    DATA,
    FORWARD,
    HOST,
    LINK,
    OPTIMIZER,
    TimeSlice,
    seconds_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


WINDOW = 5
_LEAST, _LEAST_S = 0.02, 0.001
_DEVIATIONS = 3.1
_PARTS = 4
_MOST_ALIKE = 0.97  # A correlation that leaves one of 66 values.
_DOUBT = 2.0  # Factor of doubt for deviations of few independent values.
_PAIR = 2  # Two of three ranks wait for the third one.
_BESIDE, _JUMP_DEVIATIONS = 3, 5.0
_SPIKE, _SPIKE_DEVIATIONS = 0.05, 5.0
_NORMAL = 1.4826  # from the median of absolute values to a standard deviation


class LateRank(NamedTuple):
    """A rank that others wait for."""

    rank: int  # Number of the rank.
    phase: str  # Phase in which it is behind.
    group: str  # Group in which it is behind; "" outside of groups.
    # ``slow``: in each step; ``irregular``: in some steps; ``slow link``, ``irregular link``: the
    # delay is not in its own work, but in what it sends or receives.
    kind: str
    seconds: float  # Delay in such a step, in seconds.
    share: float  # Delay as a part of a step.
    first_step: int  # Number of the first such step.
    num_steps: int  # Number of such steps.
    is_unsure: bool = False  # Whether the links of all other ranks may be the cause instead.

    def __str__(self) -> str:
        where = f"{self.phase} of {self.group}" if self.group else self.phase
        times = "" if self.kind == "slow" else f" in {self.num_steps} steps"
        adjective, _, link = self.kind.partition(" ")
        who = f"the link of rank {self.rank}" if link else f"rank {self.rank}"
        who += ", or those of all others," if self.is_unsure else ""
        return (
            f"{who} is {adjective} in {where}: {self.seconds * 1e3:.1f} ms behind the "
            f"others ({self.share:.1%} of a step){times}, from step {self.first_step} on"
        )


def compared_steps(by_rank: Mapping[int, Sequence[TimeSlice]]) -> list[int]:
    """Return the steps in which ranks are compared; empty if these are too few, or for one rank."""
    common = set.intersection(*({each.step for each in slices} for slices in by_rank.values()))
    steps = sorted(common)[1:]  # The first step makes what others reuse.
    return steps if len(by_rank) > 1 and len(steps) >= WINDOW else []


def late_ranks(by_rank: Mapping[int, Sequence[TimeSlice]]) -> list[LateRank]:
    """Return ranks that are late, by the slices of each rank; the most costly one first."""
    steps = compared_steps(by_rank)
    if not steps:
        return []
    tables = {"": _own_seconds(by_rank), " link": _link_seconds(by_rank)}
    lengths = seconds_by(by_rank[min(by_rank)], "step")
    step_s = statistics.median(lengths[step,] for step in steps)
    found = []
    for suffix, of_group in tables.items():
        own = {rank: _summed(of) for rank, of in of_group.items()}
        for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER):
            table = {rank: [own[rank][step, phase] for step in steps] for rank in sorted(by_rank)}
            behind = _behind(table)
            pooled = _deviation([change for of in behind.values() for change in _changes(of)])
            of_all = functools.cache(functools.partial(_variation, [*behind.values()]))
            for rank, values in behind.items():
                kind, at = _judge(values, pooled, of_all, step_s)
                if at:
                    seconds = statistics.median(values[i] for i in at)
                    group = _group_of(of_group, rank, phase, [steps[i] for i in at], seconds)
                    where = (rank, phase, group, kind + suffix)
                    extent = (seconds, seconds / step_s, steps[at[0]], len(at))
                    is_unsure = bool(suffix) and len(_waiting(by_rank, rank, phase)) == _PAIR
                    found.append(LateRank(*where, *extent, is_unsure))
    return sorted(found, key=lambda late: -late.seconds * late.num_steps)


_Seconds = dict[tuple[int, str, str], float]  # Seconds of a rank by step, phase and group.


def _own_seconds(by_rank: Mapping[int, Sequence[TimeSlice]]) -> dict[int, _Seconds]:
    """Return the seconds of each rank's own work."""
    own = {}
    for rank, slices in by_rank.items():
        done = (each for each in slices if not each.is_exposed or each.cause == HOST)
        own[rank] = seconds_by(done, "step", "phase", "group")
    return own


def _link_seconds(by_rank: Mapping[int, Sequence[TimeSlice]]) -> dict[int, _Seconds]:
    """Return the longest time for which each rank's link makes itself or another rank wait."""
    most: dict[int, _Seconds] = {rank: collections.defaultdict(float) for rank in by_rank}
    for slices in by_rank.values():
        links = (each for each in slices if each.cause == LINK)
        sums = seconds_by(links, "late_rank", "step", "phase", "group")
        for key, seconds in sums.items():
            rank, where = key[0], key[1:]
            most[rank][where] = max(most[rank][where], seconds)
    return most


def _waiting(by_rank: Mapping[int, Sequence[TimeSlice]], late: int, phase: str) -> list[int]:
    """Return the other ranks that wait for a rank's link more than half of the longest time."""
    seconds = {
        rank: seconds_by(slices, "cause", "late_rank", "phase").get((LINK, late, phase), 0.0)
        for rank, slices in by_rank.items()
    }
    most = max(seconds.values())
    return [rank for rank in seconds if rank != late and seconds[rank] > most / 2]


def _summed(of: _Seconds) -> dict[tuple[int, str], float]:
    """Return the seconds of all groups together."""
    sums: dict[tuple[int, str], float] = collections.defaultdict(float)
    for (step, phase, _), seconds in of.items():
        sums[step, phase] += seconds
    return sums


def _behind(table: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Return the delay of each rank behind the median of the others, step by step."""
    ranks = list(table)
    behind: dict[int, list[float]] = {rank: [] for rank in ranks}
    for values in zip(*table.values(), strict=True):
        ordered = sorted(values)
        last = len(values) - 2  # Last index among the others.
        low, high = last // 2, (last + 1) // 2
        for rank, value in zip(ranks, values, strict=True):
            # Without this rank, the values after it move one place down.
            left = ordered[low] if ordered[low] < value else ordered[low + 1]
            right = ordered[high] if ordered[high] < value else ordered[high + 1]
            behind[rank].append(value - (left + right) / 2)
    return behind


def _deviation(distances: Sequence[float]) -> float:
    """Return the standard deviation of normal values from their absolute values."""
    return _NORMAL * statistics.median(distances) if distances else 0.0


def _changes(values: Sequence[float], lag: int = 1) -> list[float]:
    """Return the changes of values within `lag` steps, scaled to deviations of one value.

    The begin or the end of a delay is only one change.
    """
    return [
        abs(after - before) / math.sqrt(2)
        for before, after in zip(values, values[lag:], strict=False)
    ]


def _judge(
    values: Sequence[float],
    pooled: float,
    of_all: Callable[[int, int], tuple[float, float]],
    step_s: float,
) -> tuple[str, list[int]]:
    """Return how a rank is behind, and the indices of the steps; empty: it is not behind.

    Args:
        values: Seconds by which the rank is behind, by step.
        pooled: Deviation of the changes of all ranks.
        of_all: Function that returns the `_variation` of all ranks around a window.
        step_s: Time of a step.
    """
    number = len(values)
    doubled = (WINDOW << power for power in range(number.bit_length()))
    level, change = 0.0, max(pooled, _deviation(_changes(values)))
    for width in (*(width for width in doubled if width < number), number):
        # A median of more values varies less.
        least = max(_LEAST * step_s, _LEAST_S, _DEVIATIONS * pooled * math.sqrt(WINDOW / width))
        is_short = width * _PARTS < number
        for begin in range(number - width if is_short else 0, number - width + 1, width // WINDOW):
            stop = begin + width
            middle = statistics.median(values[begin:stop])
            if middle > least:
                extent = _extent(values, middle)
                is_jump = _jump(values, extent.start) > _JUMP_DEVIATIONS * change
                if is_jump or middle > _chance(values, width, extent, of_all):
                    level = middle
                    break
    if level:
        return "slow", list(_extent(values, level))
    middle = statistics.median(values)
    noise = max(pooled, _deviation([abs(value - middle) for value in values]))
    spike = max(_SPIKE * step_s, _LEAST_S, _SPIKE_DEVIATIONS * noise)
    spikes = [i for i, value in enumerate(values) if value > spike]
    is_much = sum(values[i] for i in spikes) > _LEAST * step_s * number
    is_most = len(spikes) * _PARTS > number * (_PARTS - 1)
    kind = "slow" if is_most else "irregular"
    return kind, spikes if len(spikes) > 1 and is_much else []


def _jump(values: Sequence[float], at: int) -> float:
    """Return the least difference between steps from `at` on and steps before it."""
    before, after = values[max(at - _BESIDE, 0) : at], values[at : at + _BESIDE]
    return min(after) - max(before) if len(before) == len(after) == _BESIDE else 0.0


def _chance(
    values: Sequence[float],
    width: int,
    extent: range,
    of_all: Callable[[int, int], tuple[float, float]],
) -> float:
    """Return how far a rank may be behind in a window by chance."""
    number = len(values)
    cuts = extent.start, extent.stop
    deviation, correlation = map(max, _variation([values], *cuts), of_all(*cuts))
    # A correlation from so few values is too small by about this.
    correlation = min(correlation + (1 + 4 * correlation) / number, _MOST_ALIKE)
    independent = (1 - correlation) / (1 + correlation)
    inside = max(1.0, width * independent)
    doubt = 1 + _DOUBT / max(1.0, number * independent)
    return doubt * _DEVIATIONS * deviation * math.sqrt(WINDOW / inside)


def _variation(ranks: Sequence[Sequence[float]], begin: int, stop: int) -> tuple[float, float]:
    """Return the deviation of the values of some ranks, and the correlation of adjacent values.

    The values before, in and after a window have separate medians, so that a lasting delay is no
    deviation.
    """
    cuts = (slice(begin), slice(begin, stop), slice(stop, None))
    parts = [of[cut] for of in ranks for cut in cuts if of[cut]]
    centers = [statistics.median(part) for part in parts]
    pairs = zip(parts, centers, strict=True)
    spread = _deviation([abs(value - center) for part, center in pairs for value in part])
    change = _deviation([each for part in parts for each in _changes(part)])
    slow_change = _deviation([each for part in parts for each in _changes(part, WINDOW - 1)])
    # If adjacent values have a correlation r, changes have 1 - r of the variance.
    correlation = 1 - (change / spread) ** 2 if spread > change else 0.0
    return max(spread, change, slow_change), correlation


def _extent(values: Sequence[float], level: float) -> range:
    """Return the indices of the steps in which a rank is behind by about `level`.

    It is the run with the largest sum of values above half the level (Kadane), where each value
    counts at most as the level.
    """
    best, most = range(0), 0.0
    begin, total = 0, 0.0
    for i, value in enumerate(values):
        if total <= 0:
            begin, total = i, 0.0
        total += min(max(value, 0.0), level) - level / 2
        if total > most:
            best, most = range(begin, i + 1), total
    return best


def _group_of(
    of_group: Mapping[int, _Seconds], rank: int, phase: str, steps: Sequence[int], seconds: float
) -> str:
    """Return the group in which a rank is behind most, if that is at least half of the delay."""
    groups = {group for _, of, group in of_group[rank] if of == phase and group}
    others = [each for each in of_group if each != rank]
    best, most = "", seconds / 2
    for group in sorted(groups):
        behind = statistics.median(
            of_group[rank].get((step, phase, group), 0.0)
            - statistics.median(of_group[each].get((step, phase, group), 0.0) for each in others)
            for step in steps
        )
        if behind >= most:
            best, most = group, behind
    return best
