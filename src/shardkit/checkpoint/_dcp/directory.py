"""Directories of checkpoints: how a checkpoint gets its name, and which one is the newest.

A checkpoint is written under a temporary name beside its final one (`_files.disk`). Once all of it
is on the disk, the two names are exchanged. The exchange happens completely or not at all, also in
a crash and with other jobs at work. Then the directory that had the name before is deleted::

    .<name>.<owner>.incomplete   being written, or left by a job that was killed
    .<name>.<owner>.replaced     what <name> was, from the moment it makes room until it is obsolete
    .<name>.<owner>.deleted      being deleted

NFS and some other file systems cannot exchange names. There the old checkpoint is renamed before
the new one is, and for a moment nothing has the name. After a crash at that moment, `recover` gives
the name to the newest complete checkpoint. Renaming to the name of another checkpoint fails on
every file system, so each of several jobs at work knows what became of its own checkpoint.
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
from shardkit._settings import refuse_texts
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
    refuse_url,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DAMAGED_FILE = "shardkit.damaged"  # File in a damaged checkpoint that holds what `load` found.

_NOTE_NBYTES = 1 << 20

T = TypeVar("T")

READ_AGAIN = 50
"""Number of times at most that a checkpoint is read, if other jobs keep replacing it."""

_SWITCHES = 1000  # Attempts at most, if other jobs are faster each time.

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT}
"""Errors of a rename if another job was faster: the name is taken, or the source is gone."""

_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM}

_ONE_EACH = "Give each job a path of its own, or end the one before."


def normalized(path: os.PathLike[str] | str) -> Path:
    """Return an absolute path with a name; symbolic links in it are kept."""
    if path is None:
        msg = (
            "expected the path of a checkpoint, not None, which latest() returns if there is no "
            "complete one: then begin anew."
        )
        raise CheckpointError(msg)
    refuse_url(path)
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
"""Identifies one of several checkpoints that have the same name over time; None: there is none."""


def stamp(path: Path) -> Stamp:
    """Return what distinguishes the present checkpoint under a name from later ones."""
    try:
        return _stamp_of((path / METADATA_FILE).stat())
    except (OSError, ValueError):  # ValueError: no file can have this name.
        return None


def _stamp_of(found: os.stat_result) -> Stamp:
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)


def again_if_replaced(
    path: Path, read: Callable[[], T], is_right: Callable[[T], bool] = lambda _: True
) -> T:
    """Read a checkpoint, again if another job replaced it while it was read."""
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
    """Return what is missing or damaged, by file sizes and the findings of `load`; or ''."""
    try:
        return _damage(path)
    except OSError as error:
        return str(error)


def _damage(path: Path) -> str:
    """Return the same; raise an error of the disk, which may pass."""
    try:
        again_if_replaced(path, lambda: _check(path))
    except CheckpointError as error:
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
    """Return the damage that `load` found in a checkpoint; empty if none is noted."""
    try:
        noted = read_index(path / DAMAGED_FILE, _NOTE_NBYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return noted or f"{path}: something of it is damaged."  # Empty if the disk was full.


def note_damage(path: Path, found: str, which: Stamp) -> bool:
    """Have `latest` pass over a checkpoint; False if that fails or another one has its name."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _stamp_of(os.stat(METADATA_FILE, dir_fd=folder)) != which:
            return False
        # Do not follow what else may have this name: a link could lead to any file of the user.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        flags |= os.O_NONBLOCK | os.O_NOFOLLOW
        with os.fdopen(os.open(DAMAGED_FILE, flags, 0o666, dir_fd=folder), "w") as file:
            file.write(f"{found}\n")
    except OSError:  # If the disk is full, an empty note is there.
        return os.path.lexists(path / DAMAGED_FILE)
    finally:
        os.close(folder)
    return True


def check_size(path: Path, nbytes: int) -> None:
    """Raise unless a file has the size that was written."""
    try:
        found = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:  # Others may be the disk's, and pass.
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


def headers(directory: Path, unread: list[OSError] | None = None) -> Iterator[tuple[Path, Header]]:
    """Yield the entries of a directory that have a manifest, those still being written too.

    With `unread`, a warning names the others whose manifest is damaged or cannot be read, and
    errors of the disk are added to it.
    """
    for entry in sorted(directory.iterdir()):
        try:
            yield entry, read_header(entry)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, CheckpointError) as error:
            if unread is None or parse_aside(entry) is not None:
                continue
            if isinstance(error, OSError):
                unread.append(error)
            warnings.warn(f"checkpoint {entry} is passed over: {error}", stacklevel=6)


def next_sequence(directory: Path) -> int:
    """Return one more than the largest sequence in a directory."""
    return 1 + max((header.sequence for _, header in headers(directory)), default=0)


