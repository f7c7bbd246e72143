"""What follows from the answers of all ranks: who waits for whom, and whether it can end."""

from __future__ import annotations

import typing

import pytest

from shardkit.backends.watch.answer import Answer, ChannelState, WaitState
from shardkit.backends.watch.place import Place
from shardkit.backends.watch.verdict import judge

HERE = Place("train.py", 41, "train", "forward", waits=True)
ELSEWHERE = Place("train.py", 57, "evaluate")


def channel(done: str, wish: str | None = None, ranks: int = 2) -> ChannelState:
    """Return the state of a process group on which collectives, named by letters, were issued."""
    return ChannelState([*range(ranks)], len(done), [*enumerate(done)], wish)


def rank(
    number: int,
    done: str,
    wish: str | None = None,
    *,
    waits: float | None = 5.0,
    **fields: typing.Any,
) -> Answer:
    """Return the answer of a rank that waits for the last collective, or for its wish."""
    state = channel(done, wish, fields.pop("ranks", 2))
    wait = None
    if waits is not None:
        position = len(done) - (wish is None)
        wait = WaitState("0", position, wish or done[-1], waits)
    fields.setdefault("place", HERE if wait else ELSEWHERE)
    return Answer(number, "host", 100 + number, step=3, channels={"0": state}, waits=wait, **fields)


def final(*answers: Answer) -> str:
    """Return the text of a verdict that ends the wait."""
    verdict = judge(answers, 2.0)
    assert verdict is not None
    assert verdict.is_final
    return verdict.text


def passing(*answers: Answer) -> str:
    """Return the text of a verdict that does not end the wait."""
    verdict = judge(answers, 2.0)
    assert verdict is not None
    assert not verdict.is_final
    return verdict.text


def test_nobody_waits() -> None:
    assert judge([rank(0, "abc", waits=None), rank(1, "ab", waits=None)], 2.0) is None


def test_two_collectives_at_one_position_are_named_with_their_lines() -> None:
    text = final(rank(0, "abc"), rank(1, "ab", "x", place=ELSEWHERE))
    assert "Of the collectives of ranks 0, 1, number 3 is" in text
    assert "rank 0: c, step 3, at train.py:41, `train`, in forward" in text
    assert "rank 1: x, step 3, at train.py:57, `evaluate`" in text


def test_ranks_that_part_are_grouped() -> None:
    answers = [rank(i, "abc", ranks=4) for i in range(3)] + [rank(3, "ab", "x", ranks=4)]
    assert "ranks 0, 1, 2: c" in final(*answers)


def test_a_difference_in_the_past_is_found_first() -> None:
    """A host that does not wait for its device runs ahead."""
    assert "number 2 is" in final(rank(0, "abcd"), rank(1, "axyz"))


def test_what_lies_too_far_back_is_not_compared() -> None:
    old = rank(0, "abcd")
    old.channels["0"].recent = [(3, "d")]
    assert "All ranks have issued it" in passing(old, rank(1, "zbcd"))


def test_the_same_wish_contradicts_nothing() -> None:
    assert "All ranks have issued it" in passing(rank(0, "ab", "x"), rank(1, "ab", "x"))


def test_a_rank_that_computes_is_waited_for_and_told_of() -> None:
    text = passing(rank(0, "abc"), rank(1, "ab", waits=None))
    assert "rank 1 is at train.py:57, `evaluate`, after b of step 3" in text
    assert "rank 0 waited 5 s, rank 0 for c, step 3, at train.py:41" in text


def test_an_error_that_was_caught_is_told() -> None:
    text = passing(rank(0, "abc"), rank(1, "ab", waits=None, error="ValueError: bad batch"))
    assert "before that it met ValueError: bad batch" in text


@pytest.mark.parametrize(
    ("state", "fields", "said"),
    [
        ("gone", {}, "rank 1 is gone: process 101 on host does not exist"),
        ("stopped", {}, "rank 1 is stopped (SIGSTOP"),
        ("ended", {}, "rank 1 has ended: its script is through, after step 3"),
        ("raised", {"error": "KeyError: 'x' at data.py:3"}, "has ended by KeyError: 'x' at data"),
        ("destroyed", {}, "rank 1 has destroyed its process group after step 3"),
        ("silent", {"silent_s": 12.0}, "rank 1 has not answered for 12 s"),
    ],
)
def test_who_is_lost_does_not_come(state: str, fields: dict[str, typing.Any], said: str) -> None:
    text = final(rank(0, "abc"), rank(1, "ab", waits=None, state=state, **fields))
    assert said in text


@pytest.mark.parametrize(("state", "silent_s"), [("busy", 60.0), ("silent", 2.0), ("unborn", 9.0)])
def test_who_may_come_is_waited_for(state: str, silent_s: float) -> None:
    passing(rank(0, "abc"), rank(1, "ab", waits=None, state=state, silent_s=silent_s))


def test_who_is_lost_and_not_waited_for_ends_nothing() -> None:
    """It had issued all that the others wait for: what it sent may still come."""
    passing(rank(0, "abc"), rank(1, "abc", waits=None, state="ended"))


def test_ranks_that_wait_for_each_other_never_end() -> None:
    """One in a collective of the library, one in a barrier of its own."""
    text = final(
        rank(0, "abc"),
        rank(
            1, "ab", waits=None, is_still=True, place=Place("t.py", 9, "f", "barrier", waits=True)
        ),
    )
    assert "rank 1 is at t.py:9, `f`, in barrier" in text


def test_a_rank_that_computes_elsewhere_may_free_the_others() -> None:
    """Ranks 0 and 1 wait for each other's; rank 2, on which rank 1 may depend, computes."""
    answers = [rank(0, "abc"), rank(1, "ab", waits=None, is_still=True)]
    answers.append(Answer(2, place=ELSEWHERE))
    passing(*answers)


def test_two_groups_that_wait_crosswise() -> None:
    one, other = rank(0, "abc"), rank(1, "ab")
    other.channels["r"] = ChannelState([0, 1], 3, [*enumerate("rst")])
    one.channels["r"] = ChannelState([0, 1], 2, [*enumerate("rs")])
    other.waits = WaitState("r", 2, "t", 4.0)
    text = final(one, other)
    assert "rank 1 waits for t itself" in text


def test_a_short_wait_is_no_deadlock() -> None:
    passing(rank(0, "abc", waits=0.5), rank(1, "ab", waits=None, is_still=True))


def test_who_is_lost_is_named_before_its_victims() -> None:
    answers = [rank(0, "abc", ranks=3), rank(1, "ab", ranks=3)]
    answers.append(rank(2, "ab", waits=None, state="gone", ranks=3))
    text = final(*answers)
    assert "rank 2 is gone" in text
    assert "rank 1 waits" not in text


def test_a_verdict_is_passed_on() -> None:
    assert final(rank(0, "abc"), rank(1, "abc", verdict="ranks parted")) == "ranks parted"


def test_an_answer_survives_the_way() -> None:
    answer = rank(1, "abc", "x", error="E", stack="line\n")
    assert Answer.load(answer.dump()) == answer
    assert Answer.load(Answer(3).dump()) == Answer(3)
