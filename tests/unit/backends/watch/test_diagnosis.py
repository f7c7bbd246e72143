"""What follows from what ranks tell: who waits for whom, and whether it can ever end."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest

from shardkit.backends.watch.diagnosis import Diagnosis, diagnose, explain_error
from shardkit.backends.watch.status import (
    CallStatus,
    CodePlace,
    GroupStatus,
    RankStatus,
    WaitStatus,
    from_text,
    to_text,
)

HERE = CodePlace("train.py", 41, "train", "forward")
ELSEWHERE = CodePlace("train.py", 57, "evaluate")
IN_BARRIER = CodePlace("t.py", 9, "f", "barrier")


def group(done: str, wish: str | None = None, ranks: int = 2) -> GroupStatus:
    """Return the status of a process group on which collectives, named by letters, were issued."""
    return GroupStatus(range(ranks), len(done), wish, recent=[*done])


def rank(
    number: int,
    done: str,
    wish: str | None = None,
    *,
    waits: float | None = 5.0,
    is_main: bool = True,
    **fields: typing.Any,
) -> RankStatus:
    """Return the status of a rank that waits for the last collective, or for its wish."""
    state = group(done, wish, fields.pop("ranks", 2))
    wait = None
    if waits is not None:
        position = len(done) - (wish is None)
        what = wish or done[-1]
        wait = WaitStatus("0", position, what, waits, is_main, is_issued=wish is None)
    fields.setdefault("place", HERE if wait else ELSEWHERE)
    return RankStatus(
        number, "host", 100 + number, step=3, groups={"0": state}, wait=wait, **fields
    )


def in_call(number: int, name: str, done: str, ranks: int = 2, **fields: typing.Any) -> RankStatus:
    """Return the status of a rank that is in a collective of the user's, on the whole world."""
    call = CallStatus(name, "world", range(ranks), 1, 12.0)
    fields.setdefault("place", IN_BARRIER)
    return rank(number, done, waits=None, call=call, ranks=ranks, **fields)


def look(*statuses: RankStatus, suspicion: str = "", silent_after_s: float = 60) -> Diagnosis:
    found = diagnose(statuses, silent_after_s=silent_after_s, suspicion=suspicion)
    assert found is not None
    return found


def final(*statuses: RankStatus, rounds: int = 1) -> Diagnosis:
    """Return the diagnosis that ends the run in this round, and in none before it."""
    found = look(*statuses)
    for _ in range(rounds - 1):
        assert not found.is_final
        assert found.suspicion
        found = look(*statuses, suspicion=found.suspicion)
    assert found.is_final, found.text
    return found


def passing(*statuses: RankStatus, **options: typing.Any) -> str:
    """Return the text of a diagnosis that ends nothing, however often it is made."""
    found = look(*statuses, **options)
    again = look(*statuses, **{**options, "suspicion": found.suspicion})
    assert not found.is_final, found.text
    assert not again.is_final, again.text
    return found.text


def test_nobody_waits() -> None:
    nobody = [rank(0, "abc", waits=None), rank(1, "ab", waits=None)]
    assert diagnose(nobody, silent_after_s=60) is None


# --- ranks that part ------------------------------------------------------------------------------


def test_two_collectives_at_one_position_are_named_with_their_lines() -> None:
    found = final(rank(0, "abc"), rank(1, "ab", "x", place=ELSEWHERE))
    assert "Of the collectives of ranks 0, 1, number 3 is" in found.text
    assert "rank 0: c, step 3, at train.py:41, `train`, in forward" in found.text
    assert "rank 1: x, step 3, at train.py:57, `evaluate`" in found.text
    assert found.doomed == {"0": "0 2 issued", "1": "0 2 agreed"}
    assert "norms, full_tensor, saving and loading" in found.text  # Not only modules part ranks.
    assert "not under `if rank == 0`" in found.text


def test_ranks_that_part_are_grouped() -> None:
    statuses = [rank(i, "abc", ranks=4) for i in range(3)] + [rank(3, "ab", "x", ranks=4)]
    assert "ranks 0, 1, 2: c" in final(*statuses).text


