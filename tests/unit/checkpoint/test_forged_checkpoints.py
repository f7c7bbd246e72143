"""Indices that somebody else has written: what they say is compared before anything is read."""

from __future__ import annotations

import collections
import copy
import itertools
import json
import operator
import os
import pickle
import random
import re
import resource
import time
import typing
import zlib

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from typer.testing import CliRunner

from shardkit import checkpoint
from shardkit._cli import app
from shardkit._errors import CheckpointError
from shardkit.checkpoint._consolidate import describe, verify
from shardkit.checkpoint._dcp import directory, manifest, metadata
from shardkit.checkpoint._dcp.metadata import unpickle

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:TypedStorage is deprecated",  # DCP of torch 2.9 uses it.
)

Body = dict[str, typing.Any]


def model() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(30, 20)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    return checkpoint.save(tmp_path / "all" / "x", model(), step=5)


def assert_refused(path: pathlib.Path, message: str) -> None:
    """Load, verify, inspect and consolidate refuse it, and nothing has been changed."""
    target = nn.Linear(30, 20)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, target)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())
    assert any(re.search(message, problem) for problem in verify(path).problems)
    with pytest.raises(CheckpointError):
        checkpoint.consolidate(path, path.parent.parent / "out.pt")
    assert not (path.parent.parent / "out.pt").exists()


# --- the manifest ---------------------------------------------------------------------------------


def rewrite_manifest(
    path: pathlib.Path,
    *,
    header: Callable[[Body], object] = id,
    body: Callable[[Body], object] = id,
) -> None:
    """Change a manifest, with the checksums of what it then is."""
    first, second = (path / "shardkit.json").read_bytes().split(b"\n", 1)
    lines = []
    for line, begin, change in ((first, b'{"header":', header), (second, b'"body":', body)):
        found = json.loads(line.removeprefix(begin).rpartition(b',"crc32"')[0])
        change(found)
        text = json.dumps(found).encode()
        lines.append(begin + text + b',"crc32":%d' % zlib.crc32(text))
    (path / "shardkit.json").write_bytes(lines[0] + b",\n" + lines[1] + b"}\n")


def items(body: Body) -> typing.Any:
    return body["files"]["__0_0.distcp"]["items"]


def change_first(position: int, value: typing.Any) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        items(body)[0][position] = value

    return change


def add_outside(body: Body) -> None:
    body["files"]["../../secret"] = {"nbytes": 3, "items": []}


FORGED_BODIES: dict[str, tuple[Callable[[Body], object], str]] = {
    "far offset": (change_first(0, 2**40), "overlap|ends at byte"),
    "negative offset": (change_first(0, -100), "number of an item .* is -100"),
    "far size": (change_first(1, 2**62), f"number of an item .* is {2**62}"),
    "text": (change_first(0, "0"), "number of an item .* is '0'"),
    "true": (change_first(0, True), "number of an item .* is True"),
    "data_offset": (change_first(2, 2**40), f"and data at byte {2**40}"),
    "no checksums": (change_first(3, []), "0 checksums for"),
    "wrong item": (lambda body: items(body).pop(), "differ about"),
    "no items": (lambda body: body["files"].clear(), "differ about"),
    "outside": (add_outside, "expected files of this directory"),
    "files": (lambda body: body.update(files=[1]), "AttributeError|not the manifest"),
    "block": (lambda body: body.update(block_nbytes=0), "block_nbytes is 0"),
    "huge metadata": (lambda body: body["metadata"].update(nbytes=2**80), "size of .metadata"),
    "layout": (lambda body: body.update(layout=None), "another type"),
    "missing": (lambda body: body.pop("metadata"), "KeyError"),
    "keys": (lambda body: body.update(keys=[1]), "AttributeError|not the manifest"),
    "text as key": (lambda body: body.update(keys={"model.bias": [[0, "x"]]}), "a key is 'x'"),
    "long key": (lambda body: body.update(keys={"model.bias": [[0, 2**62]]}), "a key is 4611686"),
    "no position": (lambda body: body.update(keys={"model.bias": [[-1, 0.5]]}), "position in"),
    "another key": (lambda body: body.update(keys={"model.bias": [[1, 0.5]]}), "differ about"),
    "far key": (lambda body: body.update(keys={"model.bias": [[9, 0.5]]}), "differ about"),
}


