"""The file of one rank's record: lines of JSON, compressed.

``rank-N.jsonl.gz`` holds one object in each line:

| line | holds |
| --- | --- |
| first | `RankHeader`'s fields, and ``version`` |
| others | ``strings``: names that are new; a column for each field of `StepEvent`: numbers of names, or whole numbers. ``begin`` is in nanoseconds of this rank's clock after the ``begin`` of the event before; ``end`` counts from ``begin`` |
| last | ``clock``: the `Clock` of this rank, which turns its times into those of rank 0 |

Each line is compressed separately, so the file of a run that died can be read up to its last line.
"""  # noqa: E501 - a table

from __future__ import annotations

import array
import dataclasses
import gzip
import itertools
import json
import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit._errors import StateError
from shardkit._events import StepEvent
from shardkit.tracing.clocks import Clock

if TYPE_CHECKING:
    from pathlib import Path

_VERSION = 2
_NS = 1e9
_MAX_RANKS = 1 << 20
_MAX_LINE = 1 << 28  # Characters; a line of 50,000 events has some millions.
_FIELDS = StepEvent._fields
_NUMBERS = ("group", "nbytes", "num_ranks", "opened", "closed")
_TIMES = ("begin", "end")
_NOT_A_RECORD = (
    *(KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError),
    *(gzip.BadGzipFile, OverflowError),
)
_WORDS = tuple(name for name in _FIELDS if name not in (*_NUMBERS, *_TIMES))


@dataclass(slots=True)
class RankHeader:
    """The part of a file before the events."""

    rank: int
    world_size: int
    host: str = ""  # Name of its host.
    device: str = "cpu"  # Type of its device.
    run: str = ""  # Name of the record, the same on all ranks; each record has another one.
    # Ranks that communicate over each axis, by the axis' name in events and their number, such as
    # ``shard 4``.
    axes: dict[str, list[int]] = field(default_factory=dict)
    # Clock of this rank, as known when the record begins.
    clock: Clock = field(default_factory=Clock)


@dataclass(slots=True)
class RankRecord:
    """A rank's record in memory."""

    header: RankHeader  # Header of the file, with the last clock that is known.
    events: Sequence[StepEvent]  # Events in the order of their start, in seconds of rank 0's clock.
    is_whole: bool = True  # Whether the record is complete, and not cut off.


class PackedEvents(Sequence[StepEvent]):
    """Events of a file, in a quarter of the memory; each event is made on access."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        begins = columns["begin"]
        order = sorted(range(len(begins)), key=begins.__getitem__)
        self._columns: list[Any] = []
        for name in _FIELDS:
            ordered = [columns[name][at] for at in order]
            kind = "d" if name in _TIMES else "q"
            self._columns.append(ordered if name in _WORDS else array.array(kind, ordered))

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[StepEvent]:
        return map(StepEvent, *self._columns)

    def __getitem__(self, at: Any) -> Any:
        found = [column[at] for column in self._columns]
        return [*map(StepEvent, *found)] if isinstance(at, slice) else StepEvent(*found)


class RecordFile:
    """A rank's file while it is written, in the folder of all ranks' files, which it makes."""

    def __init__(self, folder: Path, header: RankHeader) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank-{header.rank}.jsonl.gz"
        self._numbers: dict[str, int] = {}
        self._last_ns = 0
        self._path.write_bytes(b"")
        self._append({"version": _VERSION, **dataclasses.asdict(header)})

    def write(self, events: Iterable[StepEvent]) -> None:
        """Add events in any order, one or more."""
        ordered = sorted(events, key=operator.attrgetter("begin"))
        columns: dict[str, Any] = dict(zip(_FIELDS, zip(*ordered, strict=True), strict=True))
        known = len(self._numbers)
        for name in _WORDS:
            numbers = self._numbers
            columns[name] = [numbers.setdefault(word, len(numbers)) for word in columns[name]]
        begins = [round(at * _NS) for at in columns["begin"]]
        ends = [round(at * _NS) for at in columns["end"]]
        columns["begin"] = list(map(operator.sub, begins, [self._last_ns, *begins]))
        columns["end"] = list(map(operator.sub, ends, begins))
        self._last_ns = begins[-1]
        self._append({"strings": list(self._numbers)[known:], **columns})

    def close(self, header: RankHeader) -> None:
        """Write the last line, which holds what is known at the end."""
        self._append({"clock": dataclasses.asdict(header.clock), "axes": header.axes})

    def _append(self, content: dict[str, Any]) -> None:
        line = json.dumps(content, separators=(",", ":")).encode() + b"\n"
        with self._path.open("ab") as file:
            file.write(gzip.compress(line, 5))


def remove_records(folder: Path) -> str:
    """Delete the files of an earlier record; return why that failed, or an empty text."""
    try:
        for path in folder.glob("rank-*.jsonl.gz"):
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"{error.filename} cannot be removed: {error.strerror}"
    return ""


def read_folder(folder: Path) -> list[RankRecord]:
    """Return the records of all ranks in a folder, in rank order.

    Raises:
        StateError: There is no record, a file is no record, or the records are of runs of different
            sizes.
    """
    paths = sorted(folder.glob("rank-*.jsonl.gz"))
    if not paths:
        msg = (
            f"{str(folder)!r} must be a folder that shardkit.record has written, with files "
            f"rank-N.jsonl.gz; there is none."
        )
        raise StateError(msg)
    records = sorted(map(read_record, paths), key=lambda record: record.header.rank)
    runs = {(record.header.world_size, record.header.run) for record in records}
    if len(runs) > 1:
        sizes = sorted(size for size, _ in runs)
        msg = (
            f"{str(folder)!r} has files of {len(runs)} records, of {sizes} ranks. Record each run "
            f"into a folder of its own."
        )
        raise StateError(msg)
    for before, record in itertools.pairwise(records):
        if before.header.rank == record.header.rank:
            msg = f"{str(folder)!r} has two files of rank {record.header.rank}. Keep one of them."
            raise StateError(msg)
    return records


def read_record(path: Path) -> RankRecord:
    """Return the record in one file.

    Raises:
        StateError: The file is no record.
    """
    try:
        lines = _lines_of(path)
        content = next(lines, None)
        if content is None:
            msg = (
                f"{path} ends before its first event: the rank has died, or the file was not "
                f"copied to its end. Delete it to see the other ranks."
            )
            raise StateError(msg)
        if content.pop("version") != _VERSION:
            msg = f"{path}: written by another version of shardkit. Read it with that one."
            raise StateError(msg)
        header = RankHeader(**{**content, "clock": Clock(**content["clock"])})
        strings: list[str] = []
        columns: dict[str, list[Any]] = {name: [] for name in _FIELDS}
        is_whole = False
        for content in lines:
            if "clock" in content:
                header.clock, header.axes = Clock(**content["clock"]), content["axes"]
                is_whole = True
                continue
            strings += map(_shown, content["strings"])
            for name, column in columns.items():
                column.extend(content[name])
        _check_header(header)
        for name in _WORDS:
            columns[name] = [strings[number] for number in columns[name]]
        begins = list(itertools.accumulate(columns["begin"]))
        ends = [begin + ns for begin, ns in zip(begins, columns["end"], strict=True)]
        columns["begin"] = [header.clock.align(at / _NS) for at in begins]
        columns["end"] = [header.clock.align(at / _NS) for at in ends]
        events = PackedEvents(columns)
    except _NOT_A_RECORD as error:
        msg = f"{path} is not a record of shardkit: {type(error).__name__}: {error}"
        raise StateError(msg) from error
    return RankRecord(header, events, is_whole)


def _check_header(header: RankHeader) -> None:
    """Refuse a header that no rank writes: the file may come from a stranger.

    Raises:
        ValueError: The header has such a value.
    """
    numbers: list[Any] = [0, header.rank, header.world_size - 1, _MAX_RANKS]
    if {*map(type, numbers)} != {int} or numbers != sorted(numbers):
        msg = f"rank {header.rank!r:.40} of {header.world_size!r:.40} ranks"
        raise ValueError(msg)
    header.host, header.device = _shown(header.host), _shown(header.device)
    header.run = _shown(header.run)
    for name, ranks in header.axes.items():
        if not {*map(type, (name, *ranks))} <= {str, int} or not isinstance(ranks, list):
            msg = f"axis {name!r:.40} of ranks {ranks!r:.40}"
            raise TypeError(msg)


def _shown(word: str) -> str:
    """Return a word in a form that is safe for a terminal and a picture."""
    if word.isprintable():
        return word
    return "".join(each if each.isprintable() else "\ufffd" for each in word)


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file, up to the point where it was cut off."""
    has_begun = False
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            while line := file.readline(_MAX_LINE):
                yield json.loads(line)
                has_begun = True
    except (EOFError, zlib.error):
        return
    except gzip.BadGzipFile:  # Also if one byte is left of a line.
        if not has_begun:
            raise
