"""Square roots of lists, put off until an operator uses them: then computed part by part.

``torch._foreach_sqrt(exp_avg_sqs)`` and what follows it (division by the bias correction, addition
of eps) is how optimizers make the denominator of their update. Computed at once, it takes memory
of the size of the parameters and four passes through it. Put off, parts that fit into the cache
are made right where the update reads them, and are gone afterwards.

On the host only: an accelerator wants few large kernels.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._errors import ShardedTensorError
from shardkit._ops.runs import join, pieces_of
from shardkit._sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit._ops.runs import Run

PART_NUMEL = 1 << 17
"""Elements per thread computed at once: some tensors of them fit into a core's cache."""

_Part = list[tuple[int, int, int]]  # (run, start in its flat, stop)

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

    def compute(self, part: _Part, memory: Tensor) -> list[Tensor]:
        """Compute a part, into the beginning of `memory`."""
        values = []
        end = 0
        for source in cut(self._sources, part):
            begin, end = end, end + len(source)
            values.append(torch.sqrt(source, out=memory[begin:end]))
        for func, args in self._calls:
            func(values, *(_picked(arg, part) for arg in args))
        return values

    def new_memory(self, limit: int) -> Tensor:
        """Return memory for parts of at most `limit` elements."""
        numel = min(limit, sum(map(len, self._sources)))
        return torch.empty(numel, dtype=self._sources[0].dtype)

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
            self.compute([(index, 0, len(source))], torch.empty_like(source))[0]
            for index, source in enumerate(self._sources)
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
    roots = {id(arg): arg for arg in args if isinstance(arg, PutOff)}
    for one in roots.values():
        one.check_unchanged()
    limit = PART_NUMEL * torch.get_num_threads()
    memory = {key: one.new_memory(limit) for key, one in roots.items()}
    for part in parts(runs, limit):
        values = {key: one.compute(part, memory[key]) for key, one in roots.items()}
        func(*(values.get(id(arg)) or _picked(arg, part) for arg in args), **kwargs)


def parts(runs: Sequence[Run], limit: int) -> Iterator[_Part]:
    """Yield parts of at most `limit` elements: several small runs, or a part of a large one."""
    part: _Part = []
    room = limit
    for index, run in enumerate(runs):
        numel = run.stop - run.start
        if part and numel > room:
            yield part
            part, room = [], limit
        for start in range(0, numel, limit):
            stop = min(start + limit, numel)
            part.append((index, start, stop))
            room -= stop - start
            if room <= 0:
                yield part
                part, room = [], limit
    if part:
        yield part


def cut(flats: Sequence[Tensor], part: _Part) -> list[Tensor]:
    """Return the part's views of flats."""
    return [
        flats[index] if stop - start == len(flats[index]) else flats[index][start:stop]
        for index, start, stop in part
    ]


def address(tensor: Tensor) -> int:
    """Return where the storage of a tensor begins."""
    return tensor.untyped_storage().data_ptr()


def _picked(arg: Any, part: _Part) -> Any:
    """Return the part of a joined argument: of tensors, or of numbers for each run."""
    if not isinstance(arg, list):
        return arg
    if isinstance(arg[0], Tensor):
        return cut(arg, part)
    return [arg[index] for index, _, _ in part]
