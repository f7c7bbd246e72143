"""What `fully_shard` takes and refuses, and which parameters it finds.

Nothing is changed before all checks have passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardkit._compat import torch_autograd, torch_fsdp2, torch_tensors
from shardkit._errors import MeshError, WrapError, warn_user
from shardkit._module.fsdp_module import own_class
from shardkit._module.hooks import get_state
from shardkit._params.memory import is_unsharded
from shardkit._params.sites import ParamEntry
from shardkit._settings import CPUOffloadPolicy, OffloadPolicy
from shardkit._tensor.client_answers import refused_grad_dtype
from shardkit._tensor.sharded import ShardedTensor, refused_hook
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh

MAX_MESH_NDIM = 2
PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Classes that are never units: the modules that hold them use their parameters directly."""
MODULE_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Classes whose modules run only as code chooses; a subclass may have a forward of its own."""


def why_never_gathered(module: nn.Module) -> str | None:
    """Return why no call of a module would gather its parameters; None: calls of it do."""
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        return "has no forward"
    if isinstance(module, PARAMETER_CONTAINERS):
        return "is a container, whose parameters may be used without it"
    return None


def check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        msg = f"fully_shard takes a module or a list of modules, got {type(module).__name__}."
        raise WrapError(msg)
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(_of_jit("the module"))
    if get_state(module) is not None:
        msg = (
            f"fully_shard was called on this {own_class(module).__name__} before. Call it once "
            f"per module, on the layers first and on the root last."
        )
        raise WrapError(msg)
    if torch_fsdp2.is_replicated(module):
        msg = (
            f"replicate() was called on this {own_class(module).__name__}, and averages the "
            f"gradients of its parameters already. Call fully_shard on modules in it, before their "
            f"first forward, or use a 2-D mesh instead of replicate()."
        )
        raise WrapError(msg)
    why = why_never_gathered(module)
    # Methods of a class of the user's are registered later (`register_fsdp_forward_method`).
    containers = (*MODULE_CONTAINERS, *PARAMETER_CONTAINERS)
    may_have_methods = type(module) is not nn.Module and not isinstance(module, containers)
    if why is not None and not may_have_methods:
        inner = "each module in it, or on a list of them to form one group, then on "
        inner = "" if isinstance(module, PARAMETER_CONTAINERS) else inner
        msg = (
            f"{type(module).__name__} {why}, so its parameters would never be gathered. "
            f"Call fully_shard on {inner}the module that holds it."
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
        if torch_fsdp2.is_sharded_by_torch(child):
            msg = (
                f"torch's own fully_shard was called on {name or 'the module'} before, and shards "
                f"its parameters. Call shardkit's alone, on a model that is not sharded; under "
                f"shardkit.install() call that before anything imports fully_shard."
            )
            raise WrapError(msg)


def checked_ignored(ignored_params: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    """Return the ignored parameters; ``module.parameters()`` yields each of them only once."""
    given: Any = () if ignored_params is None else ignored_params
    ignored = set(given if isinstance(given, Iterable) else [given])
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            msg = (
                f"ignored_params takes Parameter objects, got {param!r}. Pass e.g. "
                f"{{module.gate.weight}} or set(module.gate.parameters()), not names or modules."
            )
            raise WrapError(msg)
    return ignored


def checked_reshard(
    value: object, mesh: DeviceMesh, others: Sequence[DeviceMesh] = ()
) -> bool | int | None:
    """Return `reshard_after_forward` with the numbers that mean True and False replaced.

    Other meshes on which each rank holds parameters whole do not count: nothing is resharded there.
    """
    if value is None or isinstance(value, bool):
        return value
    sizes = [mesh.shape[-1], *(other.shape[-1] for other in others if other.shape[-1] > 1)]
    for num_ranks in sizes:
        if not isinstance(value, int) or value < 1 or num_ranks % value:
            msg = (
                f"reshard_after_forward must be True, False, None (False for the root, True for "
                f"others) or a number of ranks that divides the shard axis of {num_ranks}, got "
                f"{value!r}."
            )
            if len(sizes) > 1:
                msg += f" The group's parameters lie on meshes with shard axes of {sizes} ranks."
            raise WrapError(msg)
    if all(value == num_ranks for num_ranks in sizes):
        return True
    if value == 1:
        warn_user(
            "reshard_after_forward=1 keeps whole parameters between forward and backward, as False "
            "does. Pass True to shard them over all ranks."
        )
        return False
    assert isinstance(value, int)
    return value


class _Held(NamedTuple):
    """One place of a parameter; the name is as seen from the module that was given."""

    root: nn.Module
    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


def _held(modules: list[nn.Module]) -> Iterator[_Held]:
    """Yield every place of every parameter in modules, tied ones once per place.

    Parameters in modules that torch's composable `replicate` has taken are left out.
    """
    for root in modules:
        replicated = [m for m in root.modules() if torch_fsdp2.is_replicated(m)]
        left_out = {id(inner) for each in replicated for inner in each.modules()}
        for prefix, module in root.named_modules():
            if id(module) in left_out:
                continue
            for attribute, param in module._parameters.items():  # noqa: SLF001 - keeps tied ones apart
                if param is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    yield _Held(root, name, module, attribute, param)


def check_not_taken(modules: list[nn.Module], found: list[ParamEntry]) -> None:
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
    """Whether a parameter belongs to a group, as its sharded one or the unsharded one now shown."""
    return isinstance(param, ShardedTensor) or is_unsharded(param)


def check_ties(modules: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Refuse a parameter in places that its group does not know: it is not gathered for them."""
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


