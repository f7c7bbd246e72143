"""Reads from the memory of other ranks: each of them here is an object of this process."""

from __future__ import annotations

import gc
import os
import threading
import time
import typing
from unittest import mock

import pytest
import torch
from hypothesis import given

from rank_connections import GATHERS, REDUCTIONS, SIX_TRANSFERS, connections
from shardkit.backends import direct_reads
from shardkit.backends.direct_reads import DirectExchange, DirectReads

if typing.TYPE_CHECKING:
    import socket


def connected(
    size: int, timeout_s: float | None = 20.0, *, pid: int | None = None
) -> list[DirectReads]:
    pids = [os.getpid() if pid is None else pid] * (size - 1)
    return [DirectReads(each, pids, timeout_s) for each in connections(size)]


class Started(typing.NamedTuple):
    """An exchange, and what it reads."""

    exchange: DirectExchange
    found: list[torch.Tensor]

    def values(self) -> list[int]:
        self.exchange.wait()
        assert all(each.unique().numel() == 1 for each in self.found)
        return [int(each[0]) for each in self.found]


def start(
    direct: DirectReads, values: typing.Sequence[int], *, numel: int = 100, lane: int = GATHERS
) -> Started:
    """Start an exchange that has one value for each other rank."""
    sources = [torch.full((numel,), value) for value in values]
    found = [torch.full((numel,), -1) for _ in values]
    return Started(direct.start([[source] for source in sources], found, lane), found)


@pytest.mark.parametrize("numel", [1, 100, 100_003])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_rank_gets_what_the_others_have_for_it(size: int, numel: int) -> None:
    ranks = connected(size)
    others = [[other for other in range(size) if other != rank] for rank in range(size)]
    all_started = [
        start(direct, [10 * rank + other for other in others[rank]], numel=numel)
        for rank, direct in enumerate(ranks)
    ]
    for rank, started in enumerate(all_started):
        assert started.values() == [10 * other + rank for other in others[rank]]


def is_done(started: Started) -> bool:
    time.sleep(0.1)
    return not any(started.exchange.num_missing)


def test_it_is_not_done_before_all_others_have_read() -> None:
    """The data that they read must stay as it is until then."""
    first, second, third = connected(3)
    started = start(first, [1, 1])
    assert not is_done(started)
    start(second, [2, 2])
    assert not is_done(started)
    read_memory, may_read = direct_reads._read_memory, threading.Event()  # noqa: SLF001

    def read_late(*where: int) -> None:
        if threading.current_thread() is not first._thread:  # noqa: SLF001
            assert may_read.wait(20)
        read_memory(*where)

    with mock.patch.object(direct_reads, "_read_memory", read_late):
        start(third, [3, 3])
        assert not is_done(started)
        assert [int(each[0]) for each in started.found] == [2, 3]
        may_read.set()
        assert started.values() == [2, 3]


@given(**SIX_TRANSFERS)
def test_waits_may_come_in_any_order(
    order: typing.Sequence[int], sizes: typing.Sequence[int], lanes: typing.Sequence[int]
) -> None:
    first, second = connected(2)
    mine, theirs = (
        [
            start(direct, [base + i], numel=numel, lane=lane)
            for i, (numel, lane) in enumerate(zip(sizes, lanes, strict=True))
        ]
        for direct, base in ((first, 0), (second, 100))
    )
    for i in order:
        assert mine[i].values() == [100 + i]
        mine[i].exchange.wait()
    for i in reversed(order):
        assert theirs[i].values() == [i]


def test_lanes_have_orders_of_their_own() -> None:
    first, second = connected(2)
    gather, reduction = start(first, [1]), start(first, [2], lane=REDUCTIONS)
    start(second, [4], lane=REDUCTIONS), start(second, [3])
    assert gather.values() == [3]
    assert reduction.values() == [4]


def test_an_exchange_goes_on_while_its_ranks_do_something_else() -> None:
    """Ranks that use different layers wait for exchanges in different orders."""
    first, second = connected(2)
    started = start(first, [1]), start(second, [2])
    for _ in range(100):
        if not any(any(each.exchange.num_missing) for each in started):
            return
        time.sleep(0.05)
    pytest.fail("nobody has read")


