"""Reading items of one file: into memory that is there already, verified on the way."""

from __future__ import annotations

import contextlib
import io
import math
import os
import zipfile
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp.manifest import DAMAGED
from shardkit.checkpoint._dcp.stream import raw_bytes, tensor_frame
from shardkit.checkpoint._files.bytes_io import copy_from_scratch, open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from shardkit.checkpoint._dcp.manifest import Item

_STEP_NBYTES = 1 << 19  # Read and summed while it is in the cache.
_LOCAL_HEADER_NBYTES = 30  # Of a record in a zip archive, without name and extra field.


class ItemFile:
    """An open file of a checkpoint."""

    def __init__(
        self, path: Path, block_nbytes: int, report: Callable[[int], None] | None = None
    ) -> None:
        """Open it.

        Args:
            path: The file.
            block_nbytes: Size of the blocks that have a checksum.
            report: Function that is called with the numbers of bytes that have been read.

        Raises:
            OSError: It cannot be opened.
        """
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
        """Return all bytes of an item.

        Raises:
            CheckpointError: The file ends before, or the bytes are not those written.
        """
        content = bytearray(item.nbytes)
        self.read_into(item, 0, memoryview(content), name)
        return content

    def read_into(self, item: Item, start: int, target: memoryview, name: str) -> None:
        """Read bytes of an item, from `start` on, and all other bytes of their blocks.

        Args:
            item: Place of it, and its checksums. Without any nothing is verified.
            start: Counted from the item's begin.
            target: Memory for the bytes.
            name: Name of the entry, for errors.

        Raises:
            CheckpointError: The file ends before, or the bytes are not those written.
        """
        stop = start + len(target)
        if not item.crc32s:
            self._read_run(item.offset + start, [target], 0, name)
            return
        for begin, end, crc32 in item.blocks(self._block_nbytes):
            if begin >= stop or end <= start:
                continue
            low, high = max(begin, start), min(end, stop)
            before, after = bytearray(low - begin), bytearray(end - high)
            parts = [memoryview(before), target[low - start : high - start], memoryview(after)]
            found = self._read_run(item.offset + begin, parts, 0, name)
            if found != crc32:
                msg = (
                    f"{self.path}: {name!r}: bytes {item.offset + begin} to {item.offset + end} "
                    f"are not what was written (checksum {found:08x}, expected {crc32:08x}). "
                    f"{DAMAGED}"
                )
                raise CheckpointError(msg)

    def _read_run(self, offset: int, parts: list[memoryview], crc32: int, name: str) -> int:
        """Fill the parts from one run of bytes; return their checksum."""
        nbytes = sum(map(len, parts))
        if nbytes <= _STEP_NBYTES and os.preadv(self._fd, parts, offset) == nbytes:
            for part in parts:
                crc32 = zlib.crc32(part, crc32)
            if self._report is not None and nbytes:
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
            if self._report is not None and done:
                self._report(done)
        return crc32

    # --- tensors --------------------------------------------------------------------------------

    def located(self, item: Item, dtype: torch.dtype, shape: Sequence[int]) -> Item:
        """Find where elements begin in an item of DCP, which says so nowhere.

        Returns:
            The item; with `data_offset` if it holds just one contiguous tensor, as expected.
        """
        try:
            archive: Any = Slice(self._fd, item.offset, item.nbytes)
            with torch.serialization.skip_data():
                described = torch.load(archive, weights_only=True, map_location="cpu")
            with zipfile.ZipFile(archive) as records:
                (record,) = (r for r in records.infolist() if "/data/" in r.filename)
            head = os.pread(self._fd, _LOCAL_HEADER_NBYTES, item.offset + record.header_offset)
        except Exception:  # noqa: BLE001 - whatever it is, torch.load will say it.
            return item
        plain = (
            raw_bytes(described) is not None
            and (described.dtype, tuple(described.shape)) == (dtype, tuple(shape))
            and described.storage_offset() == 0
            and record.compress_type == zipfile.ZIP_STORED
            and record.file_size == math.prod(shape) * dtype.itemsize
        )
        if not plain:
            return item
        skipped = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        return replace(item, data_offset=record.header_offset + _LOCAL_HEADER_NBYTES + skipped)

    def check_frame(self, item: Item, dtype: torch.dtype, shape: Sequence[int], name: str) -> None:
        """Look whether an item is a tensor of a dtype and a shape, if it has a `data_offset`.

        Raises:
            CheckpointError: It is something else.

        Cost: a read of some hundred bytes.
        """
        if item.data_offset is None:
            return
        with contextlib.suppress(Exception):  # Not every dtype has such a frame.
            before, _ = tensor_frame(dtype, tuple(shape))
            found = os.pread(self._fd, len(before), item.offset)
            if item.data_offset == len(before) and found == before:
                return
        # Another release of torch frames it in another way.
        if self.located(replace(item, data_offset=None), dtype, shape) != item:
            msg = (
                f"{self.path}: {name!r} is no tensor of {dtype} and shape {tuple(shape)}. {DAMAGED}"
            )
            raise CheckpointError(msg)

    def check(self, item: Item, dtype: torch.dtype, shape: Sequence[int], name: str) -> None:
        """Look whether an item is a tensor of a dtype and a shape, whatever it takes.

        Raises:
            CheckpointError: It is something else.
        """
        self.check_frame(item, dtype, shape, name)
        if item.data_offset is None:
            self.load(item, dtype, shape, name)

    def load(self, item: Item, dtype: torch.dtype, shape: Sequence[int], name: str) -> Tensor:
        """Return the tensor that torch.save wrote.

        Raises:
            CheckpointError: It holds anything else; nothing of it has been executed.
        """
        content: Any = io.BytesIO(self.read(item, name))
        try:
            loaded = torch.load(content, weights_only=True, map_location="cpu")
        except Exception as error:
            msg = f"{self.path}: {name!r} cannot be read: {error}"
            raise CheckpointError(msg) from error
        if not isinstance(loaded, torch.Tensor):
            msg = f"{self.path}: {name!r}: expected a tensor, found {type(loaded).__name__}."
            raise CheckpointError(msg)
        if (loaded.dtype, tuple(loaded.shape)) != (dtype, tuple(shape)):
            msg = (
                f"{self.path}: {name!r} has shape {tuple(loaded.shape)} and {loaded.dtype}, "
                f"expected {tuple(shape)} and {dtype}. {DAMAGED}"
            )
            raise CheckpointError(msg)
        return loaded

    def read_box(self, item: Item, box: ChunkBox, target: Tensor, name: str) -> None:
        """Read a box of a saved chunk.

        Args:
            item: Item with a `data_offset`.
            box: Range of elements, and their dtype.
            target: Tensor for them: of the box's shape; any dtype, device and strides.
            name: Name of the entry, for errors.

        Raises:
            CheckpointError: The file ends before, or the bytes are not those written.

        Cost: memory for the box's range of the chunk, unless its elements can go where they belong.
        """
        assert item.data_offset is not None
        start, stop = box.flat_range
        begin = item.data_offset + start * box.dtype.itemsize
        memory = raw_bytes(target) if target.dtype == box.dtype else None
        if memory is not None and stop - start == target.numel():
            self.read_into(item, begin, memory, name)
            torch.autograd.graph.increment_version(target)
            return
        run = torch.empty(stop - start, dtype=box.dtype)
        memory = raw_bytes(run)
        assert memory is not None
        self.read_into(item, begin, memory, name)
        copy_from_scratch(target, run.as_strided(tuple(box.lengths), box.strides))


class ChunkBox:
    """A box of elements in a chunk that was saved row after row.

    Attributes:
        lengths: Shape of it.
        strides: Strides of the chunk, in elements.
        flat_range: Range from its first element to after its last one, in the flattened chunk.
    """

    def __init__(
        self,
        chunk: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """Take the chunk's shape, and where the box begins in it."""
        self.lengths = tuple(lengths)
        self.dtype = dtype
        self.strides = tuple(math.prod(chunk[dim + 1 :]) for dim in range(len(chunk)))
        start = sum(o * stride for o, stride in zip(offsets, self.strides, strict=True))
        if 0 in self.lengths:
            self.flat_range = (start, start)
        else:
            last = sum((n - 1) * s for n, s in zip(self.lengths, self.strides, strict=True))
            self.flat_range = (start, start + last + 1)


class Slice(io.RawIOBase):
    """A range of an open file, read-only, as a file of its own."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        super().__init__()
        self._fd, self._offset, self._nbytes, self._position = fd, offset, nbytes, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the position in the range."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move in the range."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read as much as there is."""
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        got = os.preadv(self._fd, [view], self._offset + self._position) if view else 0
        self._position += got
        return got