def complete_in(directory: Path, unread: list[OSError] | None = None) -> list[Path]:
    """Return the checkpoints of a directory that have valid headers, the newest first.

    Warns of others, and adds errors of the disk to `unread`.
    """
    found = headers(directory, [] if unread is None else unread)
    return [entry for entry, _ in _newest_first(found)]


def _newest_first(found: Iterable[tuple[Path, Header]]) -> list[tuple[Path, Header]]:
    named = [each for each in found if parse_aside(each[0]) is None]
    return sorted(named, key=lambda each: (each[1].sequence, each[0]), reverse=True)


def newest(directory: os.PathLike[str] | str) -> Path | None:
    """Return the newest complete checkpoint in a directory, None if there is none; see `latest`."""
    refuse_url(directory)
    parent = Path(os.path.abspath(directory))  # noqa: PTH100 - links are kept
    if not parent.is_dir():
        return None
    if (parent / METADATA_FILE).exists():
        msg = f"{parent} is a checkpoint itself. Load it, or give the directory that holds it."
        raise CheckpointError(msg)
    _recover_all(parent)
    unread: list[OSError] = []
    for path in complete_in(parent, unread):
        try:
            found = _damage(path)
        except OSError as error:
            unread.append(error)
            found = str(error)
        if not found:
            return path
        warnings.warn(f"checkpoint {path} is passed over: {found}", stacklevel=3)
    # What may not be read at all, such as lost+found, is no checkpoint of this user.
    failed = [error for error in unread if not isinstance(error, PermissionError)]
    if failed:
        msg = (
            f"{parent}: no checkpoint can be read: {failed[0]}. None would make a run begin anew. "
            f"Try again, or give another directory."
        )
        raise CheckpointError(msg) from failed[0]
    paths = (file.parent for file in parent.glob(f"[!.]*/{METADATA_FILE}"))
    foreign = sorted(path.name for path in paths if not (path / MANIFEST_FILE).exists())
    if foreign:
        msg = (
            f"no checkpoint of {parent} has a manifest, which says how new it is. load() reads "
            f"those of torch.distributed.checkpoint too, by their path: {', '.join(foreign[-3:])}."
        )
        warnings.warn(msg, stacklevel=3)
    return None


# --- changes ------------------------------------------------------------------------------------


def recover(path: Path) -> None:
    """Give a name, lost by a crash between two renames, to its newest complete checkpoint.

    Any number of processes may call it, also while others save.
    """
    if os.path.lexists(path):
        return
    beside = [
        aside
        for aside in asides_in(path.parent)
        if aside.name == path.name and aside.kind != DELETED
    ]
    if not any(aside.kind == REPLACED for aside in beside):
        return  # Nothing had the name, or a user deleted it.
    for aside in sorted(beside, key=_newness, reverse=True):
        if aside.kind == INCOMPLETE and problem(aside.path):
            continue
        if not (aside.path / METADATA_FILE).exists():
            continue
        try:
            aside.path.rename(path)
        except FileNotFoundError:
            continue  # Its job, or another one in `recover`, was faster.
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return
        fsync_directory(path.parent)
        return


def _newness(aside: Aside) -> int:
    """Return the order in which to recover; the least for damaged and for foreign checkpoints."""
    try:
        return 0 if problem(aside.path) else read_header(aside.path).sequence
    except (OSError, CheckpointError):
        return 0


def _recover_all(directory: Path) -> None:
    """Recover all names in a directory, since a renamed checkpoint may be the only copy."""
    for aside in asides_in(directory):
        if aside.kind == REPLACED:
            recover(aside.target)


def prepare(path: Path, *, overwrite: bool) -> Path:
    """Make the directory to write a checkpoint in, and delete the leftovers of dead jobs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # List these before `recover`: they are obsolete only if the name then has a checkpoint.
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

    A damaged checkpoint may be replaced: a run that resumes from an older one saves it again. So
    may an empty directory, which a script has made for the checkpoint.
    """
    refuse_texts(CheckpointError, overwrite=overwrite)
    if not os.path.lexists(path):
        return
    may_replace = overwrite or _is_empty(path)
    if not may_replace and not ((path / MANIFEST_FILE).exists() and _damage(path)):
        msg = (
            f"{path} exists. Give each checkpoint a name of its own, such as 'step-1000', or "
            f"replace it by overwrite=True."
        )
        raise CheckpointError(msg)

    def look() -> None:
        try:
            names = os.listdir(path)  # noqa: PTH208 - all at once: another job may replace it
        except FileNotFoundError:
            is_free = not path.is_symlink()  # Another job is replacing it.
        except NotADirectoryError:
            is_free = False
        else:
            is_free = not names or METADATA_FILE in names
        if not is_free:
            msg = f"{path} exists and is no checkpoint: it is not replaced. Choose another name."
            raise CheckpointError(msg)

    again_if_replaced(path, look)


