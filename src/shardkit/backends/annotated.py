"""Plain parameters that the package ``spmd_types`` describes: torchtitan's default.

Such a parameter is this rank's part of a larger one, like the local tensor of a DTensor. Attributes
say what it is along each axis of a mesh. With ``dp_mesh_dims`` `fully_shard` reads them, as FSDP2
does from torch 2.14 on. Modules see plain tensors while a group is gathered; in all other respects
the parameter is like a DTensor.

This module is imported when the first such parameter is found (`shardkit.backends.is_annotated`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import spmd_types as spmd
from torch.distributed.tensor import DTensor

from shardkit._errors import WrapError
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit.backends.dtensor import TensorParallel


def part_by_annotations(name: str, param: Tensor, mesh: Any, dims: Any) -> TensorParallel:
    """Return how a described parameter is spread over the axes of torch's `mesh`.

    Axes on which ranks compute (``spmd_types.set_current_mesh``), and which the description leaves
    out, are added to it: the parameter is replicated over them.

    Args:
        name: Name of the parameter, for errors.
        param: This rank's part.
        mesh: Mesh on which the parameter is replicated or split.
        dims: FSDP2's names of the axes of `mesh` over which `fully_shard` shards or replicates.

    Raises:
        WrapError: The description does not say what the parameter is along an axis of `mesh`, or
            says something with which it cannot be sharded. Or the parameter has a gradient.
    """
    noted = _kinds_of(param)
    own = {*dims.shard_names, *dims.replicate_names}
    axes = {each: spmd.MeshAxis.of(mesh.get_group(each)) for each in mesh.mesh_dim_names}
    kinds: list[Any] = [
        spmd.R if each in own or axis.size() == 1 else noted.get(axis)
        for each, axis in axes.items()
    ]
    split = [axis for each, axis in axes.items() if each not in own]
    is_whole = all(kind is spmd.R for axis, kind in noted.items() if axis not in split)
    is_known = all(isinstance(k, spmd.Shard) or k in (spmd.R, spmd.I) for k in kinds)
    if not is_whole or not is_known:
        msg = (
            f"parameter {name!r} is {noted}, says spmd_types: fully_shard takes R, I and S(dim) "
            f"for each axis of {tuple(axes)}, and R only for {tuple(sorted(own))}, over which it "
            f"shards or replicates. Say so first: spmd_types.assert_type(param, {{axis: kind}})."
        )
        raise WrapError(msg)
    _check_order(name, param, [*axes.values()])
    if param.grad is not None:
        msg = (
            f"parameter {name!r} has a gradient, and spmd_types describes it: nothing says of what "
            f"the gradient is a part. Drop it before fully_shard: param.grad = None."
        )
        raise WrapError(msg)
    placements = [spmd.spmd_type_to_dtensor_placement(kind) for kind in kinds]
    of_gradients = [spmd.spmd_type_to_dtensor_placement(kind.backward_type()) for kind in kinds]
    result = tensor_parallel_of(
        DTensor.from_local(param.detach(), mesh, placements, run_check=False)
    )
    assert result is not None
    _describe_on_current_mesh(param, noted, mesh)
    return replace(result, of_gradients=tuple(of_gradients))


def _kinds_of(param: Tensor) -> dict[Any, Any]:
    """Return what is noted about a parameter: R, I, P, V or S(dim), by axis."""
    noted = dict(spmd.get_local_type(param))
    for dim, cuts in enumerate(spmd.get_partition_spec(param) or ()):
        noted.update(dict.fromkeys(_axes_of(cuts), spmd.S(dim)))
    return noted


def _axes_of(cuts: Any) -> tuple[Any, ...]:
    """Return the axes that cut a dim, in this order."""
    if cuts is None:
        return ()
    return cuts if isinstance(cuts, tuple) else (cuts,)


def _check_order(name: str, param: Tensor, axes: list[Any]) -> None:
    """Refuse a dim that several axes cut in another order than that of the mesh."""
    for dim, cuts in enumerate(spmd.get_partition_spec(param) or ()):
        places = [axes.index(axis) for axis in _axes_of(cuts)]
        if places != sorted(places):
            msg = (
                f"dim {dim} of parameter {name!r} is cut over {cuts}, says spmd_types, and the "
                f"mesh has these axes in another order: {axes}. Cut it in the order of the mesh."
            )
            raise WrapError(msg)


def _describe_on_current_mesh(param: Tensor, noted: dict[Any, Any], mesh: Any) -> None:
    num_described = math.prod(axis.size() for axis in noted)
    current = spmd.current_mesh()
    if num_described < mesh.size() and current is not None:
        spmd.assert_type(param, {axis: spmd.R for axis in current if axis not in noted})
