"""Files of whole tensors: of torch.save, safetensors, and directories in Hugging Face's format.

`FullFile` reads any of them in parts, and `FullWriter` writes any of them tensor by tensor. Both
hold only the present part in memory.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import struct
import sys
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, Self

import torch
from torch import Tensor, UntypedStorage

from shardkit._errors import CheckpointError, MeshError, ShardedTensorError
from shardkit._params.state_dicts import holds_sharded
from shardkit._text import byte_size, listed, read_as
from shardkit._tree import iter_tensors
from shardkit.checkpoint._files.disk import (
    INCOMPLETE,
    SIZE_LIMIT,
    Source,
    TensorInfo,
    asides_in,
    bytes_of,
    fsync_directory,
    is_plain_name,
    is_sparse,
    new_aside,
    open_regular,
    read_index,
    refuse_url,
    write_synced,
)

# --- torch ----------------------------------------------------------------------------------------
#
# A file of torch.save is a zip archive: a pickle, then one uncompressed entry for each storage, in
# the order in which the pickle meets them. To write a file whose tensors are not in memory, torch
# first writes it with holes for the storages (`torch.serialization.skip_data`). The bytes and their
# checksums are then written into the holes as they arrive.

_NESTED_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Where training scripts put the model's state dict."""


class _OpenFile(Source):
    """One file to read from, open until nothing refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos, self.tied = {}, {}
        self.others: dict[str, Any] = {}
        self._fd = open_regular(path)
        self.close = weakref.finalize(self, os.close, self._fd)

    def read_at(self, offset: int, flat: Tensor) -> None:
        """Fill a 1-D contiguous tensor on the host; raise if the file is too short."""
        buffer = bytes_of(flat)
        while len(buffer):
            # One call reads 2 GiB at most.
            count = os.preadv(self._fd, [buffer], offset)
            if count == 0:
                msg = (
                    f"{self.path} ends at byte {offset}, but {len(buffer)} bytes more were "
                    f"expected: it was truncated. Fetch or write it again."
                )
                raise CheckpointError(msg)
            buffer, offset = buffer[count:], offset + count


@dataclass(frozen=True, slots=True)
class _ZipEntry:
    """Where a tensor lies in a file."""

    offset: int  # Offset of its first element, in bytes.
    strides: tuple[int, ...] | None  # Strides in elements; None: contiguous.
    is_conj: bool  # The file holds the conjugates of the values.
    is_neg: bool  # The file holds the negatives of the values.


class TorchFile(_OpenFile):
    """A saved state dict to read from: under a key, under a usual one, or alone in a file.

    A script may save tensors beside it, such as the state of random numbers.

    It is loaded once with ``weights_only=True, mmap=True``, to learn where each tensor lies. This
    executes nothing and reads no tensor. Then the mapping is dropped: its pages would count as
    memory of this process once they are read, and stay until Python collects the leftovers of
    torch.load. `beside` holds the entries beside the state dict.
    """

    def __init__(self, path: Path, key: str | None = None) -> None:
        super().__init__(path)
        self._key = key
        loaded, storages = _load(path)
        entries, self.beside = self._find(loaded)
        unnamed = [n for n, v in entries.items() if isinstance(v, Tensor) and type(n) is not str]
        if unnamed:
            msg = f"{path} has tensors under {unnamed[0]!r}, which is no name. Save a state dict."
            raise CheckpointError(msg)
        tensors = {name: v.detach() for name, v in entries.items() if isinstance(v, Tensor)}
        self.others = {n: v for n, v in entries.items() if n not in tensors}
        self.infos = {name: self._describe(name, v) for name, v in tensors.items()}
        self._places = self._locate(tensors, storages)
        first: dict[tuple[_ZipEntry, TensorInfo], str] = {}
        for name, place in self._places.items():
            of = first.setdefault((place, self.infos[name]), name)
            if of != name:
                self.tied[name] = of

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on; of a tensor that is not contiguous, whole rows are read."""
        if out.numel() == 0:
            return
        place, info = self._places[name], self.infos[name]
        if place.strides is None:
            self.read_at(place.offset + start * out.itemsize, out)
        else:
            row_numel, stop = math.prod(info.shape[1:]), start + out.numel()
            first, last = start // row_numel, -(-stop // row_numel)
            shape = (last - first, *info.shape[1:])
            span = 1 + sum((n - 1) * s for n, s in zip(shape, place.strides, strict=True))
            memory = torch.empty(span, dtype=info.dtype, device="cpu")
            self.read_at(place.offset + first * place.strides[0] * out.itemsize, memory)
            rows = memory.as_strided(shape, place.strides).reshape(-1)
            out.copy_(rows[start - first * row_numel : stop - first * row_numel])
        if place.is_conj:
            out.copy_(out.conj_physical())
        if place.is_neg:
            out.neg_()

    def _locate(
        self, tensors: Mapping[str, Tensor], storages: Sequence[UntypedStorage]
    ) -> dict[str, _ZipEntry]:
        """Return where the mapped tensors lie in the file; `storages` are all that it holds."""
        with open(self._fd, "rb", closefd=False) as file:
            entries = [(entry.begin, entry.nbytes) for entry in storage_entries(file)]
        # The file is mapped as a whole, so its storages have the order of its entries.
        mapped = sorted((each.data_ptr(), each.nbytes()) for each in storages if each.nbytes())
        entries = sorted((begin, nbytes) for begin, nbytes in entries if nbytes)
        start = mapped[0][0] - entries[0][0] if mapped and entries else 0  # Address of the file.
        is_mapped = [(begin + start, nbytes) for begin, nbytes in entries] == mapped
        whole = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        addresses = {tensor.untyped_storage().data_ptr() for tensor in whole.values()}
        is_mapped &= addresses <= {address for address, _ in mapped}
        if not is_mapped or not os.path.samestat(os.fstat(self._fd), self.path.stat()):
            msg = (
                f"{self.path} was replaced while it was opened, or torch.save did not write it. "
                f"Read it again, or load it and save it by torch.save."
            )
            raise CheckpointError(msg)
        places = {}
        for name, tensor in whole.items():
            strides = None if tensor.is_contiguous() else tensor.stride()
            offset = tensor.data_ptr() - start
            places[name] = _ZipEntry(offset, strides, tensor.is_conj(), tensor.is_neg())
        return places

    def _find(self, loaded: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
        if not isinstance(loaded, Mapping):
            msg = f"{self.path} holds a {type(loaded).__name__}, not a state dict. Save that."
            raise CheckpointError(msg)
        key = self._key
        if key is None:
            found = [k for k in _NESTED_KEYS if _has_tensors(loaded.get(k))]
            if len(found) > 1 or not (found or _has_tensors(loaded)):
                why = f"of which {found} may all be meant" if found else "and no tensors by name"
                msg = (
                    f"{self.path} holds {_listed(loaded)}, {why}. Save the model's state dict "
                    f"alone, or under the key 'model'."
                )
                raise CheckpointError(msg)
            key = next(iter(found), None)
        if key is None:
            return loaded, {}
        if not isinstance(loaded.get(key), Mapping):
            msg = f"{self.path} has no state dict under {key!r}, only {_listed(loaded)}."
            raise CheckpointError(msg)
        return loaded[key], {k: v for k, v in loaded.items() if k != key}

    def _describe(self, name: str, tensor: Tensor) -> TensorInfo:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            msg = (
                f"{self.path}: {name!r} is a sparse, quantized or meta tensor, which has no plain "
                f"elements to read. Save it as a dense one."
            )
            raise CheckpointError(msg)
        return TensorInfo.of(tensor)


def _load(path: Path) -> tuple[Any, list[UntypedStorage]]:
    """Return what a file holds, and all of its storages."""
    storages: list[UntypedStorage] = []

    def keep_on_host(storage: Any, location: str) -> Any:
        del location
        storages.append(storage)
        return storage

    try:
        _check_byte_order(path)
        loaded = torch.load(path, map_location=keep_on_host, mmap=True, weights_only=True)
    except (MeshError, ShardedTensorError) as error:
        raise _sharded_error(path) from error
    except pickle.UnpicklingError as error:
        msg = (
            f"{path} holds more than tensors and plain values, or is not a file of torch.save, and "
            f"is not read since that could execute what it says: {error}"
        )
        raise CheckpointError(msg) from error
    except Exception as error:
        msg = (
            f"{path} cannot be read as a file of torch.save: {error}. It may be truncated, or of "
            f"a torch before 1.6: then load and save it once by a newer one."
        )
        raise CheckpointError(msg) from error
    # Loading succeeds if this process has a mesh of the same shape, even for another purpose.
    if holds_sharded(loaded):
        raise _sharded_error(path)
    return loaded, storages


def _sharded_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds sharded tensors, as torch.save of a sharded model's state_dict() writes "
        f"them: only as many processes as wrote it can load it. Load it there, and write whole "
        f"tensors by shardkit.checkpoint.save_full, or local files by local_state_dict."
    )


