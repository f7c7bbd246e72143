"""Checks of what an optimizer updates, state that is older than `fully_shard`, compiled steps.

Parameters that no group holds, or those of another model, train wrongly and without an error. So do
unsharded parameters, which modules show for a while.
"""

from __future__ import annotations

import functools
import gc
import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardkit._compat import torch_modules
from shardkit._compat.once import once
from shardkit._errors import OptimizerError, StateError, warn_user
from shardkit._params.memory import NAME_ATTRIBUTE, is_unsharded
from shardkit._params.state_dicts import STATE_NUMBERS, cut_whole, leaves_of, map_leaves
from shardkit._runtime.agreement import is_on_part, note_step, rank_of_copy
from shardkit._runtime.group import STATE_ATTRIBUTE, ParamGroup
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import begin_step, end_step
from shardkit._text import listed
from shardkit.backends import tensor_parallel_of
from shardkit.backends.groups import current_world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# --- state from before fully_shard ----------------------------------------------------------------
#
# An optimizer may be older than `fully_shard`: Adagrad makes its state when it is constructed,
# others at their first step. `load_state_dict` may bring whole state as well, from a training
# without sharding.

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose state was checked, and cannot have become whole since then."""

_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that are checked again after ``load_state_dict``."""


def cut_whole_state(optimizer: Optimizer, *_: Any) -> None:
    """Cut state that has the whole shape of a sharded parameter in the way the parameter is cut.

    Torch calls this before each step of any optimizer.

    All ranks must hold the same state. Nothing is sent. The state is checked once, and again after
    ``optimizer.load_state_dict``; if that is not noticed, it is checked in each step. State of
    other shapes stays whole: rows and columns of Adafactor, and the vectors of LBFGS that span all
    parameters.
    """
    if optimizer in _known:
        return
    if _notices_loads(optimizer):
        _known.add(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        return  # Its vectors may be as long as its only parameter.
    numbers = _numbers(optimizer)
    for param, state in optimizer.state.items():
        if isinstance(param, ShardedTensor):
            for name, value in state.items():
                leaves = [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
                _check_has_values(optimizer, leaves, name, param)
                is_number = param.ndim == 0 and name in numbers
                if not is_number and any(_is_whole(leaf, param) for leaf in leaves):
                    state[name] = map_leaves(value, functools.partial(_cut, param, name))


def _notices_loads(optimizer: Optimizer) -> bool:
    """Have ``load_state_dict`` call for a new check, and return whether it will.

    Wrappers around optimizers may inherit from `Optimizer` without its constructor, and so have
    none of its hooks.
    """
    if optimizer not in _hooked:
        try:
            optimizer.register_load_state_dict_post_hook(_known.discard)
        except AttributeError:
            return False
        _hooked.add(optimizer)
    return True


def _cut(param: ShardedTensor, name: str, leaf: Any) -> Any:
    return cut_whole(leaf, param, name) if _is_whole(leaf, param) else leaf


def _is_whole(leaf: Any, param: ShardedTensor) -> bool:
    is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, ShardedTensor)
    return is_plain and leaf.shape == param.shape


def _numbers(optimizer: Optimizer) -> set[str]:
    """Return the names of state that is one number for each parameter, whatever its shape.

    For a parameter without dims such a number also has the parameter's shape.
    """
    found = set(STATE_NUMBERS)
    for key, state in optimizer.state.items():
        param: Any = key
        if getattr(param, "ndim", 0) > 0:
            found |= {n for n, v in state.items() if isinstance(v, Tensor) and v.ndim == 0}
    return found


def _check_has_values(
    optimizer: Optimizer, leaves: list[Tensor], name: str, param: ShardedTensor
) -> None:
    if not param.is_meta and any(leaf.is_meta for leaf in leaves):
        kind = type(optimizer).__name__
        msg = (
            f"state {name!r} of parameter {param.spec.name!r} is on the meta device, without "
            f"values: this {kind} was made, and made its state, before the parameters got values. "
            f"Make the {kind} after materialize(), load_full() or to_empty()."
        )
        raise StateError(msg)


# --- compiled steps -------------------------------------------------------------------------------

_paused: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""Optimizers whose step runs now as it is, though its caller is compiled."""


@torch_modules.not_traced_itself
def _pause_compiler(optimizer: Optimizer, *_: Any) -> None:
    """Run a compiled step as it is, if it updates sharded parameters.

    Operators on sharded tensors are not compiled. Between them torch's code asks whether it is
    compiled, and computes in another way then.
    """
    paused = torch_modules.pause_compiler()
    _paused.pop(optimizer, None)  # Its last step raised.
    if paused is None:
        return
    if any(isinstance(param, ShardedTensor) for param in _params_of(optimizer)):
        _paused[optimizer] = paused
    else:
        torch_modules.resume_compiler(paused)


@torch_modules.not_traced_itself
def _resume_compiler(optimizer: Optimizer, *_: Any) -> None:
    paused = _paused.pop(optimizer, None)
    if paused is not None:
        torch_modules.resume_compiler(paused)


# --- what an optimizer updates --------------------------------------------------------------------

_LATER = (
    "fully_shard([m for m in model.modules() if any(type(p) is torch.nn.Parameter for p in "
    "m.parameters(recurse=False))])"
)
"""Call that shards the parameters that are not sharded yet, wherever they are in a model."""

_groups: weakref.WeakSet[ParamGroup] = weakref.WeakSet()
_ignored: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
"""Ids of parameters that users asked `fully_shard` to leave alone, while that module is there.

A weak reference to a tensor would keep torch from swapping it.
"""

_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_told_of_sync: weakref.WeakSet[Optimizer] = weakref.WeakSet()

_DATA_PARALLEL = re.compile("repl|dp|data")
"""Parts of the names of axes along which ranks have different data."""
_NO_COPIES = re.compile("(tp|tensor|mp|model|sp|seq|cp|context|pp|pipe|stage|ep|expert)")
"""Beginnings of the names of axes along which ranks have other parameters or share a batch."""


def note_ignored(module: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """Note parameters that users asked `fully_shard` of a module to leave alone."""
    _ignored.setdefault(module, set()).update(map(id, params))


def note_copies(module: nn.Module, copies: Mapping[int, Any]) -> None:
    """Note the copies of such parameters for a copied module; `copies` is the memo."""
    ignored = set().union(*_ignored.values())
    note_ignored(module, [copies[each] for each in ignored if each in copies])


def note_groups(groups: Iterable[ParamGroup]) -> None:
    """Note groups whose training begins."""
    _groups.update(groups)


def known_groups() -> list[ParamGroup]:
    """Return the groups that are trained in this process."""
    return list(_groups)


def watch_optimizers() -> None:
    """Check optimizers from now on, and check all of them again, since parameters were sharded."""
    _known.clear()
    _looked_at.clear()
    _install_hooks()


@once
def _install_hooks() -> None:
    for before in (cut_whole_state, _look, _average_losses, begin_step):
        register_optimizer_step_pre_hook(torch_modules.untraced(before))
    for after in (end_step, note_step):
        register_optimizer_step_post_hook(torch_modules.untraced(after))
    register_optimizer_step_pre_hook(_pause_compiler)
    register_optimizer_step_post_hook(_resume_compiler)


def _look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn at the first step that finds gradients; called by torch before each step."""
    number = sum(len(each["params"]) for each in optimizer.param_groups)
    has_closure = len(args) > 1 or bool(kwargs)  # A closure would make gradients.
    if _looked_at.get(optimizer) == number:  # If not, `add_param_group` was called since.
        first = next((param for each in optimizer.param_groups for param in each["params"]), None)
        if first is not None and first.grad is None and not has_closure:
            _warn_of_unsynced(optimizer)
        return
    params = _params_of(optimizer)
    _refuse_unsharded(optimizer, params)
    _refuse_compiled(optimizer, params)
    if any(param.grad is not None for param in params):
        _looked_at[optimizer] = number
        _warn_of_plain(params)
        _warn_of_left_out(params)
        _warn_of_copies(params)
    elif not has_closure:
        _warn_of_unsynced(optimizer)
        found = [(e, g.listener) for g in _groups for bucket in g.buckets for e in bucket.entries]
        trained = {root: e.name for e, root in found if e.param.grad is not None}
        held = set(map(id, params))
        if trained and not any(id(e.param) in held and root in trained for e, root in found):
            name = next(iter(trained.values()))
            _looked_at[optimizer] = number
            warn_user(
                f"none of this optimizer's {len(params)} parameters has a gradient, but {name!r} "
                f"of a sharded model has one: the optimizer updates another model, perhaps a copy. "
                f"Make it of the parameters of the model that is trained: "
                f"{type(optimizer).__name__}(model.parameters())."
            )


def _average_losses(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a closure of LBFGS return the average of the ranks' losses, as gradients are averaged.

    LBFGS uses the loss to decide where to look next, and when to end. With different losses the
    ranks would decide differently. A loss that was averaged already does not change.

    Cost: an all-reduce of 8 bytes on each axis of the mesh, for each call of the closure.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    sharded = [param for param in _params_of(optimizer) if isinstance(param, ShardedTensor)]
    if closure is None or not sharded:
        return None
    for param in sharded:
        if param.spec.around is not None:
            msg = (
                f"LBFGS cannot train {param.spec.name!r}: it is a plain parameter on a part of the "
                f"mesh, and ranks that hold others in its place would search along other lines. "
                f"Use another optimizer, or make it a DTensor before fully_shard."
            )
            raise OptimizerError(msg)
    mesh = max((param.device_mesh for param in sharded), key=lambda mesh: mesh.size())
    if mesh.backend.is_traced:
        return None
    axes = [mesh.backend.axis(index) for index in range(mesh.ndim)]

    def averaged() -> torch.Tensor | float:
        loss = closure()
        total = torch.as_tensor(loss, dtype=torch.float64, device=mesh.backend.device)
        total = total.detach().clone()
        for axis in axes:
            if axis.size > 1:
                axis.all_reduce(total, "sum")
        total /= mesh.size()
        return total.to(loss) if isinstance(loss, torch.Tensor) else total.item()

    if len(args) > 1:
        return (args[0], averaged, *args[2:]), kwargs
    return args, {**kwargs, "closure": averaged}


def _refuse_unsharded(optimizer: Optimizer, params: Iterable[Any]) -> None:
    """Refuse unsharded parameters, which `unshard` and forwards show for a while."""
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


def is_of_torchao(optimizer: object) -> bool:
    """Whether an optimizer is torchao's, or inherits from one."""
    return any(base.__module__.startswith("torchao.") for base in type(optimizer).__mro__)


def _refuse_compiled(optimizer: Any, params: Iterable[Any]) -> None:
    """Refuse torchao's optimizers, whose compiled steps would fail inside the compiler."""
    if not is_of_torchao(optimizer) or not hasattr(optimizer, "bf16_stochastic_round"):
        return
    for param in params:
        if isinstance(param, ShardedTensor):
            kind = type(optimizer).__name__
            options = f"lr={float(optimizer.param_groups[0]['lr']):g}"
            if optimizer.bf16_stochastic_round:
                options += ", bf16_stochastic_round=True"
            msg = (
                f"torchao's {kind} cannot step sharded {param.spec.name!r} itself: it compiles its "
                f"update into a graph of plain tensors. Have it step this rank's shards: "
                f"shardkit.optim.LocalOptimizer(model.parameters(), {kind}, {options})."
            )
            raise OptimizerError(msg)


def _warn_of_plain(params: Sequence[Any]) -> None:
    sharded = [param for param in params if isinstance(param, ShardedTensor)]
    may_part = any(param.device_mesh.size() > 1 for param in sharded)
    largest = max((group.mesh.size() for group in _groups), default=current_world_size() or 1)
    if not may_part and (sharded or largest == 1):
        return
    ignored = set().union(*_ignored.values())
    plain = [
        param
        for param in params
        if param.grad is not None
        and not isinstance(param, ShardedTensor)
        and id(param) not in ignored
        and tensor_parallel_of(param) is None
    ]
    averaged = _averaged_by_ddp() if plain else set()
    plain = [param for param in plain if id(param) not in averaged]
    if not plain:
        return
    model, names = _found_in(plain)
    if not may_part and not any(STATE_ATTRIBUTE in each.__dict__ for each in model.modules()):
        return  # The optimizer's model is a plain one beside sharded models.
    remedy = "Call fully_shard on the root as well, after its layers."
    if STATE_ATTRIBUTE in model.__dict__:
        remedy = f"They came into the {type(model).__name__} after it was sharded: call {_LATER}."
    elif not may_part:
        remedy = f"Call fully_shard on the {type(model).__name__} that holds them as well."
    warn_user(
        f"no group of fully_shard holds {listed(names, str)}, which this optimizer updates. "
        f"Gradients of these parameters are not averaged over the ranks, so each rank trains its "
        f"own. {remedy} "
        f"If it is meant so, pass them in ignored_params."
    )


def _warn_of_unsynced(optimizer: Optimizer) -> None:
    """Warn of a step that changes nothing because all gradients wait to be synced."""
    params = _params_of(optimizer)
    if optimizer in _told_of_sync or any(param.grad is not None for param in params):
        return
    held = set(map(id, params))
    waiting = [
        group for group in _groups if group.gradients.buffer_nbytes or group.gradients.is_reducing
    ]
    entries = [entry for group in waiting for b in group.buckets for entry in b.entries]
    name = next((entry.name for entry in entries if id(entry.param) in held), None)
    if name is not None:
        _told_of_sync.add(optimizer)
        warn_user(
            f"this {type(optimizer).__name__} steps without a gradient: those of {name!r} and "
            f"others were computed, and wait to be synced (see memory_stats()). "
            f"Call set_requires_gradient_sync(True) or set_is_last_backward(True), or leave "
            f"no_sync(), before the last backward of a step, or synchronize_gradients() (or "
            f"finalize_backward(), where it is manual) after it."
        )


def _warn_of_left_out(params: Sequence[Any]) -> None:
    """Warn where copies of a model would drift apart: no code averages over an axis of its mesh."""
    sharded = [param for param in params if isinstance(param, ShardedTensor)]
    used = {name for param in sharded for name in param.device_mesh.mesh_dim_names or ()}
    for param in sharded:
        unused = (name for name in param.device_mesh.left_out if name not in used)
        names = [
            name
            for name in unused
            if _DATA_PARALLEL.search(name.lower()) or not _NO_COPIES.match(name.lower())
        ]
        if not names or param.spec.tensor_parallel is not None or _averaged_by_ddp():
            continue
        own = ", ".join(map(repr, param.device_mesh.mesh_dim_names or ()))
        warn_user(
            f"{param.spec.name!r} is sharded over axis {own} of a mesh that has axis {names[0]!r} "
            f"as well, over which nobody averages gradients: copies of the model along "
            f"{names[0]!r} drift apart. Pass both axes to fully_shard: mesh[{names[0]!r}, {own}]. "
            f"It is right where your code averages over {names[0]!r} itself, or where each "
            f"position there trains a model of its own."
        )
        return


def _warn_of_copies(params: Sequence[Any]) -> None:
    """Warn if ranks on a mesh made by hand train a model that other ranks train as well."""
    if not any(is_on_part([group]) for group in _groups):
        return
    known = {id(e.param): g for g in _groups for bucket in g.buckets for e in bucket.entries}
    param = next((param for param in params if id(param) in known), None)
    if param is None or param.spec.tensor_parallel is not None:
        return
    group = known[id(param)]
    of_root = [each for each in _groups if each.listener is group.listener]
    if group.mesh.left_out or not is_on_part(of_root) or _averaged_by_ddp():
        return
    other = rank_of_copy(sorted(of_root, key=lambda each: each.index))
    if other is not None:
        warn_user(
            f"{param.spec.name!r} is sharded over ranks {group.mesh.describe_ranks()} only, and "
            f"rank {other} trains a copy of the same model, with the same first values, on a mesh "
            f"of other ranks. Nobody averages gradients over both, so the copies drift apart. Pass "
            f"one mesh of all ranks to fully_shard, by init_device_mesh with the axes "
            f"(replicate, shard). It is right where your code averages over the copies itself, or "
            f"where each is to be trained on its own."
        )


def _averaged_by_ddp() -> set[int]:
    """Return the ids of parameters that DDP averages, or torch's `replicate`, which uses DDP."""
    ddps = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    return {id(param) for ddp in ddps for param in nn.Module.parameters(ddp)}


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for each in optimizer.param_groups for param in each["params"]]


def _found_in(params: Sequence[Any]) -> tuple[nn.Module, list[str]]:
    """Return the largest, outermost module with these parameters; their names, or shapes."""
    wanted = {id(param) for param in params}
    found = nn.Module()
    best: dict[int, str] = {}
    best_rank = (0, 0)
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):
            continue
        try:
            names = {id(param): name for name, param in nn.Module.named_parameters(module)}
        except (AttributeError, RuntimeError):  # Another thread is constructing the module.
            continue
        rank = len(wanted & names.keys()), len(names)
        if not rank[0]:
            continue
        is_around = rank == best_rank and any(each is found for each in module.modules())
        if rank > best_rank or is_around:
            found, best, best_rank = module, names, rank
    return found, [
        repr(best[id(param)]) if id(param) in best else f"a parameter of shape {tuple(param.shape)}"
        for param in params
    ]
