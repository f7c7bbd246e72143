"""Ranks that are threads of one process, as PyTorch's own tests have them: they train as others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

SCRIPT = """
import faulthandler
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import run_tests

from shardkit import fully_shard, init_device_mesh

faulthandler.dump_traceback_later(80, exit=True)
sys.setswitchinterval(1e-6)  # The threads take turns at as many places as they can.


def batch(step, rank):
    return torch.randn(8, 17, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Threads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def make(self):
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 5)).double()
        for param in model.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator))
        return model

    def compare(self, mesh):
        plain, model = self.make(), self.make()
        for layer in model:
            fully_shard(layer, mesh=mesh) if len([*layer.parameters()]) else None
        fully_shard(model, mesh=mesh)
        train(model, [batch(step, dist.get_rank()) for step in range(4)])
        train(plain, [torch.cat([batch(step, r) for r in range(4)]) for step in range(4)])
        for sharded, param in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), param.data, rtol=1e-9, atol=1e-12)
        self.assertGreater(nn.utils.get_total_norm([*model.parameters()]).item(), 0)

    def test_one_axis(self):
        self.compare(init_device_mesh("cpu", (4,)))

    def test_two_axes(self):
        self.compare(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


if __name__ == "__main__":
    run_tests()
"""


def test_ranks_as_threads(tmp_path) -> None:  # noqa: ANN001
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,  # With CI torch writes its results as XML, by another package.
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr
