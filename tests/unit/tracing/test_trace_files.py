"""What the command writes and prints: tables, a page, a file for Perfetto, a picture."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
import sys
import typing
from array import array

import pytest
import torch
from synthetic_runs import SyntheticRun
from torch import nn
from typer.testing import CliRunner

from shardkit import plan
from shardkit._cli import app
from shardkit.tracing.exposed import seconds_by
from shardkit.tracing.page import write_page
from shardkit.tracing.picture import LOOKS, chosen_ranks, color_key, curve_between, draw
from shardkit.tracing.records import RecordFile
from shardkit.tracing.trace import Trace

if typing.TYPE_CHECKING:
    import pathlib

LATE = 2


def delay(rank: int, step: int, *where: str) -> float:
    """Return how much later rank 2 is."""
    del step
    return 0.02 * (rank == LATE and where == ("backward", "layers.1"))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for record in SyntheticRun(4, num_steps=8, delay=delay).records():
        file = RecordFile(tmp_path, record.header)
        file.write(record.events)
        file.close(record.header)
    return tmp_path


def content_of(page: pathlib.Path) -> typing.Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])


def test_the_command_says_who_is_late_and_where_the_time_goes(folder: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(folder)])
    assert result.exit_code == 0, result.output
    assert re.search(r"4 ranks, 8 steps, \d+\.\d\d ms a step \(median\);", result.output)
    assert "rank 2 is slow in backward of layers.1: 20.0 ms behind the others" in result.output
    assert re.search(r"layers\.\d +rank 2 +1\d\.\d+", result.output)
    names = {path.name for path in folder.iterdir()}
    assert {"trace.html", "trace.json.gz"} <= names
    assert "trace.png" not in names


@pytest.mark.parametrize(
    ("num_ranks", "num_steps", "said"),
    [
        (2, 6, "no rank is late"),
        (2, 5, "whether a rank is late shows in 6 steps of two ranks or more"),
        (1, 9, "whether a rank is late shows in 6 steps of two ranks or more"),
    ],
)
def test_the_command_says_whether_it_could_compare_ranks(
    tmp_path: pathlib.Path, num_ranks: int, num_steps: int, said: str
) -> None:
    for record in SyntheticRun(num_ranks, num_steps=num_steps).records():
        file = RecordFile(tmp_path, record.header)
        file.write(record.events)
        file.close(record.header)
    result = CliRunner().invoke(app, ["trace", str(tmp_path), "--no-files"])
    assert said in result.output.splitlines()


def test_shares_are_the_step(folder: pathlib.Path) -> None:
    trace = Trace.read(folder)
    steps = [
        seconds
        for of in trace.slices.values()
        for (step,), seconds in seconds_by(of, "step").items()
        if step != 0  # It has what the others have not: a first pass.
    ]
    assert sum(each.seconds for each in trace.shares()) == pytest.approx(sum(steps) / len(steps))


def test_the_page_needs_no_network_and_has_all_events(folder: pathlib.Path) -> None:
    trace = Trace.read(folder)
    write_page(trace, folder / "trace.html")
    text = (folder / "trace.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(", text)
    content = content_of(folder / "trace.html")
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1, 2, 3]
    for rank, record in zip(content["ranks"], trace.records, strict=True):
        kinds = {"gather", "reduce_scatter", "all_reduce"}
        num_collectives = sum(event.kind in kinds for event in record.events)
        lanes = base64.b64decode(rank["events"]["lane"])
        assert len(lanes) == num_collectives + len(trace.slices[record.header.rank])
        us = array("d", base64.b64decode(rank["events"]["us"]))
        steps = sum(length for length, lane in zip(us, lanes, strict=True) if lane == 0)
        total = sum(each.seconds for each in trace.slices[record.header.rank])
        assert steps == pytest.approx(total * 1e6)


def test_a_saved_plan_is_a_row_of_the_page(folder: pathlib.Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        batch = torch.empty(8, 1024)
    found = plan(model, batch, mesh=4, policy={nn.Linear}, hardware="h100")
    (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(found)))
    result = CliRunner().invoke(app, ["trace", str(folder), "--plan", str(folder / "plan.json")])
    assert result.exit_code == 0, result.output
    assert "The plan expects " in result.output
    content = content_of(folder / "trace.html")
    first, *others = content["ranks"]
    assert (first["rank"], len(others)) == ("plan", 4)
    names = {content["names"][at] for at in array("I", base64.b64decode(first["events"]["name"]))}
    assert {"0\nexpected gather", "0\nexpected compute"} <= names
    begins = array("d", base64.b64decode(first["events"]["begin"]))
    assert len(begins) % content["num_steps"] == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"time": null}',
        pytest.param("[" * 100_000, id="nested"),
        '{"time": {"seconds": NaN, "exposed_s": 0, "spans": []}}',
        '{"time": {"seconds": 1, "exposed_s": -1, "spans": []}}',
        '{"time": {"seconds": 1e999, "exposed_s": 0, "spans": []}}',
    ],
)
def test_a_plan_without_times_is_refused(folder: pathlib.Path, text: str) -> None:
    (folder / "plan.json").write_text(text)
    result = CliRunner().invoke(app, ["trace", str(folder), "--plan", str(folder / "plan.json")])
    assert result.exit_code == 1
    assert "--plan must be a file that" in result.output


def test_names_cannot_end_the_script_of_the_page(folder: pathlib.Path) -> None:
    trace = Trace.read(folder)
    bad = "</script><script>alert(1)</script>"
    record = trace.records[0]
    record.events = [event._replace(name=bad) for event in record.events]
    write_page(Trace.of(trace.records), folder / "trace.html")
    assert bad not in (folder / "trace.html").read_text()
    assert any(bad in name for name in content_of(folder / "trace.html")["names"])


def test_of_many_ranks_late_ones_are_shown_event_by_event(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace.read(folder)
    num_events = sum(len(record.events) for record in trace.records)
    monkeypatch.setattr("shardkit.tracing.page._MAX_EVENTS", num_events // 2)
    write_page(trace, folder / "trace.html")
    ranks = content_of(folder / "trace.html")["ranks"]
    assert [rank["rank"] for rank in ranks if rank["events"]] == [0, LATE]
    assert all(len(base64.b64decode(rank["parts"])) == 1000 for rank in ranks)
    assert chosen_ranks(trace, 3) == [0, 1, LATE]


def test_perfettos_file_has_a_process_for_each_rank(folder: pathlib.Path) -> None:
    assert CliRunner().invoke(app, ["trace", str(folder)]).exit_code == 0
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    begun = [(e["pid"], e["tid"], e["id"]) for e in events if e["ph"] == "b"]
    ended = [(e["pid"], e["tid"], e["id"]) for e in events if e["ph"] == "e"]
    assert sorted(begun) == sorted(ended)
    assert any(event["name"].startswith("rank 2: ") for event in events)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_the_picture_is_a_step_of_each_rank(folder: pathlib.Path) -> None:
    trace = Trace.read(folder)
    draw(trace, folder / "trace.svg", 3)
    # Texts are shapes; a comment in front of each says what it is.
    shown = (folder / "trace.svg").read_text()
    for text in ("rank 0", "rank 3", "ms of step 3", "waits for a rank that is late"):
        assert f"<!-- {text} -->" in shown
    num_slices = sum(each.step == 3 for of in trace.slices.values() for each in of)
    slices = {
        key: color for key, (color, _) in LOOKS.items() if key not in {"gather", "reduce", "memory"}
    }
    keys = {color_key(each.cause) for of in trace.slices.values() for each in of if each.step == 3}
    # The legend has each key once.
    assert sum(shown.count(f"fill: {color}") for color in slices.values()) == num_slices + len(keys)


def test_memory_is_drawn_from_the_begin_of_a_step_to_its_end() -> None:
    curve = [(0.0, 5), (1.0, 7), (2.5, 0), (4.0, 9)]
    assert curve_between(curve, 2.0, 3.0) == [(2.0, 7), (2.5, 0), (3.0, 0)]
    assert curve_between(curve, 3.0, 3.5) == [(3.0, 0), (3.5, 0)]
    assert curve_between(curve[1:], 0.0, 2.0) == [(1.0, 7), (2.0, 7)]
    assert curve_between([], 0.0, 1.0) == []


def test_a_png_is_drawn_where_it_is_asked_for(folder: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(folder), "--png", "--step", "3"])
    assert result.exit_code == 0, result.output
    assert (folder / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_files_are_written_without_an_output(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has none in a process that began without."""
    monkeypatch.setattr(sys, "stdout", None)
    app(["trace", str(folder)], standalone_mode=False)
    sys.stdout.close()
    assert (folder / "trace.html").exists()


def test_a_step_that_is_not_there_is_refused(folder: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(folder), "--step", "8"])
    assert result.exit_code == 2
    assert "got 8" in result.output


def test_an_empty_folder_is_named(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 1
    assert "must be a folder that shardkit.record has written" in result.output


def test_ranks_that_recorded_less_leave_the_others_to_be_shown(folder: pathlib.Path) -> None:
    """A rank that crashed at its start has a header only, or fewer steps than the others."""
    first, second, *_ = SyntheticRun(4, num_steps=2).records()
    RecordFile(folder, first.header)
    RecordFile(folder, second.header).write(second.events)
    result = CliRunner().invoke(app, ["trace", str(folder)])
    assert result.exit_code == 0, result.output
    assert "the records of 2 ranks were cut off, rank 0 first" in result.output
    draw(Trace.read(folder), folder / "trace.svg")
    shown = (folder / "trace.svg").read_text()
    assert "<!-- rank 0 -->" not in shown
    assert "<!-- rank 2 -->" in shown
