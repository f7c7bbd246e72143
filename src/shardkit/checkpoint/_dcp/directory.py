"""Directories of checkpoints: how one comes to stand under its name, which is the newest.

A checkpoint is written under a name of its own, beside the one that it gets (`_files.disk`).
Once all of it is on the disk the two are exchanged, which happens whole or not at all, also in a
crash and beside other jobs. Then what had the name before is deleted::

    .<name>.<owner>.incomplete   being written, or left by a job that was killed
    .<name>.<owner>.replaced     what <name> was, from the moment it makes room until it is obsolete
    .<name>.<owner>.deleted      being deleted

NFS and some other file systems cannot exchange. There the old checkpoint is renamed before the new
one is, and for a moment nothing has the name. `recover` then gives it the newest that is complete;
also after a crash. A rename to a name that has a checkpoint fails on every file system, so of jobs
that do this at once each one knows what became of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp.manifest import (
    MANIFEST_FILE,
    Header,
    Manifest,
    read_header,
    read_manifest,
)
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._files.disk import (
    DAMAGED,
    DELETED,
    INCOMPLETE,
    REPLACED,
    Aside,
    asides_in,
    fsync_directory,
    new_aside,
    own,
    parse_aside,
    read_index,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DAMAGED_FILE = "shardkit.damaged"
"""In a checkpoint that `load` found damaged: what it found."""

_NOTE_NBYTES = 1 << 20

T = TypeVar("T")

READ_AGAIN = 50
"""A checkpoint is read so many times at most, if other jobs replace it all the time."""

_SWITCHES = 1000  # Are tried, if other jobs are faster each time.

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT}
"""What renaming says if another job was faster: the name is taken, or what had it is not there."""

_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM}

_ONE_EACH = "Give each job a path of its own, or end the one before."


def normalized(path: os.PathLike[str] | str) -> Path:
    """Return an absolute path with a name; symbolic links on the way are kept."""
    if path is None:
        msg = (
            "expected the path of a checkpoint, not None, which latest() returns if there is no "
            "complete one: then begin anew."
        )
        raise CheckpointError(msg)
    try:
        result = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow links
        is_name = b"\0" not in os.fsencode(result)
    except (TypeError, ValueError):
        is_name = False
    if not is_name:
        msg = f"path: expected that of a checkpoint, such as 'checkpoints/step-1000', not {path!r}."
        raise CheckpointError(msg)
    if not result.name or parse_aside(result) is not None:
        msg = (
            f"{os.fspath(path)!r}: expected a path that ends with the checkpoint's name, such as "
            f"'checkpoints/step-1000', not with one that shardkit uses while it writes."
        )
        raise CheckpointError(msg)
    return result


Stamp = tuple[int, ...] | None
"""Tells one checkpoint from another of the same name; None: there is none."""


def stamp(path: Path) -> Stamp:
    """Return what tells the checkpoint that has a name from others that may get it."""
    try:
        return _stamp_of((path / METADATA_FILE).stat())
    except (OSError, ValueError):  # ValueError: no file can have this name.
        return None


def _stamp_of(found: os.stat_result) -> Stamp:
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def again_if_replaced(
    path: Path, read: Callable[[], T], is_right: Callable[[T], bool] = lambda _: True
) -> T:
    """Read a checkpoint; once more if it failed, or is not right, since another job replaced it."""
    for _ in range(READ_AGAIN):
        before = stamp(path)
        try:
            found = read()
        except CheckpointError:
            if stamp(path) == before:
                raise
        else:
            if is_right(found) or stamp(path) == before:
                return found
    return read()


def problem(path: Path) -> str:
    """Say what of a checkpoint is missing or damaged, by sizes and what `load` has found; or ''."""
    try:
        again_if_replaced(path, lambda: _check(path))
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def _check(path: Path) -> None:
    noted = noted_damage(path)
    if noted:
        raise CheckpointError(noted)
    try:
        check_metadata(path, manifest := read_manifest(path))
    except FileNotFoundError as error:
        msg = f"{error.filename}: no such file"
        raise CheckpointError(msg) from error
    for name, stored in manifest.files.items():
        check_size(path / name, stored.nbytes)


def noted_damage(path: Path) -> str:
    """Return what `load` has found damaged in a checkpoint; empty if nothing is noted."""
    try:
        noted = read_index(path / DAMAGED_FILE, _NOTE_NBYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return noted or f"{path}: something of it is damaged."  # Empty where the disk was full.


def note_damage(path: Path, found: str, which: Stamp) -> bool:
    """Have `latest` pass over a checkpoint from now on, unless another one has its name by now."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _stamp_of(os.stat(METADATA_FILE, dir_fd=folder)) != which:
            return False
        # Whatever else has this name: a link could lead to any file of the user's.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW
        with os.fdopen(os.open(DAMAGED_FILE, flags, 0o666, dir_fd=folder), "w") as file:
            file.write(f"{found}\n")
    except OSError:  # A disk that cannot be written.
        return True
    finally:
        os.close(folder)
    return True


