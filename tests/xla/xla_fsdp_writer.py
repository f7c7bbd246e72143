"""Writes what a user of torch_xla's FSDP saves on two ranks, and what torch_xla makes of it.

Run by a test in a process of its own, not in SPMD mode. The wrapper is told each rank in turn, so
that no collective is needed.
"""

from __future__ import annotations

import sys

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.distributed.fsdp.state_dict_utils import consolidate_sharded_model_checkpoints

WAYS = {
    "flat": {"flatten_parameters": True},
    "each": {"flatten_parameters": False},
    "rows": {"flatten_parameters": False, "shard_param_on_dim_0": True},
}
SUFFIX = "_rank-*-of-*.pth"


def make() -> nn.Sequential:
    """Make a model whose parameters lie on both ranks, some on one, some frozen."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(21, 19), nn.BatchNorm1d(19))
    model = nn.Sequential(nn.Linear(17, 21), inner, nn.Linear(19, 3))
    model[0].bias.requires_grad_(requires_grad=False)
    return model


def save(folder: str, way: str) -> None:
    """Save the files of both ranks."""
    for rank in range(2):
        options = {
            **WAYS[way],
            "sharding_groups": [[0, 1]],
            "sharding_rank": rank,
            "sharding_world_size": 2,
            "execute_sharding_on_init": False,
        }
        model = make()
        model[1] = XlaFullyShardedDataParallel(model[1], **options)
        wrapped = XlaFullyShardedDataParallel(model, **options)
        state = {"model": wrapped.state_dict(), "shard_metadata": wrapped.get_shard_metadata()}
        path = f"{folder}/{way}_rank-{rank:08d}-of-{2:08d}.pth"
        xm.save(state, path, master_only=False)
    consolidate_sharded_model_checkpoints(f"{folder}/{way}", SUFFIX, f"{folder}/{way}.theirs")


if __name__ == "__main__":
    torch.save(make().state_dict(), f"{sys.argv[1]}/plain")
    for way in WAYS:
        save(sys.argv[1], way)
