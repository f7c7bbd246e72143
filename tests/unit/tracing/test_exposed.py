"""Slices of steps: their sum is the step, and each has the cause that the run was made with."""

from __future__ import annotations

import collections
import itertools
import typing

import pytest
from synthetic_runs import SyntheticRun

from shardkit._events import StepEvent
from shardkit.tracing.exposed import TimeSlice, Waits, seconds_by, slices_of
from shardkit.tracing.records import RankHeader, RankRecord

MESHES = [(2, 1), (4, 1), (3, 1), (2, 2), (4, 2)]
DELAY_S = 0.03


def sliced(records: list[RankRecord]) -> dict[int, list[TimeSlice]]:
    waits = Waits(records)
    return {record.header.rank: slices_of(record, waits) for record in records}


def exposed(slices: list[TimeSlice]) -> dict[str, float]:
    by_cause = seconds_by((each for each in slices if each.is_exposed), "cause")
    return {str(cause): seconds for (cause,), seconds in by_cause.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_slices_are_the_step(mesh: tuple[int, int]) -> None:
    size, replicas = mesh
    records = SyntheticRun(size, replicas, num_steps=3, jitter_s=0.003).records()
    for rank, slices in sliced(records).items():
        for one, after in itertools.pairwise(slices):
            assert one.end == after.begin
        events = records[rank].events
        ends = [e.end for e in events if e.kind == "compute" and e.phase == "optimizer"]
        begin = min(event.begin for event in events)
        for step, end in enumerate(ends):
            total = sum(each.seconds for each in slices if each.step == step)
            assert total == pytest.approx(end - begin)
            begin = end
        assert {each.step for each in slices} == {0, 1, 2}


def test_causes_of_a_run_without_delays_are_known_to_the_microsecond() -> None:
    run = SyntheticRun(num_steps=2, num_layers=3)
    for slices in sliced(run.records()).values():
        found = seconds_by((each for each in slices if each.step == 1), "phase", "cause")
        assert found == {
            ("data", "data"): pytest.approx(run.data_s),
            ("forward", "compute"): pytest.approx(4 * run.compute_s),
            # The first gather, and the others hide behind compute.
            ("forward", "network"): pytest.approx(run.network_s),
            ("backward", "compute"): pytest.approx(8 * run.compute_s),
            # Four gathers, and the last reduction; the others hide behind compute and gathers.
            ("backward", "network"): pytest.approx(5 * run.network_s),
            ("optimizer", "optimizer"): pytest.approx(run.optimizer_s),
        }


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("phase", "group"),
    [
        ("data", ""),
        ("forward", "the root"),
        ("forward", "layers.1"),
        ("backward", "layers.2"),
        ("backward", "the root"),
        ("optimizer", ""),
    ],
)
def test_all_others_wait_for_the_rank_that_is_late(
    mesh: tuple[int, int], phase: str, group: str
) -> None:
    size, replicas = mesh
    late = size * replicas - 1

    def delay(rank: int, step: int, *where: str) -> float:
        return DELAY_S if (rank, step, where) == (late, 1, (phase, group)) else 0.0

    run = SyntheticRun(size, replicas, num_steps=4, delay=delay)
    for rank, slices in sliced(run.records()).items():
        causes = exposed(slices)
        blamed = {cause for cause in causes if cause.startswith("rank")}
        if rank == late:
            # What overlapped before is late now; nobody else is.
            assert blamed == set()
        else:
            assert blamed == {f"rank {late}"}
            assert causes[f"rank {late}"] == pytest.approx(DELAY_S, rel=0.1)


def test_a_rank_that_waits_itself_is_not_blamed() -> None:
    """Rank 3 delays rank 2 on the shard axis, and so ranks 0 and 1 on the replicate axis."""

    def delay(rank: int, step: int, phase: str, group: str) -> float:
        return DELAY_S if (rank, step, phase, group) == (3, 1, "backward", "layers.2") else 0.0

    records = SyntheticRun(2, 2, num_steps=3, delay=delay).records()
    blamed = collections.Counter(
        (rank, each.late_rank)
        for rank, slices in sliced(records).items()
        for each in slices
        if each.late_rank >= 0
    )
    assert {late for _, late in blamed} == {3}
    assert {rank for rank, _ in blamed} == {0, 1, 2}


