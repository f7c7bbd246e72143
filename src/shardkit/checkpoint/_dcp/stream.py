"""Writing one file as fast as the disk takes it, and describing what was written.

Bytes are copied into two buffers in turn; while one is filled and its checksums are computed, the
other is on its way to the disk, past the page cache where the file system allows that. A copy in
the cache costs little, and pages of the page cache would be taken from the model: writing through
it takes twice as long on a local disk, and longer still when the kernel has to make room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import torch

from shardkit.checkpoint._dcp.manifest import BLOCK_NBYTES, Item
from shardkit.checkpoint._files.bytes_io import TensorInfo, bytes_of, without_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

_BUFFER_NBYTES = 8 << 20
_STEP_NBYTES = 1 << 19  # Copied and summed while it is in the cache.
_DISK_BLOCK_NBYTES = 4096  # What a write past the page cache must be a multiple of.


class FileStream:
    """A new file that items are appended to; it is on the disk when the block is left.

    Cost: two buffers of 8 MiB, one thread.
    """

    def __init__(self, path: Path, report: Callable[[int], None] | None = None) -> None:
        """Make the file.

        Args:
            path: New file, which must not exist.
            report: Function that is called with the number of bytes whenever some have been
                written.

        Raises:
            OSError: It cannot be made.
        """
        self._report = report
        self._fd = _create(path)
        self._buffers = [mmap.mmap(-1, _BUFFER_NBYTES) for _ in range(2)]
        self._writing: list[Future[None] | None] = [None, None]
        self._current = 0
        self._filled = 0
        self._flushed = 0
        self._thread = ThreadPoolExecutor(1, "shardkit-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Write what is left, flush the disk's cache, and close, also after an error."""
        try:
            if kind is None:
                self._finish()
        finally:
            self._thread.shutdown()
            os.close(self._fd)
            for buffer in self._buffers:
                with contextlib.suppress(BufferError):  # An error's traceback refers to it.
                    buffer.close()

    @property
    def nbytes(self) -> int:
        """What has been appended."""
        return self._flushed + self._filled

    def append(self, *parts: bytes | memoryview, data_offset: int | None = None) -> Item:
        """Append one item.

        Args:
            parts: Bytes of it, in order.
            data_offset: Offset of the elements, as in `Item`.

        Returns:
            Place of it, and its checksums.

        Raises:
            OSError: The disk is full, or gone.
        """
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
                crc32 = self._copy(part[start:stop], crc32)
                in_block += stop - start
                start = stop
                if in_block == BLOCK_NBYTES:
                    crc32s.append(crc32)
                    crc32 = in_block = 0
        if in_block:
            crc32s.append(crc32)
        return Item(offset, self.nbytes - offset, data_offset, tuple(crc32s))

    def _copy(self, part: bytes | memoryview, crc32: int) -> int:
        """Copy into the current buffer, which has room; return the checksum so far."""
        stop = self._filled + len(part)
        self._buffers[self._current][self._filled : stop] = part
        crc32 = zlib.crc32(part, crc32)
        self._filled = stop
        if stop == _BUFFER_NBYTES:
            self._flush()
        return crc32

    def _flush(self) -> None:
        """Start to write the current buffer, then wait until the other one is free."""
        nbytes, self._filled = self._filled, 0
        self._writing[self._current] = self._thread.submit(
            self._write, self._buffers[self._current], nbytes, self._flushed
        )
        self._flushed += nbytes
        self._current = 1 - self._current
        self._wait(self._current)

    def _wait(self, position: int) -> None:
        future, self._writing[position] = self._writing[position], None
        if future is not None:
            future.result()

    def _write(self, buffer: mmap.mmap, nbytes: int, offset: int) -> None:
        padded = -(-nbytes // _DISK_BLOCK_NBYTES) * _DISK_BLOCK_NBYTES
        with memoryview(buffer) as view:
            done = 0
            while done < padded:
                try:
                    done += os.pwrite(self._fd, view[done:padded], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not _use_cache(self._fd):
                        raise
        if self._report is not None:
            self._report(nbytes)

    def _finish(self) -> None:
        nbytes = self.nbytes
        self._flush()
        self._wait(1 - self._current)
        os.ftruncate(self._fd, nbytes)  # The last write was padded.
        os.fsync(self._fd)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # What file systems say that cannot do without the cache.
            raise
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # Some have made it nevertheless.
    return os.open(path, flags, 0o666)


def _use_cache(fd: int) -> bool:
    """Write through the page cache from now on; False if that is done already.

    Some file systems can do without it only in larger multiples than ours.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    if not flags & direct:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return True


class _Frame:
    """Takes what torch.save writes around the elements of a tensor."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after: bytearray | None = None

    def write(self, part: memoryview) -> int:
        """Take bytes."""
        target = self.before if self.after is None else self.after
        target += part
        return len(part)

    def seek(self, offset: int, whence: int) -> None:
        """Leave room for the elements."""
        assert whence == os.SEEK_CUR, offset
        assert self.after is None
        self.after = bytearray()

    def flush(self) -> None:
        """Do nothing: torch.save calls it."""


@functools.lru_cache(maxsize=1024)
def tensor_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return what torch.save writes before and after the elements of a contiguous tensor.

    So the elements go from the tensor's memory to the file: torch.save itself would write the whole
    storage that a piece is a view of, and compute a checksum that nobody reads.
    """
    frame = _Frame()
    with torch.serialization.skip_data():
        torch.save(without_memory(TensorInfo(shape, dtype)), frame)  # type: ignore[arg-type]
    return bytes(frame.before), bytes(frame.after or b"")


def raw_bytes(tensor: Tensor) -> memoryview | None:
    """Return the memory of a contiguous tensor on the host; None if it has none of this kind."""
    plain = type(tensor) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
    if not (plain and tensor.layout is torch.strided and tensor.device.type == "cpu"):
        return None
    if tensor.is_quantized or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return bytes_of(tensor.reshape(-1))
