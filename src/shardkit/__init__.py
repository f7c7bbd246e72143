"""Sharded data-parallel training in PyTorch: FSDP2's API, faster, on CPU and GPU."""

from shardkit._api import FSDPModule, UnshardHandle, fully_shard
from shardkit._errors import (
    FreedParameterError,
    LayoutError,
    MeshError,
    RankMismatchError,
    ShardedTensorError,
    ShardkitError,
    StateError,
    WrapError,
)
from shardkit._forward_methods import register_fsdp_forward_method
from shardkit._mesh import DeviceMesh
from shardkit._policy import MixedPrecisionPolicy
from shardkit._sharded import FlatShard, Replicate, ShardedTensor
from shardkit.backends import init_device_mesh

__version__ = "0.1.0"

__all__ = [
    "DeviceMesh",
    "FSDPModule",
    "FlatShard",
    "FreedParameterError",
    "LayoutError",
    "MeshError",
    "MixedPrecisionPolicy",
    "RankMismatchError",
    "Replicate",
    "ShardedTensor",
    "ShardedTensorError",
    "ShardkitError",
    "StateError",
    "UnshardHandle",
    "WrapError",
    "fully_shard",
    "init_device_mesh",
    "register_fsdp_forward_method",
]
