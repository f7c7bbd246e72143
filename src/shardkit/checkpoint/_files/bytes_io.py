"""Tensors as bytes: reading and writing them at places of a file, without copies in between."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._errors import CheckpointError, ShardkitError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

PART_NBYTES = 2**24
"""Of tensors that come part after part."""

MAX_INDEX_NBYTES = 2**30
"""Of a file that says where tensors are: more than that of any checkpoint that can be saved."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a saved tensor before it is read.

    Attributes:
        shape: Shape of the whole.
        dtype: Dtype of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source:
    """Whole tensors by name, of which ranges can be read.

    Subclasses have `read_into`.

    Attributes:
        infos: Shape and dtype of every tensor.
        tied: Names of tensors that are the memory of an earlier one, with that one's name.
        others: Names of entries that are no tensors; most sources have their values too.
    """

    infos: dict[str, TensorInfo]
    tied: dict[str, str]
    others: Collection[str]
    _room: Tensor | None = None

    @functools.cached_property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """The keys that lead to each entry in nested dicts and lists."""
        return {name: (name,) for name in (*self.infos, *self.others)}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: 1-D, on the host."""
        flat = torch.empty(stop - start, dtype=self.infos[name].dtype)
        self.read_into(name, start, flat)
        return flat

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, of the tensor's dtype, 1-D, contiguous, on the host, from `start` on."""
        raise NotImplementedError

    def read_other(self, key: str) -> Any:
        """Return an entry that is no tensor."""
        others: Any = self.others
        return others[key]

    def copy_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, 1-D, of any dtype, on any device, from `start` on.

        Straight into its memory; where dtype or device differ, through one buffer of 16 MiB. Memory
        taken and freed between pieces that stay would leave holes in the heap.
        """
        dtype = self.infos[name].dtype
        if out.dtype == dtype and out.device.type == "cpu":
            self.read_into(name, start, out)
            torch.autograd.graph.increment_version(out)  # Reading wrote past torch's back.
            return
        if self._room is None:
            self._room = torch.empty(PART_NBYTES, dtype=torch.uint8)
        room = self._room.view(dtype)
        for first in range(0, out.numel(), room.numel()):
            part = out[first : first + room.numel()]
            self.read_into(name, start + first, room[: part.numel()])
            copy_from_scratch(part, room[: part.numel()])


def converted(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    """Return what is saved of a tensor: floating-point ones in another dtype; None: their own."""
    keep = dtype is None or not info.dtype.is_floating_point
    return info if keep else TensorInfo(info.shape, dtype or info.dtype)


def without_memory(info: TensorInfo) -> Tensor:
    """Return a contiguous tensor whose memory is not touched, so that the system gives it none."""
    # Not torch.empty, which fills it where deterministic algorithms are asked for.
    storage = torch.UntypedStorage(info_nbytes(info))
    strides = [math.prod(max(n, 1) for n in info.shape[i + 1 :]) for i in range(len(info.shape))]
    return torch.empty(0, dtype=info.dtype).set_(storage, 0, info.shape, strides)


def info_nbytes(info: TensorInfo) -> int:
    """Return the bytes of a tensor."""
    return math.prod(info.shape) * info.dtype.itemsize


def bytes_of(flat: Tensor) -> memoryview:
    """Return the memory of a 1-D contiguous tensor on the host."""
    # Through uint8, since numpy lacks bfloat16 and the like.
    array: Any = flat.detach().view(torch.uint8).numpy()
    return memoryview(array)


def read_at(fd: int, offset: int, flat: Tensor, path: Path) -> None:
    """Fill a 1-D contiguous tensor on the host from a file.

    Raises:
        CheckpointError: The file ends before.
    """
    buffer = bytes_of(flat)
    while len(buffer):
        # One call moves 2 GiB at most.
        count = os.preadv(fd, [buffer], offset)
        if count == 0:
            msg = (
                f"{path} ends at byte {offset}, but {len(buffer)} bytes more were expected: it was "
                f"truncated. Fetch or write it again."
            )
            raise CheckpointError(msg)
        buffer, offset = buffer[count:], offset + count


def write_at(fd: int, offset: int, flat: Tensor) -> None:
    """Write a 1-D contiguous tensor on the host into a file."""
    buffer = bytes_of(flat)
    while len(buffer):
        count = os.pwrite(fd, buffer, offset)
        buffer, offset = buffer[count:], offset + count


def check_saved_dtype(dtype: object) -> None:
    """Refuse a dtype that parameters would be lost in; None is their own.

    Raises:
        CheckpointError: It is not one of floating-point numbers.
    """
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    msg = (
        f"dtype must be a floating-point dtype such as torch.bfloat16, or None for that of each "
        f"tensor, got {dtype!r}. It is of floating-point tensors only; others keep theirs."
    )
    raise CheckpointError(msg)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, e.g. ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def kind_of(dtype: torch.dtype) -> int:
    """Order kinds of dtypes so that converting to a higher one loses nothing but precision."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn into a `CheckpointError` whatever else a file leads to that nobody has written so."""
    try:
        yield
    except ShardkitError:
        raise
    except Exception as error:
        msg = f"{what} cannot be read: {type(error).__name__}: {error}. Is it damaged?"
        raise CheckpointError(msg) from error


def open_regular(path: os.PathLike[str] | str) -> int:
    """Open a file to read from; what is no file is not opened: a FIFO would have no end.

    Raises:
        CheckpointError: It is something else, such as a directory or a FIFO.
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        msg = f"{os.fspath(path)} is no regular file. The checkpoint is damaged: load another one."
        raise CheckpointError(msg)
    return fd


def read_index(path: os.PathLike[str] | str, max_nbytes: int = MAX_INDEX_NBYTES) -> bytes:
    """Return what an index holds.

    Args:
        path: The file.
        max_nbytes: Largest size.

    Raises:
        CheckpointError: It is no regular file, or larger.
        OSError: It cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_nbytes:
            msg = (
                f"{os.fspath(path)} has {size} bytes, of which there can be {max_nbytes} at most. "
                f"The checkpoint is damaged: load another one."
            )
            raise CheckpointError(msg)
        return file.read(size)


def is_plain_name(name: object) -> bool:
    """Whether a name is that of a file in the directory where it is looked for."""
    if not isinstance(name, str) or "\0" in name or "/" in name or os.sep in name:
        return False
    return bool(name.strip("."))


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and have it on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Make renames in a directory last."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def copy_from_scratch(target: Tensor, scratch: Tensor) -> None:
    """Copy from host memory that is used again soon, to a device that may read it later (XLA)."""
    at_once = target.device.type in {"cpu", "cuda"}
    target.copy_(scratch if at_once else scratch.clone())
