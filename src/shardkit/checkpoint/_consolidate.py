"""Checkpoints without the ranks that wrote them: consolidated, described and verified."""

from __future__ import annotations

import contextlib
import glob
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import CheckpointError
from shardkit._progress import Meter
from shardkit._settings import refuse_texts
from shardkit._text import dtype_name, listed
from shardkit.checkpoint._dcp.directory import (
    DAMAGED_FILE,
    again_if_replaced,
    complete_in,
    noted_damage,
)
from shardkit.checkpoint._dcp.manifest import MANIFEST_FILE, Manifest
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._dcp.reader import DistributedCheckpoint, ItemFile, Slice
from shardkit.checkpoint._files.disk import (
    PART_NBYTES,
    Keys,
    Source,
    check_saved_dtype,
    converted,
    join_keys,
    nested,
    open_regular,
    reading,
    refuse_url,
)
from shardkit.checkpoint._files.formats import Format, FullFile, FullWriter
from shardkit.checkpoint._local import RankFiles, open_rank_files

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from torch import Tensor

    from shardkit._progress import Progress


# --- whole files, in one process, tensor after tensor ---------------------------------------------


DEFAULT_SUFFIX = "_rank-*-of-*.pth"
"""Pattern of what follows the common prefix in the names of per-rank files."""

_OPTIMIZERS = ("optim", "optimizer")


def consolidate(  # noqa: PLR0913 - the checkpoint, and the file to write
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: Format = "torch",  # noqa: A002 - the word for it
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
    optimizer: bool = False,
    model_key: str | None = None,
    suffix: str = DEFAULT_SUFFIX,
    progress: Progress = None,
) -> Path:
    """Write a checkpoint of any number of ranks as whole tensors, without process group or GPU.

    Args:
        source: A checkpoint directory (of shardkit, FSDP2 or another user of
            torch.distributed.checkpoint); or the common prefix of per-rank files, of
            `local_state_dict` or of torch_xla's FSDP (``{"model": model.state_dict(),
            "shard_metadata": model.get_shard_metadata()}``; torch_xla need not be installed); or a
            file of whole tensors to convert.
        out: A file; or a directory, see `FullWriter`.
        format: ``"torch"`` or ``"safetensors"``.
        max_shard_size: Size of a file at most, e.g. ``"5GB"``; then `out` is a directory.
        dtype: Dtype of floating-point tensors of the model in the file; None: their own.
        optimizer: Whether to write ``{"model": ..., "optim": ...}``, with the optimizer's state by
            parameter names. Default: the model's state dict alone.
        model_key: Place of the model in a checkpoint directory, e.g. ``"app.model"``; None: the key
            ``model`` if there is one, otherwise the whole checkpoint.
        suffix: Pattern of what follows the prefix in the names of per-rank files.
        progress: Way to show progress: by default a bar on the terminal, if it takes longer than a
            second and rich is installed; False: none; or a function of the bytes done and of all
            bytes.

    Returns:
        `out`.

    Raises:
        CheckpointError: The checkpoint is damaged, incomplete (the error names the missing ranks'
            files), mixed or foreign, or `out` cannot hold it.

    Cost: each byte is read and written once. Memory: the largest tensor, and one saved chunk of it
    where that is no contiguous range of the tensor; 16 MiB for per-rank files.
    """
    check_saved_dtype(dtype)
    refuse_texts(CheckpointError, optimizer=optimizer)
    checkpoint = open_checkpoint(source, suffix)
    keys, of_model, put_together = _plan(
        checkpoint, source, model_key=model_key, optimizer=optimizer
    )
    names = {name: key for name, key in keys.items() if key in checkpoint.infos}
    if optimizer and (format != "torch" or max_shard_size is not None):
        msg = "an optimizer's state fits one torch file only: leave out the other options."
        raise CheckpointError(msg)
    infos = {
        name: converted(checkpoint.infos[key], dtype if key in of_model else None)
        for name, key in names.items()
    }
    by_key = {key: name for name, key in reversed(names.items())}
    tied = {
        name: by_key[checkpoint.tied[key]]
        for name, key in names.items()
        if checkpoint.tied.get(key) in by_key
    }
    others = {name: checkpoint.read_other(key) for name, key in keys.items() if name not in names}
    kept = [name for name in names if name not in tied]
    with (
        Meter(progress, f"consolidating {Path(source).name}", rank=0) as meter,
        FullWriter(
            out,
            infos,
            format=format,
            max_shard_size=max_shard_size,
            tied=tied,
            others=others,
            arrange=put_together,
        ) as writer,
    ):
        meter.expect(sum(infos[name].nbytes for name in kept))
        for key, part in _parts(checkpoint, [names[name] for name in kept]):
            name = by_key[key]
            saved = part.to(infos[name].dtype)
            writer.append(name, saved)
            meter.add(saved.nbytes)
    return Path(out)