@pytest.mark.parametrize("name", FORGED_BODIES)
def test_a_forged_manifest(saved: pathlib.Path, name: str) -> None:
    change, message = FORGED_BODIES[name]
    rewrite_manifest(saved, body=change)
    assert_refused(saved, message)
    if "differ" not in message:  # What `.metadata` says is not compared by `latest`.
        with pytest.warns(UserWarning, match=r"passed over|no checkpoint"):
            assert checkpoint.latest(saved.parent) is None


def test_data_that_would_begin_elsewhere(saved: pathlib.Path) -> None:
    def change(body: Body) -> None:
        for item in items(body):
            if item[2] is not None:
                item[2] -= 4

    rewrite_manifest(saved, body=change)
    assert_refused(saved, r"is no tensor of torch\.float32")


FORGED_HEADERS: dict[str, dict[str, typing.Any]] = {
    "sequence": {"sequence": "newest"},
    "huge": {"sequence": 2**80},
    "list": {"sequence": [1]},
    "step": {"step": "5"},
    "world": {"world_size": None},
    "shardkit": {"shardkit": 3},
    "more": {"other": 1},
}


@pytest.mark.parametrize("name", FORGED_HEADERS)
def test_a_neighbour_with_a_forged_header(saved: pathlib.Path, name: str) -> None:
    good = checkpoint.save(saved.parent / "good", step=6)
    rewrite_manifest(saved, header=lambda header: header.update(FORGED_HEADERS[name]))
    assert_refused(saved, "not the manifest of a shardkit checkpoint")
    with pytest.warns(UserWarning, match="x is passed over: .*not the manifest"):
        assert checkpoint.latest(saved.parent) == good
    newest = checkpoint.save(saved.parent / "newest", step=7, keep_last=2)
    with pytest.warns(UserWarning, match="x is passed over"):
        assert checkpoint.latest(saved.parent) == newest


@pytest.mark.filterwarnings("ignore:.* is passed over")
@pytest.mark.parametrize("kind", ["fifo", "folder", "endless", "huge", "device"])
@pytest.mark.parametrize("file", ["shardkit.json", ".metadata", "__0_0.distcp"])
def test_what_is_no_file_of_a_size(saved: pathlib.Path, file: str, kind: str) -> None:
    good = checkpoint.save(saved.parent / "good", step=6)
    (saved / file).unlink()
    if kind == "fifo":
        os.mkfifo(saved / file)
    elif kind == "folder":
        (saved / file).mkdir()
    elif kind == "endless":
        (saved / file).symlink_to("/dev/zero")
    elif kind == "device":
        (saved / file).symlink_to("/dev/tty")
    else:
        os.truncate(os.open(saved / file, os.O_CREAT | os.O_WRONLY), 1 << 40)
    begin = time.monotonic()
    with pytest.raises(CheckpointError):
        checkpoint.load(saved, model())
    assert verify(saved).problems
    checkpoint.save(saved.parent / "beside", step=7)
    assert checkpoint.latest(saved.parent) == saved.parent / "beside"
    assert checkpoint.load(good) == {"step": 6}
    assert time.monotonic() - begin < 20


# --- .metadata ------------------------------------------------------------------------------------


def rewrite_metadata(path: pathlib.Path, change: Callable[[typing.Any], object]) -> None:
    """Change `.metadata`, and the manifest's checksum of it."""
    found = pickle.loads((path / ".metadata").read_bytes())
    change(found)
    content = pickle.dumps(found)
    (path / ".metadata").write_bytes(content)
    if (path / "shardkit.json").exists():
        described = {"nbytes": len(content), "crc32": zlib.crc32(content)}
        rewrite_manifest(path, body=lambda body: body.update(metadata=described))


