"""State dicts of models and optimizers by parameter names, sharded or full.

The functions have the names, arguments and meaning of those in
``torch.distributed.checkpoint.state_dict``, with these differences: an optimizer that was never
stepped has an empty state, where torch steps it with zero gradients (which counts as a step);
parameters are found also while a module shows unsharded ones; a module of ``submodules`` must be in
the model, where torch returns all of the state; with ``full_state_dict`` a missing parameter is
missing, where torch goes on with the model's own; of parameters that a state has nothing of, the
optimizer's state begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit._compat import torch_modules
from shardkit._errors import CheckpointError
from shardkit._params.state_dicts import STATE_NUMBERS, check_shape, map_leaves, whole_tensor
from shardkit._tensor.sharded import ShardedTensor
from shardkit._text import listed
from shardkit.backends.groups import group_rank
from shardkit.checkpoint._files.disk import TensorInfo
from shardkit.checkpoint._state.names import (
    as_optimizers,
    device_of,
    names_in_groups,
    names_of_parameters,
    plain_name,
    split_at_name,
)
from shardkit.checkpoint._state.sources import FromFirstRank, from_rank0

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

    Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

    from torch.nn.modules.module import _IncompatibleKeys


# --- optimizer state by names ---------------------------------------------------------------------
#
# An optimizer numbers its parameters. Here they have names, so that state finds its parameter in
# a model sharded otherwise, in other parameter groups' order, or in another optimizer.


def named_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the state of optimizers by parameter names: ``state`` and ``param_groups``.

    Tensors are those of the optimizers. No optimizer is stepped for it.
    """
    names = names_of_parameters(model)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in as_optimizers(optimizers):
        in_groups = [[aliases[0] for aliases in g] for g in names_in_groups(names, optimizer)]
        flat = list(chain.from_iterable(in_groups))
        numbered = optimizer.state_dict()
        state.update({flat[number]: values for number, values in numbered["state"].items()})
        for group, members in zip(numbered["param_groups"], in_groups, strict=True):
            groups.append({**group, "params": members})
    return {"state": state, "param_groups": groups}


def parameters_by_name(
    model: nn.Module, optimizers: Optimizers
) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield the names of each parameter that an optimizer steps, and the parameter."""
    names = names_of_parameters(model)
    for optimizer in as_optimizers(optimizers):
        for group, aliases in zip(
            optimizer.param_groups, names_in_groups(names, optimizer), strict=True
        ):
            yield from zip(aliases, group["params"], strict=True)


def saved_parameters(
    model: nn.Module, optimizers: Optimizers, saved: Container[str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of which something was saved, and under which of their names."""
    for aliases, param in parameters_by_name(model, optimizers):
        name = next((alias for alias in aliases if alias in saved), None)
        if name is not None:
            yield name, param


