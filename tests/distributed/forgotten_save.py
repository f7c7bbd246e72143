"""A rank of a run that saves in the background and asks for no result: `HOW PATH`."""

from __future__ import annotations

import os
import signal
import sys
import time
import typing

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group as destroy

from shardkit import checkpoint, fully_shard, init_device_mesh
from shardkit.checkpoint import _save
from shardkit.checkpoint._dcp import writer

HOW, PATH = sys.argv[1:]
SLOW_S = 30.0 if HOW.startswith("too slow") else 1.0
_save.END_LIMIT_S = 2.0 if HOW.startswith("too slow") else _save.END_LIMIT_S
real = writer.FileStream.append


def slow(self: typing.Any, *args: typing.Any, **options: typing.Any) -> typing.Any:
    """Write, as a disk that takes its time or is full."""
    writer.FileStream.append = real
    time.sleep(SLOW_S)
    if HOW == "full" and rank == 1:
        raise OSError(28, "No space left on device")
    return real(self, *args, **options)


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(512, 4096), nn.Linear(4096, 8))
if world_size > 1:
    model = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 512)).mean().backward()
optimizer.step()
writer.FileStream.append = slow
checkpoint.async_save(PATH, model, optimizer, step=1)
if HOW == "sys.exit":
    sys.exit(3)
if HOW == "one raises" and rank == 1:
    msg = "a mistake of the user"
    raise ValueError(msg)
if HOW == "one raises":
    time.sleep(2)
if HOW.endswith("destroys"):
    (destroy if HOW.startswith("imported") else dist.destroy_process_group)()
    print("destroyed", os.path.exists(PATH), flush=True)  # noqa: PTH110 - a path is a word here
if HOW == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
if HOW in {"terminated", "own handler"}:
    os.kill(os.getpid(), signal.SIGTERM)
if HOW == "terminated later":
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGTERM)