def weight(found: typing.Any) -> typing.Any:
    return found.state_dict_metadata["model.weight"]


def chunks_of(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[typing.Any], None]:
    def change(found: typing.Any) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

        first = weight(found).chunks[0]
        where = found.storage_data[MetadataIndex("model.weight", first.offsets)]
        weight(found).chunks[:] = [
            ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes
        ]
        for offsets, _ in boxes:
            found.storage_data[MetadataIndex("model.weight", torch.Size(offsets))] = where

    return change


def change_dtype(dtype: torch.dtype) -> Callable[[typing.Any], None]:
    def change(found: typing.Any) -> None:
        object.__setattr__(weight(found).properties, "dtype", dtype)

    return change


FORGED_METADATA: dict[str, tuple[Callable[[typing.Any], object], str]] = {
    "overlap": (
        chunks_of(((0, 0), (10, 30)), ((5, 0), (10, 30))),
        "its chunks overlap",
    ),
    "hole": (chunks_of(((0, 0), (10, 30))), "have 300 of its 600 elements"),
    "beyond": (chunks_of(((0, 0), (20, 20)), ((0, 20), (20, 20))), "lies beyond it"),
    "boxes": (
        chunks_of(((0, 0), (10, 20)), ((0, 10), (10, 20)), ((10, 0), (10, 20))),
        "overlap",
    ),
    "dtype": (change_dtype(torch.int32), r"is no tensor of torch\.int32"),
    "odd dtype": (change_dtype(torch.quint8), "is no tensor of|cannot be read"),
    "wide dtype": (change_dtype(torch.complex128), "differ about 'model.weight'"),
    "nowhere": (lambda found: found.storage_data.clear(), "is listed but stored nowhere"),
    "sizes": (
        lambda found: setattr(weight(found), "size", torch.Size((2**31, 2**31))),
        "elements|would take",
    ),
    "paths": (lambda found: setattr(found, "planner_data", {"x": 3}), "where its entries stood"),
    "no layout": (lambda found: setattr(weight(found), "properties", None), "neither a tensor"),
}


@pytest.mark.parametrize("name", FORGED_METADATA)
@pytest.mark.parametrize("kind", ["shardkit", "dcp"])
def test_forged_metadata(saved: pathlib.Path, name: str, kind: str) -> None:
    change, message = FORGED_METADATA[name]
    if kind == "dcp":
        (saved / "shardkit.json").unlink()
        message = f"{message}|has shape|cannot be read|do not fit"
    rewrite_metadata(saved, change)
    assert_refused(saved, message)