def test_two_late_ranks_are_told_apart() -> None:
    def delay(rank: int, step: int, phase: str, group: str) -> float:
        late = {(1, 1, "forward", "layers.0"): DELAY_S, (2, 1, "backward", "layers.0"): DELAY_S / 2}
        return late.get((rank, step, phase, group), 0.0)

    slices = sliced(SyntheticRun(3, num_steps=3, delay=delay).records())[0]
    found = seconds_by((each for each in slices if each.late_rank >= 0), "cause")
    assert found == {
        # What took its place: the networks' time for gathers, which hide no more behind compute.
        ("rank 1",): pytest.approx(DELAY_S, rel=0.1),
        ("rank 2",): pytest.approx(DELAY_S / 2, rel=0.1),
    }


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_collectives_that_end_nearly_at_once_name_no_link(num_ranks: int) -> None:
    def link(rank: int, step: int, *where: str) -> float:
        del step, where
        return 0.0008 * (rank == 1)

    for extra, is_named in ((link, False), (lambda *where: 5 * link(*where), True)):
        by_rank = sliced(SyntheticRun(num_ranks, link=extra).records())
        links = {each.late_rank for of in by_rank.values() for each in of if each.cause == "link"}
        assert links == ({1} if is_named else set())


def test_of_what_is_under_way_at_once_a_wait_counts_and_then_the_innermost_group() -> None:
    spans: list[tuple[typing.Any, str, typing.Any, int, int]] = [
        ("pass", "", "forward", 0, 10),
        ("gather", "inner", "forward", 0, 4),
        ("compute", "outer", "forward", 1, 9),
        ("compute", "inner", "forward", 2, 5),
        ("wait", "inner", "forward", 1, 4),  # It begins before the group that it holds back.
        ("compute", "optimizer", "optimizer", 10, 11),
        ("pass", "", "forward", 11, 12),
    ]
    events = [
        StepEvent(kind, name, 1, phase, 0, "shard", 1, begin, begin, end, end)
        for kind, name, phase, begin, end in spans
    ]
    [slices] = sliced([RankRecord(RankHeader(0, 1), events)]).values()
    assert [(each.begin, each.end, each.group, each.cause) for each in slices] == [
        (0, 1, "", "outside"),
        (1, 4, "inner", "network"),
        (4, 5, "inner", "compute"),
        (5, 9, "outer", "compute"),
        (9, 10, "", "outside"),
        (10, 11, "", "optimizer"),
    ]


def test_a_closure_of_an_optimizer_belongs_to_the_step_but_not_to_the_optimizer() -> None:
    """Lightning and LBFGS run forward and backward inside of the optimizer's step."""
    spans: list[tuple[typing.Any, str, int, int]] = []
    for begin in (0, 20, 40):
        spans += [
            ("compute", "optimizer", begin + 2, begin + 12),
            ("pass", "forward", begin + 3, begin + 5),
            ("pass", "backward", begin + 6, begin + 10),
        ]
    events = [
        StepEvent(kind, phase, -1, phase, 0, "", 1, begin, begin, end, end)
        for kind, phase, begin, end in spans
    ]
    [slices] = sliced([RankRecord(RankHeader(0, 1), events)]).values()
    assert [(each.begin, each.end, each.step, each.phase, each.cause) for each in slices] == [
        (3, 5, 0, "forward", "outside"),
        (5, 6, 0, "forward", "outside"),
        (6, 10, 0, "backward", "outside"),
        (10, 12, 0, "optimizer", "optimizer"),
        *(
            each
            for step, at in ((1, 12), (2, 32))
            for each in (
                (at, at + 11, step, "data", "data"),
                (at + 11, at + 13, step, "forward", "outside"),
                (at + 13, at + 14, step, "forward", "outside"),
                (at + 14, at + 18, step, "backward", "outside"),
                (at + 18, at + 20, step, "optimizer", "optimizer"),
            )
        ),
    ]
