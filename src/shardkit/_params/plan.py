"""Where the parameters of a bucket are, and in which dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardkit._policy import CPUOffloadPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit._mesh import DeviceMesh
    from shardkit._policy import MixedPrecisionPolicy, OffloadPolicy
    from shardkit.backends.base import AxisComm


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Where the parameters of a bucket are, and in which dtypes.

    Attributes:
        mesh: Mesh over whose last axis they are sharded.
        policy: Dtypes, as the user chose them.
        offload: Place of the shard, as the user chose it.
        axis: Communication along the shard axis.
        orig_dtype: Dtype of the shard.
        param_dtype: Dtype of the unsharded parameters.
        reduce_dtype: Dtype of gradients on the wire.
        device: Device of the unsharded parameters.
        shard_device: Device of the shard.
        home_device: Device where the shard belongs; `shard_device` is meta until it has values.
        is_offloaded: Whether the shard is on the host, while the device has memory of its own.
        is_pinned: Whether the shard is in page-locked memory.
    """

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy
    axis: AxisComm
    orig_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    device: torch.device
    shard_device: torch.device
    home_device: torch.device
    is_offloaded: bool
    is_pinned: bool

    @property
    def aliases_shard(self) -> bool:
        """Whether an unsharded buffer may be the shard: nothing to gather, nothing to cast."""
        is_same_dtype = self.param_dtype == self.orig_dtype
        return self.axis.size == 1 and is_same_dtype and not self.is_offloaded

    def materialized(self) -> BucketPlan:
        """Return the plan that holds once parameters on the meta device have got values."""
        backend = self.mesh.backend
        is_offloaded = isinstance(self.offload, CPUOffloadPolicy) and backend.has_own_memory
        return replace(
            self,
            device=backend.device,
            shard_device=self.home_device,
            is_offloaded=is_offloaded,
            is_pinned=is_offloaded and bool(getattr(self.offload, "pin_memory", False)),
        )

    @classmethod
    def of(
        cls,
        param: Tensor,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        *,
        dtype: torch.dtype,
    ) -> BucketPlan:
        """Return the plan for a bucket whose first parameter is `param`, stored in `dtype`."""
        backend = mesh.backend
        param_dtype, reduce_dtype = policy.dtypes_for(dtype)
        wants_host = isinstance(offload, CPUOffloadPolicy)
        home = torch.device("cpu") if wants_host else backend.device
        is_meta = param.device.type == "meta"
        is_offloaded = wants_host and not is_meta and backend.has_own_memory
        return cls(
            mesh=mesh,
            policy=policy,
            offload=offload,
            axis=backend.axis(mesh.ndim - 1),
            orig_dtype=dtype,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            device=param.device if is_meta else backend.device,
            shard_device=param.device if is_meta else home,
            home_device=home,
            is_offloaded=is_offloaded,
            is_pinned=is_offloaded and bool(getattr(offload, "pin_memory", False)),
        )
