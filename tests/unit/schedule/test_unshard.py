"""The schedule as lists: for every event, the actions it leads to.

ParamGroup 0 is the root, 1 to 3 its layers. A line is ``event: actions``, ``-`` for none.
"""

from __future__ import annotations

import typing

from schedule_lines import (
    BACKWARD,
    FIRST_FORWARD,
    FORWARD,
    LAYERS,
    backward,
    forward,
    line,
    trained,
)

from shardkit._schedule import BATCH_NBYTES, UnshardSchedule

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


# --- steps --------------------------------------------------------------------------------------


def test_the_first_pass_gathers_each_group_as_it_comes() -> None:
    """What comes next is not known; the last layer stays for backward, which needs it first."""
    schedule = UnshardSchedule()
    assert forward(schedule) == FIRST_FORWARD
    assert schedule.live == (3,)


def test_backward_prefetches_from_the_first_step_on() -> None:
    schedule = UnshardSchedule()
    forward(schedule)
    assert backward(schedule) == BACKWARD
    assert schedule.live == ()


def test_the_second_pass_prefetches_in_the_order_of_the_first() -> None:
    schedule = trained()
    for _ in range(3):
        assert forward(schedule) == FORWARD
        assert backward(schedule) == BACKWARD
        assert schedule.live == ()


def test_a_kept_root_stays_from_forward_to_backward() -> None:
    """As with ``reshard_after_forward=None``."""
    schedule = trained(kept=[0])
    assert forward(schedule) == [*FORWARD[:-2], "exit 0: -", "end: -"]
    assert schedule.live == (0, 3)
    assert backward(schedule) == ["enter 0: wait 0", *BACKWARD[1:]]
    assert schedule.live == ()


def test_kept_layers_are_gathered_once_a_step() -> None:
    """As with ``reshard_after_forward=False`` everywhere."""
    schedule = trained(kept=[0, *LAYERS])
    assert forward(schedule) == [
        "enter 0: gather 0, wait 0, prefetch 1",
        "enter 1: wait 1, prefetch 2",
        "exit 1: -",
        "enter 2: wait 2, prefetch 3",
        "exit 2: -",
        "enter 3: wait 3",
        "exit 3: -",
        "exit 0: -",
        "end: -",
    ]
    assert schedule.live == (0, 1, 2, 3)
    assert backward(schedule) == [
        "enter 0: wait 0",
        "enter 3: wait 3",
        "exit 3: free 3",
        "enter 2: wait 2",
        "exit 2: free 2",
        "enter 1: wait 1",
        "exit 1: free 1",
        "exit 0: free 0",
        "end: -",
    ]


def test_a_pass_without_backward_ends_with_nothing_live() -> None:
    schedule = trained()
    assert forward(schedule, needs_backward=False) == [*FORWARD[:-1], "end: free 3"]
    assert schedule.live == ()


def test_a_pass_whose_forwards_await_no_backward_ends_with_nothing_live() -> None:
    """As in `functional_call`: what comes out wants gradients, of other values than these."""
    schedule = trained()
    schedule.begin_pass(has_changed=False)
    schedule.enter_forward(3)
    schedule.exit_forward(3, needs_backward=False)
    schedule.end_pass(needs_backward=True)
    assert schedule.live == ()


def test_a_kept_root_stays_live_after_a_pass_without_backward() -> None:
    """The next pass, if nothing was changed, then need not gather it."""
    schedule = trained(kept=[0])
    assert forward(schedule, needs_backward=False)[-2:] == ["exit 0: -", "end: free 3"]
    assert schedule.live == (0,)
    assert forward(schedule)[0] == "enter 0: wait 0, prefetch 1"


def test_the_pass_after_one_without_backward_is_a_usual_one() -> None:
    schedule = trained()
    forward(schedule, needs_backward=False)
    assert forward(schedule) == FORWARD
    assert backward(schedule) == BACKWARD


