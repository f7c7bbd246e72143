"""Shared memory, in which ranks of one host pass small tensors to each other without gloo.

Over loopback gloo copies data four times, in threads that take cores from compute. Here a rank
writes data for other ranks into its own block, and sends them the place in a message of 40 bytes.
They read it there. No rank waits for room: if no block is free, a new one is made.

Blocks are anonymous memory, whose descriptors travel with the messages. So there is no file, no
limit of ``/dev/shm``, and nothing is left over when a process is killed. A connection ends with its
process: a wait for a rank that has ended returns at once with an error.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shardkit._compat import torch_groups
from shardkit.backends.groups import exchange
from shardkit.backends.host_links import CONNECT_S, RETRY_S, HostLinks, Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor


_MESSAGE = struct.Struct("<IIQQQQ")
"""Lane, block, number of the message, bytes, and the number of messages read of each lane."""

_NUM_LANES = 2
_SMALLEST_BLOCK = 1 << 16
_ROOM_FOR_DESCRIPTOR = socket.CMSG_SPACE(4)
_REMEDY = (
    "Raise the limit of open files (ulimit -n) or of memory, or set SHARDKIT_SHARED_MEMORY=0 on "
    "all ranks: then gloo sends everything."
)


# --- what is shared -------------------------------------------------------------------------------


@dataclass(slots=True)
class Block:
    """A piece of this rank's memory that other ranks read."""

    number: int  # Number of the block.
    memory: Tensor  # Bytes of the block, 1-D.
    descriptor: int | None  # Descriptor of the memory, until the other ranks have received it.


class Shared:
    """Bytes that all ranks of the axis have shared by one message each.

    Each rank shares the same number of bytes at this place of the lane's order.
    """

    def __init__(self, memory: SharedMemory, lane: int, number: int) -> None:
        self._memory: SharedMemory | None = memory
        self._lane = lane
        self._number = number

    def is_there(self) -> bool:
        """Whether all other ranks have shared their bytes; returns at once."""
        assert self._memory is not None, "it is open"
        return self._memory.receive(self._lane, self._number, blocks=False)

    def wait(self) -> list[Tensor]:
        """Block until all other ranks have shared; return their 1-D bytes, in rank order.

        Raises:
            RuntimeError: A rank has ended, or has not shared within the process group's time limit.
        """
        assert self._memory is not None, "it is open"
        self._memory.receive(self._lane, self._number, blocks=True)
        return self._memory.others(self._lane, self._number)

    def close(self) -> None:
        """Release the bytes, which this rank no longer needs. A second call returns at once."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.note_read(self._lane, self._number)

    def __del__(self) -> None:
        """Close after an exception, if nobody has closed it."""
        self.close()


# --- the memory of an axis ------------------------------------------------------------------------


@dataclass(slots=True)
class _Lane:
    """State of one sequence of this rank's messages."""

    num_sent: int = 0
    num_read: int = 0  # Number of messages that this rank has read of each other, without a gap.
    read_early: set[int] = field(default_factory=set)  # Messages after a gap.
    in_use: deque[tuple[int, Block]] = field(default_factory=deque)  # Own blocks, by message.


