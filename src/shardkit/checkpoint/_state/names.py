"""Names of parameters as they are without wrappers, and whom optimizers' parameters belong to.

In checkpoints parameters have the names that they have in the model as it was written:
``torch.compile``, DistributedDataParallel and checkpoint wrappers put a module around another, of
which the names in a checkpoint know nothing. The same names as in torch's ``get_state_dict``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardkit._errors import CheckpointError
from shardkit._params.bucket import bucket_showing

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    import torch

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where a compiled module and a checkpoint wrapper keep the module that they wrap."""


EXTRA_STATE = "_extra_state"
"""Last part of the name under which torch has a module's own state."""


def plain_name(model: nn.Module, name: str) -> str:
    """Return a parameter's, buffer's or module's name without those of wrappers."""
    if "." not in name:
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


def sharded_parameter(param: nn.Parameter) -> nn.Parameter:
    """Return what optimizers hold of a parameter, also while a module shows the unsharded one."""
    bucket = bucket_showing(param)
    return param if bucket is None else bucket.sharded_of(param)


def names_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every name of each parameter, in the order of the model; tied ones have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(sharded_parameter(param), []).append(plain_name(model, name))
    return names


def as_optimizers(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    """Return one or several optimizers as a tuple."""
    # Not by the class: wrappers of optimizers are no subclasses of it.
    one_or_several: Any = optimizers
    return (one_or_several,) if hasattr(optimizers, "param_groups") else tuple(one_or_several)


def names_in_groups(
    names: dict[nn.Parameter, list[str]], optimizer: torch.optim.Optimizer
) -> list[list[list[str]]]:
    """Return the names of each parameter of each group of an optimizer.

    Raises:
        CheckpointError: The optimizer holds a parameter that the model does not.
    """
    return [
        [_names_of(names, param, i, j) for j, param in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def _names_of(
    names: dict[nn.Parameter, list[str]], param: Any, group: int, position: int
) -> list[str]:
    found = names.get(param)
    if found is None:
        msg = (
            f"parameter {position} of group {group} of the optimizer, of shape "
            f"{tuple(param.shape)}, is not in the model: its state has no name to be saved or "
            f"loaded by. Pass the model that holds all of the optimizer's parameters."
        )
        raise CheckpointError(msg)
    return found


def split_at_name(text: str, known: Container[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the parameter's name that a text begins with, and what is behind it; None: none."""
    parts = text.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        if name in known:
            return name, tuple(parts[end:])
    return None
