"""`shardkit.json`: what is in a checkpoint's files, so that damage is found when it is read.

It is written last, so a directory with a valid manifest was complete. The file is one JSON object
in two lines. The first line is the header, which is enough to order the checkpoints of a directory;
the second is the body. Each is followed by its CRC-32.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.disk import (
    DAMAGED,
    SIZE_LIMIT,
    Key,
    Keys,
    is_plain_name,
    key_of_number,
    open_regular,
    read_index,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


MANIFEST_FILE = "shardkit.json"  # Name of the manifest in a checkpoint's directory.

FORMAT = "shardkit checkpoint"
FORMAT_VERSION = 1

BLOCK_NBYTES = 4 << 20
"""Size of the blocks of an item that have a checksum each, so that parts can be verified."""

STEP_NBYTES = 1 << 19  # Bytes that are copied and summed while they are in the CPU's cache.

_HEADER_NBYTES = 1 << 16


@dataclass(frozen=True)
class Item:
    """Bytes of one entry, or of one box of a sharded tensor, in a file."""

    offset: int  # Offset in the file.
    nbytes: int  # Number of its bytes.
    # Offset in the item of a tensor's elements, in row-major order; None: it is something else.
    data_offset: int | None
    crc32s: tuple[int, ...]  # Checksum of each `BLOCK_NBYTES`; the last may be shorter.

    def blocks(self, block_nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield start and end of each block, counted from the item's start, and its checksum."""
        for position, crc32 in enumerate(self.crc32s):
            start = position * block_nbytes
            yield start, min(start + block_nbytes, self.nbytes), crc32


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    nbytes: int  # Size of the file.
    items: tuple[Item, ...]  # Entries in it.


@dataclass(frozen=True)
class Header:
    """The part of a manifest that orders checkpoints."""

    sequence: int  # One more than the largest among the checkpoints beside it.
    step: int | None  # The `step` that was saved as an extra, if it was an integer.
    world_size: int  # Number of ranks that wrote it.
    shardkit: str  # Version of shardkit that wrote it.


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    header: Header  # Header, which orders it among others.
    files: Mapping[str, StoredFile]  # Files by name, except `.metadata`.
    metadata_nbytes: int  # Size of `.metadata`.
    metadata_crc32: int  # Checksum of `.metadata`.
    # Description of how parameters were spread over ranks, for people to read.
    layout: Mapping[str, Any] = field(default_factory=dict)
    block_nbytes: int = BLOCK_NBYTES  # Value of `BLOCK_NBYTES` when it was written.
    # The process that saved it, for people to read; empty if it was not recorded.
    saved_by: str = ""
    # Entries of each model, if ranks had different ones (stages of a pipeline).
    stages: Sequence[Sequence[str]] = ()
    # Keys on the ways to entries that are no strings, by entry: position in its path, and the key.
    # `.metadata` has them as strings.
    keys: Mapping[str, Sequence[tuple[int, Key]]] = field(default_factory=dict)

    def path_of(self, entry: str, path: Keys) -> Keys:
        """Return the path of an entry in `.metadata` with the keys that were saved.

        Raises:
            CheckpointError: The path has other keys there.
        """
        result = list(path)
        for position, key in self.keys.get(entry, ()):
            if position >= len(path) or path[position] != str(key):
                msg = f"{MANIFEST_FILE} and .metadata differ about the keys of {entry!r}. {DAMAGED}"
                raise CheckpointError(msg)
            result[position] = key
        return tuple(result)

    def dump(self) -> bytes:
        """Return the content of the file."""
        header = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self.header)}
        body = {
            "block_nbytes": self.block_nbytes,
            "metadata": {"nbytes": self.metadata_nbytes, "crc32": self.metadata_crc32},
            "layout": self.layout,
            "saved_by": self.saved_by,
            "stages": self.stages,
            "keys": self.keys,
            "files": {
                name: {
                    "nbytes": stored.nbytes,
                    # offset, nbytes, data_offset, crc32s
                    "items": [[i.offset, i.nbytes, i.data_offset, i.crc32s] for i in stored.items],
                }
                for name, stored in self.files.items()
            },
        }
        first, second = (_line(part) for part in (header, body))
        return b'{"header":%b,\n"body":%b}\n' % (first, second)


def _line(part: Mapping[str, Any]) -> bytes:
    text = json.dumps(part, separators=(",", ":")).encode()
    return b'%b,"crc32":%d' % (text, zlib.crc32(text))


