"""`fully_shard`: what it accepts, what it refuses, and the order in which it does things."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# Lets sharded tensors be pickled, and be known to torch's functions for state dicts.
from shardkit import _pickling  # noqa: F401
from shardkit._errors import MeshError, WrapError
from shardkit._module.deferred import execute_sharding
from shardkit._module.fsdp_module import own_class, swap_class
from shardkit._module.hooks import ModuleState, get_state
from shardkit._params.freed import is_unsharded
from shardkit._params.sites import ParamEntry
from shardkit._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardkit._runtime.group import ParamGroup, move_buffers
from shardkit._settings import GroupSettings
from shardkit._state import torch_state_dicts  # noqa: F401
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends import accelerator_type, as_device_mesh, tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit._mesh import DeviceMesh
    from shardkit.backends import TorchDeviceMesh

_MAX_MESH_NDIM = 2
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def fully_shard(  # noqa: PLR0913 - the signature of FSDP2
    module: Any,
    mesh: DeviceMesh | TorchDeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    reshard_after_forward: bool | int | None = None,  # noqa: FBT001 - the signature FSDP2's users know
    *,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard a module's parameters, gradients and optimizer state over a mesh, in place.

    All parameters in `module` that no earlier call took form one group: gathered by one
    all-gather just before the module's forward (and again before its backward), freed after, their
    gradients averaged by one reduce-scatter. So call it on the layers first, then on the root:

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    The user's own Parameter objects become the sharded ones (`ShardedTensor`): an optimizer, its
    parameter groups and every other reference made before this call stay valid. All ranks must
    hold equal parameters when they call it; nothing is sent.

    Parameters on the meta device are sharded there, so that no rank ever holds the whole model.
    Give them memory afterwards, ``model.to_empty(device=...)``, and values: by ``nn.init`` and each
    module's ``reset_parameters()``, or by ``load_state_dict`` (with ``assign=True`` also without
    `to_empty`).

    Parameters that are DTensors on another axis of the mesh (``parallelize_module``, which goes
    first) stay split over that axis and are sharded over this one. Their objects are replaced: make
    the optimizer after this call.

    Args:
        module: Has a forward. Its parameters are on the mesh's device. Or a list of modules: they
            form one group, which is gathered when the first of them runs and freed when all have
            run, or the root's forward ends; for small modules, and for experts that ranks choose
            among.
        mesh: 1-D: shard over it. 2-D: replicate over the first axis, shard over the second (hybrid
            sharding). shardkit's or torch's; None: all ranks, 1-D.
        mp_policy: Dtypes of compute, communication and outputs.
        reshard_after_forward: True: free the unsharded parameters after forward, gather again
            for backward (ZeRO-3). False: keep them from forward to backward (ZeRO-2). None: False
            for the root, True for others. A number n that divides the shard axis: between forward
            and backward each rank keeps 1/n of them, and backward gathers from n neighbouring
            ranks, such as those of one host.
        shard_placement_fn: Called with each parameter, as FSDP2 does; may return None or a
            ``Shard(dim)``. The dim has no effect: a piece is a flat range, and sizes that do not
            divide cost no padding in any dim.
        offload_policy: `CPUOffloadPolicy`: shards, gradients and optimizer state on the host.
        ignored_params: Left as they are: not sharded, not gathered, gradients not averaged.

    Returns:
        `module`, whose class is now ``FSDP<Class>``, a subclass of `FSDPModule` and of its own.

    Raises:
        WrapError: A module without forward, wrapped twice, a parameter on another device, with
            sparse gradients, a DTensor with other placements than Shard and Replicate, one that
            another group holds in another place (tied weights), or that cannot be exchanged in
            place. The module is as it was.
        MeshError: No process group, a mesh that does not hold this rank, more than two axes, or one
            that shares an axis with the mesh of a DTensor.

    Cost: per group and step (m micro-batches, P parameters): all-gather of ``P`` elements of
    `param_dtype` twice (once without resharding), reduce-scatter of ``P`` of `reduce_dtype`,
    m times. Memory per rank: ``1/N`` of parameters, gradients and optimizer state.
    Source: ZeRO-3, arXiv:1910.02054; PyTorch FSDP2.
    """
    modules = _modules_of(module)
    for each in modules:
        _check_module(each)
    ignored = ignored_params or set()
    _check_ignored(ignored)
    for each in modules:
        for inner in each.modules():
            state = get_state(inner)
            if state is not None and state.group is not None:
                state.group.show(unsharded=False)
    _check_ties(modules, ignored)
    candidates = list(_find_params(modules, ignored))
    _check_not_taken(modules, candidates)
    shard_mesh = as_device_mesh(mesh, device_type=_device_type(candidates, offload_policy))
    _check_mesh(shard_mesh)
    reshard = _checked_reshard(reshard_after_forward, shard_mesh)
    _check_params(candidates, shard_mesh, offload_policy)
    _check_reparametrized(candidates)
    if shard_placement_fn is not None:
        _check_placements(candidates, shard_placement_fn)
    group = None
    if candidates:
        group = ParamGroup(
            modules,
            candidates,
            mesh=shard_mesh,
            policy=mp_policy,
            offload=offload_policy,
            settings=GroupSettings(reshard_after_forward=reshard),
        )
        group.swap_in_params()
    for each in modules:
        move_buffers(each, shard_mesh.backend)
        if mp_policy.buffer_dtype is not None:
            _cast_buffers(each, mp_policy.buffer_dtype)
        ModuleState(each, group, mp_policy).install()
        swap_class(each)
    if shard_mesh.backend.is_traced:
        execute_sharding(shard_mesh.backend.region)
    return module


