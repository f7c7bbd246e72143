"""A training in which one rank's optimizer raises: run as a process of each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardkit import fully_shard, init_device_mesh
from shardkit.optim import MatrixOptimizer


class Failing(torch.optim.SGD):
    """Raises on rank 1 in the third step."""

    num_steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        Failing.num_steps += 1
        if Failing.num_steps == 3 and dist.get_rank() == 1:
            msg = "no eigenvalues"
            raise ArithmeticError(msg)
        super().step(closure)


def main() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh)
    optimizer = MatrixOptimizer(model.parameters(), Failing, lr=0.1)
    for _ in range(5):
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