def open_checkpoint(
    source: str | os.PathLike[str], suffix: str = DEFAULT_SUFFIX
) -> DistributedCheckpoint | RankFiles | FullFile:
    """Open the checkpoint under a path or prefix, whatever its kind."""
    refuse_url(source)
    with reading(source):
        path = Path(source)
        if (path / METADATA_FILE).exists():
            return DistributedCheckpoint(path)
        # The pattern is matched as text, since a prefix is no directory.
        names = glob.glob(glob.escape(str(source)) + suffix)  # noqa: PTH207
        if names:
            return open_rank_files([Path(name) for name in sorted(names)])
        if path.is_dir() and (any(path.glob("*.distcp")) or not any(path.iterdir())):
            return DistributedCheckpoint(path)  # It raises, and says what is missing.
        if not path.exists():
            msg = (
                f"there is nothing at {path}, and there are no per-rank files {path}{suffix}. Give "
                f"a checkpoint directory, a file, or the prefix and suffix of per-rank files."
            )
            raise CheckpointError(msg)
        inside = complete_in(path) if path.is_dir() else []
        inside += sorted({file.parent for file in path.glob(f"[!.]*/{METADATA_FILE}")} - {*inside})
        if inside:
            named = listed((entry.name for entry in inside), str)
            msg = (
                f"{path} is no checkpoint, but the directory of {len(inside)}, the newest first: "
                f"{named}. Give one of them: {inside[0]}"
            )
            raise CheckpointError(msg)
        return FullFile(path)


