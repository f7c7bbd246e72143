"""One file per rank: its pieces as plain tensors, with a description of how they are cut.

torch.save and torch.load write and read these files without any class of shardkit. One process can
join them to whole tensors again (`_consolidate`). The content of such a file::

    "model":           {name: 1-D piece, or a whole tensor that is not sharded, or extra state}
    "optimizer":       {"<parameter>.<state>": the same}
    "param_groups":    [{..., "params": [parameter, ...]}, ...]
    "shard_metadata":  {"format", "version", "save", "rank", "world_size", "tied",
                        "model":     {name: {"shape", "dtype", "range", "cut"}},
                        "optimizer": {parameter: {state: the same, or None: no tensor}}}

A state that is a dict or list of sharded tensors has several such entries. Their names have several
keys, and `keys_of_state` says which places they have in the metadata.

``range`` is [start, stop) of the flattened whole tensor. ``cut`` describes how the ranges of all
ranks are computed (`FlatLayout.cut`). Both are None for a whole tensor. ``save`` is a random number
that is the same in all files of one save.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError
from shardkit._params.state_dicts import holds_sharded
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.base import first_of_all
from shardkit.checkpoint._agreement import agreed, axes_of
from shardkit.checkpoint._files.disk import dtype_name, nested, reading, saved_key
from shardkit.checkpoint._files.local import (
    FORMAT,
    METADATA,
    MODEL,
    OPTIMIZER,
    VERSION,
    info_of,
    is_piece,
    keys_of_state,
    metadata_of,
    name_of_state,
)
from shardkit.checkpoint._state.model_and_optimizer import (
    named_state,
    optimizer_template,
    put_optimizer_state,
)
from shardkit.checkpoint._state.names import (
    by_identity,
    fill_memory,
    mesh_of,
    set_extra_state,
    state_of,
)
from shardkit.checkpoint._state.sources import Misfits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer

    from shardkit._mesh import DeviceMesh

# --- get ------------------------------------------------------------------------------------------


@torch.no_grad()
def local_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> dict[str, Any]:
    """Return this rank's part of the training state in plain containers and tensors.

    Save it on every rank, for example under ``f"{prefix}_rank-{rank:08d}-of-{world:08d}.pth"``;
    ``python -m shardkit consolidate --ckpt_prefix`` makes one file of these. Call it on all ranks.

    Args:
        model: Module sharded by `fully_shard`.
        optimizer: One optimizer or several.

    Returns:
        State, in the form that the module's docstring describes. The tensors share memory with the
        model and the optimizer.

    Raises:
        CheckpointError: The model is not sharded, on meta, on XLA devices, or also split by tensor
            parallelism. Or a key of the optimizer's state is no string, number, bool or None.

    Cost: one exchange of a number per mesh axis.
    """
    state = state_of(model)
    mesh = mesh_of(state, "a local file")
    _check_has_ranks(mesh)
    save = first_of_all(secrets.randbits(62), axes_of(mesh))
    metadata: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "save": save,
        **_describe_all(state, mesh),
    }
    result = {MODEL: {name: _local(value) for name, value in state.items()}}
    if optimizer is not None:
        named = named_state(model, optimizer)
        by_place = {name: _by_place(name, entries) for name, entries in named["state"].items()}
        result[OPTIMIZER] = {
            name_of_state(name, place): _local(value)
            for name, entries in by_place.items()
            for place, value in entries.items()
        }
        metadata[OPTIMIZER] = {
            name: {
                place: _describe(f"{name}.{place}", value) if isinstance(value, Tensor) else None
                for place, value in entries.items()
            }
            for name, entries in by_place.items()
        }
        result["param_groups"] = named["param_groups"]
    return {**result, METADATA: metadata}


def get_shard_metadata(model: nn.Module) -> dict[str, Any]:
    """Return the description of this rank's pieces that `local_state_dict` has, without values.

    For scripts that save pieces in their own files. Names are those of the model without sharding;
    ``dict(model.named_parameters())`` has the parameters by the same names.

    Args:
        model: Module sharded by `fully_shard`.

    Returns:
        ``"rank"`` and ``"world_size"``: among all ranks that hold the model; ``"mesh"``:
        ``"device_type"``, ``"shape"``, ``"names"`` of the axes and ``"coordinate"`` of this rank;
        ``"tied"``: other names of tensors, each with the first name; ``"model"``: for each name
        ``"shape"`` and ``"dtype"`` of the whole tensor, ``"range"``, the elements [start, stop) of
        the flattened tensor that this rank has, and ``"cut"``, how the ranges of all ranks are
        computed; the last two are None for a tensor that is not sharded.

    Raises:
        CheckpointError: The same as for `local_state_dict`.

    Cost: no collectives.
    """
    state = state_of(model)
    mesh = mesh_of(state, "shard metadata", allow_meta=True)
    _check_has_ranks(mesh)
    return {
        **_describe_all(state, mesh),
        "mesh": {
            "device_type": mesh.device_type,
            "shape": list(mesh.shape),
            "names": mesh.mesh_dim_names,
            "coordinate": mesh.get_coordinate(),
        },
    }


def _check_has_ranks(mesh: DeviceMesh) -> None:
    if mesh.backend.is_traced:
        msg = (
            f"there are no local files of meshes of {mesh.device_type!r} devices, where pieces are "
            f"padded and one process may have those of all ranks. Use shardkit.checkpoint.save and "
            f"load, or save_full and load_full."
        )
        raise CheckpointError(msg)


def _by_place(name: str, state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a parameter's state by places, see `keys_of_state`; refuse keys that are no names."""
    found: dict[Any, Any] = {}
    by_text: dict[str, Any] = {}

    def add(value: Any, *place: Any) -> None:
        if isinstance(value, (list, tuple)) and holds_sharded(value):
            for position, entry in enumerate(value):
                add(entry, *place, (position,))
        elif isinstance(value, dict) and (not place or holds_sharded(value)):
            for key, entry in value.items():
                _check_key(name, key)
                add(entry, *place, key)
        else:
            own = place if len(place) > 1 else place[0]
            found[own] = value
            if (other := by_text.setdefault(name_of_state(name, own), own)) is not own:
                msg = (
                    f"the optimizer's state of {name!r} has the keys {other!r} and {own!r}, which "
                    f"have one name in a local file. Rename one of them."
                )
                raise CheckpointError(msg)

    add(state)
    return found