# --- checks: nothing is changed before all have passed ------------------------------------------


def _modules_of(module: Any) -> list[nn.Module]:
    """Return the modules to shard together, without those that are inside of others."""
    if not isinstance(module, (list, tuple)):
        return [module]
    if not module:
        msg = "fully_shard got an empty list. Pass the modules that are to form a group."
        raise WrapError(msg)
    inside = {
        inner
        for each in module
        if isinstance(each, nn.Module)
        for inner in each.modules()
        if inner is not each
    }
    return [each for each in dict.fromkeys(module) if each not in inside]


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        msg = f"fully_shard takes a module or a list of modules, got {type(module).__name__}."
        raise WrapError(msg)
    if get_state(module) is not None:
        msg = (
            f"fully_shard was called on this {own_class(module).__name__} before. Call it once "
            f"per module, on the layers first and on the root last."
        )
        raise WrapError(msg)
    if isinstance(module, _CONTAINERS) or type(module).forward is nn.Module.forward:
        msg = (
            f"{type(module).__name__} has no forward, so its parameters would never be gathered. "
            f"Call fully_shard on each module in it, or on a list of them to form one group, then "
            f"on the module that holds it."
        )
        raise WrapError(msg)
    for name, child in module.named_modules():
        if isinstance(child, nn.parallel.DistributedDataParallel):
            msg = (
                f"{name or 'the module'} is wrapped in DistributedDataParallel, which would "
                f"average gradients a second time. Use fully_shard alone; to replicate between "
                f"hosts pass a 2-D mesh."
            )
            raise WrapError(msg)


def _check_ignored(ignored: set[nn.Parameter]) -> None:
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            msg = (
                f"ignored_params takes Parameter objects, got {param!r}. Pass e.g. "
                f"{{module.gate.weight}}, not names."
            )
            raise WrapError(msg)


def _checked_reshard(value: object, mesh: DeviceMesh) -> bool | int | None:
    """Return `reshard_after_forward` with the numbers that mean True and False replaced."""
    if value is None or isinstance(value, bool):
        return value
    num_ranks = mesh.shape[-1]
    if not isinstance(value, int) or value < 1 or num_ranks % value:
        msg = (
            f"reshard_after_forward must be True, False, None (False for the root, True for "
            f"others) or a number of ranks that divides the shard axis of {num_ranks}, got "
            f"{value!r}."
        )
        raise WrapError(msg)
    if value == num_ranks:
        return True
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps whole parameters between forward and backward, as False "
            "does. Pass True to shard them over all ranks.",
            stacklevel=3,
        )
        return False
    return value