def test_nothing_to_read_is_read() -> None:
    first, second = connected(2)
    started = [start(direct, [1], numel=0) for direct in (first, second)]
    for each in started:
        each.exchange.wait()


def test_a_rank_may_be_far_ahead() -> None:
    """A connection takes some hundred messages; more wait for room, and nobody blocks."""
    first, second = connected(2)
    ahead = [start(first, [value]) for value in range(2000)]
    behind = [start(second, [-value]) for value in range(2000)]
    assert [each.values() for each in ahead] == [[-value] for value in range(2000)]
    assert [each.values() for each in behind] == [[value] for value in range(2000)]


def test_what_the_system_reads_in_parts_is_read_as_a_whole() -> None:
    whole = direct_reads._process_vm_readv()  # noqa: SLF001

    def some(pid: int, into: typing.Any, num: int, of: typing.Any, num_of: int, flags: int) -> int:
        of[0].nbytes = min(of[0].nbytes, 999)
        into._obj.nbytes = sum(each.nbytes for each in of)  # noqa: SLF001 - of `ctypes.byref`
        if into._obj.nbytes > 999:  # noqa: SLF001
            num_of = 1
            into._obj.nbytes = of[0].nbytes  # noqa: SLF001
        found: int = whole(pid, into, num, of, num_of, flags)
        return found

    first, second = connected(2)
    with mock.patch.object(direct_reads, "_process_vm_readv", return_value=some):
        one, other = start(first, [1], numel=5000), start(second, [2], numel=5000)
        assert one.values() == [2]
        assert other.values() == [1]
        check_ranges([3, 500, 1, 250, 2, 4000])


def check_ranges(numels: typing.Sequence[int]) -> None:
    """Let a rank read tensors of these sizes end to end, while it has one tensor for the other."""
    first, second = connected(2)
    parts = [torch.arange(numel) + 10_000 * i for i, numel in enumerate(numels)]
    found, back = torch.full((sum(numels),), -1), torch.full((sum(numels),), -1)
    one = torch.arange(sum(numels))
    exchanges = [
        first.start([parts], [back], GATHERS),
        second.start([[one]], [found], GATHERS),
    ]
    for exchange in exchanges:
        exchange.wait()
    assert torch.equal(found, torch.cat(parts))
    assert torch.equal(back, one)


@pytest.mark.parametrize(
    "numels", [[5], [2, 0, 3], [0, 0, 1], [1] * 1023, [1] * 1024, [2] * 1025, [1, 2, 3] * 1000]
)
def test_several_tensors_are_read_end_to_end(numels: list[int]) -> None:
    check_ranges(numels)


def test_a_rank_may_send_a_narrow_form() -> None:
    first, second = connected(2)
    whole, narrow = torch.arange(6.0), torch.arange(10.0, 16.0).bfloat16()
    found = [torch.full((6,), -1.0) for _ in range(2)]
    exchanges = [
        first.start([[whole]], [found[0].view(torch.uint8)], GATHERS, 12),
        second.start([[narrow[:2], narrow[2:]]], [found[1].view(torch.uint8)], GATHERS, 12),
    ]
    for exchange in exchanges:
        exchange.wait()
    assert exchanges[0].nbytes == [12]
    assert torch.equal(found[0][:3].view(torch.bfloat16), narrow)
    assert (found[0][3:] == -1).all()
    assert exchanges[1].nbytes == [24]
    assert torch.equal(found[1], whole)


def test_memory_is_free_when_a_wait_returns() -> None:
    first, second = connected(2)
    one, other = start(first, [1]), start(second, [2])
    one.exchange.wait(), other.exchange.wait()
    assert not one.exchange.sources
    assert not one.exchange.targets


# --- ends -----------------------------------------------------------------------------------------


def ends_by(direct: DirectReads, act: typing.Callable[[], object]) -> str:
    """Return the error of a wait during which something happens."""
    started = start(direct, [1] * len(direct._connections))  # noqa: SLF001
    timer = threading.Timer(0.2, act)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        started.exchange.wait()
    timer.join()
    assert time.monotonic() - began < 10
    return str(caught.value)


