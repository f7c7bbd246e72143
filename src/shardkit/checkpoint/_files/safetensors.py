"""The safetensors format: 8 bytes, a JSON header, raw tensors. Read in parts, written in order.

Its specification: huggingface.co/docs/safetensors. Read and written here rather than by the package
of that name, because that slices by dims and maps or copies whole tensors: a rank's piece is a flat
range, which is read straight into its memory.
"""

from __future__ import annotations

import json
import math
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.bytes_io import (
    Source,
    TensorInfo,
    info_nbytes,
    open_regular,
    read_at,
    write_at,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000
"""The limit of the reference implementation."""
_ALIGN_NBYTES = 8


class SafetensorsFile(Source):
    """A file to read from. Only what is asked for is read; nothing is mapped.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is not such a file, it was truncated, or has a dtype unknown here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tied, self.others = {}, {}
        self._fd = open_regular(path)
        self.close = weakref.finalize(self, os.close, self._fd)
        header, begin = self._read_header()
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            self._refuse(f"its __metadata__ is a {type(metadata).__name__}, not an object")
        self.metadata: dict[str, str] = metadata
        self.infos = {}
        self._offsets: dict[str, int] = {}
        room = os.fstat(self._fd).st_size - begin
        for name, entry in header.items():
            self.infos[name], offset = self._parse(name, entry, room)
            self._offsets[name] = begin + offset
        end = 0
        for offset, name in sorted((offset, name) for name, offset in self._offsets.items()):
            nbytes = info_nbytes(self.infos[name])
            if nbytes and offset < end:  # One file would stand for any amount of memory.
                self._refuse(f"{name!r} overlaps another one at byte {offset}")
            end = max(end, offset + nbytes)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on."""
        read_at(self._fd, self._offsets[name] + start * out.itemsize, out, self.path)

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, _LENGTH_NBYTES, 0), "little")
        begin = _LENGTH_NBYTES + length
        if size < _LENGTH_NBYTES or length > _MAX_HEADER_NBYTES or begin > size:
            self._refuse(f"its header would end at byte {begin}, the file at {size}")
        try:
            header = json.loads(os.pread(self._fd, length, _LENGTH_NBYTES))
        except (ValueError, RecursionError) as error:
            self._refuse(f"its header is no JSON ({error})")
        if not isinstance(header, dict):
            self._refuse(f"its header is a {type(header).__name__}, not an object")
        return header, begin

    def _parse(self, name: str, entry: Any, room: int) -> tuple[TensorInfo, int]:
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            start, stop = entry["data_offsets"]
            numbers = (*shape, start, stop)
            fits = isinstance(dtype, str) and all(
                type(n) is int and 0 <= n < 2**62 for n in numbers
            )
        except (TypeError, KeyError, ValueError):
            fits = False
        if not fits:
            self._refuse(f"the entry {name!r} of its header is malformed")
        if dtype not in _DTYPES:
            self._refuse(f"{name!r} has dtype {dtype!r}, which torch has not")
        info = TensorInfo(shape, _DTYPES[dtype])
        if stop - start != info_nbytes(info):
            self._refuse(
                f"{name!r} of shape {shape} and dtype {dtype} takes {info_nbytes(info)} bytes, but "
                f"the header gives it {stop - start}"
            )
        if stop > room:
            self._refuse(f"{name!r} ends at byte {stop} of the data, of which there are {room}")
        return info, start

    def _refuse(self, what: str) -> NoReturn:
        msg = f"{self.path} is no safetensors file, or was damaged: {what}. Write it again."
        raise CheckpointError(msg)


class SafetensorsWriter:
    """A file to write tensor after tensor; see `checkpoint._files.full.FullWriter` for the rules.

    Args:
        path: The file, overwritten.
        infos: Shape and dtype of every tensor that will come.
        metadata: Text by name, for the header.

    Raises:
        CheckpointError: The format lacks a dtype, or this machine is big-endian.
    """

    def __init__(
        self, path: Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]
    ) -> None:
        if sys.byteorder != "little":
            msg = "safetensors files are little-endian, this machine is not. Use format='torch'."
            raise CheckpointError(msg)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        self._offsets: dict[str, int] = {}
        end = 0
        # Wide dtypes first, so that every tensor is aligned, as the reference implementation does.
        for name in sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name)):
            info = infos[name]
            if info.dtype not in _NAMES:
                msg = (
                    f"{name!r} has dtype {info.dtype}, which safetensors files cannot hold. Use "
                    f"format='torch', or another dtype."
                )
                raise CheckpointError(msg)
            stop = end + math.prod(info.shape) * info.dtype.itemsize
            header[name] = {
                "dtype": _NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [end, stop],
            }
            self._offsets[name], end = end, stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGN_NBYTES)
        begin = _LENGTH_NBYTES + len(text)
        self._offsets = {name: begin + offset for name, offset in self._offsets.items()}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._fd)
        os.pwrite(self._fd, len(text).to_bytes(_LENGTH_NBYTES, "little") + text, 0)
        os.ftruncate(self._fd, begin + end)

    def append(self, name: str, flat: Tensor) -> None:
        """Write the next elements of a tensor: 1-D, contiguous, on the host."""
        write_at(self._fd, self._offsets[name], flat)
        self._offsets[name] += flat.nbytes

    def finish(self) -> None:
        """Flush the file to the disk and close it."""
        os.fsync(self._fd)
        self._close()

    def abandon(self) -> None:
        """Close the file."""
        self._close()
