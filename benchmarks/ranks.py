"""A group of rank processes: each holds one object, whose methods are called on all ranks."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=5)
_LEAVE_S = 10


class RankError(RuntimeError):
    """A rank raised or died; the message names it and holds its traceback."""


class Ranks:
    """Processes of one ``torch.distributed`` world on this machine.

    Each rank makes ``factory(device, *args)`` once and then serves calls of its methods. Between
    calls all ranks sleep on a pipe, so several groups can take turns on the same cores.
    """

    def __init__(
        self,
        world_size: int,
        device_type: str,
        factory: Callable[..., object],
        *args: object,
        fake_size: int | None = None,
    ) -> None:
        """Start the ranks and wait until every one has made its object.

        Args:
            world_size: Processes to start.
            device_type: ``"cpu"`` (gloo, one compute thread each) or ``"cuda"`` (NCCL, one GPU
                each).
            factory: A callable that makes each rank's object; it and ``args`` are pickled.
            args: Arguments of the factory, after the rank's device.
            fake_size: The size of a fake process group, whose collectives move nothing between
                processes: every process is rank 0 of that many.

        Raises:
            RankError: If a rank fails.
        """
        context = mp.get_context("spawn")
        self._store = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            seat = _Seat(rank, world_size, device_type, f"{self._store.name}/store", fake_size)
            process = context.Process(
                target=_serve, args=(theirs, seat, factory, args), daemon=True
            )
            process.start()
            theirs.close()  # A rank that dies must read as end of file here.
            self._connections.append(ours)
            self._processes.append(process)
        self._results()

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method on every rank's object.

        Returns:
            The results, by rank.

        Raises:
            RankError: If a rank raises or dies; the other ranks are killed.
        """
        for connection in self._connections:
            connection.send((method, args))
        return self._results()

    def _results(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            # In order of arrival: if a rank fails, the others wait for it.
            pending = [c for rank, c in enumerate(self._connections) if rank not in results]
            rank = self._connections.index(wait(pending)[0])  # type: ignore[arg-type]
            try:
                succeeded, results[rank] = self._connections[rank].recv()
            except EOFError:
                succeeded, results[rank] = False, "the process died"
            if not succeeded:
                self._kill()
                message = f"rank {rank}: {results[rank]}"
                raise RankError(message)
        return [results[rank] for rank in sorted(results)]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def __enter__(self) -> Self:
        """Return the group itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks, at once after an error."""
        if kind is not None:
            self._kill()
        for connection in self._connections:
            connection.close()  # The ranks read end of file, and leave.
        for process in self._processes:
            process.join(_LEAVE_S)
            process.kill()
        self._store.cleanup()


@dataclass(frozen=True)
class _Seat:
    """A rank's place in its world, and the file through which the ranks find each other."""

    rank: int
    world_size: int
    device_type: str
    store: str
    fake_size: int | None


def _serve(
    connection: Connection,
    seat: _Seat,
    factory: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    """Join the world, make the object, and answer calls until the pipe closes."""
    try:
        served = factory(_join(seat), *args)
        result = None
        while True:
            connection.send((True, result))
            method, call_args = connection.recv()
            result = getattr(served, method)(*call_args)
    except EOFError:
        dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - the parent reports it, whatever it is.
        connection.send((False, traceback.format_exc()))


def _join(seat: _Seat) -> torch.device:
    if seat.fake_size is not None:
        return _join_fake(seat.device_type, seat.fake_size)
    join = partial(
        dist.init_process_group,
        init_method=f"file://{seat.store}",
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=_TIMEOUT,
    )
    if seat.device_type == "cuda":
        device = torch.device("cuda", seat.rank)
        torch.cuda.set_device(device)
        join("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    join("gloo")
    return torch.device("cpu")


def _join_fake(device_type: str, size: int) -> torch.device:
    # Imported here: the import changes torch.distributed.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if device_type == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    return torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
