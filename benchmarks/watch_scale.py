"""The watch over many ranks, simulated in one process: requests, sockets, seconds.

python benchmarks/watch_scale.py [ranks ...]

The watch's own code runs for each rank, and only the store is simulated. Each request takes some
time on its way, and the store serves one request after the other. Time is counted, not waited for:
the sum of the time on the way, one request after the other, and of the store's work. Both overlap
in part, so a real run takes no longer than that.
"""

# ruff: noqa: D102 - methods of the simulated store are those of `RunStore`

import argparse
import statistics
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from shardkit.backends.watch.rounds import Answering, Rounds
from shardkit.backends.watch.runs import RunStore
from shardkit.backends.watch.status import CodePlace, GroupStatus, RankStatus, WaitStatus
from shardkit.backends.watch.watchdog import Watchdog

SERVICE_S = 20e-6  # One request in torch's TCPStore; measured: 19 to 24 µs of its thread.
SERVICE_OF_KEY_S = 1e-6  # Additional time for each further key of the same request.
NUM_LAYERS = 80


class Network:
    """A store as all ranks see it.

    Attributes:
        latency_s: Seconds that a request and its answer are on their way.
        num_requests: Number of requests so far.
        num_connections: Number of open connections.
        num_bytes: Bytes of keys and values that were received and sent.
    """

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.num_requests = self.num_connections = self.num_bytes = 0
        self.values: dict[str, bytes] = {}
        self.written_at: dict[str, float] = {}
        self.changed = threading.Condition()
        self.busy_s = 0.0

    def serve(self, now: float, num_keys: int = 1, nbytes: int = 0) -> float:
        """Serve a request that is sent now; return the time of its answer if no other rank asks."""
        self.num_requests += 1
        self.num_bytes += nbytes
        self.busy_s += SERVICE_S + SERVICE_OF_KEY_S * (num_keys - 1)
        return now + self.latency_s


class BlockedError(Exception):
    """A rank waits in the store; it goes on later, with its clock."""


