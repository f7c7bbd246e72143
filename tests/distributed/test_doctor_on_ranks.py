"""``python -m shardkit doctor`` as people call it: alone, under torchrun, with ranks lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import typing

import pytest

from launching import environment_of, free_port

pytestmark = pytest.mark.helpers

DOCTOR = ("-m", "shardkit", "doctor", "--device", "cpu")
LIMIT_S = 240  # Of which most goes into importing torch on a busy machine.


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.run(
        [sys.executable, *words],
        env={
            **plain,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def errors_of(found: dict[str, typing.Any]) -> list[str]:
    return [item["check"] for item in found["findings"] if item["level"] == "error"]


def test_alone_it_starts_two_ranks_and_times_their_collectives() -> None:
    done = run(*DOCTOR, "--json", "--timeout", "60")
    found = json.loads(done.stdout)
    assert (found["world_size"], found["missing"], found["backend"]) == (2, [], "gloo")
    # A machine that runs tests may have little shared memory, or see no card: that is its own.
    assert done.returncode == int(bool(errors_of(found)))
    assert not {"collective", "unreachable", "silent"} & set(errors_of(found))
    timed = {(t["rank"], t["collective"], t["nbytes"]) for t in found["timings"]}
    names = ("all_reduce", "all_gather", "broadcast")
    assert timed == {(r, n, s) for r in range(2) for n in names for s in (4, 2**20, 2**24)}
    assert all(t["seconds"] > 0 for t in found["timings"])


def test_under_torchrun_rank_0_prints_for_the_group() -> None:
    done = run(*("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"), *DOCTOR)
    assert done.stdout.count("3 ranks, meeting at ") == 1, done.stderr[-3000:]
    assert "ranks 0, 1, 2" in done.stdout
    assert "connections (TCP): 6," in done.stdout
    assert re.search(r"all_reduce +16\.0 MiB +[\d.]+ ms", done.stdout)
    assert "XLA: " in done.stdout


def test_a_rank_that_does_not_come_is_named() -> None:
    environment = environment_of(0, 2, free_port())
    done = run(*DOCTOR, "--timeout", "2", **environment)
    assert done.returncode == 1
    assert "ERROR missing: rank 1: did not come; 1 of 2 ranks are there" in done.stdout


def test_a_rank_without_its_master_says_so_itself() -> None:
    environment = environment_of(1, 2, free_port())
    done = run(*DOCTOR, "--timeout", "2", **environment)
    assert done.returncode == 1
    assert "ERROR master-unreachable: rank 1 on " in done.stderr
