"""Files of `torch.save`: state dicts that are read in parts, and written tensor by tensor.

Such a file is a zip archive: a pickle, then one uncompressed entry for each storage, in the order
in which the pickle meets them. To write a file whose tensors are not in memory, torch first writes
it with holes for the storages (`torch.serialization.skip_data`). The bytes and their checksums are
then written into the holes as they arrive.
"""

from __future__ import annotations

import math
import os
import pickle
import struct
import sys
import weakref
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._errors import CheckpointError, MeshError, ShardedTensorError
from shardkit._tensor.sharded import ShardedTensor
from shardkit._text import listed
from shardkit._tree import iter_tensors
from shardkit.checkpoint._files.disk import (
    Extent,
    Source,
    TensorInfo,
    TensorWriter,
    open_regular,
    read_at,
    without_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_NESTED_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Where training scripts put the model's state dict."""


@dataclass(frozen=True, slots=True)
class _ZipEntry:
    """Where a tensor lies in a file."""

    offset: int  # Offset of its first element, in bytes.
    strides: tuple[int, ...] | None  # Strides in elements; None: contiguous.
    is_conj: bool  # The file holds the conjugates of the values.
    is_neg: bool  # The file holds the negatives of the values.


class TorchFile(Source):
    """A saved state dict to read from: under a key, under a usual name, or alone in a file.

    It is loaded once with ``weights_only=True, mmap=True``, to learn where each tensor lies. This
    executes nothing and reads no tensor. Then the mapping is dropped: its pages would count as
    memory of this process once they are read, and stay until Python collects the leftovers of
    torch.load. `beside` holds the entries beside the state dict.
    """

    def __init__(self, path: Path, key: str | None = None) -> None:
        self.path = path
        self._key = key
        self._fd = open_regular(path)
        self.close = weakref.finalize(self, os.close, self._fd)
        entries, self.beside = self._find(_load(path))
        unnamed = [n for n, v in entries.items() if isinstance(v, Tensor) and type(n) is not str]
        if unnamed:
            msg = f"{path} has tensors under {unnamed[0]!r}, which is no name. Save a state dict."
            raise CheckpointError(msg)
        tensors = {name: v.detach() for name, v in entries.items() if isinstance(v, Tensor)}
        self.others: dict[str, Any] = {n: v for n, v in entries.items() if n not in tensors}
        self.infos = {name: self._describe(name, v) for name, v in tensors.items()}
        self._places = self._locate(tensors)
        self.tied = {}
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
            read_at(self._fd, place.offset + start * out.itemsize, out, self.path)
        else:
            row_numel, stop = math.prod(info.shape[1:]), start + out.numel()
            first, last = start // row_numel, -(-stop // row_numel)
            shape = (last - first, *info.shape[1:])
            span = 1 + sum((n - 1) * s for n, s in zip(shape, place.strides, strict=True))
            memory = torch.empty(span, dtype=info.dtype)
            read_at(
                self._fd, place.offset + first * place.strides[0] * out.itemsize, memory, self.path
            )
            rows = memory.as_strided(shape, place.strides).reshape(-1)
            out.copy_(rows[start - first * row_numel : stop - first * row_numel])
        if place.is_conj:
            out.copy_(out.conj_physical())
        if place.is_neg:
            out.neg_()

    def _locate(self, tensors: Mapping[str, Tensor]) -> dict[str, _ZipEntry]:
        """Return where the mapped tensors lie in the file, from the system's list of mappings."""
        inode = os.fstat(self._fd).st_ino
        mapped = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, offset, _, number, *_ = line.split()
            if int(number) == inode:
                begin, end = (int(address, 16) for address in addresses.split("-"))
                mapped.append((begin, end, int(offset, 16)))
        places = {}
        for name, tensor in tensors.items():
            if tensor.numel() == 0:
                continue
            address = tensor.data_ptr()
            found = [address - b + offset for b, e, offset in mapped if b <= address < e]
            if not found:
                msg = f"{self.path} was replaced while it was opened. Read it again."
                raise CheckpointError(msg)
            strides = None if tensor.is_contiguous() else tensor.stride()
            places[name] = _ZipEntry(found[0], strides, tensor.is_conj(), tensor.is_neg())
        return places

    def _find(self, loaded: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
        if not isinstance(loaded, Mapping):
            msg = f"{self.path} holds a {type(loaded).__name__}, not a state dict. Save that."
            raise CheckpointError(msg)
        key = self._key
        if key is None and not _has_tensors(loaded):
            found = [k for k in _NESTED_KEYS if _has_tensors(loaded.get(k))]
            if len(found) != 1:
                msg = (
                    f"{self.path} holds no tensors by name, but {_listed(loaded)}"
                    f"{f', of which {found} may all be meant' if found else ''}. Save the "
                    f"model's state dict alone, or under the key 'model'."
                )
                raise CheckpointError(msg)
            key = found[0]
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


def _load(path: Path) -> Any:
    try:
        _check_byte_order(path)
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
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
    if _has_sharded_tensors(loaded):
        raise _sharded_error(path)
    return loaded


def _has_sharded_tensors(loaded: Any) -> bool:
    waiting, seen = [loaded], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, ShardedTensor):
            return True
        # Each value once: values that are shared at many levels would be visited far too often.
        if isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, Mapping) else value
    return False


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


# --- writing --------------------------------------------------------------------------------------


_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def torch_writer(
    path: Path,
    infos: Mapping[str, TensorInfo],
    arrange: Callable[[dict[str, Tensor]], Any],
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
    path.open("wb").close()  # torch's error would not name the file.
    empties = {name: without_memory(info) for name, info in infos.items()}
    tree = arrange(empties)
    with torch.serialization.skip_data():
        torch.save(tree, path)
    # In pickle's order: each storage when pickle meets it for the first time.
    found = iter_tensors(tree, depth=0)
    storages = {_storage_address(tensor): tensor.untyped_storage() for tensor in found}
    entries = dict(zip(storages, _storage_entries(path), strict=True))
    places: dict[str | int, Extent] = {
        name: entries.pop(_storage_address(empty)) for name, empty in empties.items()
    }
    assert all(places[name].nbytes == info.nbytes for name, info in infos.items())
    writer = TensorWriter(os.open(path, os.O_RDWR | os.O_CLOEXEC), places | entries)
    for address in entries:
        flat = torch.empty(0, dtype=torch.uint8, device=storages[address].device)
        writer.append(address, flat.set_(storages[address]).cpu())
    return writer


def _storage_address(tensor: Tensor) -> int:
    """Return what distinguishes a storage from others, also from other empty ones."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or -id(tensor)


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # ..., lengths of name and extra field
_DIRECTORY_ENTRY = struct.Struct("<4s12xI8xHHH12x")  # ..., crc, lengths of name, extra, comment
_DIRECTORY_CRC = 16
_DESCRIPTOR_CRC = 4
_LOCAL_CRC = 14
_HAS_DESCRIPTOR = 0x8


def _storage_entries(path: Path) -> list[Extent]:
    """Return the archive's entries of storages, in their order.

    Python's zipfile knows where entries begin, but not where their checksums are.
    """
    found: dict[int, Extent] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
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
            file.seek(item.header_offset)
            magic, *lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            assert magic == b"PK\3\4"
            begin = item.header_offset + _LOCAL_HEADER.size + sum(lengths)
            if not item.flag_bits & _HAS_DESCRIPTOR:
                crc_places.append(item.header_offset + _LOCAL_CRC)
            elif item.file_size:
                crc_places.append(begin + item.file_size + _DESCRIPTOR_CRC)
            found[int(name)] = Extent(begin, item.file_size, tuple(crc_places))
    return [found[i] for i in range(len(found))]
