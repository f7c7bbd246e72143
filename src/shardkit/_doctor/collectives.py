"""Times collectives of a group that is made for it, by size; each result is checked."""

from __future__ import annotations

import functools
import statistics
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit._doctor.facts import Timing
from shardkit.backends.world import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit._doctor.facts import LaunchPlace

SIZES = (4, 2**20, 2**24)
LARGE_SIZES = (*SIZES, 2**28)
"""Sizes of a rank's tensor in bytes; the last one on accelerators only."""

_MOST_RANKS = 16  # From as many of the largest tensors on nothing is gathered.
_ROUNDS = {4: 20, 2**20: 5, 2**24: 3, 2**28: 3}


def backends() -> list[str]:
    """Return names of torch's backends that are there."""
    known = ("gloo", "nccl", "mpi", "xccl")
    return [name for name in known if getattr(dist, f"is_{name}_available")()]


def measure(
    place: LaunchPlace, store: Any, device_type: str | None, *, timeout_s: float
) -> Iterator[Timing]:
    """Time collectives; after one that failed, the others are left out. Collective.

    Args:
        place: The place of this rank.
        store: A store by which ranks meet, for this alone.
        device_type: Type of the device with the tensors; None: the host.
        timeout_s: Limit of one collective in seconds.
    """
    device = _device(place, device_type)
    try:
        dist.init_process_group(
            engine_of(device_type),
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        text = _first_line(error)
        yield Timing(rank=place.rank, collective="start", nbytes=0, seconds=None, error=text)
        return
    sizes = SIZES if device_type in (None, "cpu") else LARGE_SIZES
    most_gathered = _MOST_RANKS * sizes[-1]
    try:
        for nbytes in sizes:
            for name, make in _COLLECTIVES.items():
                if name == "all_gather" and nbytes * place.world_size > most_gathered:
                    continue  # It would take memory that large groups do not have.
                made = functools.partial(make, nbytes // 4, place, device)
                timing = _timed(place, name, nbytes, made)
                yield timing
                if timing.error is not None:
                    return
    finally:
        dist.destroy_process_group()


def _timed(
    place: LaunchPlace, name: str, nbytes: int, make: Callable[[], Callable[[], bool]]
) -> Timing:
    timing = functools.partial(Timing, rank=place.rank, collective=name, nbytes=nbytes)
    times = []
    try:
        call = make()
        dist.barrier()
        for _ in range(_ROUNDS[nbytes] + 1):
            start = time.perf_counter()
            is_right = call()
            times.append(time.perf_counter() - start)
            if not is_right:
                return timing(seconds=None, error="its result is wrong")
    except (RuntimeError, ValueError) as error:
        return timing(seconds=None, error=_first_line(error))
    return timing(seconds=statistics.median(times[1:]))  # The first one makes connections.


def _all_reduce(numel: int, place: LaunchPlace, device: torch.device) -> Callable[[], bool]:
    tensor = torch.empty(numel, device=device)

    def call() -> bool:
        tensor.fill_(place.rank + 1)
        dist.all_reduce(tensor)
        last = float(tensor[-1])  # Waits for the device.
        return last == place.world_size * (place.world_size + 1) / 2

    return call


def _all_gather(numel: int, place: LaunchPlace, device: torch.device) -> Callable[[], bool]:
    own = torch.full((numel,), float(place.rank), device=device)
    whole = torch.empty(numel * place.world_size, device=device)

    def call() -> bool:
        dist.all_gather(list(whole.chunk(place.world_size)), own)
        ends = whole.view(place.world_size, numel)[:, -1].tolist()
        return bool(ends == list(range(place.world_size)))

    return call


def _broadcast(numel: int, place: LaunchPlace, device: torch.device) -> Callable[[], bool]:
    tensor = torch.empty(numel, device=device)
    source = place.world_size - 1

    def call() -> bool:
        tensor.fill_(place.rank)
        dist.broadcast(tensor, src=source)
        return bool(float(tensor[-1]) == source)

    return call


_COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather, "broadcast": _broadcast}


def _device(place: LaunchPlace, device_type: str | None) -> torch.device:
    if device_type in (None, "cpu"):
        return torch.device("cpu")
    # A launcher may let each rank see its own device only.
    module = torch.get_device_module(device_type)
    number = place.local_rank if place.local_rank < module.device_count() else 0
    module.set_device(number)
    return torch.device(device_type, number)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
