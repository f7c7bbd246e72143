"""Runs that are killed, at random moments and at every step of a save, go on bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import typing

import pytest

from checkpoints import assert_same
from shardkit._progress import Meter
from shardkit.checkpoint._dcp.reader import DistributedCheckpoint
from shardkit.checkpoint._load import room

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TESTS = pathlib.Path(__file__).parents[1]
Call = typing.Callable[..., typing.Any]
SCHEDULES = int(os.environ.get("SHARDKIT_TEST_SCHEDULES", "12"))  # `nox -s fuzz`: 200


@pytest.fixture(scope="module")
def killable_runs() -> Iterator[Call]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, str(TESTS / "killable_runs.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def call(*args: object) -> typing.Any:
            process.stdin.write(json.dumps(args) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert "returned" in answer, answer.get("raised")
            return answer["returned"]

        yield call
        process.stdin.close()


def losses(folder: pathlib.Path, rank: int) -> dict[int, set[str]]:
    """Return the losses noted for each step: more than one if it was computed again."""
    found: dict[int, set[str]] = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, _, loss = line.partition(" ")
        found.setdefault(int(step), set()).add(loss)
    return found


def content(folder: pathlib.Path) -> dict[str, typing.Any]:
    """Return all entries of the last checkpoint, tensors whole."""
    path = folder / "checkpoints" / "end"
    source = DistributedCheckpoint(path, Meter(progress=False, what="", rank=0))
    targets = {name: room(info) for name, info in source.entries.items()}
    return source.fill(targets)


@pytest.mark.parametrize(("world_size", "kills", "steps"), [(1, 14, 90), (2, 6, 42)])
def test_killed_runs_end_as_if_they_had_not_been(
    killable_runs: Callable[..., typing.Any],
    tmp_path: pathlib.Path,
    world_size: int,
    kills: int,
    steps: int,
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    killable_runs("killed_training", str(alone), world_size, steps, 0, 0)
    outcome = killable_runs("killed_training", str(killed), world_size, steps, kills, 1)
    assert outcome["killed"] == kills
    if world_size == 1:  # About half of the kills fall into a save.
        assert outcome["torn"] > 0
    for rank in range(world_size):
        expected, found = losses(alone, rank), losses(killed, rank)
        assert len(expected) == steps
        assert found == expected
        noted = (killed / f"losses-{rank}").read_text().splitlines()
        assert len(noted) > steps  # Some steps were done again.
    assert_same(content(killed), content(alone))


def test_a_save_killed_at_any_step(killable_runs: Call, tmp_path: pathlib.Path) -> None:
    outcome = killable_runs("save_killed_everywhere", str(tmp_path))
    found = outcome["found"]
    assert len(found) > 15
    assert {tuple(pair) for pair in found} == {(1, 1), (2, 2)}
    first_new = found.index([2, 2])
    assert found == [[1, 1]] * first_new + [[2, 2]] * (len(found) - first_new)
    assert outcome["left"] == [["x"]] * len(found)


@pytest.mark.helpers
@pytest.mark.parametrize(("kind", "victim"), [("LOCAL", 0), ("LOCAL", 1), ("FULL", 0)])
def test_state_dicts_of_a_config_are_those_of_one_save(
    killable_runs: Call, tmp_path: pathlib.Path, kind: str, victim: int
) -> None:
    found = killable_runs(
        "configured_save_killed_everywhere", str(tmp_path), f"{kind}_STATE_DICT", victim
    )
    assert len(found) > 5
    assert {value for (value,) in found} == {1.0, 2.0}
    assert (found[0], found[-1]) == ([1.0], [2.0])
    if kind == "FULL":  # LOCAL counts once both ranks wrote; the other is killed now or then.
        first_new = found.index([2.0])
        assert found == [[1.0]] * first_new + [[2.0]] * (len(found) - first_new)


@pytest.mark.helpers
def test_jobs_that_save_to_one_path_and_are_killed(
    killable_runs: Call, tmp_path: pathlib.Path
) -> None:
    for outcome in killable_runs("jobs_at_one_path", str(tmp_path), list(range(SCHEDULES))):
        assert outcome["failed"] == [], outcome
        assert outcome["reader"] == 0, outcome
        if outcome["finished"]:
            assert outcome["found"] is not None, outcome
        assert outcome["found"] != "unreadable", outcome
        assert outcome["found"] not in outcome["outdated"], outcome  # The last that was finished.
        assert outcome["again"] == [0], outcome
        assert outcome["left"] == ["x"], outcome
