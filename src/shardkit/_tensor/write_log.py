"""Which of the parameters that share memory was written, for those who ask.

All pieces of a bucket share the version counter of their shard. That says enough to whoever gathers
the whole bucket, and too little to whoever keeps a copy of one parameter: an optimizer of the
biases would seem to write the weights as well. A log counts the writes of each parameter. Writes
that go past it are known by the version counter, and count as writes of all.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

_ATTRIBUTE = "shardkit_write_log"


class Piece(Protocol):
    """What is known here of a `ShardedTensor`."""

    local_piece: Tensor
    flat: Tensor | None
    spec: Any


class WriteLog:
    """Writes of the pieces in one memory.

    Attributes:
        num_seen: Number of times that counted writes raised the version counter.
        counts: Number of writes by the index of the parameter in its bucket.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self.counts: dict[int, int] = {}

    def note(self, indices: Iterable[int], num_raised: int) -> None:
        """Note a write of some parameters, which raised the version counter."""
        self.num_seen += num_raised
        for index in indices:
            self.counts[index] = self.counts.get(index, 0) + 1


class Mark:
    """A point in the history of one parameter's piece."""

    def __init__(self, piece: Piece) -> None:
        memory = memory_of(piece)
        self._log = memory.__dict__.setdefault(_ATTRIBUTE, WriteLog())
        self._state = self._state_of(memory, piece)

    def is_past(self, piece: Piece) -> bool:
        """Whether the piece was written since, or has other memory."""
        memory = memory_of(piece)
        log = memory.__dict__.get(_ATTRIBUTE)
        return log is not self._log or self._state_of(memory, piece) != self._state

    def _state_of(self, memory: Tensor, piece: Piece) -> tuple[int, int]:
        unseen = _compat.version_of(memory) - self._log.num_seen
        return unseen, self._log.counts.get(piece.spec.index, 0)


def memory_of(piece: Piece) -> Tensor:
    """Return the tensor whose version counter a write of the piece raises."""
    return piece.local_piece if piece.flat is None else piece.flat


def note_raised(memory: Tensor, written: Iterable[Any]) -> None:
    """Note that the version counter of a memory was raised once, for writes of some pieces.

    Other tensors may be among them.
    """
    log: WriteLog | None = memory.__dict__.get(_ATTRIBUTE)
    if log is not None:
        pieces = (each for each in written if hasattr(each, "local_piece"))
        log.note({each.spec.index for each in pieces if memory_of(each) is memory}, 1)


@contextlib.contextmanager
def writing_only(pieces: Iterable[Piece]) -> Iterator[None]:
    """Note that what is written inside of the context, by whatever operators, is these pieces."""
    by_memory: dict[int, tuple[Tensor, list[int]]] = {}
    for piece in pieces:
        memory = memory_of(piece)
        by_memory.setdefault(id(memory), (memory, []))[1].append(piece.spec.index)
    before = {key: _compat.version_of(memory) for key, (memory, _) in by_memory.items()}
    seen = {key: _num_seen(memory) for key, (memory, _) in by_memory.items()}
    try:
        yield
    finally:
        for key, (memory, indices) in by_memory.items():
            log: WriteLog | None = memory.__dict__.get(_ATTRIBUTE)
            raised = _compat.version_of(memory) - before[key] - (_num_seen(memory) - seen[key])
            if log is not None and raised:
                log.note(indices, raised)


def _num_seen(memory: Tensor) -> int:
    log: WriteLog | None = memory.__dict__.get(_ATTRIBUTE)
    return 0 if log is None else log.num_seen