def _parts(checkpoint: Source, keys: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield keys and parts of flattened tensors, in order; the next part overwrites the last one.

    Tensors in a checkpoint directory are read as a whole, since their chunks may be any boxes.
    """
    largest = max((checkpoint.infos[key].nbytes for key in keys), default=0)
    is_whole = isinstance(checkpoint, DistributedCheckpoint)
    nbytes = largest if is_whole else min(largest, PART_NBYTES)
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    for key in keys:
        info = checkpoint.infos[key]
        numel, room_numel = info.numel, memory.numel() // info.dtype.itemsize
        room = memory[: room_numel * info.dtype.itemsize].view(info.dtype)
        for start in range(0, numel, max(room_numel, 1)):
            read = room[: min(room_numel, numel - start)]
            with reading(f"{key!r} of the checkpoint"):
                checkpoint.read_into(key, start, read)
            for part in read.split(PART_NBYTES // info.dtype.itemsize):
                yield key, part


# --- which entries --------------------------------------------------------------------------------


def _plan(
    checkpoint: Source, source: object, *, model_key: str | None, optimizer: bool
) -> tuple[dict[str, str], Container[str], Callable[[dict[str, Any]], Any]]:
    """Return how to make a file of a checkpoint.

    Returns:
        Keys in the checkpoint, by names in the file; the keys of the model among them; function
        that makes the content of the file.
    """
    root = _model_root(checkpoint, source, model_key)
    paths = checkpoint.paths.items()
    # Below a name there are further keys where DCP has taken extra state apart.
    inside = {key: path[len(root) :] for key, path in paths if path[: len(root)] == root}
    if optimizer:
        optim = next(
            (
                (*root[:-1], name)
                for name in _OPTIMIZERS
                if root and any(path[: len(root)] == (*root[:-1], name) for _, path in paths)
            ),
            None,
        )
        if optim is None:
            found = "is a file, of which the model is read only"
            if not isinstance(checkpoint, FullFile):
                found = "has no optimizer's state beside the model"
            msg = f"{source} {found}. Leave out the optimizer."
            raise CheckpointError(msg)
        places = {key: ("model", *path) for key, path in inside.items()}
        places |= {
            key: ("optim", *path[len(optim) :])
            for key, path in paths
            if key not in inside and path[: len(optim)] == optim
        }
        keys = {key: key for key, _ in paths if key in places}
    else:
        places = inside
        keys = {join_keys(path): key for key, path in inside.items()}

    def put_together(entries: dict[str, Any]) -> Any:
        content: Any = nested({places[keys[name]]: value for name, value in entries.items()})
        if optimizer and "param_groups" in content["optim"]:  # State that is empty has no entry.
            content["optim"] = {"state": {}, **content["optim"]}
        return content

    return keys, inside, put_together


def _model_root(checkpoint: Source, source: object, model_key: str | None) -> Keys:
    """Return where in a checkpoint the model's state dict is."""
    parents = list(dict.fromkeys(path[:-1] for path in checkpoint.paths.values()))
    shown = listed(sorted({join_keys(parent[:2]) or "(top)" for parent in parents}), str)
    if model_key is not None:
        root = next((each for each in parents if join_keys(each) == model_key), None)
        if root is None:
            msg = f"{source} has no state dict under {model_key!r}; it has {shown}."
            raise CheckpointError(msg)
        return root
    found = [parent for parent in parents if parent and parent[-1] == "model"]
    # Not what is called so inside of a model, or in the state of its optimizer.
    heads = [(*root[:-1], name) for root in found for name in ("model", *_OPTIMIZERS)]
    found = [p for p in found if not any(p[: len(head)] == head != p for head in heads)]
    if len(found) > 1:
        names = listed(found, join_keys)
        msg = f"{source} has several models ({names}). Choose one by model_key."
        raise CheckpointError(msg)
    if found:
        return found[0]
    if parents == [()]:
        return ()
    msg = f"{source} has no state dict under a key 'model', but {shown}. Choose by model_key."
    raise CheckpointError(msg)


# --- what is in a checkpoint, and whether it is undamaged -----------------------------------------


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of a checkpoint."""

    name: str  # Key of the tensor.
    shape: tuple[int, ...]  # Shape of the whole tensor.
    dtype: str  # Dtype, as torch names it.
    nbytes: int  # Size of the whole tensor.
    # Places of its parts by file: offsets and sizes, or a range of the flattened tensor.
    chunks: list[dict[str, Any]]


@dataclass(frozen=True)
class Description:
    """A checkpoint."""

    kind: str  # ``"checkpoint directory"``, ``"per-rank files"`` or ``"whole tensors"``.
    step: int | None  # Training step that was saved with it, or None.
    world_size: int | None  # Ranks that wrote it, or None where that is not recorded.
    has_checksums: bool  # Whether checksums cover all of its content.
    entries: list[TensorSummary]  # Tensors in it, sorted by name.
    others: list[str]  # Names of entries that are no tensors.
    files: dict[str, int]  # Sizes of the files in bytes, by name.

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
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
            name, info.shape, dtype_name(info.dtype), info.nbytes, checkpoint.chunks(name)
        )
        for name, info in sorted(checkpoint.infos.items())
    ]
    sizes = {path.name: path.stat().st_size for path in checkpoint.files}
    others = list(checkpoint.others)
    return Description(checkpoint.kind, step, world_size, has_checksums, entries, others, sizes)


@dataclass
class Verification:
    """What `verify` found."""

    problems: list[str] = field(default_factory=list)  # Problems that were found.
    # Parts without checksums, and what was compared in their place.
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

    These are the checksums of shardkit's manifest, and those in the files of torch.save, of which
    other checkpoint directories consist. Where there are none, sizes are compared.

    Cost: every byte is read; memory for the largest chunk.
    """

    def find() -> Verification:
        found = Verification()
        with found.noting(), reading(source):
            checkpoint = open_checkpoint(source, suffix)
            if not isinstance(checkpoint, DistributedCheckpoint):
                for path in checkpoint.files:
                    _verify_file(path, found)
                return found
            checkpoint.reader.check_files()
            if checkpoint.reader.manifest is not None:
                _verify_manifest(checkpoint, checkpoint.reader.manifest, found)
            else:
                _verify_archives(checkpoint, found)
            for name in checkpoint.others:
                with found.noting():
                    checkpoint.read_other(name)
        return found

    return again_if_replaced(Path(source), find, lambda found: not found.problems)


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
                # shardkit leaves these checksums out, since they are in the manifest.
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
            while content.read(PART_NBYTES):  # Compressed content may be 1000 times as large.
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
