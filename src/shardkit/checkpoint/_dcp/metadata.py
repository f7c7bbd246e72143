"""Reading `.metadata`, DCP's description of a checkpoint, without executing what it contains.

The file is a pickle, and a pickle is a program. Only classes and constants that DCP itself writes
there are known to the unpickler of this module: whatever else a file asks for is an error.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import math
import pickle
import reprlib
from pathlib import Path
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardkit import _compat
from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.disk import is_plain_name, read_index, reading

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

METADATA_FILE = ".metadata"
"""Its name in a checkpoint's directory."""

_MEMORY_FORMAT: Any = _compat.dcp_memory_format()
_STORAGE_INFO: Any = _compat.dcp_storage_info()
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
_BUILT = {*_CLASSES} - {_MEMORY_FORMAT}
"""Classes whose instances have a state in a pickle."""
_LIMIT = 1 << 62  # Of sizes and offsets: sums of a few of them fit the system's numbers.
_PACKED = 64  # Values at most in the bytes of one: tensors of classes that pack them.
_SMALL_NBYTES = 1 << 20
_MAX_LEN = 100  # Of tuples: shapes, and the keys that lead to an entry; of an object's fields.
_MAX_PATH = 1 << 16
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


class ForeignPickleError(pickle.UnpicklingError):
    """A pickle asks for something that DCP does not write."""