def check_size(path: Path, nbytes: int) -> None:
    """Raise unless a file has the size that was written."""
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
    """Return the content of `.metadata`; raise if it is not what was written."""
    file = path / METADATA_FILE
    check_size(file, manifest.metadata_nbytes)
    content = read_index(file)
    if zlib.crc32(content) != manifest.metadata_crc32:
        msg = f"{file}: its checksum is not that of its content. Load another checkpoint."
        raise CheckpointError(msg)
    return content


# --- order --------------------------------------------------------------------------------------


def headers(
    directory: Path, unreadable: Callable[[Path, CheckpointError], None] | None = None
) -> Iterator[tuple[Path, Header]]:
    """Yield what of a directory has a manifest, also under names that are used while writing."""
    for entry in sorted(directory.iterdir()):
        try:
            yield entry, read_header(entry)
        except OSError:
            continue
        except CheckpointError as error:
            if unreadable is not None:
                unreadable(entry, error)


def next_sequence(directory: Path) -> int:
    """Return one more than the largest sequence in a directory."""
    return 1 + max((header.sequence for _, header in headers(directory)), default=0)


def complete_in(directory: Path) -> Iterator[Path]:
    """Yield the checkpoints of a directory that have valid headers, the newest first."""

    def pass_over(path: Path, found: CheckpointError) -> None:
        if parse_aside(path) is None:
            warnings.warn(f"checkpoint {path} is passed over: {found}", stacklevel=6)

    yield from (entry for entry, _ in _newest_first(headers(directory, pass_over)))


def _newest_first(found: Iterable[tuple[Path, Header]]) -> list[tuple[Path, Header]]:
    named = [each for each in found if parse_aside(each[0]) is None]
    return sorted(named, key=lambda each: (each[1].sequence, each[0]), reverse=True)


