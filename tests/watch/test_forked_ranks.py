"""Ranks that multiprocessing starts end as a script does, whatever the method."""

from __future__ import annotations

import os
import subprocess
import sys
import typing

import pytest

from launching import free_port

if typing.TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import multiprocessing, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from shardkit import fully_shard, init_device_mesh

METHOD, PORT, HOW = sys.argv[1:]


def work(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    if rank == 1 and HOW == "raises":
        raise ValueError("no data")
    if rank == 1:
        time.sleep(1.5)
    if HOW == "raises":
        model(torch.ones(2, 8)).sum().backward()
    if HOW == "destroys":
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    context = multiprocessing.get_context(METHOD)
    ranks = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print([rank.exitcode for rank in ranks])
"""


def run(folder: Path, method: str, how: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), method, str(free_port()), how],
        env={**os.environ, "OMP_NUM_THREADS": "1", "SHARDKIT_ASK_AFTER_S": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("how", ["destroys", "ends"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_rank_with_the_store_waits_for_the_others(
    tmp_path: Path, method: str, how: str
) -> None:
    """Else torch complains on the others that the store is gone. Notebooks fork their ranks."""
    done = run(tmp_path, method, how)
    assert done.stdout == "[0, 0]\n", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_others_learn_of_the_exception_that_ends_a_rank(tmp_path: Path, method: str) -> None:
    done = run(tmp_path, method, "raises")
    assert done.stdout == "[1, 1]\n", done.stderr
    assert "rank 1 has ended by ValueError: no data at train.py:" in done.stderr
