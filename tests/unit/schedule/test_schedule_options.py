"""What the schedule does with what users choose: its options."""

from __future__ import annotations

import pytest
from schedule_lines import (
    forward,
    line,
    trained,
)

from shardkit._schedule import UnshardSchedule
from shardkit._settings import BackwardPrefetch

# --- what users choose --------------------------------------------------------------------------


def test_groups_named_by_the_user_are_gathered_instead_of_the_next_one() -> None:
    schedule = trained()
    schedule.options.next_in_forward = {0: [2, 3], 1: []}
    schedule.begin_pass()
    assert line("0", schedule.enter_forward(0)) == "0: gather 0, wait 0, prefetch 2, prefetch 3"
    assert line("1", schedule.enter_forward(1)) == "1: gather 1, wait 1"
    assert line("2", schedule.enter_forward(2)) == "2: wait 2"


def test_forward_gathers_nothing_ahead_if_told_so() -> None:
    schedule = trained()
    schedule.options.prefetch_in_forward = False
    schedule.begin_pass()
    assert line("0", schedule.enter_forward(0)) == "0: gather 0, wait 0"


@pytest.mark.parametrize(
    ("when", "entered", "left"),
    [
        (BackwardPrefetch.PRE, "wait 3, prefetch 2", "free 3"),
        (BackwardPrefetch.POST, "wait 3", "free 3, prefetch 2"),
        (BackwardPrefetch.NONE, "wait 3", "free 3"),
    ],
)
def test_when_backward_gathers_ahead(when: BackwardPrefetch, entered: str, left: str) -> None:
    schedule = trained()
    forward(schedule)
    schedule.options.prefetch_in_backward = when
    schedule.enter_backward(0)
    assert line("in", schedule.enter_backward(3)) == f"in: {entered}"
    assert line("out", schedule.exit_backward(3)) == f"out: {left}"


@pytest.mark.parametrize("when", BackwardPrefetch)
def test_what_one_rank_frees_early_changes_nothing_that_is_gathered(
    when: BackwardPrefetch,
) -> None:
    """Other ranks, where fewer gradients came, free it at the end of backward."""

    def gathered(*, is_early: bool) -> list[str]:
        schedule = trained()
        forward(schedule, [1, 2, 3, 1])
        schedule.options.prefetch_in_backward = when
        schedule.options.next_in_backward = {2: [1, 3]}
        schedule.enter_backward(0)
        schedule.enter_backward(1)
        if is_early:
            assert line("1", schedule.leave_early(1)) == "1: free 1"
        lines = []
        for group in (3, 2):
            lines.append(line("in", schedule.enter_backward(group)))
            lines.append(line("out", schedule.exit_backward(group, is_last=True)))
        lines.append(line("end", schedule.end_backward()))
        assert schedule.live == ()
        return [part.replace(", free 1", "").replace("free 1, ", "") for part in lines]

    assert gathered(is_early=True) == gathered(is_early=False)


def test_a_resting_group_stays_after_backward_and_goes_after_forward() -> None:
    schedule = trained()
    schedule.options.no_reshard_after_backward = {1}
    forward(schedule)
    for group in (0, 3, 2, 1):
        schedule.enter_backward(group)
    for group in (3, 2, 1):
        schedule.exit_backward(group)
    schedule.end_backward()
    assert schedule.live == (1,)
    assert not schedule.in_use(1)
    schedule.begin_pass()
    schedule.enter_forward(0)
    assert line("in", schedule.enter_forward(1)).startswith("in: wait 1")
    schedule.exit_forward(1, needs_backward=False)
    schedule.end_pass(needs_backward=False)
    assert 1 not in schedule.live


def test_a_resting_group_whose_shard_changed_is_gathered_again() -> None:
    schedule = trained()
    schedule.options.no_reshard_after_backward = {1}
    forward(schedule)
    for group in (3, 2, 1):
        schedule.enter_backward(group)
        schedule.exit_backward(group)
    schedule.end_backward()
    assert line("refresh", schedule.refresh(1)) == "refresh: free 1"
    schedule.begin_pass()
    assert "gather 1" in line("in", schedule.enter_forward(1))


