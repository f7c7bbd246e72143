"""State dicts of models and optimizers by parameter names, sharded or full.

The functions have the names, arguments and meaning of those in
``torch.distributed.checkpoint.state_dict``, with these differences. An optimizer that was never
stepped has an empty state; torch steps it with zero gradients, which counts as a step. Parameters
are also found while a module shows unsharded ones. A module of ``submodules`` must be in the model;
otherwise torch returns all of the state. With ``full_state_dict`` a missing parameter counts as
missing; torch takes the model's own. If a state has nothing for a parameter, its optimizer state
begins anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit._compat import torch_modules
from shardkit._errors import CheckpointError
from shardkit._params.state_dicts import STATE_NUMBERS, check_shape, map_leaves, whole_tensor
from shardkit._settings import refuse_non_module, refuse_texts
from shardkit._tensor.sharded import ShardedTensor
from shardkit._text import listed
from shardkit.backends.groups import group_rank
from shardkit.checkpoint._files.disk import TensorInfo
from shardkit.checkpoint._state.names import (
    as_optimizers,
    device_of,
    names_in_groups,
    plain_name,
    split_at_name,
)
from shardkit.checkpoint._state.sources import FromFirstRank, from_rank0

if TYPE_CHECKING:
    Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

    from torch.nn.modules.module import _IncompatibleKeys


# --- optimizer state by names ---------------------------------------------------------------------
#
# An optimizer numbers its parameters. Here the state goes by names, so that it finds its parameter
# in a model that is sharded otherwise, in another order of parameter groups, or in another
# optimizer.


def named_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the state of optimizers by parameter names: ``state`` and ``param_groups``.

    The tensors are the optimizers' own. No optimizer is stepped for this.
    """
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer, in_groups in names_in_groups(model, optimizers):
        flat = [aliases[0] for aliases in chain(*in_groups)]
        numbered = optimizer.state_dict()
        kind = getattr(optimizer, "optimizer_class", type(optimizer)).__name__
        others = [key for key in numbered if key not in ("state", "param_groups")]
        if not numbered.keys() >= {"state", "param_groups"}:
            msg = (
                f"the state_dict() of {kind} has {others}, but a saved state is made of 'state' "
                f"and 'param_groups'. If it wraps another optimizer, pass that one, and save and "
                f"load the rest by a name of its own."
            )
            raise CheckpointError(msg)
        if others:
            msg = (
                f"the state_dict() of {kind} has {others} beside 'state' and 'param_groups', and "
                f"checkpoints leave these out. Save and load them by a name of their own."
            )
            warnings.warn(msg, stacklevel=2)
        for key in numbered["state"]:
            if type(key) is not int or not 0 <= key < len(flat):
                msg = (
                    f"{kind} keeps {key!r} in its state beside that of the parameters, "
                    f"but a saved state goes by parameter names. Take the entry out of "
                    f"optimizer.state, save or load it by a name of its own, and put it back."
                )
                raise CheckpointError(msg)
        state.update({flat[number]: values for number, values in numbered["state"].items()})
        for group, members in zip(numbered["param_groups"], in_groups, strict=True):
            groups.append({**group, "params": [aliases[0] for aliases in members]})
    return {"state": state, "param_groups": groups}


def parameters_by_name(
    model: nn.Module, optimizers: Optimizers
) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield the names of each parameter that an optimizer steps, and the parameter."""
    for optimizer, in_groups in names_in_groups(model, optimizers):
        for group, aliases in zip(optimizer.param_groups, in_groups, strict=True):
            yield from zip(aliases, group["params"], strict=True)


def saved_parameters(
    model: nn.Module, optimizers: Optimizers, saved: Container[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that have a saved state, each with the name under which it was saved."""
    for aliases, param in parameters_by_name(model, optimizers):
        name = next((alias for alias in aliases if alias in saved), None)
        if name is not None:
            yield name, param


