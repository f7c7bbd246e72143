"""Bytes on disks, complete or absent, and the temporary names of what is being written.

No two jobs use the same name beside a checkpoint, because the name contains its maker. So no lock
is needed, and leftovers of a killed job can be distinguished from the files of a running one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import secrets
import socket
import stat
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError, ShardkitError
from shardkit._processes import boot_and_namespace, start_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path


# --- bytes ----------------------------------------------------------------------------------------

_URL = re.compile(r"[A-Za-z][\w+.-]*:/")  # `Path` makes one slash of two.

PART_NBYTES = 2**24  # Size of the parts in which tensors are read and written.

MAX_INDEX_NBYTES = 2**30
"""Size limit of an index of tensors; no checkpoint that can be saved has a larger one."""

DAMAGED = "The checkpoint is damaged: load another one."

SIZE_LIMIT = 1 << 62
"""Limit of sizes, offsets and keys in files: sums of a few sizes below it fit 64 bits."""

_MAX_NAME_LEN = 255  # No file system has longer names.


def not_reported(nbytes: int) -> None:
    """Ignore that bytes have been written or read."""


class IntKey(int):
    """An integer that is a key of a dict; other integers are positions in lists."""


Key = str | int | float | None
Keys = tuple[Key, ...]  # Keys that lead to an entry in nested dicts and lists.


@dataclass(frozen=True)
class TensorInfo:
    """What is known about a saved tensor before it is read."""

    shape: tuple[int, ...]  # Shape of the whole tensor.
    dtype: torch.dtype  # Dtype of its elements.

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize

    @property
    def strides(self) -> list[int]:
        """Its strides as a contiguous tensor, in elements."""
        return [math.prod(max(n, 1) for n in self.shape[i + 1 :]) for i in range(len(self.shape))]


class Source:
    """Whole tensors by name, whose ranges can be read; subclasses have `read_into`."""

    infos: dict[str, TensorInfo]  # Shape and dtype of every tensor.
    tied: dict[str, str]  # Names of tensors that share the memory of an earlier one, and its name.
    others: Collection[str]  # Entries that are no tensors; most sources have the values too.
    _room: Tensor | None = None

    @functools.cached_property
    def paths(self) -> dict[str, Keys]:
        """The keys that lead to each entry in nested dicts and lists."""
        return {name: (name,) for name in (*self.infos, *self.others)}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: 1-D, on the host."""
        flat = torch.empty(stop - start, dtype=self.infos[name].dtype, device="cpu")
        self.read_into(name, start, flat)
        return flat

    def whole(self, name: str, device: torch.device | None = None) -> Tensor:
        """Return all of a tensor, on the host or another device."""
        info = self.infos[name]
        whole = torch.empty(info.shape, dtype=info.dtype, device=device or "cpu")
        self.copy_into(name, 0, whole.view(-1))
        return whole

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, of the tensor's dtype, 1-D, contiguous, on the host, from `start` on."""
        raise NotImplementedError

    def read_other(self, key: str) -> Any:
        """Return an entry that is no tensor."""
        others: Any = self.others
        return others[key]

    def copy_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, 1-D, of any dtype, on any device, from element `start` on.

        It reads straight into the memory of `out`; where dtype or device differ, through one buffer
        of 16 MiB. The buffer is kept: memory that is taken and freed between lasting pieces would
        leave holes in the heap.
        """
        dtype = self.infos[name].dtype
        if out.dtype == dtype and out.device.type == "cpu":
            self.read_into(name, start, out)
        else:
            if self._room is None:
                self._room = torch.empty(PART_NBYTES, dtype=torch.uint8, device="cpu")
            room = self._room.view(dtype)
            for first in range(0, out.numel(), room.numel()):
                part = out[first : first + room.numel()]
                self.read_into(name, start + first, room[: part.numel()])
                copy_from_scratch(part, room[: part.numel()])
        # Torch did not see the write. Ranks that have no element note it as well: what they
        # gathered before is as old as on other ranks.
        torch.autograd.graph.increment_version(out)


def join_keys(path: Keys) -> str:
    """Return the name that torch.distributed.checkpoint gives to the entry behind these keys."""
    return ".".join(map(str, path))


def nested(values: Mapping[Keys, Any]) -> Any:
    """Return values in the dicts and lists where they were; positions make a list."""
    if () in values:
        return values[()]
    inner: dict[Any, dict[Keys, Any]] = {}
    for path, value in values.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    if all(type(key) is int for key in inner):
        return [nested(inner[key]) for key in sorted(inner)]
    return {key_in_dict(key): nested(rest) for key, rest in inner.items()}


def key_in_dict(key: Key) -> Key:
    """Return the key of a dict that is part of a path."""
    return int(key) if isinstance(key, IntKey) else key


def saved_key(key: object) -> Key:
    """Return a key of a dict as a path has it.

    Raises:
        ValueError: It does not come back from a file: it is no string, number, bool or None.
    """
    plain: Any = key
    for kind in (bool, int, float, str):
        if isinstance(key, kind):
            plain = kind(key)
            break
    if str(plain) != str(key):
        msg = f"{key!r} is written otherwise than {plain!r}"
        raise ValueError(msg)
    return plain if type(plain) is str else key_of_number(plain)


def key_of_number(value: Any) -> Key:
    """Return a key that is no string; integers are limited, so that few have the same hash.

    Raises:
        ValueError: It is no number, bool or None, or too large.
    """
    if type(value) is int and abs(value) < SIZE_LIMIT:
        return IntKey(value)
    if value is not None and type(value) not in (bool, float):
        msg = f"a key is {value!r}"
        raise ValueError(msg)
    key: Key = value
    return key


def check_saved_dtype(dtype: object) -> None:
    """Refuse a dtype that cannot hold parameters; None keeps their own dtype."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    msg = (
        f"dtype must be a floating-point dtype such as torch.bfloat16, or None for that of each "
        f"tensor, got {dtype!r}. It is of floating-point tensors only; others keep theirs."
    )
    raise CheckpointError(msg)


