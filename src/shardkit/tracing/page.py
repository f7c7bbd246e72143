"""One HTML page of all ranks, which needs no other file and no network.

Ranks with few events in all are shown event by event. Of many ranks, only some are shown so, the
late ones among them. For the others, time is divided into a thousand parts, and each part shows the
cause that fills most of it. Above the ranks, a row may show the plan of each step.
"""

from __future__ import annotations

import array
import base64
import json
import math
import sys
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit._errors import StateError
from shardkit.tracing.exposed import COMPUTE
from shardkit.tracing.picture import LOOKS, chosen_ranks, color_key
from shardkit.tracing.trace import Trace, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


_MAX_EVENTS = 150_000
_NUM_PARTS = 1000
_LANES = {"gather": 1, "reduce_scatter": 2, "all_reduce": 2}
_PLANNED = {"compute": (0, COMPUTE), "gather": (1, "gather"), "reduce": (2, "reduce")}
_KEYS = list(LOOKS)
_US = 1e6
_MAX_ROWS = 200
_ROUNDED_S = 1e-9  # Differences of times are rounded.


class PlannedStep(NamedTuple):
    """The step that ``python -m shardkit plan --hardware ... --json`` predicts."""

    seconds: float  # Time of the step.
    exposed_s: float  # Part of it that collectives cost.
    # Lane, name, begin and end of all work, from the start of the step on.
    spans: list[tuple[str, str, float, float]]

    @classmethod
    def read(cls, path: Path) -> PlannedStep:
        """Read a plan from a file.

        Raises:
            StateError: The file is no plan, or has no times.
        """
        try:
            time = json.loads(path.read_text(encoding="utf-8"))["time"]
            spans = [
                (str(span["lane"]), str(span["name"]), float(span["begin"]), float(span["end"]))
                for span in time["spans"]
            ]
            found = cls(float(time["seconds"]), float(time["exposed_s"]), spans)
            found._check()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            msg = (
                f"--plan must be a file that `python -m shardkit plan ... --hardware NAME --json` "
                f"has printed, with times; {path} is none: {type(error).__name__}: {error}"
            )
            raise StateError(msg) from error
        return found

    def _check(self) -> None:
        for each in (*self[:2], *(at for span in self.spans for at in span[2:])):
            if not math.isfinite(each) or each < -_ROUNDED_S:
                msg = f"times must be finite numbers, 0 or more, got {each}"
                raise ValueError(msg)

    def __str__(self) -> str:
        """Return the planned step as a sentence."""
        ms = (self.seconds * 1e3, self.exposed_s * 1e3)
        return "The plan expects {:.2f} ms a step, of which collectives cost {:.2f} ms.".format(*ms)


def write_page(trace: Trace, path: Path, plan: PlannedStep | None = None) -> None:
    """Write the page; it shows a plan at the start of each step of the first rank."""
    content = json.dumps(_content(trace, plan), separators=(",", ":")).replace("<", "\\u003c")
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    path.write_text(template.replace("DATA_OF_THE_PAGE", content), encoding="utf-8")


