"""Ranks that part from each other: all are told who, where and when, within seconds."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
import typing

import parting_cases
import pytest
from parting_cases import IN_OWN_PROCESS, IN_PROCESS, LARGE, SMALL, part

if typing.TYPE_CHECKING:
    import workers
    from workers import Spawn

LIMIT_S = 30

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
    in_a_barrier = 0
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} went on"
        if error.type_name != "RankMismatchError":  # A barrier of the user's own is torch's.
            assert "barrier" in error.traceback, error.traceback
            in_a_barrier += 1
            continue
        if "ranks have different models" not in error.message:  # That names positions.
            assert said in error.message, error.message
            assert f"rank {world_size - 1}" in error.message, error.message
    assert in_a_barrier < world_size


def late_or_not(
    name: str, mesh_shape: tuple[int, ...], sizes: tuple[int, ...], is_late: bool
) -> None:
    part(name, -1, mesh_shape, sizes, is_late=is_late)


class Ended(typing.NamedTuple):
    """How a process ended: its output, and after how long."""

    code: int | None
    output: str
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what a launcher sets."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "SHARDKIT_ASK_AFTER_S": "2",
    }


def start_ranks(world_size: int, *arguments: str) -> list[Ended]:
    """Run `parting_cases` in processes of their own, as a launcher without a store starts them."""
    port = free_port()
    command = [sys.executable, parting_cases.__file__, *arguments]
    pipes: dict[str, typing.Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [
        subprocess.Popen(command, env=environment_of(rank, world_size, port), text=True, **pipes)
        for rank in range(world_size)
    ]
    started = time.monotonic()
    ended: dict[int, float] = {}
    while len(ended) < world_size and time.monotonic() - started < LIMIT_S + 15:
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic() - started
        time.sleep(0.1)
    result = []
    for rank, process in enumerate(processes):
        code = process.poll()
        if code is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        output = process.communicate()[0]
        result.append(Ended(code, output, ended.get(rank, math.inf)))
    return result


@PARTING
@pytest.mark.parametrize("name", IN_OWN_PROCESS)
@pytest.mark.parametrize(
    ("world_size", "culprit", "when"),
    [(2, -1, "first"), (2, 0, "late"), (4, -1, "late")],
    ids=["2 ranks, at first", "rank 0 of 2, later", "4 ranks, later"],
)
def test_all_ranks_are_told_who_left(name: str, world_size: int, culprit: int, when: str) -> None:
    """Rank 0 holds the store: where it is killed or stopped, nobody can say more than that."""
    ranks = start_ranks(world_size, name, str(culprit), when)
    odd = culprit % world_size
    said = IN_OWN_PROCESS[name][1]
    if culprit == 0 and name in ("be_killed", "be_stopped"):
        said = "the store of the process group does not answer"
    for rank, ended in enumerate(ranks):
        if rank == odd:
            continue
        assert ended.seconds < LIMIT_S + 10, ended.output  # And the start of its process.
        assert ended.code not in (0, None), ended.output
        assert "RankMismatchError" in ended.output, ended.output
        assert said in ended.output, ended.output
        assert f"rank {odd}" in ended.output, ended.output