def test_time_is_no_part_of_the_proof() -> None:
    final(rank(0, "abc", waits=0.1), rank(1, "ab", "x", waits=0.1))


def test_who_ran_ahead_may_still_be_asked_for_details() -> None:
    """Without them it is known who parted, but not what they issued."""
    ahead = rank(0, "abcd", waits=None)
    short = dataclasses.replace(ahead, groups={"0": GroupStatus(range(2), 4)})
    asking = rank(1, "ab", "x")
    asking.groups["0"].recent = []
    assert look(short, asking).details_of == [0]
    assert "rank 0: c" in final(ahead, asking).text


def test_who_is_about_to_go_on_has_not_parted() -> None:
    """Rank 1 has agreed to its collective, and has not noticed yet."""
    passing(rank(0, "abx"), rank(1, "ab", "x"))
    passing(rank(0, "abxy"), rank(1, "ab", "x"))


def test_the_same_wish_contradicts_nothing() -> None:
    assert "All ranks have issued it" in passing(rank(0, "ab", "x"), rank(1, "ab", "x"))


# --- ranks that come later ------------------------------------------------------------------------


def test_a_rank_that_computes_is_waited_for_and_told_of() -> None:
    text = passing(rank(0, "abc"), rank(1, "ab", waits=None))
    assert "rank 1 is at train.py:57, `evaluate`, in step 3" in text
    assert "rank 0 waited 5 s for c, step 3, at train.py:41" in text
    assert text.endswith("The run goes on.")


def test_an_error_that_was_caught_is_told() -> None:
    text = passing(rank(0, "abc"), rank(1, "ab", waits=None, error="ValueError: bad batch"))
    assert "before that it met ValueError: bad batch" in text


@pytest.mark.parametrize(
    ("state", "silent_s"), [("busy", 600.0), ("silent", 59.0), ("unborn", 600.0), ("stopped", 9e9)]
)
def test_who_may_come_is_waited_for(state: str, silent_s: float) -> None:
    passing(rank(0, "abc"), rank(1, "ab", waits=None, state=state, silent_s=silent_s))


def test_silence_may_be_told_never_to_count() -> None:
    silent = rank(1, "ab", waits=None, state="silent", silent_s=1e6)
    passing(rank(0, "abc"), silent, silent_after_s=math.inf)


def test_who_is_lost_and_not_waited_for_ends_nothing() -> None:
    """It had issued all that the others wait for: what it sent may still come."""
    passing(rank(0, "abc"), rank(1, "abc", waits=None, state="ended"))


def test_a_rank_that_computes_elsewhere_may_free_the_others() -> None:
    """Rank 0 waits for 1, which waits for 2 in another group, which computes."""
    one, other = rank(0, "abc", ranks=3), rank(1, "ab", ranks=3)
    other.groups["r"] = GroupStatus([1, 2], 1, recent=["r"])
    other.wait = WaitStatus("r", 0, "r", 40.0)
    late = RankStatus(2, place=ELSEWHERE, groups={"0": group("abc", ranks=3)})
    text = passing(one, other, late)
    assert "rank 2 is at train.py:57" in text
    assert "rank 1 waits" not in text, "it comes when rank 2 has come"


def test_a_thread_beside_the_main_one_may_issue_what_is_awaited() -> None:
    """As one that saves: its process group is used by no other thread."""
    saving = rank(1, "ab", ranks=2)
    saving.groups["r"] = GroupStatus([0, 1], 3, is_main=False)
    saving.wait = WaitStatus("x", 0, "x", 9.0)
    saving.groups["x"] = GroupStatus([0, 1], 1)
    waiting = rank(0, "ab", waits=None)
    waiting.groups["r"] = GroupStatus([0, 1], 4, is_main=False)
    waiting.wait = WaitStatus("r", 3, "saving", 9.0)
    passing(waiting, saving)
    saving.groups["r"].is_main = True
    final(waiting, saving)


def test_a_thread_beside_the_main_one_does_not_hold_a_rank_up() -> None:
    passing(rank(0, "abc"), rank(1, "ab", is_main=False))


