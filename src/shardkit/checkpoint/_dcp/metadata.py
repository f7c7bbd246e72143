"""Reading `.metadata`, DCP's description of a checkpoint, without executing what it contains.

The file is a pickle, and a pickle is a program. Only classes and constants that DCP itself writes
there are known to the unpickler of this module: whatever else a file asks for is an error.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import pickletools
import re
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardkit import _compat_checkpoints
from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.bytes_io import is_plain_name, read_index, reading

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

METADATA_FILE = ".metadata"
"""Its name in a checkpoint's directory."""

_MEMORY_FORMAT: Any = _compat_checkpoints.dcp_memory_format()
_STORAGE_INFO: Any = _compat_checkpoints.dcp_storage_info()
_CLASSES: tuple[type[Any], ...] = (
    dcp.Metadata,
    dcp.TensorStorageMetadata,
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.TensorProperties,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    _MEMORY_FORMAT,
    _STORAGE_INFO,
)
_LIMIT = 1 << 62  # Of sizes and offsets: sums of a few of them fit the system's numbers.
_PACKED = 64  # Values at most in the bytes of one: tensors of classes that pack them.
_SMALL_NBYTES = 1 << 20
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


_STOP, _LONG_BINPUT = "STOP", "LONG_BINPUT"


def _runs() -> re.Pattern[bytes]:
    """Return what matches opcodes whose arguments have a length of their own."""
    codes: dict[int, bytes] = {}
    for opcode in pickletools.opcodes:
        nbytes = 0 if opcode.arg is None else opcode.arg.n
        if nbytes >= 0 and opcode.name not in {_STOP, _LONG_BINPUT}:
            codes[nbytes] = codes.get(nbytes, b"") + opcode.code.encode("latin-1")
    each = (b"[" + re.escape(found) + b"]" + b"." * n for n, found in sorted(codes.items()))
    return re.compile(b"(?:" + b"|".join(each) + b")*+", re.DOTALL)


_RUNS = _runs()
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_COUNTS = {  # Bytes of the number that says how long an argument is.
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _check_opcodes(content: bytes) -> None:
    """Refuse a pickle that takes more memory than its own size lets one expect.

    What is remembered goes into a list, in which an opcode may name a place far behind its end.

    Raises:
        ForeignPickleError: It does, or an opcode is unknown or reaches beyond the end.
    """
    position, end = 0, len(content)
    while position < end:
        position = _RUNS.match(content, position).end()  # type: ignore[union-attr]
        opcode = _OPCODES.get(content[position]) if position < end else None
        if opcode is None:
            break
        if opcode.name == _STOP:
            return
        position += 1
        if opcode.name == _LONG_BINPUT:
            place = int.from_bytes(content[position : position + 4], "little")
            if place > position:
                break
            position += 4
        elif opcode.arg.n in _COUNTS:  # type: ignore[union-attr]
            count = _COUNTS[opcode.arg.n]  # type: ignore[union-attr]
            position += count + int.from_bytes(content[position : position + count], "little")
        elif opcode.name == "GLOBAL":
            for _ in range(2):
                position = (content.find(b"\n", position) + 1) or end + 1
        else:  # Of protocol 0, which DCP has never written.
            break
    msg = f"no opcode of a description at byte {min(position, end)} of {end}"
    raise ForeignPickleError(msg)


class ForeignPickleError(pickle.UnpicklingError):
    """A pickle asks for something that DCP does not write."""


class _Unpickler(pickle.Unpickler):
    """Knows DCP's classes only."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            # Made anew for each pickle, which may write to it.
            return _Function(known) if isinstance(known, FunctionType) else known
        if module.startswith("pathlib") and name in _PATHS:
            return _Function(_join)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        msg = f"it asks for {module}.{name}"
        raise ForeignPickleError(msg)


class _Function:
    """A function that a pickle may call, and nothing else: it has no attributes to be set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: object) -> Any:
        return self._call(*args)


def _join(*parts: object) -> str:
    return "/".join(map(str, parts))


