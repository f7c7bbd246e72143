"""Directories of checkpoints: how one comes to stand under its name, which is the newest.

While it is written a checkpoint is called ``.<name>.incomplete``. Once all of it is on the disk
the directory is renamed, which happens whole or not at all, also in a crash::

    .<name>.incomplete   being written, or left by a run that was killed
    .<name>.replaced     what <name> was, from the moment it makes room to the end of its deletion
    .<name>.deleted      being deleted

A crash between the two renames of a replacement leaves nothing under the name. `recover` then
gives it the new checkpoint if that is complete, else the old one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp.manifest import (
    DAMAGED,
    MANIFEST_FILE,
    Header,
    Manifest,
    read_header,
    read_manifest,
)
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._files.bytes_io import fsync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

DAMAGED_FILE = "shardkit.damaged"
"""In a checkpoint that `load` found damaged: what it found."""

_INCOMPLETE, _REPLACED, _DELETED = ".incomplete", ".replaced", ".deleted"


def incomplete(path: Path) -> Path:
    """Return where a checkpoint is written."""
    return path.with_name(f".{path.name}{_INCOMPLETE}")


def replaced(path: Path) -> Path:
    """Return where a checkpoint waits that makes room for another."""
    return path.with_name(f".{path.name}{_REPLACED}")


def normalized(path: os.PathLike[str] | str) -> Path:
    """Return an absolute path with a name; symbolic links on the way are kept.

    Raises:
        CheckpointError: It has none, or one that is used while checkpoints are written.
    """
    if path is None:
        msg = (
            "expected the path of a checkpoint, not None, which latest() returns if there is no "
            "complete one: then begin anew."
        )
        raise CheckpointError(msg)
    result = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow links
    name = result.name
    if not name or (name.startswith(".") and name.endswith((_INCOMPLETE, _REPLACED, _DELETED))):
        msg = (
            f"{os.fspath(path)!r}: expected a path that ends with the checkpoint's name, such as "
            f"'checkpoints/step-1000', not with one that shardkit uses while it writes."
        )
        raise CheckpointError(msg)
    return result


def problem(path: Path) -> str:
    """Say what of a checkpoint is missing or damaged, as far as is known; empty if nothing.

    Known is what sizes tell, and what `load` has found.
    """
    noted = path / DAMAGED_FILE
    try:
        if noted.exists():
            return noted.read_text().strip()
        check_metadata(path, manifest := read_manifest(path))
        for name, stored in manifest.files.items():
            check_size(path / name, stored.nbytes)
    except FileNotFoundError as error:
        return f"{error.filename}: no such file"
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def note_damage(path: Path, found: str) -> None:
    """Have `latest` pass over a checkpoint from now on."""
    with contextlib.suppress(OSError):  # A disk that cannot be written.
        (path / DAMAGED_FILE).write_text(f"{found}\n")


def check_size(path: Path, nbytes: int) -> None:
    """Compare the size of a file with what was written.

    Raises:
        CheckpointError: It is missing, or of another size.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        msg = f"{path}: {error.strerror}. {DAMAGED}"
        raise CheckpointError(msg) from error
    if found != nbytes:
        kind = "truncated" if found < nbytes else "overwritten"
        msg = f"{path}: {kind}: expected {nbytes} bytes, found {found}. {DAMAGED}"
        raise CheckpointError(msg)


def check_metadata(path: Path, manifest: Manifest) -> bytes:
    """Return the content of `.metadata` if it is what was written.

    Raises:
        CheckpointError: It is missing or another.
    """
    file = path / METADATA_FILE
    check_size(file, manifest.metadata_nbytes)
    content = file.read_bytes()
    if zlib.crc32(content) != manifest.metadata_crc32:
        msg = f"{file}: its checksum is not that of its content. Load another checkpoint."
        raise CheckpointError(msg)
    return content


# --- order --------------------------------------------------------------------------------------


def headers(directory: Path) -> Iterator[tuple[Path, Header]]:
    """Yield what of a directory has a manifest, also under names that are used while writing."""
    for entry in sorted(directory.iterdir()):
        with contextlib.suppress(OSError, CheckpointError):
            yield entry, read_header(entry)


def next_sequence(directory: Path) -> int:
    """Return one more than the largest sequence in a directory."""
    return 1 + max((header.sequence for _, header in headers(directory)), default=0)


def complete_in(directory: Path) -> Iterator[Path]:
    """Yield the checkpoints of a directory that have valid headers, the newest first."""
    found = [
        (header.sequence, entry)
        for entry, header in headers(directory)
        if not (entry.name.startswith(".") and entry.suffix in {_INCOMPLETE, _REPLACED, _DELETED})
    ]
    for _, entry in sorted(found, reverse=True):
        yield entry


