"""Connections between ranks: do they come about, how fast are they, what do clocks say."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from shardkit._doctor.facts import Link, RankFacts

if TYPE_CHECKING:
    from shardkit._doctor.machine import Machine

_CLOCK, _BYTES = b"t", b"b"
_ANSWER = struct.Struct("d")
_LENGTH = struct.Struct("Q")
_ROUNDS = 8
_NBYTES = 4 * 2**20
_CHUNK = 2**18
_IDLE_S = 30.0
_MOST = 64  # Connections that are answered at a time; others wait in the system's queue.
# Interfaces of containers and of virtual machines, which other hosts are not meant to reach.
_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "podman", "vnet")


class Answerer:
    """Answers other ranks, in threads, until it is closed: the time, or that bytes have come.

    Args:
        machine: The machine whose clock is told.

    Attributes:
        port: Port, on all interfaces.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("", 0))
        self._socket.listen(_MOST)
        self._free = threading.BoundedSemaphore(_MOST)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="shardkit-doctor", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            self._free.acquire()  # noqa: SIM115, RUF100 - the connection's thread gives it back
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # Closed.
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.ExitStack() as stack:
            stack.callback(self._free.release)
            try:
                connection.settimeout(_IDLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (kind := connection.recv(1)) in (_CLOCK, _BYTES):
                    if kind == _BYTES:
                        (nbytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
                        left = min(nbytes, _NBYTES)
                        while left:
                            left -= len(_receive(connection, min(left, _CHUNK)))
                    connection.sendall(_ANSWER.pack(self._machine.clock()))
            except OSError:
                return  # The other one has gone.


def measure(machine: Machine, own: RankFacts, target: RankFacts, *, timeout_s: float) -> list[Link]:
    """Connect to another rank on its primary address, then on its other interfaces.

    Loopback and interfaces of containers count only where they are the primary one.
    """
    addresses = [target.address]
    if own.host != target.host:
        addresses += [
            address
            for name, address in target.interfaces.items()
            if address != target.address and not name.startswith(_VIRTUAL)
        ]
    return [_measure(machine, own, target, each, timeout_s=timeout_s) for each in addresses]


def _measure(
    machine: Machine, own: RankFacts, target: RankFacts, address: str, *, timeout_s: float
) -> Link:
    is_primary = address == target.address
    names = [name for name, found in target.interfaces.items() if found == address]
    link = functools.partial(
        Link,
        source=own.rank,
        target=target.rank,
        interface=names[0] if names else "?",
        address=address,
        is_primary=is_primary,
    )
    try:
        with machine.connect(address, target.port, timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency_s, offset_s = _ask_clock(machine, connection)
            bytes_per_s = _send(connection) if is_primary else None
    except OSError as error:
        return link(error=str(error) or type(error).__name__)
    return link(latency_s=latency_s, bytes_per_s=bytes_per_s, clock_offset_s=offset_s)


def _ask_clock(machine: Machine, connection: socket.socket) -> tuple[float, float]:
    """Return the time of the fastest of several messages, and what it says of the clocks.

    Source: F. Cristian, Probabilistic clock synchronization, 1989.
    """
    best: tuple[float, float] | None = None
    for _ in range(_ROUNDS):
        before, start = machine.clock(), time.perf_counter()
        connection.sendall(_CLOCK)
        (theirs,) = _ANSWER.unpack(_receive(connection, _ANSWER.size))
        taken_s = time.perf_counter() - start
        found = (taken_s, theirs - before - taken_s / 2)
        best = found if best is None or found < best else best
    assert best is not None
    return best


def _send(connection: socket.socket) -> float:
    chunk = bytes(_CHUNK)
    start = time.perf_counter()
    connection.sendall(_BYTES + _LENGTH.pack(_NBYTES))
    for _ in range(_NBYTES // _CHUNK):
        connection.sendall(chunk)
    _receive(connection, _ANSWER.size)
    return _NBYTES / (time.perf_counter() - start)


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    parts = b""
    while len(parts) < nbytes:
        part = connection.recv(nbytes - len(parts))
        if not part:
            msg = "the connection was closed"
            raise ConnectionError(msg)
        parts += part
    return parts
