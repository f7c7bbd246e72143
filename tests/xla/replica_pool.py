"""Processes whose replicas (`replica_ranks`) run what tests ask, as the ranks of `workers` do."""

from __future__ import annotations

import multiprocessing.connection
import pathlib
import pickle
import subprocess
import tempfile
import time
import typing

from processes import start_python

if typing.TYPE_CHECKING:
    import types
    from collections.abc import Callable

ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "PJRT_CPU_ASYNC_CLIENT": "0",  # With it collectives between threads hang.
    "NPROC": "16",
    "XLA_THREAD_POOL_SIZE": "16",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
SCRIPT = "import sys, replica_ranks; replica_ranks.main(sys.argv[1])"
_START_SECONDS = 200
_END_SECONDS = 20


class ReplicaError(Exception):
    """Replicas raised, or their process ended; the message shows the tracebacks."""


class ReplicaPool:
    """The process of some replicas; it starts with the first call."""

    def __init__(self, num_replicas: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardkit-replicas-")
        self._log = pathlib.Path(self._folder.name, "log")
        environment = {**ENVIRONMENT, "CPU_NUM_DEVICES": str(num_replicas)}
        address = str(pathlib.Path(self._folder.name, "socket"))
        with self._log.open("w") as log:
            self._process = start_python(["-c", SCRIPT, address], environment, log)
        self._connection = self._connect(address)

    def _connect(self, address: str) -> multiprocessing.connection.Connection:
        """Wait until the replicas are there."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                return multiprocessing.connection.Client(address)
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.1)
        self._process.kill()
        msg = f"replicas did not start\n{self._log.read_text()[-6000:]}"
        raise ReplicaError(msg)

    def run(
        self, fn: Callable[..., typing.Any], args: tuple[object, ...], timeout_s: float
    ) -> list[typing.Any]:
        """Return what ``fn(*args)`` returned on each replica.

        Raises:
            ReplicaError: A replica raised, or did not answer in time.
        """
        try:
            self._connection.send_bytes(pickle.dumps((fn, args)))
            if not self._connection.poll(timeout_s):
                msg = f"no answer within {timeout_s} s\n{self._log.read_text()[-6000:]}"
                raise ReplicaError(msg)
            outcomes = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            msg = f"the process has ended\n{self._log.read_text()[-6000:]}"
            raise ReplicaError(msg) from error
        failed = [f"replica {i}: {value}" for i, (is_ok, value) in enumerate(outcomes) if not is_ok]
        if failed:
            raise ReplicaError("\n".join(failed))
        return [value for _, value in outcomes]

    def close(self) -> None:
        """End the process, and kill it if it does not end."""
        self._connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


class ReplicaPools:
    """Pools by number of replicas, started when first used and again after a call failed."""

    def __init__(self) -> None:
        self._pools: dict[int, ReplicaPool] = {}

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def spawn(
        self,
        fn: Callable[..., typing.Any],
        num_replicas: int,
        *args: object,
        timeout_s: float = 240,
    ) -> list[typing.Any]:
        """Return what ``fn(*args)`` returned on each of some replicas: a `workers.Spawn`."""
        if num_replicas not in self._pools:
            self._pools[num_replicas] = ReplicaPool(num_replicas)
        try:
            return self._pools[num_replicas].run(fn, args, timeout_s)
        except ReplicaError:
            self._pools.pop(num_replicas).close()
            raise
