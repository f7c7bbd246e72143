"""Rounds of questions over a store: who asks, who answers, what is known of who does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import typing

import pytest
import torch.distributed as dist

from shardkit._processes import machine_id, start_of
from shardkit._settings import watch_settings
from shardkit.backends.watch import rounds as module
from shardkit.backends.watch.diagnosis import Diagnosis
from shardkit.backends.watch.liveness import NOWHERE, Address, Listener
from shardkit.backends.watch.rounds import Answering, Result, Rounds, hello
from shardkit.backends.watch.runs import RunStore
from shardkit.backends.watch.status import (
    CallStatus,
    CodePlace,
    GroupStatus,
    RankStatus,
    WaitStatus,
    to_text,
)

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

NO_PROCESS = 2**22 + 1  # Above what Linux gives.


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_settings, "answer_s", 0.15)
    monkeypatch.setattr(module, "_CONFIRM_S", 0.05)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give the seconds that rounds believe it is; tests change them."""
    seconds = [100.0]
    monkeypatch.setattr(module, "_now", lambda: seconds[0])
    return seconds


def file_store(folder: pathlib.Path) -> typing.Any:
    return dist.FileStore(str(folder / "store"), 9)


def tcp_store(_: pathlib.Path) -> typing.Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def hash_store(_: pathlib.Path) -> typing.Any:
    return dist.HashStore()


