"""What is in a checkpoint, and whether it is undamaged."""

from __future__ import annotations

import contextlib
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._errors import CheckpointError
from shardkit._progress import Meter
from shardkit._text import listed
from shardkit.checkpoint._consolidate import DEFAULT_SUFFIX, open_checkpoint
from shardkit.checkpoint._dcp.directory import (
    DAMAGED_FILE,
    again_if_replaced,
    noted_damage,
)
from shardkit.checkpoint._dcp.item_file import ItemFile, Slice
from shardkit.checkpoint._dcp.manifest import MANIFEST_FILE
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._dcp.reader import DistributedCheckpoint
from shardkit.checkpoint._files.disk import (
    PART_NBYTES,
    dtype_name,
    info_nbytes,
    open_regular,
    reading,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.checkpoint._dcp.manifest import Manifest


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of a checkpoint."""

    name: str  # Key of it.
    shape: tuple[int, ...]  # Shape of the whole.
    dtype: str  # Dtype, as torch names it.
    nbytes: int  # Size of the whole.
    # Places of its parts: offsets and sizes, or a range of the flattened whole, by file.
    chunks: list[dict[str, Any]]


@dataclass(frozen=True)
class Description:
    """A checkpoint."""

    kind: str  # ``"checkpoint directory"``, ``"per-rank files"`` or ``"whole tensors"``.
    step: int | None  # Training step that was saved with it, or None.
    world_size: int | None  # Ranks that wrote it, or None where that is not recorded.
    has_checksums: bool  # Whether there are checksums of all of its content.
    entries: list[TensorSummary]  # Tensors of it, sorted by name.
    others: list[str]  # Names of entries that are no tensors.
    files: dict[str, int]  # Sizes of the files in bytes, by name.

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries)


def describe(source: str | os.PathLike[str], suffix: str = DEFAULT_SUFFIX) -> Description:
    """Describe a checkpoint directory, per-rank files by their prefix, or whole tensors."""
    with reading(source):
        return again_if_replaced(Path(source), lambda: _describe(source, suffix))


def _describe(source: str | os.PathLike[str], suffix: str) -> Description:
    checkpoint = open_checkpoint(source, suffix)
    step, world_size = None, checkpoint.world_size
    has_checksums = all(map(zipfile.is_zipfile, checkpoint.files))  # As torch.save writes them.
    if isinstance(checkpoint, DistributedCheckpoint):
        manifest = checkpoint.reader.manifest
        has_checksums = manifest is not None
        step = None if manifest is None else manifest.header.step
    entries = [
        TensorSummary(
            name, info.shape, dtype_name(info.dtype), info_nbytes(info), checkpoint.chunks(name)
        )
        for name, info in sorted(checkpoint.infos.items())
    ]
    sizes = {path.name: path.stat().st_size for path in checkpoint.files}
    others = list(checkpoint.others)
    return Description(checkpoint.kind, step, world_size, has_checksums, entries, others, sizes)


@dataclass
class Verification:
    """What `verify` found."""

    problems: list[str] = field(default_factory=list)  # Faults.
    # Parts that have no checksums, and what was compared in their place.
    unverified: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error as a problem, and go on."""
        try:
            yield
        except CheckpointError as error:
            self.problems.append(str(error))


def verify(source: str | os.PathLike[str], suffix: str = DEFAULT_SUFFIX) -> Verification:
    """Read all of a checkpoint, and compare it with its checksums.

    These are those of shardkit's manifest, and of the entries of files of torch.save, which
    checkpoint directories of others consist of. Where there are none, sizes are compared.

    Cost: every byte is read; memory for the largest chunk.
    """

    def find() -> Verification:
        found = Verification()
        with found.noting(), reading(source):
            _verify(source, suffix, found)
        return found

    return again_if_replaced(Path(source), find, lambda found: not found.problems)


def _verify(source: str | os.PathLike[str], suffix: str, found: Verification) -> None:
    checkpoint = open_checkpoint(source, suffix)
    if isinstance(checkpoint, DistributedCheckpoint):
        checkpoint.reader.check_files()
        if checkpoint.reader.manifest is not None:
            _verify_manifest(checkpoint, checkpoint.reader.manifest, found)
        else:
            _verify_archives(checkpoint, found)
        for name in checkpoint.others:
            with found.noting():
                checkpoint.read_other(name)
        return
    for path in checkpoint.files:
        _verify_file(path, found)


def _verify_manifest(
    checkpoint: DistributedCheckpoint, manifest: Manifest, found: Verification
) -> None:
    chunks = checkpoint.reader.chunks_by_place()
    with Meter(None, f"verifying {checkpoint.path.name}", rank=0) as meter:
        meter.expect(sum(stored.nbytes for stored in manifest.files.values()))
        for name, stored in manifest.files.items():
            with ItemFile(checkpoint.path / name, manifest.block_nbytes, meter.add) as file:
                for item in stored.items:
                    with found.noting():
                        file.read(item, f"item at byte {item.offset}")
                        if (name, item.offset) in chunks:
                            file.check(item, *chunks[name, item.offset])
    noted = noted_damage(checkpoint.path)
    if noted and not found.problems:
        found.problems.append(
            f"{checkpoint.path / DAMAGED_FILE} says that load() found damage: {noted} It is not "
            f"there any more. Delete this file, and latest() returns the checkpoint again."
        )


def _verify_archives(checkpoint: DistributedCheckpoint, found: Verification) -> None:
    """Compare the checksums in the archives that a checkpoint without a manifest consists of."""
    without = []
    for index, where in checkpoint.reader.storage_data.items():
        path = checkpoint.path / where.relative_path
        what = f"{path}: {index.fqn!r} at byte {where.offset}"
        try:
            with (
                os.fdopen(open_regular(path), "rb") as file,
                zipfile.ZipFile(Slice(file.fileno(), where.offset, where.length)) as archive,
            ):
                entries = archive.infolist()
                # shardkit leaves these out, for they are in the manifest.
                bare = [e for e in entries if e.file_size and not e.CRC]
                damaged = [
                    e.filename for e in entries if e not in bare and not _is_whole(archive, e)
                ]
        except zipfile.BadZipFile:
            found.problems.append(f"{what} is not what torch.save writes.")
            continue
        if damaged:
            found.problems.append(f"{what}: the content of {damaged[0]} is not what was written.")
        elif bare:
            without.append(index.fqn)
    for name in checkpoint.infos:
        if not found.problems:
            with found.noting():
                checkpoint.whole(name)
    lacking = f"{checkpoint.path} has no {MANIFEST_FILE} with checksums"
    if without:
        found.unverified.append(
            f"{lacking}: it was lost, or left behind when the checkpoint was copied. The values of "
            f"{len(without)} tensors or parts of them ({listed(without, str)}) are not "
            f"verified: only that they are there, in their sizes, and can be read."
        )
    else:
        found.unverified.append(
            f"{lacking}, as torch.distributed.checkpoint writes none. Values are verified by the "
            f"checksums of torch.save. Names and shapes in {METADATA_FILE} have none: they are not "
            f"verified."
        )


def _is_whole(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as content:
            while content.read(PART_NBYTES):  # What is compressed may be a thousand times as large.
                pass
    except zipfile.BadZipFile:
        return False
    return True


def _verify_file(path: Path, found: Verification) -> None:
    if not zipfile.is_zipfile(path):
        found.unverified.append(
            f"{path} has no checksums, as the format has none. Only its size was compared, with "
            f"what its header says: its values are not verified."
        )
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # noqa: BLE001 - whatever a damaged directory leads to
        found.problems.append(f"{path}: it cannot be read: {error!r}")
        return
    if damaged is not None:
        found.problems.append(
            f"{path}: the content of its entry {damaged} is not what was written."
        )
