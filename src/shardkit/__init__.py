"""Sharded data-parallel training in PyTorch: FSDP2's API on CPU, accelerators and XLA."""

import importlib
import typing

from shardkit._errors import (
    CheckpointError,
    ConfigError,
    FreedParameterError,
    IntegrationError,
    LaunchError,
    LayoutError,
    MeshError,
    NonFiniteGradientError,
    OptimizerError,
    RankMismatchError,
    ShardedTensorError,
    ShardkitError,
    StateError,
    WrapError,
)
from shardkit._errors import show_short as _show_short
from shardkit._install import Installed, install
from shardkit._mesh import DeviceMesh
from shardkit._module.activation_checkpoint import checkpoint_module
from shardkit._module.capture import CapturedStep, capture
from shardkit._module.even_steps import EvenSteps, even_steps
from shardkit._module.fsdp_module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    share_comm_ctx,
)
from shardkit._module.full_params import apply_full, summon_full_params
from shardkit._module.fully_shard import fully_shard, register_fsdp_forward_method
from shardkit._module.materialize import materialize
from shardkit._module.on_meta import defer_sharding
from shardkit._params.packing import register_parts
from shardkit._runtime.passes import shared_input
from shardkit._settings import (
    AllGather,
    AllReduce,
    Comm,
    CPUOffloadPolicy,
    GradientPiece,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
    set_watch,
)
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.spec import FlatShard, Replicate
from shardkit._wrapping.activations import checkpoint_activations
from shardkit._wrapping.auto_shard import auto_shard
from shardkit._wrapping.plan import GroupPlan, PlannedMemory, PlannedTraffic, ShardPlan
from shardkit._wrapping.policies import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from shardkit._wrapping.strategies import Strategy, strategy
from shardkit.backends import init_device_mesh
from shardkit.config import Config, from_config
from shardkit.planning import RunPlan, plan
from shardkit.tracing import Recording, record

if typing.TYPE_CHECKING:
    from shardkit import checkpoint as checkpoint
    from shardkit import compression as compression
    from shardkit import optim as optim
else:

    def __getattr__(name: str) -> typing.Any:
        """Import a part of shardkit at its first use: ``import shardkit`` alone is faster."""
        if name not in ("checkpoint", "compression", "optim"):
            msg = f"module 'shardkit' has no attribute {name!r}"
            raise AttributeError(msg)
        return importlib.import_module(f"shardkit.{name}")


__version__ = "0.1.0"

_show_short()

__all__ = [
    "AllGather",
    "AllReduce",
    "CPUOffloadPolicy",
    "CapturedStep",
    "CheckpointError",
    "Comm",
    "Config",
    "ConfigError",
    "DeviceMesh",
    "EvenSteps",
    "FSDPModule",
    "FlatShard",
    "FreedParameterError",
    "GradientPiece",
    "GradientReductionHandle",
    "GroupPlan",
    "Installed",
    "IntegrationError",
    "LaunchError",
    "LayoutError",
    "MeshError",
    "MixedPrecisionPolicy",
    "NonFiniteGradientError",
    "OffloadPolicy",
    "OptimizerError",
    "PlannedMemory",
    "PlannedTraffic",
    "RankMismatchError",
    "Recording",
    "ReduceScatter",
    "Replicate",
    "RunPlan",
    "ShardPlan",
    "ShardedTensor",
    "ShardedTensorError",
    "ShardkitError",
    "StateError",
    "Strategy",
    "UnshardHandle",
    "WrapError",
    "always_wrap_policy",
    "apply_full",
    "auto_shard",
    "capture",
    "checkpoint_activations",
    "checkpoint_module",
    "defer_sharding",
    "even_steps",
    "from_config",
    "fully_shard",
    "init_device_mesh",
    "install",
    "lambda_auto_wrap_policy",
    "materialize",
    "plan",
    "record",
    "register_fsdp_forward_method",
    "register_parts",
    "set_watch",
    "share_comm_ctx",
    "shared_input",
    "size_based_auto_wrap_policy",
    "strategy",
    "summon_full_params",
    "transformer_auto_wrap_policy",
]
