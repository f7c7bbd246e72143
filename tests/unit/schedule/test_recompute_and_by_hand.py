"""What the schedule does when modules recompute, and when the user unshards, reshards and holds."""

from __future__ import annotations

from schedule_lines import (
    LAYERS,
    backward,
    forward,
    line,
    trained,
)

from shardkit._schedule import Action, UnshardSchedule

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


def test_a_group_unsharded_by_hand_outlives_forwards_that_do_not_use_it() -> None:
    schedule = UnshardSchedule()
    schedule.unshard(3)
    for _ in range(2):
        forward(schedule, [1, 2], needs_backward=False)
        assert schedule.live == (3,)
        assert schedule.in_use(3)


def test_backward_gives_back_a_group_unsharded_by_hand_that_it_does_not_enter() -> None:
    """Its parameters may be used outside of its forward."""
    schedule = UnshardSchedule()
    forward(schedule, [1, 2])
    schedule.unshard(3)
    assert backward(schedule, [1, 2])[-1] == "end: free 3"
    assert schedule.live == ()


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


def test_backward_gives_back_what_was_unsharded_by_hand_although_it_does_not_leave_it() -> None:
    """As of a root whose inputs require no gradient."""
    schedule = UnshardSchedule()
    forward(schedule)
    schedule.unshard(0)
    schedule.enter_backward(0)
    assert line("end", schedule.end_backward()).startswith("end: free")
    assert schedule.live == ()


def test_a_group_that_is_lent_stays_until_reshard() -> None:
    """Through forwards and backwards of several micro-batches, as a pipeline's schedule wants."""
    schedule = UnshardSchedule()
    schedule.unshard(1, until_reshard=True)
    for _ in range(2):
        forward(schedule)
        assert schedule.states[1].is_user_held
        assert "enter 1: wait 1" in backward(schedule)
        assert schedule.live == (1,)
        assert schedule.lends
    assert line("reshard 1", schedule.reshard(1)) == "reshard 1: free 1"
    assert not schedule.lends
    forward(schedule)
    backward(schedule)
    assert schedule.live == ()
