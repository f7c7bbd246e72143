"""A script that makes its process group by its mesh alone is started again by torchrun."""

from __future__ import annotations

import typing

import pytest

from launching import run_by_torchrun

if typing.TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.parting

SCRIPT = """
import os, signal, time
import torch
from torch import nn
from shardkit import fully_shard, init_device_mesh

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt and os.environ["RANK"] == "0":
    time.sleep(2)  # Rank 1 looks for its address before it has a new one.
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh)
for step in range(3):
    model(torch.ones(2, 8)).sum().backward()
    if attempt == 0 and step == 1 and mesh.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"rank {mesh.get_rank()} is done at attempt {attempt}")
"""


def test_ranks_that_die_are_started_again(tmp_path: Path) -> None:
    done = run_by_torchrun(SCRIPT, tmp_path, "--max-restarts", "1")
    for rank in range(2):
        assert f"rank {rank} is done at attempt 1" in done.stdout, done.stdout + done.stderr
