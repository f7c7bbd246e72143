"""One file per rank: its pieces as plain tensors, with a description of how they are cut.

torch.save and torch.load write and read these files without any class of shardkit. One process can
join them to whole tensors again (`RankFiles`), also those of torch_xla. The content of such a
file::

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

import math
import re
import secrets
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError
from shardkit._params.state_dicts import holds_sharded
from shardkit._tensor.sharded import ShardedTensor
from shardkit._text import dtype_name
from shardkit.backends.base import axes_of, first_of_all
from shardkit.checkpoint._agreement import agreed
from shardkit.checkpoint._files.disk import (
    Keys,
    Source,
    TensorInfo,
    join_keys,
    nested,
    reading,
    saved_key,
)
from shardkit.checkpoint._files.formats import TorchFile
from shardkit.checkpoint._state.model_and_optimizer import (
    named_state,
    optimizer_template,
    put_optimizer_state,
)
from shardkit.checkpoint._state.names import (
    fill_memory,
    mesh_of,
    names_of_tensors,
    set_extra_state,
    state_of,
)
from shardkit.checkpoint._state.sources import Misfits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from shardkit._mesh import DeviceMesh

FORMAT = "shardkit local"
VERSION = 1
MODEL, OPTIMIZER, METADATA = "model", "optimizer", "shard_metadata"  # Keys of such a file.

_MAX_SHOWN = 16


def metadata_of(state: Any, what: object) -> dict[str, Any]:
    """Return the description in a local state dict, after checks that it is consistent."""
    metadata = state.get(METADATA) if isinstance(state, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        msg = (
            f"{what} is not what shardkit.checkpoint.local_state_dict returns: it has no "
            f"{METADATA!r} of format {FORMAT!r}. Other files are read by load_full and load."
        )
        raise CheckpointError(msg)
    if metadata.get("version") != VERSION:
        msg = (
            f"{what} has version {metadata.get('version')} of the format {FORMAT!r}; this shardkit "
            f"reads version {VERSION}. Read it by the shardkit that wrote it."
        )
        raise CheckpointError(msg)
    try:
        _check_metadata(metadata)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{what}: its {METADATA!r} is damaged: {error!r}. Use the file of another save."
        raise CheckpointError(msg) from error
    return metadata


def _check_metadata(metadata: dict[str, Any]) -> None:
    """Raise some error if a description is impossible."""
    rank, world_size = metadata["rank"], metadata["world_size"]
    names = [*metadata["tied"], *metadata["tied"].values(), *metadata[MODEL]]
    entries = [*metadata[MODEL].items()]
    for name, states in metadata.get(OPTIMIZER, {}).items():
        names.append(name)
        entries += [(name_of_state(name, place), described) for place, described in states.items()]
    if not all(isinstance(name, str) for name in names):
        msg = "a name is no string"
        raise TypeError(msg)
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        msg = f"rank {rank!r} of {world_size!r}"
        raise ValueError(msg)
    hash(metadata["save"])
    for name, described in entries:
        if described is None:
            continue
        shape, dtype = described["shape"], getattr(torch, described["dtype"])
        numbers = [*shape, *(described["range"] or (0, 0))]
        fits = isinstance(dtype, torch.dtype) and all(type(n) is int and n >= 0 for n in numbers)
        start, stop = described["range"] or (0, 0)
        if not (fits and start <= stop <= math.prod(shape)) or described["cut"] == 0:
            msg = f"{name!r} is {described!r}"
            raise ValueError(msg)


def keys_of_state(place: Any) -> Keys:
    """Return the keys that lead to an entry of an optimizer's state, from its place in a file.

    The place is a key, or a tuple of keys of nested dicts. The key of a list is ``(position,)``.

    Raises:
        ValueError: A key is no string, number, bool or None.
    """
    keys = place if isinstance(place, tuple) else (place,)
    return tuple(_position(*key) if type(key) is tuple else saved_key(key) for key in keys)


def _position(position: Any) -> int:
    if type(position) is not int:
        msg = f"{position!r} is no position in a list"
        raise ValueError(msg)
    return position


def name_of_state(param: str, place: Any) -> str:
    """Return the name of an entry of an optimizer's state in a file."""
    return join_keys((param, *keys_of_state(place)))


def info_of(described: Mapping[str, Any]) -> TensorInfo:
    """Return shape and dtype of the whole tensor, from its description."""
    return TensorInfo(tuple(described["shape"]), getattr(torch, described["dtype"]))


