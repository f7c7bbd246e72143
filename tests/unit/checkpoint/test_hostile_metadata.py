"""A `.metadata` that would take all memory, or hours: each is read in a process with limits."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import resource
import subprocess
import sys
import typing

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from shardkit._compat import torch_checkpoints
from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp.metadata import parse_metadata, unpickle

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_NBYTES = 400 << 20  # On top of what torch takes.
MAX_CPU_S = 20  # Of the processor's time, which other programs do not lengthen.

STORAGE_INFO = torch_checkpoints.dcp_storage_info()
PRIME = 2**61 - 1  # Python's hash of an integer is its remainder.


class Call:
    """What a pickle calls, and by which arguments."""

    def __init__(self, *called: typing.Any) -> None:
        self.called = called

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return self.called[0], self.called[1:]


def described(
    entries: typing.Any = None, stored: typing.Any = None, paths: typing.Any = None
) -> bytes:
    return pickle.dumps(dcp.Metadata(entries or {}, paths, stored or {}))


def shared_lists() -> typing.Any:
    """A list of two of the same list, and so on."""
    value: list[typing.Any] = []
    for _ in range(60):
        value = [value, value]
    return value


def shared_objects() -> typing.Any:
    value: typing.Any = None
    for _ in range(60):
        value = dcp.ChunkStorageMetadata(value, value)
    return value


def tensor(size: Sequence[int], chunks: list[dcp.ChunkStorageMetadata]) -> typing.Any:
    properties = dcp.TensorProperties(torch.int8)
    return dcp.TensorStorageMetadata(properties, torch.Size(size), chunks)


def pickled_properties(*last: typing.Any) -> bytes:
    """Properties of a tensor as torch pickles them; torch 2.15 adds strides behind `last[0]`."""
    encoding = dcp.TensorProperties().__getstate__()[3]
    made = dcp.TensorProperties()
    made.__dict__["__getstate__"] = lambda: (torch.int8, torch.strided, False, encoding, *last)
    return pickle.dumps(made)


def keys_of_one_hash() -> bytes:
    keys = (k * PRIME for k in range(1, 200_001))
    items = (b"\x8a\x0a" + key.to_bytes(10, "little") + b"N" for key in keys)
    return b"\x80\x04}(" + b"".join(items) + b"u."


def offsets_of_one_hash(first: int) -> tuple[int, int] | None:
    """Return offsets whose tuple has a hash that all of them share, by CPython's xxHash."""
    p1, p2, p5, bits = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64

    def turned(value: int, by: int) -> int:
        return (value << by | value >> 64 - by) % bits

    state = turned((p5 + first * p2) % bits, 31) * p1 % bits
    wanted = turned(12345 * pow(p1, -1, bits) % bits, 64 - 31)
    second = (wanted - state) * pow(p2, -1, bits) % bits
    return (first, second) if second < PRIME else None


def indices_of_one_hash(*, one_by_one: bool) -> bytes:
    offsets = list(filter(None, map(offsets_of_one_hash, range(160_000))))[:15_000]
    assert len({hash(each) for each in offsets}) == 1
    keys = (dcp.MetadataIndex("w", torch.Size(each)) for each in offsets)
    # By protocol 3 nothing but opcodes stands between the first two bytes and the last.
    items = [pickletools.optimize(pickle.dumps(key, 3))[2:-1] + b"N" for key in keys]
    if one_by_one:
        return b"\x80\x03}" + b"s".join(items) + b"s."
    return b"\x80\x03}(" + b"".join(items) + b"u."


def shared_chunks() -> bytes:
    num = 10_000
    chunks = [dcp.ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(num)]
    return described({str(i): tensor([num], chunks) for i in range(num)})


def shared_path() -> bytes:
    path = ["a"] * 30_000
    return described(paths={str(i): path for i in range(30_000)})


def stored_in(file: typing.Any, num: int = 1) -> bytes:
    where = STORAGE_INFO(file, 0, 1)
    return described(stored={dcp.MetadataIndex(str(i)): where for i in range(num)})


def other_string_of_one_name() -> bytes:
    """An entry has a name of megabytes, and the places of its chunks have a copy of it."""
    name, copied = ("".join(["a" * (32 << 20)]) for _ in range(2))
    offsets = [torch.Size([i]) for i in range(10_000)]
    chunks = [dcp.ChunkStorageMetadata(each, torch.Size([1])) for each in offsets]
    where = STORAGE_INFO("__0_0.distcp", 0, 1)
    stored = {dcp.MetadataIndex(copied, each): where for each in offsets}
    return described({name: tensor([10_000], chunks)}, stored)


