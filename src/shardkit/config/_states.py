"""Training state in the three shapes that fsdp_state_dict_type names.

Files of LOCAL and FULL state dicts take the place of those of the save before. Each is written
beside its name first, as ``.<name>.written``. Once the files of all ranks are on the disk, they get
their names. A run that is killed meanwhile leaves files of two saves, but those of one are all
there, under one name or the other: `_of_one_save` finds them.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardkit._errors import CheckpointError
from shardkit.backends.groups import exchange
from shardkit.backends.world import group_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

T = TypeVar("T")

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"  # Accelerate's names of files
_SAVED_WITH = "model_crc32"
"""In the optimizer's file: which model's file belongs to it."""


def save(
    kind: str, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None
) -> None:
    """See `Config.save`."""
    from shardkit import checkpoint

    folder = Path(path)
    if kind == "SHARDED_STATE_DICT":
        checkpoint.save(folder, model, optimizer)
        return
    _on_all("make", folder, lambda: folder.mkdir(parents=True, exist_ok=True))
    if kind == "LOCAL_STATE_DICT":
        mine = [_local_file(folder, checkpoint.get_shard_metadata(model))]
        _finish_last(mine)
        state = checkpoint.local_state_dict(model, optimizer)
        _on_all("write", mine[0], lambda: _write(mine[0], state))
    else:
        files = _full_files(folder, optimizer)
        mine = files if group_rank(None) == 0 else []
        _finish_last(mine)
        checkpoint.save_full(_aside(files[0]), model)
        if optimizer is not None:
            whole = checkpoint.gather_optimizer_state(model, optimizer)
            _on_all("write", files[1], lambda: _write_optimizer(mine, whole))
    _on_all("complete", folder, lambda: _name_all(mine))


def load(
    kind: str, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None
) -> None:
    """See `Config.load`."""
    from shardkit import checkpoint

    folder = Path(path)
    if kind == "SHARDED_STATE_DICT":
        checkpoint.load(folder, model, optimizer)
    elif kind == "LOCAL_STATE_DICT":
        file = _local_file(folder, checkpoint.get_shard_metadata(model))
        (found,) = _of_one_save([file])
        state = _on_all("read", file, lambda: _read(found))
        _on_all("load", file, lambda: checkpoint.load_local_state_dict(model, state, optimizer))
    else:
        of_model, *of_optimizer = _of_one_save(_full_files(folder, optimizer))
        checkpoint.load_full(of_model, model)
        if optimizer is not None:
            whole = _on_all("read", of_optimizer[0], lambda: _read(of_optimizer[0]))
            checkpoint.scatter_optimizer_state(whole, model, optimizer, from_rank0=False)


def _local_file(folder: Path, described: dict[str, Any]) -> Path:
    rank, ranks = described["rank"], described["world_size"]
    return folder / f"{_MODEL}_rank-{rank:08d}-of-{ranks:08d}.pth"


def _full_files(folder: Path, optimizer: Optimizer | None) -> list[Path]:
    names = [_MODEL] if optimizer is None else [_MODEL, _OPTIMIZER]
    return [folder / f"{name}.bin" for name in names]


# --- which files belong together ------------------------------------------------------------------


def _of_one_save(files: list[Path]) -> list[Path]:
    """Return where files of the same save are: of the newest that all ranks have.

    Args:
        files: Files that this rank reads.

    Raises:
        CheckpointError: On all ranks: some are not there, or no save has all of them.
    """
    found = _on_all("read", files[0], lambda: [_saves(file) for file in files])
    chosen, of_ranks = _common(files, found)
    if chosen is not None:
        return chosen
    saves: dict[object, str] = {}
    for file, numbers in of_ranks:
        saves.setdefault(numbers[0], file)
    first, second = list(saves.items())[:2]
    msg = (
        f"{files[0].parent} holds files of different saves, which do not fit together: {first[1]} "
        f"is of save {first[0]}, {second[1]} of save {second[0]}. Nothing was loaded. Put all "
        f"files of one save there; whole tensors of a model load without an optimizer."
    )
    raise CheckpointError(msg)


def _finish_last(mine: list[Path]) -> None:
    """Give the files of the last save their names, if it was killed while it did so.

    Args:
        mine: Files that this rank is about to write.
    """
    found = [_saves_if_whole(file) for file in mine]
    chosen, _ = _common(mine, found)
    for file, whole in zip(mine, chosen or (), strict=False):
        if whole == file:
            _aside(file).unlink(missing_ok=True)
        else:
            whole.replace(file)


def _common(
    files: list[Path], found: list[dict[object, Path]]
) -> tuple[list[Path] | None, list[tuple[str, list[object]]]]:
    """Return this rank's files of the newest save that has all files of all ranks, or None.

    Args:
        files: Files of this rank.
        found: Places of each file by save, the newest first.

    Returns:
        Also: names of all ranks' files, with the saves that each is there of.
    """
    mine = [(file.name, list(saves)) for file, saves in zip(files, found, strict=True)]
    every = [entry for of_rank in exchange(mine, None, "a checkpoint") for entry in of_rank]
    # None: optimizer.bin of Accelerate does not say which save it is of.
    for save in dict.fromkeys(save for _, saves in every for save in saves):
        if all(save in saves or None in saves for _, saves in every):
            return [saves[save] if save in saves else saves[None] for saves in found], every
    return None, every


def _saves(file: Path) -> dict[object, Path]:
    """Return by the number of a save where its file of this name is; the newest save first.

    Raises:
        CheckpointError: There is none.
    """
    found = {_number(path): path for path in (_aside(file), file) if path.exists()}
    if not found:
        msg = f"{file} is not there: it is what Config.save writes with this fsdp_state_dict_type."
        raise CheckpointError(msg)
    return found


def _saves_if_whole(file: Path) -> dict[object, Path]:
    """Return the same of what is about to be written over, damaged or not."""
    try:
        return _saves(file)
    except Exception:  # noqa: BLE001 - what cannot be read is of no save
        return {}


def _number(file: Path) -> object:
    """Return what files of one save share, None if the file does not say."""
    if f"{_MODEL}.bin" in file.name:
        return _crc32(file)
    state = _read(file)
    return state.get(_SAVED_WITH, state.get("shard_metadata", {}).get("save"))


def _crc32(file: Path) -> int | None:
    """Return a checksum of all tensors in a file of torch.save; they are not read for it."""
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        entries = [(e.CRC, e.file_size) for e in archive.infolist() if "/data/" in e.filename]
    return zlib.crc32(repr(sorted(entries)).encode())


# --- files ----------------------------------------------------------------------------------------


def _aside(file: Path) -> Path:
    return file.with_name(f".{file.name}.written")


def _write(file: Path, state: dict[str, Any]) -> None:
    """Write a file beside its name: there it is on the disk, whole, or not at all."""
    from shardkit.checkpoint._files.bytes_io import fsync_directory

    part = file.with_name(f".{file.name}.incomplete")
    with part.open("wb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())
    part.replace(_aside(file))
    fsync_directory(file.parent)


def _write_optimizer(files: list[Path], whole: dict[str, Any]) -> None:
    for file in files[1:]:
        _write(file, {**whole, _SAVED_WITH: _crc32(_aside(files[0]))})


def _name_all(files: list[Path]) -> None:
    from shardkit.checkpoint._files.bytes_io import fsync_directory

    for file in files:
        _aside(file).replace(file)
    for file in files[:1]:
        fsync_directory(file.parent)


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _on_all(what: str, path: Path, act: Callable[[], T]) -> T:
    """Do it on each rank; raise on all of them if it fails on one."""
    from shardkit.checkpoint._agreement import agreed

    return agreed(None, f"could not {what} {path}", act)
