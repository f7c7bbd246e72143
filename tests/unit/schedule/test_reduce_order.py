"""In which order groups are reduced."""

from __future__ import annotations

import pytest

from shardkit._schedule import ReduceOrder

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


def test_groups_of_forwards_that_await_a_backward_stay_entered() -> None:
    order = entered(0, 1, 2)
    assert order.end_backward() == [2, 1, 0]
    order.keep({0, 2, 5})
    assert [order.expects(group) for group in (0, 1, 2, 5)] == [True, False, True, False]
    order.enter_forward(1)
    order.begin_backward()
    assert [order.complete(group) for group in (0, 1, 2)] == [[], [1], [2, 0]]


def test_a_cancelled_backward_keeps_all() -> None:
    order = entered(0, 1)
    order.cancel()
    order.keep(set())
    assert order.entered == (0, 1)