def _check_byte_order(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            msg = "it is compressed, which torch.save never does"
            raise ValueError(msg)
        orders = [name for name in archive.namelist() if name.endswith("/byteorder")]
        if orders and archive.read(orders[0]).decode() != sys.byteorder:
            msg = "it was written on a machine of another byte order"
            raise ValueError(msg)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _listed(loaded: Mapping[str, Any]) -> str:
    shown = listed(loaded, lambda key: f"{key!r} ({type(loaded[key]).__name__})")
    return shown or "nothing"


@dataclass(slots=True)
class Extent:
    """Where the elements of a tensor that is being written lie in a file."""

    begin: int  # Offset of its first byte.
    nbytes: int  # Number of bytes.
    crc_places: tuple[int, ...] = ()  # Offsets of the checksums of these bytes.
    written: int = 0  # Number of bytes written so far.
    crc: int = 0  # Checksum of the bytes written so far.


class TensorWriter:
    """An open file to which tensors are written one after another, in parts; it closes the file."""

    def __init__(self, fd: int, extents: Mapping[Any, Extent]) -> None:
        self._fd = fd
        self._extents = extents
        self.close = weakref.finalize(self, os.close, fd)

    def append(self, name: str | int, flat: Tensor) -> None:
        """Write the next elements of a tensor: 1-D, contiguous, on the host."""
        extent, buffer = self._extents[name], bytes_of(flat)
        if extent.crc_places:
            extent.crc = zlib.crc32(buffer, extent.crc)
        while len(buffer):
            count = os.pwrite(self._fd, buffer, extent.begin + extent.written)
            extent.written += count
            buffer = buffer[count:]

    def finish(self) -> None:
        """Write checksums, flush the file to the disk and close it."""
        for name, extent in self._extents.items():
            assert extent.written == extent.nbytes, name
            for place in extent.crc_places:
                os.pwrite(self._fd, struct.pack("<I", extent.crc), place)
        os.fsync(self._fd)
        self.close()


_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def without_memory(info: TensorInfo) -> Tensor:
    """Return a contiguous tensor whose memory is never touched, so that it takes none."""
    # torch.empty would fill it if deterministic algorithms are on.
    storage = UntypedStorage(info.nbytes, device="cpu")
    empty = torch.empty(0, dtype=info.dtype, device="cpu")
    return empty.set_(storage, 0, info.shape, info.strides)


def torch_writer(
    path: Path, infos: Mapping[str, TensorInfo], arrange: Callable[[dict[str, Tensor]], Any]
) -> TensorWriter:
    """Open a file to write tensor by tensor; `arrange` makes its content of empty tensors.

    Other tensors in this content are written at once.

    Cost: writes of a header's size, and of these others. Takes address space for the tensors, but
    no memory.
    """
    for name, info in infos.items():
        if info.dtype in _QUANTIZED:
            msg = f"{name!r} has dtype {info.dtype}, which is no dtype of plain elements."
            raise CheckpointError(msg)
    empties = {name: without_memory(info) for name, info in infos.items()}
    tree = arrange(empties)
    # Not by its path: torch's own errors name neither the file nor a full disk.
    with path.open("wb") as file, torch.serialization.skip_data():
        torch.save(tree, file)
    # In pickle's order: each storage when pickle meets it for the first time.
    found = list(iter_tensors(tree, depth=0))
    sparse = next(filter(is_sparse, found), None)
    if sparse is not None:
        msg = (
            f"a tensor of shape {tuple(sparse.shape)} is sparse ({sparse.layout}), and a file of "
            f"whole tensors holds dense ones. Keep it dense in the model."
        )
        raise CheckpointError(msg)
    storages = {id(storage): storage for storage in map(Tensor.untyped_storage, found)}
    with path.open("rb") as written:
        extents = storage_entries(written)
    if len(extents) != len(storages):
        msg = (
            "an entry that is no tensor holds an object with tensors in it. Keep such tensors in "
            "dicts, lists and tuples, which can also be loaded without running code of the file."
        )
        raise CheckpointError(msg)
    entries = dict(zip(storages, extents, strict=True))
    places: dict[str | int, Extent] = {
        name: entries.pop(id(empty.untyped_storage())) for name, empty in empties.items()
    }
    assert all(places[name].nbytes == info.nbytes for name, info in infos.items())
    writer = TensorWriter(os.open(path, os.O_RDWR | os.O_CLOEXEC), places | entries)
    for key in entries:
        flat = torch.empty(0, dtype=torch.uint8, device=storages[key].device)
        writer.append(key, flat.set_(storages[key]).cpu())
    return writer


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # ..., lengths of name and extra field
_DIRECTORY_ENTRY = struct.Struct("<4s12xI8xHHH12x")  # ..., crc, lengths of name, extra, comment
_DIRECTORY_CRC = 16
_DESCRIPTOR_CRC = 4
_LOCAL_CRC = 14
_HAS_DESCRIPTOR = 0x8


def storage_entries(file: IO[bytes]) -> list[Extent]:
    """Return the entries of storages in an archive of torch.save, in their order.

    Python's zipfile knows where entries begin, but not where their checksums are.

    Raises:
        ValueError: A storage is compressed, which torch.save never does.
    """
    found: dict[int, Extent] = {}
    with zipfile.ZipFile(file) as archive:
        place = archive.start_dir
        for item in archive.infolist():
            file.seek(place)
            magic, _, *lengths = _DIRECTORY_ENTRY.unpack(file.read(_DIRECTORY_ENTRY.size))
            assert magic == b"PK\1\2"
            crc_places = [place + _DIRECTORY_CRC]
            place += _DIRECTORY_ENTRY.size + sum(lengths)
            _, folder, name = ("/" + item.filename).rsplit("/", 2)
            if folder != "data" or not name.isdecimal():
                continue
            if item.compress_type != zipfile.ZIP_STORED:
                msg = f"{item.filename} is compressed"
                raise ValueError(msg)
            file.seek(item.header_offset)
            magic, *lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            assert magic == b"PK\3\4"
            begin = item.header_offset + _LOCAL_HEADER.size + sum(lengths)
            if not item.flag_bits & _HAS_DESCRIPTOR:
                crc_places.append(item.header_offset + _LOCAL_CRC)
            elif item.file_size:
                crc_places.append(begin + item.file_size + _DESCRIPTOR_CRC)
            found[int(name)] = Extent(begin, item.file_size, tuple(crc_places))
    return [found[key] for key in sorted(found)]


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


# --- safetensors ----------------------------------------------------------------------------------
#
# Its specification: huggingface.co/docs/safetensors. The package of that name is not used, because
# it slices by dims and maps or copies whole tensors. A rank's piece is a flat range, which is read
# straight into its memory here.

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
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000  # The limit of the reference implementation.
_ALIGN_NBYTES = 8


class SafetensorsFile(_OpenFile):
    """A file to read from; only the requested ranges are read, and nothing is mapped."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        header, begin = self._read_header()
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            self._refuse(f"its __metadata__ is a {type(metadata).__name__}, not an object")
        self._offsets: dict[str, int] = {}
        room = os.fstat(self._fd).st_size - begin
        for name, entry in header.items():
            self.infos[name], offset = self._parse(name, entry, room)
            self._offsets[name] = begin + offset
        end = 0
        for offset, name in sorted((offset, name) for name, offset in self._offsets.items()):
            nbytes = self.infos[name].nbytes
            if nbytes and offset < end:  # A small file could claim any amount of memory.
                self._refuse(f"{name!r} overlaps another one at byte {offset}")
            end = max(end, offset + nbytes)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on."""
        self.read_at(self._offsets[name] + start * out.itemsize, out)

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
                type(n) is int and 0 <= n < SIZE_LIMIT for n in numbers
            )
        except (TypeError, KeyError, ValueError):
            fits = False
        if not fits:
            self._refuse(f"the entry {name!r} of its header is malformed")
        if dtype not in _DTYPES:
            self._refuse(f"{name!r} has dtype {dtype!r}, which torch has not")
        info = TensorInfo(shape, _DTYPES[dtype])
        if stop - start != info.nbytes:
            self._refuse(
                f"{name!r} of shape {shape} and dtype {dtype} takes {info.nbytes} bytes, but "
                f"the header gives it {stop - start}"
            )
        if stop > room:
            self._refuse(f"{name!r} ends at byte {stop} of the data, of which there are {room}")
        return info, start

    def _refuse(self, what: str) -> NoReturn:
        msg = f"{self.path} is no safetensors file, or was damaged: {what}. Write it again."
        raise CheckpointError(msg)


