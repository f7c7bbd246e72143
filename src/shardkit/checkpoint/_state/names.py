"""Names of parameters as they are without wrappers, and the parameters of optimizers.

In checkpoints, parameters have the names of the model as it was written. ``torch.compile``,
DistributedDataParallel and checkpoint wrappers put a module around another one, and the names in a
checkpoint leave the wrapper out. They are the same as in torch's ``get_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError
from shardkit._params.bucket import bucket_showing
from shardkit._settings import refuse_non_module
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from shardkit._mesh import DeviceMesh

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes in which a compiled module and a checkpoint wrapper keep the wrapped module."""
_MAYBE_WRAPPED = frozenset({*_WRAPPED, "module"})


EXTRA_STATE = "_extra_state"  # Last part of the name that torch gives to a module's own state.


def plain_name(model: nn.Module, name: str) -> str:
    """Return a parameter's, buffer's or module's name without wrappers."""
    if "." not in name or _MAYBE_WRAPPED.isdisjoint(name.split(".")):
        return name
    parts: list[str] = []
    module: Any = model
    for part in name.split("."):
        is_wrapped = part in _WRAPPED or (
            part == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        )
        if not is_wrapped:
            parts.append(part)
        module = getattr(module, part, None)
    return ".".join(parts)


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every name of each parameter, in the order of the model; tied ones have several."""
    refuse_non_module(CheckpointError, model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        bucket = bucket_showing(param)
        # Optimizers hold the sharded parameter, also while a module shows the unsharded one.
        held = param if bucket is None else bucket.sharded_of(param)
        names.setdefault(held, []).append(plain_name(model, name))
    return names


def as_optimizers(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    """Return one or several optimizers as a tuple.

    Raises:
        CheckpointError: They are none.
    """
    # The class does not tell: wrappers of optimizers are no subclasses of it.
    given: Any = (optimizers,) if hasattr(optimizers, "param_groups") else optimizers
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(hasattr(each, "param_groups") for each in found):
        msg = (
            f"optimizers: expected an optimizer or a list of them, not {type(optimizers).__name__}."
        )
        raise CheckpointError(msg)
    return found


def names_in_groups(
    model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[torch.optim.Optimizer, list[list[list[str]]]]]:
    """Yield each optimizer, and the names of each parameter of each of its groups.

    Raises:
        CheckpointError: The model lacks a parameter, or two of the optimizers have the same one.
    """
    names = names_of_parameters(model)
    owners: dict[nn.Parameter, int] = {}
    for number, optimizer in enumerate(as_optimizers(optimizers)):
        for i, group in enumerate(optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                if param not in names:
                    msg = (
                        f"parameter {j} of group {i} of the optimizer, of shape "
                        f"{tuple(param.shape)}, is not in the model: its state has no name to be "
                        f"saved or loaded by. Pass the model that holds all of the optimizer's "
                        f"parameters."
                    )
                    raise CheckpointError(msg)
                if owners.setdefault(param, number) != number:
                    msg = (
                        f"{names[param][0]!r} is a parameter of optimizers {owners[param]} and "
                        f"{number} of the list. A state by parameter names has room for the state "
                        f"of one of them. Save and load such optimizers in checkpoints of their "
                        f"own."
                    )
                    raise CheckpointError(msg)
        yield optimizer, [[names[param] for param in g["params"]] for g in optimizer.param_groups]


def split_at_name(text: str, known: Container[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the known name with which a text begins, and the parts after it; None: none."""
    parts = text.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        if name in known:
            return name, tuple(parts[end:])
    return None


# --- tensors of a model ---------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict: the tensors themselves, also hidden sharded ones.

    Raises:
        CheckpointError: `model` is no module.
    """
    hint = "Where a function takes a path and a model, the path comes first."
    refuse_non_module(CheckpointError, model, hint)
    state = model.state_dict(keep_vars=True)
    return {plain_name(model, name): value for name, value in state.items()}


def names_of_tensors(state: Mapping[str, Any]) -> dict[Tensor, list[str]]:
    """Return every name of each tensor of a state, in order."""
    names: dict[Tensor, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            names.setdefault(value, []).append(name)
    return names


def memory_of(tensor: Any) -> Tensor:
    """Return this rank's memory of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local_piece.detach()
    held: Tensor = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
    return held


def fill_memory(target: Tensor, device: torch.device, fill: Callable[[Tensor], object]) -> None:
    """Have `fill` write this rank's memory of a tensor of the model.

    A tensor on meta gets memory when it is filled, and stays the same object: a plain one on
    `device`, a sharded one on the device of its mesh.
    """
    if isinstance(target, ShardedTensor):
        if not target.is_meta:
            # A view of the shard; its version shows later gathers that it has changed.
            fill(target.to_local())
            return
        spec = target.spec
        piece = torch.empty(spec.stop - spec.start, dtype=target.dtype, device=spec.device)
        fill(piece)
        target.replace_piece(piece)
    elif target.is_meta:
        new = torch.empty(target.shape, dtype=target.dtype, device=device)
        fill(new)
        give_memory(target, new)
    else:
        # Writes to what is detached from a sparse tensor do not reach the tensor.
        fill(target.detach() if target.layout is torch.strided else target)


def give_memory(target: Tensor, memory: Tensor) -> None:
    """Give a plain tensor of the model, which stays the same object, the memory of another one."""
    if isinstance(target, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=target.requires_grad)
    torch.utils.swap_tensors(target, memory)
    target.__dict__.update(memory.__dict__)


def set_extra_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Set the modules' extra state, by its names in the state dict."""
    for name, module in model.named_modules():
        key = f"{plain_name(model, name)}.{EXTRA_STATE}".removeprefix(".")
        # A wrapper has the name of the module that it wraps, but no such state.
        has_state = type(module).set_extra_state is not nn.Module.set_extra_state
        if has_state and key in values:
            module.set_extra_state(values[key])


def device_of(values: Iterable[Any]) -> torch.device:
    """Return the device where ranks exchange tensors of a state, and where meta tensors belong."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if isinstance(tensor, ShardedTensor):
            return tensor.spec.device
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def mesh_of(state: dict[str, Any], path: object, *, allow_meta: bool = False) -> DeviceMesh:
    """Return the mesh of all ranks that hold the model; refuse none, several, or one on meta."""
    on_meta = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if on_meta and not allow_meta:
        msg = f"{on_meta[0]!r} is on the meta device and has no values to write to {path}."
        raise CheckpointError(msg)
    meshes = [v.spec.mesh for v in state.values() if isinstance(v, ShardedTensor)]
    if not meshes:
        msg = (
            f"the model for {path} has no sharded parameters. Call fully_shard first; a plain "
            f"model is saved and loaded by torch.save, torch.load or safetensors."
        )
        raise CheckpointError(msg)
    # Tensor-parallel parameters are on more ranks than the others.
    largest: DeviceMesh = max(meshes, key=lambda mesh: len(mesh.ranks))
    other = next((m for m in meshes if not set(m.ranks) <= set(largest.ranks)), None)
    if other is not None:
        msg = (
            f"the model for {path} lies on several meshes, of ranks {largest.describe_ranks()} and "
            f"{other.describe_ranks()}. Save its parts one by one."
        )
        raise CheckpointError(msg)
    return largest
