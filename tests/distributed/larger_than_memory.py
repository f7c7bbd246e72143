"""A rank that makes a model under a limit of its memory, in a process of its own.

Run by `test_larger_than_memory`: ``larger_than_memory.py WAY LIMIT_MIB``; 0 is no limit. It prints
one line of JSON: by how many MiB its peak grew, the MiB of its shards, and a digest of the whole
parameters.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import pathlib
import resource
import sys
import typing

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit import DeviceMesh, fully_shard, init_device_mesh, materialize

WIDTH, LAYERS = 1024, 31
MIB = 2**20
M_MMAP_THRESHOLD = -3  # glibc's malloc.h


class Layer(nn.Module):
    """Two matrices and a table: 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH // 2)
        self.second = nn.Linear(WIDTH // 2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Model(nn.Module):
    """As users write it: with a mesh, each layer is sharded as soon as it is made."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = Layer()
            if mesh is not None:
                fully_shard(layer, mesh=mesh)
            self.layers.append(layer)
        self.head = nn.Linear(WIDTH, 8)
        if mesh is not None:
            fully_shard(self, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def status_mib(key: str) -> float:
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) / 1024


def limit_memory(mib: float) -> None:
    """Let allocations fail that need so much more than there is now.

    The system counts what the heap has freed and kept, so tensors get pages of their own.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    nbytes = int((status_mib("VmData") + mib) * MIB)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))


def build(mesh: DeviceMesh) -> nn.Module:
    return Model(mesh)


def from_meta(mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return materialize(fully_shard(model, mesh=mesh))


def whole_first(mesh: DeviceMesh) -> nn.Module:
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = {"build": build, "from_meta": from_meta, "whole_first": whole_first}


def digest(model: nn.Module) -> str:
    """Return a hash of all parameters, which are made whole one at a time."""
    result = hashlib.sha256()
    for name, param in model.named_parameters():
        whole = typing.cast("typing.Any", param).detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        result.update(name.encode() + whole.numpy().tobytes())
    return result.hexdigest()


def plain_digest() -> str:
    torch.manual_seed(0)
    return digest(Model())


def main() -> None:
    way, limit_mib = sys.argv[1], float(sys.argv[2])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    # What comes with the first use of anything is no part of the model.
    warm = fully_shard(nn.Linear(8, 8), mesh=mesh)
    warm(torch.ones(1, 8)).sum().backward()
    del warm
    gc.collect()
    gc.disable()  # Memory must not wait for it.
    torch.manual_seed(0)
    if limit_mib:
        limit_memory(limit_mib)
    before = status_mib("VmHWM")
    model = WAYS[way](mesh)
    grown = status_mib("VmHWM") - before
    model(torch.ones(1, 8)).sum().backward()
    shards = model.memory_stats()["shard_nbytes"] / MIB
    found = {"grown": grown, "shards": shards, "digest": digest(model)}
    print("RESULT", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
