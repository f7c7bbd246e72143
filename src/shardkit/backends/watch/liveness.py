"""Whether a process exists that does not answer: the kernel of its host accepts connections for it.

A process that is stopped, or whose native code holds Python, answers nobody. But while it exists,
the kernel accepts connections to a port on which it listens, also for processes of other hosts and
containers. It is enough that they stand: nothing is sent over them. If there is no connection, that
proves nothing, because a firewall may forbid it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import selectors
import socket
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_BACKLOG = 4096  # Nobody takes connections out of the queue while the process is stopped.
_CONNECT_S = 1.5  # The kernel sends a lost first packet again after one second.
# A kept connection shows after 15 seconds that the other host is lost.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}

_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Address(NamedTuple):
    """Where a process listens."""

    host: str  # Name or number of its host; empty: it does not listen.
    port: int


NOWHERE = Address("", 0)


def address_of(store: Any) -> Address:
    """Return where a store listens; `NOWHERE` if it is no `TCPStore`."""
    return Address(store.host, store.port) if hasattr(store, "port") else NOWHERE


class Listener:
    """A port of this process, to which other processes connect while it does not answer.

    Args:
        store: Address of the run's store; `NOWHERE` for no port. Others reach this process on the
            network over which it reaches the store.
    """

    def __init__(self, store: Address) -> None:
        self.address = NOWHERE  # Where others reach this process.
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            if store == NOWHERE:
                return
            family, own = _own_address(store)
            # Others may know the host of the store by other addresses than it does itself.
            is_of_store = ipaddress.ip_address(own).is_loopback
            is_of_store = is_of_store and store.host not in ("localhost", own)
            bound = socket.create_server(
                ("" if is_of_store else own, 0), family=family, backlog=_BACKLOG
            )
            self.address = Address(store.host if is_of_store else own, bound.getsockname()[1])
            self._socket = bound
            _listening.add(bound)

    def clear(self) -> None:
        """Close all connections; who still needs one connects again."""
        if self._socket is None:
            return
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # There are no more.
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Do not listen any more."""
        if self._socket is not None:
            self._socket.close()


def _own_address(store: Address) -> tuple[socket.AddressFamily, str]:
    """Return the address from which this process reaches the store. Nothing is sent."""
    for family, kind, protocol, _, there in socket.getaddrinfo(*store, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            return family, probe.getsockname()[0]
    msg = f"no way to {store.host}"
    raise OSError(msg)


def _close_in_child() -> None:
    """Let a forked process, which may live on, not listen in place of its parent."""
    for bound in list(_listening):
        bound.close()


os.register_at_fork(after_in_child=_close_in_child)


class Connections:
    """Connections to processes that do not answer."""

    def __init__(self) -> None:
        self._kept: dict[Address, socket.socket] = {}
        weakref.finalize(self, _close_all, self._kept)

    def reach(self, addresses: Iterable[Address]) -> set[Address]:
        """Return the addresses of processes that exist; of the others nothing is known.

        Connections are kept until this is called without their addresses.

        Cost: nothing for kept connections; else up to 1.5 seconds, for all of them together.
        """
        wanted = {address for address in addresses if address.host}
        for address, connection in [*self._kept.items()]:
            if address not in wanted or not _is_open(connection):
                self._kept.pop(address).close()
        begun = [each for address in wanted - self._kept.keys() for each in _begin(address)]
        end = time.monotonic() + _CONNECT_S
        with selectors.DefaultSelector() as selector:
            for address, connection in begun:
                selector.register(connection, selectors.EVENT_WRITE, address)
            while selector.get_map() and wanted - self._kept.keys() and time.monotonic() < end:
                for key, _ in selector.select(max(end - time.monotonic(), 0)):
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(OSError):
                        key.fileobj.getpeername()  # type: ignore[union-attr]  # a socket
                        self._kept.setdefault(key.data, key.fileobj)  # type: ignore[arg-type]
        for _, connection in begun:
            if connection not in self._kept.values():
                connection.close()
        return {*self._kept}


def _close_all(kept: dict[Address, socket.socket]) -> None:
    for connection in kept.values():
        connection.close()


def _begin(address: Address) -> list[tuple[Address, socket.socket]]:
    """Begin to connect to each address of a host."""
    begun = []
    with contextlib.suppress(OSError, ValueError):  # Names of hosts may be no names.
        for family, kind, protocol, _, there in socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM
        ):
            connection = socket.socket(family, kind, protocol)
            begun.append((address, connection))
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                if hasattr(socket, option):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            connection.connect_ex(there)
    return begun


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