def optimizer_template(
    model: nn.Module,
    optimizers: Optimizers,
    saved: Mapping[str, Mapping[str, TensorInfo | None]],
    rooms: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Return room for a saved optimizer state, made without stepping the optimizers.

    Entries are tensors to load into: those of `rooms`, where there are any; else sharded like the
    parameter if they have its shape, end to end with those of the parameter's bucket; else plain
    ones on the host; None for what is no tensor.
    """
    state: dict[str, dict[str, Any]] = {}
    for name, param in saved_parameters(model, optimizers, saved):
        entries: dict[str, Any] = {**rooms[name]} if rooms is not None else {}
        state[name] = entries
        for key, info in saved[name].items():
            if key not in entries:
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
        return torch.empty(info.shape, dtype=info.dtype)
    # Of sharded ones `zeros_like` makes neighbours in one flat, `empty_like` does not.
    return torch.zeros_like(param.detach(), dtype=info.dtype)


def _is_like_parameter(
    key: str, info: TensorInfo, saved: Mapping[str, Mapping[str, TensorInfo | None]]
) -> bool:
    """Whether an entry of the parameter's shape is one number for each of its elements.

    In doubt is a parameter without dimensions: then the same entry of others that have some tells.
    """
    if info.shape or key in STATE_NUMBERS:
        return bool(info.shape)
    all_keys = [other for entries in saved.values() for other in entries.values()]
    same_key = [entries[key] for entries in saved.values() if key in entries]
    return _has_dims(same_key) or not _has_dims(all_keys)


def _has_dims(infos: Iterable[TensorInfo | None]) -> bool:
    return any(info is not None and info.shape for info in infos)


def put_optimizer_state(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Put state by parameter names into optimizers, which keep the tensors, not copies of them.

    A parameter without an entry has no state afterwards. Options come from the saved group that
    lists the group's parameters; those that were not saved stay. After an error nothing has been
    changed.
    """
    loads = list(numbered_states(model, optimizers, state, strict=strict))
    for optimizer, numbered_state in loads:
        optimizer.load_state_dict(numbered_state)


def numbered_states(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any], *, strict: bool = False
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Yield each optimizer, and of a state by names what its ``load_state_dict`` takes."""
    names = names_of_parameters(model)
    for optimizer in as_optimizers(optimizers):
        in_groups = names_in_groups(names, optimizer)
        if strict:
            _check_names(in_groups, state)
        numbered: dict[int, Any] = {}
        for number, aliases in enumerate(chain(*in_groups)):
            entry = next((state["state"][a] for a in aliases if a in state["state"]), None)
            if entry:
                numbered[number] = entry
        numbers, pairs = count(), zip(optimizer.param_groups, in_groups, strict=True)
        groups = [
            {**_options(index, group, members, state), "params": [next(numbers) for _ in members]}
            for index, (group, members) in enumerate(pairs)
        ]
        yield optimizer, {"state": numbered, "param_groups": groups}


def _check_names(in_groups: Sequence[Sequence[Sequence[str]]], state: Mapping[str, Any]) -> None:
    known = set(state["state"]).union(*(group["params"] for group in state["param_groups"]))
    missing = [
        aliases[0]
        for members in in_groups
        for aliases in members
        if not known.intersection(aliases)
    ]
    if missing:
        msg = (
            f"the state has nothing of {len(missing)} of the optimizer's parameters: "
            f"{listed(missing)}. Load a state that was saved with them, or pass "
            f"strict=False to let these begin anew."
        )
        raise CheckpointError(msg)


def _options(
    index: int,
    group: Mapping[str, Any],
    members: Sequence[Sequence[str]],
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a group's options: those of the saved groups that its parameters were in."""
    own = {key: value for key, value in group.items() if key != "params"}
    wanted = set(chain.from_iterable(members))
    saved = [g for g in state["param_groups"] if wanted.intersection(g["params"])]
    if not members:
        # Nothing tells one group without parameters from another, but its place.
        same_place = state["param_groups"][index : index + 1]
        saved = [g for g in same_place if not g["params"]]
    options = dict(own)
    for position, other in enumerate(saved):
        for key, value in other.items():
            if key in ("params", "param_names"):
                continue
            if position > 0 and not _equal(options.get(key), value):
                msg = (
                    f"parameters of group {index} of the optimizer were saved in groups with "
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
    """Return a state without nesting: an entry for each parameter and option, as torch's has."""
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
    """Undo `flatten`, for the parameters of these optimizers: each is a group of its own."""
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


# --- get ------------------------------------------------------------------------------------------


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: Collection[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return a model's state dict, by names without those of wrappers.

    Args:
        model: Module, sharded or not; all ranks must call it with ``full_state_dict``.
        submodules: Modules in it whose state alone is returned; None for all.
        options: Options of torch: ``full_state_dict``, ``cpu_offload``, ``ignore_frozen_params``,
            ``keep_submodule_prefixes``. With the first two, rank 0 gets the state and the others an
            empty dict.

    Cost: with ``full_state_dict`` one gather for each tensor (`ShardedTensor.full_tensor`), one
    tensor at a time where ``cpu_offload`` moves it away.
    """
    options = options or StateDictOptions()
    state = {plain_name(model, key): value for key, value in model.state_dict().items()}
    if options.ignore_frozen_params:
        for name, param in model.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                state.pop(plain_name(model, name), None)
    if submodules:
        state = _state_inside(model, state, submodules, keep=options.keep_submodule_prefixes)
    return _as_wanted(state, options)


def _state_inside(
    model: nn.Module, state: dict[str, Any], submodules: Collection[nn.Module], *, keep: bool
) -> dict[str, Any]:
    """Return the state of some modules in a model, by names in the model or in the module."""
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
    """Return what names in each module of the model begin with; `wanted` must be among them."""
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

    As with torch, `submodules` chooses from the model only.
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
    """Return a state with whole tensors; an empty one on ranks that do not keep it. Collective."""

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
    """Load a model's state dict, of pieces or of whole tensors.

    Values are converted to the dtypes of a model that has memory; one on meta takes over the
    state's.

    Args:
        model: Module, sharded or not. Parameters on the meta device get memory for their pieces.
        model_state_dict: State by names without those of wrappers, or dict of states by the modules
            in `model` that they are of. Whole tensors are cut by each rank.
        options: Options of torch: ``strict``; with ``broadcast_from_rank0`` rank 0 has whole
            tensors and sends them one at a time, what other ranks pass is not looked at.

    Raises:
        CheckpointError: A sharded parameter has another shape; with ``broadcast_from_rank0`` on all
            ranks. Nothing has been changed then. What passes hooks or methods of the user's own
            modules is compared behind them, by torch.
        RuntimeError: As `nn.Module.load_state_dict` does.

    Cost: with ``broadcast_from_rank0`` a broadcast of every 16 MiB of each tensor, and memory
    for 16 MiB; for all of a tensor that is not sharded, or tensor-parallel.
    """
    return _checked_model(model, model_state_dict, options or StateDictOptions())()


def _checked_model(
    model: nn.Module, given: Mapping[Any, Any], options: StateDictOptions
) -> Callable[[], _IncompatibleKeys]:
    """Compare a state with a model; return what loads it then."""
    own = model.state_dict(keep_vars=True)
    keys = {plain_name(model, key): key for key in own}
    by_name = {name: own[key] for name, key in keys.items()}
    sent: FromFirstRank | None = None
    if options.broadcast_from_rank0:
        sent = from_rank0(lambda: _by_names_of(model, given), device_of(own.values()))
        found: Mapping[str, Any] = sent.infos
    else:
        found = _by_names_of(model, given)
    changed = () if sent is not None else _prefixes_of_own_ways(model)
    for name, value in found.items():
        target = by_name.get(name)
        if not isinstance(target, ShardedTensor) or not isinstance(value, Tensor | TensorInfo):
            continue
        packing = target.spec.packing  # Values of the class are packed when they are loaded.
        if packing is not None and isinstance(value, packing.cls):
            continue
        is_number = sent is None and not target.shape and len(value.shape) == 1  # Torch takes it.
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


def _prefixes_of_own_ways(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of names whose values other code may change when they are loaded."""
    modules = model.named_modules(remove_duplicate=False)
    return tuple(
        f"{name}." if name else ""
        for name, module in modules
        if torch_modules.loads_its_own_way(module)
    )


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of one or several optimizers, of pieces or of whole tensors.

    Args:
        model: Module that holds all of their parameters.
        optimizers: One optimizer or several; they need not have been stepped.
        optim_state_dict: State by parameter names, nested or flat.
        options: Options of torch: ``strict``, ``broadcast_from_rank0`` as in
            `set_model_state_dict`.

    Raises:
        CheckpointError: Parameters are missing (unless ``strict=False``), or a sharded tensor is
            cut otherwise than its parameter. Nothing has been changed then.

    Cost: with ``broadcast_from_rank0`` a broadcast of every 16 MiB of each tensor; memory for the
    new pieces, 16 MiB, and for all of a tensor that is not sharded, or tensor-parallel.
    """
    options, given = options or StateDictOptions(), optim_state_dict
    if options.broadcast_from_rank0:
        optim_state_dict = _received_optimizer(model, optimizers, lambda: given)
    else:
        if "state" not in optim_state_dict:
            optim_state_dict = unflatten(model, optimizers, optim_state_dict)
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

    Shapes of sharded parameters are compared first, then the state of optimizers is loaded, then
    the model, of which names and plain tensors are compared only now. A model on meta is loaded
    first: the state of its optimizers goes where its parameters are.
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
    """Return an entry of a parameter's state as its optimizer needs it: sharded as that is.

    Sharded tensors are not copied, as by torch: the memory of a whole state. Plain ones are: an
    optimizer counts its steps in place, and the same state may be put into another one.
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
    """Return a state by names; those of modules in it are by the names of these modules."""
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
    """Return what rank 0 has of optimizers' state, cut like their parameters."""

    def entries_of_rank0() -> dict[tuple[str, ...], Any]:
        state = state_of_rank0()
        has_parts = not state or "state" in state
        nested: Mapping[str, Any] = state if has_parts else unflatten(model, optimizers, state)
        entries: dict[tuple[str, ...], Any] = {("param_groups",): nested.get("param_groups", [])}
        for name, values in nested.get("state", {}).items():
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
        is_nested = isinstance(value, dict) and name in named  # Tensors inside come as they are.
        entry = _placed(value, named[name], keys[0], name, saved) if is_nested else value
        received["state"].setdefault(name, {})[keys[0]] = entry
    return received


# --- whole optimizer state ------------------------------------------------------------------------
#
# - ``"names"``: by parameter names, as FSDP1's ``full_optim_state_dict`` and torch's
#   ``get_optimizer_state_dict(full_state_dict=True)``.
# - ``"ids"``: by the optimizer's own numbers, as the ``state_dict()`` of an optimizer of a plain
#   model, FSDP1's ``rekey_optim_state_dict`` and fairscale's ``gather_full_optim_state_dict``.

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
        rank0_only: The other ranks get an empty dict.
        layout: ``"names"``: by parameter names; a tied one's first. ``"ids"``: by numbers, in the
            order of the optimizer's parameter groups, which an optimizer of the plain model's
            parameters in the same groups loads.
        to_cpu: Whether it is kept in the memory of the host.

    Returns:
        ``state`` and ``param_groups``. Parameters that were never stepped have no state.

    Raises:
        CheckpointError: The optimizer holds a parameter that the model does not, or `layout` is
            unknown.

    Cost: an all-gather of at most twice its bytes for each tensor of the state
    (`ShardedTensor.full_tensor`). Memory: the whole state where it is kept, elsewhere one tensor.
    """
    _check_layout(layout)
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
            optimizer's parameter groups; what else is in it is not looked at. It is not kept.
        model: Module that holds all of the optimizer's parameters.
        optimizer: Optimizer, which need not have been stepped.
        from_rank0: Rank 0 has the state and sends it, tensor by tensor; what other ranks pass is
            not looked at. Else each rank has it and cuts out its pieces.
        strict: Whether each parameter must be in the state or its groups; else parameters that are
            not begin anew.

    Raises:
        CheckpointError: On all ranks: groups have other sizes, or parameters are missing. Nothing
            has been changed then. State of another shape than the parameter's is the optimizer's
            own affair, and stays whole.

    Cost: with `from_rank0` that of `set_optimizer_state_dict` with ``broadcast_from_rank0``. Else
    none.
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
    """Return an optimizer's state in another layout; no tensor is copied, nothing is sent.

    As FSDP1's ``rekey_optim_state_dict``.

    Args:
        state: ``state`` and ``param_groups``, in either layout.
        model: Module, sharded or plain; its parameters have the names.
        optimizer: Optimizer, sharded or plain; its parameter groups have the order.
        layout: The wanted one, see `gather_optimizer_state`.
        names: The parameters' names by the numbers in `state`, if these are not the optimizer's:
            fairscale numbers the parameters of each wrapper one after the other.

    Returns:
        ``state`` and ``param_groups``. With ``"ids"`` the groups are the optimizer's.

    Raises:
        CheckpointError: Groups have other sizes than the optimizer's, a number has no name, or
            saved groups of one group's parameters have different options; or `layout` is unknown.
    """
    _check_layout(layout)
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


def _check_layout(layout: object) -> None:
    if layout not in ("names", "ids"):
        msg = f"layout must be 'names' or 'ids', got {layout!r}."
        raise CheckpointError(msg)


def _by_names(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: Sequence[str] | None,
) -> dict[str, Any]:
    """Return a state that was keyed by numbers."""
    by_id: dict[int, str] = dict(enumerate(names)) if names is not None else {}
    if names is None:
        own = names_in_groups(names_of_parameters(model), *as_optimizers(optimizer))
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
