"""Square roots of lists, put off until an operator uses them: then computed part by part.

``torch._foreach_sqrt(exp_avg_sqs)`` and what follows it (division by the bias correction, addition
of eps) is how optimizers make the denominator of their update. Computed at once, it takes memory
of the size of the parameters and four passes through it. Put off, parts that fit into the cache
are made right where the update reads them, and are gone afterwards.

On the host only: an accelerator wants few large kernels.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._errors import ShardedTensorError
from shardkit._tensor.ops.contiguous import join, pieces_of
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit._tensor.ops.contiguous import Run

PART_NUMEL = 1 << 17
"""Elements per thread that are computed at once: a few tensors of them fit into its cache."""

_open: weakref.WeakValueDictionary[int, PutOff] = weakref.WeakValueDictionary()


class PutOff:
    """Roots of a list of sharded tensors and what was done to them since, not computed yet.

    The tensors that stand for them have no piece until somebody asks for one: that settles all.
    Changes of what they are computed from settle them before; a change that no operator on
    sharded tensors makes (by way of `to_local()`) is noticed by version counters.
    """

    def __init__(self, items: Sequence[ShardedTensor], runs: Sequence[Run]) -> None:
        self._calls: list[tuple[Any, list[Any]]] = []
        self._runs = runs
        self._specs = [item.spec for item in items]
        self._sources = join(items, runs)
        watched = {id(t): t for item in items for t in (item.local_piece, item.flat)}
        self._watched = [(t, _compat.version_of(t)) for t in watched.values() if t is not None]
        self.tensors = [ShardedTensor.without_piece(item, self) for item in items]
        self._weak_tensors = [weakref.ref(tensor) for tensor in self.tensors]

    def hand_out(self) -> list[ShardedTensor]:
        """Return the tensors that stand for the roots; they keep this object, not it them."""
        tensors, self.tensors = self.tensors, []
        _open[id(self)] = self
        return tensors

    def stands_for(self, items: Sequence[Any], runs: Sequence[Run]) -> bool:
        """Whether `items` are all of these roots in order."""
        return runs is self._runs and all(
            item is ref() for item, ref in zip(items, self._weak_tensors, strict=True)
        )

    def add(self, func: Any, args: list[Any]) -> None:
        """Note an in-place operator; list arguments hold one number for each run."""
        self._calls.append((func, args))

    def reads(self, addresses: set[int]) -> bool:
        """Whether the roots are computed from a storage that begins at one of the addresses."""
        return not addresses.isdisjoint(map(address, self._sources))

    def parts(self, batch: Sequence[int], limit: int) -> Iterator[list[Tensor]]:
        """Compute the parts of some runs one after the other, all in the same memory."""
        calls = [(func, [_numbers_of(arg, batch) for arg in args]) for func, args in self._calls]
        memory: list[Tensor] = []
        for sources in parts_of(self._sources, batch, limit):
            if not memory or len(memory[0]) != len(sources[0]):
                memory = list(map(torch.empty_like, sources))
            for source, values in zip(sources, memory, strict=True):
                torch.sqrt(source, out=values)
            for func, args in calls:
                func(memory, *args)
            yield memory

    def check_unchanged(self) -> None:
        """Raise if what the roots are computed from was changed behind our back."""
        if any(_compat.version_of(t) != version for t, version in self._watched):
            names = ", ".join(repr(spec.name) for spec in self._specs[:3])
            msg = (
                f"torch._foreach_sqrt() of a list of sharded tensors (of {names}, ...) was put off "
                f"until its result was used, and the tensors were changed in the meantime by way "
                f"of to_local(). Use the result before, or clone it."
            )
            raise ShardedTensorError(msg)

    def settle(self) -> None:
        """Compute everything and give the tensors their pieces."""
        self.check_unchanged()
        _open.pop(id(self), None)
        flats = [
            next(self.parts([index], len(source)))[0] for index, source in enumerate(self._sources)
        ]
        found = pieces_of(flats, self._runs, self._specs)
        for ref, (piece, flat, start) in zip(self._weak_tensors, found, strict=True):
            tensor = ref()
            if tensor is not None:
                tensor.settle(piece, flat, start)


def can_put_off(func: Any, items: Sequence[ShardedTensor]) -> bool:
    """Whether an operator may be put off: a root of real numbers on the host."""
    piece = items[0].local_piece
    return (
        func is _compat.foreach_sqrt_op
        and type(piece) is Tensor
        and piece.device.type == "cpu"
        and piece.dtype.is_floating_point
        and all(item.dtype == piece.dtype for item in items)
        and not torch.is_inference_mode_enabled()
        and not piece.is_inference()
    )


def settle_readers(written: Sequence[Tensor] | None = None) -> None:
    """Settle roots of what is about to be written (default: all) as long as it can be read."""
    if not _open:
        return
    addresses = None if written is None else set(map(address, written))
    for roots in list(_open.values()):
        if addresses is None or roots.reads(addresses):
            roots.settle()


def run_by_parts(func: Any, args: list[Any], kwargs: dict[str, Any], runs: Sequence[Run]) -> None:
    """Run an in-place operator of which arguments are `PutOff`, the others joined by runs."""
    for arg in args:
        if isinstance(arg, PutOff):
            arg.check_unchanged()
    limit = PART_NUMEL * torch.get_num_threads()
    for batch in batches([run.stop - run.start for run in runs], limit):
        for part in zip(*(_parts_of_argument(arg, batch, limit) for arg in args)):  # noqa: B905
            func(*part, **kwargs)


def _parts_of_argument(arg: Any, batch: Sequence[int], limit: int) -> Iterator[Any]:
    """Yield what an operator gets of an argument for each part; numbers for ever."""
    if isinstance(arg, PutOff):
        return arg.parts(batch, limit)
    if isinstance(arg, list) and isinstance(arg[0], Tensor):
        return parts_of(arg, batch, limit)
    return itertools.repeat(_numbers_of(arg, batch))


def _numbers_of(arg: Any, batch: Sequence[int]) -> Any:
    """Return the numbers that belong to runs; a number for all as it is."""
    return [arg[index] for index in batch] if isinstance(arg, list) else arg


def batches(numels: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield neighbouring runs that together have at most `limit` elements; a larger one alone."""
    batch: list[int] = []
    room = limit
    for index, numel in enumerate(numels):
        if batch and numel > room:
            yield batch
            batch, room = [], limit
        batch.append(index)
        room -= numel
    if batch:
        yield batch


def parts_of(flats: Sequence[Tensor], batch: Sequence[int], limit: int) -> Iterator[list[Tensor]]:
    """Yield a batch's flats: several as they are, a single one in parts of `limit` elements."""
    if len(batch) > 1:
        yield [flats[index] for index in batch]
    else:
        for part in flats[batch[0]].split(limit):
            yield [part]


def address(tensor: Tensor) -> int:
    """Return where the storage of a tensor begins."""
    return tensor.untyped_storage().data_ptr()