def piece_info(described: Mapping[str, Any]) -> TensorInfo:
    """Return shape and dtype of this rank's piece, from the tensor's description."""
    info = info_of(described)
    if described["cut"] is None:
        return info
    start, stop = described["range"] or (0, info.numel)
    return TensorInfo((stop - start,), info.dtype)


def is_piece(value: Any, described: Mapping[str, Any]) -> bool:
    """Whether a value is the piece in the description."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and TensorInfo.of(value) == piece_info(described)


# --- get ------------------------------------------------------------------------------------------


@torch.no_grad()
def local_state_dict(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None
) -> dict[str, Any]:
    """Return this rank's shards of the training state in plain containers and tensors.

    Save it on every rank, for example under ``f"{prefix}_rank-{rank:08d}-of-{world:08d}.pth"``;
    ``python -m shardkit consolidate --ckpt_prefix`` makes one file of these. Call it on all ranks.

    Args:
        model: Module sharded by `fully_shard`.
        optimizer: One optimizer or several. The state that a `MatrixOptimizer` keeps at the owners
            of parameters loads after ``python -m shardkit consolidate --optimizer`` only.

    Returns:
        State, in the form that the module's docstring describes. The tensors share memory with the
        model and the optimizer.

    Raises:
        CheckpointError: The model is not sharded, on meta, on XLA devices, or also split by tensor
            parallelism. Or a key of the optimizer's state is no string, number, bool or None.

    Cost: one exchange of a number per mesh axis.
    """
    state = state_of(model)
    mesh = _mesh_of_ranks(state, "a local file")
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
    """Return a description of this rank's shards: shapes, dtypes and ranges, without values.

    For scripts that save shards in their own files. Names are those of the model without sharding;
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
    mesh = _mesh_of_ranks(state, "shard metadata", allow_meta=True)
    return {
        **_describe_all(state, mesh),
        "mesh": {
            "device_type": mesh.device_type,
            "shape": list(mesh.shape),
            "names": mesh.mesh_dim_names,
            "coordinate": mesh.get_coordinate(),
        },
    }


def _mesh_of_ranks(state: dict[str, Any], what: str, *, allow_meta: bool = False) -> DeviceMesh:
    mesh = mesh_of(state, what, allow_meta=allow_meta)
    if mesh.backend.is_traced:
        msg = (
            f"there are no local files of meshes of {mesh.device_type!r} devices, where shards are "
            f"padded and one process may have those of all ranks. Use shardkit.checkpoint.save and "
            f"load, or save_full and load_full."
        )
        raise CheckpointError(msg)
    return mesh


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
                try:
                    saved_key(key)
                except ValueError as error:
                    msg = (
                        f"the optimizer's state of {name!r} has the key {key!r}, a "
                        f"{type(key).__name__}, which cannot be saved. Make it a string or a "
                        f"number."
                    )
                    raise CheckpointError(msg) from error
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


