"""What a process does when it is told that it waits in vain, and when its watch meets errors."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
import types
import typing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardkit import RankMismatchError, StateError, record
from shardkit._settings import watch_settings
from shardkit.backends.watch import watchdog as module
from shardkit.backends.watch.diagnosis import Diagnosis
from shardkit.backends.watch.history import Collective, CollectiveWait, InFlight
from shardkit.backends.watch.status import GroupStatus, RankStatus
from shardkit.backends.watch.watchdog import Channel, Watchdog

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

LAYER = Collective("all-gather", "layer", 64)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to end waits, in order."""
    found: list[str] = []
    monkeypatch.setattr(module, "end_if_stuck", lambda *_, **__: found.append("end if stuck"))
    monkeypatch.setattr(module, "abort_group", lambda _: found.append("abort"))
    return found


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    """One process of a run of two, with one process group; nobody answers but itself."""
    store = dist.HashStore()
    made = Watchdog(store, store, 0, 2)
    made._is_in_use = lambda: True  # type: ignore[method-assign]  # noqa: SLF001 - there is none
    channel: typing.Any = types.SimpleNamespace(
        group=None,
        in_flight=InFlight(),
        status=lambda **_: GroupStatus([0, 1], 4),
        end_waits=lambda: None,
    )
    made.channels["0"] = channel
    deadline = time.monotonic() + 30
    while made._answering is None and time.monotonic() < deadline:  # noqa: SLF001
        time.sleep(0.01)
    yield made
    made.channels.clear()
    made.close()
    made.end_threads()
    assert not any(thread.is_alive() for thread in made._threads)  # noqa: SLF001


def final(awaited: str) -> Diagnosis:
    return Diagnosis(is_final=True, text="rank 1 is gone", doomed={"0": awaited})


def enter_a_generator_that_raises() -> None:
    with record(torch.nn.Linear(2, 2), folder=Path(__file__)):
        pass


def test_the_place_of_an_error_is_a_line_of_the_user_s(watchdog: Watchdog) -> None:
    """The frame of a generator does not lead to the function that has resumed it."""
    with pytest.raises(StateError) as raised:
        enter_a_generator_that_raises()
    watchdog.note_error(raised.value)
    line = enter_a_generator_that_raises.__code__.co_firstlineno + 1
    assert f" at test_watchdog.py:{line}, `enter_a_generator_that_raises`" in str(watchdog.error)