def _is_empty(path: Path) -> bool:
    """Whether a path is a directory without entries."""
    try:
        return not os.listdir(path)  # noqa: PTH208 - as in `check_free`
    except OSError:
        return False


def commit(new: Path, path: Path, *, overwrite: bool, before: Stamp, mine: Stamp) -> None:
    """Give a complete checkpoint its name, and delete the one that had the name before.

    `before` is the stamp of what had the name at `prepare`. `mine` is the stamp of the new
    checkpoint, taken before it was complete: once it is complete, another job may use it to recover
    the name. Warns if another job has saved under this name at the same time; the last one keeps
    the name. After an OSError the old checkpoint has its name again.
    """
    try:
        with contextlib.suppress(FileNotFoundError):  # `recover` gave it the name.
            fsync_directory(new)
        old = _switch(new, path, before, mine, overwrite=overwrite)
    except BaseException:
        with contextlib.suppress(OSError):
            delete(new, path)
        raise
    fsync_directory(path.parent)  # If it fails, the old one stays, renamed.
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
    """Give a checkpoint its name; return the present paths of those that had it before."""
    old: list[Path] = []
    try:
        for _ in range(_SWITCHES):
            if _is_switched(new, path, old, before, overwrite=overwrite) or stamp(path) == mine:
                return old
            if not new.exists():  # Used to recover the name.
                if overwrite:
                    if os.path.lexists(path):
                        return old
                    continue  # Another job is replacing it.
                msg = (
                    f"{path}: {_saved_by(path)} has taken the place of this checkpoint. {_ONE_EACH}"
                )
                raise CheckpointError(msg)  # noqa: TRY301 - what was moved is put back
        msg = f"{path}: other jobs save under this name all the time. {_ONE_EACH}"
        raise CheckpointError(msg)  # noqa: TRY301
    except BaseException:
        if old:
            with contextlib.suppress(OSError):  # Another checkpoint has the name.
                old[-1].rename(path)
        raise


def _is_switched(new: Path, path: Path, old: list[Path], before: Stamp, *, overwrite: bool) -> bool:
    """Try the switch once; False if it takes another step, or another job was faster."""
    try:
        if not os.path.lexists(path):
            new.rename(path)  # Fails if the name is taken by now.
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
    """Exchange two names atomically; some file systems never can (EINVAL, ENOSYS)."""
    renameat2: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        at_cwd, rename_exchange = -100, 2  # <fcntl.h>, <stdio.h> of Linux
        if renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), rename_exchange) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _saved_by(path: Path) -> str:
    """Return who has written a checkpoint, for messages."""
    with contextlib.suppress(OSError, CheckpointError):
        return read_manifest(path).saved_by or "another job"
    return "another job"


def prune(path: Path, keep_last: int) -> None:
    """Delete the older checkpoints beside a new one, except the newest, and leftovers.

    Newer checkpoints stay: two jobs that prune at once do not delete each other's last one. A
    damaged one, which `latest` passes over, does not count: the good ones before it stay. What a
    link in the same directory leads to, such as ``best``, is not deleted.

    Cost: reads the manifests and `.metadata` of those that stay.
    """
    with _warning(path.parent, "could not be searched for older checkpoints"):
        _prune(path, keep_last)


def _prune(path: Path, keep_last: int) -> None:
    asides = list(asides_in(path.parent))  # First, as in `prepare`.
    _recover_all(path.parent)
    try:
        own_sequence = read_header(path).sequence
    except (OSError, CheckpointError):  # Another job has deleted it, or is replacing it.
        own_sequence = 0
    num_good = 1
    found = _newest_first(headers(path.parent))
    linked = {other.resolve() for other, _ in found if other.is_symlink()}
    for other, header in found:
        if other == path or other.is_symlink():
            continue
        is_newer = header.sequence >= own_sequence
        if num_good < keep_last or is_newer or other.resolve() in linked:
            num_good += not problem(other)
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
    """Delete a checkpoint, unless another job has given its name to another one meanwhile."""
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
def _warning(path: Path, what: str = "could not be deleted") -> Iterator[None]:
    """Turn an error of the disk into a warning: the new checkpoint is complete."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path} {what}: {error}", stacklevel=4)


def delete(path: Path, target: Path) -> None:
    """Delete a directory beside `target`; a half-deleted one never passes for a checkpoint."""
    doomed = new_aside(target, DELETED)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    except OSError:
        doomed = path
        with contextlib.suppress(OSError):
            (path / METADATA_FILE).unlink()  # First: without it, it is no checkpoint.
    remove(doomed)


def remove(path: Path) -> None:
    """Delete a directory and all its content, or a link to one, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
