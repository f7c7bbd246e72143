"""Per-rank files of torch_xla's FSDP, read as whole tensors without processes and without it.

What its users save on each rank, by `xm.save`::

    "model":           {name: shard of a parameter, padded; or a whole buffer}
    "shard_metadata":  model.get_shard_metadata()

The shards of all ranks, end to end, are the flattened parameter and padding. With
``flatten_parameters=True`` that is a flat one, in which several lie end to end. Tried on files of
torch_xla 2.9.0; source: its ``distributed/fsdp/state_dict_utils.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.bytes_io import TensorInfo, read_new
from shardkit.checkpoint._files.local import METADATA, MODEL, check_complete
from shardkit.checkpoint._files.torch_zip import TorchFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")


def is_of_xla_fsdp(file: Path) -> bool:
    """Return whether a per-rank file is one of torch_xla's FSDP."""
    metadata = TorchFile(file, MODEL).beside.get(METADATA)
    return isinstance(metadata, dict) and "shard_info" in metadata


@dataclass(frozen=True, slots=True)
class _ShardPlace:
    """Where a tensor is.

    Attributes:
        saved: Name in each file.
        start: Of its first element in the shards of all ranks, end to end.
        files: Those that hold it: the first one alone if it is no shard.
    """

    saved: str
    start: int
    files: tuple[TorchFile, ...]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[TorchFile, int, int]]:
        """Yield the files that hold [start, stop) of the tensor, and the range in each."""
        begin = 0
        for file in self.files:
            end = begin + math.prod(file.infos[self.saved].shape)
            low, high = max(begin, self.start + start), min(end, self.start + stop)
            if low < high:
                yield file, low - begin, high - begin
            begin = end


