"""Ranks that part from each other: all are told who, where and when, within seconds."""

from __future__ import annotations

import math
import time
import typing

import parting_cases
import pytest
from parting_cases import IN_OWN_PROCESS, IN_PROCESS, LARGE, SMALL, part

from launching import ASK_SOON, start_ranks
from shardkit import RankMismatchError

if typing.TYPE_CHECKING:
    import workers
    from workers import Spawn

LIMIT_S = 30
FOUND_BEFORE = ("ranks have different models", "optimizers differ between ranks")
"""What says by other words what ranks did differently."""

PARTING = pytest.mark.parting
RUNS = [
    pytest.param((2,), SMALL, True, id="2 ranks, later"),
    pytest.param((4,), SMALL, True, id="4 ranks, later", marks=PARTING),
    pytest.param((2, 2), LARGE, False, id="2x2 ranks, large groups, at first", marks=PARTING),
]


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.parametrize(("mesh_shape", "sizes", "is_late"), RUNS)
def test_all_ranks_are_told_who_parted(
    spawn_errors: Spawn, name: str, mesh_shape: tuple[int, ...], sizes: typing.Any, is_late: bool
) -> None:
    world_size = math.prod(mesh_shape)
    started = time.monotonic()
    errors: list[workers.Raised | None] = spawn_errors(
        late_or_not, world_size, name, mesh_shape, sizes, is_late, timeout_s=LIMIT_S
    )
    assert time.monotonic() - started < LIMIT_S
    said = IN_PROCESS[name][1]
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} went on"
        # Also on a rank in a barrier of its own, which ends in an error of torch's.
        assert error.type_name == "RankMismatchError", error.traceback
        assert "Application timeout" not in error.traceback
        # Some of these name positions in the process group.
        if not any(text in error.message for text in FOUND_BEFORE):
            assert said in error.message, error.message
            assert f"rank {world_size - 1}" in error.message, error.message


def late_or_not(
    name: str, mesh_shape: tuple[int, ...], sizes: tuple[int, ...], is_late: bool
) -> None:
    part(name, -1, mesh_shape, sizes, is_late=is_late)


@PARTING
def test_the_line_of_one_forward_more_is_shown(spawn_errors: Spawn) -> None:
    """It issues what the next forward of the others does, so ranks part only after that."""
    errors = spawn_errors(late_or_not, 2, "evaluate", (2,), SMALL, True, timeout_s=LIMIT_S)
    for error in errors:
        assert error is not None
        assert "was not called at the same line:" in error.message, error.message
        [said] = [line for line in error.message.splitlines() if line.startswith("  rank 1: parti")]
        assert "`loss`, called at parting_cases.py:" in said
        assert ", `evaluate`, called at" in said


@pytest.mark.parametrize(
    "name", ["catch_an_exception_in_forward", "catch_an_exception_in_backward"]
)
def test_an_exception_that_one_rank_catches_is_told_soon(spawn_errors: Spawn, name: str) -> None:
    """Long before a rank that computes is asked for."""
    errors = spawn_errors(part_and_tell_when, 2, name, timeout_s=LIMIT_S)
    for error in errors:
        assert error is not None
        seconds, _, said = error.message.partition(" ")
        assert said == "RankMismatchError"
        assert float(seconds) < 6  # 2 and the look, on a machine that is busy.


def part_and_tell_when(name: str) -> None:
    """Train with the watch as it is by default; say how long after the exception ranks go on."""
    run = parting_cases.Run(-1, (2,), SMALL)
    run.shard()
    for _ in range(4):
        run.step()
    began = time.monotonic()
    try:
        IN_PROCESS[name][0](run)
        for _ in range(4):
            run.step()
    except RankMismatchError as error:
        msg = f"{time.monotonic() - began:.2f} {type(error).__name__}"
        raise RuntimeError(msg) from None


@PARTING
@pytest.mark.parametrize("name", IN_OWN_PROCESS)
@pytest.mark.parametrize(
    ("world_size", "culprit", "when"),
    [(2, -1, "first"), (2, 0, "late"), (4, -1, "late")],
    ids=["2 ranks, at first", "rank 0 of 2, later", "4 ranks, later"],
)
def test_all_ranks_are_told_who_left(name: str, world_size: int, culprit: int, when: str) -> None:
    """Rank 0 holds the store: where it is killed nobody can say more than that."""
    program = (parting_cases.__file__, name, str(culprit), when)
    ranks = start_ranks(program, world_size, limit_s=LIMIT_S + 15, **ASK_SOON)
    odd = culprit % world_size
    said = IN_OWN_PROCESS[name][1]
    if culprit == 0 and name == "be_killed":
        said = "the store of the process group does not answer"
    for rank, ended in enumerate(ranks):
        if rank == odd:
            continue
        assert ended.seconds < LIMIT_S + 10, ended.output  # And the start of its process.
        assert ended.code not in (0, None), ended.output
        assert "RankMismatchError" in ended.output, ended.output
        assert said in ended.output, ended.output
        assert f"rank {odd}" in ended.output, ended.output
