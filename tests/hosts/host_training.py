"""A training script as people write them, which goes on from its last checkpoint.

The batch of a step does not depend on the number of ranks: each takes its part of it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import time

import torch
import torch.distributed as dist
from torch import nn

from shardkit import checkpoint, fully_shard, init_device_mesh, strategy

BATCH, WIDTH = 24, 64


def batch_of(step: int) -> torch.Tensor:
    """Return the rows of all ranks."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0, help="seconds between two steps")
    parser.add_argument("--pause-at", type=int, default=0, help="from this step on")
    parser.add_argument("--hybrid", action="store_true", help="one copy of the model on each host")
    parser.add_argument("--ranks-per-copy", type=int, help="those of a host")
    options = parser.parse_args()

    world = int(os.environ["WORLD_SIZE"])
    sharding = strategy("hybrid" if options.hybrid else "zero3")
    mesh = init_device_mesh("cpu", sharding.mesh_shape(world, options.ranks_per_copy))
    rank = dist.get_rank()
    model = model_of()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0
    newest = checkpoint.latest(options.folder / "checkpoints")
    if newest is not None:
        step = checkpoint.load(newest, model, optimizer)["step"]
        if rank == 0:
            print(f"going on from step {step} with {world} ranks on {socket.gethostname()}")
    log = options.folder / "losses"
    while step < options.steps:
        x = batch_of(step).chunk(world)[rank]
        loss = (model(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            with log.open("a") as file:
                file.write(f"{step} {world} {mean.item()!r}\n")
            print(f"step {step} of {world} ranks")
        if step % options.save_every == 0:
            checkpoint.save(
                options.folder / "checkpoints" / f"step-{step}",
                model,
                optimizer,
                step=step,
                overwrite=True,
            )
        if step >= options.pause_at:
            time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