@pytest.fixture(params=[hash_store, tcp_store, file_store], ids=["hash", "tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> RunStore:
    return RunStore("run", request.param(tmp_path))


@contextlib.contextmanager
def answering(store: RunStore, *statuses: RankStatus) -> Iterator[list[list[Result]]]:
    """Answer rounds for ranks, as their watchdogs do; yield what each heard of all rounds."""
    is_over, before = threading.Event(), store.add("rounds", 0)
    heard: list[list[Result]] = [[] for _ in statuses]
    threads, ranks = [], []
    for status, results in zip(statuses, heard, strict=True):
        own = Answering(store.clone(), status.rank, lambda status=status: status)  # type: ignore[misc]

        def listen(own: Answering = own, results: list[Result] = results) -> None:
            while not is_over.is_set():
                own.store.block_until(own.wake_key, is_over.is_set)
                if not is_over.is_set():
                    results.append(own.answer(is_over.is_set))

        ranks.append(own)
        threads.append(threading.Thread(target=listen))
        threads[-1].start()
    try:
        yield heard
        number, until = store.add("rounds", 0) - before, time.monotonic() + 10
        while any(len(results) < number for results in heard) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        is_over.set()
        for own in ranks:
            store.set(own.wake_key, "")
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def waiting(rank: int, **fields: typing.Any) -> RankStatus:
    """Return the status of a rank that waits for the first collective of two ranks."""
    groups = {"0": GroupStatus([0, 1], 1, recent=["a"])}
    return RankStatus(
        rank, pid=os.getpid(), groups=groups, wait=WaitStatus("0", 0, "a", 3.0), **fields
    )


def test_all_answer_and_nobody_waits(store: RunStore) -> None:
    with answering(store, RankStatus(0), RankStatus(1)) as heard:
        asker = Rounds(store, 2, -1)
        assert asker.ask() is None
    assert [status.state for status in asker.statuses] == ["runs", "runs"]
    assert heard == [[Result()], [Result()]]


def test_all_ranks_hear_what_follows(store: RunStore) -> None:
    store.set("end/1", RankStatus(1, state="ended").dump())
    with answering(store, waiting(0)) as heard:
        diagnosis = Rounds(store, 2, 0).ask()
    assert diagnosis is not None
    assert diagnosis.is_final
    assert "rank 1 has ended" in diagnosis.text
    assert [result.diagnosis for result in heard[0]] == [diagnosis]


def test_who_only_looks_on_ends_nothing(store: RunStore) -> None:
    """And yet hears all of it."""
    store.set("end/1", RankStatus(1, state="ended").dump())
    with answering(store, waiting(0)) as heard:
        diagnosis = Rounds(store, 2, -1).ask()
    assert diagnosis is not None
    assert "rank 1 has ended" in diagnosis.text
    assert [result.diagnosis for result in heard[0]] == [None]


def test_who_comes_second_reads_what_the_first_found(store: RunStore) -> None:
    store.claim("asks/1", "0")
    store.set("result/1", to_text(Result(Diagnosis(is_final=False, text="later"), [1])))
    rounds = Rounds(store, 2, 1)
    rounds.statuses = [RankStatus(0), RankStatus(1)]
    diagnosis = rounds.ask()
    assert diagnosis is not None
    assert diagnosis.text == "later"
    assert rounds.statuses == [], "they are of a round before"
    assert store.add("rounds", 0) == 0


@pytest.mark.parametrize("rank", [1, -1], ids=["a rank", "who looks on"])
def test_who_asks_while_a_round_runs_waits_for_it(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The ranks that answer the round wait for its result, and would seem silent."""
    monkeypatch.setattr(watch_settings, "answer_s", 1.0)
    with answering(store, waiting(0), RankStatus(1)):
        store.claim("asks/1", "0")
        store.set("rounds", "1")
        store.set_all({"wake/0/1": "", "wake/1/1": ""})
        assert store.await_keys(["answer/1/0", "answer/1/1"], 10)
        found = to_text(Result(Diagnosis(is_final=False, text="of the first")))
        threading.Timer(1.5, store.clone().set, ["result/1", found]).start()
        asker = Rounds(store.clone(), 2, rank)
        diagnosis = asker.ask()
    assert diagnosis is not None
    assert (diagnosis.text == "of the first") == (rank == 1)
    assert [status.state for status in asker.statuses] == ([] if rank == 1 else ["runs", "runs"])


def test_a_rank_that_begins_while_a_round_runs_answers_it(store: RunStore) -> None:
    store.claim("asks/1", "0")
    store.set("rounds", "1")
    store.set_all({"wake/0/1": "", "wake/1/1": ""})
    with answering(store, RankStatus(1)):
        assert store.await_keys(["answer/1/1"], 10)
        store.set("result/1", to_text(Result()))
    begun_later = Answering(store, 1, lambda: RankStatus(1))
    assert begun_later.wake_key == "wake/1/2"


def test_what_another_asker_suspects_is_looked_at_again(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONFIRM_S", 0.0)
    call = CallStatus("barrier", "0", [0, 1], 7, 3.0)
    one = RankStatus(1, groups={"0": GroupStatus([0, 1], 0)}, call=call, place=CodePlace("a.py", 3))
    with answering(store, waiting(0), one):
        first = Rounds(store.clone(), 2, 0)
        result = first._ask_or_join()  # noqa: SLF001
        assert result.diagnosis is not None
        store.delete("result/1")  # It is still on its way.
        threading.Timer(0.2, store.clone().set, ["result/1", to_text(result)]).start()
        second = Rounds(store.clone(), 2, 1)
        diagnosis = second.ask()
    assert diagnosis is not None
    assert diagnosis.is_final
    assert second.num_rounds == 1


def test_where_the_asker_died_the_next_round_can_begin(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had not woken anybody, or not all."""
    monkeypatch.setattr(watch_settings, "answer_s", 5.0)
    monkeypatch.setattr(module, "_MORE_RESULT_S", -4.9)  # It could ask from another machine.
    store.claim("asks/1", "0")
    with answering(store, RankStatus(0), RankStatus(1)):
        asker = Rounds(store, 2, 1)
        assert asker.ask() is None
        assert asker.ask() is None
        assert [status.state for status in asker.statuses] == ["runs", "runs"]
    assert store.add("rounds", 0) == 2


@pytest.mark.parametrize("how", ["gone", "raised"])
def test_where_the_asker_ended_in_its_round_the_next_one_begins_at_once(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Ranks that have answered wait for the result of its round."""
    monkeypatch.setattr(module, "_MORE_RESULT_S", 1000.0)
    monkeypatch.setattr(watch_settings, "answer_s", 5.0)
    if how == "gone":
        store.set("hello/0", json.dumps(["host", NO_PROCESS, "1", machine_id(), NOWHERE]))
    else:
        store.set("end/0", RankStatus(0, state="raised").dump())
    with answering(store, RankStatus(0), RankStatus(1)):
        store.claim("asks/1", "0")
        store.set("rounds", "1")
        store.set_all({"wake/0/1": "", "wake/1/1": ""})
        asker = Rounds(store.clone(), 2, 1)
        asker.ask()
    assert [status.state for status in asker.statuses] == ["runs", "runs"]
    assert store.add("rounds", 0) == 2


@pytest.mark.parametrize("known", ["gone", "taken over", "busy", "silent", "unborn"])
def test_what_is_known_of_who_does_not_answer(store: RunStore, known: str) -> None:
    if known != "unborn":
        machine = "elsewhere" if known == "silent" else machine_id()
        pid = NO_PROCESS if known == "gone" else os.getpid()
        start = "1" if known == "taken over" else start_of(pid)
        store.set("hello/0", json.dumps(["host", pid, start, machine, NOWHERE]))
    asker = Rounds(store, 1, -1)
    asker.ask()
    assert asker.statuses[0].state == ("gone" if known == "taken over" else known)


def test_a_rank_that_is_stopped_or_traced_is_said_to_be(store: RunStore) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(19)
        store.set("hello/0", hello("host", process.pid))
        asker = Rounds(store, 1, -1)
        asker.ask()
        assert asker.statuses[0].state == "stopped"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("pid", "start", "state"),
    [(NO_PROCESS, "", "gone"), (os.getpid(), "1", "gone"), (os.getpid(), "", "busy")],
    ids=["gone", "taken-over", "busy"],
)
def test_others_of_a_machine_look_at_who_is_silent_there(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, pid: int, start: str, state: str
) -> None:
    """Rank 0 asks; ranks 1 and 2 are elsewhere, where rank 1 answers for rank 2."""
    monkeypatch.setattr(module, "machine_id", lambda: "here")
    for rank, machine in enumerate(["here", "there", "there"]):
        store.set(f"hello/{rank}", json.dumps(["host", pid, start, machine, NOWHERE]))
    groups = {"0": GroupStatus([0, 1, 2], 1, recent=["a"])}
    zero = RankStatus(0, groups=groups, wait=WaitStatus("0", 0, "a", 3.0))
    one = RankStatus(1, groups=groups)
    with answering(store, zero, one):
        asker = Rounds(store, 3, 0)
        diagnosis = asker.ask()
    assert asker.statuses[2].state == state
    assert diagnosis is not None
    assert diagnosis.is_final == (state == "gone")
    assert f"rank 2 {'is gone' if state == 'gone' else 'does not answer, but'}" in diagnosis.text


def test_silence_counts_within_one_wait_without_gaps(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    monkeypatch.setattr(watch_settings, "answer_s", 0.02)
    monkeypatch.setattr(watch_settings, "silent_after_s", 1000.0)
    store.set("hello/1", json.dumps(["host", 1, "", "elsewhere", NOWHERE]))
    asker = Rounds(store, 2, 0)

    def silence(*answers: RankStatus) -> float:
        now[0] += 50
        with answering(store, waiting(0), *answers):
            asker.ask()
        return asker.statuses[1].silent_s

    assert silence() < 1
    assert silence() > 49
    assert silence() > 99
    asker.forget()
    assert silence() < 1
    assert silence() > 49
    monkeypatch.setattr(watch_settings, "answer_s", 5.0)
    assert silence(RankStatus(1)) == 0
    monkeypatch.setattr(watch_settings, "answer_s", 0.02)
    assert silence() < 1


def test_who_has_just_made_its_first_mesh_has_not_been_silent_before(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    monkeypatch.setattr(watch_settings, "answer_s", 0.02)
    asker = Rounds(store, 1, 0)
    asker.ask()
    now[0] += 1000
    store.set("hello/0", json.dumps(["host", 1, "", "elsewhere", NOWHERE]))
    asker.ask()
    assert asker.statuses[0].state == "silent"
    assert asker.statuses[0].silent_s < 1


def test_who_lives_on_another_host_is_not_lost_however_long_it_is_silent(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    """Its kernel accepts connections. When they fail, the silence counts from the last one."""
    monkeypatch.setattr(watch_settings, "answer_s", 0.02)
    listener = Listener(Address("127.0.0.1", 1))
    there = ["host", 1, "", "elsewhere", listener.address]
    store.set("hello/1", json.dumps(there))
    asker = Rounds(store, 2, 0)

    def ask() -> Diagnosis:
        now[0] += 50
        with answering(store, waiting(0)):
            diagnosis = asker.ask()
        assert diagnosis is not None
        return diagnosis

    for _ in range(4):
        diagnosis = ask()
        assert not diagnosis.is_final
        assert "rank 1 does not answer, but process 1 on host lives" in diagnosis.text
    listener.close()
    assert not ask().is_final
    assert "rank 1 has not answered for 100 s" in ask().text


def test_what_is_suspected_is_looked_at_again_at_once(store: RunStore) -> None:
    call = CallStatus("barrier", "0", [0, 1], 7, 3.0)
    one = RankStatus(1, groups={"0": GroupStatus([0, 1], 0)}, call=call, place=CodePlace("a.py", 3))
    with answering(store, waiting(0), one) as heard:
        asker = Rounds(store, 2, 0)
        diagnosis = asker.ask()
    assert diagnosis is not None
    assert diagnosis.is_final
    assert asker.num_rounds == 2
    assert [result.diagnosis.is_final for result in heard[1] if result.diagnosis] == [False, True]


def test_an_answer_that_cannot_be_read_is_none(store: RunStore) -> None:
    store.set("hello/0", hello("host", os.getpid()))
    thread = threading.Timer(0.05, store.clone().set, ["answer/1/0", '{"rank": [}'])
    thread.start()
    asker = Rounds(store, 1, -1)
    asker.ask()
    thread.join()
    assert asker.statuses[0].state == "busy"


def test_keys_do_not_grow(store: RunStore) -> None:
    with answering(store, RankStatus(0), RankStatus(1)):
        asker = Rounds(store, 2, -1)
        for _ in range(20):
            asker.ask()
        before = store.connection.num_keys()
        for _ in range(10):
            asker.ask()
        assert store.connection.num_keys() <= before + 2


def test_a_rank_that_reads_slowly_does_not_miss_what_follows(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rounds have come and gone meanwhile."""
    monkeypatch.setattr(watch_settings, "answer_s", 0.02)
    monkeypatch.setattr(module, "_DETAILS_S", 0.02)  # Who has ended gives none.
    store.set("hello/0", json.dumps(["host", 1, "", "elsewhere", NOWHERE]))
    store.set("end/1", RankStatus(1, state="ended").dump())
    slow = Answering(store.clone(), 0, lambda: waiting(0))
    asker = Rounds(store, 2, 1)
    store.claim("asks/1", "1")
    for number in range(1, 8):
        asker._ask_round(number)  # noqa: SLF001 - nobody answers in time
    heard = []
    for number in range(7):
        store.set(f"wake/0/{number + 1}", "") if number == 6 else None
        heard.append(slow.answer(lambda: False))
    assert heard[-1].silent == [0]


def test_an_asker_that_was_taken_for_dead_skips_no_round(store: RunStore) -> None:
    store.claim("asks/1", "0")
    store.set("rounds", "1")  # By who took it for dead; then it goes on itself.
    Rounds(store, 1, 0)._ask_round(1)  # noqa: SLF001
    assert store.add("rounds", 0) == 1


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"diagnosis": "", "silent": 3, "look": {}}', b"\xff"]
)
def test_what_is_no_result_says_nothing(text: bytes) -> None:
    assert Result.load(text) == Result()