def read_header(directory: Path) -> Header:
    """Return the header of a checkpoint, and read no more; or raise FileNotFoundError."""
    path = directory / MANIFEST_FILE
    with open(open_regular(path), "rb") as file:  # noqa: PTH123 - a descriptor
        return _parse_header(file.readline(_HEADER_NBYTES), path)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint, after checks that it is consistent."""
    path = directory / MANIFEST_FILE
    first, newline, second = read_index(path).partition(b"\n")
    header = _parse_header(first + newline, path)
    body = _parse_line(second, b'"body":', b"}\n", path)
    try:
        return _parse_body(body, header)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = f"{path}: not the manifest of a shardkit checkpoint: {error!r}. {DAMAGED}"
        raise CheckpointError(msg) from error


def _parse_body(body: Mapping[str, Any], header: Header) -> Manifest:
    """Return the content of the body; raise some error if it cannot be right."""
    block_nbytes = _natural(body["block_nbytes"], "block_nbytes", at_least=1)
    files = {}
    for name, stored in body["files"].items():
        if not is_plain_name(name) or name == MANIFEST_FILE:
            msg = f"it lists {name!r}, expected files of this directory"
            raise ValueError(msg)
        nbytes = _natural(stored["nbytes"], f"size of {name!r}")
        items = tuple(Item(o, n, data, tuple(crcs)) for o, n, data, crcs in stored["items"])
        end = 0
        for item in items:
            _check_item(item, name, block_nbytes)
            if item.offset < end:
                msg = f"two items of {name!r} overlap at byte {item.offset}"
                raise ValueError(msg)
            end = item.offset + item.nbytes
        if end > nbytes:
            msg = f"an item of {name!r} ends at byte {end}, the file at {nbytes}"
            raise ValueError(msg)
        files[name] = StoredFile(nbytes, items)
    layout, saved_by = body["layout"], body.get("saved_by", "")
    if not isinstance(layout, dict) or not isinstance(saved_by, str):
        msg = "layout or saved_by is of another type"
        raise TypeError(msg)
    stages = body.get("stages", [])
    if not all(isinstance(name, str) for stage in stages for name in stage):
        msg = "stages have names of another type"
        raise TypeError(msg)
    keys = {
        entry: [
            (_natural(position, f"position in {entry!r}"), key_of_number(key))
            for position, key in found
        ]
        for entry, found in body.get("keys", {}).items()
    }
    return Manifest(
        header,
        files,
        metadata_nbytes=_natural(body["metadata"]["nbytes"], "size of .metadata"),
        metadata_crc32=_natural(body["metadata"]["crc32"], "checksum of .metadata"),
        layout=layout,
        block_nbytes=block_nbytes,
        saved_by=saved_by,
        stages=stages,
        keys=keys,
    )


def _check_item(item: Item, name: str, block_nbytes: int) -> None:
    """Raise ValueError if an item is impossible."""
    what = f"a number of an item of {name!r}"
    data_offset = 0 if item.data_offset is None else item.data_offset
    for number in (item.offset, item.nbytes, data_offset, *item.crc32s):
        _natural(number, what)
    if data_offset > item.nbytes:
        msg = f"an item of {name!r} has {item.nbytes} bytes, and data at byte {data_offset}"
        raise ValueError(msg)
    if len(item.crc32s) != -(-item.nbytes // block_nbytes):
        msg = (
            f"an item of {name!r} has {len(item.crc32s)} checksums for {item.nbytes} bytes in "
            f"blocks of {block_nbytes}"
        )
        raise ValueError(msg)


def _natural(value: Any, what: str, *, at_least: int = 0) -> int:
    if type(value) is not int or not at_least <= value < SIZE_LIMIT:
        msg = f"{what} is {value!r}"
        raise ValueError(msg)
    return value


def _parse_header(line: bytes, path: Path) -> Header:
    header = _parse_line(line, b'{"header":', b",\n", path)
    found = (header.pop("format", None), header.pop("version", None))
    if found != (FORMAT, FORMAT_VERSION):
        msg = (
            f"{path}: expected format {FORMAT!r}, version {FORMAT_VERSION}, found {found[0]!r}, "
            f"version {found[1]!r}. Load it with the version of shardkit that wrote it "
            f"({header.get('shardkit', 'unknown')})."
        )
        raise CheckpointError(msg)
    try:
        result = Header(**header)
        _natural(result.sequence, "sequence")
        _natural(result.world_size, "world_size", at_least=1)
        _natural(abs(result.step or 0), "step")
        len(result.shardkit)
    except (TypeError, ValueError) as error:
        msg = f"{path}: not the manifest of a shardkit checkpoint: {error}. {DAMAGED}"
        raise CheckpointError(msg) from error
    return result


def _parse_line(line: bytes, before: bytes, after: bytes, path: Path) -> dict[str, Any]:
    """Return the object in a line that has a valid checksum."""
    text, separator, crc32 = line.removeprefix(before).rpartition(b',"crc32":')
    intact = (
        line.startswith(before)
        and line.endswith(after)
        and separator
        and crc32.removesuffix(after) == b"%d" % zlib.crc32(text)
    )
    if not intact:
        msg = f"{path}: its checksum is not that of its content. {DAMAGED}"
        raise CheckpointError(msg)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{path}: no JSON: {error}. {DAMAGED}"
        raise CheckpointError(msg) from error
    if not isinstance(parsed, dict):
        msg = f"{path}: expected an object, found {type(parsed).__name__}. {DAMAGED}"
        raise CheckpointError(msg)
    return parsed