_KNOWN_OPCODES: Any = pickle._Unpickler.dispatch  # noqa: SLF001


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 - its opcodes can be chosen
    """Knows DCP's classes only, and makes nothing that is far more than the pickle's own size.

    A value of a pickle may refer to others, any number of times. So a tuple could stand for more
    than there is memory or time: to hash one takes as long as all that it stands for, and if it is
    nested deep all of the stack. None is long here, or nested but as arguments are.
    """

    stack: Any
    _file_read: Any
    _file_readline: Any

    def load(self) -> Any:
        """Return what the pickle describes.

        Frames say how much to read at once. All of it is in memory, so they are passed over, and no
        function stands between an opcode and its bytes: it takes a quarter less time.
        """
        self.read, self.readline = self._file_read, self._file_readline
        self.metastack: list[Any] = []
        self.stack = []
        self.append = self.stack.append
        self.proto = 0
        opcodes: Any = self.dispatch
        try:
            while opcode := self._file_read(1):
                opcodes[opcode[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]  # noqa: SLF001
            return stop.value
        raise EOFError

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

    def load_reduce(self) -> None:
        called = self.stack[-2]
        if called is not _MEMORY_FORMAT and not isinstance(called, _Function):
            msg = f"it calls what is {type(called).__name__}"
            raise ForeignPickleError(msg)
        _KNOWN_OPCODES[pickle.REDUCE[0]](self)

    def load_build(self) -> None:
        state, built = self.stack[-1], self.stack[-2]
        if type(built) not in _BUILT:  # Classes are this process' own.
            msg = f"it sets attributes of {getattr(built, '__name__', type(built).__name__)}"
            raise ForeignPickleError(msg)
        is_index = isinstance(built, dcp.MetadataIndex)
        if len(state) > _MAX_LEN or (is_index and not _is_index(state)):  # Indices are hashed.
            msg = "it has a state that is none of a description"
            raise ForeignPickleError(msg)
        _KNOWN_OPCODES[pickle.BUILD[0]](self)


def _checked(load_tuple: Callable[[Any], None]) -> Callable[[Any], None]:
    def load(unpickler: _Unpickler) -> None:
        load_tuple(unpickler)
        made = unpickler.stack[-1]
        if len(made) > _MAX_LEN:
            msg = f"it has a tuple of {len(made)} values"
            raise ForeignPickleError(msg)
        for each in made:
            if type(each) is tuple and (len(made) > 1 or any(type(e) is tuple for e in each)):
                msg = "it has tuples of tuples"
                raise ForeignPickleError(msg)

    return load


class _Opcodes(dict[int, Any]):
    def __missing__(self, opcode: int) -> Any:
        msg = f"opcode {opcode} is none of a description"
        raise ForeignPickleError(msg)


def _opcodes() -> _Opcodes:
    """Return the opcodes that DCP has written in any of its releases."""
    known = _KNOWN_OPCODES
    plain = (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE),
        *(pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
        *(pickle.BINFLOAT, pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.SHORT_BINUNICODE),
        *(pickle.BINUNICODE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET),
        *(pickle.LONG_BINGET, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.APPEND),
        *(pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_SET),
        *(pickle.ADDITEMS, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ),
    )
    tuples = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    found = _Opcodes({opcode[0]: known[opcode[0]] for opcode in plain})
    found.update({opcode[0]: _checked(known[opcode[0]]) for opcode in tuples})
    found[pickle.FRAME[0]] = lambda unpickler: unpickler.read(8)
    found[pickle.REDUCE[0]] = _Unpickler.load_reduce
    found[pickle.BUILD[0]] = _Unpickler.load_build
    return found


_Unpickler.dispatch = _opcodes()


def _is_index(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and set(state) <= {"fqn", "offset", "index"}
        and isinstance(state.get("fqn"), str)
        and isinstance(state.get("offset"), (torch.Size, NoneType))
        and isinstance(state.get("index"), (int, NoneType))
    )


class _Function:
    """A function that a pickle may call, and nothing else: it has no attributes to be set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: object) -> Any:
        return self._call(*args)


def _join(*parts: object) -> str:
    if not all(isinstance(part, str) and len(part) <= _MAX_PATH for part in parts):
        msg = "it has a path that is none"
        raise ForeignPickleError(msg)
    return "/".join(map(str, parts))[:_MAX_PATH]


def _size(values: object) -> torch.Size:
    if not isinstance(values, tuple):
        msg = f"it makes a size of what is {type(values).__name__}"
        raise ForeignPickleError(msg)
    return torch.Size(values)


def _layout(name: object) -> torch.layout:
    for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged):
        if str(layout) == name:
            return layout
    msg = f"it asks for the layout {reprlib.repr(name)}"
    raise ForeignPickleError(msg)


def _memory_format(cls: Any, member: Any) -> Any:
    if cls is not _MEMORY_FORMAT:
        msg = f"it asks for {reprlib.repr(member)} of {reprlib.repr(cls)}"
        raise ForeignPickleError(msg)
    return _MEMORY_FORMAT[member]


_KNOWN: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__name__): cls for cls in _CLASSES},
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    # How some releases of Python pickle the member of an enum.
    ("builtins", "getattr"): _memory_format,
}


def parse_metadata(content: bytes, path: os.PathLike[str] | str) -> dcp.Metadata:
    """Return what the bytes of a `.metadata` file describe; execute nothing.

    Args:
        content: The whole file.
        path: Name in errors.

    Raises:
        CheckpointError: It is not a pickle, asks for anything that DCP does not write, or
            describes no checkpoint.
    """
    remedy = "The file is damaged or foreign: load another checkpoint."
    try:
        with _without_collections():
            found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:
        msg = f"{Path(path)}: not a DCP metadata pickle: {error}. {remedy}"
        raise CheckpointError(msg) from error
    with reading(path):
        problem = _problem(found)
    if problem:
        msg = f"{Path(path)}: {problem}. {remedy}"
        raise CheckpointError(msg)
    metadata: dcp.Metadata = found
    return metadata


def metadata_content(directory: Path) -> bytes:
    """Return what is in `.metadata` of a checkpoint."""
    file = directory / METADATA_FILE
    try:
        return read_index(file)
    except OSError as error:
        msg = (
            f"{file}: {error.strerror or error}. A checkpoint directory holds this file once it is "
            f"complete: give the path of a complete one."
        )
        raise CheckpointError(msg) from error


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage again and again while many objects are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
        return f"{reprlib.repr(index)} is not stored in a file"
    file = where.relative_path
    # A name with a directory in it could point anywhere.
    if not is_plain_name(file):
        return f"{index.fqn!r} is stored in {reprlib.repr(file)}, expected a file of this directory"
    if not _are_sizes((where.offset, where.length)):
        place = reprlib.repr((where.offset, where.length))
        return f"{index.fqn!r} is stored at offset and length {place}"
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
