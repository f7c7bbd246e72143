"""Compiles steps in a process of its own; prints what the last one is made of.

Arguments: the folder that XLA dumps to (the caller sets ``XLA_FLAGS``), and whether to reshard
after forward.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

import hlo
import torch
import torch_xla

import models
from shardkit import fully_shard, init_device_mesh


def main(folder: pathlib.Path, *, reshard: bool) -> None:
    mesh = init_device_mesh("xla", (4,))
    model = models.MLP([64] * 7).to("xla")
    for layer in model.layers:
        fully_shard(layer, mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh)
    for _ in range(3):
        model(torch.ones(8, 64)).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        torch_xla.sync(wait=True)
    dumps = folder.glob("*cpu_after_optimizations.txt")
    last = max(dumps, key=lambda path: (path.stat().st_size, path.stat().st_mtime))
    count = hlo.Program(last.read_text()).count()
    assignment = last.with_name(last.name.replace(".txt", "-buffer-assignment.txt")).read_text()
    temp = [int(size) for size in re.findall(r"size (\d+), preallocated-temp", assignment)]
    print(json.dumps({"count": count, "temp": sum(temp)}))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), reshard=sys.argv[2] == "True")
