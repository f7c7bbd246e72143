"""Reading `.metadata`, DCP's description of a checkpoint, which is checked before it is used."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pickle
import random
import reprlib
import struct
from collections import defaultdict
from pathlib import Path
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardkit._compat import torch_checkpoints
from shardkit._compat.collector import collector_paused
from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.disk import SIZE_LIMIT, is_plain_name, reading

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable


METADATA_FILE = ".metadata"  # Name of the description in a checkpoint's directory.

_STORAGE_INFO: Any = torch_checkpoints.dcp_storage_info()
_MAX_DEPTH = 100  # Number of keys at most that lead to an entry.
_CHUNK_NBYTES = 32  # At least for each chunk's description: entries do not share lists of chunks.
_PACKED = 64  # Values at most in the bytes of one, for classes that pack values.
_SMALL_NBYTES = 1 << 20
# It has its own seed, so that nobody can predict its numbers and the user's numbers stay the same.
_random_place = functools.partial(random.Random().getrandbits, 64)  # noqa: S311 - not shown


def parse_metadata(content: bytes, path: os.PathLike[str] | str) -> dcp.Metadata:
    """Return what the bytes of a `.metadata` file describe; execute nothing."""
    remedy = "The file is damaged or foreign: load another checkpoint."
    try:
        with collector_paused():  # It would run again and again while many objects are made.
            found = unpickle(content)
    except Exception as error:
        msg = f"{Path(path)}: not a DCP metadata pickle: {error}. {remedy}"
        raise CheckpointError(msg) from error
    with reading(path):
        problem = _problem(found, len(content))
    if problem:
        msg = f"{Path(path)}: {problem}. {remedy}"
        raise CheckpointError(msg)
    metadata: dcp.Metadata = found
    return metadata


def _problem(found: Any, nbytes: int) -> str:
    """Return what is wrong with unpickled metadata; empty if nothing is."""
    if not isinstance(found, dcp.Metadata):
        return f"expected DCP's Metadata, found {type(found).__name__}"
    entries: Any = found.state_dict_metadata
    stored: Any = found.storage_data
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        return "expected entries and storage by name, found none"
    num_chunks = 0
    for name, entry in entries.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            num_chunks += len(entry.chunks)
            if num_chunks * _CHUNK_NBYTES > nbytes:
                return "it has more chunks than it describes"
        if not isinstance(name, str) or not _is_entry(entry):
            return f"entry {shown(name)} describes neither a tensor nor bytes"
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
    """Return why an entry cannot be read from where it is stored; empty if it can."""
    is_tensor = isinstance(entry, dcp.TensorStorageMetadata)
    offsets = [chunk.offsets for chunk in entry.chunks] if is_tensor else [None]
    places: list[Any] = [stored.get(dcp.MetadataIndex(name, each)) for each in offsets]
    # Checked before offsets become keys of a dict: offsets of stored indices never share a hash.
    if None in places:
        return f"{shown(name)} is listed but stored nowhere"
    if not is_tensor:
        return ""
    uncovered = _uncovered(entry.size, entry.chunks)
    if uncovered:
        return f"{shown(name)} of shape {tuple(entry.size)}: {uncovered}"
    nbytes = math.prod(entry.size) * entry.properties.dtype.itemsize
    stored_nbytes = sum(place.length for place in places)
    is_dense = entry.properties.layout is torch.strided
    if is_dense and nbytes > _PACKED * stored_nbytes + _SMALL_NBYTES:
        return f"{shown(name)} would take {nbytes} bytes, and {stored_nbytes} are stored"
    return ""


def _uncovered(size: torch.Size, chunks: list[dcp.ChunkStorageMetadata]) -> str:
    """Return why chunks are not a tensor cut into parts; empty if they are."""
    boxes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in chunks}
    volume = 0
    for offsets, lengths in boxes.items():
        if any(o + n > whole for o, n, whole in zip(offsets, lengths, size, strict=True)):
            return f"a chunk of shape {lengths} at {offsets} lies beyond it"
        volume += math.prod(lengths)
    if volume != math.prod(size):
        return f"its chunks have {volume} of its {math.prod(size)} elements"
    if len(boxes) == 1 or volume == 0:
        return ""
    # The chunks have as many elements as the tensor, so there is a hole if two overlap. Each cut is
    # moved to a random place. If the chunks are a partition, their volumes still add up to that of
    # the whole, wherever the cuts lie. Otherwise they do so only by chance, with a probability of
    # ndim / 2**64 at most: the difference is a polynomial in the places that is not zero (Schwartz
    # and Zippel).
    moved, moved_whole = [1] * len(boxes), 1
    for dim, whole in enumerate(size):
        spans = [(offsets[dim], lengths[dim]) for offsets, lengths in boxes.items()]
        if spans.count((0, whole)) < len(spans):
            place: defaultdict[int, int] = defaultdict(_random_place)
            moved_whole *= place[whole] - place[0]
            moved = [
                volume * (place[o + n] - place[o])
                for volume, (o, n) in zip(moved, spans, strict=True)
            ]
    return "" if sum(moved) == moved_whole else "its chunks overlap"


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, (tuple, list))
        and len(path) <= _MAX_DEPTH
        and all(isinstance(key, (str, int)) for key in path)
    )


def _problem_stored(index: Any, where: Any) -> str:
    if not isinstance(index, dcp.MetadataIndex) or not isinstance(where, _STORAGE_INFO):
        return f"{shown(index)} is not stored in a file"
    file = where.relative_path
    # A name that contains a directory could lead anywhere.
    if not is_plain_name(file):
        return f"{shown(index.fqn)} is stored in {shown(file)}, expected a file of this directory"
    if not _are_sizes((where.offset, where.length)):
        place = shown((where.offset, where.length))
        return f"{shown(index.fqn)} is stored at offset and length {place}"
    return ""


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, dcp.BytesStorageMetadata):
        return True
    return (
        isinstance(entry, dcp.TensorStorageMetadata)
        and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        and _are_sizes(entry.size)
        and type(entry.chunks) is list
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
        if not isinstance(value, int) or not 0 <= value < SIZE_LIMIT:
            return False
    return True


# --- its pickle, not executed ---------------------------------------------------------------------
#
# A pickle is a program. `unpickle` carries out the opcodes that DCP has written in any of its
# releases, and knows the classes and functions that DCP names there. Whatever else a file asks for
# is an error. Python's own unpickler is not used: the one in C cannot be asked what a tuple may
# hold or what may be called, and the one in Python takes three times as long.

_MEMORY_FORMAT: Any = torch_checkpoints.dcp_memory_format()
_BUILT: frozenset[type[Any]] = frozenset(
    {
        dcp.Metadata,
        dcp.TensorStorageMetadata,
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.TensorProperties,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        _STORAGE_INFO,
    }
)
"""Classes that a pickle may instantiate, and whose state it may set."""
_SETS_STATE: dict[type[Any], Any] = {
    cls: cls.__setstate__ for cls in _BUILT if hasattr(cls, "__setstate__")
}
# Their states. Strides are in those of torch 2.15, after all that older ones have.
_PROPERTIES = frozenset({torch.dtype, torch.layout, bool, _MEMORY_FORMAT, tuple, NoneType})
_NUM_PROPERTIES = len(dataclasses.fields(dcp.TensorProperties))
_INDEX_FIELDS = {"fqn", "offset", "index"}
_MAX_LEN = 100  # Length of tuples: keys that lead to an entry.
_MAX_NDIM = 64  # The same as for tensors of torch.
_MAX_FIELDS = 16  # Attributes of an object.
_FREE_FIELDS = 5  # As many as the classes have; instances share the names of these.
_MAX_MARKS = 64  # Depth of nesting.
_NBYTES_EACH = 5  # Per container in a pickle, on average. DCP's have 7 or more.
_FREE_CONTAINERS = 1000
_MAX_STR_NBYTES = 1 << 20  # Names are compared wherever they are used.
_MAX_PROTOCOL = 5
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")

_read_int4 = struct.Struct("<i").unpack_from
_read_uint4 = struct.Struct("<I").unpack_from
_read_float8 = struct.Struct(">d").unpack_from


_repr = reprlib.Repr()
_repr.maxstring = 200


def shown(value: object) -> str:
    """Return how an error shows a value of a pickle: plain values shortened, else the class.

    A pickle may refer to one value any number of times, and repr() would visit it each time.
    """
    if type(value) is type:
        return value.__name__
    values = value if type(value) is tuple else (value,)
    if {str, int, NoneType}.issuperset(map(type, values)):
        return _repr.repr(value)
    return type(value).__name__


class ForeignPickleError(pickle.UnpicklingError):
    """A pickle asks for something that DCP does not write."""


def _refuse(what: str) -> NoReturn:
    raise ForeignPickleError(what)


def unpickle(content: bytes) -> Any:
    """Return the content of a pickle, if DCP could have written it.

    It takes at most about 40 times as much memory as the pickle has bytes, and 23 times for what
    DCP writes: containers, each of which may take one byte, are counted. A value of a pickle may
    refer to others any number of times, so expanding it could take more than all memory or time.
    Therefore tuples and strings are limited in length, and tuples are nested only as arguments of
    calls are. Lists and dicts are neither copied nor compared nor shown. Keys are strings, whose
    hashes nobody can predict, and indices of entries. An index is hashed by numbers that the file
    chooses, so no two keys of a dict may have the same hash: thousands of equal hashes would take
    hours.

    Raises:
        ForeignPickleError: The pickle has an opcode, a class or a value that DCP does not write, or
            ends too early.
    """
    try:
        return _unpickle(content)
    except (IndexError, KeyError, struct.error) as error:
        msg = "it is cut off, or refers to what is not there"
        raise ForeignPickleError(msg) from error


def _unpickle(content: bytes) -> Any:  # noqa: C901, PLR0912, PLR0915 - an opcode each
    stack: list[Any] = []
    marks: list[int] = []  # Positions in the stack.
    memo: list[Any] = []
    room = _FREE_CONTAINERS + len(content) // _NBYTES_EACH  # Containers that may follow.
    hashes: defaultdict[int, set[int]] = defaultdict(set)  # Hashes of keys, by the dict's id.
    push, pop = stack.append, stack.pop
    at = 0
    while room >= 0:  # The most frequent opcodes first.
        opcode = content[at]  # Raises if the content was cut off.
        at += 1
        match opcode:
            case 0x94:  # MEMOIZE
                memo.append(stack[-1])
            case 0x68:  # BINGET
                push(memo[content[at]])
                at += 1
            case 0x6A:  # LONG_BINGET
                push(memo[_read_uint4(content, at)[0]])
                at += 4
            case 0x85:  # TUPLE1
                room -= 1
                value = stack[-1]
                if type(value) is tuple:  # The tuple in it holds arguments of a call.
                    _check_flat(value)
                stack[-1] = (value,)
            case 0x4B:  # BININT1
                push(content[at])
                at += 1
            case 0x28:  # MARK
                marks.append(len(stack))
                if len(marks) > _MAX_MARKS:
                    break
            case 0x62:  # BUILD
                state = pop()
                if type(state) is dict and len(state) > _FREE_FIELDS:
                    room -= len(state)
                _build(stack[-1], state)
            case 0x29:  # EMPTY_TUPLE
                push(())
            case 0x81:  # NEWOBJ
                if pop() != ():
                    _refuse("it makes an object with arguments")
                room -= 1
                stack[-1] = _new(stack[-1])
            case 0x7D:  # EMPTY_DICT
                room -= 2
                push({})
            case 0x52:  # REDUCE
                args = pop()
                stack[-1] = _call(stack[-1], args)
            case 0x75:  # SETITEMS
                _set_items(_taken(stack, marks.pop()), stack, hashes)
            case 0x73:  # SETITEM
                _set_items(_taken(stack, len(stack) - 2), stack, hashes)
            case 0x8C:  # SHORT_BINUNICODE
                begin, at = at + 1, at + 1 + content[at]
                push(content[begin:at].decode("utf-8", "surrogatepass"))
            case 0x4A:  # BININT
                push(_read_int4(content, at)[0])
                at += 4
            case 0x4D:  # BININT2
                push(content[at] | content[at + 1] << 8)
                at += 2
            case 0x86 | 0x87:  # TUPLE2, TUPLE3
                room -= 1
                push(_flat(_taken(stack, len(stack) - opcode + 0x84)))
            case 0x74:  # TUPLE
                room -= 1
                push(_flat(_taken(stack, marks.pop())))
            case 0x5D:  # EMPTY_LIST
                room -= 1
                push([])
            case 0x61:  # APPEND
                value = pop()
                _of_type(list, stack[-1]).append(value)
            case 0x65:  # APPENDS
                values = _taken(stack, marks.pop())
                _of_type(list, stack[-1]).extend(values)
            case 0x4E:  # NONE
                push(None)
            case 0x88:  # NEWTRUE
                push(True)
            case 0x89:  # NEWFALSE
                push(False)
            case 0x93:  # STACK_GLOBAL
                name = pop()
                stack[-1] = _named(stack[-1], name)
            case 0x63:  # GLOBAL
                middle = content.index(b"\n", at)
                end = content.index(b"\n", middle + 1)
                push(_named(content[at:middle].decode(), content[middle + 1 : end].decode()))
                at = end + 1
            case 0x71:  # BINPUT
                _remember(memo, content[at], stack[-1])
                at += 1
            case 0x72:  # LONG_BINPUT
                _remember(memo, _read_uint4(content, at)[0], stack[-1])
                at += 4
            case 0x58:  # BINUNICODE
                begin, at = at + 4, at + 4 + _read_uint4(content, at)[0]
                if at - begin > _MAX_STR_NBYTES:
                    _refuse(f"it has a string of {at - begin} bytes")
                push(content[begin:at].decode("utf-8", "surrogatepass"))
            case 0x8A:  # LONG1
                begin, at = at + 1, at + 1 + content[at]
                push(int.from_bytes(content[begin:at], "little", signed=True))
            case 0x43:  # SHORT_BINBYTES
                begin, at = at + 1, at + 1 + content[at]
                push(content[begin:at])
            case 0x42:  # BINBYTES
                begin, at = at + 4, at + 4 + _read_uint4(content, at)[0]
                push(content[begin:at])
            case 0x47:  # BINFLOAT
                push(_read_float8(content, at)[0])
                at += 8
            case 0x95:  # FRAME: a size to read at once, not needed: all is in memory.
                at += 8
            case 0x80:  # PROTO
                if content[at] > _MAX_PROTOCOL:
                    _refuse(f"protocol {content[at]} is none of a description")
                at += 1
            case 0x2E:  # STOP
                return pop()
            case _:
                _refuse(f"opcode {opcode} is none of a description")
    _refuse("it makes far more than it has bytes")


def _remember(memo: list[Any], number: int, value: Any) -> None:
    memo[number : number + 1] = [value]  # Picklers count up from 0.
    if number >= len(memo):
        raise IndexError


def _taken(stack: list[Any], begin: int) -> list[Any]:
    """Pop what is on the stack from a position on, and return it."""
    if not 0 <= begin <= len(stack):
        raise IndexError
    values = stack[begin:]
    del stack[begin:]
    return values


def _set_items(values: list[Any], stack: list[Any], hashes: defaultdict[int, set[int]]) -> None:
    changed = _of_type(dict, stack[-1])
    keys = iter(values)
    for key, value in zip(keys, keys, strict=True):
        if type(key) is not str:
            if type(key) is not dcp.MetadataIndex:
                _refuse(f"it has a key that is {type(key).__name__}")
            number, of_others = hash(key), hashes[id(changed)]
            if number in of_others:
                _refuse("it has two keys of the same hash")
            of_others.add(number)
        changed[key] = value


def _of_type(expected: type[Any], found: Any) -> Any:
    if type(found) is not expected:
        _refuse(f"it adds to what is {type(found).__name__}")
    return found


def _flat(values: list[Any]) -> tuple[Any, ...]:
    if len(values) > _MAX_LEN:
        _refuse(f"it has a tuple of {len(values)} values")
    _check_flat(values)
    return tuple(values)


def _check_flat(values: Iterable[Any]) -> None:
    """Refuse tuples in a tuple, but for strides."""
    if tuple in map(type, values):
        for value in values:
            if type(value) is tuple and (len(value) > _MAX_NDIM or {*map(type, value)} - {int}):
                _refuse("it has tuples of tuples")


def _named(module: Any, name: Any) -> Any:
    if isinstance(module, str) and isinstance(name, str):
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module.startswith("pathlib") and name in _PATHS:
            return _path
    _refuse(f"it asks for {shown(name)} of {shown(module)}")


def _new(cls: Any) -> Any:
    if cls not in _BUILT:
        _refuse(f"it makes what is {shown(cls)}")
    return cls.__new__(cls)


def _call(called: Any, args: Any) -> Any:
    if type(args) is not tuple or type(called) is not FunctionType:
        _refuse(f"it calls what is {type(called).__name__}")
    return called(*args)


def _build(built: Any, state: Any) -> None:
    cls = type(built)
    sets_state = _SETS_STATE.get(cls)
    if sets_state is not None:
        if type(state) is tuple and _PROPERTIES.issuperset(map(type, state)):
            sets_state(built, state[:_NUM_PROPERTIES])
            return
    elif cls not in _BUILT:  # Attributes of classes would change this process.
        _refuse(f"it sets attributes of {shown(built)}")
    elif (
        type(state) is dict
        and len(state) <= _MAX_FIELDS
        and (cls is not dcp.MetadataIndex or _is_index(state))  # Indices are hashed.
    ):
        built.__dict__.update(state)
        return
    _refuse("it has a state that is none of a description")


def _is_index(state: dict[Any, Any]) -> bool:
    return (
        state.keys() <= _INDEX_FIELDS
        and isinstance(state.get("fqn"), str)
        and isinstance(state.get("offset"), (torch.Size, NoneType))
        and isinstance(state.get("index"), (int, NoneType))
    )


def _path(*parts: object) -> None:
    """Return None for a path: the checkpoint's former location is not needed."""
    del parts