def optimizer_template(
    model: nn.Module,
    optimizers: Optimizers,
    saved: Mapping[str, Mapping[str, TensorInfo | None]],
    present: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return tensors to load a saved optimizer state into, without stepping the optimizers.

    Sharded tensors of the `present` state are used if they fit. Otherwise an entry of the
    parameter's shape is sharded like the parameter, contiguous with the entries of its bucket;
    other entries are plain tensors on the host. The entry is None for a value that is no tensor.
    """
    state: dict[str, dict[str, Any]] = {}
    for name, param in saved_parameters(model, optimizers, saved):
        own = (present or {}).get(name, {})
        state[name] = entries = {key: own.get(key) for key in saved[name]}
        for key, info in saved[name].items():
            room: Any = entries[key]
            is_room = isinstance(room, ShardedTensor) and not room.is_meta
            if not is_room or TensorInfo.of(room) != info:
                entries[key] = None if info is None else room_for(param, key, info, saved)
    return {"state": state, "param_groups": named_state(model, optimizers)["param_groups"]}


@torch.no_grad()
def room_for(
    param: torch.Tensor,
    key: str,
    info: TensorInfo,
    saved: Mapping[str, Mapping[str, TensorInfo | None]],
) -> torch.Tensor:
    """Return a tensor to load one entry of a parameter's state into; see `optimizer_template`."""
    if info.shape != tuple(param.shape) or not _is_like_parameter(key, info, saved):
        return torch.empty(info.shape, dtype=info.dtype, device="cpu")
    # `zeros_like` makes sharded tensors adjacent in one flat tensor, `empty_like` does not.
    return torch.zeros_like(param.detach(), dtype=info.dtype)


def _is_like_parameter(
    key: str, info: TensorInfo, saved: Mapping[str, Mapping[str, TensorInfo | None]]
) -> bool:
    """Whether an entry of the parameter's shape has one number for each of its elements.

    This is unclear for a parameter without dims: then the same entry of other parameters decides.
    """
    if info.shape or key in STATE_NUMBERS:
        return bool(info.shape)
    with_dims = {
        each
        for entries in saved.values()
        for each, found in entries.items()
        if found is not None and found.shape
    }
    return key in with_dims or not with_dims


def put_optimizer_state(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Put a state by names into optimizers, which keep these tensors and not copies of them.

    A parameter without an entry has no state afterwards. Options come from the saved group that
    lists the group's parameters; options that were not saved stay as they are. An error changes
    nothing.
    """
    known = set(state["state"]).union(*(group["params"] for group in state["param_groups"]))
    missing = [
        aliases[0]
        for aliases, _ in parameters_by_name(model, optimizers)
        if not known.intersection(aliases)
    ]
    if missing and strict:
        msg = (
            f"the state has nothing of {len(missing)} of the optimizer's parameters: "
            f"{listed(missing)}. Load a state that was saved with them, or pass "
            f"strict=False to let these begin anew."
        )
        raise CheckpointError(msg)
    for optimizer, numbered_state in list(numbered_states(model, optimizers, state)):
        optimizer.load_state_dict(numbered_state)


def numbered_states(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any]
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Yield each optimizer, and its part of a state by names, for its ``load_state_dict``."""
    first_group = 0  # Its place among the groups of all optimizers.
    for optimizer, in_groups in names_in_groups(model, optimizers):
        numbered: dict[int, Any] = {}
        for number, aliases in enumerate(chain(*in_groups)):
            entry = next((state["state"][a] for a in aliases if a in state["state"]), None)
            if entry:
                numbered[number] = entry
        numbers, pairs = count(), zip(optimizer.param_groups, in_groups, strict=True)
        groups = [
            {**_options(index, group, members, state), "params": [next(numbers) for _ in members]}
            for index, (group, members) in enumerate(pairs, first_group)
        ]
        first_group += len(groups)
        yield optimizer, {"state": numbered, "param_groups": groups}


def _options(
    index: int,
    group: Mapping[str, Any],
    members: Sequence[Sequence[str]],
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a group's options, from the saved groups that its parameters were in."""
    own = {key: value for key, value in group.items() if key != "params"}
    wanted = set(chain.from_iterable(members))
    saved = [g for g in state["param_groups"] if wanted.intersection(g["params"])]
    if not members:
        # Only their places distinguish groups without parameters.
        same_place = state["param_groups"][index : index + 1]
        saved = [g for g in same_place if not g["params"]]
    options = dict(own)
    for position, other in enumerate(saved):
        for key, value in other.items():
            if key in ("params", "param_names"):
                continue
            if position > 0 and not _equal(options.get(key), value):
                msg = (
                    f"parameters of group {index} of the optimizers were saved in groups with "
                    f"different {key!r}: {options.get(key)} and {value}. Group the parameters as "
                    f"they were when the state was saved."
                )
                raise CheckpointError(msg)
            options[key] = value
    return options


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return type(one) is type(other) and bool(one == other)


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state: one entry for each parameter and option, in the format of torch."""
    flat: dict[str, Any] = {}

    def put(path: str, entries: Mapping[Any, Any]) -> None:
        for key, value in entries.items():
            if isinstance(value, dict):
                put(f"{path}.{key}", value)
            else:
                flat[f"{path}.{key}"] = value

    for name, entries in state["state"].items():
        put(f"state.{name}", entries)
    for group in state["param_groups"]:
        for name in group["params"]:
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{name}.{key}"] = value
    return flat


def unflatten(model: nn.Module, optimizers: Optimizers, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten`, for the parameters of these optimizers; each gets a group of its own."""
    known = {name for names, _ in parameters_by_name(model, optimizers) for name in names}
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for path, value in flat.items():
        section, _, rest = path.partition(".")
        split = split_at_name(rest, known)
        if section in found and split is not None:
            name, keys = split
            entries = found[section].setdefault(name, {})
            for key in keys[:-1]:
                entries = entries.setdefault(key, {})
            entries[keys[-1]] = value
    groups = [{**options, "params": [name]} for name, options in found["param_groups"].items()]
    return {"state": found["state"], "param_groups": groups}


def _with_parts(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a nested state with both parts: files drop an empty one, of SGD without momentum."""
    if state and state.keys().isdisjoint(("state", "param_groups")):
        return unflatten(model, optimizers, state)
    return {"state": {}, "param_groups": [], **state}


# --- get ------------------------------------------------------------------------------------------


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: Collection[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return a model's state dict, by names without wrappers.

    Args:
        model: Module, sharded or not. With ``full_state_dict``, all ranks must call it.
        submodules: Modules of the model; only their state is returned. None: the whole model's.
        options: Options of torch: ``full_state_dict``, ``cpu_offload``, ``ignore_frozen_params``,
            ``keep_submodule_prefixes``. With the first two, rank 0 gets the state and the other
            ranks get an empty dict.

    Cost: with ``full_state_dict`` one gather for each tensor (`ShardedTensor.full_tensor`), one
    tensor at a time if ``cpu_offload`` moves each away.
    """
    refuse_non_module(CheckpointError, model)
    options = options or StateDictOptions()
    state = {plain_name(model, key): value for key, value in model.state_dict().items()}
    if options.ignore_frozen_params:
        for name, param in model.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                state.pop(plain_name(model, name), None)
    if submodules:
        state = _state_inside(model, state, [*submodules], keep=options.keep_submodule_prefixes)
    return _as_wanted(state, options)


def _state_inside(
    model: nn.Module, state: dict[str, Any], submodules: Collection[nn.Module], *, keep: bool
) -> dict[str, Any]:
    """Return the state of some modules of a model, by names in the model or in the module."""
    prefixes = _prefixes(model, submodules)
    found: dict[str, Any] = {}
    for module in filter(submodules.__contains__, prefixes):  # In the same order on all ranks.
        inside = [key for key in state if key.startswith(prefixes[module])]
        named = {key if keep else key.removeprefix(prefixes[module]): state[key] for key in inside}
        if not keep and not found.keys().isdisjoint(named):
            msg = (
                f"several of submodules have an entry {next(filter(found.__contains__, named))!r}. "
                f"Pass StateDictOptions(keep_submodule_prefixes=True), or one module at a time."
            )
            raise CheckpointError(msg)
        found |= named
    return found


def _prefixes(model: nn.Module, wanted: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the prefix of names in each module of the model; `wanted` must be in the model."""
    names = ((each, plain_name(model, name)) for name, each in model.named_modules())
    prefixes = {each: f"{name}." if name else "" for each, name in names}
    for module in wanted:
        if module not in prefixes:
            msg = (
                f"state is asked for, or given, of a module that is not in the model, a "
                f"{type(module).__name__}. Pass modules of this model."
            )
            raise CheckpointError(msg)
    return prefixes


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of one or several optimizers, by parameter names.

    An optimizer that was never stepped has no state, so ``dcp.load`` finds nothing to fill. Use
    `load`, or torch's function of this name, which steps the optimizer with zero gradients.

    Args:
        model: Module that holds all of their parameters.
        optimizers: One optimizer or several.
        options: Options of torch: ``full_state_dict``, ``cpu_offload``,
            ``flatten_optimizer_state_dict``.

    Raises:
        CheckpointError: An optimizer holds a parameter that the model does not.

    Cost: see `get_model_state_dict`.
    """
    options = options or StateDictOptions()
    state = named_state(model, optimizers)
    if options.flatten_optimizer_state_dict:
        state = flatten(state)
    return _as_wanted(state, options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Collection[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a model and of its optimizers; see the functions for each.

    As in torch, `submodules` selects from the model only.
    """
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def _as_wanted(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    if options.full_state_dict:
        keep = not options.cpu_offload or group_rank(None) == 0
        return whole_state(state, keep=keep, to_cpu=options.cpu_offload)
    if options.cpu_offload:
        return map_leaves(state, lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf)  # type: ignore[no-any-return]
    return state


def whole_state(state: dict[str, Any], *, keep: bool, to_cpu: bool) -> dict[str, Any]:
    """Return a state with whole tensors, and an empty one on ranks without `keep`. Collective."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            leaf.spec.check_saved()
        return whole_tensor(leaf, keep=keep, to_cpu=to_cpu) if isinstance(leaf, Tensor) else leaf

    state = map_leaves(state, whole)
    return state if keep else {}


# --- set ------------------------------------------------------------------------------------------


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[Any, Any],
    *,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load a model's state dict, which holds shards or whole tensors.

    Values are converted to the dtypes of the model; a model on meta takes the dtypes of the state.

    Args:
        model: Module, sharded or not. Parameters on the meta device get memory for their shards.
        model_state_dict: State by names without wrappers, or a dict of states by modules of
            `model`. Each rank cuts its shards out of whole tensors.
        options: Options of torch: ``strict``; with ``broadcast_from_rank0`` rank 0 has whole
            tensors and sends them one at a time, and the states that other ranks pass are ignored.

    Raises:
        CheckpointError: A sharded parameter has another shape; with ``broadcast_from_rank0`` on all
            ranks. Nothing has been changed then. Values that pass through hooks or methods of the
            user's own modules are compared after these, by torch.
        RuntimeError: An error of `nn.Module.load_state_dict`.

    Cost: with ``broadcast_from_rank0`` a broadcast of every 16 MiB of each tensor, and 16 MiB of
    memory; for a tensor that is not sharded, or that is tensor-parallel, memory for all of it.
    """
    return _checked_model(model, model_state_dict, options or StateDictOptions())()


def _checked_model(
    model: nn.Module, given: Mapping[Any, Any], options: StateDictOptions
) -> Callable[[], _IncompatibleKeys]:
    """Compare a state with a model; return a function that loads the state."""
    refuse_non_module(CheckpointError, model)
    own = model.state_dict(keep_vars=True)
    keys = {plain_name(model, key): key for key in own}
    by_name = {name: own[key] for name, key in keys.items()}
    sent: FromFirstRank | None = None
    if options.broadcast_from_rank0:
        sent = from_rank0(lambda: _by_names_of(model, given), device_of(own.values()))
        found: Mapping[str, Any] = sent.infos
    else:
        found = _by_names_of(model, given)
    # Prefixes of names whose values other code may change while they are loaded.
    changed = tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules(remove_duplicate=False)
        if sent is None and torch_modules.loads_its_own_way(module)
    )
    for name, value in found.items():
        target = by_name.get(name)
        if not isinstance(target, ShardedTensor) or not isinstance(value, Tensor | TensorInfo):
            continue
        packing = target.spec.packing  # Such values are packed when they are loaded.
        if packing is not None and isinstance(value, packing.cls):
            continue
        is_number = sent is None and not target.shape and len(value.shape) == 1  # Torch accepts it.
        if not is_number and not keys[name].startswith(changed):
            check_shape(name, tuple(value.shape), tuple(target.shape))

    def target_of(name: str, info: TensorInfo) -> Any:
        target = by_name.get(name)
        if isinstance(target, ShardedTensor) and target.is_meta and target.dtype != info.dtype:
            numel = target.spec.piece_numel
            target.replace_piece(torch.empty(numel, dtype=info.dtype, device="meta"))
        return target

    def load() -> _IncompatibleKeys:
        values = found if sent is None else dict(sent.receive(target_of))
        state = {keys.get(name, name): value for name, value in values.items()}
        is_meta = any(isinstance(value, Tensor) and value.is_meta for value in own.values())
        return model.load_state_dict(state, strict=options.strict, assign=is_meta)  # type: ignore[no-any-return]

    return load


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of one or several optimizers, from shards or whole tensors.

    Args:
        model: Module that holds all of their parameters.
        optimizers: One optimizer or several; they need not have been stepped.
        optim_state_dict: State by parameter names, nested or flat.
        options: Options of torch: ``strict``, and ``broadcast_from_rank0`` as in
            `set_model_state_dict`.

    Raises:
        CheckpointError: Parameters are missing (unless ``strict=False``), or a sharded tensor is
            cut otherwise than its parameter. Nothing has been changed then.

    Cost: with ``broadcast_from_rank0`` a broadcast of every 16 MiB of each tensor. Memory: the new
    shards and 16 MiB; for a tensor that is not sharded, or that is tensor-parallel, all of it.
    """
    options, given = options or StateDictOptions(), optim_state_dict
    if options.broadcast_from_rank0:
        optim_state_dict = _received_optimizer(model, optimizers, lambda: given)
    else:
        optim_state_dict = _with_parts(model, optimizers, optim_state_dict)
        saved = _infos(optim_state_dict["state"])
        state = dict(optim_state_dict["state"])
        for name, param in saved_parameters(model, optimizers, saved):
            state[name] = {
                key: _placed(value, param, key, name, saved) for key, value in state[name].items()
            }
        optim_state_dict = {**optim_state_dict, "state": state}
    put_optimizer_state(model, optimizers, optim_state_dict, strict=options.strict)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load the state of a model and of its optimizers; see the functions for each.

    First the shapes of sharded parameters are compared. Then the state of the optimizers is loaded,
    and then the model; only now are its names and plain tensors compared. A model on meta is loaded
    first, because the state of its optimizers goes where its parameters are.
    """
    load_model = _checked_model(model, model_state_dict, options or StateDictOptions())
    loaded = load_model() if any(param.is_meta for param in model.parameters()) else None
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return loaded if loaded is not None else load_model()


def _infos(state: Mapping[str, Any]) -> dict[str, dict[str, TensorInfo | None]]:
    return {
        name: {
            key: TensorInfo.of(value) if isinstance(value, Tensor) else None
            for key, value in entries.items()
        }
        for name, entries in state.items()
    }


@torch.no_grad()
def _placed(
    value: Any,
    param: nn.Parameter,
    key: str,
    name: str,
    saved: Mapping[str, Mapping[str, TensorInfo | None]],
) -> Any:
    """Return an entry of a parameter's state as its optimizer needs it: sharded like the parameter.

    Sharded tensors are not copied, as in torch: copies would take the memory of a whole state.
    Plain ones are copied: an optimizer counts its steps in place, and the same state may be put
    into another one.
    """
    if isinstance(value, dict):
        return {k: _placed(entry, param, k, name, saved) for k, entry in value.items()}
    if not isinstance(value, Tensor):
        return value
    if not isinstance(param, ShardedTensor):
        return value.detach().clone()
    if isinstance(value, ShardedTensor):
        if not value.spec.same_cut(param.spec):
            msg = (
                f"{key!r} of {name!r}, shape {tuple(value.shape)}, is sharded otherwise than the "
                f"parameter, shape {tuple(param.shape)}. Load a state dict of a model sharded "
                f"alike, or one of whole tensors (full_state_dict=True)."
            )
            raise CheckpointError(msg)
        return value
    info = TensorInfo.of(value)
    room = room_for(param, key, info, saved)
    if isinstance(room, ShardedTensor):
        return room.copy_(value.detach())
    return value.detach().clone()


def _by_names_of(model: nn.Module, state: Any) -> Any:
    """Return a state by names; in the states of modules, names are those of the module."""
    is_mapping = isinstance(state, Mapping)
    modules = [key for key in state if isinstance(key, nn.Module)] if is_mapping else []
    if not modules:
        return state
    prefixes = _prefixes(model, modules)
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(key, nn.Module):
            found |= {f"{prefixes[key]}{name}": each for name, each in value.items()}
        else:
            found[key] = value
    return found


def _received_optimizer(
    model: nn.Module, optimizers: Optimizers, state_of_rank0: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return rank 0's state of optimizers, cut like their parameters."""

    def entries_of_rank0() -> dict[tuple[str, ...], Any]:
        nested = _with_parts(model, optimizers, state_of_rank0())
        entries: dict[tuple[str, ...], Any] = {("param_groups",): nested["param_groups"]}
        for name, values in nested["state"].items():
            entries |= {(name, key): value for key, value in values.items()}
        return entries

    named = {
        alias: param for names, param in parameters_by_name(model, optimizers) for alias in names
    }
    sent = from_rank0(entries_of_rank0, device_of(named.values()))
    saved: dict[str, dict[str, TensorInfo | None]] = {}
    infos: Mapping[Any, TensorInfo] = sent.infos
    for (name, key), info in infos.items():
        saved.setdefault(name, {})[key] = info

    def room(place: tuple[str, str], info: TensorInfo) -> Any:
        param = named.get(place[0])
        if isinstance(param, ShardedTensor):
            return room_for(param, place[1], info, saved)
        return None

    received: dict[str, Any] = {"state": {}, "param_groups": []}
    for (name, *keys), value in sent.receive(room):
        if not keys:
            received["param_groups"] = value
            continue
        is_nested = isinstance(value, dict) and name in named  # Tensors inside are not cut.
        entry = _placed(value, named[name], keys[0], name, saved) if is_nested else value
        received["state"].setdefault(name, {})[keys[0]] = entry
    return received


# --- whole optimizer state ------------------------------------------------------------------------
#
# - ``"names"``: by parameter names, as in FSDP1's ``full_optim_state_dict`` and torch's
#   ``get_optimizer_state_dict(full_state_dict=True)``.
# - ``"ids"``: by the optimizer's own numbers, as in the ``state_dict()`` of a plain model's
#   optimizer, FSDP1's ``rekey_optim_state_dict`` and fairscale's ``gather_full_optim_state_dict``.

Layout = Literal["names", "ids"]


def gather_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank0_only: bool = True,
    layout: Layout = "names",
    to_cpu: bool = True,
) -> dict[str, Any]:
    """Return the whole state of an optimizer: plain tensors of global shapes. Call it on all ranks.

    Args:
        model: Module that holds all of the optimizer's parameters.
        optimizer: Optimizer of the sharded parameters.
        rank0_only: Whether only rank 0 gets the state; the other ranks then get an empty dict.
        layout: ``"names"``: by parameter names; a tied parameter's first name. ``"ids"``: by
            numbers, in the order of the optimizer's parameter groups. An optimizer of the plain
            model's parameters in the same groups can load these.
        to_cpu: Whether the state is moved to the memory of the host.

    Returns:
        ``state`` and ``param_groups``. Parameters that were never stepped have no state.

    Raises:
        CheckpointError: The optimizer holds a parameter that the model does not, or `layout` is
            unknown.

    Cost: for each tensor of the state an all-gather of at most twice its bytes
    (`ShardedTensor.full_tensor`). Memory: the whole state on ranks that get it, one tensor on the
    others.
    """
    refuse_texts(CheckpointError, rank0_only=rank0_only, to_cpu=to_cpu)
    _check_layout(layout, optimizer)
    keep = not rank0_only or group_rank(None) == 0
    state = whole_state(named_state(model, optimizer), keep=keep, to_cpu=to_cpu)
    return rekey_optimizer_state(state, model, optimizer, layout=layout) if keep else {}


def scatter_optimizer_state(
    state: Mapping[str, Any] | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    from_rank0: bool = True,
    strict: bool = True,
) -> None:
    """Load whole optimizer state, of either layout, into the optimizer of a sharded model.

    Call it on all ranks.

    Args:
        state: ``state`` and ``param_groups``, by names or by numbers in the order of the
            optimizer's parameter groups. Other entries are ignored. The dict is not kept.
        model: Module that holds all of the optimizer's parameters.
        optimizer: Optimizer; it need not have been stepped.
        from_rank0: Whether rank 0 has the state and sends it, tensor by tensor; the states that
            other ranks pass are then ignored. Otherwise each rank has it and cuts out its shards.
        strict: Whether each parameter must be in the state or its groups. Otherwise the state of
            the parameters that are missing begins anew.

    Raises:
        CheckpointError: Groups have other sizes, or parameters are missing; with `from_rank0` on
            all ranks. Nothing has been changed then. State whose shape differs from the
            parameter's is not an error: only the optimizer knows it, and it stays whole.

    Cost: with `from_rank0` the same as `set_optimizer_state_dict` with ``broadcast_from_rank0``;
    otherwise none.
    """

    def named() -> dict[str, Any]:
        try:
            return rekey_optimizer_state(state or {}, model, optimizer, layout="names")
        except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
            msg = (
                f"the state has not the form of an optimizer's: {type(error).__name__}: {error}. "
                f"Pass what gather_optimizer_state, optimizer.state_dict() or FSDP1's "
                f"full_optim_state_dict() returned."
            )
            raise CheckpointError(msg) from error

    refuse_texts(CheckpointError, from_rank0=from_rank0, strict=strict)
    if from_rank0:
        received = _received_optimizer(model, optimizer, named)
        put_optimizer_state(model, optimizer, received, strict=strict)
    else:
        options = StateDictOptions(strict=strict)
        set_optimizer_state_dict(model, optimizer, named(), options=options)


def rekey_optimizer_state(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    layout: Layout,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state in another layout; no tensor is copied or sent.

    It does the work of FSDP1's ``rekey_optim_state_dict``.

    Args:
        state: ``state`` and ``param_groups``, in either layout.
        model: Module, sharded or plain, from which the names are taken.
        optimizer: Optimizer, sharded or plain, from which the order of parameters is taken.
        layout: The layout to return, see `gather_optimizer_state`.
        names: The parameters' names by the numbers in `state`, if these are not the optimizer's
            numbers: fairscale numbers the parameters of each wrapper consecutively.

    Returns:
        ``state`` and ``param_groups``. With ``"ids"`` the groups are the optimizer's.

    Raises:
        CheckpointError: Groups have other sizes than the optimizer's; or a number has no name; or
            parameters of one group were saved in groups with different options; or `layout` is
            unknown.
    """
    _check_layout(layout, optimizer)
    if "state" not in state or "param_groups" not in state:
        msg = (
            f"an optimizer's state has 'state' and 'param_groups', this one has "
            f"{', '.join(map(repr, state)) or 'nothing'}. Pass what gather_optimizer_state, "
            f"optimizer.state_dict() or FSDP1's full_optim_state_dict() returned."
        )
        raise CheckpointError(msg)
    named = {"state": dict(state["state"]), "param_groups": list(state["param_groups"])}
    keys = chain(state["state"], *(group["params"] for group in state["param_groups"]))
    if any(isinstance(key, int) for key in keys):
        named = _by_names(state, model, optimizer, names)
    if layout == "names":
        return named
    ((_, numbered),) = numbered_states(model, optimizer, named)
    return numbered


def _check_layout(layout: object, optimizer: Optimizers) -> None:
    if layout not in ("names", "ids"):
        msg = f"layout must be 'names' or 'ids', got {layout!r}."
        raise CheckpointError(msg)
    number = len(as_optimizers(optimizer))
    if layout == "ids" and number != 1:
        msg = (
            f"layout 'ids' numbers the parameters of one optimizer, got {number} optimizers. Call "
            f"it for each of them, or choose layout='names'."
        )
        raise CheckpointError(msg)


def _by_names(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str] | None,
) -> dict[str, Any]:
    """Return a state by names that was keyed by numbers."""
    by_id: dict[int, str] = dict(enumerate(names)) if names is not None else {}
    if names is None:
        ((_, own),) = names_in_groups(model, optimizer)
        saved = [list(group["params"]) for group in state["param_groups"]]
        if list(map(len, own)) != list(map(len, saved)):
            msg = (
                f"the state is of parameter groups of {list(map(len, saved))} parameters, those of "
                f"the optimizer have {list(map(len, own))}. Make the same groups, or pass "
                f"rekey_optimizer_state the names of the numbers and load what it returns."
            )
            raise CheckpointError(msg)
        pairs = zip(chain(*saved), chain(*own), strict=True)
        by_id = {number: aliases[0] for number, aliases in pairs}
    numbers = [*state["state"], *chain(*(group["params"] for group in state["param_groups"]))]
    unknown = [number for number in dict.fromkeys(numbers) if number not in by_id]
    if unknown:
        msg = (
            f"the state has parameters of numbers without a name: {unknown}. There are "
            f"{len(by_id)} names. Pass a name for each number."
        )
        raise CheckpointError(msg)
    return {
        "state": {by_id[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [by_id[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }
