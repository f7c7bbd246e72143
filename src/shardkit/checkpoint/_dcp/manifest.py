"""`shardkit.json`: what is in a checkpoint's files, so that damage is found when it is read.

Written last, so a directory that has a valid one was complete. Two lines of one JSON object: the
header, which is all that is needed to order the checkpoints of a directory, and the body; each is
followed by its CRC-32.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit._errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MANIFEST_FILE = "shardkit.json"
"""Its name in a checkpoint's directory."""

FORMAT = "shardkit checkpoint"
FORMAT_VERSION = 1

BLOCK_NBYTES = 4 << 20
"""Every so many bytes of an item have a checksum of their own: parts of it can be verified."""

DAMAGED = "The checkpoint is damaged: load another one."


@dataclass(frozen=True)
class Item:
    """Bytes of one entry, or of one box of a sharded tensor, in a file.

    Attributes:
        offset: Where it begins in the file.
        nbytes: Its length.
        data_offset: Where the elements of a tensor begin in it, row after row; None if it holds
            something else than one tensor.
        crc32s: Of each `BLOCK_NBYTES` of it; the last block may be shorter.
    """

    offset: int
    nbytes: int
    data_offset: int | None
    crc32s: tuple[int, ...]

    def blocks(self, block_nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield start and end of each block, counted from the item's begin, and its checksum."""
        for position, crc32 in enumerate(self.crc32s):
            start = position * block_nbytes
            yield start, min(start + block_nbytes, self.nbytes), crc32


@dataclass(frozen=True)
class StoredFile:
    """A file of the checkpoint.

    Attributes:
        nbytes: Its size.
        items: What is in it.
    """

    nbytes: int
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Header:
    """What orders checkpoints.

    Attributes:
        sequence: One more than the largest among the checkpoints beside it.
        step: The `step` that was saved as an extra, if it was an integer.
        world_size: Ranks that wrote it.
        shardkit: Version that wrote it.
    """

    sequence: int
    step: int | None
    world_size: int
    shardkit: str


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        header: Orders it among others.
        files: By name, without `.metadata`.
        metadata_nbytes: Size of `.metadata`.
        metadata_crc32: Its checksum.
        layout: How parameters were spread over ranks, for people to read.
        block_nbytes: See `BLOCK_NBYTES`.
        saved_by: The process that saved it, for people to read; empty if it was not recorded.
    """

    header: Header
    files: Mapping[str, StoredFile]
    metadata_nbytes: int
    metadata_crc32: int
    layout: Mapping[str, Any] = field(default_factory=dict)
    block_nbytes: int = BLOCK_NBYTES
    saved_by: str = ""

    def dump(self) -> bytes:
        """Return the content of the file."""
        header = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self.header)}
        body = {
            "block_nbytes": self.block_nbytes,
            "metadata": {"nbytes": self.metadata_nbytes, "crc32": self.metadata_crc32},
            "layout": self.layout,
            "saved_by": self.saved_by,
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
    """Return the header of a checkpoint; reads only as much as there is of it.

    Raises:
        CheckpointError: There is none, it is damaged, or of another format.
        FileNotFoundError: There is no manifest.
    """
    path = directory / MANIFEST_FILE
    with path.open("rb") as file:
        return _parse_header(file.readline(1 << 16), path)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: It is damaged, or of another format.
        FileNotFoundError: There is no manifest.
    """
    path = directory / MANIFEST_FILE
    with path.open("rb") as file:
        first, second = file.readline(), file.read()
    header = _parse_header(first, path)
    body = _parse_line(second, b'"body":', b"}\n", path)
    try:
        files = {
            name: StoredFile(
                stored["nbytes"],
                tuple(Item(o, n, data, tuple(crcs)) for o, n, data, crcs in stored["items"]),
            )
            for name, stored in body["files"].items()
        }
        return Manifest(
            header,
            files,
            metadata_nbytes=body["metadata"]["nbytes"],
            metadata_crc32=body["metadata"]["crc32"],
            layout=body["layout"],
            block_nbytes=body["block_nbytes"],
            saved_by=body.get("saved_by", ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path}: not the manifest of a shardkit checkpoint: {error!r}. {DAMAGED}"
        raise CheckpointError(msg) from error


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
        return Header(**header)
    except TypeError as error:
        msg = f"{path}: not the manifest of a shardkit checkpoint: {error}. {DAMAGED}"
        raise CheckpointError(msg) from error


def _parse_line(line: bytes, before: bytes, after: bytes, path: Path) -> dict[str, Any]:
    """Return the object that stands in a line with its checksum."""
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
    parsed = json.loads(text)
    assert isinstance(parsed, dict)  # The checksum says that this is what was written.
    return parsed
