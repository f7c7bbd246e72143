"""Looks once at what an optimizer updates: parameters that no group holds, or another model's.

These train without an error, and wrongly. So do unsharded ones, which are shown for a while.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardkit._errors import StateError
from shardkit._module.optimizer_state import cut_whole_state, forget_known
from shardkit._params.freed import NAME_ATTRIBUTE, is_unsharded
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardkit._runtime.group import ParamGroup

_MAX_NAMED = 6
_LATER = (
    "fully_shard([m for m in model.modules() if any(type(p) is torch.nn.Parameter for p in "
    "m.parameters(recurse=False))])"
)
"""Shards what is not yet, wherever it is in a model."""

_groups: weakref.WeakSet[ParamGroup] = weakref.WeakSet()
_ignored: set[int] = set()  # By id: torch swaps no tensor that has a weak reference.
_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_is_installed = False


def note_ignored(params: Iterable[nn.Parameter]) -> None:
    """Know parameters that are to stay as they are."""
    _ignored.update(map(id, params))


def note_groups(groups: Iterable[ParamGroup]) -> None:
    """Know groups that begin to be trained."""
    _groups.update(groups)


def watch_optimizers() -> None:
    """Look at optimizers from now on, and again at all of them: parameters were sharded."""
    global _is_installed  # noqa: PLW0603 - torch's hook is of the process, too
    forget_known()
    _looked_at.clear()
    if not _is_installed:
        register_optimizer_step_pre_hook(cut_whole_state)
        register_optimizer_step_pre_hook(_look)
        _is_installed = True


def _look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn at the first step that finds gradients; called by torch before each step."""
    number = sum(len(each["params"]) for each in optimizer.param_groups)
    if _looked_at.get(optimizer) == number:  # Else `add_param_group` was called since.
        return
    params = [param for each in optimizer.param_groups for param in each["params"]]
    _refuse_unsharded(optimizer, params)
    if any(param.grad is not None for param in params):
        _looked_at[optimizer] = number
        _warn_of_plain(params)
    elif len(args) < 2 and not kwargs:  # noqa: PLR2004 - no closure, which would make gradients
        name = _trained_elsewhere()
        if name is not None:
            _looked_at[optimizer] = number
            warnings.warn(
                f"none of this optimizer's {len(params)} parameters has a gradient, but {name!r} "
                f"of a sharded model has one: the optimizer updates another model, perhaps a copy. "
                f"Make it of the parameters of the model that is trained: "
                f"{type(optimizer).__name__}(model.parameters()).",
                stacklevel=3,
            )


def _refuse_unsharded(optimizer: Optimizer, params: Iterable[Any]) -> None:
    """Refuse what `unshard` and forwards show for a while in the place of sharded parameters."""
    for param in params:
        if is_unsharded(param):
            kind = type(optimizer).__name__
            msg = (
                f"this {kind} holds the unsharded parameter {param.__dict__[NAME_ATTRIBUTE]!r}, "
                f"which a module shows only from unshard() to reshard(), in its forward, and from "
                f"there to backward. It is never trained. Make the {kind} while the model is "
                f"sharded: call reshard() first."
            )
            raise StateError(msg)


def _warn_of_plain(params: Sequence[Any]) -> None:
    sharded = [param for param in params if isinstance(param, ShardedTensor)]
    may_part = any(param.device_mesh.size() > 1 for param in sharded)
    if not may_part and (sharded or not any(group.mesh.size() > 1 for group in _groups)):
        return
    plain = [
        param
        for param in params
        if param.grad is not None and not isinstance(param, ShardedTensor) and not _is_known(param)
    ]
    averaged = _averaged_by_ddp() if plain else set()
    plain = [param for param in plain if id(param) not in averaged]
    if not plain:
        return
    model, names = _found_in(plain)
    groups = {id(module) for group in _groups for module in group.modules}
    if not may_part and not any(id(module) in groups for module in model.modules()):
        return  # A model beside sharded ones.
    named = ", ".join(names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    remedy = "Call fully_shard on the root as well, after its layers."
    if id(model) in groups:
        remedy = f"They came into the {type(model).__name__} after it was sharded: call {_LATER}."
    elif not may_part:
        remedy = f"Call fully_shard on the {type(model).__name__} that holds them as well."
    warnings.warn(
        f"no group of fully_shard holds {named}{more}, which this optimizer updates. Gradients of "
        f"these parameters are not averaged over the ranks, so each rank trains its own. {remedy} "
        f"If it is meant so, pass them in ignored_params.",
        stacklevel=4,
    )


def _is_known(param: Any) -> bool:
    """Whether it is meant to be outside: ignored by the user, or of tensor parallelism."""
    return id(param) in _ignored or tensor_parallel_of(param) is not None


def _averaged_by_ddp() -> set[int]:
    """Return the ids of parameters that DDP averages, or `replicate`, which makes a DDP."""
    ddps = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    return {id(param) for ddp in ddps for param in nn.Module.parameters(ddp)}


def _trained_elsewhere() -> str | None:
    """Return the name of a parameter that a group holds and that has a gradient."""
    return next(
        (
            entry.name
            for group in _groups
            for bucket in group.buckets
            for entry in bucket.entries
            if entry.param.grad is not None
        ),
        None,
    )


def _found_in(params: Sequence[Any]) -> tuple[nn.Module, list[str]]:
    """Return the largest, outermost module that has parameters; their names there, or shapes."""
    wanted = {id(param) for param in params}
    found = nn.Module()
    best: dict[int, str] = {}
    size = 0
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):
            continue
        names = {id(param): name for name, param in nn.Module.named_parameters(module)}
        rank, best_rank = (
            (len(wanted & names.keys()), len(names)),
            (len(wanted & best.keys()), size),
        )
        is_around = rank == best_rank and best and any(each is found for each in module.modules())
        if rank > best_rank or is_around:
            found, best, size = module, names, len(names)
    return found, [
        repr(best[id(param)]) if id(param) in best else f"a parameter of shape {tuple(param.shape)}"
        for param in params
    ]
