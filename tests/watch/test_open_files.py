"""The process that holds the store may open a file for each connection of the ranks."""

from __future__ import annotations

import resource
import subprocess
import sys
import typing

import pytest

from launching import run_by_torchrun
from shardkit._processes import allow_open_files

if typing.TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.parting

SCRIPT = """
import os, resource, time
import torch, torch.distributed as dist
from torch import nn
from shardkit import fully_shard, init_device_mesh

dist.init_process_group("gloo")
launcher, rank = os.getppid(), dist.get_rank()
if rank == 0:  # As in a large world whose ranks are all connected.
    open_now = len(os.listdir(f"/proc/{launcher}/fd"))
    _, hard = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, (open_now + 1, hard))
dist.barrier()
if rank == 0:
    time.sleep(3)  # The other one makes its mesh before.
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh)
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()
print(f"rank {rank} is done")
dist.destroy_process_group()
"""


def test_the_store_does_not_end_for_want_of_files(tmp_path: Path) -> None:
    done = run_by_torchrun(SCRIPT, tmp_path, limit_s=90)
    for rank in range(2):
        assert f"rank {rank} is done" in done.stdout, done.stdout + done.stderr


def test_a_process_gets_no_more_than_its_hard_limit() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as process:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (50, 200))
        assert allow_open_files(process.pid, 40) == 40
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (50, 200)
        assert allow_open_files(process.pid, 100) == 100
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (100, 200)
        assert allow_open_files(process.pid, 300) == 200
        process.kill()
    assert allow_open_files(process.pid, 300) == 300  # Nothing is known of it.