def _layout(name: object) -> torch.layout:
    for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged):
        if str(layout) == name:
            return layout
    msg = f"it asks for the layout {name!r}"
    raise ForeignPickleError(msg)


def _memory_format(cls: Any, member: Any) -> Any:
    if cls is not _MEMORY_FORMAT:
        msg = f"it asks for {member!r} of {cls!r}"
        raise ForeignPickleError(msg)
    return _MEMORY_FORMAT[member]


_KNOWN: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__name__): cls for cls in _CLASSES},
    **{("builtins", kind.__name__): kind for kind in (dict, list, tuple, set, frozenset)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    # How some releases of Python pickle the member of an enum.
    ("builtins", "getattr"): _memory_format,
}


def parse_metadata(content: bytes, path: os.PathLike[str] | str) -> dcp.Metadata:
    """Return what the bytes of a `.metadata` file describe; execute nothing.

    Args:
        content: The whole file.
        path: Names it in errors.

    Raises:
        CheckpointError: It is not a pickle, asks for anything that DCP does not write, or
            describes no checkpoint.
    """
    remedy = "The file is damaged or foreign: load another checkpoint."
    before = [dict(vars(cls)) for cls in _CLASSES]
    try:
        _check_opcodes(content)
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:
        msg = f"{Path(path)}: not a DCP metadata pickle: {error}. {remedy}"
        raise CheckpointError(msg) from error
    finally:
        # A pickle may also set attributes of the classes that it is given.
        changed = _restore(before)
    if changed:
        msg = f"{Path(path)}: it sets attributes of {', '.join(changed)}. {remedy}"
        raise CheckpointError(msg)
    with reading(path):
        problem = _problem(found)
    if problem:
        msg = f"{Path(path)}: {problem}. {remedy}"
        raise CheckpointError(msg)
    metadata: dcp.Metadata = found
    return metadata


def read_metadata(path: os.PathLike[str] | str) -> dcp.Metadata:
    """Read `.metadata` of a checkpoint, shardkit's or another of torch.distributed.checkpoint.

    Args:
        path: The checkpoint's directory, or the file itself.

    Raises:
        CheckpointError: There is none, or see `parse_metadata`.
    """
    file = Path(path)
    if file.is_dir():
        file /= METADATA_FILE
    try:
        content = read_index(file)
    except OSError as error:
        msg = (
            f"{file}: {error.strerror or error}. A checkpoint directory holds this file once it is "
            f"complete: give the path of a complete one."
        )
        raise CheckpointError(msg) from error
    return parse_metadata(content, file)


def _restore(before: list[dict[str, Any]]) -> list[str]:
    """Give the known classes the attributes that they had; name those that had others."""
    changed = []
    for cls, attributes in zip(_CLASSES, before, strict=True):
        now = dict(vars(cls))
        # `is`: an attribute's own comparison is not to be trusted.
        names = {n for n in now.keys() | attributes.keys() if now.get(n) is not attributes.get(n)}
        for name in names:
            if name in attributes:
                setattr(cls, name, attributes[name])
            else:
                delattr(cls, name)
        if names:
            changed.append(cls.__name__)
    return changed


def _problem(found: Any) -> str:
    """Say what is wrong with unpickled metadata; empty if nothing is."""
    if not isinstance(found, dcp.Metadata):
        return f"expected DCP's Metadata, found {type(found).__name__}"
    entries: Any = found.state_dict_metadata
    stored: Any = found.storage_data
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        return "expected entries and storage by name, found none"
    for name, entry in entries.items():
        if not isinstance(name, str) or not _is_entry(entry):
            return f"entry {name!r} describes neither a tensor nor bytes"
    problems = itertools.chain(
        (_problem_stored(index, where) for index, where in stored.items()),
        (_problem_entry(name, entry, stored) for name, entry in entries.items()),
    )
    problem = next(filter(None, problems), "")
    paths = found.planner_data
    if not problem and isinstance(paths, dict) and not all(map(_is_path, paths.values())):
        return "it does not say where its entries stood"
    return problem


