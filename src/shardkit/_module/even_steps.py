"""The same number of steps on every rank, for ranks with unequal amounts of data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch

from shardkit._errors import StateError
from shardkit.backends import as_device_mesh

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardkit._mesh import DeviceMesh

T = TypeVar("T")
_MODES = ("stop", "repeat", "join")


class EvenSteps(Generic[T]):
    """Iterable of batches that `even_steps` returns; every rank gets the same number.

    Attributes:
        weight: The weight of this rank's loss in the step under way: 1.0, or 0.0 where `uneven` is
            ``"join"`` and this rank has no data left.
        num_steps: The number of steps that were begun.
    """

    def __init__(self, loader: Iterable[T], mesh: DeviceMesh, uneven: str) -> None:
        self.weight = 1.0
        self.num_steps = 0
        self._loader = loader
        self._mesh = mesh
        self._uneven = uneven

    def __iter__(self) -> Iterator[T]:
        batches = iter(self._loader)
        self.num_steps = 0
        kept: list[T] = []
        while True:
            batch = next(batches, None)
            has_own = batch is not None
            if batch is not None and self._uneven != "stop":
                if self._uneven == "join":
                    kept.clear()
                kept.append(batch)
            if not self._goes_on(has_own=has_own, has_any=has_own or bool(kept)):
                return
            if not has_own:
                batch = kept[self.num_steps % len(kept)]
            self.weight = 0.0 if self._uneven == "join" and not has_own else 1.0
            self.num_steps += 1
            assert batch is not None
            yield batch

    def _goes_on(self, *, has_own: bool, has_any: bool) -> bool:
        """Send the other ranks whether this rank has a batch; return whether to take a step."""
        backend: Any = self._mesh.backend
        stops = self._uneven == "stop"
        lacks = 0 if has_any or stops else 1 + self._mesh.get_rank()
        flags = torch.tensor([int(has_own), lacks], dtype=torch.int32, device=backend.device)
        for axis in range(self._mesh.ndim):
            backend.axis(axis).all_reduce(flags, "min" if stops else "max")
        goes_on, lacking = flags.tolist()
        if goes_on and lacking:
            msg = (
                f"rank {lacking - 1} has no batch at all, so there is none to repeat. Give every "
                f"rank at least one, or use even_steps(loader, uneven='stop')."
            )
            raise StateError(msg)
        return bool(goes_on)


def even_steps(
    loader: Iterable[T],
    mesh: Any = None,
    *,
    uneven: Literal["stop", "repeat", "join"] = "stop",
) -> EvenSteps[T]:
    """Return an iterable over a rank's batches that has the same number of steps on every rank.

    Ranks that take different numbers of steps wait for each other forever. Iterate on all ranks::

        for batch in even_steps(loader, mesh):
            loss = loss_of(model, batch)

    Args:
        loader: The batches of this rank; None is no batch.
        mesh: The mesh of the ranks; None: all ranks.
        uneven: Action when a rank has no batch left. ``"stop"``: all ranks stop, and the batches
            that other ranks still have are dropped. ``"repeat"``: the rank goes through its batches
            again, until all ranks have seen all of theirs; its batches stay in memory. ``"join"``:
            as in DDP's join, the rank continues with its last batch, and `weight` is 0.0: multiply
            the loss by it. The average is still over all ranks.

    Raises:
        StateError: `uneven` is something else. Or one rank has not a single batch to repeat; then
            all ranks raise.
        MeshError: `mesh` is no mesh.

    Cost: one all-reduce of 8 bytes per axis and step, which the host waits for.
    """
    if uneven not in _MODES:
        msg = f"uneven must be one of {', '.join(map(repr, _MODES))}, got {uneven!r}."
        raise StateError(msg)
    return EvenSteps(loader, as_device_mesh(mesh, device_type="cpu"), uneven)