def _content(trace: Trace, plan: PlannedStep | None) -> dict[str, Any]:
    slices = [each for of in trace.slices.values() for each in of]
    start, end = min(each.begin for each in slices), max(each.end for each in slices)
    num_events = sum(len(record.events) for record in trace.records)
    number = max(1, len(trace.records) * _MAX_EVENTS // max(num_events, _MAX_EVENTS))
    detailed = set(chosen_ranks(trace, number))
    names: dict[str, int] = {}
    looks = LOOKS.items()
    planned = [] if plan is None else [_planned_row(trace, plan, start, names)]
    return {
        "step_ms": trace.step_s() * 1e3,
        "mean_ms": sum(share.seconds for share in trace.shares()) * 1e3,
        "num_steps": trace.num_steps(),
        "us": (end - start) * _US,
        "parts": _NUM_PARTS,
        "late": [str(late) for late in trace.late],
        "missing": trace.missing,
        "peak": trace.peak_nbytes(),
        "plan": "" if plan is None else str(plan),
        "keys": [{"key": key, "color": color, "title": title} for key, (color, title) in looks],
        "shares": [(s.group, s.cause, s.seconds * 1e3) for s in trace.shares()[:_MAX_ROWS]],
        "ranks": planned
        + [
            {
                "rank": record.header.rank,
                "host": record.header.host,
                "parts": _parts(trace, record.header.rank, start, end),
                "events": _events(trace, number, start, names)
                if record.header.rank in detailed
                else None,
            }
            for number, record in enumerate(trace.records)
        ],
        "names": list(names),
    }


def _parts(trace: Trace, rank: int, start: float, end: float) -> str:
    """Return for each part of the time the number of its longest key plus 1, in base64."""
    seconds: list[dict[int, float]] = [{} for _ in range(_NUM_PARTS)]
    length = (end - start) / _NUM_PARTS
    for each in trace.slices[rank]:
        key = _KEYS.index(color_key(each.cause)) + 1
        first = int((each.begin - start) / length)
        for part in range(first, min(int((each.end - start) / length) + 1, _NUM_PARTS)):
            left, right = start + part * length, start + (part + 1) * length
            covered = min(each.end, right) - max(each.begin, left)
            seconds[part][key] = seconds[part].get(key, 0.0) + covered
    filled = bytes(max(of, key=lambda key: of[key]) if of else 0 for of in seconds)
    return base64.b64encode(filled).decode()


_Row = tuple[float, float, int, int, str]  # Begin, end, lane, key and name of one item on the page.


def _planned_row(
    trace: Trace, plan: PlannedStep, start: float, names: dict[str, int]
) -> dict[str, Any]:
    """Return the plan in the form of a rank, at the start of each step of the first rank."""
    begins: dict[int, float] = {}
    for each in trace.slices[trace.records[0].header.rank]:
        begins.setdefault(each.step, each.begin)
    rows: list[_Row] = []
    for at in begins.values():
        for lane, name, begin, end in plan.spans:
            if lane in _PLANNED:
                number, key = _PLANNED[lane]
                title = f"{name}\nexpected {lane}"
                rows.append((at + begin, at + end, number, _KEYS.index(key), title))
    return {"rank": "plan", "host": "", "parts": "", "events": _columns(rows, [], start, names)}


def _events(trace: Trace, number: int, start: float, names: dict[str, int]) -> dict[str, Any]:
    """Return the columns of a rank's events; lanes: 0 the parts of steps, 1 gathers, ..."""
    record = trace.records[number]
    rows: list[_Row] = []
    for each in trace.slices[record.header.rank]:
        cause = "" if each.cause == COMPUTE else f"{each.cause}"
        title = " · ".join(word for word in (f"step {each.step}", each.phase, cause) if word)
        key = _KEYS.index(color_key(each.cause))
        rows.append((each.begin, each.end, 0, key, f"{each.group}\n{title}"))
    for event in record.events:
        lane = _LANES.get(event.kind)
        if lane is not None:
            key = _KEYS.index("gather" if event.kind == "gather" else "reduce")
            title = f"{event.name}\n{event.kind} · {event.phase} · {event.nbytes:,} bytes"
            rows.append((event.begin, event.end, lane, key, title))
    return _columns(rows, memory_of(record.events), start, names)


def _columns(
    rows: list[_Row], curve: list[tuple[float, int]], start: float, names: dict[str, int]
) -> dict[str, Any]:
    """Return what the page draws in a row, and the memory below it."""
    rows.sort()
    return {
        "begin": _base64("d", ((begin - start) * _US for begin, *_ in rows)),
        "us": _base64("d", ((end - begin) * _US for begin, end, *_ in rows)),
        "lane": _base64("B", (lane for _, _, lane, _, _ in rows)),
        "key": _base64("B", (key for *_, key, _ in rows)),
        "name": _base64("I", (names.setdefault(name, len(names)) for *_, name in rows)),
        "at": _base64("d", ((at - start) * _US for at, _ in curve)),
        "nbytes": _base64("d", (float(nbytes) for _, nbytes in curve)),
    }


def _base64(kind: str, values: Iterable[float]) -> str:
    """Return numbers as bytes of an array, the least significant byte first, in base64."""
    column = array.array(kind, values)
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode()
