"""Sharded data-parallel training in PyTorch: FSDP2's API on CPU, accelerators and XLA."""

from shardkit._custom_comm import AllGather, AllReduce, Comm, GradientPiece, ReduceScatter
from shardkit._errors import (
    CheckpointError,
    FreedParameterError,
    LayoutError,
    MeshError,
    NonFiniteGradientError,
    RankMismatchError,
    ShardedTensorError,
    ShardkitError,
    StateError,
    WrapError,
)
from shardkit._mesh import DeviceMesh
from shardkit._module.activation_checkpoint import checkpoint_module
from shardkit._module.deferred import defer_sharding
from shardkit._module.even_steps import EvenSteps, even_steps
from shardkit._module.forward_methods import register_fsdp_forward_method
from shardkit._module.fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from shardkit._module.full_params import apply_full, summon_full_params
from shardkit._module.fully_shard import fully_shard
from shardkit._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardkit._runtime.passes import shared_input
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.spec import FlatShard, Replicate
from shardkit._watch_settings import set_watch
from shardkit.backends import init_device_mesh

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "AllReduce",
    "CPUOffloadPolicy",
    "CheckpointError",
    "Comm",
    "DeviceMesh",
    "EvenSteps",
    "FSDPModule",
    "FlatShard",
    "FreedParameterError",
    "GradientPiece",
    "LayoutError",
    "MeshError",
    "MixedPrecisionPolicy",
    "NonFiniteGradientError",
    "OffloadPolicy",
    "RankMismatchError",
    "ReduceScatter",
    "Replicate",
    "ShardedTensor",
    "ShardedTensorError",
    "ShardkitError",
    "StateError",
    "UnshardHandle",
    "WrapError",
    "apply_full",
    "checkpoint_module",
    "defer_sharding",
    "even_steps",
    "fully_shard",
    "init_device_mesh",
    "register_fsdp_forward_method",
    "set_watch",
    "share_comm_ctx",
    "shared_input",
    "summon_full_params",
]