def _check_key(name: str, key: Any) -> None:
    try:
        saved_key(key)
    except ValueError as error:
        msg = (
            f"the optimizer's state of {name!r} has the key {key!r}, a {type(key).__name__}, which "
            f"cannot be saved. Make it a string or a number."
        )
        raise CheckpointError(msg) from error


def _local(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        value.spec.check_saved()
        return value.to_local().detach()
    return value.detach() if isinstance(value, Tensor) else value


def _describe_all(state: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "rank": mesh.ranks.index(mesh.rank),
        "world_size": len(mesh.ranks),
        "tied": {n: entry.names[0] for entry in by_identity(state) for n in entry.names[1:]},
        MODEL: {n: _describe(n, v) for n, v in state.items() if isinstance(v, Tensor)},
    }


def _describe(name: str, tensor: Tensor) -> dict[str, Any]:
    described = {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
    if not isinstance(tensor, ShardedTensor):
        return {**described, "range": None, "cut": None}
    spec = tensor.spec
    if spec.tensor_parallel is not None:
        msg = (
            f"{name!r} is split over a tensor-parallel mesh as well, which local files do not "
            f"describe. Use shardkit.checkpoint.save or save_full."
        )
        raise CheckpointError(msg)
    return {
        **described,
        "range": [spec.start, spec.stop],
        "cut": list(spec.layout.cut(spec.index)),
    }


# --- set ------------------------------------------------------------------------------------------


@torch.no_grad()
def load_local_state_dict(
    model: nn.Module,
    state: dict[str, Any],
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> None:
    """Load what `local_state_dict` returned on this rank, into a model that is sharded alike.

    Args:
        model: Module sharded over the same number of ranks, with the same groups; it may be on
            meta.
        state: State of the same rank, e.g. ``torch.load(path, weights_only=True)``; it is copied.
        optimizer: One optimizer or several, if they were saved.

    Raises:
        CheckpointError: On all ranks, if one rank passes something else, the state of another rank
            or number of ranks, or one that is cut in another way (all names are listed); or if the
            ranks pass states of different saves. Nothing is changed then.

    Cost: one exchange of a number per mesh axis.
    """
    mine = state_of(model)
    mesh = mesh_of(mine, "a local file", allow_meta=True)
    _check_has_ranks(mesh)

    def look() -> dict[str, Any]:
        with reading("the state dict"):
            return _fitting_metadata(state, mine, mesh, has_optimizer=optimizer is not None)

    metadata = agreed(
        mesh,
        "the state dict was not loaded",
        look,
        lambda found: f"save {found['save']}",
        "the ranks have state dicts of different saves. Load on each rank its own file of one save",
    )
    room = None if optimizer is None else _optimizer_room(model, optimizer, state, metadata)
    for entry in by_identity(mine):
        _copy(entry.tensor, state[MODEL][entry.names[-1]])
    extra = {name: state[MODEL][name] for name, v in mine.items() if not isinstance(v, Tensor)}
    set_extra_state(model, extra)
    if optimizer is not None and room is not None:
        put_optimizer_state(model, optimizer, room)


def _fitting_metadata(
    state: dict[str, Any], mine: dict[str, Any], mesh: DeviceMesh, *, has_optimizer: bool
) -> dict[str, Any]:
    """Return the description in a state; raise if the state does not fit this rank's model."""
    metadata = metadata_of(state, "the state dict")
    place = (mesh.ranks.index(mesh.rank), len(mesh.ranks))
    saved_place = (metadata["rank"], metadata["world_size"])
    if place != saved_place:
        msg = (
            f"the state dict is that of rank {saved_place[0]} of {saved_place[1]}, and this is "
            f"rank {place[0]} of {place[1]}. Load each rank's own file on as many ranks, or make "
            f"one file by `python -m shardkit consolidate` and load that by load_full."
        )
        raise CheckpointError(msg)
    saved = state[MODEL]
    misfits = Misfits(
        missing=[repr(name) for name in mine if name not in saved],
        unexpected=[repr(name) for name in saved if name not in mine],
    )
    _compare(mine, saved, metadata[MODEL], misfits)
    if has_optimizer and OPTIMIZER not in state:
        misfits.wrong.append("no state of an optimizer was saved")
    elif has_optimizer:
        misfits.wrong += _wrong_of_optimizer(state[OPTIMIZER], metadata[OPTIMIZER])
        groups = [g.get("params") if isinstance(g, dict) else None for g in state["param_groups"]]
        if not all(isinstance(g, list) and all(isinstance(n, str) for n in g) for g in groups):
            misfits.wrong.append("its parameter groups are no groups")
    report = misfits.report(
        "the state dict does not fit the model, nothing was loaded",
        "Shard the model as it was when it was saved, or consolidate the files and use load_full.",
        strict=True,
    )
    if report is not None:
        raise CheckpointError(report)
    return metadata


def _compare(
    mine: dict[str, Any], saved: dict[str, Any], described: dict[str, Any], misfits: Misfits
) -> None:
    """Note the differences between a model and a saved state."""
    for name, tensor in mine.items():
        if name not in saved or not isinstance(tensor, Tensor):
            continue
        if name not in described:
            misfits.wrong.append(f"not described: {name!r}")
            continue
        here, there = _describe(name, tensor), described[name]
        if not misfits.compare(repr(name), tensor, info_of(there)):
            continue
        if (here["range"], here["cut"]) != (there["range"], there["cut"]):
            misfits.wrong.append(
                f"cut in another way: of {name!r} this rank has the range {here['range']}, of the "
                f"saved one {there['range']}"
            )
        elif not is_piece(saved[name], there):
            misfits.wrong.append(f"not what is said of it: {name!r}")


def _wrong_of_optimizer(saved: dict[str, Any], described: dict[str, Any]) -> Any:
    """Yield each value of an optimizer's state that does not match its description."""
    for param, entries in described.items():
        for place, of_entry in entries.items():
            name = name_of_state(param, place)
            value = saved[name]
            if isinstance(value, Tensor) if of_entry is None else not is_piece(value, of_entry):
                yield f"not what is said of it: {name!r}"


def _copy(target: Tensor, value: Tensor) -> None:
    fill_memory(target, value.device, lambda memory: memory.copy_(value))


def _optimizer_room(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    state: dict[str, Any],
    metadata: dict[str, Any],
) -> dict[str, Any]:
    """Return the saved optimizer state as tensors of this model."""
    infos = {
        name: {place: None if d is None else info_of(d) for place, d in entries.items()}
        for name, entries in metadata[OPTIMIZER].items()
    }
    room = optimizer_template(model, optimizer, infos)
    filled = {}
    for name, entries in room["state"].items():
        for place, target in entries.items():
            value = state[OPTIMIZER][name_of_state(name, place)]
            if isinstance(target, Tensor):
                piece = target.to_local() if isinstance(target, ShardedTensor) else target
                if piece.shape != value.shape:
                    msg = (
                        f"{place!r} of {name!r} in the optimizer's state has shape "
                        f"{tuple(value.shape)} on this rank, expected {tuple(piece.shape)}. Use "
                        f"the file of another save."
                    )
                    raise CheckpointError(msg)
                _copy(target, value)
            else:
                entries[place] = value
        if entries:
            filled[name] = nested({keys_of_state(place): v for place, v in entries.items()})
    return {"state": filled, "param_groups": state["param_groups"]}