def _problem_entry(name: str, entry: Any, stored: dict[Any, Any]) -> str:
    """Say why an entry cannot be read from where it is stored."""
    is_tensor = isinstance(entry, dcp.TensorStorageMetadata)
    offsets = [chunk.offsets for chunk in entry.chunks] if is_tensor else [None]
    indices = [dcp.MetadataIndex(name, each) for each in offsets]
    if any(index not in stored for index in indices):
        return f"{name!r} is listed but stored nowhere"
    if not is_tensor:
        return ""
    uncovered = _uncovered(entry.size, entry.chunks)
    if uncovered:
        return f"{name!r} of shape {tuple(entry.size)}: {uncovered}"
    nbytes = math.prod(entry.size) * entry.properties.dtype.itemsize
    stored_nbytes = sum(stored[index].length for index in indices)
    is_dense = entry.properties.layout is torch.strided
    if is_dense and nbytes > _PACKED * stored_nbytes + _SMALL_NBYTES:
        return f"{name!r} would take {nbytes} bytes, and {stored_nbytes} are stored"
    return ""


def _uncovered(size: torch.Size, chunks: list[dcp.ChunkStorageMetadata]) -> str:
    """Say why chunks are not a tensor cut into parts; empty if they are."""
    boxes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in chunks}
    volume = 0
    for offsets, lengths in boxes.items():
        if any(o + n > whole for o, n, whole in zip(offsets, lengths, size, strict=True)):
            return f"a chunk of shape {lengths} at {offsets} lies beyond it"
        volume += math.prod(lengths)
    if volume != math.prod(size):
        return f"its chunks have {volume} of its {math.prod(size)} elements"
    if len(boxes) == 1:
        return ""
    # As many as there are: so there is a hole if two overlap. One dim is swept.
    swept = max(range(len(size)), key=lambda dim: len({offsets[dim] for offsets in boxes}))
    live: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for box in sorted(boxes.items(), key=lambda box: box[0][swept]):
        offsets, lengths = box
        if 0 in lengths:
            continue
        live = [other for other in live if other[0][swept] + other[1][swept] > offsets[swept]]
        for begins, sizes in live:
            bounds = zip(offsets, lengths, begins, sizes, strict=True)
            if all(o < begin + n and begin < o + length for o, length, begin, n in bounds):
                return f"its chunks at {begins} and {offsets} overlap"
        live.append(box)
    return ""


def _is_path(path: Any) -> bool:
    return isinstance(path, (tuple, list)) and all(isinstance(key, (str, int)) for key in path)


def _problem_stored(index: Any, where: Any) -> str:
    if not isinstance(index, dcp.MetadataIndex) or not isinstance(where, _STORAGE_INFO):
        return f"{index!r} is not stored in a file"
    file = where.relative_path
    # A name with a directory in it could point anywhere.
    if not is_plain_name(file):
        return f"{index.fqn!r} is stored in {file!r}, expected a file of this directory"
    if not _are_sizes((where.offset, where.length)):
        return f"{index.fqn!r} is stored at {where.offset!r} with length {where.length!r}"
    return ""


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, dcp.BytesStorageMetadata):
        return True
    return (
        isinstance(entry, dcp.TensorStorageMetadata)
        and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        and _are_sizes(entry.size)
        and all(_is_chunk(chunk, len(entry.size)) for chunk in entry.chunks)
    )


def _is_chunk(chunk: Any, ndim: int) -> bool:
    return (
        isinstance(chunk, dcp.ChunkStorageMetadata)
        and _are_sizes(chunk.offsets)
        and _are_sizes(chunk.sizes)
        and len(chunk.offsets) == len(chunk.sizes) == ndim
    )


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, tuple):
        return False
    for value in values:  # noqa: SIM110 - half the time of all()
        if not isinstance(value, int) or not 0 <= value < _LIMIT:
            return False
    return True
