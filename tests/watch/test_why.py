"""``python -m shardkit why``: asks the ranks of a run from another process, or looks back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import typing

import parting_cases
import pytest

from launching import ASK_SOON, environment_of, free_port
from shardkit import StateError, _cli
from shardkit.backends.watch import runs
from shardkit.backends.watch.status import CodePlace, RankStatus

if typing.TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have no other runs on this host."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield runs.folder()
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def waiting_ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """Start two ranks, one of which sleeps while the other waits for it."""
    port = free_port()
    command = [sys.executable, parting_cases.__file__, "sleep", "-1", "late"]
    ranks = [
        subprocess.Popen(command, env=environment_of(rank, 2, port, **ASK_SOON), text=True)
        for rank in range(2)
    ]
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.wait()


def ask(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "why", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parting
def test_a_run_is_asked_from_another_process(waiting_ranks: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 60
    said = ""
    while not ("rank 0 waited" in said and "time.sleep(60)" in said):  # They start, and train.
        assert time.monotonic() < deadline, said
        time.sleep(1)
        said = ask("--pid", str(waiting_ranks[0].pid))
    assert "`sleep`" in said
    assert "for these ranks:" in said
    assert "time.sleep(60)" not in ask("--no-stacks")
    assert all(rank.poll() is None for rank in waiting_ranks), "the ranks go on"


def test_without_a_run_the_last_diagnosis_is_read(folder: Path) -> None:
    for number in range(30):
        answer = RankStatus(0, place=CodePlace("train.py", 7, "train"), stack="the stack\n")
        runs.keep_diagnosis(f"run{number}", f"diagnosis {number}", [answer], of_all_ranks=True)
        os.utime(folder / f"run{number}.diagnosis", (number, number))
    assert len([*folder.iterdir()]) <= 21
    found = _cli.why(None, stacks=True)
    assert found[1] == "diagnosis 29"
    assert "the stack" in found
    assert _cli.why(None, stacks=False) == found[:4]


def test_files_of_processes_that_are_gone_go(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path = runs.register(runs.RankFile("gone", "127.0.0.1", 1, 2, 0, dead.pid, time.time()))
    assert path is not None
    (folder / "torn.run").write_text(json.dumps({"name": "x"})[:5])
    assert runs.running() == []
    assert not path.exists()


def test_where_nothing_is_known_that_is_said() -> None:
    with pytest.raises(StateError, match="no run of shardkit is on this host"):
        _cli.why(None, stacks=False)


@pytest.mark.usefixtures("folder")
def test_a_process_that_is_no_rank_is_named_also_if_there_is_a_diagnosis() -> None:
    runs.keep_diagnosis("run", "diagnosis", [], of_all_ranks=True)
    with pytest.raises(StateError, match="process 1 is no rank of a run of shardkit on this host"):
        _cli.why(1, stacks=False)