def test_two_passes_before_their_backwards() -> None:
    """Backward of the second comes first; then the first's, whose groups are all to be gathered."""
    schedule = trained()
    assert forward(schedule) == FORWARD
    taken_back = "enter 0: gather 0, wait 0, free 3, prefetch 1"
    assert forward(schedule) == [taken_back, *FORWARD[1:]]
    assert backward(schedule) == BACKWARD
    assert backward(schedule) == ["enter 0: gather 0, wait 0, prefetch 3", *BACKWARD[1:]]
    assert schedule.live == ()


def test_a_pass_over_changed_shards_forgets_forwards_that_had_no_backward() -> None:
    schedule = trained()
    forward(schedule)
    forward(schedule, [1], has_changed=True)
    assert line("enter 1", schedule.enter_backward(1)) == "enter 1: gather 1, wait 1"


def test_a_forward_that_had_no_backward_counts_until_shards_change() -> None:
    """Whether its graph is still there only one rank may know."""
    schedule = trained()
    forward(schedule)
    forward(schedule)
    backward(schedule)
    assert schedule.awaits_backward(3)
    schedule.begin_pass(has_changed=True)
    assert not schedule.awaits_backward(3)


def test_a_backward_goes_back_through_the_pass_of_its_forwards() -> None:
    """Pipelines go backward through the first of several passes first."""
    schedule = trained()
    forward(schedule, [1, 2, 3])
    first = schedule.current_pass
    forward(schedule, [2, 1, 3])
    shown = line("enter 3", schedule.enter_backward(3, first))
    assert shown == "enter 3: wait 3, prefetch 2"
    schedule.exit_backward(3, first)
    schedule.end_backward()
    assert not list(schedule._pending.before(3, first)), "the first pass is over"  # noqa: SLF001
    shown = line("enter 3", schedule.enter_backward(3, schedule.current_pass))
    assert shown == "enter 3: gather 3, wait 3, prefetch 1"


def test_a_group_that_this_rank_went_around_is_over_with_its_pass() -> None:
    """Other ranks' backwards came to it, and ranks must go on alike."""
    schedule = trained()
    forward(schedule)
    for group in (0, 3, 1):
        schedule.enter_backward(group, schedule.current_pass)
        schedule.exit_backward(group, schedule.current_pass, is_last=True)
    schedule.end_backward()
    assert not schedule.awaits_backward(2)
    forward(schedule)
    assert backward(schedule) == BACKWARD


def test_the_end_frees_what_backward_did_not_leave() -> None:
    """The root, when not all its parameters were used."""
    schedule = trained()
    forward(schedule)
    schedule.enter_backward(0)
    schedule.enter_backward(3)
    assert line("end", schedule.end_backward()) == "end: free 3, free 0, free 2"
    assert schedule.live == ()


# --- small groups travel together ---------------------------------------------------------------


def small(*, nbytes: Sequence[int], kept: Sequence[int] = ()) -> UnshardSchedule:
    """Return a schedule of groups of these sizes after its first step."""
    schedule = UnshardSchedule(nbytes=nbytes)
    schedule.options.no_reshard_after_forward = set(kept)
    forward(schedule)
    backward(schedule)
    return schedule


def test_small_groups_are_prefetched_together() -> None:
    schedule = small(nbytes=[100] * 4)
    for _ in range(2):
        assert forward(schedule) == [
            "enter 0: gather 0, wait 0, prefetch 1, prefetch 2, prefetch 3",
            "enter 1: wait 1",
            "exit 1: free 1",
            "enter 2: wait 2",
            "exit 2: free 2",
            "enter 3: wait 3",
            "exit 3: -",
            "exit 0: free 0",
            "end: -",
        ]
        assert backward(schedule) == [
            "enter 0: gather 0, wait 0",
            "enter 3: wait 3, prefetch 2, prefetch 1",
            "exit 3: free 3",
            "enter 2: wait 2",
            "exit 2: free 2",
            "enter 1: wait 1",
            "exit 1: free 1",
            "exit 0: free 0",
            "end: -",
        ]