class SimulatedStore(RunStore):
    """Keys of a run, over a connection of one rank, which has its own clock."""

    def __init__(self, network: Network, clock: list[float]) -> None:
        self.run = "run"
        self.connection = self
        self.network, self.clock = network, clock
        self.is_blocking = True
        network.num_connections += 1

    def clone(self) -> "SimulatedStore":
        return SimulatedStore(self.network, self.clock)

    def _ask(self, num_keys: int = 1, nbytes: int = 0) -> None:
        self.clock[0] = self.network.serve(self.clock[0], num_keys, nbytes)

    def set_all(self, values: Mapping[str, str]) -> None:
        network = self.network
        with network.changed:
            self._ask(len(values), sum(len(key) + len(value) for key, value in values.items()))
            for key, value in values.items():
                network.values[key] = value.encode()
                network.written_at[key] = self.clock[0]
            network.changed.notify_all()

    def set(self, key: str, value: str) -> None:
        self.set_all({key: value})

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        with self.network.changed:
            found = [self.network.values[key] for key in keys]
            self._ask(len(keys), sum(map(len, [*keys, *found])))
            return found

    def get(self, key: str) -> bytes:
        return self.get_all([key])[0]

    def add(self, key: str, amount: int) -> int:
        with self.network.changed:
            self._ask(nbytes=len(key) + 8)
            total = int(self.network.values.get(key, b"0")) + amount
            self.network.values[key] = str(total).encode()
            return total

    def claim(self, key: str, value: str) -> bool:
        with self.network.changed:
            self._ask(nbytes=len(key) + len(value))
            return self.network.values.setdefault(key, value.encode()).decode() == value

    def delete(self, key: str) -> None:
        with self.network.changed:
            self._ask(nbytes=len(key))
            self.network.values.pop(key, None)

    def has(self, *keys: str) -> bool:
        with self.network.changed:
            self._ask(len(keys), sum(map(len, keys)))
            return all(key in self.network.values for key in keys)

    def await_keys(
        self, keys: Sequence[str], limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Count the polls until the last key is written."""
        del is_over
        if not keys:
            return True
        with self.network.changed:
            there = self.network.changed.wait_for(
                lambda: all(key in self.network.values for key in keys), timeout=120
            )
            end, pause = self.clock[0] + limit_s, 0.002
            until = max(self.network.written_at.get(key, 0.0) for key in keys) if there else end
            while True:
                self._ask(len(keys), sum(map(len, keys)))
                if self.clock[0] >= min(until, end):
                    return there and until <= end
                self.clock[0] += pause
                pause = min(pause * 1.5, 0.25)

    def block_until(self, key: str, is_over: Callable[[], bool]) -> None:
        del is_over
        with self.network.changed:
            if key not in self.network.values and not self.is_blocking:
                self._ask(nbytes=len(key))
                raise BlockedError
            self.network.changed.wait_for(lambda: key in self.network.values)
            self.clock[0] = max(self.clock[0], self.network.written_at[key])
            self._ask(nbytes=len(key))


# --- a round of questions -------------------------------------------------------------------------


def status_of(rank: int, world_size: int) -> RankStatus:
    """Return the status of a healthy rank in a hybrid mesh, where the last rank is late."""
    shard = range(rank - rank % 8, rank - rank % 8 + 8)
    names = {
        "0": range(world_size),
        "1": shard,
        "2": range(rank % 8, world_size, 8),
        "3": shard,
    }
    is_late = rank == world_size - 1
    recent = ["all-gather of layers.17 (104857600 bytes)"] * 128
    groups = {
        name: GroupStatus(ranks, 4711 - is_late, recent=recent) for name, ranks in names.items()
    }
    place = CodePlace("train.py", 117, "train", "forward")
    wait = None if is_late else WaitStatus("1", 4710, recent[0], 12.0)
    return RankStatus(rank, "host", 1, "runs", 99, place, None, groups, wait, stack="x" * 4000)


def ask(world_size: int, latency_s: float) -> dict[str, typing.Any]:
    """Let one rank ask all others; return the time and the requests."""
    network = Network(latency_s)
    clocks = [[0.0] for _ in range(world_size)]
    ranks = [
        Answering(
            SimulatedStore(network, clocks[rank]), rank, lambda r=rank: status_of(r, world_size)
        )
        for rank in range(world_size)
    ]

    def answer(rank: Answering) -> None:
        rank.store.block_until(rank.wake_key, lambda: False)
        rank.answer(lambda: False)

    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=answer, args=(rank,)) for rank in ranks]
    network.num_requests = network.num_bytes = 0
    network.busy_s = 0.0
    for thread in threads:
        thread.start()
    clock = [0.0]
    asker = Rounds(SimulatedStore(network, clock), world_size, 0)
    began = time.perf_counter()
    diagnosis = asker.ask()
    cpu_s = time.perf_counter() - began
    for thread in threads:
        thread.join()
    assert diagnosis is not None
    assert not diagnosis.is_final, diagnosis.text
    assert f"rank {world_size - 1} is at" in diagnosis.text, diagnosis.text
    return {
        "seconds": clock[0] + network.busy_s,
        "requests of a rank": network.num_requests / world_size,
        "MB": network.num_bytes / 1e6,
        "sockets": network.num_connections,
        "seconds of this simulation": cpu_s,
    }


# --- a first pass ---------------------------------------------------------------------------------


def first_pass(world_size: int, latency_s: float) -> dict[str, typing.Any]:
    """Let all ranks agree on each collective of a first step: none of them was predicted."""
    network = Network(latency_s)
    clocks = [[0.0] for _ in range(world_size)]
    ranks = []
    for rank in range(world_size):
        watchdog = Watchdog.__new__(Watchdog)
        watchdog.rank, watchdog.num_counted_in, watchdog.final_text = rank, 0, None
        watchdog.lock, watchdog._counting_in = threading.Lock(), {}  # noqa: SLF001
        store = SimulatedStore(network, clocks[rank])
        store.is_blocking = False
        watchdog._store, watchdog._free_stores = store, [store]  # noqa: SLF001
        ranks.append(watchdog)
    old = ""
    for layer in range(NUM_LAYERS * 3):  # Gathers forward and backward, reductions.
        key = f"next/1/{layer}"
        for watchdog in sorted(ranks, key=lambda each: clocks[each.rank][0]):
            try:
                watchdog.count_in(key, world_size, old)
            except BlockedError:
                continue
        for clock in clocks:  # One key wakes all ranks.
            clock[0] = max(clock[0], network.written_at[f"{key}/go"] + network.latency_s)
        old = key
    return {
        "seconds": max(clock[0] for clock in clocks) + network.busy_s,
        "requests of a rank": network.num_requests / world_size,
        "MB": network.num_bytes / 1e6,
        "keys left": len(network.values),
    }


def request_s() -> float:
    """Return the seconds of a request to a real store on this machine, over loopback."""
    server: typing.Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    client = server.clone()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            client.check(["x"])
        times.append((time.perf_counter() - began) / 1000)
    return statistics.median(times)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, default=[64, 1024, 4096])
    options = parser.parse_args()
    print(f"a request to a real store over loopback: {request_s() * 1e6:.0f} µs\n")  # noqa: T201
    for name, run in (("a round of questions", ask), ("a first pass of 80 layers", first_pass)):
        for latency_s in (0.0003, 0.001):
            for world_size in options.ranks:
                found = run(world_size, latency_s)
                said = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
                print(f"{name}, {world_size} ranks, {latency_s * 1e3} ms: {said}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
