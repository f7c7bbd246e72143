"""Items in one file of a directory: written as a stream, read into memory that exists already."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import mmap
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from shardkit._errors import CheckpointError
from shardkit._layout import align_up
from shardkit.checkpoint._dcp.manifest import BLOCK_NBYTES, Item
from shardkit.checkpoint._files.disk import (
    DAMAGED,
    TensorInfo,
    bytes_of,
    copy_from_scratch,
    open_regular,
    without_memory,
)
from shardkit.checkpoint._files.formats import storage_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor


def not_reported(nbytes: int) -> None:
    """Ignore that bytes have been written or read."""


# --- writing --------------------------------------------------------------------------------------
#
# Bytes are copied into two buffers in turn. While one is filled and its checksums are computed, the
# other is written to the disk, past the page cache where the file system allows that. Copying data
# that is in the CPU's cache costs little. Writing through the page cache takes twice as long on a
# local disk, and longer still when the kernel must make room by taking pages from the model.

_BUFFER_NBYTES = 8 << 20
_STEP_NBYTES = 1 << 19  # Copied and summed while in the CPU's cache.
_DISK_BLOCK_NBYTES = 4096  # Writes past the page cache are multiples of it.


class FileStream:
    """A new file that items are appended to; it is on the disk when the context ends.

    Cost: two buffers of 8 MiB, one thread.
    """

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        """Make the file."""
        self._report = report
        self._fd = _create(path)
        self._buffers = [mmap.mmap(-1, _BUFFER_NBYTES) for _ in range(2)]
        self._writing: Future[None] | None = None  # The last write that was started.
        self._current = 0
        self._filled = 0
        self._flushed = 0
        self._thread = ThreadPoolExecutor(1, "shardkit-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Write the rest, flush the disk's cache, and close; after an error only close."""
        try:
            if kind is None:
                nbytes = self.nbytes
                self._flush().result()
                os.ftruncate(self._fd, nbytes)  # The last write was padded.
                os.fsync(self._fd)
        finally:
            self._thread.shutdown()
            os.close(self._fd)
            for buffer in self._buffers:
                with contextlib.suppress(BufferError):  # An error's traceback refers to it.
                    buffer.close()

    @property
    def nbytes(self) -> int:
        """Number of bytes that have been appended."""
        return self._flushed + self._filled

    def append(self, *parts: bytes | memoryview, data_offset: int | None = None) -> Item:
        """Append one item; return its place and its checksums."""
        offset, crc32s, in_block = self.nbytes, [], 0
        crc32 = 0
        for part in parts:
            start = 0
            while start < len(part):
                stop = min(
                    start + _STEP_NBYTES,
                    len(part),
                    start + BLOCK_NBYTES - in_block,
                    start + _BUFFER_NBYTES - self._filled,
                )
                step, end = part[start:stop], self._filled + stop - start
                self._buffers[self._current][self._filled : end] = step
                crc32 = zlib.crc32(step, crc32)
                self._filled = end
                if end == _BUFFER_NBYTES:
                    self._flush()
                in_block += stop - start
                start = stop
                if in_block == BLOCK_NBYTES:
                    crc32s.append(crc32)
                    crc32 = in_block = 0
        if in_block:
            crc32s.append(crc32)
        return Item(offset, self.nbytes - offset, data_offset, tuple(crc32s))

    def _flush(self) -> Future[None]:
        """Start to write the current buffer, then wait until the other one is free."""
        nbytes, self._filled = self._filled, 0
        before, buffer = self._writing, self._buffers[self._current]
        self._writing = self._thread.submit(self._write, buffer, nbytes, self._flushed)
        self._flushed += nbytes
        self._current = 1 - self._current
        if before is not None:
            before.result()
        return self._writing

    def _write(self, buffer: mmap.mmap, nbytes: int, offset: int) -> None:
        padded = align_up(nbytes, _DISK_BLOCK_NBYTES)
        with memoryview(buffer) as view:
            done = 0
            while done < padded:
                try:
                    done += os.pwrite(self._fd, view[done:padded], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not _use_cache(self._fd):
                        raise
        self._report(nbytes)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # The file system needs the cache.
            raise
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # Some file systems made it nevertheless.
    return os.open(path, flags, 0o666)


def _use_cache(fd: int) -> bool:
    """Write through the page cache from now on; False if the file did so already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    if not flags & direct:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return True


class _Frame:
    """A file that collects what torch.save writes around the elements of a tensor."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after: bytearray | None = None

    def write(self, part: memoryview) -> int:
        """Collect bytes."""
        target = self.before if self.after is None else self.after
        target += part
        return len(part)

    def seek(self, offset: int, whence: int) -> None:
        """Skip the elements; what comes next stands after them."""
        assert whence == os.SEEK_CUR, offset
        assert self.after is None
        self.after = bytearray()

    def flush(self) -> None:
        """Do nothing: torch.save calls it."""


@functools.lru_cache(maxsize=1024)
def tensor_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return what torch.save writes before and after the elements of a contiguous tensor.

    torch.save itself would write the whole storage of which a piece is a view.
    """
    frame = _Frame()
    with torch.serialization.skip_data():
        torch.save(without_memory(TensorInfo(shape, dtype)), frame)  # type: ignore[arg-type]
    return bytes(frame.before), bytes(frame.after or b"")


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of no subclass, and its elements lie in an ordinary storage."""
    is_exact = type(tensor) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
    return is_exact and tensor.layout is torch.strided


def raw_bytes(tensor: Tensor) -> memoryview | None:
    """Return the memory of a contiguous tensor on the host; None for any other tensor."""
    if not is_plain(tensor) or tensor.device.type != "cpu":
        return None
    if tensor.is_quantized or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return bytes_of(tensor.reshape(-1))


# --- reading --------------------------------------------------------------------------------------


class ItemFile:
    """An open file of a checkpoint."""

    def __init__(self, path: Path, block_nbytes: int, report: Callable[[int], None]) -> None:
        """Open it."""
        self.path = path
        self._block_nbytes = block_nbytes
        self._report = report
        self._fd = open_regular(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # Read further ahead.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, item: Item, name: str) -> bytearray:
        """Return all bytes of an item; raise if they are not the bytes that were written."""
        content = bytearray(item.nbytes)
        self.read_into(item, 0, memoryview(content), name)
        return content

    def read_into(self, item: Item, start: int, target: memoryview, name: str) -> None:
        """Read bytes of an item from `start` on; the whole blocks around them are verified."""
        stop = start + len(target)
        if not item.crc32s:
            self._read_run(item.offset + start, [target], name)
            return
        for begin, end, crc32 in item.blocks(self._block_nbytes):
            if begin >= stop or end <= start:
                continue
            low, high = max(begin, start), min(end, stop)
            before, after = bytearray(low - begin), bytearray(end - high)
            parts = [memoryview(before), target[low - start : high - start], memoryview(after)]
            found = self._read_run(item.offset + begin, parts, name)
            if found != crc32:
                msg = (
                    f"{self.path}: {name!r}: bytes {item.offset + begin} to {item.offset + end} "
                    f"are not what was written (checksum {found:08x}, expected {crc32:08x}). "
                    f"{DAMAGED}"
                )
                raise CheckpointError(msg)

    def _read_run(self, offset: int, parts: list[memoryview], name: str) -> int:
        """Fill the parts from one run of bytes; return their checksum."""
        crc32, nbytes = 0, sum(map(len, parts))
        if nbytes <= _STEP_NBYTES and os.preadv(self._fd, parts, offset) == nbytes:
            for part in parts:
                crc32 = zlib.crc32(part, crc32)
            if nbytes:
                self._report(nbytes)
            return crc32
        for part in parts:
            done = 0
            while done < len(part):
                step = part[done : done + _STEP_NBYTES]
                got = os.preadv(self._fd, [step], offset)
                if got == 0:
                    msg = (
                        f"{self.path}: truncated: {name!r} should go on at byte {offset}. {DAMAGED}"
                    )
                    raise CheckpointError(msg)
                crc32 = zlib.crc32(step[:got], crc32)
                offset += got
                done += got
            if done:
                self._report(done)
        return crc32

    # --- tensors --------------------------------------------------------------------------------

    def located(self, item: Item, chunk: TensorInfo) -> Item:
        """Return an item of DCP with the offset of its elements, which DCP does not record."""
        try:
            archive: Any = Slice(self._fd, item.offset, item.nbytes)
            with torch.serialization.skip_data():
                described = torch.load(archive, weights_only=True, map_location="cpu")
            (elements,) = storage_entries(archive)
        except Exception:  # noqa: BLE001 - torch.load raises a better error later
            return item
        is_plain_tensor = (
            raw_bytes(described) is not None
            and TensorInfo.of(described) == chunk
            and described.storage_offset() == 0
            and elements.nbytes == chunk.nbytes
        )
        return replace(item, data_offset=elements.begin) if is_plain_tensor else item

    def check_frame(self, item: Item, chunk: TensorInfo, name: str) -> None:
        """Raise unless an item with a `data_offset` is such a tensor; reads a few hundred bytes."""
        if item.data_offset is None:
            return
        with contextlib.suppress(Exception):  # Not every dtype has such a frame.
            before, _ = tensor_frame(chunk.dtype, chunk.shape)
            found = os.pread(self._fd, len(before), item.offset)
            if item.data_offset == len(before) and found == before:
                return
        # Another release of torch may write another frame.
        if self.located(replace(item, data_offset=None), chunk) != item:
            msg = (
                f"{self.path}: {name!r} is no tensor of {chunk.dtype} and shape {chunk.shape}. "
                f"{DAMAGED}"
            )
            raise CheckpointError(msg)

    def check(self, item: Item, chunk: TensorInfo, name: str) -> None:
        """Raise unless an item is such a tensor; reads as much as that takes."""
        self.check_frame(item, chunk, name)
        if item.data_offset is None:
            self.load(item, chunk, name)

    def load(self, item: Item, chunk: TensorInfo, name: str) -> Tensor:
        """Return the tensor that torch.save wrote; execute nothing if it is something else."""
        content: Any = io.BytesIO(self.read(item, name))
        try:
            loaded = torch.load(content, weights_only=True, map_location="cpu")
        except Exception as error:
            msg = f"{self.path}: {name!r} cannot be read: {error}"
            raise CheckpointError(msg) from error
        if not isinstance(loaded, torch.Tensor):
            msg = f"{self.path}: {name!r}: expected a tensor, found {type(loaded).__name__}."
            raise CheckpointError(msg)
        if TensorInfo.of(loaded) != chunk:
            msg = (
                f"{self.path}: {name!r} has shape {tuple(loaded.shape)} and {loaded.dtype}, "
                f"expected {chunk.shape} and {chunk.dtype}. {DAMAGED}"
            )
            raise CheckpointError(msg)
        return loaded

    def read_box(
        self,
        item: Item,
        chunk: TensorInfo,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: Tensor,
        name: str,
    ) -> None:
        """Read a box of a saved chunk into a tensor of its shape; any dtype, device and strides.

        Cost: memory for the box's range of the chunk, unless elements can be read to their final
        place.
        """
        assert item.data_offset is not None
        strides = chunk.strides
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        numel = 0  # Elements from the box's first to its last.
        if 0 not in lengths:
            numel = 1 + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        begin = item.data_offset + start * chunk.dtype.itemsize
        memory = raw_bytes(target) if target.dtype == chunk.dtype else None
        if memory is not None and numel == target.numel():
            self.read_into(item, begin, memory, name)
            torch.autograd.graph.increment_version(target)
            return
        run = torch.empty(numel, dtype=chunk.dtype, device="cpu")
        self.read_into(item, begin, bytes_of(run), name)
        copy_from_scratch(target, run.as_strided(tuple(lengths), strides))


class Slice(io.RawIOBase):
    """A range of an open file, as a read-only file of its own."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        super().__init__()
        self._fd, self._offset, self._nbytes, self._position = fd, offset, nbytes, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a place in the range."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits or is left."""
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        got = os.preadv(self._fd, [view], self._offset + self._position) if view else 0
        self._position += got
        return got