def _local(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        value.spec.check_saved()
        return value.to_local().detach()
    return value.detach() if isinstance(value, Tensor) else value


def _describe_all(state: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "rank": mesh.ranks.index(mesh.rank),
        "world_size": len(mesh.ranks),
        "tied": {n: names[0] for names in names_of_tensors(state).values() for n in names[1:]},
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
    return {**described, "range": [spec.start, spec.stop], "cut": list(spec.layout.cut(spec.index))}


# --- set ------------------------------------------------------------------------------------------


@torch.inference_mode(mode=False)
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

    Cost: one exchange of a number per mesh axis; with an optimizer, one more.
    """
    mine = state_of(model)
    mesh = _mesh_of_ranks(mine, "a local file", allow_meta=True)

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
    room = None
    if optimizer is not None:
        room = _optimizer_template(model, optimizer, metadata)
        agreed(mesh, "the state dict was not loaded", lambda: _fill(room, state))
    for tensor, names in names_of_tensors(mine).items():
        _copy(tensor, state[MODEL][names[-1]])
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
        for param, entries in metadata[OPTIMIZER].items():
            for place, described in entries.items():
                name = name_of_state(param, place)
                value = state[OPTIMIZER][name]
                is_tensor = isinstance(value, Tensor)
                if is_tensor if described is None else not is_piece(value, described):
                    misfits.wrong.append(f"not what is said of it: {name!r}")
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


def _copy(target: Tensor, value: Tensor) -> None:
    fill_memory(target, value.device, lambda memory: memory.copy_(value))


def _optimizer_template(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return tensors of this model for the saved optimizer state; all ranks call it."""
    infos = {
        name: {place: None if d is None else info_of(d) for place, d in entries.items()}
        for name, entries in metadata[OPTIMIZER].items()
    }
    return optimizer_template(model, optimizer, infos)


def _fill(room: dict[str, Any], state: dict[str, Any]) -> None:
    """Copy the saved optimizer state into its tensors, and put these where its keys say."""
    filled = {}
    for name, entries in room["state"].items():
        for place, target in entries.items():
            value = state[OPTIMIZER][name_of_state(name, place)]
            if isinstance(target, Tensor):
                piece = target.to_local() if isinstance(target, ShardedTensor) else target
                if piece.shape != value.shape:
                    msg = (
                        f"{place!r} of {name!r} in the optimizer's state is not cut like the "
                        f"parameter (MatrixOptimizer keeps it at owners): this rank has the shape "
                        f"{tuple(value.shape)}, expected {tuple(piece.shape)}. Make one file by "
                        f"`python -m shardkit consolidate --optimizer`, and load that by load_full "
                        f"and scatter_optimizer_state."
                    )
                    raise CheckpointError(msg)
                _copy(target, value)
            else:
                entries[place] = value
        if entries:
            filled[name] = nested({keys_of_state(place): v for place, v in entries.items()})
    room.update(state=filled, param_groups=state["param_groups"])


# --- files of all ranks, read as whole tensors ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedRange:
    """A range of a whole tensor that is in one file."""

    start: int  # First element in the flattened whole.
    stop: int  # End of the range.
    file: TorchFile  # File that holds it.
    saved: str  # Name in the file.
    first: int = 0  # First element of the range in the saved tensor.


def open_rank_files(files: Sequence[Path]) -> RankFiles:
    """Open the files of all ranks of one save, of `local_state_dict` or of torch_xla's FSDP."""
    opened = [TorchFile(file, MODEL) for file in files]
    return (LocalFiles if _xla_metadata(opened[0]) is None else XlaFsdpFiles)(opened)


class RankFiles(Source):
    """Files of all ranks of one save, which are read as whole tensors."""

    kind = "per-rank files"

    def __init__(self, opened: Sequence[TorchFile], found: Sequence[dict[str, Any]]) -> None:
        """Take the files in the order of their ranks; raise unless there is one of each rank."""
        self.infos, self.tied = {}, {}
        self.others: dict[str, Any] = {}
        self.paths: dict[str, Keys] = {}
        self.world_size: int = found[0]["world_size"]
        self._chunks: dict[str, list[dict[str, Any]]] = {}
        self._pieces: dict[str, list[SavedRange]] = {}
        by_rank: dict[int, TorchFile] = {}
        for file, metadata in zip(opened, found, strict=True):
            rank = metadata["rank"]
            other = by_rank.setdefault(rank, file)
            if other is not file:
                msg = f"{file.path} and {other.path} are both of rank {rank}. Remove one of them."
                raise CheckpointError(msg)
        # Only some of them: the number of ranks in a damaged file may be any number.
        absent = (str(rank) for rank in range(self.world_size) if rank not in by_rank)
        missing = list(islice(absent, _MAX_SHOWN + 1))
        if missing:
            shown = ", ".join(missing[:_MAX_SHOWN]) + ", ..." * (len(missing) > _MAX_SHOWN)
            msg = (
                f"of {self.world_size} ranks' files those of rank {shown} are missing beside "
                f"{opened[0].path}. Copy them there."
            )
            raise CheckpointError(msg)
        self._opened = [by_rank[rank] for rank in sorted(by_rank)]
        self.files = [file.path for file in self._opened]

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on, from as many pieces as that takes."""
        stop = start + out.numel()
        for piece in self._pieces[name]:
            low, high = max(piece.start, start), min(piece.stop, stop)
            if low >= high:
                continue
            part, first = out[low - start : high - start], piece.first + low - piece.start
            if piece.file.infos[piece.saved].dtype == out.dtype:
                piece.file.read_into(piece.saved, first, part)
            else:
                part.copy_(piece.file.read(piece.saved, first, first + high - low))

    def chunks(self, name: str) -> list[dict[str, Any]]:
        """Return the files that hold a tensor, with the range of each; None: the whole tensor."""
        return self._chunks[name]

    def _add_tensor(
        self, path: Keys, info: TensorInfo, ranges: Sequence[SavedRange], *, is_cut: bool
    ) -> None:
        """Note the ranges of a tensor; several files hold replicas of the same range."""
        key = join_keys(path)
        by_start: dict[int, SavedRange] = {}
        for each in ranges:
            by_start.setdefault(each.start, each)
        pieces = [by_start[start] for start in sorted(by_start)]
        ends = [0, *(piece.stop for piece in pieces)]
        begins = [*(piece.start for piece in pieces), info.numel]
        if begins != ends:
            files = f"{self.files[0]} and others"
            msg = f"the shards of {join_keys(path[1:])!r} in {files} do not make a whole."
            raise CheckpointError(msg)
        self.infos[key], self.paths[key], self._pieces[key] = info, path, pieces
        self._chunks[key] = [
            {"file": each.file.path.name, "range": [each.start, each.stop] if is_cut else None}
            for each in ranges
        ]

    def _add_other(self, path: Keys, value: Any) -> None:
        key = join_keys(path)
        self.paths[key], self.others[key] = path, value


class LocalFiles(RankFiles):
    """The files of `local_state_dict` from all ranks, of one save.

    Names are ``model.<name>`` and ``optim.state.<parameter>.<state>``.
    """

    def __init__(self, opened: Sequence[TorchFile]) -> None:
        found = [metadata_of(file.beside, file.path) for file in opened]
        first = found[0]
        for file, metadata in zip(opened, found, strict=True):
            if (metadata["save"], metadata["world_size"]) != (first["save"], first["world_size"]):
                msg = (
                    f"{file.path} (rank {metadata['rank']} of {metadata['world_size']}) was not "
                    f"written together with {opened[0].path} (rank {first['rank']} of "
                    f"{first['world_size']}): they are of different runs or steps. Keep the files "
                    f"of one save."
                )
                raise CheckpointError(msg)
        super().__init__(opened, found)
        opened = self._opened
        self._found = found = [file.beside[METADATA] for file in opened]
        self.tied = {f"model.{n}": f"model.{of}" for n, of in found[0]["tied"].items()}
        for name in (*self.tied, *self.tied.values()):
            if name.removeprefix("model.") not in found[0][MODEL]:
                msg = f"{opened[0].path}: {name!r} is tied, and is not there."
                raise CheckpointError(msg)
        for name, value in opened[0].others.items():
            self._add_other(("model", name), value)
        for name in found[0][MODEL]:
            self._add(("model", name), opened, name, [each[MODEL].get(name) for each in found])
        if OPTIMIZER in found[0]:
            self._add_optimizer()

    def _add_optimizer(self) -> None:
        opened = [TorchFile(file, OPTIMIZER) for file in self.files]
        for name, entries in self._found[0][OPTIMIZER].items():
            for place, described in entries.items():
                path = ("optim", "state", name, *keys_of_state(place))
                saved = name_of_state(name, place)
                if described is None:
                    if saved not in opened[0].others:
                        msg = f"{opened[0].path} lacks {saved!r}, which it describes."
                        raise CheckpointError(msg)
                    self._add_other(path, opened[0].others[saved])
                else:
                    by_rank = [m[OPTIMIZER].get(name, {}).get(place) for m in self._found]
                    self._add(path, opened, saved, by_rank)
        self._add_other(("optim", "param_groups"), opened[0].beside.get("param_groups"))

    def _add(
        self,
        path: Keys,
        opened: list[TorchFile],
        saved: str,
        described: list[dict[str, Any] | None],
    ) -> None:
        """Note the pieces of a tensor, and their files."""
        if described[0] is None:
            msg = f"{opened[0].path} does not describe {saved!r}."
            raise CheckpointError(msg)
        info = info_of(described[0])
        ranges = []
        for file, piece in zip(opened, described, strict=True):
            if piece is None or info_of(piece) != info:
                msg = f"{file.path} describes {saved!r} in another way than {opened[0].path}."
                raise CheckpointError(msg)
            if file.infos.get(saved) != piece_info(piece):
                msg = f"{file.path}: {saved!r} is {file.infos.get(saved)}, not what it says."
                raise CheckpointError(msg)
            start, stop = piece["range"] or (0, info.numel)
            if start < stop:
                ranges.append(SavedRange(start, stop, file, saved))
        self._add_tensor(path, info, ranges, is_cut=described[0]["range"] is not None)


# --- torch_xla's files ----------------------------------------------------------------------------
#
# Its users save these on each rank, by `xm.save`::
#
#     "model":           {name: shard of a parameter, padded; or a whole buffer}
#     "shard_metadata":  model.get_shard_metadata()
#
# The shards of all ranks, end to end, are the flattened parameter and padding. With
# ``flatten_parameters=True`` they are a flat parameter, in which several parameters lie end to end.
# Tested on files of torch_xla 2.9.0; source: its ``distributed/fsdp/state_dict_utils.py``.

_SHARD = re.compile(r"(?s)(?:(.*?)\.)??(_fsdp_shard.*)")  # The module and the name of a shard.
_FLAT = "_fsdp_wrapped_module.flat_param_"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")


def _xla_metadata(file: TorchFile) -> dict[str, Any] | None:
    metadata = file.beside.get(METADATA)
    return metadata if isinstance(metadata, dict) and "shard_info" in metadata else None


class XlaFsdpFiles(RankFiles):
    """The files of all ranks; names are ``model.<name>``, as in the model before sharding.

    A tied weight appears under its first name only, since the files do not record its other names.
    """

    def __init__(self, opened: Sequence[TorchFile]) -> None:
        described = []
        for file in opened:
            metadata = _xla_metadata(file)
            if metadata is None:
                msg = (
                    f"{file.path} is not of torch_xla's FSDP, as {opened[0].path} is: it has no "
                    f"{METADATA!r} of get_shard_metadata(). Keep the files of one save together."
                )
                raise CheckpointError(msg)
            described.append(metadata)
        sizes = sorted({metadata["world_size"] for metadata in described})
        if len(sizes) > 1:
            msg = (
                f"{opened[0].path} and the other files were written by different numbers of ranks "
                f"({', '.join(map(str, sizes))}). Keep the files of one save."
            )
            raise CheckpointError(msg)
        super().__init__(opened, described)
        first = self._opened[0]
        self._metadata: dict[str, Any] = first.beside[METADATA]
        for name, value in first.others.items():
            self._add_other((MODEL, _plain(name)), value)
        buffers = self._metadata.get("buffer_info", {})
        dtypes = {_plain(name): info["_orig_dtype"] for name, info in buffers.items()}
        for name, info in first.infos.items():
            if (found := _SHARD.fullmatch(name)) is not None:
                self._add_shards(name, found[1] or "", found[2])
            else:
                dtype = dtypes.get(_plain(name), info.dtype)
                self._add(name, TensorInfo(info.shape, dtype), [first], name)

    def _add_shards(self, saved: str, prefix: str, shard_name: str) -> None:
        """Note the shards of a parameter, or of all parameters in a flat one."""
        first = self._opened[0]
        try:
            shard = self._metadata["shard_info"][prefix][shard_name]
        except KeyError:
            msg = f"{first.path} has a shard {saved!r} that its metadata does not describe."
            raise CheckpointError(msg) from None
        whole = f"{prefix}.{shard['_orig_name']}" if prefix else shard["_orig_name"]
        dtype = first.infos[saved].dtype
        numel = 0
        for file in self._opened:
            if saved not in file.infos or file.infos[saved].dtype != dtype:
                msg = f"{file.path} has no {saved!r} of {dtype}, as {first.path} has."
                raise CheckpointError(msg)
            numel += file.infos[saved].numel
        wanted = math.prod(shard["_orig_size"])
        if numel < wanted:
            msg = (
                f"the shards of {whole!r} in {first.path} and others have {numel} elements "
                f"together, and the parameter has {wanted}: a file is not of this run."
            )
            raise CheckpointError(msg)
        names, shapes, numels = [whole], [shard["_orig_size"]], [wanted]
        if _FLAT in whole:
            names, shapes, numels = self._metadata["flatten_info"][whole]
            module = whole.rpartition(".")[0]
            names = [f"{module}.{name}".removeprefix(".") for name in names]
        start = 0
        for name, shape, size in zip(names, shapes, numels, strict=True):
            self._add(name, TensorInfo(tuple(shape), dtype), self._opened, saved, start)
            start += size

    def _add(
        self, name: str, info: TensorInfo, files: list[TorchFile], saved: str, start: int = 0
    ) -> None:
        """Note the pieces of a tensor: from `start` on, in what the files hold end to end."""
        plain = _plain(name)
        if f"{MODEL}.{plain}" in self.infos:
            msg = f"{self.files[0]} and others hold {plain!r} twice. Were modules wrapped twice?"
            raise CheckpointError(msg)
        ranges, begin = [], -start
        for file in files:
            end = begin + file.infos[saved].numel
            low, high = max(begin, 0), min(end, info.numel)
            if low < high:
                ranges.append(SavedRange(low, high, file, saved, low - begin))
            begin = end
        self._add_tensor((MODEL, plain), info, ranges, is_cut=len(files) > 1)


def _plain(name: str) -> str:
    """Return a name as it was before the modules were wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
