"""What each rank does by itself, and all must do alike: steps of optimizers, saving of pieces.

Nothing of it communicates, so nothing hangs where one rank does something else. It is counted here,
and compared with what ranks exchange in a backward (`agreement`), or at the end of the run.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from shardkit import _compat
from shardkit._errors import listed
from shardkit._pickling import Pickled
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.watch.watchdog import at_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim.optimizer import Optimizer

    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.watch.store import RunStore

_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps", "nesterov", "amsgrad", "maximize")
_NUM_FIRST, _INTERVAL = 4, 50
"""Settings are read in the first backwards, and then in every fiftieth."""

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def note_step(optimizer: Optimizer, *_: Any) -> None:
    """Count a step of an optimizer; those inside a backward come in an order of each rank's own."""
    if not _compat.in_backward():
        _steps[optimizer] = _steps.get(optimizer, 0) + 1


class Steps(NamedTuple):
    """What an optimizer did.

    Attributes:
        kind: Name of its class.
        num_taken: Number of its steps since ranks compared.
        settings: Settings of its parameter groups: for each the name of its first sharded
            parameter, and settings in words.
    """

    kind: str
    num_taken: int
    settings: tuple[tuple[str, str], ...]


class OwnActions:
    """What this rank did since it was last asked."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._known = weakref.WeakKeyDictionary(_steps)
        self._num_pickled = Pickled.count
        self._num_asked = 0

    def take(self) -> tuple[list[Steps], str]:
        """Return steps of optimizers, and the name of a piece that was pickled, or ""."""
        self._num_asked += 1
        pickled = "" if self._num_pickled == Pickled.count else Pickled.name
        self._num_pickled = Pickled.count
        if self._num_asked > _NUM_FIRST and self._num_asked % _INTERVAL:
            return [], pickled
        known, self._known = self._known, weakref.WeakKeyDictionary(_steps)
        entries = {id(e) for g in self._groups for b in g.buckets for e in b.entries}
        found = []
        for optimizer, count in list(_steps.items()):
            settings = tuple(_settings_of(optimizer, entries))
            if settings and count != known.get(optimizer, 0):
                taken = count - known.get(optimizer, 0)
                found.append(Steps(type(optimizer).__name__, taken, settings))
        return found, pickled


def _settings_of(optimizer: Optimizer, entries: set[int]) -> Iterator[tuple[str, str]]:
    for group in optimizer.param_groups:
        name = next((p.spec.name for p in group["params"] if _is_in(p, entries)), None)
        if name is not None:
            values = {key: _number(group[key]) for key in _SETTINGS if key in group}
            shown = ", ".join(f"{key}={value}" for key, value in values.items() if value != "")
            yield name, shown


def _is_in(param: Any, entries: set[int]) -> bool:
    if not isinstance(param, ShardedTensor) or param.spec.entry is None:
        return False
    return id(param.spec.entry()) in entries


def _number(value: Any) -> str:
    """Return a setting as text; "" for those that are on a device, or no numbers."""
    if isinstance(value, (tuple, list)):
        return str([_number(each) for each in value])
    if isinstance(value, Tensor):
        is_host = type(value) is Tensor and value.device.type == "cpu" and value.numel() == 1
        return repr(value.item()) if is_host else ""
    return repr(value) if isinstance(value, (bool, int, float)) else ""


def first_difference(of_ranks: Sequence[Sequence[Steps]]) -> str | None:
    """Name the first optimizer that did something else on another rank."""
    mine = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for index in range(max(len(mine), len(other))):
            here = mine[index] if index < len(mine) else None
            there = other[index] if index < len(other) else None
            if here == there:
                continue
            kind = (here or there).kind  # type: ignore[union-attr]
            counts = [0 if each is None else each.num_taken for each in (here, there)]
            if here is None or there is None or here[:2] != there[:2]:
                return (
                    f"optimizers differ between ranks: since ranks last compared, {kind} took "
                    f"{counts[0]} steps on position 0 of the process group, and {counts[1]} on "
                    f"position {rank}. Each rank updates its own pieces: call step() on every rank."
                )
            for (name, a), (_, b) in zip(here.settings, there.settings, strict=False):
                if a != b:
                    return (
                        f"optimizers differ between ranks: {kind} updates {name!r} and those "
                        f"beside it with {a} on position 0 of the process group, and with {b} on "
                        f"position {rank}. Each rank updates its own pieces: choose the same "
                        f"settings on every rank, also where a scheduler chooses them by a loss "
                        f"(average it over the ranks first)."
                    )
            return f"optimizers differ between ranks: {kind} has other parameter groups."
    return None


def pickled_on_some(of_ranks: Sequence[str]) -> str | None:
    """Say that some ranks have pickled pieces and others have not; None: all alike."""
    positions = [rank for rank, name in enumerate(of_ranks) if name]
    if len(positions) in (0, len(of_ranks)):
        return None
    Pickled.is_told = True
    of = f"position {listed(positions, str)} of the process group has"
    return f"{of} {_pickled(of_ranks[positions[0]])}"


def _pickled(name: str) -> str:
    return (
        f"pickled its piece of {name!r} (torch.save of a state dict), and others have not. The "
        f"file holds the pieces of one rank only, so the model cannot be loaded from it. Call "
        f"shardkit.checkpoint.save_full(path, model) on all ranks, which writes one file of whole "
        f"tensors, or shardkit.checkpoint.save."
    )


def _compare_at_end(store: RunStore, world_size: int) -> None:
    """Warn on the last rank that ends if pieces were pickled by too few ranks to make wholes.

    Scripts save at their end, where no backward follows.
    """
    if Pickled.count and not Pickled.is_told:
        store.set("pickled/piece", f"{Pickled.num_pieces} {Pickled.name}")
        store.add("pickled/on", 1)
    if store.add("pickled/asked", 1) == world_size:
        num_ranks = store.add("pickled/on", 0)
        if not num_ranks:
            return
        num_pieces, name = store.get("pickled/piece").decode().split(" ", 1)
        if num_ranks < int(num_pieces):
            ranks = "one rank has" if num_ranks == 1 else f"{num_ranks} ranks have"
            warnings.warn(f"{ranks} {_pickled(name)}", stacklevel=2)


at_end.append(_compare_at_end)
