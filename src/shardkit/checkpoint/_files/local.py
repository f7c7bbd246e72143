"""Files with one rank's part each, of shardkit or torch_xla, which are read as whole tensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.disk import Keys, Source, TensorInfo, join_keys, saved_key
from shardkit.checkpoint._files.torch_zip import TorchFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

FORMAT = "shardkit local"
VERSION = 1
MODEL, OPTIMIZER, METADATA = "model", "optimizer", "shard_metadata"
"""Keys of such a file."""

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


@dataclass(frozen=True, slots=True)
class SavedRange:
    """A range of a whole tensor that is in one file."""

    start: int  # First element in the flattened whole.
    stop: int  # End of the range.
    file: TorchFile  # File that holds it.
    saved: str  # Name in the file.
    first: int = 0  # First element of the range in the saved tensor.


class RankFiles(Source):
    """Files of all ranks of one save, which are read as whole tensors."""

    kind = "per-rank files"
    files: list[Path]
    world_size: int

    def __init__(self) -> None:
        self.infos, self.tied = {}, {}
        self.others: dict[str, Any] = {}
        self.paths: dict[str, Keys] = {}
        self._chunks: dict[str, list[dict[str, Any]]] = {}
        self._pieces: dict[str, list[SavedRange]] = {}

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
            msg = f"the pieces of {join_keys(path[1:])!r} in {files} do not make a whole."
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

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        self.files = list(files)
        opened = [TorchFile(file, MODEL) for file in files]
        found = [metadata_of(file.beside, file.path) for file in opened]
        first = found[0]
        for file, metadata in zip(files, found, strict=True):
            if (metadata["save"], metadata["world_size"]) != (first["save"], first["world_size"]):
                msg = (
                    f"{file} (rank {metadata['rank']} of {metadata['world_size']}) was not written "
                    f"together with {files[0]} (rank {first['rank']} of {first['world_size']}): "
                    f"they are of different runs or steps. Keep the files of one save."
                )
                raise CheckpointError(msg)
        self.world_size = first["world_size"]
        _check_complete(files, [metadata["rank"] for metadata in found], self.world_size)
        self.tied = {f"model.{n}": f"model.{of}" for n, of in first["tied"].items()}
        for name in (*self.tied, *self.tied.values()):
            if name.removeprefix("model.") not in first[MODEL]:
                msg = f"{opened[0].path}: {name!r} is tied, and is not there."
                raise CheckpointError(msg)
        for name, value in opened[0].others.items():
            self._add_other(("model", name), value)
        for name in first[MODEL]:
            described = [metadata[MODEL].get(name) for metadata in found]
            self._add(("model", name), opened, name, described)
        if OPTIMIZER in first:
            self._add_optimizer(files, found)

    def _add_optimizer(self, files: Sequence[Path], found: list[dict[str, Any]]) -> None:
        opened = [TorchFile(file, OPTIMIZER) for file in files]
        for name, entries in found[0][OPTIMIZER].items():
            for place, described in entries.items():
                path = ("optim", "state", name, *keys_of_state(place))
                saved = name_of_state(name, place)
                if described is None:
                    if saved not in opened[0].others:
                        msg = f"{opened[0].path} lacks {saved!r}, which it describes."
                        raise CheckpointError(msg)
                    self._add_other(path, opened[0].others[saved])
                else:
                    by_rank = [m[OPTIMIZER].get(name, {}).get(place) for m in found]
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


def _check_complete(files: Sequence[Path], ranks: Sequence[int], world_size: int) -> None:
    """Raise unless there is one file of each rank."""
    by_rank: dict[int, Path] = {}
    for file, rank in zip(files, ranks, strict=True):
        other = by_rank.setdefault(rank, file)
        if other is not file:
            msg = f"{file} and {other} are both of rank {rank}. Remove one of them."
            raise CheckpointError(msg)
    # Only some of them: the number of ranks in a damaged file may be any number.
    absent = (str(rank) for rank in range(world_size) if rank not in by_rank)
    missing = list(islice(absent, _MAX_SHOWN + 1))
    if missing:
        shown = ", ".join(missing[:_MAX_SHOWN]) + ", ..." * (len(missing) > _MAX_SHOWN)
        msg = (
            f"of {world_size} ranks' files those of rank {shown} are missing beside {files[0]}. "
            f"Copy them there."
        )
        raise CheckpointError(msg)


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


def is_of_xla_fsdp(file: Path) -> bool:
    """Return whether a per-rank file is one of torch_xla's FSDP."""
    return _xla_metadata(TorchFile(file, MODEL)) is not None