def converted(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    """Return what is saved of a tensor: a floating-point one gets `dtype`, unless that is None."""
    keep = dtype is None or not info.dtype.is_floating_point
    return info if keep else TensorInfo(info.shape, dtype or info.dtype)


def is_sparse(value: object) -> bool:
    """Whether a value is a tensor whose elements do not all have a place in memory."""
    return isinstance(value, Tensor) and value.layout is not torch.strided


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of no subclass, and its elements lie in an ordinary storage."""
    is_exact = type(tensor) in {Tensor, nn.Parameter, nn.Buffer}
    return is_exact and tensor.layout is torch.strided


def raw_bytes(tensor: Tensor) -> memoryview | None:
    """Return the memory of a contiguous tensor on the host; None for any other tensor."""
    if not is_plain(tensor) or tensor.device.type != "cpu":
        return None
    if tensor.is_quantized or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return bytes_of(tensor.reshape(-1))


def bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a 1-D contiguous tensor on the host."""
    # A single element is contiguous with any stride, but only with 1 torch views it as bytes.
    dense = flat.detach().as_strided(flat.shape, (1,))
    # Through uint8, since numpy lacks dtypes such as bfloat16.
    array: Any = dense.view(torch.uint8).numpy()
    return memoryview(array)


def kind_of(dtype: torch.dtype) -> int:
    """Return the order of a dtype's kind; converting to a higher kind loses only precision."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any other error that a damaged or foreign file leads to into a `CheckpointError`."""
    try:
        yield
    except ShardkitError:
        raise
    except Exception as error:
        msg = f"{what} cannot be read: {type(error).__name__}: {error}. Is it damaged?"
        raise CheckpointError(msg) from error


def why_refused(error: Exception) -> str:
    """Return the sentence of torch's long messages that names the reason."""
    found = re.search(r"([^\n:]*GLOBAL \S+[^\n]*?)\.?(?: Please|\n|$)", str(error))
    if found:
        return found[1].strip()
    return (str(error).splitlines() or [repr(error)])[0].removesuffix(".")


def open_regular(path: os.PathLike[str] | str) -> int:
    """Open a regular file to read from; refuse others, such as a FIFO, which has no end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        msg = f"{os.fspath(path)} is no regular file. {DAMAGED}"
        raise CheckpointError(msg)
    return fd


def read_index(path: os.PathLike[str] | str, max_nbytes: int = MAX_INDEX_NBYTES) -> bytes:
    """Return the content of an index; refuse one that is too large."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_nbytes:
            msg = (
                f"{os.fspath(path)} has {size} bytes, of which there can be {max_nbytes} at most. "
                f"{DAMAGED}"
            )
            raise CheckpointError(msg)
        return file.read(size)


def refuse_url(path: object) -> None:
    """Refuse a URL, which the system would take for a path in the present directory."""
    if isinstance(path, (str, os.PathLike)) and _URL.match(os.fsdecode(path)):
        msg = (
            f"{os.fspath(path)!r} is a URL, and shardkit reads and writes files. Mount the "
            f"storage, and give its path; or call torch's dcp.save and dcp.load, which take URLs "
            f"if fsspec is installed."
        )
        raise CheckpointError(msg)


def is_plain_name(name: object) -> bool:
    """Whether a name is a file name without a directory."""
    if not isinstance(name, str) or len(name) > _MAX_NAME_LEN:
        return False
    if "\0" in name or "/" in name:
        return False
    return bool(name.strip("."))


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and flush it to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Flush the renames in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_from_scratch(target: Tensor, scratch: Tensor) -> None:
    """Copy from reused host memory to a device that may read the memory later (XLA)."""
    at_once = target.device.type in {"cpu", "cuda"}
    target.copy_(scratch if at_once else scratch.clone())


# --- names beside a checkpoint --------------------------------------------------------------------

INCOMPLETE, REPLACED, DELETED = ".incomplete", ".replaced", ".deleted"

ABANDONED_AFTER_S = 3600.0
"""How long an unreachable job writes nothing until it counts as dead: it is on another host.

If it is alive after all, its save fails, and the old checkpoint keeps its name.
"""

_OWNER_MAX = 64  # Length of the owner in a name, without its host.
# Names without an owner: earlier releases of shardkit made them.
_ASIDE = re.compile(
    r"\.(?P<name>.+?)"
    r"(?:\.(?P<host>[\w-]*)-(?P<pid>\d+)-(?P<place>[0-9a-f]{8})-(?P<start>\d+)-[0-9a-f]{8})?"
    r"(?P<kind>\.incomplete|\.replaced|\.deleted)"
)


@dataclass(frozen=True)
class Owner:
    """The process that made a name: the first of the ranks that save."""

    host: str  # Name of its host, perhaps shortened.
    pid: int  # Process id.
    place: str  # Checksum of the host, its boot and its container; zeros: unknown.
    start: str  # Time at which it began, in the host's ticks: process ids are reused.

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unnamed host'}"

    @property
    def is_alive(self) -> bool | None:
        """Whether the process runs; None if this host cannot know."""
        if not self.place.strip("0") or self.place != _place():
            return None
        return start_of(self.pid) == self.start


@dataclass(frozen=True)
class Aside:
    """A directory or file under a temporary name."""

    path: Path  # Path of the directory or file.
    name: str  # Name of the checkpoint.
    kind: str  # ``".incomplete"``, ``".replaced"`` or ``".deleted"``.
    # Process that made it; None if an earlier release, without owners in names, wrote it.
    owner: Owner | None

    @property
    def target(self) -> Path:
        """The checkpoint's own path."""
        return self.path.with_name(self.name)

    @property
    def is_abandoned(self) -> bool:
        """Whether no process is at work on it any more."""
        if self.owner is None:
            return True
        is_alive = self.owner.is_alive
        if is_alive is not None:
            return not is_alive
        return time.time() - _last_written(self.path) > ABANDONED_AFTER_S


def new_aside(path: Path, kind: str) -> Path:
    """Return a name beside `path` that no other job uses."""
    me = own()
    room = max(_MAX_NAME_LEN - _OWNER_MAX - len(os.fsencode(path.name)), 0)
    owner = f"{me.host[:room]}-{me.pid}-{me.place}-{me.start}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.{owner}{kind}")


def parse_aside(path: Path) -> Aside | None:
    """Return the parts of a temporary name; None if it is another name."""
    found = _ASIDE.fullmatch(path.name)
    if found is None:
        return None
    parts = found.group("host", "pid", "place", "start")
    owner = Owner(parts[0], int(parts[1]), *parts[2:]) if parts[1] else None
    return Aside(path, found["name"], found["kind"], owner)


def asides_in(directory: Path) -> Iterator[Aside]:
    """Yield the directories and files in a directory that have temporary names."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in sorted(os.listdir(directory)):  # noqa: PTH208 - names are enough
            if entry.startswith(".") and (aside := parse_aside(directory / entry)) is not None:
                yield aside


def own() -> Owner:
    """Return the owner that is this process."""
    host = re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:32]
    return Owner(host, os.getpid(), _place(), start_of(os.getpid()))


def _place() -> str:
    place = boot_and_namespace()
    return f"{zlib.crc32(place.encode()):08x}" if place else "0" * 8


def _last_written(path: Path) -> float:
    """Return when the newest content of a directory was written."""
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = path.lstat().st_mtime
        for entry in os.scandir(path):
            newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest
