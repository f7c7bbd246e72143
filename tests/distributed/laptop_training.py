"""A script that trains, saves in each way, and goes on from there."""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit import checkpoint, fully_shard


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)), nn.Linear(600, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(2, 600)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(folder: pathlib.Path) -> None:
    model, optimizer = make()
    losses = [step(model, optimizer) for _ in range(2)]
    checkpoint.save(folder / "a", model, optimizer)
    checkpoint.save(folder / "a", model, optimizer, overwrite=True)
    checkpoint.async_save(folder / "b", model, optimizer, keep_last=1).result()
    checkpoint.save_full(folder / "model.pt", model)
    losses.append(step(model, optimizer))
    found = checkpoint.latest(folder)
    assert found is not None
    model, optimizer = make()
    checkpoint.load(found, model, optimizer)
    checkpoint.load_full(folder / "model.pt", model)
    with shardkit.record(model, folder / "trace"):
        losses.append(step(model, optimizer))
    torch.save((found.name, losses), folder / f"rank-{dist.get_rank()}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