# --- ranks that never come ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "fields", "said"),
    [
        ("gone", {}, "rank 1 is gone: process 101 on host does not exist"),
        ("ended", {}, "rank 1 has ended: its script is through, after step 3"),
        ("raised", {"error": "KeyError: 'x' at data.py:3"}, "has ended by KeyError: 'x' at data"),
        ("destroyed", {}, "rank 1 has destroyed its process group after step 3"),
        ("silent", {"silent_s": 61.0}, "rank 1 has not answered for 61 s"),
    ],
)
def test_who_is_lost_does_not_come(state: str, fields: dict[str, typing.Any], said: str) -> None:
    found = final(rank(0, "abc"), rank(1, "ab", waits=None, state=state, **fields))
    assert said in found.text
    assert found.doomed == {"0": "0 2 issued"}


def test_a_thread_that_waits_for_who_is_lost_is_told() -> None:
    final(rank(0, "abc", is_main=False), rank(1, "ab", waits=None, state="ended"))


def test_two_groups_that_wait_crosswise() -> None:
    one, other = rank(0, "abc"), rank(1, "ab")
    other.groups["r"] = GroupStatus([0, 1], 3, recent=[*"rst"])
    one.groups["r"] = GroupStatus([0, 1], 2, recent=[*"rs"])
    other.wait = WaitStatus("r", 2, "t", 4.0)
    assert "rank 1 waits for t itself" in final(one, other).text


def test_who_waits_crosswise_is_named_before_who_does_not_answer() -> None:
    """A busy rank may still come, so it is no reason to end the run."""
    statuses = [
        dataclasses.replace(
            rank(number, "ab", waits=None),
            groups={name: group("ab", ranks=3) for name in ("0", "1")},
            wait=WaitStatus(own, 2, f"{own} of {number}", 5.0, True, is_issued=True),
        )
        for number, own in enumerate(("0", "1"))
    ]
    text = final(*statuses, rank(2, "ab", waits=None, state="busy")).text
    assert "rank 0 waits for 0 of 0 itself" in text
    assert "rank 1 waits for 1 of 1 itself" in text
    assert "does not answer" not in text


def test_who_is_lost_is_named_before_its_victims() -> None:
    statuses = [rank(0, "abc", ranks=3), rank(1, "ab", ranks=3)]
    statuses.append(rank(2, "ab", waits=None, state="gone", ranks=3))
    text = final(*statuses).text
    assert "rank 2 is gone" in text
    assert "rank 1 waits" not in text


def test_what_a_rank_was_told_is_passed_on_to_who_waits_for_it() -> None:
    found = final(rank(0, "abc"), rank(1, "abc", gave_up="ranks parted", waits=None))
    assert found.text == "ranks parted"
    elsewhere = rank(0, "abc", ranks=1)
    passing(elsewhere, rank(1, "abc", gave_up="ranks parted", waits=None))


# --- collectives of the user's --------------------------------------------------------------------


def test_a_barrier_against_a_collective_is_looked_at_twice() -> None:
    found = final(rank(0, "abc"), in_call(1, "barrier", "ab"), rounds=2)
    assert "rank 1 is at t.py:9, `f`, in barrier" in found.text
    assert found.doomed == {"0": "0 2 issued", "1": "world barrier"}


def test_another_barrier_is_not_the_same() -> None:
    seen = look(rank(0, "abc"), in_call(1, "barrier", "ab"))
    other = in_call(1, "barrier", "ab")
    assert other.call is not None
    other.call.number = 2
    assert not look(rank(0, "abc"), other, suspicion=seen.suspicion).is_final


@pytest.mark.parametrize("name", ["broadcast", "all_reduce", "send", "gather_object"])
def test_data_may_be_on_their_way_for_long(name: str) -> None:
    """The other rank may have started it, and gone on."""
    passing(rank(0, "abc"), in_call(1, name, "ab"))


