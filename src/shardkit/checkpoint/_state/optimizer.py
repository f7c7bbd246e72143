"""Optimizer state by parameter names: out of optimizers, and back into them.

An optimizer numbers its parameters. Here they have names, so that state finds its parameter in a
model sharded otherwise, in other parameter groups' order, or in another optimizer.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import CheckpointError, listed
from shardkit._state.full import STATE_NUMBERS
from shardkit.checkpoint._state.names import (
    as_optimizers,
    names_in_groups,
    names_of_parameters,
    split_at_name,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from shardkit.checkpoint._files.bytes_io import TensorInfo

    Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def named_state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the state of optimizers by parameter names: ``state`` and ``param_groups``.

    Tensors are those of the optimizers, sharded as they are. Parameters that were never stepped
    have no state; an optimizer is not stepped for it.

    Raises:
        CheckpointError: An optimizer holds a parameter that the model does not.
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
) -> dict[str, Any]:
    """Return room for a saved optimizer state, made without stepping the optimizers.

    Args:
        model: Module that holds the parameters.
        optimizers: One optimizer or several.
        saved: Shapes and dtypes saved of each parameter; None for what is not a tensor.

    Returns:
        ``state``: by parameter and state name a tensor to load into: sharded like the parameter if
        it has its shape, end to end with those of the parameter's bucket; else a plain one on the
        host; None for what is not a tensor. Parameters of which nothing was saved are left out.
        ``param_groups``: those of the optimizers, with names as ``params``.

    Cost: memory of this rank's pieces; no collective.
    """
    state = {
        name: {
            key: None if info is None else room_for(param, key, info, saved)
            for key, info in saved[name].items()
        }
        for name, param in saved_parameters(model, optimizers, saved)
    }
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

    Only a parameter without dimensions leaves a doubt: its steps have no dimensions either. Then
    the same entry of parameters that have some tells.
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

    A parameter without an entry has no state afterwards, as one that was never stepped. Options
    come from the saved group that lists the group's parameters, in whatever order; those that were
    not saved stay.

    Args:
        model: Module that holds the parameters.
        optimizers: One optimizer or several.
        state: ``state`` and ``param_groups``, as `named_state` and `optimizer_template` return.
        strict: Whether every parameter must be in a saved group.

    Raises:
        CheckpointError: Parameters are missing, or the saved groups of one group's parameters have
            different options. Nothing has been changed then.
    """
    loads = list(numbered_states(model, optimizers, state, strict=strict))
    for optimizer, numbered_state in loads:
        optimizer.load_state_dict(numbered_state)


def numbered_states(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any], *, strict: bool = False
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Yield each optimizer, and of a state by names what its ``load_state_dict`` takes.

    Raises:
        CheckpointError: See `put_optimizer_state`.
    """
    names = names_of_parameters(model)
    for optimizer in as_optimizers(optimizers):
        in_groups = names_in_groups(names, optimizer)
        if strict:
            _check_names(in_groups, state)
        number = iter(range(sum(map(len, in_groups))))
        numbered: dict[int, Any] = {}
        groups = []
        for index, (group, members) in enumerate(
            zip(optimizer.param_groups, in_groups, strict=True)
        ):
            numbers = [next(number) for _ in members]
            for i, aliases in zip(numbers, members, strict=True):
                entry = next((state["state"][a] for a in aliases if a in state["state"]), None)
                if entry:
                    numbered[i] = entry
            groups.append({**_options(index, group, members, state), "params": numbers})
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
    for name, entries in state["state"].items():
        _flatten_into(flat, f"state.{name}", entries)
    for group in state["param_groups"]:
        for name in group["params"]:
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{name}.{key}"] = value
    return flat


def _flatten_into(flat: dict[str, Any], path: str, entries: Mapping[Any, Any]) -> None:
    for key, value in entries.items():
        if isinstance(value, dict):
            _flatten_into(flat, f"{path}.{key}", value)
        else:
            flat[f"{path}.{key}"] = value


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
