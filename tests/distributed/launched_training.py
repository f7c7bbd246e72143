"""A script of FSDP2 as people write it, with checkpoints of torch: nothing of shardkit is named.

What goes wrong in it is chosen by its first argument.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardkit import checkpoint

STEPS, SAVED, WRONG = 8, 3, 5


def main(what: str, folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 16))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    newest = checkpoint.latest(folder)
    step = checkpoint.load(newest, model, optimizer)["step"] if newest else 0
    print(f"rank {rank} begins at {step}, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    print(f"{type(model).__mro__[1].__module__}, config {os.environ.get('SHARDKIT_CONFIG')}")
    while step < STEPS:
        if step == WRONG and rank == 1 and newest is None:
            go_wrong(what, model)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"loss {step} {loss.item().hex()}")
        if step % SAVED == 0:
            checkpoint.save(pathlib.Path(folder, f"step-{step}"), model, optimizer, step=step)
    dist.destroy_process_group()


def go_wrong(what: str, model: nn.Module) -> None:
    if what == "raise":
        message = "this batch is bad"
        raise ValueError(message)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "part":  # The other rank computes a step.
        model[2].weight.full_tensor()
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
