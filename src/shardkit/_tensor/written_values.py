"""What each rank wrote to its shards, by itself, since ranks compared.

Writes are logged where they happen. What filled or loaded a parameter is compared between ranks.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardkit._compat import torch_autograd, torch_tensors
from shardkit._settings import watch_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from shardkit._tensor.sharded import ShardedTensor


# --- the log of writes ----------------------------------------------------------------------------
#
# All pieces of a bucket share the version counter of their shard. That says enough to whoever
# gathers the whole bucket, and too little to whoever keeps a copy of one parameter: an optimizer
# of the biases would seem to write the weights as well. A log counts the writes of each
# parameter. Writes that go past it are known by the version counter, and count as writes of all.

_LOG_ATTRIBUTE = "shardkit_write_log"


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

    def __init__(self, piece: ShardedTensor) -> None:
        memory = memory_of(piece)
        self._log = memory.__dict__.setdefault(_LOG_ATTRIBUTE, WriteLog())
        self._state = self._state_of(memory, piece)

    def is_past(self, piece: ShardedTensor) -> bool:
        """Whether the piece was written since, or has other memory."""
        memory = memory_of(piece)
        log = memory.__dict__.get(_LOG_ATTRIBUTE)
        return log is not self._log or self._state_of(memory, piece) != self._state

    def _state_of(self, memory: Tensor, piece: ShardedTensor) -> tuple[int, int]:
        return _num_unseen(memory), self._log.counts.get(piece.spec.index, 0)


def memory_of(piece: ShardedTensor) -> Tensor:
    """Return the tensor whose version counter a write of the piece raises."""
    return piece.local_piece if piece.flat is None else piece.flat


def note_raised(memory: Tensor, written: Iterable[Any]) -> None:
    """Note that the version counter of a memory was raised once, for writes of some pieces.

    Other tensors may be among them.
    """
    log: WriteLog | None = memory.__dict__.get(_LOG_ATTRIBUTE)
    if log is not None:
        pieces = (each for each in written if hasattr(each, "local_piece"))
        log.note({each.spec.index for each in pieces if memory_of(each) is memory}, 1)


@contextlib.contextmanager
def writing_only(pieces: Iterable[ShardedTensor]) -> Iterator[None]:
    """Note that what is written inside of the context, by whatever operators, is these pieces."""
    by_memory: dict[int, tuple[Tensor, list[int]]] = {}
    for piece in pieces:
        memory = memory_of(piece)
        by_memory.setdefault(id(memory), (memory, []))[1].append(piece.spec.index)
    before = {key: _num_unseen(memory) for key, (memory, _) in by_memory.items()}
    try:
        yield
    finally:
        for key, (memory, indices) in by_memory.items():
            log: WriteLog | None = memory.__dict__.get(_LOG_ATTRIBUTE)
            raised = _num_unseen(memory) - before[key]
            if log is not None and raised:
                log.note(indices, raised)


def _num_unseen(memory: Tensor) -> int:
    """Return how often the version counter was raised by writes that no log counts."""
    log: WriteLog | None = memory.__dict__.get(_LOG_ATTRIBUTE)
    return torch_tensors.version_of(memory) - (0 if log is None else log.num_seen)


# --- what ranks compare ---------------------------------------------------------------------------
#
# Each rank writes its piece of a whole that it has, so ranks that have other ones patch a parameter
# together from all of them. What they wrote is noted where a whole comes in: by `copy_` from a
# plain tensor, a random fill, a number, a write into a view. Updates by elementwise operators come
# from sharded tensors: those of an optimizer's step are followed, and not noted. Of others that a
# trained parameter gets it is noted which operators they were: all ranks have to make them.
# What is written to pieces (a checkpoint) goes past operators: then nothing is known any more.

_ATTRIBUTE = "shardkit_followed"
_MAX_SAMPLES = 1024
_PART_NBYTES = 2**20  # Looked at together, which takes 16 times as much memory.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # Odd, as int64: each place counts by another multiple.
_NUM_ALWAYS_SAMPLED = 8
_MASK = (1 << 62) - 1


@torch.no_grad()
def fingerprint(
    tensor: Tensor, max_samples: int = _MAX_SAMPLES, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a 0-dim int64 that depends on the bits of evenly spaced elements.

    Tensors that differ in all elements, as those of different seeds do, have different ones. So do
    tensors that differ in one of the elements looked at.

    Args:
        tensor: Tensor of any shape and dtype, with memory.
        max_samples: Number of elements that are looked at; 0: all of them.
        dtype: Dtype to cast to before; None: as it is.
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    if max_samples and flat.numel() > max_samples:
        flat = flat[:: flat.numel() // max_samples][:max_samples]
    octets = flat.to(dtype or flat.dtype).contiguous().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first, part in enumerate(octets.split(_PART_NBYTES)):
        start = first * _PART_NBYTES + 1
        places = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (places.mul_(_FACTOR)).mul_(part.to(torch.int64).add_(1)).sum()
    return total


@dataclass(slots=True)
class WrittenValue:
    """What was last written to a parameter.

    Attributes:
        steps: Hash of the operators that wrote parts of it; 0: it was written as a whole.
        sample: Fingerprint of what was written, 0-dim int64; None: this time nobody looked.
        past_operators: Version of its memory, less the writes that were followed.
        memory_id: Identity of its memory.
    """

    steps: int
    sample: Tensor | None
    past_operators: int
    memory_id: int

    @property
    def number(self) -> int:
        """What ranks that wrote the same have in common; waits for the device."""
        return (self.steps + (0 if self.sample is None else int(self.sample))) & _MASK

    @property
    def is_seen(self) -> bool:
        """Whether anything is known of what was written."""
        return self.sample is not None or self.steps != 0

    def holds_for(self, param: Any) -> bool:
        """Whether the parameter still has what was written, but for updates by operators."""
        memory = memory_of(param)
        return id(memory) == self.memory_id and _past_operators(memory) == self.past_operators


class _Noted:
    """How many writes were noted in this process."""

    count = 0


def num_noted() -> int:
    """Return how many writes were noted in this process: a step looks no further if it is one."""
    return _Noted.count


def follow(memory: Tensor) -> None:
    """Count a write by an operator that was not noted: what was noted before goes on to hold."""
    count = memory.__dict__.get(_ATTRIBUTE)
    if count is not None:
        memory.__dict__[_ATTRIBUTE] = count + 1


def _past_operators(memory: Tensor) -> int:
    followed: int = memory.__dict__.get(_ATTRIBUTE, 0)
    return torch_tensors.version_of(memory) - followed


def note_written(
    target: ShardedTensor,
    wholes: Callable[[], Iterable[Tensor]],
    *,
    part_by: Any = None,
    max_samples: int = _MAX_SAMPLES,
) -> None:
    """Note what was written to a parameter, after its version was raised.

    Args:
        target: The parameter, or a tensor of its memory. Nothing is noted of gradients and state.
        wholes: Function that returns the written values, equal on all ranks.
        part_by: Operator that has written a part; None: all of it was overwritten.
        max_samples: Number of elements, as for `fingerprint`.
    """
    spec = target.spec
    entry = _entry_of(target)
    if entry is None:
        return
    if spec.is_traced or target.is_meta or spec.mesh.size() == 1:
        return
    memory = memory_of(target)
    memory.__dict__.setdefault(_ATTRIBUTE, 0)
    if not watch_settings.compare_values:
        return
    _Noted.count += 1
    entry.num_written += 1
    before: WrittenValue | None = entry.written
    steps, sample = 0, None
    if part_by is not None:
        steps = zlib.crc32(part_by.name().encode()) + (1 if before is None else 31 * before.steps)
        steps &= _MASK
    if _is_sampled(entry.num_written):
        dtype = target.dtype if part_by is None else None
        parts = [fingerprint(_plain(whole), max_samples, dtype) for whole in wholes()]
        if part_by is not None and before is not None and before.sample is not None:
            parts.append(before.sample)
        sample = sum((part.to(parts[0].device) for part in parts[1:]), parts[0]) if parts else None
    entry.written = WrittenValue(steps, sample, _past_operators(memory), id(memory))


class _InStep(threading.local):
    """Whether this thread is inside of an optimizer's step."""

    now = False


