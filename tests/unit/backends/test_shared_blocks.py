"""Memory that ranks share: each of them here is an object, connected with the others."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
import threading
import time
import typing
from pathlib import Path

import pytest
import torch
from hypothesis import given

from rank_connections import GATHERS, REDUCTIONS, SIX_TRANSFERS, connections
from shardkit.backends import shared_memory
from shardkit.backends.shared_memory import Shared, SharedMemory


def connected(size: int, timeout_s: float | None = 20.0) -> list[SharedMemory]:
    return [SharedMemory(each, timeout_s) for each in connections(size)]


def share(memory: SharedMemory, value: int, *, nbytes: int = 100, lane: int = GATHERS) -> Shared:
    block = memory.block(nbytes)
    block.memory[:nbytes] = value
    return memory.share(block, nbytes, lane)


def values(shared: Shared) -> list[int]:
    found = shared.wait()
    assert all(each.unique().numel() == 1 for each in found)
    return [int(each[0]) for each in found]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_rank_gets_what_the_others_have_in_rank_order(size: int) -> None:
    ranks = connected(size)
    all_shared = [share(memory, 10 + rank) for rank, memory in enumerate(ranks)]
    for rank, shared in enumerate(all_shared):
        assert values(shared) == [10 + other for other in range(size) if other != rank]


def test_it_is_not_there_before_all_have_shared_theirs() -> None:
    first, second, third = connected(3)
    shared = share(first, 1)
    assert not shared.is_there()
    share(second, 2)
    assert not shared.is_there()
    share(third, 3)
    assert shared.is_there()
    assert values(shared) == [2, 3]


@given(**SIX_TRANSFERS)
def test_waits_may_come_in_any_order(
    order: typing.Sequence[int], sizes: typing.Sequence[int], lanes: typing.Sequence[int]
) -> None:
    first, second = connected(2)
    mine, theirs = (
        [
            share(memory, base + i, nbytes=nbytes, lane=lane)
            for i, (nbytes, lane) in enumerate(zip(sizes, lanes, strict=True))
        ]
        for memory, base in ((first, 0), (second, 100))
    )
    for i in order:
        (got,) = mine[i].wait()
        assert got.numel() == sizes[i]
        assert values(mine[i]) == [100 + i]
        mine[i].close()
    for i in reversed(order):
        assert values(theirs[i]) == [i]


def test_lanes_have_orders_of_their_own() -> None:
    first, second = connected(2)
    gather, reduction = share(first, 1), share(first, 2, lane=REDUCTIONS)
    share(second, 4, lane=REDUCTIONS), share(second, 3)
    assert values(gather) == [3]
    assert values(reduction) == [4]


# --- blocks ---------------------------------------------------------------------------------------


def exchange(ranks: typing.Sequence[SharedMemory], value: int, nbytes: int = 100) -> None:
    all_shared = [share(memory, value, nbytes=nbytes) for memory in ranks]
    for shared in all_shared:
        assert set(values(shared)) == {value}
        shared.close()


def test_blocks_are_used_again() -> None:
    ranks = connected(3)
    for value in range(5):
        exchange(ranks, value)
    before = [memory.nbytes for memory in ranks]
    for value in range(200):
        exchange(ranks, value)
    assert [memory.nbytes for memory in ranks] == before
    assert max(before) <= 4 * 65_536


def test_nothing_is_written_over_before_all_have_read_it() -> None:
    first, second, third = connected(3)
    theirs = [share(second, 2), share(second, 3)]
    late = [share(third, 4), share(third, 5)]
    for value in (10, 11):
        share(first, value).close()
    assert values(theirs[0]) == [10, 4]
    for shared in theirs:
        shared.close()
    for value in range(20, 60):  # The third rank has read nothing.
        share(first, value).close()
        share(second, value).close()
    assert values(late[0]) == [10, 2]
    assert values(late[1]) == [11, 3]


def test_a_larger_block_is_made_where_none_fits() -> None:
    ranks = connected(2)
    exchange(ranks, 1, nbytes=1)
    exchange(ranks, 2, nbytes=70_000)
    exchange(ranks, 3, nbytes=131_073)
    small, large = ranks[0].block(1), ranks[0].block(131_072)
    assert small.memory.nbytes == 65_536
    assert large.memory.nbytes == 131_072


def test_what_nobody_waited_for_is_read() -> None:
    """A handle that an exception drops must not keep the others' blocks in use."""
    first, second = connected(2)
    for value in range(50):
        share(first, value)  # Dropped at once.
        shared = share(second, value)
        assert values(shared) == [value]
        shared.close()
    gc.collect()
    assert first.nbytes + second.nbytes <= 10 * 65_536
    exchange([first, second], 7)


def num_descriptors() -> int:
    """Return the number of open descriptors of blocks, after those of other tests have gone."""
    gc.collect()
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # What lists the folder has gone.
            names.append(str(entry.readlink()))
    return sum("memfd:shardkit" in name for name in names)