def _xla_metadata(file: TorchFile) -> dict[str, Any] | None:
    metadata = file.beside.get(METADATA)
    return metadata if isinstance(metadata, dict) and "shard_info" in metadata else None


class XlaFsdpFiles(RankFiles):
    """The files of all ranks; names are ``model.<name>``, as in the model before sharding.

    A tied weight appears under its first name only, since the files do not record its other names.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        opened = _in_order([TorchFile(file, MODEL) for file in files])
        first: dict[str, Any] = opened[0].beside[METADATA]
        self.files = [file.path for file in opened]
        self.world_size: int = first["world_size"]
        for name, value in opened[0].others.items():
            self._add_other((MODEL, _plain(name)), value)
        dtypes = {
            _plain(name): info["_orig_dtype"] for name, info in first.get("buffer_info", {}).items()
        }
        for name, info in opened[0].infos.items():
            found = _SHARD.fullmatch(name)
            if found is None:
                dtype = dtypes.get(_plain(name), info.dtype)
                self._add(name, TensorInfo(info.shape, dtype), opened[:1], name)
                continue
            try:
                prefix = found[1] or ""
                shard = first["shard_info"][prefix][found[2]]
            except KeyError:
                msg = f"{opened[0].path} has a shard {name!r} that its metadata does not describe."
                raise CheckpointError(msg) from None
            own = shard["_orig_name"]
            whole = f"{prefix}.{own}" if prefix else own
            self._add_shards(whole, name, shard, opened)

    def _add_shards(
        self, whole: str, saved: str, shard: dict[str, Any], opened: list[TorchFile]
    ) -> None:
        """Note the shards of a parameter, or of all parameters in a flat one."""
        dtype = opened[0].infos[saved].dtype
        numel = 0
        for file in opened:
            if saved not in file.infos or file.infos[saved].dtype != dtype:
                msg = f"{file.path} has no {saved!r} of {dtype}, as {opened[0].path} has."
                raise CheckpointError(msg)
            numel += file.infos[saved].numel
        wanted = math.prod(shard["_orig_size"])
        if numel < wanted:
            msg = (
                f"the shards of {whole!r} in {opened[0].path} and others have {numel} elements "
                f"together, and the parameter has {wanted}: a file is not of this run."
            )
            raise CheckpointError(msg)
        if _FLAT not in whole:
            info = TensorInfo(tuple(shard["_orig_size"]), dtype)
            self._add(whole, info, opened, saved)
            return
        metadata: dict[str, Any] = opened[0].beside[METADATA]
        names, shapes, numels = metadata["flatten_info"][whole]
        module, start = whole.rpartition(".")[0], 0
        for name, shape, size in zip(names, shapes, numels, strict=True):
            info = TensorInfo(tuple(shape), dtype)
            self._add(f"{module}.{name}".removeprefix("."), info, opened, saved, start)
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


def _in_order(opened: list[TorchFile]) -> list[TorchFile]:
    """Return the files by rank, if there is exactly one of each."""
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
    sizes = {metadata["world_size"] for metadata in described}
    if len(sizes) > 1:
        msg = (
            f"{opened[0].path} and the other files were written by different numbers of ranks "
            f"({', '.join(map(str, sorted(sizes)))}). Keep the files of one save."
        )
        raise CheckpointError(msg)
    [world_size] = sizes
    ranks = [metadata["rank"] for metadata in described]
    _check_complete([file.path for file in opened], ranks, world_size)
    return [file for _, file in sorted(zip(ranks, opened, strict=True), key=itemgetter(0))]


def _plain(name: str) -> str:
    """Return a name as it was before the modules were wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