def safetensors_writer(
    path: Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> TensorWriter:
    """Open a file to write tensor by tensor; refuse dtypes that the format lacks."""
    if sys.byteorder != "little":
        msg = "safetensors files are little-endian, this machine is not. Use format='torch'."
        raise CheckpointError(msg)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    extents: dict[str, Extent] = {}
    end = 0
    # Wide dtypes first, which aligns every tensor, as in the reference implementation.
    for name in sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name)):
        info = infos[name]
        if info.dtype not in _NAMES:
            msg = (
                f"{name!r} has dtype {info.dtype}, which safetensors files cannot hold. Use "
                f"format='torch', or another dtype."
            )
            raise CheckpointError(msg)
        extents[name] = extent = Extent(end, info.nbytes)
        end += extent.nbytes
        header[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [extent.begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_NBYTES)
    begin = _LENGTH_NBYTES + len(text)
    for extent in extents.values():
        extent.begin += begin
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    writer = TensorWriter(fd, extents)
    os.pwrite(fd, len(text).to_bytes(_LENGTH_NBYTES, "little") + text, 0)
    os.ftruncate(fd, begin + end)
    return writer


# --- files of whole tensors -----------------------------------------------------------------------

Format = Literal["torch", "safetensors"]

_INDEX_SUFFIX = ".index.json"
_STEMS = {"torch": ("pytorch_model", ".bin"), "safetensors": ("model", ".safetensors")}
"""Names of weights in a Hugging Face directory."""
_SUFFIX = ".safetensors"
_FOREIGN_SUFFIXES = {"torch": (_SUFFIX,), "safetensors": (".pt", ".pth", ".bin", ".ckpt")}
"""Suffixes of other formats. Readers such as torch.load choose the format by the suffix."""


class FullFile(Source):
    """A file or directory of whole tensors, whose parts can be read.

    Args:
        path: A file of torch.save with a state dict (or one under the key ``"model"``), a
            safetensors file, an index of several (``*.index.json``), or a directory with
            ``model.safetensors``, ``pytorch_model.bin`` or an index of either.

    Attributes:
        infos: Shape and dtype of every tensor.
        tied: Names of tensors that are the same as an earlier one, with the earlier name.
        others: Entries that are no tensors.
        parts: File that holds each tensor.

    Raises:
        CheckpointError: The path is none of these, or is damaged, or a file of the index is
            missing.
    """

    kind = "whole tensors"
    world_size = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.infos, self.tied = {}, {}
        self.others: dict[str, Any] = {}
        self.parts: dict[str, Path] = {}
        self._files: dict[str, _OpenFile] = {}
        file = _find_in_directory(self.path) if self.path.is_dir() else self.path
        if not file.is_file():
            why = "is neither a file nor a directory" if file.exists() else "does not exist"
            msg = f"{file} {why}. Give a file or a directory with model.safetensors."
            raise CheckpointError(msg)
        if file.name.endswith(_INDEX_SUFFIX):
            self._add_index(file)
        else:
            opened = _open(file)
            self._add(opened, opened.infos)

    @property
    def files(self) -> list[Path]:
        """All files that hold tensors."""
        return sorted(set(self.parts.values()))

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on."""
        self._files[name].read_into(name, start, out)

    def chunks(self, name: str) -> list[dict[str, Any]]:
        """Return the file that holds a tensor."""
        return [{"file": self.parts[name].name}]

    def _add(self, file: _OpenFile, names: Iterable[str]) -> None:
        for name in names:
            self.infos[name] = file.infos[name]
            self.parts[name] = file.path
            self._files[name] = file
        self.tied.update(file.tied)
        self.others.update(file.others)

    def _add_index(self, index: Path) -> None:
        try:
            places: dict[str, str] = json.loads(read_index(index))["weight_map"]
            by_file: dict[str, list[str]] = {}
            for name, file_name in places.items():
                by_file.setdefault(file_name, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = f"{index} has no map 'weight_map' from names to files. Fetch or write it again."
            raise CheckpointError(msg) from error
        outside = [name for name in by_file if not is_plain_name(name)]
        if outside:
            msg = f"{index} names files outside of its directory: {outside}."
            raise CheckpointError(msg)
        missing = sorted(name for name in by_file if not (index.parent / name).is_file())
        if missing:
            msg = f"{index} names files that are not there: {listed(missing, str)}. Fetch them."
            raise CheckpointError(msg)
        for file_name, names in by_file.items():
            file = _open(index.parent / file_name)
            lacking = [name for name in names if name not in file.infos]
            if lacking:
                msg = f"{file.path} lacks {listed(lacking, str)}, which {index.name} places in it."
                raise CheckpointError(msg)
            self._add(file, names)


def _open(path: Path) -> _OpenFile:
    return SafetensorsFile(path) if path.suffix == _SUFFIX else TorchFile(path)


def _find_in_directory(directory: Path) -> Path:
    for stem, suffix in reversed(_STEMS.values()):
        for name in (stem + suffix, stem + suffix + _INDEX_SUFFIX):
            if (directory / name).is_file():
                return directory / name
    for pattern in (f"*{_INDEX_SUFFIX}", f"*{_SUFFIX}"):
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
    hint = (
        "It is a checkpoint directory: load it by shardkit.checkpoint.load, or make one file of it "
        "by `python -m shardkit consolidate`."
        if (directory / ".metadata").exists()
        else "Give the file itself."
    )
    msg = f"{directory} has neither model.safetensors nor pytorch_model.bin nor an index. {hint}"
    raise CheckpointError(msg)


# --- writing --------------------------------------------------------------------------------------


class FullWriter:
    """Writes whole tensors, one after another and in parts, to a file or directory.

    It is a context: the files appear under their names when the body ends, flushed to the disk; if
    the body raises, they do not appear. Parts of a tensor must come in order; tensors may come in
    any order. With `max_shard_size`, or for safetensors without their suffix, `path` is a
    directory. It must not have weights yet, and its files get the names that Hugging Face's
    libraries expect.

    Names in `tied` belong to tensors that repeat another one; they are not written themselves. A
    torch file holds them as tied, a safetensors file holds that other tensor only. One torch file
    may also have `others`, which are no tensors. `arrange` gets these and the tensors, still empty,
    by name, and returns the content of that file.
    """

    def __init__(  # noqa: PLR0913 - the content, and how it is written
        self,
        path: str | os.PathLike[str],
        infos: Mapping[str, TensorInfo],
        *,
        format: Format,  # noqa: A002 - as in the public functions
        max_shard_size: int | str | None = None,
        tied: Mapping[str, str] | None = None,
        others: Mapping[str, Any] | None = None,
        arrange: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        refuse_url(path)
        self.path = Path(path)
        self._others = dict(others or {})
        self._order = list(infos)
        self._tied = dict(tied or {})
        self._infos = {name: info for name, info in infos.items() if name not in self._tied}
        self._format = format
        self._arrange = arrange
        self._writers: list[TensorWriter] = []
        self._writer_of: dict[str, TensorWriter] = {}
        self._index: dict[Path, Any] = {}  # One at most, with its content.
        if format not in _STEMS:
            msg = f"format must be 'torch' or 'safetensors', got {format!r}."
            raise CheckpointError(msg)
        if self.path.suffix in _FOREIGN_SUFFIXES[format]:
            msg = f"{self.path} has a suffix that does not fit format={format!r}. Change either."
            raise CheckpointError(msg)
        if self._others and (format != "torch" or max_shard_size is not None):
            msg = (
                f"there are entries that are no tensors ({listed(self._others, str)}), which "
                f"{self.path} cannot hold: use format='torch' without max_shard_size."
            )
            raise CheckpointError(msg)
        self._is_directory = max_shard_size is not None or (
            format == "safetensors" and self.path.suffix != _SUFFIX
        )
        if not self._is_directory and self.path.is_dir():
            msg = f"{self.path} is a directory. Give the name of a file."
            raise CheckpointError(msg)
        self._plan = {self.path: list(self._infos)}
        if self._is_directory:
            self._plan = self._plan_directory(max_shard_size)
        # The index last, since without it the directory is no model.
        self._asides = {file: new_aside(file, INCOMPLETE) for file in (*self._plan, *self._index)}

    def __enter__(self) -> Self:
        try:
            parent = next(iter(self._plan)).parent
            parent.mkdir(parents=True, exist_ok=True)
            for aside in asides_in(parent):
                if aside.target in self._asides and aside.is_abandoned and aside.path.is_file():
                    aside.path.unlink(missing_ok=True)
            for file, names in self._plan.items():
                writer = self._make_writer(self._asides[file], names)
                self._writers.append(writer)
                self._writer_of.update(dict.fromkeys(names, writer))
        except BaseException:
            self._abandon()
            raise
        return self

    def append(self, name: str, flat: Tensor) -> None:
        """Write the next elements of a tensor: 1-D, of its dtype, on any device."""
        self._writer_of[name].append(name, flat.detach().cpu().contiguous())

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._abandon()

    def _plan_directory(self, max_shard_size: int | str | None) -> dict[Path, list[str]]:
        """Return the tensors of each file, in order, as many as fit."""
        weights = (_SUFFIX, ".bin", _INDEX_SUFFIX)
        entries = self.path.iterdir() if self.path.is_dir() else ()
        present = [entry.name for entry in entries if entry.name.endswith(weights)]
        if present:
            shown = listed(sorted(present), str)
            msg = (
                f"{self.path} has weights already ({shown}), and files of two "
                f"models would be mixed. Remove them or choose another directory."
            )
            raise CheckpointError(msg)
        limit = math.inf
        if max_shard_size is not None:
            limit = read_as(byte_size, "max_shard_size", max_shard_size, CheckpointError)
        shards: list[list[str]] = [[]]
        size = 0
        for name, info in self._infos.items():
            if shards[-1] and size + info.nbytes > limit:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += info.nbytes
        stem, suffix = _STEMS[self._format]
        if len(shards) == 1:
            return {self.path / f"{stem}{suffix}": shards[0]}
        count = len(shards)
        files = [f"{stem}-{i + 1:05d}-of-{count:05d}{suffix}" for i in range(count)]
        weight_map = {name: f for f, names in zip(files, shards, strict=True) for name in names}
        if self._format == "torch":
            weight_map |= {name: weight_map[first] for name, first in self._tied.items()}
        self._index[self.path / f"{stem}{suffix}{_INDEX_SUFFIX}"] = {
            "metadata": {"total_size": sum(info.nbytes for info in self._infos.values())},
            "weight_map": weight_map,
        }
        return {self.path / file: names for file, names in zip(files, shards, strict=True)}

    def _make_writer(self, path: Path, names: list[str]) -> TensorWriter:
        infos = {name: self._infos[name] for name in names}
        tied = {name: first for name, first in self._tied.items() if first in infos}
        if self._format == "safetensors":
            return safetensors_writer(path, infos, {"format": "pt", **tied})

        def arrange(empties: dict[str, Tensor]) -> Any:
            places = {name: tied.get(name, name) for name in self._order}
            tensors = {name: empties[of] for name, of in places.items() if of in empties}
            return tensors if self._is_directory else self._arrange({**tensors, **self._others})

        return torch_writer(path, infos, arrange)

    def _commit(self) -> None:
        for writer in self._writers:
            writer.finish()
        for file, content in self._index.items():
            write_synced(self._asides[file], f"{json.dumps(content, indent=2)}\n".encode())
        self._give_names()
        fsync_directory(next(iter(self._asides)).parent)

    def _give_names(self) -> None:
        """Rename all files; in a directory none, if another job has written one, or one fails."""
        named: list[Path] = []
        try:
            for file, aside in self._asides.items():
                if self._is_directory and _is_linked(aside, file):
                    named.append(file)
                else:
                    aside.replace(file)
        except OSError as error:
            for file in named:
                file.unlink()
            if not isinstance(error, FileExistsError):
                raise
            msg = (
                f"{self.path}: another job has written {Path(error.filename2).name!r} meanwhile, "
                f"and files of two models would be mixed. Give each job a directory of its own."
            )
            raise CheckpointError(msg) from error

    def _abandon(self) -> None:
        for writer in self._writers:
            writer.close()
        for aside in self._asides.values():
            aside.unlink(missing_ok=True)


def _is_linked(aside: Path, file: Path) -> bool:
    """Give a file another, unused name, or raise; False where there are no hard links."""
    try:
        os.link(aside, file)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True
