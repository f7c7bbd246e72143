"""The buckets that a group would have: sizes and cuts, without a tensor made or changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._params.flat_store import FlatStore
from shardkit._params.make import plan_for, split_by_kind, store_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._layout.even import EvenLayout
    from shardkit._layout.flat import FlatLayout
    from shardkit._mesh import DeviceMesh
    from shardkit._params.plan import BucketPlan
    from shardkit._params.sites import ParamEntry
    from shardkit._policy import MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket before it is made.

    Attributes:
        plan: Dtypes and devices, as they are once the parameters have values.
        layout: Layout of the bucket.
        nbytes: Size of the parameters in the dtype they are stored in, on all ranks together, in
            bytes.
        shard_nbytes: Size of this rank's shard in bytes.
        unsharded_nbytes: Size of the unsharded buffer in bytes; 0 where that is the shard itself.
        is_trainable: Whether its gradients are reduced.
    """

    plan: BucketPlan
    layout: FlatLayout | EvenLayout
    nbytes: int
    shard_nbytes: int
    unsharded_nbytes: int
    is_trainable: bool

    @property
    def padding_nbytes(self) -> int:
        """Bytes of all shards that belong to no parameter."""
        return self.layout.padding_numel * self.plan.orig_dtype.itemsize

    @property
    def send_nbytes(self) -> int:
        """Bytes that a reduction sends; 0 where nothing is trained."""
        itemsize = self.plan.reduce_dtype.itemsize
        return self.layout.padded_numel * itemsize if self.is_trainable else 0

    @property
    def sum_nbytes(self) -> int:
        """Bytes of this rank's range of the reduced gradients."""
        return self.send_nbytes // self.layout.world_size


def plan_buckets(
    entries: Sequence[ParamEntry],
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
) -> list[PlannedBucket]:
    """Return the buckets that `make_buckets` would make.

    For parameters that gather themselves (`subclass_store`) the unsharded bytes are those of a
    plain parameter: only their own hooks know what they send.
    """
    planned = []
    for alike in split_by_kind(entries, policy=policy):
        plan = plan_for(alike[0], mesh, policy, offload).materialized()
        planned.append(_planned(plan, alike, mesh))
    return planned


def _planned(plan: BucketPlan, entries: list[ParamEntry], mesh: DeviceMesh) -> PlannedBucket:
    kind = store_class(entries[0], mesh)
    layout = kind.plan_layout(plan, entries)
    aliases = issubclass(kind, FlatStore) and kind.may_alias_shard and plan.aliases_shard
    unsharded = 0 if aliases else layout.padded_numel * plan.param_dtype.itemsize
    dtype = plan.param_dtype
    return PlannedBucket(
        plan=plan,
        layout=layout,
        nbytes=sum(layout.numels) * plan.orig_dtype.itemsize,
        shard_nbytes=kind.shard_nbytes_of(plan, layout),  # type: ignore[arg-type]
        unsharded_nbytes=unsharded,
        is_trainable=entries[0].param.requires_grad
        and (dtype.is_floating_point or dtype.is_complex),
    )
