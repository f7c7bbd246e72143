"""Reading the pickle in `.metadata` without executing what it contains.

A pickle is a program. `unpickle` carries out the opcodes that DCP has written in any of its
releases, and knows the classes and functions that DCP names there: whatever else a file asks for is
an error. Python's own unpickler is not used. The one in C can be asked neither what a tuple may
hold nor what may be called, and its counterpart in Python takes three times as long as this one.
"""

from __future__ import annotations

import pickle
import reprlib
import struct
from types import FunctionType, NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Iterable

_MEMORY_FORMAT: Any = _compat.dcp_memory_format()
_BUILT: frozenset[type[Any]] = frozenset(
    {
        dcp.Metadata,
        dcp.TensorStorageMetadata,
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.TensorProperties,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        _compat.dcp_storage_info(),
    }
)
"""Classes of which a pickle may make instances, and whose state it may set."""
_SETS_STATE: dict[type[Any], Any] = {
    cls: cls.__setstate__ for cls in _BUILT if hasattr(cls, "__setstate__")
}
_MAX_LEN = 100  # Of tuples: shapes, and the keys that lead to an entry; of an object's fields.
_MAX_PROTOCOL = 5
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")

_read_int4 = struct.Struct("<i").unpack_from
_read_uint4 = struct.Struct("<I").unpack_from
_read_float8 = struct.Struct(">d").unpack_from


class ForeignPickleError(pickle.UnpicklingError):
    """A pickle asks for something that DCP does not write."""


def unpickle(content: bytes) -> Any:
    """Return what a pickle describes, if it is one that DCP could have written.

    It makes nothing that is far more than the pickle's own size. A value of a pickle may refer to
    others, any number of times. So a tuple could stand for more than there is memory or time: to
    hash one takes as long as all that it stands for, and if it is nested deep all of the stack.
    None is long here, or nested but as arguments are.

    Args:
        content: The whole pickle, of protocol 2 to 5.

    Raises:
        ForeignPickleError: It has an opcode, a class or a value that DCP does not write, or ends
            too early.
    """
    try:
        return _unpickle(content)
    except (IndexError, KeyError, struct.error) as error:
        msg = "it is cut off, or refers to what is not there"
        raise ForeignPickleError(msg) from error


def _unpickle(content: bytes) -> Any:  # noqa: C901, PLR0912, PLR0915 - an opcode each
    stack: list[Any] = []
    marks: list[int] = []  # Where in the stack.
    memo: dict[int, Any] = {}
    push, pop = stack.append, stack.pop
    at = 0
    while True:  # The most frequent opcodes first.
        opcode = content[at]  # Raises if what came last was cut off.
        at += 1
        match opcode:
            case 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            case 0x68:  # BINGET
                push(memo[content[at]])
                at += 1
            case 0x6A:  # LONG_BINGET
                push(memo[_read_uint4(content, at)[0]])
                at += 4
            case 0x85:  # TUPLE1
                value = stack[-1]
                if type(value) is tuple:  # Arguments of a call.
                    _check_flat(value)
                stack[-1] = (value,)
            case 0x4B:  # BININT1
                push(content[at])
                at += 1
            case 0x28:  # MARK
                marks.append(len(stack))
            case 0x62:  # BUILD
                state = pop()
                _build(stack[-1], state)
            case 0x29:  # EMPTY_TUPLE
                push(())
            case 0x81:  # NEWOBJ
                if pop() != ():
                    msg = "it makes an object with arguments"
                    raise ForeignPickleError(msg)
                stack[-1] = _new(stack[-1])
            case 0x7D:  # EMPTY_DICT
                push({})
            case 0x52:  # REDUCE
                args = pop()
                stack[-1] = _call(stack[-1], args)
            case 0x75:  # SETITEMS
                _set_items(_taken(stack, marks.pop()), stack)
            case 0x73:  # SETITEM
                _set_items(_taken(stack, len(stack) - 2), stack)
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
                push(_flat(_taken(stack, len(stack) - opcode + 0x84)))
            case 0x74:  # TUPLE
                push(_flat(_taken(stack, marks.pop())))
            case 0x5D:  # EMPTY_LIST
                push([])
            case 0x61:  # APPEND
                value = pop()
                _of_type(list, stack[-1]).append(value)
            case 0x65:  # APPENDS
                values = _taken(stack, marks.pop())
                _of_type(list, stack[-1]).extend(values)
            case 0x90:  # ADDITEMS
                values = _taken(stack, marks.pop())
                _of_type(set, stack[-1]).update(values)
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
                memo[content[at]] = stack[-1]
                at += 1
            case 0x72:  # LONG_BINPUT
                memo[_read_uint4(content, at)[0]] = stack[-1]
                at += 4
            case 0x58:  # BINUNICODE
                begin, at = at + 4, at + 4 + _read_uint4(content, at)[0]
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
            case 0x8F:  # EMPTY_SET
                push(set())
            case 0x95:  # FRAME: how much to read at once. All of it is in memory.
                at += 8
            case 0x80:  # PROTO
                if content[at] > _MAX_PROTOCOL:
                    msg = f"protocol {content[at]} is none of a description"
                    raise ForeignPickleError(msg)
                at += 1
            case 0x2E:  # STOP
                return pop()
            case _:
                msg = f"opcode {opcode} is none of a description"
                raise ForeignPickleError(msg)