def stairs() -> bytes:
    """A square of columns, each cut at the diagonal: all of them lie beside each other."""
    num = 8_000
    boxes = [((i, i), (num - i, 1)) for i in range(num)]
    boxes += [((0, i), (i, 1)) for i in range(1, num)]
    chunks = [dcp.ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
    where = STORAGE_INFO("__0_0.distcp", 0, num)
    stored = {dcp.MetadataIndex("w", chunk.offsets): where for chunk in chunks}
    return described({"w": tensor([num, num], chunks)}, stored)


def repeated(first: typing.Any, opcodes: bytes, num: int) -> bytes:
    """Some opcodes many times, after two values that they get by h\\0 and h\\1."""
    made = b"".join(pickletools.optimize(pickle.dumps(each, 3))[2:-1] + b"\x94" for each in first)
    return b"\x80\x04" + made + b"](" + opcodes * num + b"e."


NOT_A_PICKLE = "not a DCP metadata pickle: it "
FAR_MORE = NOT_A_PICKLE + "makes far more than it has bytes"
CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "lists in an enum": (
        lambda: pickle.dumps(Call(torch_checkpoints.dcp_memory_format(), shared_lists())),
        NOT_A_PICKLE + "asks for the memory format list",
    ),
    "lists in properties": (
        lambda: pickled_properties(shared_lists()),
        NOT_A_PICKLE + "has a state that is none",
    ),
    "tuples as strides": (
        lambda: pickled_properties(False, ((1, 2), 3)),
        NOT_A_PICKLE + "has tuples of tuples",
    ),
    "objects as a layout": (
        lambda: pickle.dumps(
            Call(torch.serialization._get_layout, shared_objects())  # type: ignore[attr-defined]  # noqa: SLF001
        ),
        NOT_A_PICKLE + "asks for the layout ChunkStorageMetadata",
    ),
    "objects as a file": (
        lambda: stored_in(shared_objects()),
        "'0' is stored in ChunkStorageMetadata, expected",
    ),
    "objects as an offset": (
        lambda: described(stored={dcp.MetadataIndex("a"): STORAGE_INFO("f", shared_objects(), 1)}),
        "'a' is stored at offset and length tuple",
    ),
    "keys of one hash": (keys_of_one_hash, NOT_A_PICKLE + "has a key that is int"),
    "indices of one hash": (
        lambda: indices_of_one_hash(one_by_one=False),
        NOT_A_PICKLE + "has two keys of the same hash",
    ),
    "indices of one hash, one by one": (
        lambda: indices_of_one_hash(one_by_one=True),
        NOT_A_PICKLE + "has two keys of the same hash",
    ),
    "shared chunks": (shared_chunks, "it has more chunks than it describes"),
    "shared path": (shared_path, "it does not say where its entries stood"),
    "long file name": (lambda: stored_in("a" * (16 << 20), 20_000), "has a string of 16777216"),
    "long name": (other_string_of_one_name, "has a string of 33554432"),
    "stairs": (stairs, "read"),
    "long sizes": (
        lambda: repeated((torch.Size, (tuple([1] * 100),)), b"h\x00h\x01R", 800_000),
        NOT_A_PICKLE + "makes a size of (1, 1, 1, 1, 1, 1, ...)",
    ),
    "many fields": (
        lambda: repeated(
            (dcp.StorageMeta, {str(i): i for i in range(100)}), b"h\x00)\x81h\x01b", 150_000
        ),
        NOT_A_PICKLE + "has a state that is none",
    ),
    "dicts": (lambda: repeated((), b"}", 6 << 20), FAR_MORE),
    "lists": (lambda: repeated((), b"]", 6 << 20), FAR_MORE),
    "tuples": (lambda: repeated((), b"N\x85", 6 << 20), FAR_MORE),
    "dicts of one": (lambda: repeated(("ab",), b"}h\x00Ns", 2 << 20), FAR_MORE),
    "marks": (lambda: repeated((), b"(", 50 << 20), FAR_MORE),
    "a memo": (lambda: b"\x80\x04N" + b"\x94" * (8 << 20) + b".", "found NoneType"),
    "a memo with gaps": (
        lambda: b"\x80\x04N" + b"r\xff\xff\xff\x0f" + b".",
        NOT_A_PICKLE + "is cut off, or refers",
    ),
    "objects of other fields": (
        lambda: repeated(
            (dcp.StorageMeta, {str(i): i for i in range(16)}), b"h\x00)\x81h\x01b", 1 << 20
        ),
        FAR_MORE,
    ),
}


def outcome(content: bytes) -> str:
    try:
        parse_metadata(content, ".metadata")
    except CheckpointError as error:
        return str(error)
    return "read"


def outcome_with_limits(name: str) -> str:
    """Say what came of reading a file, or how the process ended."""
    content = CASES[name][0]()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no path of ours
            nbytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (nbytes + MAX_NBYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 5))
        try:
            os.write(writer, outcome(content)[:2000].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or f"the process ended by {status}"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What came of each file. A process without threads starts one for each."""
    done = subprocess.run(
        [sys.executable, __file__], check=True, capture_output=True, text=True, timeout=900
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_takes_little(outcomes: dict[str, str], name: str) -> None:
    assert CASES[name][1] in outcomes[name]


@pytest.mark.parametrize("strides", [(), (None,), ((),), ((3, 1),)], ids=repr)
def test_strides_are_read_if_torch_has_them(strides: tuple[typing.Any, ...]) -> None:
    found = unpickle(pickled_properties(False, *strides))
    assert found.dtype is torch.int8
    assert found.memory_format is torch.contiguous_format
    if strides and hasattr(found, "strides"):
        assert found.strides == strides[0]


if __name__ == "__main__":
    names = sys.argv[1:] or list(CASES)
    print(json.dumps({name: outcome_with_limits(name) for name in names}))