_in_step = _InStep()


def begin_step(*_: Any) -> None:
    """An optimizer's step begins, which ranks compare by its settings and number."""
    _in_step.now = True


def end_step(*_: Any) -> None:
    """It has ended. After one that has raised this comes with the next."""
    _in_step.now = False


def note_update(operator: Any, targets: Iterable[Any]) -> None:
    """Note an elementwise write to trained parameters, after their versions were raised.

    Not one of an optimizer's step, or of a backward, whose order is each rank's own.
    """
    if _in_step.now or torch_autograd.in_backward():
        return
    for target in targets:
        if hasattr(target, "local_piece") and target.requires_grad:
            note_written(target, tuple, part_by=operator)


def _plain(whole: Tensor) -> Tensor:
    """Return this rank's part of a DTensor: ranks that are compared have the same one."""
    to_local: Callable[[], Tensor] | None = getattr(whole, "to_local", None)
    return whole if to_local is None else to_local()


def is_param(tensor: ShardedTensor) -> bool:
    """Whether a tensor is a parameter of a group, or has its memory; not a gradient, or state."""
    return _entry_of(tensor) is not None


def _entry_of(tensor: ShardedTensor) -> Any:
    entry: Any = None if tensor.spec.entry is None else tensor.spec.entry()
    is_found = entry is not None and entry.param.local_piece is tensor.local_piece
    return entry if is_found else None


def _is_sampled(num_written: int) -> bool:
    """Whether values are looked at: seldom, where a parameter is written in every step."""
    return num_written <= _NUM_ALWAYS_SAMPLED or num_written & (num_written - 1) == 0


def constant(value: float, like: Tensor) -> Tensor:
    """Return a tensor with the fingerprint of one of the shape of `like`, filled with a number."""
    count = min(like.numel(), _MAX_SAMPLES)
    return torch.full((count,), value, dtype=like.dtype)