class XlaFsdpFiles:
    """The files of all ranks as whole tensors: a `Checkpoint`.

    A tied weight is in them under its first name only, and stays so: they do not say which others
    it had.

    Args:
        files: One per rank.

    Attributes:
        files: As given, in the order of ranks.
        infos: Shape and dtype, by ``model.<name>``, a name being that of the model as it was.
        tied: Nothing.
        paths: Where each entry belongs in nested dicts.
        others: Keys of entries that are no tensors.
        owners: Which files hold a tensor, with the range of each; None: all of it.
        world_size: Ranks that wrote them.

    Raises:
        CheckpointError: A file is none of these, or files of ranks are missing or of other runs.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        opened = _in_order([TorchFile(file, MODEL) for file in files])
        first: dict[str, Any] = opened[0].beside[METADATA]
        self.files = [file.path for file in opened]
        self.world_size: int = first["world_size"]
        self.infos: dict[str, TensorInfo] = {}
        self.tied: dict[str, str] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        self.owners: dict[str, list[tuple[Path, list[int] | None]]] = {}
        self._places: dict[str, _ShardPlace] = {}
        self._others: dict[str, Any] = {}
        for name, value in opened[0].others.items():
            key = f"{MODEL}.{_plain(name)}"
            self.paths[key], self._others[key] = (MODEL, _plain(name)), value
        dtypes = {
            _plain(name): info["_orig_dtype"] for name, info in first.get("buffer_info", {}).items()
        }
        for name, info in opened[0].infos.items():
            prefix, found, suffix = _split(name)
            if not found:
                dtype = dtypes.get(_plain(name), info.dtype)
                self._add(name, TensorInfo(info.shape, dtype), _ShardPlace(name, 0, (opened[0],)))
                continue
            try:
                shard = first["shard_info"][prefix][suffix]
            except KeyError:
                msg = f"{opened[0].path} has a shard {name!r} that its metadata does not describe."
                raise CheckpointError(msg) from None
            self._add_shards(_join(prefix, shard["_orig_name"]), name, shard, opened)
        self.others = list(self._others)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `TensorSource.read`."""
        return read_new(self, name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorSource.read_into`; buffers were cast when the model was wrapped."""
        place, done = self._places[name], 0
        for file, low, high in place.overlaps(start, start + out.numel()):
            part = out[done : done + high - low]
            if file.infos[place.saved].dtype == out.dtype:
                file.read_into(place.saved, low, part)
            else:
                part.copy_(file.read(place.saved, low, high))
            done += high - low

    def read_other(self, key: str) -> Any:
        """Return an entry that is no tensor."""
        return self._others[key]

    def _add_shards(
        self, whole: str, saved: str, shard: dict[str, Any], opened: list[TorchFile]
    ) -> None:
        """Note of which shards a parameter consists, or those that lie in a flat one."""
        dtype = opened[0].infos[saved].dtype
        numel = 0
        for file in opened:
            if saved not in file.infos or file.infos[saved].dtype != dtype:
                msg = f"{file.path} has no {saved!r} of {dtype}, as {opened[0].path} has."
                raise CheckpointError(msg)
            numel += math.prod(file.infos[saved].shape)
        wanted = math.prod(shard["_orig_size"])
        if numel < wanted:
            msg = (
                f"the shards of {whole!r} in {opened[0].path} and others have {numel} elements "
                f"together, and the parameter has {wanted}: a file is not of this run."
            )
            raise CheckpointError(msg)
        if _FLAT not in whole:
            info = TensorInfo(tuple(shard["_orig_size"]), dtype)
            self._add(whole, info, _ShardPlace(saved, 0, tuple(opened)))
            return
        metadata: dict[str, Any] = opened[0].beside[METADATA]
        names, shapes, numels = metadata["flatten_info"][whole]
        module, start = whole.rpartition(".")[0], 0
        for name, shape, size in zip(names, shapes, numels, strict=True):
            place = _ShardPlace(saved, start, tuple(opened))
            self._add(_join(module, name), TensorInfo(tuple(shape), dtype), place)
            start += size

    def _add(self, name: str, info: TensorInfo, place: _ShardPlace) -> None:
        plain = _plain(name)
        key = f"{MODEL}.{plain}"
        if key in self.infos:
            msg = f"{self.files[0]} and others hold {plain!r} twice. Were modules wrapped twice?"
            raise CheckpointError(msg)
        self.infos[key], self.paths[key], self._places[key] = info, (MODEL, plain), place
        if len(place.files) == 1:
            self.owners[key] = [(place.files[0].path, None)]
            return
        done = 0
        owners: list[tuple[Path, list[int] | None]] = []
        for file, low, high in place.overlaps(0, math.prod(info.shape)):
            owners.append((file.path, [done, done + high - low]))
            done += high - low
        self.owners[key] = owners


def _in_order(opened: list[TorchFile]) -> list[TorchFile]:
    """Return the files by rank, if there is one of each."""
    by_rank: dict[int, TorchFile] = {}
    sizes = set()
    for file in opened:
        metadata = file.beside.get(METADATA)
        if not isinstance(metadata, dict) or "shard_info" not in metadata:
            msg = (
                f"{file.path} is not of torch_xla's FSDP, as {opened[0].path} is: it has no "
                f"{METADATA!r} of get_shard_metadata(). Keep the files of one save together."
            )
            raise CheckpointError(msg)
        other = by_rank.setdefault(metadata["rank"], file)
        if other is not file:
            msg = f"{file.path} and {other.path} are both of rank {metadata['rank']}. Remove one."
            raise CheckpointError(msg)
        sizes.add(metadata["world_size"])
    if len(sizes) > 1:
        msg = (
            f"{opened[0].path} and the other files were written by different numbers of ranks "
            f"({', '.join(map(str, sorted(sizes)))}). Keep the files of one save."
        )
        raise CheckpointError(msg)
    [world_size] = sizes
    check_complete(by_rank, world_size, opened[0].path)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _split(name: str) -> tuple[str, bool, str]:
    """Return the module of a shard, whether it is one, and its own name."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.startswith(_SHARD):
            return ".".join(parts[:index]), True, ".".join(parts[index:])
    return "", False, name


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _plain(name: str) -> str:
    """Return a name as it was before modules were wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