def test_a_batch_stays_below_its_limit() -> None:
    """Layers 1 and 2 fit, 3 does not; it is prefetched in its turn."""
    half = BATCH_NBYTES // 2
    schedule = small(nbytes=[half, half - 1, half, 1])
    assert forward(schedule)[:4] == [
        "enter 0: gather 0, wait 0, prefetch 1, prefetch 2",
        "enter 1: wait 1",
        "exit 1: free 1",
        "enter 2: wait 2, prefetch 3",
    ]
    schedule = small(nbytes=[half, half, half, 1])
    assert forward(schedule)[:2] == [
        "enter 0: gather 0, wait 0, prefetch 1",
        "enter 1: wait 1, prefetch 2, prefetch 3",
    ]


def test_large_groups_travel_alone() -> None:
    schedule = small(nbytes=[BATCH_NBYTES] * 4)
    assert forward(schedule) == FORWARD
    assert backward(schedule) == BACKWARD


# --- another order than last time ---------------------------------------------------------------


def test_what_was_prefetched_in_vain_is_freed_at_the_end_of_the_pass() -> None:
    schedule = trained()
    assert forward(schedule, [2]) == [
        "enter 0: gather 0, wait 0, prefetch 1",
        "enter 2: gather 2, wait 2",
        "exit 2: free 2",
        "exit 0: free 0",
        "end: free 1",
    ]
    assert forward(schedule, [2])[:2] == [
        "enter 0: gather 0, wait 0, prefetch 2",
        "enter 2: wait 2",
    ]


def test_a_group_used_twice_in_a_pass_is_prefetched_twice() -> None:
    schedule = UnshardSchedule()
    forward(schedule, [1, 2, 1])
    schedule.end_backward()
    assert forward(schedule, [1, 2, 1]) == [
        "enter 0: gather 0, wait 0, prefetch 1",
        "enter 1: wait 1, prefetch 2",
        "exit 1: free 1",
        "enter 2: wait 2, prefetch 1",
        "exit 2: free 2",
        "enter 1: wait 1",
        "exit 1: -",
        "exit 0: free 0",
        "end: -",
    ]


def test_a_group_with_another_forward_to_come_back_to_stays_while_there_is_room() -> None:
    schedule = UnshardSchedule()
    forward(schedule, [1, 2, 1])
    lines = [line("enter 1", schedule.enter_backward(1))]
    lines.append(line("exit 1", schedule.exit_backward(1)))
    lines.append(line("enter 2", schedule.enter_backward(2)))
    lines.append(line("exit 2", schedule.exit_backward(2)))
    lines.append(line("enter 1", schedule.enter_backward(1)))
    lines.append(line("exit 1", schedule.exit_backward(1)))
    assert lines == [
        "enter 1: wait 1, prefetch 2",
        "exit 1: free 1",  # 2 was prefetched: there is no room
        "enter 2: wait 2, prefetch 1",
        "exit 2: free 2",
        "enter 1: wait 1",
        "exit 1: free 1",
    ]


def test_a_group_with_another_forward_right_before_is_not_gathered_again() -> None:
    schedule = UnshardSchedule()
    forward(schedule, [1, 1])
    lines = [line("enter 1", schedule.enter_backward(1))]
    lines.append(line("exit 1", schedule.exit_backward(1)))
    lines.append(line("enter 1", schedule.enter_backward(1)))
    lines.append(line("exit 1", schedule.exit_backward(1)))
    assert lines == ["enter 1: wait 1", "exit 1: -", "enter 1: wait 1", "exit 1: free 1"]


def test_a_nested_group_does_not_free_the_one_around_it() -> None:
    schedule = UnshardSchedule()
    schedule.begin_pass()
    lines = [line(f"enter {group}", schedule.enter_forward(group)) for group in (0, 1, 2)]
    lines.append(line("exit 2", schedule.exit_forward(2, needs_backward=True)))
    lines.append(line("enter 3", schedule.enter_forward(3)))
    lines.append(line("exit 3", schedule.exit_forward(3, needs_backward=True)))
    lines.append(line("exit 1", schedule.exit_forward(1, needs_backward=True)))
    assert lines == [
        "enter 0: gather 0, wait 0",
        "enter 1: gather 1, wait 1",
        "enter 2: gather 2, wait 2",
        "exit 2: -",
        "enter 3: gather 3, wait 3",
        "exit 3: free 2",
        "exit 1: free 1",
    ]
