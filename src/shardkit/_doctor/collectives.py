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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit._doctor.facts import LaunchPlace

SIZES = (4, 2**20, 2**24)
LARGE_SIZES = (*SIZES, 2**28)
"""Of a rank's tensor, in bytes; the last one on accelerators only."""

_MOST_RANKS = 16  # From as many of the largest tensors on nothing is gathered.
_ROUNDS = {4: 20, 2**20: 5, 2**24: 3, 2**28: 3}


def backends() -> list[str]:
    """Return names of torch's backends that are there."""
    asked = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "xccl": dist.is_xccl_available,
    }
    return [name for name, is_there in asked.items() if is_there()]


def backend_of(device_type: str | None) -> str:
    """Return the backend of a device type, as training has it."""
    return {None: "gloo", "cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}.get(
        device_type, dist.get_default_backend_for_device(device_type or "cpu")
    )


def measure(
    place: LaunchPlace, store: Any, device_type: str | None, *, timeout_s: float
) -> Iterator[Timing]:
    """Time collectives; after one that failed, the others are left out. Collective.

    Args:
        place: Of this rank.
        store: By which ranks meet, for this alone.
        device_type: Where tensors are; None: on the host.
        timeout_s: Of one collective.
    """
    device = _device(place, device_type)
    try:
        dist.init_process_group(
            backend_of(device_type),
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        yield Timing(
            rank=place.rank, collective="start", nbytes=0, seconds=None, error=_first_line(error)
        )
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
    times = []
    try:
        call = make()
        dist.barrier()
        for _ in range(_ROUNDS[nbytes] + 1):
            start = time.perf_counter()
            is_right = call()
            times.append(time.perf_counter() - start)
            if not is_right:
                msg = "its result is wrong"
                return Timing(
                    rank=place.rank, collective=name, nbytes=nbytes, seconds=None, error=msg
                )
    except (RuntimeError, ValueError) as error:
        text = _first_line(error)
        return Timing(rank=place.rank, collective=name, nbytes=nbytes, seconds=None, error=text)
    seconds = statistics.median(times[1:])  # The first one makes connections.
    return Timing(rank=place.rank, collective=name, nbytes=nbytes, seconds=seconds)


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
