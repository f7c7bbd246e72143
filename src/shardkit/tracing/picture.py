"""A step of some ranks as a picture: compute, waits, and the ranks that are waited for."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from shardkit._errors import StateError
from shardkit.tracing.exposed import COMPUTE, DATA, HOST, LINK, NETWORK, OPTIMIZER, OUTSIDE
from shardkit.tracing.trace import Trace, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes


LOOKS = {
    COMPUTE: ("#4c78a8", "compute of groups"),
    OUTSIDE: ("#9ecae9", "outside of groups"),
    DATA: ("#b279a2", "data"),
    OPTIMIZER: ("#72b7b2", "optimizer"),
    NETWORK: ("#f58518", "waits for the network"),
    LINK: ("#ff9da6", "waits for one rank's link"),
    HOST: ("#eeca3b", "waits for its own host"),
    "late": ("#e45756", "waits for a rank that is late"),
    "gather": ("#54a24b", "gathers"),
    "reduce": ("#a0793d", "reductions"),
    "memory": ("#bab0ac", "memory"),
}
"""Colour and title of each kind of slice."""
_MAX_RANKS = 16
_LANES = {"gather": (0.42, 0.13), "reduce_scatter": (0.27, 0.13), "all_reduce": (0.27, 0.13)}
_STEP, _MEMORY = (0.6, 0.36), 0.22
_MS = 1e3


def chosen_ranks(trace: Trace, limit: int) -> list[int]:
    """Return at most `limit` ranks to show: rank 0, late ones, the others evenly spaced."""
    ranks = [record.header.rank for record in trace.records]
    if len(ranks) <= limit:
        return ranks
    first = [ranks[0], *(late.rank for late in trace.late)]
    even = [ranks[i * len(ranks) // limit] for i in range(limit)]
    return sorted([*dict.fromkeys([*first, *even])][:limit])


def color_key(cause: str) -> str:
    """Return the name of a cause's colour."""
    return cause if cause in LOOKS else "late"


def draw(trace: Trace, path: Path, step: int | None = None) -> None:
    """Draw one step of up to 16 ranks into a file, in the format of its suffix.

    Without a number of the step, it is one in the middle of those that most ranks have.

    Raises:
        StateError: No rank has recorded this step, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        msg = "a picture needs matplotlib: pip install 'shardkit[picture]'."
        raise StateError(msg) from error
    if step is None:
        steps = [at for of in trace.slices.values() for at in {each.step for each in of}]
        step = statistics.median_high(statistics.multimode(steps))
    of_step = {
        rank: parts
        for rank, of in trace.slices.items()
        if (parts := [each for each in of if each.step == step])
    }
    if not of_step:
        msg = f"no rank has recorded step {step}. Draw another one."
        raise StateError(msg)
    ranks = [rank for rank in chosen_ranks(trace, _MAX_RANKS) if rank in of_step]
    ranks = ranks or sorted(of_step)[:_MAX_RANKS]
    start = min(of_step[rank][0].begin for rank in ranks)
    figure = Figure((11, 1.3 + 0.7 * len(ranks)), layout="constrained")
    rows = figure.subplots(len(ranks), sharex=True, squeeze=False)[:, 0]
    for row, rank in zip(rows, ranks, strict=True):
        _draw_rank(row, trace, rank, step, start)
    rows[-1].set_xlabel(f"ms of step {step}")
    keys = {color_key(each.cause) for rank in ranks for each in of_step[rank]}
    keys |= {"gather", "reduce", "memory"}
    looks = [LOOKS[key] for key in LOOKS if key in keys]
    patches = [Patch(color=color, label=title) for color, title in looks]
    figure.legend(handles=patches, loc="outside upper left", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)


def curve_between(
    curve: Sequence[tuple[float, int]], begin: float, end: float
) -> list[tuple[float, int]]:
    """Return the part of a step curve between two times, with its levels at both."""
    before = [(begin, nbytes) for at, nbytes in curve if at < begin][-1:]
    found = before + [(at, nbytes) for at, nbytes in curve if begin <= at <= end]
    return [*found, (end, found[-1][1])] if found else []


def _draw_rank(row: Axes, trace: Trace, rank: int, step: int, start: float) -> None:
    """Draw what a rank did in a step: the step, gathers, reductions, memory, from above."""
    events = next(record.events for record in trace.records if record.header.rank == rank)
    slices = [each for each in trace.slices[rank] if each.step == step]
    begin, end = slices[0].begin, slices[-1].end

    def bar(left: float, right: float, lane: tuple[float, float], key: str) -> None:
        left, right = max(left, begin), min(right, end)
        span = ((left - start) * _MS, (right - left) * _MS)
        row.broken_barh([span], lane, color=LOOKS[key][0], linewidth=0)

    for each in slices:
        bar(each.begin, each.end, _STEP, color_key(each.cause))
    for event in events:
        if event.kind in _LANES and event.begin < end and event.end > begin and event.group >= 0:
            key = "gather" if event.kind == "gather" else "reduce"
            bar(event.begin, event.end, _LANES[event.kind], key)
    curve = curve_between(memory_of(events), begin, end)
    most = max((nbytes for _, nbytes in curve), default=0)
    if most:
        times = [(at - start) * _MS for at, _ in curve]
        heights = [_MEMORY * nbytes / most for _, nbytes in curve]
        row.fill_between(times, heights, step="post", color=LOOKS["memory"][0], linewidth=0)
    row.set(ylim=(0, 1), yticks=[])
    row.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
    row.spines[["left", "top", "right"]].set_visible(b=False)
