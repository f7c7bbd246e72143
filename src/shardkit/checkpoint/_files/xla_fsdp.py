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
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.bytes_io import TensorInfo
from shardkit.checkpoint._files.local import METADATA, MODEL, Piece, RankFiles, check_complete
from shardkit.checkpoint._files.torch_zip import TorchFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")


def is_of_xla_fsdp(file: Path) -> bool:
    """Return whether a per-rank file is one of torch_xla's FSDP."""
    metadata = TorchFile(file, MODEL).beside.get(METADATA)
    return isinstance(metadata, dict) and "shard_info" in metadata


class XlaFsdpFiles(RankFiles):
    """The files of all ranks; names are ``model.<name>``, as in the model as it was.

    A tied weight is in them under its first name only, and stays so: they do not say which others
    it had.

    Args:
        files: One per rank.

    Raises:
        CheckpointError: A file is none of these, or files of ranks are missing or of other runs.
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
            prefix, found, suffix = _split(name)
            if not found:
                dtype = dtypes.get(_plain(name), info.dtype)
                self._add(name, TensorInfo(info.shape, dtype), opened[:1], name)
                continue
            try:
                shard = first["shard_info"][prefix][suffix]
            except KeyError:
                msg = f"{opened[0].path} has a shard {name!r} that its metadata does not describe."
                raise CheckpointError(msg) from None
            self._add_shards(_join(prefix, shard["_orig_name"]), name, shard, opened)

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
            self._add(whole, info, opened, saved)
            return
        metadata: dict[str, Any] = opened[0].beside[METADATA]
        names, shapes, numels = metadata["flatten_info"][whole]
        module, start = whole.rpartition(".")[0], 0
        for name, shape, size in zip(names, shapes, numels, strict=True):
            info = TensorInfo(tuple(shape), dtype)
            self._add(_join(module, name), info, opened, saved, start)
            start += size

    def _add(
        self, name: str, info: TensorInfo, files: list[TorchFile], saved: str, start: int = 0
    ) -> None:
        """Note of which pieces a tensor consists.

        Args:
            name: Name in the model.
            info: Shape and dtype of it.
            files: Files that hold it: the first one alone if it is no shard.
            saved: Name in each file.
            start: Offset of its first element in what the files hold, end to end.
        """
        plain = _plain(name)
        key = f"{MODEL}.{plain}"
        if key in self.infos:
            msg = f"{self.files[0]} and others hold {plain!r} twice. Were modules wrapped twice?"
            raise CheckpointError(msg)
        self.infos[key], self.paths[key], self._pieces[key] = info, (MODEL, plain), []
        begin = -start
        for file in files:
            end = begin + math.prod(file.infos[saved].shape)
            low, high = max(begin, 0), min(end, math.prod(info.shape))
            if low < high:
                self._pieces[key].append(Piece(low, high, file, saved, low - begin))
            begin = end
        self.owners[key] = (
            [(files[0].path, None)]
            if len(files) == 1
            else [(piece.file.path, [piece.start, piece.stop]) for piece in self._pieces[key]]
        )


def _in_order(opened: list[TorchFile]) -> list[TorchFile]:
    """Return the files by rank, if there is one of each."""
    described = []
    for file in opened:
        metadata = file.beside.get(METADATA)
        if not isinstance(metadata, dict) or "shard_info" not in metadata:
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
    check_complete([file.path for file in opened], ranks, world_size)
    return [file for _, file in sorted(zip(ranks, opened, strict=True), key=itemgetter(0))]


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
