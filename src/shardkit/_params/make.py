"""Buckets of a group: which parameters share one, and which kind of store it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardkit._compat.torch_tensors import grad_dtype_of
from shardkit._errors import StateError
from shardkit._params.bucket import Bucket
from shardkit._params.flat_store import BucketPlan, FlatStore
from shardkit._params.packing import packing_of, stored_dtype
from shardkit._params.subclass_store import PackedStore, SubclassStore, subclass_of
from shardkit._params.traced_store import TracedStore
from shardkit._settings import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._layout import EvenLayout, FlatLayout
    from shardkit._mesh import DeviceMesh
    from shardkit._params.sites import ParamEntry


def rebuild(bucket: Bucket, entries: Sequence[ParamEntry]) -> Bucket:
    """Return a bucket for sharded parameters that are cut like those of `bucket`, in their dtype.

    It is for parameters whose pieces were replaced, and for copies.

    Raises:
        StateError: Their dtypes or devices differ, or the group keeps its shards elsewhere.
    """
    first, home = entries[0].param, bucket.plan.home_device.type
    grad_dtype = grad_dtype_of(first)
    for entry in entries:
        dtype, device = entry.param.dtype, entry.param.device
        if device.type not in (home, "meta"):
            is_offloaded = isinstance(bucket.plan.offload, CPUOffloadPolicy)
            where = "the host, by its offload policy" if is_offloaded else home
            msg = (
                f"parameter {entry.name!r} is now on {device}, but its group keeps its shards on "
                f"{where}. Move the model to {home!r}: model.to({home!r}), or "
                f"model.to_empty(device={home!r}) if it was on meta."
            )
            raise StateError(msg)
        if dtype != first.dtype or device != first.device:
            msg = (
                f"parameter {entry.name!r} is now {dtype} on {device}, but it shares a buffer with "
                f"{entries[0].name!r}, {first.dtype} on {first.device}. Convert all parameters of "
                f"the group alike."
            )
            raise StateError(msg)
        if grad_dtype_of(entry.param) != grad_dtype:
            msg = (
                f"parameter {entry.name!r} has grad_dtype={grad_dtype_of(entry.param)}, but it "
                f"shares a buffer with {entries[0].name!r}, which has grad_dtype={grad_dtype}. Set "
                f"grad_dtype alike for all parameters of the group, or before fully_shard."
            )
            raise StateError(msg)
    plan, layout = bucket.plan, bucket.store.layout
    for entry in entries:
        entry.mesh, entry.around = plan.mesh, plan.around
    result = restore(
        entries, mesh=plan.mesh, policy=plan.policy, layout=layout, offload=plan.offload
    )
    for spec, before in zip(result.store.specs, bucket.store.specs, strict=True):
        spec.is_worthless = before.is_worthless
    result.lie_as(bucket)
    return result


def restore(
    entries: Sequence[ParamEntry],
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    layout: Any,
    offload: OffloadPolicy,
) -> Bucket:
    """Return a bucket of sharded parameters that are cut according to `layout`."""
    result = _new_bucket(entries, _plan_for(entries, mesh, policy, offload), layout)
    for index in range(len(entries)):
        result.swap_in(index)
    return result


def make_buckets(
    entries: Sequence[ParamEntry],
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
) -> list[Bucket]:
    """Make the buckets of a group."""
    return [
        _new_bucket(alike, _plan_for(alike, mesh, own, offload))
        for own, alike in _split_by_kind(entries, policy)
    ]


def _split_by_kind(
    entries: Sequence[ParamEntry], policy: MixedPrecisionPolicy
) -> list[tuple[MixedPrecisionPolicy, list[ParamEntry]]]:
    """Split parameters by bucket, in order of appearance, in the same way on all ranks.

    Parameters on one mesh have the same mesh object.

    Returns:
        The policy of each bucket, and its parameters.
    """
    by_kind: dict[tuple[Any, ...], tuple[MixedPrecisionPolicy, list[ParamEntry]]] = {}
    for entry in entries:
        param, dtype, own = entry.param, stored_dtype(entry), policy.for_param(entry.param)
        kind: tuple[Any, ...] = (
            dtype,
            param.device,
            own.dtypes_for(dtype, grad_dtype_of(param)),
            param.requires_grad,
            packing_of(entry) is not None,
            id(entry.mesh),
        )
        if subclass_of(entry) is not None:
            kind = (*kind, id(param))  # This parameter has its own bucket.
        by_kind.setdefault(kind, (own, []))[1].append(entry)
    return [*by_kind.values()]


def _new_bucket(entries: Sequence[ParamEntry], plan: BucketPlan, layout: Any = None) -> Bucket:
    for entry in entries:
        entry.mesh = entry.around = None  # The plan has them now.
    # Tensors made in inference mode could never be trained.
    with torch.inference_mode(mode=False), torch.no_grad():
        return Bucket(_store_class(entries[0], plan.mesh)(plan, list(entries), layout))


def _plan_for(
    entries: Sequence[ParamEntry],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
) -> BucketPlan:
    """Return the plan of a bucket of parameters; `mesh` is the mesh of its group."""
    first = entries[0]
    dtype, own = stored_dtype(first), first.mesh or mesh
    around = next((entry.around for entry in entries if entry.around is not None), None)
    is_meta = first.param.is_meta
    return BucketPlan.of(
        own,
        policy,
        offload,
        dtype=dtype,
        grad_dtype=grad_dtype_of(first.param),
        around=around,
        is_meta=is_meta,
    )


def _store_class(
    entry: ParamEntry, mesh: DeviceMesh
) -> type[FlatStore | SubclassStore | TracedStore]:
    """Return the class of store for a bucket that begins with this parameter."""
    if mesh.backend.is_traced:
        return TracedStore
    if packing_of(entry) is not None:
        return PackedStore
    return FlatStore if subclass_of(entry) is None else SubclassStore


# --- planned buckets ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A bucket before it is made."""

    plan: BucketPlan  # Dtypes and devices that apply once the parameters have values.
    layout: FlatLayout | EvenLayout  # Layout of the bucket.
    nbytes: int  # Size of the parameters in their storage dtype, on all ranks together, in bytes.
    shard_nbytes: int  # Size of this rank's shard in bytes.
    unsharded_nbytes: int  # Size of the unsharded buffer in bytes; 0 if that is the shard itself.
    is_trainable: bool  # Whether its gradients are reduced.

    @property
    def padding_nbytes(self) -> int:
        """Bytes of all shards that belong to no parameter."""
        return self.layout.padding_numel * self.plan.orig_dtype.itemsize

    @property
    def send_nbytes(self) -> int:
        """Bytes that a reduction sends; 0 if nothing is trained."""
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
    plain parameter, because only their own hooks know what is sent.
    """
    return [
        _planned(_plan_for(alike, mesh, own, offload).materialized(), alike)
        for own, alike in _split_by_kind(entries, policy)
    ]


def _planned(plan: BucketPlan, entries: list[ParamEntry]) -> PlannedBucket:
    kind = _store_class(entries[0], plan.mesh)
    layout = kind.plan_layout(plan, entries)
    aliases = issubclass(kind, FlatStore) and kind.may_alias_shard and plan.aliases_shard
    unsharded = 0 if aliases else layout.padded_numel * plan.param_dtype.itemsize
    return PlannedBucket(
        plan=plan,
        layout=layout,
        nbytes=sum(layout.numels) * plan.orig_dtype.itemsize,
        shard_nbytes=kind.shard_nbytes_of(plan, layout),  # type: ignore[arg-type]
        unsharded_nbytes=unsharded,
        is_trainable=entries[0].param.requires_grad and plan.is_differentiable,
    )
