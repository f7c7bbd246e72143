"""The schedule as lists: for every event, the actions it leads to.

Group 0 is the root, 1 to 3 its layers. A line is ``event: actions``, ``-`` for none.
"""

from __future__ import annotations

import typing

import pytest

from shardkit._policy import BackwardPrefetch
from shardkit._schedule.reduce_order import ReduceOrder
from shardkit._schedule.unshard import BATCH_NBYTES, UnshardSchedule

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._schedule.unshard import Action

LAYERS = (1, 2, 3)


def line(event: str, actions: Sequence[Action]) -> str:
    """Return an event and what it leads to, as a line of text."""
    shown = ", ".join(f"{op.value} {group}" for op, group in actions)
    return f"{event}: {shown or '-'}"


def forward(
    schedule: UnshardSchedule,
    layers: Sequence[int] = LAYERS,
    *,
    has_changed: bool = False,
    needs_backward: bool = True,
) -> list[str]:
    """Run a pass of the root and these layers; return its lines."""
    schedule.begin_pass(has_changed=has_changed)
    lines = [line("enter 0", schedule.enter_forward(0))]
    for layer in layers:
        lines.append(line(f"enter {layer}", schedule.enter_forward(layer)))
        actions = schedule.exit_forward(layer, needs_backward=needs_backward)
        lines.append(line(f"exit {layer}", actions))
    lines.append(line("exit 0", schedule.exit_forward(0, needs_backward=needs_backward)))
    lines.append(line("end", schedule.end_pass(needs_backward=needs_backward)))
    return lines


def backward(schedule: UnshardSchedule, layers: Sequence[int] = LAYERS) -> list[str]:
    """Run the backward of such a pass; the layers are given in the order of forward."""
    lines = [line("enter 0", schedule.enter_backward(0))]
    for layer in reversed(layers):
        lines.append(line(f"enter {layer}", schedule.enter_backward(layer)))
        actions = schedule.exit_backward(layer, is_last=True)
        lines.append(line(f"exit {layer}", actions))
    lines.append(line("exit 0", schedule.exit_backward(0, is_last=True)))
    lines.append(line("end", schedule.end_backward()))
    return lines


def trained(*, prefetch_depth: int = 1, kept: Sequence[int] = ()) -> UnshardSchedule:
    """Return a schedule after its first step."""
    schedule = UnshardSchedule(prefetch_depth=prefetch_depth)
    schedule.options.kept = set(kept)
    forward(schedule)
    backward(schedule)
    return schedule


FIRST_FORWARD = [
    "enter 0: gather 0, wait 0",
    "enter 1: gather 1, wait 1",
    "exit 1: -",
    "enter 2: gather 2, wait 2",
    "exit 2: free 1",
    "enter 3: gather 3, wait 3",
    "exit 3: free 2",
    "exit 0: free 0",
    "end: -",
]
FORWARD = [
    "enter 0: gather 0, wait 0, prefetch 1",
    "enter 1: wait 1, prefetch 2",
    "exit 1: free 1",
    "enter 2: wait 2, prefetch 3",
    "exit 2: free 2",
    "enter 3: wait 3",
    "exit 3: -",
    "exit 0: free 0",
    "end: -",
]
BACKWARD = [
    "enter 0: gather 0, wait 0",
    "enter 3: wait 3, prefetch 2",
    "exit 3: free 3",
    "enter 2: wait 2, prefetch 1",
    "exit 2: free 2",
    "enter 1: wait 1",
    "exit 1: free 1",
    "exit 0: free 0",
    "end: -",
]

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
    assert not list(schedule._tape.before(3, first)), "the first pass is over"  # noqa: SLF001
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


# --- prefetch depth -----------------------------------------------------------------------------


def test_depth_0_gathers_nothing_ahead() -> None:
    schedule = trained(prefetch_depth=0)
    assert forward(schedule) == FIRST_FORWARD
    assert backward(schedule) == [
        "enter 0: gather 0, wait 0",
        "enter 3: wait 3",
        "exit 3: free 3",
        "enter 2: gather 2, wait 2",
        "exit 2: free 2",
        "enter 1: gather 1, wait 1",
        "exit 1: free 1",
        "exit 0: free 0",
        "end: -",
    ]


def test_depth_2_gathers_two_ahead() -> None:
    schedule = trained(prefetch_depth=2)
    assert forward(schedule)[:4] == [
        "enter 0: gather 0, wait 0, prefetch 1, prefetch 2",
        "enter 1: wait 1, prefetch 3",
        "exit 1: free 1",
        "enter 2: wait 2",
    ]


def test_depth_2_makes_room_for_two() -> None:
    """Layers 3 and 4 are spare when another pass begins before their backward."""
    schedule = UnshardSchedule(prefetch_depth=2)
    forward(schedule, [1, 2, 3, 4])
    assert forward(schedule, [1, 2, 3, 4])[0] == (
        "enter 0: gather 0, wait 0, free 3, free 4, prefetch 1, prefetch 2"
    )


