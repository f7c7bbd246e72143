"""Pickles pieces as the last thing in a run: ``python pieces_of_one_rank.py WHO HOW_IT_ENDS``."""

import io
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from shardkit import fully_shard, init_device_mesh

who, end = sys.argv[1:]
num_replicas = 2 if who == "a replica" else 1
mesh = init_device_mesh(
    "cpu",
    (num_replicas, int(os.environ["WORLD_SIZE"]) // num_replicas),
    mesh_dim_names=("replicate", "shard"),
)
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 4), mesh=mesh)
model(torch.ones(1, 4)).sum().backward()
ranks = {"one": [0], "another": [1], "all": range(4), "a replica": range(2), "nobody": []}
if mesh.get_rank() in ranks[who]:
    torch.save(model.state_dict(), io.BytesIO())
if end == "destroys":
    dist.destroy_process_group()
