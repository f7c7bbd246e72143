"""What the schedule does for a group does not grow with the number of groups."""

from __future__ import annotations

import typing

import pytest

from shardkit._schedule import BackwardPrefetch, UnshardSchedule
from step_counts import python_instructions

if typing.TYPE_CHECKING:
    from collections.abc import Callable

FEW, MANY = 50, 200
MORE_AMONG_MANY = 1.1


def take_step(schedule: UnshardSchedule, groups: range) -> None:
    schedule.begin_pass()
    for group in groups:
        schedule.enter_forward(group)
        schedule.exit_forward(group, needs_backward=True)
    schedule.end_pass(needs_backward=True)
    for group in reversed(groups):
        schedule.enter_backward(group)
        schedule.exit_backward(group)
    schedule.end_backward()


def keep_all(schedule: UnshardSchedule, number: int) -> None:
    schedule.options.no_reshard_after_forward = set(range(number))


def rest_all(schedule: UnshardSchedule, number: int) -> None:
    schedule.options.no_reshard_after_backward = set(range(number))


def prefetch_late(schedule: UnshardSchedule, number: int) -> None:
    del number
    schedule.options.prefetch_in_backward = BackwardPrefetch.POST


def leave(schedule: UnshardSchedule, number: int) -> None:
    """Choose nothing."""


def instructions_of_a_group(
    number: int, choose: Callable[[UnshardSchedule, int], None], group_nbytes: int, num_used: int
) -> float:
    """Return the instructions of a few steps for each group; a step uses one of `num_used` groups.

    So with 2 no group that a pass enters was in the pass before it.
    """
    schedule = UnshardSchedule(nbytes=[group_nbytes] * number)
    choose(schedule, number)
    steps = [range(first, number, num_used) for first in range(num_used)] * 2

    def train() -> None:
        for groups in steps:
            take_step(schedule, groups)

    train()
    return python_instructions(train) / number


SMALL, LARGE = 1 << 8, 1 << 24


@pytest.mark.parametrize(
    ("choose", "group_nbytes", "num_used"),
    [
        (leave, SMALL, 1),
        (leave, LARGE, 2),
        (keep_all, SMALL, 2),
        (keep_all, LARGE, 1),
        (rest_all, SMALL, 1),
        (rest_all, LARGE, 2),
        (prefetch_late, SMALL, 2),
        (prefetch_late, LARGE, 1),
    ],
)
def test_a_group_takes_no_more_among_many(
    choose: Callable[[UnshardSchedule, int], None], group_nbytes: int, num_used: int
) -> None:
    few, many = (
        instructions_of_a_group(number, choose, group_nbytes, num_used) for number in (FEW, MANY)
    )
    assert many <= MORE_AMONG_MANY * few