def _size(values: Any) -> torch.Size:
    if type(values) is not tuple or len(values) > _MAX_NDIM:
        _refuse(f"it makes a size of {shown(values)}")
    return torch.Size(values)


def _member(members: Iterable[tuple[object, Any]], wanted: object, what: str) -> Any:
    for name, member in members:
        if name == wanted:
            return member
    _refuse(f"it asks for {what}")


_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged)


def _layout(name: object) -> Any:
    return _member(((str(each), each) for each in _LAYOUTS), name, f"the layout {shown(name)}")


def _memory_format(number: object) -> Any:
    members = ((each.value, each) for each in _MEMORY_FORMAT)
    return _member(members, number, f"the memory format {shown(number)}")


def _named_memory_format(owner: object, name: object) -> Any:
    members = ((each.name, each) for each in _MEMORY_FORMAT if owner is _memory_format)
    return _member(members, name, f"{shown(name)} of {shown(owner)}")


_KNOWN: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__name__): cls for cls in _BUILT},
    **{("torch", name): each for name, each in vars(torch).items() if type(each) is torch.dtype},
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    (_MEMORY_FORMAT.__module__, _MEMORY_FORMAT.__name__): _memory_format,
    # Some releases of Python pickle the member of an enum in this way, as 3.11.2 does.
    ("builtins", "getattr"): _named_memory_format,
    ("__builtin__", "getattr"): _named_memory_format,  # Its name in protocol 2.
}
