"""What the schedule frees and forgets when shards change, after exceptions, and while held."""

from __future__ import annotations

import pytest
from schedule_lines import (
    LAYERS,
    backward,
    forward,
    line,
    trained,
)

from shardkit._schedule import UnshardSchedule

# --- stale shards, exceptions, create_graph -----------------------------------------------------


def test_refresh_frees_what_nothing_computes_with() -> None:
    schedule = trained(kept=[0, *LAYERS])
    forward(schedule, needs_backward=False)
    assert schedule.live == (0, 1, 2, 3)
    assert line("refresh 1", schedule.refresh(1)) == "refresh 1: free 1"
    assert line("refresh 1", schedule.refresh(1)) == "refresh 1: -"
    assert forward(schedule)[:3] == [
        "enter 0: wait 0, prefetch 1",
        "enter 1: wait 1",
        "exit 1: -",
    ]


def test_refresh_gathers_again_what_the_user_unsharded() -> None:
    schedule = UnshardSchedule()
    schedule.unshard(1)
    assert line("refresh 1", schedule.refresh(1)) == "refresh 1: free 1, gather 1"
    assert schedule.live == (1,)


def test_refresh_leaves_what_is_computed_with() -> None:
    schedule = UnshardSchedule()
    schedule.begin_pass()
    schedule.enter_forward(1)
    assert schedule.refresh(1) == []
    schedule.exit_forward(1, needs_backward=True)
    schedule.end_pass(needs_backward=True)
    schedule.enter_backward(1)
    assert schedule.refresh(1) == []
    assert schedule.live == (1,)


@pytest.mark.parametrize("kept", [(), (0,), (0, 1, 2, 3)])
def test_reset_frees_all_and_forgets_the_order(kept: tuple[int, ...]) -> None:
    """An exception in the forward of layer 2, then one in its backward.

    After it ranks may have recorded different orders, and would prefetch differently.
    """
    new = UnshardSchedule()
    new.options.no_reshard_after_forward = set(kept)
    expected = forward(new)
    schedule = trained(kept=kept)
    schedule.begin_pass()
    schedule.enter_forward(0)
    schedule.unshard(3)
    schedule.enter_forward(1)
    schedule.exit_forward(1, needs_backward=True)
    schedule.enter_forward(2)
    live = schedule.live
    assert line("reset", schedule.reset()) == "reset: " + ", ".join(f"free {g}" for g in live)
    assert {0, 2, 3} <= set(live)
    assert schedule.live == ()
    assert not any(schedule.in_use(group) for group in range(4))
    assert forward(schedule) == expected
    schedule.enter_backward(0)
    schedule.enter_backward(3)
    schedule.enter_recompute(2)
    schedule.reset()
    assert schedule.live == ()
    assert forward(schedule) == expected


def test_hold_frees_nothing_until_it_is_off() -> None:
    schedule = trained(kept=[0, *LAYERS])
    forward(schedule)
    schedule.hold(on=True)
    assert all("free" not in shown for shown in backward(schedule))
    assert schedule.live == (0, 1, 2, 3)
    schedule.hold(on=False)
    assert line("end", schedule.end_backward()) == "end: free 0, free 1, free 2, free 3"
    assert schedule.live == ()


def test_a_pass_without_backward_frees_nothing_while_held() -> None:
    schedule = trained(kept=[0, *LAYERS])
    forward(schedule)
    schedule.hold(on=True)
    backward(schedule)
    schedule.options.no_reshard_after_forward = set()
    assert all("free" not in shown for shown in forward(schedule, needs_backward=False))
    schedule.hold(on=False)
    assert forward(schedule, needs_backward=False)[-1].count("free") > 0
    assert schedule.live == ()


def test_what_may_have_an_unwatched_backward_stays_until_the_end_of_one() -> None:
    schedule = trained()
    schedule.begin_pass()
    schedule.enter_forward(0)
    for layer in LAYERS:
        schedule.enter_forward(layer)
        schedule.exit_forward(layer, needs_backward=False, is_watched=layer != 2)
    schedule.exit_forward(0, needs_backward=True)
    schedule.end_pass(needs_backward=True)
    assert set(schedule.live) == {2, 3}
    assert schedule.in_use(2)
    schedule.enter_backward(0)
    schedule.exit_backward(0)
    assert 2 in schedule.live
    assert line("end", schedule.end_backward()) in ("end: free 2, free 3", "end: free 3, free 2")


def test_an_unwatched_backward_may_come_after_another_forward() -> None:
    """Both are parts of one loss: the backward of the other one must not free the memory."""
    schedule = UnshardSchedule()
    for is_watched in (False, True):
        schedule.begin_pass()
        schedule.enter_forward(1)
        schedule.exit_forward(1, needs_backward=is_watched, is_watched=is_watched)
        schedule.end_pass(needs_backward=is_watched)
        assert schedule.live == (1,)
    schedule.enter_backward(1)
    assert not schedule.exit_backward(1, is_last=True)
    assert line("end", schedule.end_backward()) == "end: free 1"


@pytest.mark.parametrize("forget", ["end of backward", "reshard", "reset"])
def test_what_may_have_an_unwatched_backward_is_spare_after_all(forget: str) -> None:
    schedule = UnshardSchedule()
    schedule.begin_pass()
    schedule.enter_forward(1)
    schedule.exit_forward(1, needs_backward=False, is_watched=False)
    schedule.end_pass(needs_backward=False)
    assert schedule.live == (1,)
    if forget == "end of backward":
        schedule.end_backward()
    else:
        _ = schedule.reshard(1) if forget == "reshard" else schedule.reset()
    assert not schedule.in_use(1)
