"""`shard_placement_fn`: which mesh each parameter of a group lies on.

A bucket is a part of a group, and holds only parameters of one mesh. So one call may put experts on
the ranks that hold the same experts, and other parameters on all ranks. Nothing is changed before
all parameters have a place.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit._compat import torch_fsdp2
from shardkit._errors import MeshError, WrapError
from shardkit._mesh import DeviceMesh
from shardkit._module import checks
from shardkit._runtime.agreement import hold_equal_values
from shardkit._tensor.spec import Replicate
from shardkit.backends import TorchDeviceMesh, as_device_mesh, is_annotated, tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from shardkit._params.sites import ParamEntry
    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.dtensor import TensorParallel


class SpmdMesh(NamedTuple):
    """Mesh of DTensors, and FSDP2's names of the axes over which shardkit shards them."""

    mesh: Any
    dims: Any


def place_params(
    found: Sequence[ParamEntry],
    fn: Callable[[nn.Parameter], Any] | None,
    mesh: DeviceMesh,
    *,
    spmd: SpmdMesh | None = None,
) -> list[DeviceMesh]:
    """Set the mesh of each parameter that is not on the mesh of the call; return these meshes.

    Cost: two process groups per call for `Replicate()`, made once.
    """
    if fn is not None and not callable(fn):
        msg = (
            f"shard_placement_fn must be a function of a parameter, got {fn!r}. Leave it out to "
            f"shard all parameters over the mesh."
        )
        raise WrapError(msg)
    known = {_axes_of(mesh): mesh}
    for item in found:
        place, own = (mesh, spmd) if fn is None else _place_of(fn(item.param), item, mesh, spmd)
        if is_annotated(item.param):
            item.annotated = _annotated(item, own)
        elif own is not None:
            _check_spmd(item, own)
        is_split = item.split is not None
        if place is not mesh:
            _check(place, item, mesh, is_split=is_split)
        place = known.setdefault(_axes_of(place), place)
        item.mesh = None if place is mesh else place
        item.is_spmd = own is not None
        item.around = mesh if place.size() < mesh.size() and not is_split else None
    return [place for place in known.values() if place is not mesh]


def mark_parts(groups: Sequence[ParamGroup], mesh: DeviceMesh) -> None:
    """Note for groups on a part of a mesh that other ranks hold other parameters in their place.

    `shard_placement_fn` says so for a single parameter. Here it is about experts that a call of
    their own sharded, before a call on a module around them. Parameters that are trained on a part
    of the ranks differ from those of other ranks. Frozen parameters count as copies until they are
    trained. So do parameters beside DTensors, since ranks of tensor parallelism hold equal ones.

    Along axes whose names say that they hold replicas, ranks with equal values hold copies: the
    user's own code averages over them.

    Cost: see `hold_equal_values`, where a group lacks an axis of replicas that `mesh` has.
    """
    widest = max((mesh, *(group.mesh for group in groups)), key=lambda each: each.size())
    ranks = {*widest.ranks}
    buckets = [bucket for group in groups for bucket in group.buckets]
    split = {b.plan.mesh.ranks for b in buckets for s in b.store.specs if s.tensor_parallel}
    copied = [group for group in groups if _lacks_replicas_of(group.mesh, widest)]
    are_equal = bool(copied) and (widest.backend.is_dry or hold_equal_values(copied, widest))
    for bucket in buckets:
        own, before = bucket.plan.mesh, bucket.plan.around
        is_part = own.size() < len(ranks) and ranks.issuperset(own.ranks)
        is_wider = before is None or before.size() < len(ranks)
        if not is_part or not is_wider or own.ranks in split:
            continue
        is_copy = are_equal and _lacks_replicas_of(own, widest)
        bucket.has_copies = is_copy and (before is None or bucket.has_copies)
        bucket.around_if_trained = widest
        if before is not None:
            bucket.lie_within(widest)
        bucket.follow_trainability()


def _lacks_replicas_of(own: DeviceMesh, around: DeviceMesh) -> bool:
    """Whether all axes that a mesh has and its part lacks are axes of replicas, by their names.

    A name such as ``dp`` is not enough: experts may be spread over ranks with data of their own.
    """
    missing = [name for name in own.left_out if name not in around.left_out]
    is_part = own.size() < around.size() and {*own.ranks} <= {*around.ranks}
    return is_part and bool(missing) and all("repl" in name.lower() for name in missing)