def test_backward_does_not_gather_an_idle_group() -> None:
    schedule = trained()
    forward(schedule)
    schedule.options.no_unshard_in_backward = {2}
    schedule.enter_backward(0)
    assert line("3", schedule.enter_backward(3)) == "3: wait 3, prefetch 1"
    schedule.exit_backward(3)
    assert line("2", schedule.enter_backward(2)).find("2") == 0
    assert 2 not in schedule.live


def test_a_group_of_several_modules_stays_until_another_is_entered() -> None:
    schedule = trained()
    schedule.options.several_modules = {1}
    schedule.begin_pass()
    schedule.enter_forward(0)
    for _ in range(3):  # Its modules; other ranks may run more of them, or fewer.
        schedule.enter_forward(1)
        assert schedule.exit_forward(1, needs_backward=False) == []
        assert 1 in schedule.live
    assert "free 1" in line("2", schedule.enter_forward(2))
    schedule.exit_forward(2, needs_backward=False)
    assert "gather 1" in line("again", schedule.enter_forward(1))
    schedule.exit_forward(1, needs_backward=False)
    schedule.exit_forward(0, needs_backward=False)
    assert "free 1" in line("end", schedule.end_pass(needs_backward=False))


def test_a_group_of_several_modules_stays_while_a_group_in_it_is_entered() -> None:
    schedule = trained()
    schedule.options.several_modules = {1}
    schedule.begin_pass()
    for inner in (2, 3):
        schedule.enter_forward(1)
        schedule.enter_forward(inner)
        schedule.exit_forward(inner, needs_backward=False)
        assert 1 in schedule.live
        schedule.exit_forward(1, needs_backward=False)
        assert 1 in schedule.live


def test_each_root_remembers_what_came_next_in_its_own_passes() -> None:
    schedule = UnshardSchedule()
    for root, order in (("a", (0, 1, 2)), ("b", (2, 0))):
        schedule.begin_pass(root=root)
        for group in order:
            schedule.enter_forward(group)
            schedule.exit_forward(group, needs_backward=False)
        schedule.end_pass(needs_backward=False)
    schedule.begin_pass(root="a")
    assert "prefetch 1" in line("in", schedule.enter_forward(0))


def test_an_idle_schedule_notes_uses_and_does_nothing() -> None:
    schedule = UnshardSchedule(nbytes=[0, 0], is_idle=True)
    for _ in range(2):
        schedule.begin_pass()
        for group in (0, 1):
            assert schedule.enter_forward(group) == []
            assert schedule.in_use(group)
            assert schedule.exit_forward(group, needs_backward=True) == []
            assert not schedule.in_use(group)
        assert schedule.end_pass(needs_backward=True) == []
        for group in (1, 0):
            assert schedule.enter_backward(group) == []
            assert schedule.in_use(group)
            assert schedule.exit_backward(group) == []
        assert schedule.end_backward() == []
        assert schedule.live == ()


def test_a_list_stays_in_backward_until_all_its_modules_have_left() -> None:
    """Whatever is prefetched meanwhile: ranks that use other modules of it must gather alike."""
    schedule = UnshardSchedule()
    schedule.options.several_modules = {0}
    for _ in range(2):
        schedule.begin_pass()
        for group in (0, 1, 0):
            schedule.enter_forward(group)
            schedule.exit_forward(group, needs_backward=True)
        schedule.end_pass(needs_backward=True)
        schedule.enter_backward(0)
        assert line("first", schedule.exit_backward(0)) == "first: -"
        schedule.enter_backward(1)
        schedule.exit_backward(1)
        assert 0 in schedule.live
        schedule.enter_backward(0)
        assert line("last", schedule.exit_backward(0)) == "last: free 0"
        schedule.end_backward()
        assert schedule.live == ()


def test_an_earlier_pass_does_not_keep_a_list_in_a_later_backward() -> None:
    schedule = UnshardSchedule()
    schedule.options.several_modules = {0}
    for _ in range(2):
        schedule.begin_pass()
        schedule.enter_forward(0)
        schedule.exit_forward(0, needs_backward=True)
        schedule.end_pass(needs_backward=True)
    in_pass = schedule.current_pass
    schedule.enter_backward(0, in_pass)
    actions = schedule.exit_backward(0, in_pass, is_last=True)
    assert line("last", actions) == "last: free 0"
