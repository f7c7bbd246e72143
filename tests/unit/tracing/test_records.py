"""A rank's file: what is written is read, in rank 0's clock, also where the file was cut off."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import typing

import pytest
from synthetic_runs import SyntheticRun, shifted

from shardkit import StateError
from shardkit.tracing.clocks import Clock
from shardkit.tracing.records import RankHeader, RankRecord, RecordFile, read_folder, read_record

if typing.TYPE_CHECKING:
    import pathlib


def write(folder: pathlib.Path, record: RankRecord, *, close: bool = True) -> None:
    file = RecordFile(folder, record.header)
    half = len(record.events) // 2
    file.write(record.events[:half])
    file.write(record.events[half:])
    if close:
        file.close(record.header)


def test_what_is_written_is_read(tmp_path: pathlib.Path) -> None:
    records = SyntheticRun(2, 2).records()
    for record in records:
        write(tmp_path, record)
    found = read_folder(tmp_path)
    assert [each.header for each in found] == [each.header for each in records]
    for one, other in zip(found, records, strict=True):
        assert one.is_whole
        assert len(one.events) == len(other.events)
        for event, known in zip(one.events, other.events, strict=True):
            assert event.begin == pytest.approx(known.begin, abs=2e-9)
            assert event.end == pytest.approx(known.end, abs=2e-9)
            assert event._replace(begin=0, end=0) == known._replace(begin=0, end=0)


def test_times_are_those_of_rank_0(tmp_path: pathlib.Path) -> None:
    record = SyntheticRun(2).records()[1]
    write(tmp_path, shifted(record, 1234.5))
    [found] = read_folder(tmp_path)
    for event, known in zip(found.events, record.events, strict=True):
        assert event.begin == pytest.approx(known.begin, abs=1e-8)


def test_a_file_that_was_cut_off_is_read_up_to_there(tmp_path: pathlib.Path) -> None:
    record = SyntheticRun(2).records()[0]
    write(tmp_path, record, close=False)
    path = tmp_path / "rank-0.jsonl.gz"
    found = read_record(path)
    assert not found.is_whole
    assert len(found.events) == len(record.events)
    path.write_bytes(path.read_bytes()[:-20])
    half = found.events[: len(record.events) // 2]
    assert list(read_record(path).events) == half
    assert read_record(path).events[0] == half[0]


def test_a_file_may_be_cut_off_anywhere(tmp_path: pathlib.Path) -> None:
    write(tmp_path, SyntheticRun(2).records()[0], close=False)
    path = tmp_path / "rank-0.jsonl.gz"
    whole = path.read_bytes()
    begins = [found.start() for found in re.finditer(rb"\x1f\x8b\x08", whole)]
    assert len(begins) > 2
    for end in (0, begins[1] // 2):
        path.write_bytes(whole[:end])
        with pytest.raises(StateError, match="ends before its first event: the rank has died"):
            read_record(path)
    for begin in begins[1:]:
        path.write_bytes(whole[: begin + 1])  # One byte of a line that is compressed.
        assert not read_record(path).is_whole


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b'{"version": 2}', b"\xff", b'{"version": 2, "rank": 0, "clock": 3}'],
)
def test_what_is_no_record_is_named(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "rank-0.jsonl.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(StateError, match=r"rank-0\.jsonl\.gz is not a record of shardkit"):
        read_record(path)
    path.write_bytes(content)
    with pytest.raises(StateError, match="is not a record of shardkit"):
        read_record(path)


def test_numbers_of_names_that_are_not_there_are_named(tmp_path: pathlib.Path) -> None:
    write(tmp_path, SyntheticRun(2).records()[0])
    path = tmp_path / "rank-0.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    second = json.loads(lines[1])
    second["strings"] = []
    path.write_bytes(gzip.compress("\n".join([lines[0], json.dumps(second)]).encode()))
    with pytest.raises(StateError, match="is not a record"):
        read_record(path)


def test_a_folder_without_records_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StateError, match=r"must be a folder that shardkit\.record has written"):
        read_folder(tmp_path)


def test_records_of_two_runs_are_told_apart(tmp_path: pathlib.Path) -> None:
    write(tmp_path, SyntheticRun(2).records()[0])
    file = RecordFile(tmp_path, RankHeader(1, 4, clock=Clock()))
    file.close(RankHeader(1, 4))
    with pytest.raises(StateError, match=r"files of 2 records, of \[2, 4\] ranks"):
        read_folder(tmp_path)


def test_two_files_of_a_rank_are_told(tmp_path: pathlib.Path) -> None:
    for record in SyntheticRun(2).records():
        write(tmp_path, record)
    (tmp_path / "rank-1 copy.jsonl.gz").write_bytes((tmp_path / "rank-1.jsonl.gz").read_bytes())
    with pytest.raises(StateError, match=r"has two files of rank 1\. Keep one of them"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0</text><script>alert(1)</script>"},
        {"world_size": 10**12},
        {"rank": 2, "world_size": 2},
        {"axes": {"shard 2": "01"}},
    ],
    ids=["script", "memory", "no such rank", "axes"],
)
def test_a_header_that_no_rank_writes_is_refused(
    tmp_path: pathlib.Path, change: dict[str, typing.Any]
) -> None:
    write(tmp_path, SyntheticRun(2).records()[0])
    path = tmp_path / "rank-0.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lines[0] |= change
    lines[-1]["axes"] = change.get("axes", lines[-1]["axes"])
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    with pytest.raises(StateError, match="is not a record of shardkit"):
        read_record(path)


def test_what_a_terminal_would_obey_is_not_in_names(tmp_path: pathlib.Path) -> None:
    record = SyntheticRun(2).records()[0]
    named = [event._replace(name="\x1b]0;evil\x07") for event in record.events]
    write(tmp_path, dataclasses.replace(record, events=named))
    assert {event.name for event in read_record(tmp_path / "rank-0.jsonl.gz").events} == {
        "\ufffd]0;evil\ufffd"
    }


def test_files_of_two_records_are_told(tmp_path: pathlib.Path) -> None:
    first, second = SyntheticRun(2).records()
    write(tmp_path, first)
    write(
        tmp_path,
        dataclasses.replace(second, header=dataclasses.replace(second.header, run="older")),
    )
    with pytest.raises(StateError, match="has files of 2 records"):
        read_folder(tmp_path)
