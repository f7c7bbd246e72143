"""Which parameters share a bucket, and of which kind it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit._errors import StateError, WrapError
from shardkit._params.bucket import Bucket
from shardkit._params.subclass_bucket import SubclassBucket, subclass_of
from shardkit._params.traced_bucket import TracedBucket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._layout.flat import FlatLayout
    from shardkit._mesh import DeviceMesh
    from shardkit._params.sites import ParamEntry
    from shardkit._policy import MixedPrecisionPolicy, OffloadPolicy


def rebuild(bucket: Bucket, entries: Sequence[ParamEntry]) -> Bucket:
    """Return a bucket for sharded parameters that are cut as `bucket`'s are, with their dtype.

    For parameters whose pieces were replaced, and for copies.

    Raises:
        StateError: Their dtypes or devices differ, or they are on another device than the mesh.
    """
    first = entries[0].param
    for item in entries:
        at_home = item.param.device.type in (bucket.offload_device.type, "meta")
        if item.param.dtype != first.dtype or item.param.device != first.device or not at_home:
            msg = (
                f"parameter {item.name!r} is now {item.param.dtype} on {item.param.device}, but it "
                f"shares a buffer with {entries[0].name!r}, {first.dtype} on {first.device}. "
                f"Convert all parameters of the group alike, and stay on the device type "
                f"{bucket.offload_device.type!r}."
            )
            raise StateError(msg)
    return restore(
        entries,
        mesh=bucket.mesh,
        policy=bucket.policy,
        layout=bucket.layout,
        offload=bucket.offload,
    )


def restore(
    entries: Sequence[ParamEntry],
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    layout: FlatLayout,
    offload: OffloadPolicy,
) -> Bucket:
    """Return a bucket of sharded parameters that are cut as `layout` says."""
    result = _kind_of(entries[0], mesh)(
        entries, mesh=mesh, policy=policy, layout=layout, offload=offload
    )
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
    """Split parameters into buckets, in order of first appearance; the same on every rank."""
    by_kind: dict[tuple[Any, ...], list[ParamEntry]] = {}
    for item in entries:
        param = item.param
        kind: tuple[Any, ...] = (
            param.dtype,
            param.device,
            policy.dtypes_for(param.dtype),
            param.requires_grad,
        )
        if subclass_of(item) is not None:
            kind = (*kind, id(param))  # Alone.
        by_kind.setdefault(kind, []).append(item)
    return [
        _kind_of(items[0], mesh)(items, mesh=mesh, policy=policy, offload=offload)
        for items in by_kind.values()
    ]


def _kind_of(item: ParamEntry, mesh: DeviceMesh) -> type[Bucket]:
    gathers_itself = subclass_of(item) is not None
    if mesh.backend.is_traced and gathers_itself:
        msg = (
            f"parameter {item.name!r} is a {type(item.param).__name__} that gathers itself "
            f"(fsdp_pre_all_gather), which meshes of {mesh.device_type!r} devices do not support. "
            f"Make it a plain parameter, or pass it in ignored_params of fully_shard."
        )
        raise WrapError(msg)
    if mesh.backend.is_traced:
        return TracedBucket
    return SubclassBucket if gathers_itself else Bucket