def test_a_device_that_waits_ends_the_process_if_it_cannot_be_freed(
    watchdog: Watchdog, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread is in no collective: it asks the device for a number, or is about to."""
    monkeypatch.setattr(watch_settings, "ask_unexpected_after_s", 0.0)
    watchdog.channels["0"].in_flight.note(CollectiveWait("0", 3, LAYER), lambda: False)
    watchdog._take_up(final("0 3 issued"), watchdog._store)  # noqa: SLF001 - called by its threads
    assert calls == ["end if stuck", "abort"]
    assert watchdog.final_text == "rank 1 is gone"


@pytest.mark.parametrize("awaited", ["0 2 issued", "0 3 agreed", "1 3 issued", ""])
def test_a_text_in_the_store_ends_nothing_of_which_this_rank_knows_nothing(
    watchdog: Watchdog, calls: list[str], awaited: str
) -> None:
    """It waits for something else; somebody may have written anything."""
    with watchdog.watching(CollectiveWait("0", 3, LAYER)):
        watchdog._take_up(final(awaited), watchdog._store)  # noqa: SLF001
    watchdog._take_up(final(awaited), watchdog._store)  # noqa: SLF001
    assert calls == []
    assert watchdog.final_text is None


def test_ranks_in_collectives_of_the_user_raise_before_connections_close(
    watchdog: Watchdog, calls: list[str]
) -> None:
    """The engine's error would come first else, and say nothing of the reason."""
    diagnosis = dataclasses.replace(final("0 3 issued"), in_calls=[1])
    with watchdog.watching(CollectiveWait("0", 3, LAYER)):
        ends = threading.Thread(
            target=watchdog._take_up,  # noqa: SLF001
            args=(diagnosis, watchdog._store),  # noqa: SLF001
        )
        ends.start()
        time.sleep(0.3)
        assert calls == []
        watchdog._store.set("raised/1", "")  # noqa: SLF001
        ends.join(2.0)
    assert calls == ["end if stuck", "abort"]


def test_a_rank_that_has_left_its_collective_holds_nobody_up(
    watchdog: Watchdog, calls: list[str]
) -> None:
    diagnosis = dataclasses.replace(final("0 barrier"), in_calls=[0])
    watchdog._take_up(diagnosis, watchdog._store)  # noqa: SLF001
    assert calls == []
    assert watchdog._store.has("raised/0")  # noqa: SLF001


def test_a_wait_that_is_in_vain_raises(watchdog: Watchdog, calls: list[str]) -> None:
    engine_error = RuntimeError("Application timeout caused pair closure")

    def fail() -> None:
        with watchdog.watching(CollectiveWait("0", 3, LAYER)):
            watchdog._take_up(final("0 3 issued"), watchdog._store)  # noqa: SLF001
            raise engine_error

    with pytest.raises(RankMismatchError, match="rank 1 is gone") as raised:
        fail()
    assert raised.value.__suppress_context__, "the engine's error was ours"
    assert "pair closure" not in str(raised.value)
    assert calls == ["end if stuck", "abort"]
    with pytest.raises(RankMismatchError), watchdog.watching(CollectiveWait("0", 4, LAYER)):
        pytest.fail("nothing is begun after that")


def test_an_error_of_the_engine_is_explained(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_explain", lambda: "rank 1 has ended")
    said = "Connection closed by peer"
    with (
        pytest.raises(RankMismatchError, match="rank 1 has ended") as raised,
        watchdog.watching(CollectiveWait("0", 3, LAYER)),
    ):
        raise RuntimeError(said)
    assert str(raised.value).endswith("(The engine said: Connection closed by peer)")
    assert raised.value.__suppress_context__


def test_an_error_that_nobody_explains_stays_as_it_is(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_explain", lambda: None)
    engine_error = RuntimeError("out of memory")
    with (
        pytest.raises(RuntimeError, match="out of memory") as raised,
        watchdog.watching(CollectiveWait("0", 3, LAYER)),
    ):
        raise engine_error
    assert raised.value is engine_error


def test_a_store_with_anything_in_it_stops_no_thread(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger writes what is no result, no status, no number."""
    store = watchdog._store  # noqa: SLF001
    for number, text in enumerate(["{", '{"diagnosis": 3}', "[[[", '{"silent": {}}', "\x00"], 1):
        store.set(f"result/{number}", text)
        store.set(f"wake/0/{number}", "?")
        assert store.await_keys([f"answer/{number}/0"], 10)
    store.set("result/6", "{}")
    store.set("wake/0/6", "")
    assert store.await_keys(["answer/6/0"], 10)
    assert watchdog.final_text is None
    assert "the watch over ranks met" not in caplog.text


def test_a_thread_that_meets_an_error_says_so_and_goes_on(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.1)
    broken, whole = threading.Event(), watchdog.status

    def status(**_: bool) -> typing.Any:
        broken.set()
        msg = "no such device"
        raise ValueError(msg)

    monkeypatch.setattr(watchdog._answering, "_status", status)  # noqa: SLF001
    store = watchdog._store  # noqa: SLF001
    store.add("rounds", 1)
    store.set("wake/0/1", "")
    assert broken.wait(10)
    monkeypatch.setattr(watchdog, "status", whole)
    deadline = time.monotonic() + 10
    while not caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "rank 0: the watch over ranks met ValueError: no such device" in caplog.text
    time.sleep(0.5)
    store.add("rounds", 1)
    store.set("wake/0/2", "")
    assert store.await_keys(["answer/2/0"], 10)


def test_a_wait_is_told_of_again_when_it_is_six_times_as_long(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = Diagnosis(is_final=False, text="rank 0 waits", told_by=0)
    monkeypatch.setattr(watchdog, "_look", lambda: None)  # It asks nobody meanwhile.
    wait = CollectiveWait("0", 3, LAYER)
    with watchdog.watching(wait):
        for for_s in range(1, 300):
            wait.since = time.monotonic() - for_s
            answer(watchdog)
            watchdog._take_up(passing, watchdog._store)  # noqa: SLF001
    assert caplog.text.count("rank 0 waits") == 2  # After 10 and 60 s; next after 360.


def answer(watchdog: Watchdog) -> None:
    """Let a process answer a round that begins now."""
    assert watchdog._answering is not None  # noqa: SLF001
    watchdog._answering.answered_at = time.monotonic()  # noqa: SLF001


def test_a_round_before_a_wait_says_nothing_of_it(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that lasts may end when its ranks wait for something else, which is told later."""
    passing = Diagnosis(is_final=False, text="rank 0 waits", told_by=0)
    monkeypatch.setattr(watchdog, "_look", lambda: None)
    monkeypatch.setattr(watch_settings, "ask_after_s", 0.1)
    answer(watchdog)
    with watchdog.watching(CollectiveWait("0", 3, LAYER)):
        time.sleep(0.2)
        watchdog._take_up(passing, watchdog._store)  # noqa: SLF001
        assert not caplog.text
        answer(watchdog)
        watchdog._take_up(passing, watchdog._store)  # noqa: SLF001
        assert "rank 0 waits" in caplog.text


def test_what_a_rank_tells_is_of_one_moment(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position and collectives belong together, whoever issues meanwhile."""
    group: typing.Any = types.SimpleNamespace(group_name="0")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    channel = Channel(group, watchdog)
    monkeypatch.setattr(channel, "_agree", lambda _: None)
    watchdog.channels["0"] = channel
    is_over = threading.Event()

    def issue() -> None:
        while not is_over.is_set():
            channel.issue("all-gather", str(channel.sequence.position), 8)

    thread = threading.Thread(target=issue)
    thread.start()
    try:
        for _ in range(300):
            state = watchdog.status().groups["0"]
            first = state.position - len(state.recent)
            for position, what in enumerate(state.recent, first):
                assert what == f"all-gather of {position} (8 bytes)"
    finally:
        is_over.set()
        thread.join()


def test_a_destroyed_group_ends_the_waits_of_its_own_threads(watchdog: Watchdog) -> None:
    """A save in the background counts in while the main thread destroys the group."""
    raised: list[str] = []

    def count_in() -> None:
        try:
            watchdog.count_in("a save", 2, "")
        except RankMismatchError as error:
            raised.append(str(error))

    thread = threading.Thread(target=count_in)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    watchdog._is_in_use = lambda: False  # type: ignore[method-assign]  # noqa: SLF001
    watchdog.close("destroyed")
    thread.join(5.0)
    assert not thread.is_alive()
    assert raised == [module._LEFT]  # noqa: SLF001


def test_the_end_of_a_script_ends_no_agreement(watchdog: Watchdog) -> None:
    """A save in the background may still be going on, and is waited for."""
    counts = threading.Thread(target=watchdog.count_in, args=("a save", 2, ""))
    counts.start()
    time.sleep(0.3)
    watchdog.close("ended")
    time.sleep(0.3)
    assert counts.is_alive()
    watchdog.count_in("a save", 2, "")  # The other rank comes.
    counts.join(5.0)
    assert not counts.is_alive()


def test_time_in_which_this_process_was_stopped_is_no_silence_of_the_store(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job was stopped as a whole while a request was on its way, and went on."""
    judged: list[float] = []
    monkeypatch.setattr(watchdog, "_judge_store", judged.append)
    rounds = types.SimpleNamespace(store=types.SimpleNamespace(silent_s=100.0))
    monkeypatch.setattr(watchdog, "_rounds", rounds)
    monkeypatch.setattr(watchdog, "_awake_since", time.monotonic() - 200, raising=False)
    monkeypatch.setattr(watchdog, "_looked_at", time.monotonic() - 100, raising=False)
    monkeypatch.setattr(watchdog, "_asker", threading.current_thread())
    watchdog._look()  # noqa: SLF001 - its clock does so
    assert judged
    assert max(judged) < 50


def test_threads_that_count_in_do_not_wait_behind_each_other() -> None:
    """As one that saves and the main one: on the other rank they come in the other order."""
    server: typing.Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    ranks = [Watchdog(server, server.clone(), rank, 2) for rank in range(2)]
    for rank in ranks:
        rank._is_in_use = lambda: True  # type: ignore[method-assign]  # noqa: SLF001
    ranks[1]._store = ranks[0]._store.clone()  # noqa: SLF001 - ranks of one run
    threads = []
    try:
        for rank, keys in zip(ranks, [("main", "save"), ("save", "main")], strict=True):
            for key in keys:
                count_in = functools.partial(rank.count_in, key, 2, "")
                threads.append(threading.Thread(target=count_in, daemon=True))
                threads[-1].start()
                time.sleep(0.1)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    finally:
        for rank in ranks:
            rank.close()
            rank.end_threads()


@pytest.mark.parametrize(
    ("written", "has_raised", "waits"),
    [
        pytest.param([], False, False, id="it has no mesh, and may never have one"),
        pytest.param([], True, True, id="it may yet ask why this rank has raised"),
        pytest.param(["hello/1"], False, True, id="it goes on"),
        pytest.param(["hello/1", "end/1"], False, False, id="it has ended"),
    ],
)
def test_rank_0_waits_for_the_ends_of_ranks_that_may_need_its_store(
    watchdog: Watchdog,
    monkeypatch: pytest.MonkeyPatch,
    written: list[str],
    *,
    has_raised: bool,
    waits: bool,
) -> None:
    for key in written:
        watchdog._store.set(key, "")  # noqa: SLF001
    watchdog.has_raised = has_raised
    monkeypatch.setattr(watch_settings, "silent_after_s", 1.0)
    begun = time.monotonic()
    watchdog.linger()
    assert (time.monotonic() - begun >= 1.0) == waits


def test_threads_of_engines_may_free_their_last_works_before_python_ends(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_current", watchdog)
    monkeypatch.setattr(module, "_LAST_WORKS_S", 0.5)  # For machines that are busy.
    watchdog._store.set("end/1", "")  # noqa: SLF001 - the other rank has ended
    seen, ended = [0], threading.Event()

    def run() -> None:
        """Need Python again and again, as such threads do."""
        while not ended.is_set():
            time.sleep(0.001)
            seen[0] += not any(thread.is_alive() for thread in watchdog._threads)  # noqa: SLF001

    other = threading.Thread(target=run)
    other.start()
    module._say_goodbye(os.getpid())  # noqa: SLF001 - what `atexit` calls
    ended.set()
    other.join()
    assert seen[0] >= 10


def test_an_exception_that_another_hook_shows_is_told_to_the_others(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts may set `sys.excepthook` later, as packages that colour tracebacks do."""
    monkeypatch.setattr(module, "_current", watchdog)
    monkeypatch.setattr(sys, "last_value", ValueError("of the user"), raising=False)
    monkeypatch.setattr(watch_settings, "silent_after_s", 0.1)
    module._say_goodbye(os.getpid())  # noqa: SLF001 - what `atexit` calls
    told = RankStatus.load(watchdog._store.get("end/0"))  # noqa: SLF001
    assert (told.state, told.error) == ("raised", "ValueError: of the user")
