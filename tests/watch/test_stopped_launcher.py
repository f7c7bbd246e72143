"""A launcher that is stopped, as by Ctrl-Z, and its store with it; its ranks are not, and go on."""

from __future__ import annotations

import typing

import pytest

from launching import ASK_SOON, run_by_torchrun

if typing.TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.parting

SCRIPT = """
import os, signal, subprocess, sys, time
import torch
from torch import nn
from shardkit import fully_shard, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh)
for step in range(4):
    if step == 2 and mesh.get_rank() == 1:
        launcher = os.getppid()
        going_on = f"import os, time; time.sleep(18); os.kill({launcher}, 18)"
        with subprocess.Popen([sys.executable, "-c", going_on]):
            os.kill(launcher, signal.SIGSTOP)
    model(torch.ones(2, 8)).sum().backward()
print(f"rank {mesh.get_rank()} is done")
torch.distributed.destroy_process_group()
"""


def test_ranks_go_on_while_their_launcher_is_stopped(tmp_path: Path) -> None:
    done = run_by_torchrun(SCRIPT, tmp_path, SHARDKIT_SILENT_AFTER_S="5", **ASK_SOON)
    for rank in range(2):
        assert f"rank {rank} is done" in done.stdout, done.stdout + done.stderr
    assert "rank 0, or the launcher, which holds it, may be stopped, or very busy" in done.stderr