class _Held(NamedTuple):
    """One place of a parameter.

    Attributes:
        root: The module that was given.
        name: From there.
        module: In `root`, holds it.
        attribute: As what.
        param: The parameter.
    """

    root: nn.Module
    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


def _held(modules: list[nn.Module]) -> Iterator[_Held]:
    """Yield every place of every parameter in modules, tied ones once per place."""
    for root in modules:
        for prefix, module in root.named_modules():
            for attribute, param in module._parameters.items():  # noqa: SLF001 - keeps tied ones apart
                if param is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    yield _Held(root, name, module, attribute, param)


def _check_not_taken(modules: list[nn.Module], found: list[ParamEntry]) -> None:
    """Raise if a module's parameters all belong to a module around it."""
    if found:
        return
    sharded = [child for module in modules for child in module.modules() if get_state(child)]
    below = {id(child) for each in sharded for child in each.modules()}
    for held in _held(modules):
        if _is_taken(held.param) and id(held.module) not in below:
            msg = (
                f"parameter {held.name!r} of this {type(held.root).__name__} is sharded already, "
                f"by a call on a module around it. Call fully_shard on the inner modules first, on "
                f"the outer ones after them."
            )
            raise WrapError(msg)


def _is_taken(param: nn.Parameter) -> bool:
    """Whether a parameter is a group's: its sharded one, or the unsharded one that is shown now."""
    return isinstance(param, ShardedTensor) or is_unsharded(param)


def _check_placements(found: list[ParamEntry], fn: Callable[[nn.Parameter], Any]) -> None:
    for item in found:
        placement = fn(item.param)
        dim = getattr(placement, "dim", None)
        if placement is not None and not isinstance(dim, int):
            msg = (
                f"shard_placement_fn returned {placement!r} for {item.name!r}; it may return None "
                f"or a Shard(dim). For parameters on another mesh call fully_shard on their module "
                f"with that mesh first."
            )
            raise WrapError(msg)
        if dim is not None and not -max(item.param.ndim, 1) <= dim < max(item.param.ndim, 1):
            msg = (
                f"shard_placement_fn returned {placement!r} for {item.name!r} of shape "
                f"{tuple(item.param.shape)}, which has no dim {dim}."
            )
            raise WrapError(msg)


