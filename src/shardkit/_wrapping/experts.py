"""Stacked experts: the modules that hold them, the axis over which they are spread, the meshes.

If tokens are sent to experts, each rank of an axis, ``ep``, holds some of the experts. The mesh
without that axis is a mesh for `fully_shard`, and experts are sharded over it. All other parameters
are sharded over the same ranks and those of ``ep``, as one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardkit._compat import torch_autograd
from shardkit._errors import MeshError, StateError, WrapError
from shardkit._module import checks
from shardkit._module.fsdp_module import own_class
from shardkit._module.placements import flattened
from shardkit._text import listed, nearest
from shardkit._wrapping.policies import ModuleTree, chosen_by
from shardkit.backends import TorchDeviceMesh, as_device_mesh, tensor_parallel_of

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh
    from shardkit._params.sites import ParamEntry


@dataclass(frozen=True)
class ExpertMeshes:
    """The meshes of a model with experts."""

    dense: DeviceMesh  # Mesh of all other parameters.
    own: DeviceMesh  # Mesh of the experts, over ranks that hold the same ones.
    axis: str  # Name of the axis over which experts are spread.
    num_parts: int  # Number of ranks on that axis.
    # Torch's mesh of that axis; None if the mesh is only a shape.
    torch_mesh: TorchDeviceMesh | None = None

    @classmethod
    def of(cls, mesh: Any, axis: str) -> ExpertMeshes:
        """Return the meshes from torch's mesh, which has names of its axes.

        Cost: a process group for axes that are used as one; it is made once.
        """
        names = mesh.mesh_dim_names if isinstance(mesh, TorchDeviceMesh) else None
        if names is None:
            msg = (
                f"with experts= the mesh is torch's, with names of its axes, got {mesh!r}: experts "
                f"become DTensors on the axis {axis!r}. Make it by torch's init_device_mesh"
                f"('cpu', (2, 2), mesh_dim_names=('fsdp', {axis!r}))."
            )
            raise MeshError(msg)
        if axis not in names:
            msg = (
                f"experts= spreads experts over an axis {axis!r}, which the mesh with axes {names} "
                f"has not. Name one of these."
            )
            raise MeshError(msg)
        whole = as_device_mesh(mesh, device_type=mesh.device_type)
        checks.check_in_mesh(whole)
        return cls.split(whole, names.index(axis), axis, mesh[axis])

    @classmethod
    def split(
        cls, whole: DeviceMesh, dim: int, axis: str, torch_mesh: TorchDeviceMesh | None = None
    ) -> ExpertMeshes:
        """Return the meshes from one whose axis `dim` is the experts'; it may be only a shape."""
        rest = [index for index in range(whole.ndim) if index != dim]
        if not 1 <= len(rest) <= checks.MAX_MESH_NDIM:
            msg = (
                f"with experts= the mesh has the axis {axis!r} and one more (shard) or two more "
                f"(replicate, shard), got the axes {whole.mesh_dim_names or whole.shape}. An axis "
                f"may have the size 1."
            )
            raise MeshError(msg)
        *replicate, shard = rest
        both = sorted([shard, dim])
        dense = flattened(whole, [replicate, both] if replicate else [both])
        parts = whole.shape[dim]
        own = whole.submesh(rest) if parts > 1 else dense
        return cls(dense, own, axis, parts, torch_mesh)


