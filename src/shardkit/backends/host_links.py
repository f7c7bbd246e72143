"""Connections between ranks of one host, for what passes between them without gloo."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit._processes import boot_and_namespace
from shardkit._settings import shares_memory
from shardkit.backends.groups import exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

_MAX_RANKS = 8
"""Limit, because every rank is connected with every other and reads from every other."""

CONNECT_S = 20.0
"""Seconds that a rank waits for others while they connect, and try what they connect for."""

RETRY_S = 0.001  # Seconds after which a message is sent again for which there was no room.

_SHORTAGES = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
"""Numbers of errors of a send that may succeed a little later."""

_TOKEN_NBYTES = 32
_NUM_USES = 2


@dataclass(frozen=True, slots=True)
class HostLinks:
    """What one rank needs to pass tensors to the others of its host; each in rank order."""

    # A connection with each other rank, for messages about shared memory.
    for_messages: list[socket.socket]
    for_reads: list[socket.socket]  # Another one, for messages about direct reads.
    pids: list[int]  # Number of the process of each other rank.


@dataclass(frozen=True, slots=True)
class _Address:
    """Address at which a rank waits for connections."""

    host: str  # Text that is equal on ranks of one host.
    name: str  # Name of its socket.
    token: bytes  # Secret that connecting ranks send.
    pid: int  # Number of its process.


def connect(group: dist.ProcessGroup) -> HostLinks | None:
    """Connect the ranks of a gloo group with each other; None if not all of them can be.

    They cannot if they are on several hosts, or in containers that separate them; if there are more
    than eight; if the system is not Linux; or if one rank does not want it
    (``SHARDKIT_SHARED_MEMORY=0``). All ranks of the group must call this.

    Cost: four all-gathers of small objects.
    """
    if not 1 < group.size() <= _MAX_RANKS:
        return None
    of = "connections within a host"
    with contextlib.ExitStack() as stack:
        address, listener = None, None
        host = _host() if shares_memory() else ""
        with contextlib.suppress(OSError):  # The system may forbid parts of this.
            if host:
                _let_siblings_read()
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                name = f"\0shardkit-{secrets.token_hex(16)}"  # Not in the file system.
                listener.bind(name)
                listener.listen(_NUM_USES * _MAX_RANKS)
                listener.settimeout(CONNECT_S)
                address = _Address(host, name, secrets.token_bytes(_TOKEN_NBYTES), os.getpid())
        addresses = exchange(address, group, of)
        if listener is None or any(each is None or each.host != host for each in addresses):
            return None
        rank = group.rank()
        found: dict[tuple[int, int], socket.socket] = {}
        is_connected = False
        with contextlib.suppress(OSError):
            _meet(listener, rank, addresses, found)
            is_connected = True
        if not all(exchange(is_connected, group, of)):
            for connection in found.values():
                connection.close()
            return None
    for connection in found.values():
        connection.setblocking(True)
    others = [other for other in range(group.size()) if other != rank]
    messages, reads = ([found[use, other] for other in others] for use in range(_NUM_USES))
    return HostLinks(messages, reads, [addresses[other].pid for other in others])


def _host() -> str:
    """Return a text that is equal for processes that can be connected; empty: this one cannot."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            return f"{boot_and_namespace()}{Path('/proc/self/ns/net').readlink()}"
    return ""


_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ONLY_DESCENDANTS = "1"
_INIT = 1


def _let_siblings_read() -> None:
    """Let the processes that this one's parent has started read from this one.

    Where Linux restricts this (``kernel.yama.ptrace_scope`` is 1), a process can name another one
    that may, with its descendants. The parent of ranks is their launcher. If it has ended, none is
    named: any process would be a descendant.
    """
    with contextlib.suppress(OSError):
        if _PTRACE_SCOPE.read_text("utf-8").strip() == _ONLY_DESCENDANTS and os.getppid() != _INIT:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def _meet(
    listener: socket.socket,
    rank: int,
    addresses: Sequence[_Address],
    found: dict[tuple[int, int], socket.socket],
) -> None:
    """Connect to the ranks before this one, and accept connections of those after it.

    Args:
        listener: Socket at which this rank waits.
        rank: Position of this rank.
        addresses: Address of each rank.
        found: Dict to be filled with the connections, by use and rank.
    """
    for other, address in enumerate(addresses[:rank]):
        for use in range(_NUM_USES):
            connection = found[use, other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(CONNECT_S)
            connection.connect(address.name)
            connection.send(address.token + bytes([use, rank]))
    while len(found) < _NUM_USES * (len(addresses) - 1):
        connection, _ = listener.accept()
        connection.settimeout(CONNECT_S)
        hello = connection.recv(_TOKEN_NBYTES + 2)
        if secrets.compare_digest(hello[:_TOKEN_NBYTES], addresses[rank].token):
            use, other = hello[_TOKEN_NBYTES:]
            found[use, other] = connection
        else:  # The connection is another program's.
            connection.close()


# --- messages -------------------------------------------------------------------------------------


class Outbox:
    """Messages for another rank, which are sent as soon as there is room for them.

    A message for a process that has ended is lost: whoever waits for that process will notice.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection  # Connection of the other rank.
        # Messages that travel as a whole, each with the descriptor of a file that travels with it
        # and is closed here, or None.
        self.unsent: deque[tuple[bytes, int | None]] = deque()

    def send_unsent(self) -> None:
        """Send messages as far as there is room."""
        while self.unsent:
            message, descriptor = self.unsent[0]
            try:
                if descriptor is None:
                    self.connection.send(message, socket.MSG_DONTWAIT)
                else:  # Not `send_fds`, which ignores its flags.
                    extra = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("@i", descriptor))
                    self.connection.sendmsg([message], [extra], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SHORTAGES:
                    return
            if descriptor is not None:
                os.close(descriptor)
            self.unsent.popleft()