def test_ranks_that_save_may_be_in_different_collectives() -> None:
    """One scatters what the other gathers; the third writes its files."""
    writing = rank(2, "ab", waits=None, ranks=3)
    passing(
        in_call(0, "gather_object", "ab", 3), in_call(1, "scatter_object_list", "ab", 3), writing
    )


def test_loops_of_the_users_collectives_may_be_seen_crosswise() -> None:
    """All ranks take a barrier and an exchange in turns; each is seen in another one, twice."""
    one, other = in_call(0, "barrier", "ab", 3), in_call(1, "gather_object", "ab", 3)
    assert one.call is not None
    assert other.call is not None
    one.call.ranks = other.call.ranks = [0, 1]
    other.call.group = "another"
    passing(one, other, rank(2, "abc", ranks=3))


def test_a_barrier_waits_for_who_computes() -> None:
    text = passing(in_call(0, "barrier", "ab"), rank(1, "ab", waits=None))
    assert "rank 0 waited 12 s for its barrier" in text
    assert "rank 1 is at train.py:57" in text


def test_a_barrier_waits_in_vain_for_who_has_ended() -> None:
    final(in_call(0, "barrier", "ab"), rank(1, "ab", waits=None, state="ended"), rounds=2)


# --- waits that ended in an error -----------------------------------------------------------------


def test_an_error_is_explained_by_who_is_lost_though_it_had_issued_all() -> None:
    text = explain_error([rank(0, "abc"), rank(1, "abc", waits=None, state="gone")], 0, 60)
    assert text is not None
    assert "rank 0 waited 5 s for c" in text
    assert "rank 1 is gone" in text


def test_an_error_of_a_rank_that_waits_no_longer_is_explained_in_whole_sentences() -> None:
    statuses = [rank(0, "abc", waits=None), rank(1, "abc", waits=None, state="gone")]
    text = explain_error(statuses, 0, 60)
    assert text is not None
    assert text.startswith("a collective of rank 0 has ended in an error, and these ranks are lost")


def test_an_error_of_its_own_is_not_explained() -> None:
    assert explain_error([rank(0, "abc"), rank(1, "abc")], 0, 60) is None


# --- what travels ---------------------------------------------------------------------------------


def test_a_status_survives_the_way() -> None:
    status = rank(1, "abc", "x", error="E", stack="line\n", ranks=4)
    assert RankStatus.load(status.dump()) == status
    assert RankStatus.load(RankStatus(3).dump()) == RankStatus(3)
    short = RankStatus.load(status.dump(details=False))
    assert short.groups["0"] == GroupStatus(range(4), 3, "x")
    assert short.stack == ""


def test_members_take_little_room() -> None:
    whole = rank(0, "a")
    whole.groups["0"].ranks = range(3, 40_000, 8)
    assert len(whole.dump()) < 500
    assert list(RankStatus.load(whole.dump()).groups["0"].ranks) == list(range(3, 40_000, 8))
    whole.groups["0"].ranks = [5, 2, 9]
    assert list(RankStatus.load(whole.dump()).groups["0"].ranks) == [5, 2, 9]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"rank": "0"}',
        '{"rank": 0, "state": "king"}',
        '{"rank": 0, "groups": []}',
        '{"rank": 0, "groups": {"0": {"ranks": ["range"], "position": 3}}}',
        '{"rank": 0, "groups": {"0": {"ranks": [0], "position": "3"}}}',
        '{"rank": 0, "wait": {"group": "0"}}',
        '{"rank": 0, "wait": 3}',
        '{"rank": 0, "gave_up": 3}',
        '{"rank": 0, "engine": "text"}',
        '{"rank": 0, "more": 3}',
        '{"rank": true}',
        "[" * 100_000,
        " " * 2_000_000,
    ],
)
def test_what_is_no_status_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        RankStatus.load(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"is_final": 1}', '{"text": 3}', "[" * 9999])
def test_what_is_no_diagnosis_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        from_text(Diagnosis, text)


def test_a_diagnosis_survives_the_way() -> None:
    found = final(rank(0, "abc"), rank(1, "ab", "x"))
    assert from_text(Diagnosis, to_text(found)) == found
