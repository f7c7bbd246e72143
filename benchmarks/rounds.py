"""Turns of contenders on the same cores, so that their times can be compared in pairs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

from contenders import Workload, missing
from measure import CountedRank, PeakBytes, StepTimes, TimedRank
from ranks import Ranks

_log = logging.getLogger(__name__)
_COUNTED_STEPS = 3


@dataclass(frozen=True)
class Settings:
    """How much to measure, and where."""

    num_rounds: int  # Number of turns of every contender.
    num_steps: int  # Number of timed steps in a turn.
    device_type: str  # ``"cpu"`` or ``"cuda"``.
    world_size: int  # Number of ranks of every contender.
    state_gb: float = 1.0  # Size of a checkpoint, in units of 10^9 bytes.
    # Whether the cases of one card train tiny models, only to check that they run.
    small: bool = False


@dataclass(frozen=True)
class Timing:
    """One contender's turns, in order, each as its slowest rank saw it."""

    rounds: list[StepTimes]  # The times of each turn.
    final_loss: float  # The loss after the last turn, averaged over the ranks.
    resident_peak: int  # The largest resident memory of a rank in bytes, above the imports.


def able(contenders: Sequence[str]) -> list[str]:
    """Return the contenders that can run here; say why the others cannot."""
    for name in contenders:
        if reason := missing(name):
            _log.warning("%s is skipped: %s", name, reason)
    return [name for name in contenders if not missing(name)]


def time_interleaved(
    contenders: Sequence[str], workload: Workload, settings: Settings
) -> dict[str, Timing]:
    """Time all contenders in every round; the order is reversed from round to round.

    Each contender has its own rank processes, which sleep while others take their turn. So none
    inherits another's heap (its free blocks, its mmap threshold). If the machine is slow for a
    while, all contenders of a round are slow.

    Returns:
        The timings, by contender.
    """
    rounds: dict[str, list[StepTimes]] = {name: [] for name in contenders}
    with ExitStack() as stack:
        ranks = {}
        for name in contenders:
            group = Ranks(settings.world_size, settings.device_type, TimedRank, name, workload)
            ranks[name] = stack.enter_context(group)
        for name in turns(contenders, settings.num_rounds):
            by_rank = ranks[name].call("block", settings.num_steps)
            rounds[name].append(max(by_rank, key=attrgetter("step_s")))
            _log.info("%s: %.1f ms", name, rounds[name][-1].step_s * 1e3)
        return {
            name: Timing(rounds[name], fmean(group.call("loss")), max(group.call("resident_peak")))
            for name, group in ranks.items()
        }


def turns(contenders: Sequence[str], num_rounds: int) -> Iterator[str]:
    """Yield the next contender: all in every round, in an order that is reversed each time."""
    for number in range(num_rounds):
        yield from contenders if number % 2 == 0 else reversed(contenders)


def count_memory(
    contenders: Sequence[str], workload: Workload, settings: Settings
) -> dict[str, PeakBytes]:
    """Count each contender's peak memory in fresh processes, on the rank with the most."""
    peaks = {}
    for name in contenders:
        with Ranks(settings.world_size, settings.device_type, CountedRank, name, workload) as ranks:
            peaks[name] = max(ranks.call("peak", _COUNTED_STEPS), key=attrgetter("steady"))
    return peaks