def _check_ties(modules: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Refuse places of a parameter that its group does not know: it is not gathered for them."""
    ignored_ids = {id(param) for param in ignored}
    for held in _held(modules):
        param = held.param
        if not isinstance(param, ShardedTensor) or id(param) in ignored_ids:
            continue
        entry = param.spec.entry() if param.spec.entry is not None else None
        if entry is None or entry.param is not param:
            continue
        if (held.module, held.attribute) in entry.sites:
            continue
        owner, owner_attribute = entry.sites[0]
        msg = (
            f"parameter {held.name!r} of {own_class(held.root).__name__} is tied: the same "
            f"Parameter is {owner_attribute!r} of {own_class(owner).__name__}, whose group gathers "
            f"it for that module alone. Take all modules that hold it in one fully_shard call: "
            f"shard neither by itself, but the module that holds both, or a list of both."
        )
        raise WrapError(msg)


def _find_params(modules: list[nn.Module], ignored: set[nn.Parameter]) -> Iterator[ParamEntry]:
    """Yield parameters that no group has taken, each with all the places that hold it."""
    ignored_ids = {id(param) for param in ignored}
    found: dict[int, ParamEntry] = {}
    for held in _held(modules):
        if id(held.param) not in ignored_ids and not _is_taken(held.param):
            item = found.setdefault(id(held.param), ParamEntry(held.name, held.param, []))
            item.sites.append((held.module, held.attribute))
    yield from found.values()


def _device_type(found: list[ParamEntry], offload: OffloadPolicy) -> str:
    """Return the device type of the default mesh."""
    types = [item.param.device.type for item in found]
    type_ = next((each for each in types if each != "meta"), None)
    may_be_moved = type_ is None or (type_ == "cpu" and isinstance(offload, CPUOffloadPolicy))
    accelerator = accelerator_type() if found and may_be_moved else None
    return accelerator or type_ or "cpu"


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim > _MAX_MESH_NDIM:
        msg = (
            f"fully_shard takes a 1-D mesh (shard) or a 2-D one (replicate, shard), got "
            f"{mesh.ndim} axes {mesh.mesh_dim_names or mesh.shape}. Pass a submesh, "
            f"e.g. mesh['shard']."
        )
        raise MeshError(msg)
    if mesh.get_coordinate() is None:
        msg = (
            f"rank {mesh.rank} is not in the mesh of ranks {mesh.describe_ranks()}. Call "
            f"fully_shard only on ranks of the mesh, or make a mesh that holds all of them."
        )
        raise MeshError(msg)


def _check_params(found: list[ParamEntry], mesh: DeviceMesh, offload: OffloadPolicy) -> None:
    may_be_offloaded = isinstance(offload, CPUOffloadPolicy)
    for item in found:
        param = item.param
        has_own_memory = mesh.backend.has_own_memory
        may_be_on_host = may_be_offloaded or has_own_memory
        if has_own_memory and param.device.type == mesh.device_type:
            _check_current_device(item.name, param, mesh)
        if param.device.type not in (mesh.device_type, "meta") and not (
            may_be_on_host and param.device.type == "cpu"
        ):
            msg = (
                f"parameter {item.name!r} is on {param.device}, the mesh is of device type "
                f"{mesh.device_type!r}. Move the module first: "
                f"module.to({str(mesh.backend.device)!r})."
            )
            raise WrapError(msg)
        tensor_parallel = tensor_parallel_of(param)
        if tensor_parallel is not None:
            tensor_parallel.check(item.name, param, mesh)
        sparse = next(
            (site for site, _ in item.sites if getattr(site, "sparse", None) is True), None
        )
        if isinstance(sparse, (nn.Embedding, nn.EmbeddingBag)) and param.requires_grad:
            msg = (
                f"parameter {item.name!r} of {own_class(sparse).__name__} gets sparse gradients "
                f"(sparse=True), which cannot be cut into flat ranges and averaged. Make the "
                f"module with sparse=False, freeze the parameter, or pass it in ignored_params."
            )
            raise WrapError(msg)


def _check_current_device(name: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Raise if a parameter is on another card than the one that this process communicates from."""
    current = mesh.backend.device
    if param.device != current:
        kind = mesh.device_type
        msg = (
            f"parameter {name!r} is on {param.device}, but the current device of this process is "
            f"{current}: its collectives would run there, as those of other ranks that never chose "
            f"a device. Call torch.{kind}.set_device({param.device.index}), as a rule "
            f"torch.{kind}.set_device(int(os.environ['LOCAL_RANK'])), before the mesh is made."
        )
        raise WrapError(msg)


def _check_reparametrized(found: list[ParamEntry]) -> None:
    """Refuse what keeps a whole weight, computed from parameters, on the module for good."""
    for item in found:
        for module, _ in item.sites:
            for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - no public way to list
                for kind, remedy in _KEEP_WHOLE_WEIGHTS.items():
                    if isinstance(hook, kind):
                        msg = (
                            f"parameter {item.name!r} of a {type(module).__name__} is used by "
                            f"{kind.__module__}, which leaves a whole weight, computed in every "
                            f"forward, on the module: it would never be sharded. {remedy}"
                        )
                        raise WrapError(msg)


_KEEP_WHOLE_WEIGHTS = {
    WeightNorm: "Use torch.nn.utils.parametrizations.weight_norm instead.",
    SpectralNorm: "Use torch.nn.utils.parametrizations.spectral_norm instead.",
    BasePruningMethod: "Call torch.nn.utils.prune.remove() before fully_shard.",
}
"""Hooks of older ways to compute weights, and what to do."""


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of `module`, not those of sharded modules in it."""
    for child in module.modules():
        if child is not module and get_state(child) is not None:
            continue
        for name, buffer in child._buffers.items():  # noqa: SLF001 - named_buffers skips None
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)  # noqa: SLF001
