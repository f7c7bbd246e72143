"""A round of questions over a store: who asks, who answers, and what is known of who does not."""

from __future__ import annotations

import json
import os
import threading
import typing

import pytest
import torch.distributed as dist

from shardkit.backends.watch import rounds
from shardkit.backends.watch.answer import Answer, ChannelState, WaitState
from shardkit.backends.watch.machine import machine_id
from shardkit.backends.watch.rounds import Rounds, read_verdict

if typing.TYPE_CHECKING:
    from shardkit.backends.watch.verdict import Verdict


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    monkeypatch.setattr(rounds, "_ANSWER_S", 0.2)
    return dist.HashStore()


def answer_once(store: typing.Any, answer: Answer) -> threading.Thread:
    """Answer the next round, as a station does."""

    def run() -> None:
        store.wait([f"wake/{answer.rank}"])
        store.set(f"answer/{answer.rank}/{int(store.add('rounds', 0))}", answer.dump())

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_all_answer_and_nobody_waits(store: dist.HashStore) -> None:
    threads = [answer_once(store, Answer(rank)) for rank in range(2)]
    asker = Rounds(store, 2, -1)
    assert asker.ask() is None
    assert [answer.state for answer in asker.answers] == ["runs", "runs"]
    assert read_verdict(store, 1) is None
    for thread in threads:
        thread.join()


def test_others_read_the_verdict_of_who_asked(store: dist.HashStore) -> None:
    state = ChannelState([0, 1], 1, [(0, "a")])
    wait = WaitState("0", 0, "a", 3.0)
    ended = Answer(1, state="ended")
    store.set("end/1", ended.dump())
    thread = answer_once(store, Answer(0, channels={"0": state}, waits=wait))
    verdict = Rounds(store, 2, 0).ask()
    thread.join()
    assert verdict is not None
    assert verdict.is_final
    assert "rank 1 has ended" in verdict.text
    assert read_verdict(store, 1) == verdict


def test_who_comes_second_reads_what_the_first_found(store: dist.HashStore) -> None:
    store.compare_set("asks/1", "", "0")
    store.set(
        "verdict/1", json.dumps({"is_final": False, "text": "later", "wait": "", "told_by": 0})
    )
    verdict = Rounds(store, 2, 1).ask()
    assert verdict is not None
    assert verdict.text == "later"


def test_a_round_under_way_is_waited_for(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who answers one round does not hear of another."""
    store.add("rounds", 1)

    def read(store: typing.Any, number: int) -> Verdict | None:
        found = {"is_final": True, "text": "the first", "wait": ""}
        store.set(f"verdict/{number}", json.dumps(found))  # Now it comes.
        return read_verdict(store, number)

    monkeypatch.setattr(rounds, "read_verdict", read)
    verdict = Rounds(store, 2, 1).ask()
    assert verdict is not None
    assert verdict.text == "the first"
    assert int(store.add("rounds", 0)) == 1


def test_where_the_asker_died_the_next_round_can_begin(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "VERDICT_S", rounds.timedelta(milliseconds=50))
    store.compare_set("asks/1", "", "0")
    assert Rounds(store, 2, 1).ask() is None
    assert int(store.add("rounds", 0)) == 1


@pytest.mark.parametrize("known", ["gone", "busy", "silent", "unborn"])
def test_what_is_known_of_who_does_not_answer(store: dist.HashStore, known: str) -> None:
    if known != "unborn":
        machine = "elsewhere" if known == "silent" else machine_id()
        pid = 2**22 + 1 if known == "gone" else os.getpid()
        store.set("hello/0", json.dumps(["host", pid, machine]))
    asker = Rounds(store, 1, -1)
    asker.ask()
    assert asker.answers[0].state == known


def test_old_rounds_are_deleted(store: dist.HashStore) -> None:
    for _ in range(20):
        thread = answer_once(store, Answer(0))
        Rounds(store, 1, -1).ask()
        thread.join()
        store.delete_key("wake/0")
    assert store.num_keys() <= 8