# --- small groups travel together ---------------------------------------------------------------


def small(*, nbytes: Sequence[int], kept: Sequence[int] = ()) -> UnshardSchedule:
    """Return a schedule of groups of these sizes after its first step."""
    schedule = UnshardSchedule(nbytes=nbytes)
    schedule.options.kept = set(kept)
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


# --- recomputation (activation checkpointing) ---------------------------------------------------


def recompute(schedule: UnshardSchedule, group: int) -> list[str]:
    """Run a forward again inside backward; return its lines."""
    return [
        line(f"recompute {group}", schedule.enter_recompute(group)),
        line(f"recomputed {group}", schedule.exit_recompute(group)),
    ]


def test_a_recomputed_group_is_gathered_once_for_recompute_and_backward() -> None:
    schedule = trained()
    forward(schedule)
    schedule.enter_backward(0)
    schedule.enter_backward(3)
    schedule.exit_backward(3)
    lines = [
        *recompute(schedule, 2),
        line("enter 2", schedule.enter_backward(2)),
        line("exit 2", schedule.exit_backward(2)),
    ]
    assert lines == [
        "recompute 2: wait 2",
        "recomputed 2: -",
        "enter 2: wait 2, prefetch 1",
        "exit 2: free 2",
    ]


def test_recompute_inside_backward_keeps_the_memory() -> None:
    schedule = trained()
    forward(schedule)
    schedule.enter_backward(3)
    assert recompute(schedule, 3) == ["recompute 3: wait 3", "recomputed 3: -"]
    assert schedule.in_use(3)
    assert schedule.exit_backward(3) == schedule_free(3)
    assert not schedule.in_use(3)


def schedule_free(group: int) -> list[Action]:
    """Return what frees a live group."""
    schedule = UnshardSchedule()
    schedule.unshard(group)
    return schedule.reshard(group)


def test_a_recomputed_group_nobody_prefetched_is_gathered() -> None:
    """Reentrant checkpointing ran its forward without grad, so it is not on the tape."""
    schedule = UnshardSchedule()
    schedule.begin_pass()
    schedule.enter_forward(0)
    for layer in LAYERS:
        schedule.enter_forward(layer)
        schedule.exit_forward(layer, needs_backward=False)
    schedule.exit_forward(0, needs_backward=True)
    schedule.end_pass(needs_backward=True)
    lines = []
    for layer in reversed(LAYERS):
        lines += recompute(schedule, layer)
        lines.append(line(f"enter {layer}", schedule.enter_backward(layer)))
        lines.append(line(f"exit {layer}", schedule.exit_backward(layer)))
    lines.append(line("end", schedule.end_backward()))
    assert lines == [
        "recompute 3: wait 3",
        "recomputed 3: -",
        "enter 3: wait 3",
        "exit 3: free 3",
        "recompute 2: gather 2, wait 2",
        "recomputed 2: -",
        "enter 2: wait 2",
        "exit 2: free 2",
        "recompute 1: gather 1, wait 1",
        "recomputed 1: -",
        "enter 1: wait 1",
        "exit 1: free 1",
        "end: -",
    ]


# --- by hand ------------------------------------------------------------------------------------


def test_unshard_gathers_once_and_reshard_frees() -> None:
    schedule = UnshardSchedule()
    lines = [
        line("unshard 1", schedule.unshard(1)),
        line("unshard 1", schedule.unshard(1)),
        line("reshard 1", schedule.reshard(1)),
        line("reshard 1", schedule.reshard(1)),
    ]
    assert lines == ["unshard 1: gather 1", "unshard 1: -", "reshard 1: free 1", "reshard 1: -"]


def test_a_group_unsharded_by_hand_is_not_gathered_again_and_its_forward_gives_it_back() -> None:
    schedule = UnshardSchedule()
    schedule.unshard(1)
    assert forward(schedule)[1:5] == [
        "enter 1: wait 1",
        "exit 1: -",
        "enter 2: gather 2, wait 2",
        "exit 2: free 1",
    ]


def test_a_group_unsharded_by_hand_outlives_steps_that_do_not_use_it() -> None:
    schedule = UnshardSchedule()
    schedule.unshard(3)
    forward(schedule, [1, 2])
    backward(schedule, [1, 2])
    forward(schedule, [1, 2], needs_backward=False)
    assert schedule.live == (3,)
    assert schedule.in_use(3)


def test_what_the_user_resharded_in_backward_is_not_freed_again() -> None:
    schedule = UnshardSchedule()
    forward(schedule)
    schedule.enter_backward(3)
    assert line("reshard 3", schedule.reshard(3)) == "reshard 3: free 3"
    assert schedule.exit_backward(3) == []


