"""On a card: two ranks over NCCL, which train, and which part from each other."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import nccl_ranks
import parting_cases
import pytest

import one_card
from launching import ASK_SOON, Ended, start_ranks

pytestmark = one_card.NEEDS_CARD

HERE = pathlib.Path(__file__).parent
LIMIT_S = 110
STOPPED_S = 50
PARTED_S = 100  # Where a peer has gone, torch takes a minute to end NCCL after the error.


def on_hosts_of_their_own(rank: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"host-{rank}"}


def start_pair(*program: str, limit_s: float = LIMIT_S, **more: str) -> list[Ended]:
    path = os.pathsep.join((str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    return start_ranks(
        program,
        2,
        limit_s=limit_s,
        by_rank=on_hosts_of_their_own,
        PYTHONPATH=path,
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        **ASK_SOON,
        **more,
    )


@pytest.fixture(scope="module", autouse=True)
def pair_works() -> None:
    """Skip where NCCL does not take two ranks on one card."""
    for ended in start_pair(nccl_ranks.__file__, "works"):
        if ended.code != 0:
            pytest.skip(f"NCCL takes no two ranks on this card: {ended.output[-500:]}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("mlp", "2"),
        ("gpt", "2"),
        ("gpt", "1,2"),
        ("gpt", "2,1"),
        ("gpt", "bf16"),
        ("gpt", "meshes"),
        ("random", "0,24"),
        ("captured", "zero3,1"),
        ("captured", "zero3,3"),
        ("captured", "zero2,3,1,2"),
        ("captured", "bf16,1,2,1"),
    ],
    ids=" ".join,
)
def test_two_ranks_train_as_one(arguments: tuple[str, ...]) -> None:
    for ended in start_pair(nccl_ranks.__file__, *arguments):
        assert ended.code == 0, ended.output
        assert nccl_ranks.DONE in ended.output
        assert "CUDA error" not in ended.output, ended.output


SAID = {
    **{name: said for name, (_, said) in parting_cases.IN_OWN_PROCESS.items()},
    **{name: said for name, (_, said) in parting_cases.IN_PROCESS.items()},
}


LATER = [name for name in SAID if name != "be_killed"]
AT_FIRST = ("skip_a_block", "compute_a_norm", "evaluate", "end")


@pytest.mark.parametrize(
    ("name", "when"), [*((name, "late") for name in LATER), *((name, "first") for name in AT_FIRST)]
)
def test_ranks_that_part_are_told_and_end(name: str, when: str) -> None:
    """The other rank's card waits in a collective that never ends, unless it is aborted."""
    told = start_pair(parting_cases.__file__, name, "1", when, "cuda")[0]
    assert told.seconds < PARTED_S, told.output
    assert told.code not in (0, None), told.output
    assert SAID[name] in told.output, told.output
    assert "rank 1" in told.output or "on position 1" in told.output, told.output


def test_a_rank_that_is_stopped_is_told_and_nothing_ends() -> None:
    """A person may look at it in a debugger."""
    told = start_pair(parting_cases.__file__, "be_stopped", "1", "late", "cuda", limit_s=STOPPED_S)[
        0
    ]
    assert told.code is None, told.output
    assert "rank 1 is stopped (SIGSTOP, a debugger)" in told.output, told.output
    assert "The run goes on." in told.output, told.output


def test_a_rank_that_is_killed_ends_the_other() -> None:
    """NCCL notices at once that a connection is gone; then torch ends the process by itself."""
    told = start_pair(parting_cases.__file__, "be_killed", "1", "late", "cuda")[0]
    assert told.seconds < PARTED_S, told.output
    assert told.code not in (0, None), told.output
    assert "is gone" in told.output or "NCCL" in told.output, told.output


def test_why_reads_the_flight_recorder(tmp_path: pathlib.Path) -> None:
    """After the fact: the diagnosis that the ranks left behind."""
    start_pair(parting_cases.__file__, "evaluate", "1", "late", "cuda", TMPDIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "why"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "in forward" in done.stdout, done.stdout + done.stderr
    assert "NCCL, " in done.stdout, done.stdout
    assert "collectives issued" in done.stdout
