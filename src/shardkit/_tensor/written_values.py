"""Writes of each rank to its shards since the last comparison.

Writes are logged where they happen. Values that filled or loaded a parameter are compared between
ranks.
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
# All pieces of a bucket share the version counter of their shard. That is enough for a gather of
# the whole bucket, but not for a copy of one parameter: an optimizer of the biases would seem to
# write the weights as well. So a log counts the writes of each parameter. The version counter shows
# writes that bypass the log, and they count as writes of all parameters.

_LOG_ATTRIBUTE = "shardkit_write_log"


class WriteLog:
    """Log of writes to the pieces in one memory."""

    def __init__(self) -> None:
        self.num_seen = 0  # Number of times that counted writes raised the version counter.
        # Number of writes by the index of the parameter in its bucket.
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


def note_raised(memory: Tensor, written: Iterable[Any], num_raised: int = 1) -> None:
    """Note that writes of some pieces raised the version counter of a memory so many times.

    Other tensors may be among them.
    """
    log: WriteLog | None = memory.__dict__.get(_LOG_ATTRIBUTE)
    if log is not None:
        pieces = (each for each in written if hasattr(each, "local_piece"))
        log.note({each.spec.index for each in pieces if memory_of(each) is memory}, num_raised)


@contextlib.contextmanager
def writing_only(pieces: Iterable[ShardedTensor]) -> Iterator[None]:
    """Note that operators inside the context write only these pieces."""
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
    """Return how many times writes outside of the log raised the version counter."""
    log: WriteLog | None = memory.__dict__.get(_LOG_ATTRIBUTE)
    return torch_tensors.version_of(memory) - (0 if log is None else log.num_seen)


# --- what ranks compare ---------------------------------------------------------------------------
#
# Each rank writes its piece of a whole tensor that it has. If ranks have different whole tensors,
# they build a parameter from parts of all of them. So writes of whole tensors are noted: `copy_`
# from a plain tensor, a random fill, a number, a write into a view. Updates by elementwise
# operators come from sharded tensors. Those of an optimizer's step are followed, and not noted. For
# other updates of a trained parameter the operators are noted, since all ranks have to run them.
# Writes to pieces (a checkpoint) bypass operators: after them nothing is known any more.

_ATTRIBUTE = "shardkit_followed"
_MAX_SAMPLES = 1024
_PART_NBYTES = 2**20  # Bytes read together, which takes 16 times as much memory.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # Odd, as int64: each place has another multiple of it.
_NUM_ALWAYS_SAMPLED = 8
_MASK = (1 << 62) - 1


@torch.no_grad()
def fingerprint(
    tensor: Tensor, max_samples: int = _MAX_SAMPLES, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a 0-dim int64 that depends on the bits of evenly spaced elements.

    Tensors that differ in all elements, as with different seeds, have different fingerprints. So do
    tensors that differ in one of the sampled elements.

    Args:
        tensor: Tensor of any shape and dtype, with memory.
        max_samples: Number of elements to read; 0: all of them.
        dtype: Dtype to cast to before; None: no cast.
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    if max_samples and flat.numel() > max_samples:
        flat = flat[:: flat.numel() // max_samples][:max_samples]
    flat = flat.to(dtype or flat.dtype).contiguous().resolve_conj().resolve_neg()
    octets = flat.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first, part in enumerate(octets.split(_PART_NBYTES)):
        start = first * _PART_NBYTES + 1
        places = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (places.mul_(_FACTOR)).mul_(part.to(torch.int64).add_(1)).sum()
    return total


@dataclass(slots=True)
class WrittenValue:
    """Last write to a parameter."""

    steps: int  # Hash of the operators that wrote parts of it; 0: it was written as a whole.
    # Fingerprint of the written values, 0-dim int64; None: none was taken this time.
    sample: Tensor | None
    past_operators: int  # Version of its memory, minus the number of followed writes.
    memory_id: int  # Identity of its memory.

    @property
    def number(self) -> int:
        """Return a number that is equal on ranks that wrote the same; wait for the device."""
        return (self.steps + (0 if self.sample is None else int(self.sample))) & _MASK

    @property
    def is_seen(self) -> bool:
        """Whether anything is known about the written values."""
        return self.sample is not None or self.steps != 0

    def holds_for(self, param: Any) -> bool:
        """Whether the parameter still has the written values, apart from updates by operators."""
        memory = memory_of(param)
        return id(memory) == self.memory_id and _past_operators(memory) == self.past_operators


class _Noted:
    """Count of the writes that were noted in this process."""

    count = 0


def num_noted() -> int:
    """Return the number of noted writes in this process; a step that finds more looks further."""
    return _Noted.count


def follow(memory: Tensor) -> None:
    """Count a write by an operator that was not noted, so that earlier notes stay valid."""
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
    """Note a write to a parameter, after its version was raised.

    Args:
        target: The parameter, or a tensor of its memory. Writes to gradients and state are not
            noted.
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
    count = entry.num_written
    if count <= _NUM_ALWAYS_SAMPLED or count & (count - 1) == 0:  # Rarely, if written in each step.
        dtype = target.dtype if part_by is None else None
        parts = [fingerprint(_plain(whole), max_samples, dtype) for whole in wholes()]
        if part_by is not None and before is not None and before.sample is not None:
            parts.append(before.sample)
        sample = sum((part.to(parts[0].device) for part in parts[1:]), parts[0]) if parts else None
    entry.written = WrittenValue(steps, sample, _past_operators(memory), id(memory))


_in_step = threading.local()
"""Thread-local: `now` says whether the thread is inside an optimizer's step."""


def begin_step(*_: Any) -> None:
    """Begin an optimizer's step; ranks compare steps by their settings and number."""
    _in_step.now = True


def end_step(*_: Any) -> None:
    """End an optimizer's step. If a step has raised, the next one calls this."""
    _in_step.now = False


def note_update(operator: Any, targets: Iterable[Any]) -> None:
    """Note an elementwise write to trained parameters, after their versions were raised.

    Writes of an optimizer's step are not noted. Nor are writes of a backward, whose order differs
    between ranks.
    """
    if getattr(_in_step, "now", False) or torch_autograd.in_backward():
        return
    for target in targets:
        if hasattr(target, "local_piece") and target.requires_grad:
            note_written(target, tuple, part_by=operator)


def _plain(whole: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; ranks that are compared have the same part."""
    to_local: Callable[[], Tensor] | None = getattr(whole, "to_local", None)
    return whole if to_local is None else to_local()


def is_param(tensor: ShardedTensor) -> bool:
    """Whether a tensor is a parameter of a group or has its memory, and no gradient or state."""
    return _entry_of(tensor) is not None


def _entry_of(tensor: ShardedTensor) -> Any:
    entry: Any = None if tensor.spec.entry is None else tensor.spec.entry()
    is_found = entry is not None and entry.param.local_piece is tensor.local_piece
    return entry if is_found else None


def constant(value: float, like: Tensor) -> Tensor:
    """Return a tensor with the same fingerprint as one like `like` that is filled with a number."""
    count = min(like.numel(), _MAX_SAMPLES)
    return torch.full((count,), value, dtype=like.dtype, device="cpu")