def latest(directory: os.PathLike[str] | str) -> Path | None:
    """Return the newest complete checkpoint in a directory, None if there is none.

    The newest is the one saved last, by the sequence in its manifest. What was being written when
    a run died is not complete. A checkpoint whose files have been damaged since (missing, of
    another size, a wrong checksum of a manifest) is passed over with a warning that says why.
    Checksums of tensors are compared by `load`. If one is wrong, `load` raises and leaves a file
    ``shardkit.damaged`` in the checkpoint, and `latest` passes over it from then on. If there are
    checkpoints of others only, which have no manifest, a warning says so.

    Args:
        directory: Directory that holds checkpoints; need not exist.

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
    """Give a name that was lost on the way to another checkpoint the newest complete one.

    Any number of processes may call it, also beside those that save.
    """
    if os.path.lexists(path):
        return
    beside = [
        aside
        for aside in asides_in(path.parent)
        if aside.name == path.name and aside.kind != DELETED
    ]
    if not any(aside.kind == REPLACED for aside in beside):
        return  # It never had the name, or somebody has deleted it.
    for aside in sorted(beside, key=_newness, reverse=True):
        if aside.kind == INCOMPLETE and problem(aside.path):
            continue
        if not (aside.path / METADATA_FILE).exists():
            continue
        try:
            aside.path.rename(path)
        except FileNotFoundError:
            continue  # Its job was faster, or another that recovers.
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return
        fsync_directory(path.parent)
        return


def _newness(aside: Aside) -> int:
    """Return what orders those of which one is recovered; the least for checkpoints of others."""
    try:
        return 0 if problem(aside.path) else read_header(aside.path).sequence
    except (OSError, CheckpointError):
        return 0


def _recover_all(directory: Path) -> None:
    """Recover all of a directory: what stands aside may be the only copy."""
    for aside in asides_in(directory):
        if aside.kind == REPLACED:
            recover(aside.target)


def prepare(path: Path, *, overwrite: bool) -> Path:
    """Make the directory in which a checkpoint is written; of dead jobs' nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # First: what is abandoned now is obsolete if there is a checkpoint afterwards.
    abandoned = [a for a in asides_in(path.parent) if a.name == path.name and a.is_abandoned]
    recover(path)
    check_free(path, overwrite=overwrite)
    for aside in abandoned:
        delete(aside.path, path)
    new = new_aside(path, INCOMPLETE)
    new.mkdir()
    return new


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise if a checkpoint may not be given this name.

    A damaged one may be replaced: a run that goes on from an older one comes by it again.
    """
    if not os.path.lexists(path):
        return
    if not overwrite and not ((path / MANIFEST_FILE).exists() and problem(path)):
        msg = (
            f"{path} exists. Give each checkpoint a name of its own, such as 'step-1000', or "
            f"replace it by overwrite=True."
        )
        raise CheckpointError(msg)

    def look() -> None:
        try:
            names = os.listdir(path)  # noqa: PTH208 - all at once: another job may replace it
        except FileNotFoundError:
            is_free = not path.is_symlink()  # Another job replaces it at this moment.
        except NotADirectoryError:
            is_free = False
        else:
            is_free = not names or METADATA_FILE in names
        if not is_free:
            msg = f"{path} exists and is no checkpoint: it is not replaced. Choose another name."
            raise CheckpointError(msg)

    again_if_replaced(path, look)


def commit(new: Path, path: Path, *, overwrite: bool, before: Stamp, mine: Stamp) -> None:
    """Give a complete checkpoint its name, and delete what had it before.

    `before` and `mine` are stamps of what had the name at `prepare`, and of the new one before it
    was complete: from then on another job may use it to recover the name. Warns if another job
    has saved under this name at the same time: the last one has it. After an OSError what was
    there before is there again.
    """
    try:
        with contextlib.suppress(FileNotFoundError):  # It has the name already.
            fsync_directory(new)
        old = _switch(new, path, before, mine, overwrite=overwrite)
    except BaseException:
        with contextlib.suppress(OSError):
            delete(new, path)
        raise
    fsync_directory(path.parent)  # Where this fails the old one stays, under another name.
    for aside in old:
        if stamp(aside) not in {before, None}:
            msg = (
                f"{path}: {_saved_by(aside)} has saved under this name meanwhile; its checkpoint "
                f"has been replaced. {_ONE_EACH}"
            )
            warnings.warn(msg, stacklevel=3)
        with _warning(aside):
            delete(aside, path)
    if stamp(path) not in {mine, None}:
        msg = (
            f"{path}: {_saved_by(path)} saves under this name too, and has replaced the checkpoint "
            f"that was just saved. {_ONE_EACH}"
        )
        warnings.warn(msg, stacklevel=3)


def _switch(new: Path, path: Path, before: Stamp, mine: Stamp, *, overwrite: bool) -> list[Path]:
    """Give a checkpoint its name; return where now is what had it before."""
    old: list[Path] = []
    try:
        for _ in range(_SWITCHES):
            if _is_switched(new, path, old, before, overwrite=overwrite) or stamp(path) == mine:
                return old
            if not new.exists():  # It was used to recover the name, which another has by now.
                if overwrite:
                    if os.path.lexists(path):
                        return old
                    continue  # Another job replaces that at this moment.
                msg = (
                    f"{path}: {_saved_by(path)} has taken the place of this checkpoint. {_ONE_EACH}"
                )
                raise CheckpointError(msg)  # noqa: TRY301 - what was moved is put back
        msg = f"{path}: other jobs save under this name all the time. {_ONE_EACH}"
        raise CheckpointError(msg)  # noqa: TRY301
    except BaseException:
        if old:
            with contextlib.suppress(OSError):  # Something else has the name already.
                old[-1].rename(path)
        raise


def _is_switched(new: Path, path: Path, old: list[Path], before: Stamp, *, overwrite: bool) -> bool:
    """Try it once; False if it takes another step, or another job was faster."""
    try:
        if not os.path.lexists(path):
            new.rename(path)  # Fails if something has the name by now.
            return True
        if not overwrite and stamp(path) not in {before, None}:
            msg = f"{path}: {_saved_by(path)} has saved under this name meanwhile. {_ONE_EACH}"
            raise CheckpointError(msg)
        check_free(path, overwrite=overwrite)
        try:
            exchange(new, path)
        except OSError as error:
            if error.errno not in _CANNOT_EXCHANGE:
                raise
        else:
            old.append(new)
            return True
        aside = new_aside(path, REPLACED)
        path.rename(aside)
        old.append(aside)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
    return False


def exchange(one: Path, other: Path) -> None:
    """Exchange what has two names, at once; some file systems never can (EINVAL, ENOSYS)."""
    renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        at_cwd, rename_exchange = -100, 2  # <fcntl.h>, <stdio.h> of Linux
        if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _saved_by(path: Path) -> str:
    """Name who has written a checkpoint."""
    with contextlib.suppress(OSError, CheckpointError):
        return read_manifest(path).saved_by or "another job"
    return "another job"


def prune(path: Path, keep_last: int) -> None:
    """Delete what is beside a new checkpoint: older ones but the newest, and leftovers.

    What is newer stays: two jobs that do this at once do not delete each other's last one.
    """
    asides = list(asides_in(path.parent))  # First, as in `prepare`.
    _recover_all(path.parent)
    try:
        own_sequence = read_header(path).sequence
    except (OSError, CheckpointError):  # Another job has deleted it, or replaces it.
        own_sequence = 0
    kept = {path}
    for other, header in _newest_first(headers(path.parent)):
        if other.is_symlink():  # Somebody's other name for one of these.
            continue
        if other in kept or len(kept) < keep_last or header.sequence >= own_sequence:
            kept.add(other)
            continue
        with _warning(other):
            _delete_if(other, header)
    for aside in asides:
        if not aside.path.is_dir():
            continue
        if aside.is_abandoned:
            with _warning(aside.path):
                delete(aside.path, aside.target)
        elif aside.kind == INCOMPLETE and aside.owner != own():
            msg = (
                f"keep_last={keep_last}: {aside.owner} saves {aside.name!r} in {path.parent} too, "
                f"and the checkpoints of both are counted and deleted. Give each run a directory "
                f"of its own."
            )
            warnings.warn(msg, stacklevel=3)


def _delete_if(path: Path, header: Header) -> None:
    """Delete a checkpoint, but not one that another job has given this name meanwhile."""
    aside = new_aside(path, REPLACED)
    with contextlib.suppress(FileNotFoundError):  # Another job has deleted it.
        before = stamp(path)
        if read_header(path) != header:
            return
        path.rename(aside)
        if stamp(aside) == before:
            delete(aside, path)
        else:
            recover(path)


@contextlib.contextmanager
def _warning(path: Path) -> Iterator[None]:
    """Turn an error about what is no longer needed into a warning: the new checkpoint is there."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path} could not be deleted: {error}", stacklevel=4)


def delete(path: Path, target: Path) -> None:
    """Delete what stands aside of `target`: never can half of it be taken for a checkpoint."""
    doomed = new_aside(target, DELETED)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    except OSError:
        doomed = path
        with contextlib.suppress(OSError):
            (path / METADATA_FILE).unlink()  # First: without it nobody takes it for one.
    remove(doomed)


def remove(path: Path) -> None:
    """Delete a directory and all that is in it, or a link to one, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