def replicated(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of a parameter that each rank of `mesh` holds whole.

    Cost: process groups of this rank alone and of all ranks of the mesh, made once.
    """
    backend = mesh.backend
    # Not the process group of gathers: ranks may wait for sums at different moments.
    same = next((i for i in range(mesh.ndim) if mesh.shape[i] == mesh.size()), None)
    wide: Any = (
        backend.joint_axis(mesh.ranks) if same is None else backend.split_axis(same, mesh.size())
    )
    alone = backend.split_axis(mesh.ndim - 1, 1)
    return DeviceMesh(
        mesh.device_type,
        (mesh.size(), 1),
        mesh.ranks,
        None,
        mesh.rank,
        backend.with_axes([wide, alone]),
        world_size=mesh.world_size,
    )


def data_parallel_mesh(mesh: Any, dims: Any) -> DeviceMesh:
    """Return the mesh to shard over, made from a mesh on which parameters are DTensors.

    Cost: a process group for several axes that count as one, made once.
    """
    if not hasattr(dims, "replicate_names"):
        msg = (
            f"dp_mesh_dims must be FSDP2's DataParallelMeshDims, got {reprlib.repr(dims)}. Write "
            f"DataParallelMeshDims(shard='dp')."
        )
        raise MeshError(msg)
    names = [tuple(dims.replicate_names), tuple(dims.shard_names)]
    if not isinstance(mesh, TorchDeviceMesh) or mesh.mesh_dim_names is None:
        msg = (
            f"with dp_mesh_dims the mesh is that of the DTensors, torch's with names of its axes, "
            f"got {mesh!r}. Make it by torch's init_device_mesh(..., mesh_dim_names=...)."
        )
        raise MeshError(msg)
    chosen = [name for each in names for name in each]
    wrong = [name for name in chosen if name not in mesh.mesh_dim_names]
    if wrong or not chosen or len(set(chosen)) != len(chosen):
        msg = (
            f"dp_mesh_dims names {chosen} of a mesh with axes {mesh.mesh_dim_names}: expected one "
            f"axis or several of these, each once, in `shard`, `replicate` or both."
        )
        raise MeshError(msg)
    whole = as_device_mesh(mesh, device_type=mesh.device_type)
    checks.check_in_mesh(whole)
    replicate, shard = ([whole.axis_index(name) for name in each] for each in names)
    if not shard:
        return replicated(flattened(whole, [replicate]))
    return flattened(whole, [replicate, shard] if replicate else [shard])


def _check_spmd(item: ParamEntry, spmd: SpmdMesh) -> None:
    own = getattr(item.param, "device_mesh", None)
    if tensor_parallel_of(item.param) is None or own != spmd.mesh:
        what = "a plain parameter" if own is None else f"a DTensor on {own}"
        msg = (
            f"parameter {item.name!r} is {what}: with dp_mesh_dims all parameters are DTensors on "
            f"the mesh that fully_shard gets, or on the one that shard_placement_fn returned for "
            f"them. Call distribute_module(model, mesh) first, or spmd_types.assert_type."
        )
        raise WrapError(msg)
    placements: Any = item.param.placements  # type: ignore[attr-defined]
    for name in (*spmd.dims.replicate_names, *spmd.dims.shard_names):
        placement = placements[spmd.mesh.mesh_dim_names.index(name)]
        if not placement.is_replicate():
            msg = (
                f"parameter {item.name!r} is a DTensor with placements {placements}: over the "
                f"data-parallel axis {name!r} it must be Replicate(), not {placement}. fully_shard "
                f"shards it there."
            )
            raise WrapError(msg)


def _annotated(item: ParamEntry, spmd: SpmdMesh | None) -> TensorParallel:
    """Return how a plain parameter that ``spmd_types`` describes is spread over its mesh."""
    from shardkit.backends.annotated import part_by_annotations

    if spmd is None:
        msg = (
            f"parameter {item.name!r} is described by spmd_types, and fully_shard must know on "
            f"which mesh: pass the whole mesh, and name the axes to shard over by dp_mesh_dims, "
            f"or by the ShardPlacementResult that shard_placement_fn returns."
        )
        raise WrapError(msg)
    return part_by_annotations(item.name, item.param, spmd.mesh, spmd.dims)


def flattened(mesh: DeviceMesh, dims: Sequence[Sequence[int]]) -> DeviceMesh:
    """Return a mesh with an axis for each list of axes of `mesh`."""
    axes, names = [], []
    for each in dims:
        part = mesh.submesh(list(each))
        is_one = part.ndim == 1
        axes.append(part.backend.axis(0) if is_one else part.backend.joint_axis(part.ranks))
        names.append("_".join(part.mesh_dim_names or ()))
    whole = mesh.submesh([dim for each in dims for dim in each])
    return DeviceMesh(
        mesh.device_type,
        tuple(axis.size for axis in axes),
        whole.ranks,
        tuple(names) if mesh.mesh_dim_names else None,
        mesh.rank,
        mesh.backend.with_axes(axes),
        whole.left_out,
        mesh.world_size,
    )


def _axes_of(mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(mesh.backend.axis(index) for index in range(mesh.ndim))


def _place_of(
    answer: Any, item: ParamEntry, mesh: DeviceMesh, spmd: SpmdMesh | None
) -> tuple[DeviceMesh, SpmdMesh | None]:
    """Return the mesh that the user's function chose, and the mesh of DTensors around it."""
    if answer is None:
        return mesh, spmd
    info = torch_fsdp2.mesh_info_of(answer)
    is_mesh = isinstance(answer, (DeviceMesh, TorchDeviceMesh))
    if mesh.backend.is_traced and (info is not None or is_mesh or _is_replicate(answer)):
        msg = (
            f"shard_placement_fn returned {answer!r} for {item.name!r}: on meshes of "
            f"{mesh.device_type!r} devices all parameters of a model lie on one mesh. Return None."
        )
        raise MeshError(msg)
    has_ranks = info is not None or (is_mesh and answer.device_type != mesh.device_type)
    if mesh.device_type == "meta" and has_ranks:
        msg = (
            f"shard_placement_fn returned {answer!r} for {item.name!r}, and the mesh of the call "
            f"is a shape, which has no ranks. Pass a mesh, or return None."
        )
        raise MeshError(msg)
    if info is not None:
        _check_dim(info.placement, item)
        if info.dims is not None:
            return data_parallel_mesh(info.spmd_mesh, info.dims), SpmdMesh(
                info.spmd_mesh, info.dims
            )
        return _mesh_of_info(info, item, mesh), None
    if is_mesh:
        return as_device_mesh(answer, device_type=mesh.device_type), None
    if _is_replicate(answer):
        return replicated(mesh), spmd
    _check_dim(answer, item)
    return mesh, spmd


def _is_replicate(answer: Any) -> bool:
    is_theirs = getattr(answer, "is_replicate", None)  # Method of torch's placements.
    return isinstance(answer, Replicate) or (callable(is_theirs) and bool(is_theirs()))


def _mesh_of_info(info: torch_fsdp2.MeshInfo, item: ParamEntry, mesh: DeviceMesh) -> DeviceMesh:
    whole = as_device_mesh(info.mesh, device_type=mesh.device_type)
    dims = [info.replicate_dim, info.shard_dim]
    chosen = [dim for dim in dims if dim is not None]
    if whole.get_coordinate() is None:
        raise _not_in(item, whole)
    if chosen != [*range(whole.ndim)]:
        whole = whole.submesh(chosen)
    return whole if info.shard_dim is not None else replicated(whole)


def _check_dim(placement: Any, item: ParamEntry) -> None:
    """Refuse what is no placement, and a placement with a dim that the parameter lacks."""
    dim = getattr(placement, "dim", None)
    if placement is not None and not isinstance(dim, int):
        msg = (
            f"shard_placement_fn returned {placement!r} for {item.name!r}; it may return None, "
            f"Shard(dim), Replicate(), a mesh, or FSDP2's ShardPlacementResult."
        )
        raise WrapError(msg)
    if dim is not None and not -max(item.param.ndim, 1) <= dim < max(item.param.ndim, 1):
        msg = (
            f"shard_placement_fn returned {placement!r} for {item.name!r} of shape "
            f"{tuple(item.param.shape)}, which has no dim {dim}."
        )
        raise WrapError(msg)


def _not_in(item: ParamEntry, place: DeviceMesh) -> MeshError:
    msg = (
        f"shard_placement_fn returned the mesh of ranks {place.describe_ranks()} for "
        f"{item.name!r}, and rank {place.rank} is not in it. Return on each rank a mesh that holds "
        f"this rank, such as mesh['efsdp'] of a mesh with axes ('efsdp', 'ep')."
    )
    return MeshError(msg)


def _check(place: DeviceMesh, item: ParamEntry, mesh: DeviceMesh, *, is_split: bool) -> None:
    """Refuse a mesh that makes no sense for a parameter of a call over `mesh`."""
    if place.device_type != mesh.device_type:
        msg = (
            f"shard_placement_fn returned a mesh of {place.device_type!r} devices for "
            f"{item.name!r}, and fully_shard got one of {mesh.device_type!r} devices. Parameters "
            f"of one group are on devices of one type."
        )
        raise MeshError(msg)
    if place.get_coordinate() is None:
        raise _not_in(item, place)
    checks.check_mesh(place)
    outside = sorted(set(place.ranks) - set(mesh.ranks))
    if outside and not is_split:
        msg = (
            f"shard_placement_fn returned the mesh of ranks {place.describe_ranks()} for "
            f"{item.name!r}, and fully_shard got the mesh of ranks {mesh.describe_ranks()}, which "
            f"does not hold {outside}. A plain parameter lies on all ranks of the call's mesh or "
            f"on a part of them: pass fully_shard the larger mesh, or make the parameter a DTensor "
            f"on the axis along which ranks hold other parts of it."
        )
        raise MeshError(msg)
