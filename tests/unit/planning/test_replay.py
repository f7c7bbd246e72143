"""Tasks by a clock: cases that can be reckoned by hand."""

from __future__ import annotations

import pytest

from shardkit.planning._time import Task, replay


def test_tasks_of_a_lane_follow_each_other() -> None:
    first, second = Task("compute", 2.0), Task("compute", 3.0)
    assert replay([first, second], 1.0) == pytest.approx(5.0)
    assert (second.begin, second.end) == (pytest.approx(2.0), pytest.approx(5.0))


def test_lanes_run_beside_each_other_and_wait_for_what_they_need() -> None:
    gather = Task("gather", 3.0, link="shard")
    before = Task("compute", 2.0)
    after = Task("compute", 1.0, (gather,))
    assert replay([gather, before, after], 1.0) == pytest.approx(4.0)
    assert after.begin == pytest.approx(3.0)


@pytest.mark.parametrize(("overlap", "seconds"), [(1.0, 2.0), (0.5, 3.0), (0.0, 4.0), (-0.5, 5.0)])
def test_a_collective_that_needs_the_processor_takes_it_from_compute(
    overlap: float, seconds: float
) -> None:
    tasks = [Task("gather", 2.0, link="shard"), Task("compute", 2.0)]
    assert replay(tasks, overlap) == pytest.approx(seconds)


def test_what_is_left_when_compute_ends_goes_at_full_speed() -> None:
    gather, compute = Task("gather", 3.0, link="shard"), Task("compute", 1.0)
    assert replay([gather, compute], 0.0) == pytest.approx(4.0)
    assert compute.end == pytest.approx(2.0)


def test_collectives_share_a_link_and_not_two() -> None:
    def seconds(*links: str) -> float:
        return replay([Task("gather", 1.0, link=links[0]), Task("reduce", 1.0, link=links[1])], 1.0)

    assert seconds("shard", "shard") == pytest.approx(2.0)
    assert seconds("shard", "replicate") == pytest.approx(1.0)


def test_a_task_without_time_lets_others_start_at_once() -> None:
    gather = Task("gather", 1.0, link="shard")
    wait = Task("compute", 0.0, (gather,))
    after = Task("reduce", 1.0, (wait,), link="shard")
    assert replay([gather, wait, after], 0.0) == pytest.approx(2.0)


def test_a_task_that_waits_for_one_behind_it_is_a_mistake() -> None:
    last = Task("compute", 1.0)
    with pytest.raises(AssertionError, match="waits for one behind"):
        replay([Task("compute", 1.0, (last,)), last], 1.0)