def _taken(stack: list[Any], begin: int) -> list[Any]:
    """Take what is on the stack from a place on."""
    if not 0 <= begin <= len(stack):
        raise IndexError
    values = stack[begin:]
    del stack[begin:]
    return values


def _set_items(values: list[Any], stack: list[Any]) -> None:
    keys = iter(values)
    _of_type(dict, stack[-1]).update(zip(keys, keys, strict=True))


def _of_type(expected: type[Any], found: Any) -> Any:
    if type(found) is not expected:
        msg = f"it adds to what is {type(found).__name__}"
        raise ForeignPickleError(msg)
    return found


def _flat(values: list[Any]) -> tuple[Any, ...]:
    if len(values) > _MAX_LEN:
        msg = f"it has a tuple of {len(values)} values"
        raise ForeignPickleError(msg)
    _check_flat(values)
    return tuple(values)


def _check_flat(values: Iterable[Any]) -> None:
    if tuple in map(type, values):
        msg = "it has tuples of tuples"
        raise ForeignPickleError(msg)


def _named(module: Any, name: Any) -> Any:
    if not isinstance(module, str) or not isinstance(name, str):
        msg = f"it asks for {reprlib.repr(name)} of {reprlib.repr(module)}"
        raise ForeignPickleError(msg)
    known = _KNOWN.get((module, name))
    if known is not None:
        return known
    if module.startswith("pathlib") and name in _PATHS:
        return _path
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    msg = f"it asks for {module}.{name}"
    raise ForeignPickleError(msg)


def _new(cls: Any) -> Any:
    if cls not in _BUILT:
        msg = f"it makes what is {getattr(cls, '__name__', type(cls).__name__)}"
        raise ForeignPickleError(msg)
    return cls.__new__(cls)


def _call(called: Any, args: Any) -> Any:
    if type(args) is not tuple or (
        type(called) is not FunctionType and called is not _MEMORY_FORMAT
    ):
        msg = f"it calls what is {type(called).__name__}"
        raise ForeignPickleError(msg)
    return called(*args)


def _build(built: Any, state: Any) -> None:
    cls = type(built)
    if cls in _SETS_STATE:
        _SETS_STATE[cls](built, state)
    elif cls not in _BUILT:  # Classes are this process' own.
        msg = f"it sets attributes of {getattr(built, '__name__', cls.__name__)}"
        raise ForeignPickleError(msg)
    elif (
        type(state) is not dict
        or len(state) > _MAX_LEN
        or (cls is dcp.MetadataIndex and not _is_index(state))  # Indices are hashed.
    ):
        msg = "it has a state that is none of a description"
        raise ForeignPickleError(msg)
    else:
        built.__dict__.update(state)


def _is_index(state: dict[Any, Any]) -> bool:
    return (
        state.keys() <= {"fqn", "offset", "index"}
        and isinstance(state.get("fqn"), str)
        and isinstance(state.get("offset"), (torch.Size, NoneType))
        and isinstance(state.get("index"), (int, NoneType))
    )


def _path(*parts: object) -> None:
    """Make nothing of a path: where a checkpoint was once is not asked for."""
    del parts


def _size(values: Any) -> torch.Size:
    if type(values) is not tuple:
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
    **{(cls.__module__, cls.__name__): cls for cls in (*_BUILT, _MEMORY_FORMAT)},
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    # How some releases of Python pickle the member of an enum.
    ("builtins", "getattr"): _memory_format,
}
