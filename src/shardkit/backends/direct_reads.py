"""Large tensors of ranks of one host: each rank reads them directly from the others' memory.

Over loopback gloo copies data four times. Here the system copies it once, from the memory of one
process to that of another (``process_vm_readv``). Ranks tell each other, in short messages, where
their data is and what they have read. A thread of each rank reads and answers while others compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import socket
import struct
import threading
import weakref
from array import array
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import torch

from shardkit._compat import torch_groups
from shardkit.backends import groups
from shardkit.backends.host_links import CONNECT_S, RETRY_S, HostLinks, Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor


_MESSAGE = struct.Struct("<BBQQQ")
"""Kind, lane, number of the exchange; of an offer also the address and the length of its table."""

_OFFER, _READ = range(2)


# --- one exchange ---------------------------------------------------------------------------------


class DirectExchange:
    """An exchange that has started: this rank reads from all others, and they from it.

    Until `wait` returns, nobody may change what the others read, or use what this rank reads into.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        of: DirectReads,
        narrow_nbytes: int | None = None,
    ) -> None:
        # Tensors that each other rank reads, end to end; in rank order.
        self.sources: Sequence[Sequence[Tensor]] = sources
        # Tensors to be filled by what the other ranks have, in rank order.
        self.targets: Sequence[Tensor] = targets
        # Tables for the other ranks: address and bytes of each tensor that they read.
        self.tables = [_table_of(each) for each in sources]
        self.nbytes = [0] * len(targets)  # Bytes that came from each other rank.
        # Bytes of another form of what ranks send, such as values of fewer bytes. What comes in
        # this form fills the beginning of a target. None: there is none.
        self._narrow_nbytes = narrow_nbytes
        self.num_missing = [2] * len(sources)  # For each rank: one to read, one to be read.
        self._of = of  # Exchanges that all end when this one is not done in time.
        self._error: str | None = None
        self._ended = threading.Event()

    def place_for(self, place: int, nbytes: int) -> int:
        """Return the address to which the bytes of another rank go, and note their number.

        Args:
            place: Place of the other rank among the others.
            nbytes: Number of bytes that it sends.

        Raises:
            OSError: The rank sends more or fewer bytes than this rank awaits.
        """
        target = self.targets[place]
        if nbytes not in (target.nbytes, self._narrow_nbytes):
            msg = f"another rank sends {nbytes} bytes, not {target.nbytes}"
            raise OSError(msg)
        self.nbytes[place] = nbytes
        return target.data_ptr()

    def note_done(self, place: int) -> bool:
        """Note that two ranks have read in one direction; return whether all others have."""
        self.num_missing[place] -= 1
        if any(self.num_missing):
            return False
        self._end()
        return True

    def fail(self, error: str) -> None:
        """Let `wait` raise an error with this reason."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.sources = self.targets = ()  # The thread that waits frees them.
        self._ended.set()

    def wait(self) -> None:
        """Block until this rank has read everything, and the others have.

        Raises:
            RuntimeError: A rank has ended, or did not come within the process group's time limit.
        """
        if self._ended.wait(self._of.timeout_s):
            reason = self._error
        else:
            reason = "nobody came in time"
            self._of.close()  # Whoever comes now must not read what is no longer there.
        if reason is not None:
            msg = f"a wait for a tensor of another rank has ended: {reason}"
            raise RuntimeError(msg)


def _table_of(tensors: Sequence[Tensor]) -> array[int]:
    """Return the address and bytes of each contiguous tensor, one after the other."""
    places = ((each.data_ptr(), each.nbytes) for each in tensors if each.nbytes)
    return array("Q", (number for place in places for number in place))


# --- the thread that reads ------------------------------------------------------------------------


class _OtherRank(Outbox):
    """Another rank, as the thread sees it."""

    def __init__(self, place: int, connection: socket.socket, pid: int) -> None:
        super().__init__(connection)
        self.place = place
        self.pid = pid
        self.offers: dict[tuple[int, int], tuple[int, int]] = {}  # Of exchanges not started here.
        self.error: str | None = None  # Why it has been lost.

    def send(self, *message: int) -> None:
        """Send a message after those that are unsent."""
        self.unsent.append((_MESSAGE.pack(*message), None))
        self.send_unsent()


class _Reader:
    """What the thread works with. Other threads only start exchanges, and end the thread."""

    def __init__(self, peers: Sequence[_OtherRank]) -> None:
        self.waker, self._wakened = socket.socketpair()
        self._peers = peers
        self._started: deque[tuple[int, DirectExchange]] = deque()  # With their lanes.
        self._num_started: Counter[int] = Counter()  # By lane.
        self._open: dict[tuple[int, int], DirectExchange] = {}  # By lane and number.
        self._error: str | None = None  # Why the thread has ended.

    def start(self, lane: int, exchange: DirectExchange) -> None:
        """Hand an exchange over to the thread."""
        self._started.append((lane, exchange))
        with contextlib.suppress(OSError):  # There is no room: the thread is about to wake up.
            self.waker.send(b"1", socket.MSG_DONTWAIT)
        if self._error is not None:
            exchange.fail(self._error)

    def run(self) -> None:
        """Read and answer until all others are lost, or the other end of `waker` is closed."""
        reason = "the other ranks have ended"
        try:
            while any(peer.error is None for peer in self._peers):
                self._go_on()
        except Exception as error:  # noqa: BLE001 - nothing else would end the waits
            reason = str(error) or type(error).__name__
        for peer in self._peers:
            self._lose(peer, reason)
        self._error = self._peers[0].error or reason
        while self._started:  # Another thread may be adding one.
            self._started.popleft()[1].fail(self._error)
        self._wakened.close()

    def _go_on(self) -> None:
        """Wait until there is something to do, and do it."""
        there = {peer.connection.fileno(): peer for peer in self._peers if peer.error is None}
        poll = select.poll()
        for descriptor in (self._wakened.fileno(), *there):
            poll.register(descriptor, select.POLLIN)
        is_late = any(peer.unsent for peer in there.values())
        for descriptor, _ in poll.poll(1e3 * RETRY_S if is_late else None):
            if descriptor not in there:
                _received(self._wakened, 1 << 12)
                continue
            try:
                self._receive(there[descriptor])
            except OSError as error:
                self._lose(there[descriptor], str(error))
        while self._started:
            self._begin(*self._started.popleft())
        for peer in there.values():
            peer.send_unsent()

    def _begin(self, lane: int, exchange: DirectExchange) -> None:
        key = lane, self._num_started[lane]
        self._num_started[lane] += 1
        lost = [peer.error for peer in self._peers if peer.error is not None]
        if lost:
            exchange.fail(lost[0])
            return
        self._open[key] = exchange
        # The others are told first, so that they can read while this rank reads.
        for peer, table in zip(self._peers, exchange.tables, strict=True):
            peer.send(_OFFER, *key, *table.buffer_info())
        for peer in self._peers:
            if key in peer.offers:
                self._read(peer, key, *peer.offers.pop(key))

    def _receive(self, peer: _OtherRank) -> None:
        message = _received(peer.connection, _MESSAGE.size)
        kind, lane, number, address, length = _MESSAGE.unpack(message)
        key = lane, number
        if kind == _READ:
            self._note_done(peer, key)
        elif key in self._open:
            self._read(peer, key, address, length)
        else:
            peer.offers[key] = address, length

    def _read(self, peer: _OtherRank, key: tuple[int, int], address: int, length: int) -> None:
        """Read what a rank offers, and say so."""
        exchange = self._open.get(key)
        if exchange is None:  # Another rank was lost.
            return
        try:
            table = array("Q", bytes(8 * length))
            _read_memory(peer.pid, [(address, 8 * length)], table.buffer_info()[0])
            ranges = [*zip(table[::2], table[1::2], strict=True)]
            target = exchange.place_for(peer.place, sum(table[1::2]))
            _read_memory(peer.pid, ranges, target)
        except OSError as error:
            self._lose(peer, str(error))
            return
        peer.send(_READ, *key, 0, 0)
        self._note_done(peer, key)

    def _note_done(self, peer: _OtherRank, key: tuple[int, int]) -> None:
        exchange = self._open.get(key)
        if exchange is not None and exchange.note_done(peer.place):
            del self._open[key]

    def _lose(self, peer: _OtherRank, error: str) -> None:
        """End the exchanges that still need a rank, and close its connection."""
        peer.error = peer.error or error
        peer.connection.close()
        for key, exchange in [*self._open.items()]:
            if exchange.num_missing[peer.place]:
                exchange.fail(peer.error)
                del self._open[key]


def _received(connection: socket.socket, nbytes: int) -> bytes:
    """Return what has been received, which is something.

    Raises:
        ConnectionError: The other end was closed.
    """
    message = connection.recv(nbytes)
    if not message:
        msg = "the connection was closed"
        raise ConnectionError(msg)
    return message


_MOST_RANGES = 1024  # Largest number of ranges of a call: ``IOV_MAX`` of Linux.


class _Range(ctypes.Structure):
    """A range of memory: ``iovec`` of C."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@functools.cache
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    ranges = (ctypes.POINTER(_Range), ctypes.c_ulong)
    function.argtypes = (ctypes.c_int, *ranges, *ranges, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function


def _read_memory(pid: int, ranges: Sequence[tuple[int, int]], target: int) -> None:
    """Copy memory of another process, by address and bytes, end to end to an address of this one.

    Raises:
        OSError: The system does not allow it, or the process has ended.
    """
    left = deque(each for each in ranges if each[1])
    while left:
        some = [_Range(*left[i]) for i in range(min(len(left), _MOST_RANGES))]
        of = (_Range * len(some))(*some)
        into = _Range(target, sum(each.nbytes for each in some))
        count = _process_vm_readv()(pid, ctypes.byref(into), 1, of, len(some), 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        target += count
        while count:  # The system may have copied a part.
            address, nbytes = left.popleft()
            if count < nbytes:
                left.appendleft((address + count, nbytes - count))
            count -= min(count, nbytes)


# --- the ranks of an axis -------------------------------------------------------------------------


class DirectReads:
    """Exchanges among ranks of one host. All ranks start those of a lane in the same order.

    Args:
        connections: A connection with each other rank, in rank order, for this object alone.
        pids: Number of the process of each other rank.
        timeout_s: Limit of waits; None: none.
    """

    def __init__(
        self, connections: Sequence[socket.socket], pids: Sequence[int], timeout_s: float | None
    ) -> None:
        self._connections = connections
        self.timeout_s = timeout_s
        peers = zip(range(len(pids)), connections, pids, strict=True)
        self._reader = _Reader([_OtherRank(*each) for each in peers])
        self._pid = os.getpid()
        run, name = self._reader.run, "shardkit-reads"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()
        # The thread ends with this object. No `atexit`: a rank may still wait when Python ends.
        weakref.finalize(self, self._reader.waker.close).atexit = False

    def start(
        self,
        sources: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        lane: int,
        narrow_nbytes: int | None = None,
    ) -> DirectExchange:
        """Start to read what all other ranks have, and let them read.

        Args:
            sources: Contiguous tensors for each other rank, in rank order, which it reads end to
                end.
            targets: A contiguous tensor of the same bytes for each other rank, to be filled.
            lane: Lane in whose order this exchange is.
            narrow_nbytes: Bytes of another form, see `DirectExchange`.
        """
        exchange = DirectExchange(sources, targets, self, narrow_nbytes)
        self._reader.start(lane, exchange)
        return exchange

    def close(self) -> None:
        """End all waits, here and on other ranks. In a forked process this does nothing."""
        if os.getpid() == self._pid:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def read_directly(links: HostLinks, group: dist.ProcessGroup) -> DirectReads | None:
    """Return how the ranks of a gloo group read from each other; None if one of them may not.

    Linux may forbid that a process reads from another (``kernel.yama.ptrace_scope``, seccomp). All
    ranks of the group must call this. Its cost: two all-gathers of small objects.
    """
    direct = DirectReads(links.for_reads, links.pids, CONNECT_S)
    own = torch.tensor([group.rank()], device="cpu")
    found = [torch.full_like(own, -1) for _ in links.pids]
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = False
    with contextlib.suppress(RuntimeError):  # A wait that has ended in an error closes connections.
        direct.start([[own]] * len(found), found, 0).wait()
        works = [int(each) for each in found] == others
    if not works:
        direct.close()  # The other ranks wait for this one no longer.
    if not all(groups.exchange(works, group, "ranks that read from each other")):
        return None
    direct.timeout_s = torch_groups.timeout_of(group)
    return direct