def test_close_ends_the_own_wait_and_those_of_others() -> None:
    first, second, third = connected(3)
    assert "closed" in ends_by(first, first.close)
    for direct in (second, third, first):  # At once, and also later.
        with pytest.raises(RuntimeError, match="closed"):
            start(direct, [1, 1]).exchange.wait()


def test_a_wait_for_a_rank_that_goes_ends() -> None:
    first, second = connected(2)
    (connection,) = second._connections  # noqa: SLF001 - the end of a process closes it
    assert "closed" in ends_by(first, lambda: connection.shutdown(2))


def test_a_rank_that_has_finished_may_go_before_the_others() -> None:
    first, second, third = connected(3)
    (to_third,) = [peer for peer in second._reader._peers if peer.place == 1]  # noqa: SLF001
    last = [start(second, [2, 2]), start(third, [3, 3])]
    held: list[tuple[int, ...]] = []
    with mock.patch.object(to_third, "send", lambda *message: held.append(message)):
        start(first, [1, 1]).exchange.wait()
        first.close()
        time.sleep(0.2)
    # The thread sends them, since only it uses a connection.
    pack = direct_reads._MESSAGE.pack  # noqa: SLF001
    to_third.unsent.extend((pack(*each), None) for each in held)
    second._reader.waker.send(b"1")  # noqa: SLF001
    assert [each.values() for each in last] == [[1, 3], [1, 2]]
    with pytest.raises(RuntimeError, match="closed"):
        start(second, [2, 2]).exchange.wait()


def test_a_wait_ends_after_the_time_of_the_process_group() -> None:
    first, second = connected(2, timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="in time"):
        start(first, [1]).exchange.wait()
    assert 0.2 < time.monotonic() - began < 5
    late = start(second, [2])  # What it would read may have been overwritten.
    with pytest.raises(RuntimeError, match="closed"):
        late.exchange.wait()


def test_a_system_that_forbids_it_says_why() -> None:
    first, second = connected(2, pid=2**22 + 1)  # No process has this number.
    one, other = start(first, [1]), start(second, [2])
    for started in (one, other):
        with pytest.raises(RuntimeError, match=r"No such process|closed"):
            started.exchange.wait()


def test_sizes_that_differ_are_not_read() -> None:
    first, second = connected(2)
    one, other = start(first, [1], numel=100), start(second, [2], numel=101)
    for started in (one, other):
        with pytest.raises(RuntimeError, match=r"sends 8(00|08) bytes, not 8(00|08)|closed"):
            started.exchange.wait()
        assert int(started.found[0][0]) == -1


def test_the_threads_end_with_the_connections() -> None:
    """Objects may live longer than their process group."""
    ranks = connected(3)
    ranks[0].close()
    ranks[1].close()
    for direct in ranks:
        direct._thread.join(timeout=10)  # noqa: SLF001
        assert not direct._thread.is_alive()  # noqa: SLF001
        with pytest.raises(RuntimeError, match="closed"):
            start(direct, [1, 1]).exchange.wait()


def test_any_error_of_the_thread_ends_the_waits() -> None:
    first, second = connected(2)
    with mock.patch.object(direct_reads, "_read_memory", side_effect=ValueError("a fault")):
        one, other = start(first, [1]), start(second, [2])
        for started in (one, other):
            with pytest.raises(RuntimeError, match=r"a fault|closed"):
                started.exchange.wait()


def test_a_forked_process_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = connected(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        first.close()
    one, other = start(first, [1]), start(second, [2])
    assert one.values() == [2]
    assert other.values() == [1]


def test_the_thread_and_its_connections_go_with_the_object() -> None:
    ranks = connected(3)
    threads = [direct._thread for direct in ranks]  # noqa: SLF001
    sockets: list[socket.socket] = [each for direct in ranks for each in direct._connections]  # noqa: SLF001
    del ranks
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert all(each.fileno() == -1 for each in sockets)