def find_params(modules: list[nn.Module], ignored: set[nn.Parameter]) -> Iterator[ParamEntry]:
    """Yield parameters that no group has taken, each with all the places that hold it."""
    ignored_ids = {id(param) for param in ignored}
    found: dict[int, ParamEntry] = {}
    for held in _held(modules):
        if id(held.param) not in ignored_ids and not _is_taken(held.param):
            item = found.setdefault(id(held.param), ParamEntry(held.name, held.param, []))
            item.sites.append((held.module, held.attribute))
    yield from found.values()


def check_kinds(found: Iterable[ParamEntry]) -> None:
    """Refuse parameters of compiled graphs, and of lazy modules, whose shapes a forward tells."""
    for item in found:
        if any(isinstance(module, torch.jit.ScriptModule) for module, _ in item.sites):
            raise WrapError(_of_jit(f"the module of parameter {item.name!r}"))
        if nn.parameter.is_lazy(item.param):
            module, attribute = item.sites[0]
            msg = (
                f"parameter {item.name!r} has no shape yet: {own_class(module).__name__} makes its "
                f"{attribute} in its first forward. Run the model once, on a batch of the right "
                f"shape and with one seed on all ranks, before it is sharded."
            )
            raise WrapError(msg)


def _of_jit(what: str) -> str:
    return (
        f"{what} is scripted or traced by torch.jit, which keeps parameters that cannot be "
        f"exchanged. Shard the module that it was made from, use torch.compile instead, or pass "
        f"its parameters as ignored_params to the call on a module around it."
    )


_taken_memory: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[int, tuple[int, str]]] = (
    weakref.WeakKeyDictionary()
)
"""Id and name of each parameter that was sharded, by its memory from before and its place in it.

As a rule the memory goes with the call. It stays where something else uses it.
"""


def warn_of_shared_memory(found: list[ParamEntry], mesh: DeviceMesh) -> None:
    """Warn of Parameters that share one memory: each gets memory of its own, and trains alone."""
    for item in found:
        memory = _memory_of(item.param)
        if memory is None:
            continue
        storage, start = memory
        known = _taken_memory.setdefault(storage, {})
        other_id, other_name = known.setdefault(start, (id(item.param), item.name))
        if other_id != id(item.param) and item.param.requires_grad:
            msg = (
                f"parameters {other_name!r} and {item.name!r} share one memory, but are two "
                f"Parameters: fully_shard gives each memory of its own, so they train apart from "
                f"now on. To tie them, let both modules hold one Parameter before fully_shard: "
                f"b.weight = a.weight."
            )
            warn_user(msg, is_first_rank=mesh.is_first_rank)


def warn_of_lost_classes(found: list[ParamEntry], mesh: DeviceMesh) -> None:
    """Warn of a trained subclass of Parameter: optimizers that ask for it take it for a plain one.

    Those that gather themselves, and quantized weights, have ways of their own.
    """
    told: set[type] = {nn.Parameter}
    for item in found:
        param: Any = item.param
        cls = type(param)
        is_new = issubclass(cls, nn.Parameter) and cls not in told
        if is_new and param.requires_grad and not hasattr(param, "fsdp_pre_all_gather"):
            told.add(cls)
            msg = (
                f"parameter {item.name!r} is a {cls.__name__}: fully_shard keeps its values and "
                f"attributes, but not its class. An optimizer that asks for the class trains it as "
                f"a plain parameter. If yours does, pass it in ignored_params, and average its "
                f"gradient over the ranks."
            )
            warn_user(msg, is_first_rank=mesh.is_first_rank)


