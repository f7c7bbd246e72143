"""The files by which another terminal finds a run on this host, and what became of the last one."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import typing

import pytest

from shardkit._processes import machine_id, start_of
from shardkit.backends.watch import runs
from shardkit.backends.watch.status import RankStatus

if typing.TYPE_CHECKING:
    from pathlib import Path

NO_PROCESS = 2**22 + 1  # Above what Linux gives.


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "folder", lambda: tmp_path / "runs")
    return tmp_path / "runs"


def run(name: str, rank: int = 0, pid: int | None = None, started: float = 1.0) -> runs.RankFile:
    return runs.RankFile(
        name, "localhost", 29500, 2, rank, os.getpid() if pid is None else pid, started
    )


def test_ranks_that_run_are_found_the_latest_run_first() -> None:
    for each in (run("old", 1), run("old", 0), run("new", 0, started=2.0)):
        runs.register(each)
    assert [(each.name, each.rank) for each in runs.running()] == [
        ("new", 0),
        ("old", 0),
        ("old", 1),
    ]


def test_files_of_processes_that_are_gone_go() -> None:
    path = runs.register(run("gone", pid=NO_PROCESS))
    assert runs.running() == []
    assert path is not None
    assert not path.exists()


def test_a_process_that_took_over_the_id_of_a_rank_is_none_of_the_run() -> None:
    pid = os.getpid()
    runs.register(dataclasses.replace(run("this", 0), start=start_of(pid)))
    runs.register(dataclasses.replace(run("that", 0), start=f"{start_of(pid)}0"))
    assert [each.name for each in runs.running()] == ["this"]


def test_the_next_run_removes_files_of_killed_ones(place: Path) -> None:
    """Also if nobody asks for them: a launcher kills ranks, which then remove nothing."""
    for number in range(3):
        runs.register(run(f"killed{number}", pid=NO_PROCESS))
    runs.register(run("next"))
    assert [each.name for each in place.iterdir()] == ["next-0.run"]


def test_ranks_find_what_a_killed_rank_of_their_run_has_left() -> None:
    """So they know its process, and see that it is gone."""
    runs.register(dataclasses.replace(run("this", 1), machine=machine_id()))
    runs.register(dataclasses.replace(run("this", 2, pid=NO_PROCESS), machine=machine_id()))
    assert [each.rank for each in runs.running()] == [1]
    found = runs.rank_here("this", 2)
    assert found is not None
    assert found.pid == NO_PROCESS


def test_a_file_that_cannot_be_read_is_passed_over(place: Path) -> None:
    runs.register(run("good"))
    (place / "bad-0.run").write_text("{")
    assert [each.name for each in runs.running()] == ["good"]


def test_a_host_without_a_place_for_files_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(runs, "folder", lambda: tmp_path / "file" / "runs")
    assert runs.register(run("nowhere")) is None
    runs.keep_diagnosis("nowhere", "text", [], of_all_ranks=True)
    assert runs.last_diagnosis() is None


def test_the_last_diagnosis_is_found_with_its_answers(place: Path) -> None:
    assert runs.last_diagnosis() is None
    stopped = [RankStatus(0, "host", 7, "stopped")]
    runs.keep_diagnosis("first", "rank 1 is gone", [], of_all_ranks=True)
    runs.keep_diagnosis("second", "rank 0 is stopped", stopped, of_all_ranks=True)
    os.utime(place / "first.diagnosis", (1, 1))
    found = runs.last_diagnosis()
    assert found is not None
    assert found["text"] == "rank 0 is stopped"
    assert [RankStatus.load(text).state for text in found["answers"]] == ["stopped"]


@pytest.mark.parametrize("first", [True, False])
def test_what_one_rank_knows_does_not_replace_what_all_answered(place: Path, first: bool) -> None:
    for of_all_ranks in (first, not first):
        answers = [RankStatus(rank) for rank in range(1 + of_all_ranks)]
        runs.keep_diagnosis("run", "rank 1 is gone", answers, of_all_ranks=of_all_ranks)
    [path] = place.glob("*.diagnosis")
    found = runs.last_diagnosis()
    assert found is not None, path
    assert len(found["answers"]) == 2


def test_only_the_latest_diagnoses_are_kept(place: Path) -> None:
    for number in range(30):
        runs.keep_diagnosis(f"run-{number}", "text", [], of_all_ranks=True)
    assert len(list(place.glob("*.diagnosis"))) == 20


def test_others_cannot_read_the_folder(place: Path) -> None:
    runs.register(run("mine"))
    assert place.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o720])
def test_a_folder_that_others_may_use_is_not_used(place: Path, mode: int) -> None:
    place.mkdir(mode=0o700)
    place.chmod(mode)
    assert runs.register(run("mine")) is None
    runs.keep_diagnosis("mine", "text", [], of_all_ranks=True)
    assert [*place.iterdir()] == []


def test_a_link_is_not_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    assert runs.register(run("mine")) is None
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_a_pipe_is_not_read(place: Path) -> None:
    runs.register(run("good"))
    os.mkfifo(place / "bad-0.run")
    assert [each.name for each in runs.running()] == ["good"]


def test_the_process_of_a_rank_is_found_on_its_machine_only() -> None:
    runs.register(dataclasses.replace(run("here", 3), machine=machine_id()))
    runs.register(dataclasses.replace(run("there", 3), machine="elsewhere"))
    found = runs.rank_here("here", 3)
    assert found is not None
    assert found.pid == os.getpid()
    assert runs.rank_here("there", 3) is None
    assert runs.rank_here("here", 4) is None


def test_no_name_of_the_user_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert runs.folder().name == "shardkit-54321"


def test_a_host_without_a_folder_for_temporary_files_has_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose file system is read-only."""

    def fail() -> typing.NoReturn:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert runs.register(run("mine")) is None
    assert runs.running() == []
    runs.keep_diagnosis("mine", "text", [], of_all_ranks=True)