@dataclass(eq=False)
class Experts:
    """The stacked experts of a model."""

    meshes: ExpertMeshes  # The meshes of the model.
    # Every (module, attribute) of the model that holds them, including modules that share them with
    # the named ones (tied).
    sites: list[tuple[nn.Module, str]]
    # The parameters of the model; and for each parameter to cut, one of the size of a rank's part,
    # which a plan counts.
    params: set[nn.Parameter]
    whole: set[nn.Parameter]  # Parameters of the model that must be cut.

    @classmethod
    def of(cls, tree: ModuleTree, choices: Sequence[Any], meshes: ExpertMeshes) -> Experts:
        """Find the experts of a model."""
        params: set[nn.Parameter] = set()
        names = dict.fromkeys(name for choice in choices for name in _modules_of(tree, choice))
        for name in names:
            module = tree.modules[name]
            taken = {*tree.params(module)}
            held = [(at, p) for at, p in module.named_parameters(recurse=False) if p in taken]
            _check_stacks(name, module, held, meshes)
            params.update(param for _, param in held)
        entries = checks.find_params([tree.model], set())
        sites = [site for entry in entries if entry.param in params for site in entry.sites]
        whole = {param for param in params if tensor_parallel_of(param) is None}
        return cls(meshes, sites, params, whole)

    def plan(self, entries: Sequence[ParamEntry]) -> None:
        """Replace each parameter that must be cut by one of the size of a rank's part."""
        for entry in entries:
            param = entry.param
            if param in self.whole:
                size = (len(param) // self.meshes.num_parts, *param.shape[1:])
                part = torch.empty(size, dtype=param.dtype, device="meta")
                entry.param = nn.Parameter(part, requires_grad=param.requires_grad)
                self.params.add(entry.param)

    def cut(self) -> dict[nn.Parameter, nn.Parameter]:
        """Turn the experts into DTensors on their axis, of which this rank has its part.

        All ranks hold equal values, so nothing is sent. The DTensors are new objects. They are
        returned by the parameters from which they were cut.
        """
        from shardkit.backends.dtensor import distributed_by_dim_0

        mesh = self.meshes.torch_mesh
        assert mesh is not None  # A plan for a shape is never applied.
        made = {param: distributed_by_dim_0(param, mesh) for param in self.whole}
        self.params.update(made.values())
        for module, attribute in self.sites:
            param = getattr(module, attribute)
            setattr(module, attribute, made.get(param, param))
        for param in made:
            param.data = param.data.new_empty(0)  # A plan keeps the objects.
            param.__class__ = ReplacedExperts
        return made


class ReplacedExperts(nn.Parameter):
    """Class of whole experts that `auto_shard` has replaced by new objects.

    Code that still holds the old objects, such as an optimizer made before, would train nothing,
    without an error. So any use raises.
    """

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the class; there are no values to show."""
        return "ReplacedExperts()"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse all operators."""
        del func, types, args, kwargs
        msg = (
            "these whole experts were replaced by auto_shard(experts=...): this Parameter is not "
            "trained any more. Make the optimizer after auto_shard, and whatever else holds "
            "parameters."
        )
        raise StateError(msg)


class PlacedExperts:
    """A `shard_placement_fn` that knows the mesh of experts."""

    def __init__(self, experts: Experts, fn: Callable[[nn.Parameter], Any] | None) -> None:
        self._experts = experts
        self._fn = fn

    def __call__(self, param: nn.Parameter) -> Any:
        """Return the placement of a parameter."""
        if param in self._experts.params:
            return self._experts.meshes.own
        return None if self._fn is None else self._fn(param)

    def __repr__(self) -> str:
        """Return the text for a plan."""
        meshes = self._experts.meshes
        return f"<experts over {meshes.axis}={meshes.num_parts}>"


def axis_of(experts: Any) -> str:
    """Return the axis that `experts=` names."""
    axes = {*experts.values()} if isinstance(experts, Mapping) else set()
    axis = next(iter(axes), None)
    if len(axes) != 1 or not isinstance(axis, str):
        msg = (
            f"experts= is a mapping from modules that hold stacked experts (a class, its name, or "
            f"a pattern of names) to the name of one axis of the mesh, such as "
            f"{{'MixtralExperts': 'ep'}}; got {experts!r}."
        )
        raise WrapError(msg)
    return axis


def _modules_of(tree: ModuleTree, choice: Any) -> list[str]:
    """Return the names of the modules that a class, its name, or a pattern selects."""
    if isinstance(choice, str):
        classes = {own_class(module).__name__ for module in tree.modules.values()}
        if "*" in choice or choice in tree.modules:
            return tree.matching(choice)
        if choice.rpartition(".")[2] not in classes:
            msg = (
                f"experts= names {choice!r}, which is neither a class nor a module of this "
                f"{tree.class_name}. {nearest(choice, [*classes, *filter(None, tree.modules)])}"
            )
            raise WrapError(msg)
    elif not isinstance(choice, type):
        msg = f"experts= names modules by a class, its name, or a pattern, got {choice!r}."
        raise WrapError(msg)
    found = [name for names in chosen_by(tree, {choice}) for name in names]
    if not found:
        msg = f"experts= names {choice!r}, of which no module of this {tree.class_name} is."
        raise WrapError(msg)
    return found


def _check_stacks(
    name: str, module: nn.Module, held: Sequence[tuple[str, nn.Parameter]], meshes: ExpertMeshes
) -> None:
    kind = own_class(module).__name__
    shapes = {attribute: tuple(param.shape) for attribute, param in held}
    if not held or min(map(len, shapes.values())) == 0:
        msg = (
            f"experts= names {name!r}, a {kind}, whose own parameters are {shapes}: expected "
            f"stacks, of which dim 0 counts experts. Name the module that holds them itself, such "
            f"as 'layers.*.mlp.experts'. Experts that are modules of their own are not cut."
        )
        raise WrapError(msg)
    counts = {shape[0] for shape in shapes.values()}
    if len(counts) > 1 or counts.pop() % meshes.num_parts:
        msg = (
            f"experts= names {name!r}, a {kind}, whose own parameters are {shapes}: expected "
            f"stacks of equally many experts, as a multiple of the {meshes.num_parts} ranks of "
            f"{meshes.axis!r}. Name a module that holds only such stacks, or use another mesh."
        )
        raise WrapError(msg)
    for attribute, param in held:
        parts = tensor_parallel_of(param)
        if parts is None and type(param.detach()) is not torch.Tensor:
            msg = (
                f"parameter {name}.{attribute} is a {type(param).__name__}, which experts= does "
                f"not cut. Make it a plain parameter, or a DTensor on {meshes.axis!r} before."
            )
            raise WrapError(msg)
        if parts is None and torch_autograd.tensor_hooks(param):
            msg = (
                f"parameter {name}.{attribute} has a hook on its gradient (register_hook), which "
                f"expects that of all experts: experts= leaves a rank its part. Register the hook "
                f"after auto_shard, or remove it."
            )
            raise WrapError(msg)
        if parts is None or meshes.torch_mesh is None:
            continue
        of_axis = as_device_mesh(meshes.torch_mesh, device_type=meshes.dense.device_type).ranks
        if of_axis not in [split.axis.members for split in parts.splits if split.dim == 0]:
            msg = (
                f"parameter {name}.{attribute} is a DTensor with placements {parts.placements} on "
                f"the ranks {parts.mesh.describe_ranks()}: experts= spreads it over the axis "
                f"{meshes.axis!r}, of ranks [{listed(of_axis, str)}]. Leave it whole, or make it "
                f"a DTensor with Shard(0) there."
            )
            raise WrapError(msg)