def latest(directory: os.PathLike[str] | str) -> Path | None:
    """Return the newest complete checkpoint in a directory, None if there is none.

    The newest is the one saved last, by the sequence in its manifest. What was being written when
    a run died is not complete. A checkpoint whose files have been damaged since (missing, of
    another size, a wrong checksum of a manifest) is passed over with a warning that says why.
    Checksums of tensors are compared by `load`. If one is wrong, `load` raises and leaves a file
    ``shardkit.damaged`` in the checkpoint, and `latest` passes over it from then on. If there are
    checkpoints of others only, which have no manifest, a warning says so.

    Args:
        directory: Holds checkpoints; need not exist.

    Raises:
        CheckpointError: It is a checkpoint itself: None would have a run begin anew.

    Cost: reads the first line of the manifest of each checkpoint, and all of the newest.
    """
    parent = Path(os.path.abspath(directory))  # noqa: PTH100 - links are kept
    if not parent.is_dir():
        return None
    if (parent / METADATA_FILE).exists():
        msg = f"{parent} is a checkpoint itself. Load it, or give the directory that holds it."
        raise CheckpointError(msg)
    _recover_all(parent)
    for path in complete_in(parent):
        found = problem(path)
        if not found:
            return path
        warnings.warn(f"checkpoint {path} is passed over: {found}", stacklevel=2)
    foreign = sorted(file.parent.name for file in parent.glob(f"[!.]*/{METADATA_FILE}"))
    if foreign:
        msg = (
            f"no checkpoint of {parent} has a manifest, which says how new it is. load() reads "
            f"those of torch.distributed.checkpoint too, by their path: {', '.join(foreign[-3:])}."
        )
        warnings.warn(msg, stacklevel=2)
    return None


# --- changes ------------------------------------------------------------------------------------


def recover(path: Path) -> None:
    """Finish or undo a replacement that a crash cut; any number of processes may call it."""
    new, old = incomplete(path), replaced(path)
    if path.exists() or not old.exists():
        return
    source = new if not problem(new) else old
    if (source / METADATA_FILE).exists():
        with contextlib.suppress(FileNotFoundError):  # Another process was faster.
            source.rename(path)
        fsync_directory(path.parent)


def _recover_all(directory: Path) -> None:
    """Finish or undo what a crash cut in a directory: what stands aside may be the only copy."""
    for entry in directory.glob(f".*{_REPLACED}"):
        recover(directory / entry.name.removeprefix(".").removesuffix(_REPLACED))


def prepare(path: Path, *, overwrite: bool) -> Path:
    """Make the directory in which a checkpoint is written; of a dead run's nothing is left.

    Raises:
        CheckpointError: There is something under the name, and it may not be replaced.
        OSError: It cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    check_free(path, overwrite=overwrite)
    new = incomplete(path)
    remove(new)
    new.mkdir()
    return new


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise if a checkpoint may not be given this name.

    Raises:
        CheckpointError: There is something under it, and either `overwrite` was not asked for or it
            is no checkpoint. A damaged checkpoint may be replaced: a run that goes on from an older
            one comes by it again.
    """
    if not os.path.lexists(path):
        return
    if not overwrite and not (manifest_path(path).exists() and problem(path)):
        msg = (
            f"{path} exists. Give each checkpoint a name of its own, such as 'step-1000', or "
            f"replace it by overwrite=True."
        )
        raise CheckpointError(msg)
    if not path.is_dir() or (any(path.iterdir()) and not (path / METADATA_FILE).exists()):
        msg = f"{path} exists and is no checkpoint: it is not replaced. Choose another name."
        raise CheckpointError(msg)


def commit(path: Path) -> None:
    """Give a complete checkpoint its name. What had it before is removed.

    Raises:
        OSError: It cannot be renamed; what was there before is there again.
    """
    new, old = incomplete(path), replaced(path)
    fsync_directory(new)
    if not os.path.lexists(path):
        new.rename(path)
    else:
        remove(old)
        path.rename(old)
        try:
            new.rename(path)
        except FileNotFoundError:
            if not path.exists():  # Else a process that called `latest` now has finished this.
                raise
        except OSError:
            old.rename(path)
            raise
    fsync_directory(path.parent)
    with _warning(old):
        remove(old)


def prune(path: Path, keep_last: int) -> None:
    """Delete what is beside a new checkpoint: older ones but the newest, and leftovers.

    Args:
        path: The checkpoint just written.
        keep_last: How many complete checkpoints stay.
    """
    _recover_all(path.parent)
    kept = {path}
    for other in complete_in(path.parent):
        if other.is_symlink():  # Somebody's other name for one of these.
            continue
        if other in kept or len(kept) < keep_last:
            kept.add(other)
            continue
        doomed = other.with_name(f".{other.name}{_DELETED}")
        with _warning(other):
            remove(doomed)
            other.rename(doomed)  # Half of it would look like a damaged one.
    for leftover in path.parent.glob(".*"):
        if leftover.suffix in {_INCOMPLETE, _REPLACED, _DELETED} and leftover.is_dir():
            with _warning(leftover):
                remove(leftover)


@contextlib.contextmanager
def _warning(path: Path) -> Iterator[None]:
    """Turn an error about what is no longer needed into a warning: the new checkpoint is there."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path} could not be deleted: {error}", stacklevel=4)


def remove(path: Path) -> None:
    """Delete a directory and all that is in it, or a link to one, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and have it on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def manifest_path(path: Path) -> Path:
    """Return where the manifest of a checkpoint is."""
    return path / MANIFEST_FILE
