"""What torch's record of NCCL collectives is turned into."""

from __future__ import annotations

import json
import typing

from shardkit._compat import torch_groups
from shardkit.backends.watch.status import describe_record, flight_record

if typing.TYPE_CHECKING:
    import pytest


def entry(number: int, name: str, state: str, group: str = "0") -> dict[str, object]:
    return {"pg_id": group, "record_id": number, "profiling_name": name, "state": state}


STATUS = {
    "last_enqueued_collective": 12,
    "last_started_collective": -1,
    "last_completed_collective": 10,
}


def test_the_oldest_that_is_not_done_is_named() -> None:
    record = {
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": STATUS},
        "entries": [
            entry(2, "nccl:_reduce_scatter_base", "scheduled"),
            entry(1, "nccl:_all_gather_base", "started"),
            entry(0, "nccl:all_reduce", "completed"),
        ],
    }
    [line] = describe_record(record)
    assert line.startswith("NCCL, default_pg: 12 collectives issued, 10 done; ")
    assert line.endswith("the oldest that is not done is _all_gather_base (started).")


def test_communicators_have_a_line_each_and_those_that_were_never_used_count_zero() -> None:
    unused = dict.fromkeys(STATUS, -1)
    record = {
        "pg_status": {"1": unused, "0": STATUS},
        "entries": [entry(1, "nccl:x", "started", "0")],
    }
    first, second = describe_record(record)
    assert first.startswith("NCCL, 0: 12")
    assert second == "NCCL, 1: 0 collectives issued, 0 done."


def test_an_empty_record_says_nothing() -> None:
    assert describe_record({}) == []


def test_entries_are_left_out_where_a_graph_has_captured_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dump(*, with_entries: bool) -> str:
        entries = [entry(1, "nccl:all_reduce", "started")] if with_entries else []
        return json.dumps({"pg_status": {"0": STATUS}, "entries": entries})

    monkeypatch.setattr(torch_groups, "nccl_flight_record", dump)
    (plain,), (captured,) = (flight_record(has_captured=each) for each in (False, True))
    assert plain.endswith("10 done; the oldest that is not done is all_reduce (started).")
    assert captured.endswith(
        "10 done. Those that a graph has captured count as issued, and never as done."
    )
