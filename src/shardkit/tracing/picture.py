"""A step of some ranks as a picture (SVG): what they compute, what they wait for, and for whom."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from shardkit._errors import StateError
from shardkit.tracing.exposed import COMPUTE, DATA, HOST, NETWORK, OPTIMIZER, OUTSIDE
from shardkit.tracing.trace import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit._events import StepEvent
    from shardkit.tracing.trace import Trace

COLORS = {
    COMPUTE: "#4c78a8",
    OUTSIDE: "#9ecae9",
    DATA: "#b279a2",
    OPTIMIZER: "#72b7b2",
    NETWORK: "#f58518",
    HOST: "#eeca3b",
    "late": "#e45756",
    "gather": "#54a24b",
    "reduce": "#a0793d",
    "memory": "#bab0ac",
}
TITLES = {
    COMPUTE: "compute of groups",
    OUTSIDE: "outside of groups",
    DATA: "data",
    OPTIMIZER: "optimizer",
    NETWORK: "waits for the network",
    HOST: "waits for its own host",
    "late": "waits for a rank that is late",
    "gather": "gathers",
    "reduce": "reductions",
    "memory": "memory",
}
_LEFT, _WIDTH, _MARGIN = 70, 900, 16
_LANES = {"gather": (20, 6), "reduce_scatter": (27, 6), "all_reduce": (27, 6)}
_ROW, _MEMORY = 64, (36, 18)
_LEAST = 0.25  # Pixels.
_MAX_RANKS = 16


def chosen_ranks(trace: Trace, limit: int) -> list[int]:
    """Return at most `limit` ranks to look at: rank 0, late ones, the others evenly."""
    ranks = [record.header.rank for record in trace.records]
    if len(ranks) <= limit:
        return ranks
    first = [ranks[0], *(late.rank for late in trace.late)]
    even = [ranks[i * len(ranks) // limit] for i in range(limit)]
    return sorted([*dict.fromkeys([*first, *even])][:limit])


def color_key(cause: str) -> str:
    """Return the name of a cause's colour."""
    return cause if cause in COLORS else "late"


def draw(trace: Trace, step: int | None = None) -> str:
    """Return the SVG of one step of up to 16 ranks.

    Args:
        trace: Records of all ranks.
        step: Number of the step; None: one in the middle of those that most ranks have.

    Raises:
        StateError: No rank has recorded this step.
    """
    step = _middle_step(trace) if step is None else step
    there = {rank for rank, of in trace.slices.items() if any(each.step == step for each in of)}
    ranks = [rank for rank in chosen_ranks(trace, _MAX_RANKS) if rank in there]
    ranks = ranks or sorted(there)[:_MAX_RANKS]
    if not ranks:
        msg = f"no rank has recorded step {step}. Draw another one."
        raise StateError(msg)
    parts = [each for rank in ranks for each in trace.slices[rank] if each.step == step]
    begin = min(each.begin for each in parts)
    scale = (_WIDTH - _LEFT - _MARGIN) / (max(each.end for each in parts) - begin)
    height = 62 + _ROW * len(ranks) + 20
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11"',
        f'  viewBox="0 0 {_WIDTH} {height}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    used = {color_key(each.cause) for each in parts} | {"gather", "reduce", "memory"}
    for number, key in enumerate(key for key in COLORS if key in used):
        x, y = _MARGIN + 175 * (number % 5), 12 + 16 * (number // 5)
        lines += [
            f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLORS[key]}"/>',
            f'<text x="{x + 16}" y="{y + 10}" fill="#222">{TITLES[key]}</text>',
        ]
    for number, rank in enumerate(ranks):
        y = 56 + _ROW * number
        lines.append(f'<text x="{_MARGIN}" y="{y + 13}" fill="#222">rank {rank}</text>')
        record = next(each for each in trace.records if each.header.rank == rank)
        lines += _row(trace, record.events, rank, step, (begin, scale, y))
    length_ms = (_WIDTH - _LEFT - _MARGIN) / scale * 1e3
    lines += [
        f'<text x="{_LEFT}" y="{height - 8}" fill="#222">0 ms</text>',
        f'<text x="{_WIDTH - _MARGIN}" y="{height - 8}" fill="#222" text-anchor="end">',
        f"  {length_ms:.1f} ms</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _middle_step(trace: Trace) -> int:
    counts = collections.Counter(
        step for of in trace.slices.values() for step in {each.step for each in of}
    )
    most = max(counts.values())
    common = sorted(step for step, count in counts.items() if count == most)
    return common[len(common) // 2]


def _row(
    trace: Trace,
    events: Sequence[StepEvent],
    rank: int,
    step: int,
    place: tuple[float, float, int],
) -> Iterator[str]:
    """Yield what a rank did in a step."""
    start, scale, y = place
    slices = [each for each in trace.slices[rank] if each.step == step]
    begin, end = slices[0].begin, slices[-1].end

    def rect(left: float, right: float, top: int, height: int, key: str, title: str) -> str:
        x, width = _LEFT + (left - start) * scale, max((right - left) * scale, _LEAST)
        shown = escape(f"{title}, {(right - left) * 1e3:.2f} ms")
        return (
            f'<rect x="{x:.2f}" y="{y + top}" width="{width:.2f}" height="{height}" '
            f'fill="{COLORS[key]}"><title>{shown}</title></rect>'
        )

    for each in slices:
        title = f"{each.phase}, {each.cause} {each.group}"
        yield rect(each.begin, each.end, 2, 16, color_key(each.cause), title)
    for event in events:
        lane = _LANES.get(event.kind)
        if lane is not None and event.begin < end and event.end > begin and event.group >= 0:
            key = "gather" if event.kind == "gather" else "reduce"
            left, right = max(event.begin, begin), min(event.end, end)
            yield rect(left, right, *lane, key, f"{event.kind} {event.name}")
    curve = [(at, nbytes) for at, nbytes in memory_of(events) if begin <= at <= end]
    most = max((nbytes for _, nbytes in curve), default=0)
    if most:
        top, height = _MEMORY
        points = [f"{_LEFT + (begin - start) * scale:.2f},{y + top + height}"]
        before = 0
        for at, nbytes in [*curve, (end, 0)]:
            x = _LEFT + (at - start) * scale
            points += [f"{x:.2f},{y + top + height * (1 - v / most):.2f}" for v in (before, nbytes)]
            before = nbytes
        yield f'<polygon points="{" ".join(points)}" fill="{COLORS["memory"]}"/>'