def test_backward_gives_back_what_was_unsharded_by_hand() -> None:
    schedule = UnshardSchedule()
    forward(schedule)
    schedule.unshard(1)
    backward(schedule)
    assert schedule.live == ()


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
    new.options.kept = set(kept)
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
    schedule.options.kept = set()
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


@pytest.mark.parametrize("forget", ["next pass", "reshard", "reset"])
def test_what_may_have_an_unwatched_backward_is_spare_after_all(forget: str) -> None:
    schedule = UnshardSchedule()
    schedule.begin_pass()
    schedule.enter_forward(1)
    schedule.exit_forward(1, needs_backward=False, is_watched=False)
    schedule.end_pass(needs_backward=False)
    assert schedule.live == (1,)
    if forget == "next pass":
        schedule.begin_pass()
    else:
        _ = schedule.reshard(1) if forget == "reshard" else schedule.reset()
    assert not schedule.in_use(1)


# --- the order of reductions --------------------------------------------------------------------


def entered(*groups: int) -> ReduceOrder:
    """Return the order of a pass that entered these groups, when its backward has begun."""
    order = ReduceOrder()
    for group in groups:
        order.enter_forward(group)
    order.begin_backward()
    return order


def test_groups_are_reduced_in_the_reverse_of_forward() -> None:
    order = entered(0, 1, 2, 3)
    assert [order.complete(group) for group in (3, 2, 1)] == [[3], [2], [1]]
    assert order.complete(0) == [0]
    assert order.end_backward() == []


def test_one_that_completes_early_waits_for_those_before_it() -> None:
    order = entered(0, 1, 2, 3)
    assert [order.complete(group) for group in (1, 0, 3, 2)] == [[], [], [3], [2, 1, 0]]


def test_what_never_completes_is_reduced_at_the_end() -> None:
    order = entered(0, 1, 2, 3)
    assert order.complete(3) == [3]
    assert order.complete(1) == []
    assert order.end_backward() == [2, 1, 0]
    assert order.end_backward() == []


def test_a_late_completion_is_reduced_again() -> None:
    order = entered(0, 1)
    assert [order.complete(group) for group in (1, 1, 0, 1)] == [[1], [1], [0], [1]]


def test_a_group_that_no_forward_entered_is_reduced_at_once() -> None:
    order = entered(0, 1)
    assert order.complete(5) == [5]
    assert order.end_backward() == [1, 0]


def test_a_group_counts_where_it_was_entered_first() -> None:
    order = ReduceOrder()
    assert [order.enter_forward(group) for group in (0, 1, 2, 1)] == [True, True, True, False]
    order.begin_backward()
    assert order.end_backward() == [2, 1, 0]


def test_a_withdrawn_group_is_not_reduced() -> None:
    order = ReduceOrder()
    for group in (0, 1, 2):
        order.enter_forward(group)
    order.withdraw(1)
    order.begin_backward()
    assert order.end_backward() == [2, 0]


@pytest.mark.parametrize("forget", ["end_backward", "reset"])
def test_the_next_step_starts_anew(forget: str) -> None:
    order = entered(0, 1, 2)
    order.complete(1)
    getattr(order, forget)()
    order.enter_forward(2)
    order.enter_forward(1)
    order.begin_backward()
    assert [order.complete(group) for group in (1, 2)] == [[1], [2]]


def test_a_cancelled_backward_leaves_the_order_for_the_next() -> None:
    """``autograd.grad`` before ``backward`` of the same forward."""
    order = entered(0, 1, 2)
    order.cancel()
    order.begin_backward()
    assert order.complete(1) == []
    assert order.complete(2) == [2, 1]
    assert order.end_backward() == [0]


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
    schedule.options.forward_prefetch = False
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
    schedule.options.backward_prefetch = when
    schedule.enter_backward(0)
    assert line("in", schedule.enter_backward(3)) == f"in: {entered}"
    assert line("out", schedule.exit_backward(3)) == f"out: {left}"


def test_a_resting_group_stays_after_backward_and_goes_after_forward() -> None:
    schedule = trained()
    schedule.options.resting = {1}
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
    schedule.options.resting = {1}
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
    schedule.options.idle_in_backward = {2}
    schedule.enter_backward(0)
    assert line("3", schedule.enter_backward(3)) == "3: wait 3, prefetch 1"
    schedule.exit_backward(3)
    assert line("2", schedule.enter_backward(2)).find("2") == 0
    assert 2 not in schedule.live


def test_an_unfinished_group_stays_until_the_pass_ends() -> None:
    schedule = trained()
    schedule.begin_pass()
    schedule.enter_forward(0)
    schedule.enter_forward(1)
    schedule.exit_forward(1, needs_backward=False, is_unfinished=True)
    for group in (2, 3):
        schedule.enter_forward(group)
        schedule.exit_forward(group, needs_backward=False)
    assert 1 in schedule.live
    schedule.exit_forward(0, needs_backward=False)
    assert "free 1" in line("end", schedule.end_pass(needs_backward=False))


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