def test_descriptors_are_closed() -> None:
    ranks = connected(4)
    before = num_descriptors()
    for value in range(50):
        exchange(ranks, value, nbytes=1 << (value % 20))
    assert num_descriptors() == before


def test_blocks_may_be_made_in_inference_mode() -> None:
    ranks = connected(2)
    with torch.inference_mode():
        exchange(ranks, 1)
    exchange(ranks, 2)


def test_a_rank_may_be_far_ahead() -> None:
    """The connection takes some hundred messages; more wait for room, and nobody blocks."""
    first, second = connected(2)
    ahead = [share(first, value % 100) for value in range(2000)]
    behind = [share(second, value % 100) for value in range(2000)]
    done: list[bool] = []

    def read(all_shared: typing.Sequence[Shared]) -> None:
        done.append(all(values(s) == [i % 100] for i, s in enumerate(all_shared)))

    threads = [threading.Thread(target=read, args=(each,)) for each in (ahead, behind)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert done == [True, True]


class ShortOfMemory:
    """A connection over which the first sends fail, as the system may let them."""

    def __init__(self, connection: socket.socket, times: int) -> None:
        self._connection = connection
        self._times = times

    def __getattr__(self, name: str) -> typing.Any:
        if name in {"send", "sendmsg"} and self._times > 0:
            self._times -= 1
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return getattr(self._connection, name)


def test_a_send_for_which_there_is_no_memory_is_repeated() -> None:
    first, second = connected(2)
    (peer,) = first._peers  # noqa: SLF001
    peer.connection = typing.cast("socket.socket", ShortOfMemory(peer.connection, 5))
    for value in (1, 2):
        share(first, value)
        assert values(share(second, value + 10)) == [value]


# --- ends -----------------------------------------------------------------------------------------


def ends_by(memory: SharedMemory, act: typing.Callable[[], object]) -> str:
    """Return the error of a wait during which something happens."""
    shared = share(memory, 1)
    timer = threading.Timer(0.2, act)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        shared.wait()
    timer.join()
    assert time.monotonic() - began < 10
    return str(caught.value)


def test_a_wait_for_a_rank_that_goes_ends() -> None:
    first, second = connected(2)
    (peer,) = second._peers  # noqa: SLF001 - the end of a process closes it
    assert "closed" in ends_by(first, lambda: peer.connection.shutdown(socket.SHUT_RDWR))


def test_close_ends_the_own_wait_and_those_of_others() -> None:
    first, second, third = connected(3)
    assert "closed" in ends_by(first, first.close)
    share(third, 1), share(third, 1)
    came, never_comes = share(second, 1), share(second, 1)
    assert values(came) == [1, 1]
    assert not never_comes.is_there()
    with pytest.raises(RuntimeError, match="closed"):
        never_comes.wait()
    share(first, 1).close()  # Who sends meets nothing.


def test_what_was_sent_before_the_end_is_read() -> None:
    first, second = connected(2)
    mine = share(first, 1)
    share(second, 2)
    second.close()
    assert values(mine) == [2]


def test_a_wait_ends_after_the_time_of_the_process_group() -> None:
    first, _second = connected(2, timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="in time"):
        share(first, 1).wait()
    assert 0.2 < time.monotonic() - began < 5


def test_a_message_that_was_lost_is_noticed() -> None:
    """A signal may raise in the moment when a message has been received."""
    first, second = connected(2)
    share(second, 1), share(second, 2)
    (peer,) = first._peers  # noqa: SLF001
    peer.connection.recv(1000)
    with pytest.raises(RuntimeError, match="lost"):
        share(first, 3).wait()


def test_a_forked_process_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = connected(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        first.close()
    exchange([first, second], 3)


# --- no more files --------------------------------------------------------------------------------


@contextlib.contextmanager
def no_more_files() -> typing.Iterator[None]:
    """Let this process open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_with_too_many_open_files_says_so() -> None:
    first, second = connected(2)
    with no_more_files(), pytest.raises(RuntimeError, match=r"Too many open files.*ulimit -n"):
        first.block(100)
    shared = share(second, 2)
    share(first, 1)
    with no_more_files(), pytest.raises(RuntimeError, match="SHARDKIT_SHARED_MEMORY=0"):
        shared.wait()


def test_a_block_that_cannot_be_mapped_leaves_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> torch.Tensor:
        raise RuntimeError

    first, _ = connected(2)
    before = num_descriptors()
    monkeypatch.setattr(shared_memory, "_mapped", refuse)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        first.block(100)
    assert num_descriptors() == before


def test_what_cannot_be_mapped_is_explained_and_leaves_no_open_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a process that may open one file more: the descriptor of the memory takes its place."""

    def refuse(_: int) -> torch.Tensor:
        msg = "unable to open file"
        raise RuntimeError(msg)

    first, second = connected(2)
    before = num_descriptors()
    shared = share(first, 1)
    share(second, 2)
    monkeypatch.setattr(shared_memory, "_mapped", refuse)
    with pytest.raises(RuntimeError, match=r"unable to open file.*ulimit -n"):
        shared.wait()
    assert num_descriptors() == before
