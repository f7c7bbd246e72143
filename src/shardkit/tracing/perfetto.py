"""A file for Perfetto and Chrome: all ranks as processes, one below the other.

Source: the Trace Event Format of Chrome, which ui.perfetto.dev reads.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

from shardkit.tracing.trace import Trace, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_LANES = ("steps", "compute", "waits and causes", "gathers", "reductions")
_LANE_OF = {"pass": 0, "compute": 1, "gather": 3, "reduce_scatter": 4, "all_reduce": 4}
_US = 1e6


def write_perfetto(trace: Trace, path: Path) -> None:
    """Write ``.json.gz``; times are of rank 0's clock, from the first event on."""
    with gzip.open(path, "wt", compresslevel=4, encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _events_of(trace):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _events_of(trace: Trace) -> Iterator[dict[str, Any]]:
    start = min(record.events[0].begin for record in trace.records if record.events)

    def span(lane: int, name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
        times = {"ts": round((begin - start) * _US, 3), "dur": round((end - begin) * _US, 3)}
        return {"ph": "X", "pid": rank, "tid": lane, "name": name, **times, "args": args}

    for record in trace.records:
        rank = record.header.rank
        title = f"rank {rank} on {record.header.host}"
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": title}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for lane, title in enumerate(_LANES):
            args = {"name": title}
            yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": args}
        for event in record.events:
            lane_of = _LANE_OF.get(event.kind)
            if lane_of is not None and lane_of < 3:  # noqa: PLR2004 - lanes without overlaps
                title = event.phase if event.kind == "pass" else event.name
                yield span(lane_of, title, event.begin, event.end, phase=event.phase)
            elif lane_of is not None:
                # Collectives overlap, so each one has a start event and an end event.
                name_of = f"{event.kind} {event.name}"
                ends: dict[str, Any] = {"pid": rank, "tid": lane_of, "cat": event.kind}
                ends |= {"id": event.opened, "name": name_of}
                sizes = {"bytes": event.nbytes, "axis": event.axis, "ranks": event.num_ranks}
                begin, end = ((at - start) * _US for at in (event.begin, event.end))
                yield {"ph": "b", "ts": round(begin, 3), **ends, "args": sizes}
                yield {"ph": "e", "ts": round(end, 3), **ends}
        for each in trace.slices[rank]:
            if each.is_exposed:
                yield span(2, f"{each.cause}: {each.group}", each.begin, each.end, step=each.step)
        for at, nbytes in memory_of(record.events):
            count = {"ts": round((at - start) * _US, 3), "args": {"bytes": nbytes}}
            yield {"ph": "C", "pid": rank, "name": "memory of shardkit", **count}