def test_chunks_of_any_boxes_are_whole() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    def boxes(*each: tuple[tuple[int, ...], tuple[int, ...]]) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in each]

    uncovered = metadata._uncovered  # noqa: SLF001
    assert uncovered(torch.Size([]), boxes(((), ()))) == ""
    assert uncovered(torch.Size([0, 3]), boxes(((0, 0), (0, 3)))) == ""
    assert uncovered(torch.Size([0]), []) == ""
    assert uncovered(torch.Size([3, 4]), boxes(*[((i, 0), (1, 4)) for i in range(3)])) == ""
    ragged = boxes(((0, 0), (1, 3)), ((0, 3), (1, 1)), ((1, 0), (2, 4)), ((0, 4), (0, 0)))
    assert uncovered(torch.Size([3, 4]), ragged) == ""
    nothing = boxes(((0, 0), (0, 1)), ((0, 1), (0, 0)))
    assert uncovered(torch.Size([0, 3]), nothing) == ""
    corners = boxes(*[((i // 4 % 2, i // 2 % 2, i % 2), (1, 1, 1)) for i in range(8)])
    assert uncovered(torch.Size([2, 2, 2]), corners) == ""
    corners[0].sizes = torch.Size([1, 1, 2])
    corners[1].sizes = torch.Size([1, 1, 0])  # Still whole: one reaches where another did.
    assert uncovered(torch.Size([2, 2, 2]), corners) == ""
    corners[2].sizes = torch.Size([1, 1, 2])
    corners[7].sizes = torch.Size([1, 1, 0])
    assert "overlap" in uncovered(torch.Size([2, 2, 2]), corners)
    assert "2 of its 4" in uncovered(torch.Size([4]), boxes(((0,), (2,)), ((0,), (2,))))


def test_chunks_are_whole_where_each_element_is_in_one() -> None:
    """Compared with counting: tensors cut at random, in half of the cases with one chunk moved."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    rng = random.Random(0)
    wholes = 0
    for _ in range(1000):
        size = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        boxes = [([0] * len(size), size)]
        for _ in range(rng.randint(0, 3)):
            offsets, lengths = boxes.pop(rng.randrange(len(boxes)))
            dim = rng.randrange(len(size))
            cut = rng.randint(0, lengths[dim])
            behind, rest = offsets.copy(), lengths.copy()
            behind[dim], rest[dim] = offsets[dim] + cut, lengths[dim] - cut
            boxes += [(offsets, [*lengths[:dim], cut, *lengths[dim + 1 :]]), (behind, rest)]
        if rng.random() < 0.5:
            moved = rng.choice(boxes)[0]
            moved[rng.randrange(len(size))] += 1
        by_offsets = {tuple(offsets): lengths for offsets, lengths in boxes}
        counts = collections.Counter(
            element
            for offsets, lengths in by_offsets.items()
            for element in itertools.product(
                *map(range, offsets, map(operator.add, offsets, lengths))
            )
        )
        is_whole = counts == dict.fromkeys(itertools.product(*map(range, size)), 1) and all(
            o + n <= whole
            for offsets, lengths in by_offsets.items()
            for o, n, whole in zip(offsets, lengths, size, strict=True)
        )
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
        assert (metadata._uncovered(torch.Size(size), chunks) == "") is is_whole  # noqa: SLF001
        wholes += is_whole
    assert 200 < wholes < 800


SHARED = b"N\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(1, 61))
INDEX = b"torch.distributed.checkpoint.metadata\nMetadataIndex"


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\x00\x00\x00\x10.",  # Remembers None at place 2**28.
        b"\x80\x02Np268435456\n.",
        b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b".",
        b"\x80\x04\x8c\xff.",
        b"\x80\x04c",
        b"\xff",
        b"",
        # Tuples of two of the same, nested 60 times: as a key, in sets, as arguments, in an index.
        b"\x80\x02}N" + b"2\x86" * 60 + b"Ns.",
        b"\x80\x04}(" + SHARED + b"Nu.",
        b"\x80\x04\x8f(" + SHARED + b"\x90.",
        b"\x80\x04(" + SHARED + b"\x91.",
        b"\x80\x04cpathlib\nPath\n\x94" + SHARED + b"\x85R.",
        b"\x80\x04ctorch.serialization\n_get_layout\n\x94" + SHARED + b"\x85R.",
        b"\x80\x04c" + INDEX + b"\n\x94)\x81}\x8c\x03fqn" + SHARED + b"sb.",
        b"\x80\x04c" + INDEX + b"\n\x94" + SHARED + b"\x85R.",
        b"\x80\x02}N" + b"\x85" * 3_000_000 + b"Ns.",  # Nested so deep that hashing has no end.
        # A path of two of the same, 60 times; copies of a long list; one long tuple, many times.
        b"\x80\x04cpathlib\nPath\n\x94\x8c\x01a\x94"
        + b"".join(b"h\x00h%ch%c\x86R\x94" % (i + 1, i + 1) for i in range(60))
        + b".",
        b"\x80\x04cpathlib\nPath\n\x94X\x60\xea\x00\x00"
        + b"a" * 60_000
        + b"\x94]("
        + b"h\x00h\x01h\x01\x86R" * 5_000  # As many long paths.
        + b"e.",
        b"\x80\x04]("
        + b"N" * 100_000
        + b"e\x94]("
        + b"cbuiltins\nlist\nh\x00\x85R" * 10_000
        + b"e.",
        b"\x80\x04(" + b"N" * 100_000 + b"t\x94}(" + b"h\x00N" * 100_000 + b"u.",
    ],
    ids=zlib.crc32,
)
def test_a_pickle_that_takes_more_than_it_is(content: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"not a DCP metadata pickle|expected DCP's Metadata"):
        checkpoint.load(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


CHUNK = b"torch.distributed.checkpoint.metadata\nChunkStorageMetadata"


@pytest.mark.parametrize(
    "content",
    [
        # (None, {"__class__": MetadataIndex}), by which a chunk of anything would become a key.
        b"\x80\x04c" + CHUNK + b"\n)\x81N}\x8c\x09__class__c" + INDEX + b"\ns\x86b.",
        b"\x80\x04c" + CHUNK + b"\n}\x8c\x07offsetsNsb.",  # A state for the class itself.
        b"\x80\x04ctorch\nSize\n}\x8c\x01aNsb.",
        b"\x80\x04c" + CHUNK + b"\nN\x85\x81.",  # An object with arguments.
        b"\x80\x04c" + CHUNK + b"\n)R.",
        b"\x80\x04ctorch\nfloat32\n)\x81.",
        b"\x80\x04ctorch\nSize\n]K\x01a\x85R.",
        b"\x80\x04NK\x01K\x02s.",  # An entry, an element of what has none.
        b"\x80\x04NK\x01a.",
        b"\x80\x04}(K\x01u.",  # A key without a value.
        b"\x80\x04h\x00.",  # Refers to nothing; marks nothing; takes from an empty stack.
        b"\x80\x04K\x01K\x02\x87.",
        b"\x80\x04t.",
        b"\x80\x04b.",
        b"\x80\x06N.",
        b"\x80\x04X\xff\xff\xff\xff.",
    ],
    ids=zlib.crc32,
)
def test_a_pickle_that_asks_for_what_dcp_does_not(content: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a DCP metadata pickle"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_dcp_are_read_as_they_are(saved: pathlib.Path, protocol: int) -> None:
    found = pickle.loads((saved / ".metadata").read_bytes())
    found.storage_meta.checkpoint_id = None  # Paths are not read.
    found.planner_data["x" * 300] = ("x" * 300, 7)
    found.storage_data[MetadataIndex("huge", torch.Size([1 << 40]))] = 1.5, -1, 1 << 70, True
    if protocol > 2:  # Before, functions make them.
        found.version = b"bytes"
    assert unpickle(pickle.dumps(found, protocol)) == found


@pytest.mark.filterwarnings("ignore:.*is passed over", "ignore:no checkpoint of")
@pytest.mark.parametrize("kind", ["empty", "bytes", "fifo", "endless", "folder"])
def test_a_note_of_damage_that_is_none(saved: pathlib.Path, kind: str) -> None:
    """Empty: the disk was full when it was written."""
    note = saved / "shardkit.damaged"
    if kind == "fifo":
        os.mkfifo(note)
    elif kind == "endless":
        note.symlink_to("/dev/zero")
    elif kind == "folder":
        note.mkdir()
    else:
        note.write_bytes(b"\xff" * (kind == "bytes"))
    assert checkpoint.latest(saved.parent) is None
    assert verify(saved).problems
    assert directory.note_damage(saved, "bad", directory.stamp(saved))
    assert checkpoint.latest(saved.parent) is None


def test_a_note_of_damage_goes_into_no_other_file(saved: pathlib.Path) -> None:
    mine = saved.parent / "mine"
    mine.write_text("kept")
    (saved / "shardkit.damaged").symlink_to(mine)
    directory.note_damage(saved, "bad", directory.stamp(saved))
    assert mine.read_text() == "kept"


# --- other formats --------------------------------------------------------------------------------


def local_file(folder: pathlib.Path, change: Callable[[Body], object]) -> pathlib.Path:
    described = {"shape": [3], "dtype": "float32", "range": None, "cut": None}
    about = {
        "format": "shardkit local",
        "version": 1,
        "save": 1,
        "rank": 0,
        "world_size": 1,
        "tied": {},
        "model": {"weight": described},
        "optimizer": {"weight": {"step": None}},
    }
    content = {
        "model": {"weight": torch.ones(3)},
        "optimizer": {"weight.step": 1},
        "shard_metadata": about,
        "param_groups": [],
    }
    change(content)
    torch.save(content, folder / "a_rank-0-of-1.pth")
    return folder / "a"


FORGED_LOCAL: dict[str, Callable[[Body], object]] = {
    "no rank": lambda c: c["shard_metadata"].pop("rank"),
    "no model": lambda c: c["shard_metadata"].pop("model"),
    "dtype": lambda c: c["shard_metadata"]["model"]["weight"].update(dtype="nn"),
    "no range": lambda c: c["shard_metadata"]["model"]["weight"].pop("range"),
    "range": lambda c: c["shard_metadata"]["model"]["weight"].update(range=[0, 2**40]),
    "shape": lambda c: c["shard_metadata"]["model"]["weight"].update(shape=["x"]),
    "tied": lambda c: c["shard_metadata"].update(tied={"a": 3}),
    "tied to nothing": lambda c: c["shard_metadata"].update(tied={"a": "b"}),
    "world": lambda c: c["shard_metadata"].update(world_size=0),
    "many ranks": lambda c: c["shard_metadata"].update(world_size=2**62),
    "save": lambda c: c["shard_metadata"].update(save=[1]),
    "other dtype": lambda c: c["model"].update(weight=torch.ones(3, dtype=torch.int32)),
    "no tensor": lambda c: c["model"].clear(),
    "no state": lambda c: c["optimizer"].clear(),
    "names": lambda c: c["model"].update({1: torch.ones(1)}),
}


@pytest.mark.parametrize("name", FORGED_LOCAL)
def test_forged_files_of_ranks(tmp_path: pathlib.Path, name: str) -> None:
    prefix = local_file(tmp_path, lambda content: content)
    assert verify(prefix).problems == []
    local_file(tmp_path, FORGED_LOCAL[name])
    assert len(verify(prefix).problems) == 1
    with pytest.raises(CheckpointError):
        describe(prefix)


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_flipped_bytes_in_whole_files(tmp_path: pathlib.Path, form: str) -> None:
    good = tmp_path / f"good.{'pt' if form == 'torch' else form}"
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.int64)}
    torch.save(tensors, good) if form == "torch" else safetensors.torch.save_file(tensors, good)
    content = good.read_bytes()
    path = tmp_path / f"bad{good.suffix}"
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 0x55
        path.write_bytes(changed)
        for read in (verify, describe):
            try:
                read(path)
            except CheckpointError:
                continue


def test_tensors_that_share_the_bytes_of_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {"a": torch.ones(4), "none": torch.ones(0), "b": torch.zeros(4)}
    safetensors.torch.save_file(tensors, file)
    assert verify(file).problems == []
    file.write_bytes(file.read_bytes().replace(b"[16,32]", b"[12,28]"))
    (problem,) = verify(file).problems
    assert "'b' overlaps another one" in problem


def test_names_that_no_terminal_shows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a\ud800b": torch.ones(1), "c\x1b[31m": torch.ones(1)}, path)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exception is None
    assert "a\\ud800b" in result.stdout


def test_a_manifest_of_before_names_nobody(saved: pathlib.Path) -> None:
    rewrite_manifest(saved, body=lambda body: (body.pop("saved_by"), body.pop("keys")))
    assert manifest.read_manifest(saved).saved_by == ""
    assert manifest.read_manifest(saved).keys == {}
    assert verify(saved).problems == []
    assert dcp.FileSystemReader(saved).read_metadata().state_dict_metadata
