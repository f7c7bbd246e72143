"""Lines of ranks on one terminal, and what is shown last where they fail."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import typing

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardkit import _cli, launch
from shardkit.launch import Failure, failures_of, report

if typing.TYPE_CHECKING:
    import pathlib

    import pytest


def test_lines_of_ranks_do_not_mix() -> None:
    stream = io.StringIO()
    lines = launch.RankLines(stream, colour=False)
    for piece in ("[rank 0] a", "[rank 1] one\n", "[rank 0] b\n", "of the agent\n", "[rank 1] end"):
        lines.write(piece)
    assert stream.getvalue() == "[rank 1] one\n[rank 0] ab\nof the agent\n"
    lines.close()
    assert stream.getvalue().endswith("[rank 1] end\n")


def test_nothing_is_written_past_the_lines_of_ranks() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    lines = launch.RankLines(stream, colour=False)
    assert [hasattr(lines, name) for name in ("buffer", "writelines", "detach")] == [False] * 3
    print("of the agent", file=lines, flush=True)
    assert stream.buffer.getvalue() == b"of the agent\n"
    assert (lines.encoding, lines.isatty()) == ("utf-8", False)


def test_what_a_terminal_cannot_show_is_written_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    def launched(_: object) -> int:
        launch.RankLines(sys.stdout, colour=False).write("[rank 0] caf\xe9\n")
        return 0

    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(_cli, "launch", launched)
    _cli.app(["launch", "train.py"], standalone_mode=False)
    assert stream.buffer.getvalue() == b"[rank 0] caf\\xe9\n"


def test_each_rank_has_a_colour_of_its_own() -> None:
    stream = io.StringIO()
    lines = launch.RankLines(stream, colour=True)
    for rank in range(12):
        lines.write(f"[rank {rank}] x\n")
    colours = {line.split("[rank")[0] for line in stream.getvalue().splitlines()}
    assert len(colours) == 12
    assert stream.getvalue().splitlines()[0].endswith("[rank 0]\x1b[0m x")


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    assert not launch.wants_colour("auto", stream)
    assert launch.wants_colour("always", stream)
    monkeypatch.setattr(stream, "isatty", lambda: True)
    assert launch.wants_colour("auto", stream)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not launch.wants_colour("auto", stream)


# --- failures -----------------------------------------------------------------------------------


def error_file(logs: pathlib.Path, attempt: int, rank: int, at: float, message: str) -> str:
    """Leave what torchrun's `record` leaves, at a time."""
    file = logs / "run" / f"attempt_{attempt}" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    trace = f"Traceback (most recent call last):\n{message}\n"
    extra = {"py_callstack": trace, "timestamp": str(int(at))}
    file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    os.utime(file, (at, at))
    return str(file)


def child_failed(*failures: ProcessFailure) -> ChildFailedError:
    """Return torchrun's error of the second of two hosts with two ranks each."""
    return ChildFailedError("train.py", {2 + each.local_rank: each for each in failures})


def test_the_first_rank_comes_last_though_torchrun_saw_another(tmp_path: pathlib.Path) -> None:
    error_file(tmp_path, 0, 0, 1.0, "OldError: of an attempt before")
    error_file(tmp_path, 1, 1, 100.2, "ValueError: bad batch")  # It still runs.
    file = error_file(tmp_path, 1, 0, 100.7, "RuntimeError: Connection closed by peer")
    found = failures_of(child_failed(ProcessFailure(0, 11, 1, file)), tmp_path)
    assert [(each.rank, each.local_rank) for each in found] == [(3, 1), (2, 0)]
    text = report(found, 2)
    assert "2 of 2 ranks" in text
    assert "first rank 3 at" in text
    assert "rank 2: RuntimeError: Connection closed by peer" in text
    assert text.endswith("rank 3:\nTraceback (most recent call last):\nValueError: bad batch")


def test_who_was_only_told_comes_after_who_was_killed(tmp_path: pathlib.Path) -> None:
    diagnosis = "RankMismatchError: rank 3 is gone\n  look there"
    file = error_file(tmp_path, 0, 0, 5.0, diagnosis)
    killed = ProcessFailure(1, 12, -signal.SIGKILL, str(tmp_path / "nothing"))
    found = failures_of(child_failed(ProcessFailure(0, 11, 1, file), killed), tmp_path)
    text = report(found, 2)
    assert "What rank 2 was told:\nrank 3 is gone\n  look there" in text
    assert text.endswith(
        "rank 3:\nprocess 12 was ended by SIGKILL. The system does that where memory runs out, "
        "torchrun if a rank ignores SIGTERM."
    )


def test_a_diagnosis_of_all_is_shown_once(tmp_path: pathlib.Path) -> None:
    files = [
        error_file(tmp_path, 0, rank, 5.0 + rank, "RankMismatchError: ranks parted")
        for rank in (0, 1)
    ]
    failures = [ProcessFailure(rank, 11, 1, file) for rank, file in enumerate(files)]
    text = report(failures_of(child_failed(*failures), tmp_path), 2)
    assert text.count("ranks parted") == 1
    assert text.endswith("RankMismatchError: ranks parted")


def test_a_failure_without_a_word_is_listed(tmp_path: pathlib.Path) -> None:
    first = error_file(tmp_path, 0, 0, 5.0, "ValueError: bad batch")
    second = error_file(tmp_path, 0, 1, 6.0, "")  # A script may write its file itself.
    failures = [ProcessFailure(rank, 11, 1, file) for rank, file in enumerate((first, second))]
    assert "rank 3: no message\n" in report(failures_of(child_failed(*failures), tmp_path), 2)


def test_ranks_that_torchrun_ended_have_not_failed(tmp_path: pathlib.Path) -> None:
    nothing = str(tmp_path / "nothing")
    ended = ProcessFailure(0, 11, -signal.SIGTERM, nothing)
    exited = ProcessFailure(1, 12, 3, nothing)
    assert [each.rank for each in failures_of(child_failed(ended, exited), tmp_path)] == [3]
    assert "exit status 3" in report(failures_of(child_failed(ended, exited), tmp_path), 2)
    only = failures_of(child_failed(ended), tmp_path)
    assert isinstance(only[0], Failure)
    assert "SIGTERM" in only[0].message


def test_a_rank_that_was_ended_while_it_wrote_why_does_not_hide_the_first(
    tmp_path: pathlib.Path,
) -> None:
    file = error_file(tmp_path, 0, 0, 5.0, "ValueError: bad batch")
    error_file(tmp_path, 0, 1, 5.1, "")
    next(tmp_path.glob("*/*/1/error.json")).write_text("", encoding="utf-8")
    found = failures_of(child_failed(ProcessFailure(0, 11, 1, file)), tmp_path)
    assert [each.rank for each in found] == [2]