class _Peer(Outbox):
    """Another rank: what this rank received from it, and what it has read."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.blocks: dict[int, Tensor] = {}
        self.num_received = [0] * _NUM_LANES
        self.unread: tuple[dict[int, Tensor], ...] = tuple({} for _ in range(_NUM_LANES))
        self.num_read = [0] * _NUM_LANES


class SharedMemory:
    """The memory that the ranks of an axis share, as one of them sees it.

    Messages of a lane are sent and received in one order on all ranks. Each message says how many
    messages the sender has read. That frees blocks.

    Args:
        connections: A connection with each other rank, in rank order.
        timeout_s: Limit of `set_timeout`.
    """

    def __init__(self, connections: Sequence[socket.socket], timeout_s: float | None) -> None:
        self._connections = connections
        self.forget()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._reading = threading.RLock()
        self._sender: threading.Thread | None = None
        self._pid = os.getpid()
        # Close when nobody waits any more. A `__del__` here could run after that of a socket.
        weakref.finalize(self, _close_all, self._connections).atexit = False
        self.set_timeout(timeout_s)

    def forget(self) -> None:
        """Drop all blocks and messages; call it on all ranks after they have read everything."""
        self._peers = [_Peer(connection) for connection in self._connections]
        self._lanes = [_Lane() for _ in range(_NUM_LANES)]
        self._free: list[Block] = []
        self._num_blocks = 0

    def set_timeout(self, timeout_s: float | None) -> None:
        """Choose after how many seconds a wait for a rank ends in an error; None: never."""
        part, whole = math.modf(timeout_s or 0.0)
        limit = struct.pack("@ll", int(whole), int(part * 1e6))
        for peer in self._peers:
            # Not `settimeout`: with it Python makes two system calls for each message.
            peer.connection.setblocking(True)
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's blocks."""
        in_use = [block for lane in self._lanes for _, block in lane.in_use]
        return sum(block.memory.nbytes for block in (*self._free, *in_use))

    # --- sending ---

    def block(self, nbytes: int) -> Block:
        """Return a block of at least `nbytes` bytes that no rank reads.

        Raises:
            RuntimeError: The system gives no memory or no descriptor.
        """
        found = self._take_free(nbytes)
        if found is None:
            with self._receiving:  # Messages may say what other ranks have read.
                for peer in self._peers:
                    while self._receive_one(peer, blocks=False):
                        pass
            found = self._take_free(nbytes)
        if found is not None:
            return found
        capacity = max(_SMALLEST_BLOCK, 1 << (nbytes - 1).bit_length())
        descriptor = None
        try:
            descriptor = os.memfd_create("shardkit")
            os.truncate(descriptor, capacity)
            memory = _mapped(descriptor)
        except (OSError, RuntimeError) as error:
            if descriptor is not None:
                os.close(descriptor)
            msg = f"{capacity} bytes cannot be shared with other ranks: {error}. {_REMEDY}"
            raise RuntimeError(msg) from error
        self._num_blocks += 1
        return Block(self._num_blocks, memory, descriptor)

    def _take_free(self, nbytes: int) -> Block | None:
        for number, lane in enumerate(self._lanes):
            num_read = min(lane.num_read, *[peer.num_read[number] for peer in self._peers])
            while lane.in_use and lane.in_use[0][0] < num_read:
                self._free.append(lane.in_use.popleft()[1])
        fitting = [block for block in self._free if block.memory.nbytes >= nbytes]
        if not fitting:
            return None
        found = min(fitting, key=lambda block: block.memory.nbytes)
        self._free.remove(found)
        return found

    def share(self, block: Block, nbytes: int, lane: int) -> Shared:
        """Let all other ranks read the first bytes of a block. The caller must not change them.

        Args:
            block: Block of `block`. It is used again when all ranks have read it.
            nbytes: Number of the bytes, equal on all ranks.
            lane: Lane in whose order the message is sent.
        """
        own = self._lanes[lane]
        with self._sending:
            number = own.num_sent
            own.num_sent += 1
            own.in_use.append((number, block))
            num_read = [each.num_read for each in self._lanes]
            message = _MESSAGE.pack(lane, block.number, number, nbytes, *num_read)
            descriptor, block.descriptor = block.descriptor, None
            for peer in self._peers:
                peer.unsent.append((message, None if descriptor is None else os.dup(descriptor)))
                peer.send_unsent()
            if descriptor is not None:
                os.close(descriptor)
            if self._sender is None and any(peer.unsent for peer in self._peers):
                name = "shardkit-messages"
                self._sender = threading.Thread(target=self._send_rest, name=name, daemon=True)
                self._sender.start()
        return Shared(self, lane, number)

    def _send_rest(self) -> None:
        """Send unsent messages when there is room, in a thread, since other ranks may wait."""
        while True:
            with self._sending:
                for peer in self._peers:
                    peer.send_unsent()
                late = [peer for peer in self._peers if peer.unsent]
                if not late:
                    self._sender = None
                    return
            poll = select.poll()
            for peer in late:
                poll.register(peer.connection, select.POLLOUT)
            poll.poll()
            time.sleep(RETRY_S)  # There may be room, but another shortage.

    # --- receiving ---

    def receive(self, lane: int, number: int, *, blocks: bool) -> bool:
        """Receive until all other ranks have sent message `number`; return whether they have.

        Args:
            lane: Lane of the message.
            number: Number of the message.
            blocks: Whether to wait for messages that have not arrived.

        Raises:
            RuntimeError: See `Shared.wait`.
        """
        with self._receiving:
            for peer in self._peers:
                while peer.num_received[lane] <= number:
                    if not self._receive_one(peer, blocks=blocks):
                        return False
        return True

    def _receive_one(self, peer: _Peer, *, blocks: bool) -> bool:
        """Receive a message; return whether there was one."""
        flags = 0 if blocks else socket.MSG_DONTWAIT
        try:
            message, extra, found, _ = peer.connection.recvmsg(
                _MESSAGE.size, _ROOM_FOR_DESCRIPTOR, flags
            )
        except OSError as error:
            if not blocks:  # A blocking call will raise it.
                return False
            what = "nobody came in time" if isinstance(error, BlockingIOError) else error
            msg = f"a wait for a tensor in shared memory has ended: {what}"
            raise RuntimeError(msg) from error
        if not message:
            if not blocks:
                return False
            msg = "a wait for a tensor in shared memory has ended: the connection was closed"
            raise RuntimeError(msg)
        if found & socket.MSG_CTRUNC:
            msg = f"what another rank shares cannot be opened: too many open files. {_REMEDY}"
            raise RuntimeError(msg)
        lane, block, number, nbytes, *peer.num_read = _MESSAGE.unpack(message)
        for _, _, data in extra:
            descriptor = int.from_bytes(data[:4], sys.byteorder)
            try:
                peer.blocks[block] = _mapped(descriptor)
            except RuntimeError as error:
                msg = f"what another rank shares cannot be opened: {error}. {_REMEDY}"
                raise RuntimeError(msg) from error
            finally:
                os.close(descriptor)
        if number != peer.num_received[lane]:
            msg = "a tensor in shared memory was lost: a signal has interrupted a wait for it"
            raise RuntimeError(msg)
        peer.num_received[lane] += 1
        own = self._lanes[lane]
        if number >= own.num_read and number not in own.read_early:  # Else no code needs it.
            peer.unread[lane][number] = peer.blocks[block][:nbytes]
        return True

    def others(self, lane: int, number: int) -> list[Tensor]:
        """Return what the other ranks have shared by message `number`, which has arrived."""
        return [peer.unread[lane][number] for peer in self._peers]

    def note_read(self, lane: int, number: int) -> None:
        """Note that this rank no longer needs what was shared by messages `number`."""
        own = self._lanes[lane]
        with self._reading:  # Garbage collection may call this in any thread, and inside itself.
            for peer in self._peers:
                peer.unread[lane].pop(number, None)
            own.read_early.add(number)
            while own.num_read in own.read_early:
                own.read_early.remove(own.num_read)
                own.num_read += 1

    # --- the end ---

    def close(self) -> None:
        """End all waits, here and on other ranks. In a forked process this does nothing."""
        if os.getpid() == self._pid:
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.connection.shutdown(socket.SHUT_RDWR)


def _close_all(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _mapped(descriptor: int) -> Tensor:
    """Return the whole memory of a descriptor, 1-D."""
    path, nbytes = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    with torch.inference_mode(mode=False):  # Python's own `mmap` would keep a descriptor.
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


# --- the ranks of an axis -------------------------------------------------------------------------


def share_memory(links: HostLinks, group: dist.ProcessGroup) -> SharedMemory | None:
    """Return the memory that the ranks of a gloo group share; None if the system forbids it.

    All ranks of the group must call this. Its cost: two all-gathers of small objects.
    """
    memory, works = SharedMemory(links.for_messages, CONNECT_S), False
    with contextlib.suppress(OSError, RuntimeError):
        _try(memory)
        works = True
    if not works:
        memory.close()  # The other ranks wait for this one no longer.
    if not all(exchange(works, group, "memory that ranks share")):
        return None
    memory.set_timeout(torch_groups.timeout_of(group))
    return memory


def _try(memory: SharedMemory) -> None:
    """Let a byte go through memory that is shared."""
    shared = memory.share(memory.block(1), 1, 0)
    shared.wait()
    shared.close()
    memory.forget()
