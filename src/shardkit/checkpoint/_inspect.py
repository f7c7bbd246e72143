"""What is in a checkpoint, and whether it is undamaged."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import CheckpointError
from shardkit.checkpoint._consolidate import DEFAULT_SUFFIX, WholeFile, open_checkpoint
from shardkit.checkpoint._dcp.item_file import ItemFile
from shardkit.checkpoint._dcp.whole import DcpFiles
from shardkit.checkpoint._files.bytes_io import dtype_name, info_nbytes
from shardkit.checkpoint._files.local import LocalFiles
from shardkit.checkpoint._files.xla_fsdp import XlaFsdpFiles

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from shardkit.checkpoint._files.bytes_io import Checkpoint


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint.

    Attributes:
        name: Its key.
        shape: Of the whole.
        dtype: As torch names it.
        nbytes: Of the whole.
        chunks: Where its parts are: offsets and sizes, or a range of the flattened whole, by file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunks: list[dict[str, Any]]


@dataclass(frozen=True)
class Description:
    """A checkpoint.

    Attributes:
        kind: ``"checkpoint directory"``, ``"per-rank files"`` or ``"whole tensors"``.
        step: Training step that was saved with it, or None.
        world_size: Ranks that wrote it, or None where that is not recorded.
        verified: Whether checksums of its content were saved.
        entries: Its tensors, sorted by name.
        others: Names of entries that are no tensors.
        files: Sizes of the files in bytes, by name.
    """

    kind: str
    step: int | None
    world_size: int | None
    verified: bool
    entries: list[Entry]
    others: list[str]
    files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries)


def describe(source: str | os.PathLike[str], suffix: str = DEFAULT_SUFFIX) -> Description:
    """Describe a checkpoint directory, per-rank files by their prefix, or a file of whole tensors.

    No tensor is read.

    Raises:
        CheckpointError: There is none, or its description is damaged.
    """
    checkpoint = open_checkpoint(source, suffix)
    step, world_size, verified = None, None, False
    if isinstance(checkpoint, DcpFiles):
        kind = "checkpoint directory"
        files = [path for path in sorted(checkpoint.path.iterdir()) if path.is_file()]
        manifest = checkpoint.reader.manifest
        if manifest is not None:
            step, world_size = manifest.header.step, manifest.header.world_size
            verified = True
    elif isinstance(checkpoint, (LocalFiles, XlaFsdpFiles)):
        kind, files = "per-rank files", checkpoint.files
        world_size = checkpoint.world_size
    else:
        assert isinstance(checkpoint, WholeFile)
        kind, files = "whole tensors", sorted(set(checkpoint.parts.values()))
    entries = [
        Entry(
            name, info.shape, dtype_name(info.dtype), info_nbytes(info), _chunks(checkpoint, name)
        )
        for name, info in sorted(checkpoint.infos.items())
    ]
    sizes = {path.name: path.stat().st_size for path in files}
    return Description(kind, step, world_size, verified, entries, list(checkpoint.others), sizes)


def _chunks(checkpoint: Checkpoint, name: str) -> list[dict[str, Any]]:
    if isinstance(checkpoint, DcpFiles):
        return [
            {"file": file, "offsets": list(offsets), "sizes": list(sizes)}
            for offsets, sizes, file in checkpoint.chunks(name)
        ]
    if isinstance(checkpoint, (LocalFiles, XlaFsdpFiles)):
        return [{"file": path.name, "range": piece} for path, piece in checkpoint.owners[name]]
    assert isinstance(checkpoint, WholeFile)
    return [{"file": checkpoint.parts[name].name}]


def verify(source: str | os.PathLike[str], suffix: str = DEFAULT_SUFFIX) -> list[str]:
    """Read all of a checkpoint and return what is wrong with it; an empty list: nothing.

    Checksums are those of shardkit's manifest, and of the entries of files of torch.save.
    Checkpoint directories of others and safetensors files have none: there sizes are checked, and
    that everything can be read.

    Cost: every byte is read; memory for the largest chunk.
    """
    try:
        checkpoint = open_checkpoint(source, suffix)
    except CheckpointError as error:
        return [str(error)]
    if isinstance(checkpoint, DcpFiles):
        return list(_verify_directory(checkpoint))
    if isinstance(checkpoint, (LocalFiles, XlaFsdpFiles)):
        paths = checkpoint.files
    else:
        assert isinstance(checkpoint, WholeFile)
        paths = sorted(set(checkpoint.parts.values()))
    return [problem for path in paths for problem in _verify_file(path)]


def _verify_directory(checkpoint: DcpFiles) -> Iterator[str]:
    manifest = checkpoint.reader.manifest
    try:
        checkpoint.reader.check_files()
    except CheckpointError as error:
        yield str(error)
        return
    if manifest is not None:
        for name, stored in manifest.files.items():
            with ItemFile(checkpoint.path / name, manifest.block_nbytes) as file:
                for item in stored.items:
                    try:
                        file.read(item, f"item at byte {item.offset}")
                    except CheckpointError as error:
                        yield str(error)
    for name in checkpoint.infos if manifest is None else ():
        try:
            checkpoint.read(name, 0, torch.Size(checkpoint.infos[name].shape).numel())
        except CheckpointError as error:
            yield str(error)
    for name in checkpoint.others:
        try:
            checkpoint.read_other(name)
        except CheckpointError as error:
            yield str(error)


def _verify_file(path: Path) -> Iterator[str]:
    if not zipfile.is_zipfile(path):
        return  # Of safetensors: its size was compared with its header when it was opened.
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        yield f"{path}: the content of its entry {damaged} is not what was written."