def _memory_of(param: Any) -> tuple[torch.UntypedStorage, int] | None:
    """Return the storage of a parameter and its first element in it; None if it has none."""
    part = param.to_local() if tensor_parallel_of(param) is not None else param
    is_plain = type(part) in (torch.Tensor, nn.Parameter) and part.layout is torch.strided
    if not is_plain or part.device.type == "xla" or not part.numel():
        return None
    return part.untyped_storage(), part.storage_offset()


def check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim > MAX_MESH_NDIM:
        msg = (
            f"fully_shard takes a 1-D mesh (shard) or a 2-D one (replicate, shard), got "
            f"{mesh.ndim} axes {mesh.mesh_dim_names or mesh.shape}. Pass a submesh, "
            f"e.g. mesh['shard']."
        )
        raise MeshError(msg)
    check_in_mesh(mesh)


def check_in_mesh(mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        msg = (
            f"rank {mesh.rank} is not in the mesh of ranks {mesh.describe_ranks()}. Call "
            f"fully_shard only on ranks of the mesh, or make a mesh that holds all of them."
        )
        raise MeshError(msg)


def check_params(found: list[ParamEntry], mesh: DeviceMesh, offload: OffloadPolicy) -> None:
    """Refuse parameters that cannot be sharded over the mesh of the call or over their own mesh."""
    may_be_offloaded = isinstance(offload, CPUOffloadPolicy)
    mesh_of_group = mesh
    for item in found:
        param, mesh = item.param, item.mesh or mesh_of_group
        has_own_memory = mesh.backend.has_own_memory
        if has_own_memory and param.device.type == mesh.device_type:
            _check_current_device(item.name, param, mesh)
        allowed = {mesh.device_type, "meta"}
        allowed |= {"cpu"} if may_be_offloaded or has_own_memory else set()
        if param.device.type not in allowed:
            msg = (
                f"parameter {item.name!r} is on {param.device}, the mesh is of device type "
                f"{mesh.device_type!r}. Move the module first: "
                f"module.to({str(mesh.backend.device)!r})."
            )
            raise WrapError(msg)
        tensor_parallel = item.split
        if tensor_parallel is not None:
            inner = tensor_parallel.outside(mesh) if item.is_spmd else tensor_parallel
            inner.check(item.name, param, mesh)
        _check_embeddings(item, mesh)
        for hook in (torch_autograd.tensor_hooks(param) or {}).values():
            refusal = refused_hook(hook)
            if refusal is not None:
                msg = f"parameter {item.name!r} {refusal}"
                raise WrapError(msg)
        grad_dtype = torch_tensors.grad_dtype_of(param)
        refusal = refused_grad_dtype(param.dtype, grad_dtype)
        if refusal is not None:
            msg = f"parameter {item.name!r} has grad_dtype={grad_dtype}: {refusal}"
            raise WrapError(msg)


def _check_embeddings(item: ParamEntry, mesh: DeviceMesh) -> None:
    """Refuse embeddings with sparse gradients, and those that write at lookup.

    The latter would change, on each rank, the rows that it looks up.
    """
    for site, _ in item.sites:
        if not isinstance(site, (nn.Embedding, nn.EmbeddingBag)):
            continue
        of = f"parameter {item.name!r} of {own_class(site).__name__}"
        if getattr(site, "sparse", False) and item.param.requires_grad:
            msg = (
                f"{of} gets sparse gradients (sparse=True), which cannot be cut into flat ranges "
                f"and averaged. Make the module with sparse=False, freeze the parameter, or pass "
                f"it in ignored_params."
            )
            raise WrapError(msg)
        max_norm = getattr(site, "max_norm", None)
        if max_norm and mesh.size() > 1:
            msg = (
                f"{of} has max_norm={max_norm}: its forward writes to the rows that it looks "
                f"up, on each rank to others. Make the module without max_norm, and after each "
                f"optimizer.step() write, under torch.no_grad(): "
                f"weight.copy_(torch.renorm(weight, 2, 0, {max_norm}))."
            )
            raise WrapError(msg)


def _check_current_device(name: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Raise if a parameter is not on the card from which this process communicates."""
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
