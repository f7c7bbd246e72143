"""Who is late, from synthetic records: found where it is, and no alarm where nobody is."""

from __future__ import annotations

import random
import typing

import pytest
from synthetic_runs import SyntheticRun

from shardkit.tracing.exposed import TimeSlice, Waits, slices_of
from shardkit.tracing.late import WINDOW, LateRank, late_ranks

FIRST = 10  # Step in which the delay begins.
PHASES = {"data": 0.05, "forward": 0.3, "backward": 0.6, "optimizer": 0.05}  # of a step


def late_in(run: SyntheticRun) -> list[LateRank]:
    records = run.records()
    waits = Waits(records)
    return late_ranks({record.header.rank: slices_of(record, waits) for record in records})


@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (2, 2), (8, 1)])
@pytest.mark.parametrize(
    ("phase", "group"),
    [
        ("data", ""),
        ("forward", "layers.1"),
        ("backward", "layers.0"),
        ("backward", "the root"),
        ("optimizer", ""),
    ],
)
def test_a_delay_of_3_percent_is_found_with_rank_phase_and_group(
    mesh: tuple[int, int], phase: str, group: str
) -> None:
    late = mesh[0] * mesh[1] - 1
    run = SyntheticRun(*mesh, num_steps=FIRST + WINDOW + 1, jitter_s=0.0001)
    step_s = run.data_s + run.optimizer_s + 12 * run.compute_s + 6 * run.network_s

    def delay(rank: int, step: int, *where: str) -> float:
        return 0.03 * step_s * (rank == late and step >= FIRST and where == (phase, group))

    run.delay = delay
    [found] = late_in(run)
    assert (found.rank, found.phase, found.group, found.kind) == (late, phase, group, "slow")
    assert found.first_step == FIRST
    assert found.share == pytest.approx(0.03, rel=0.3)
    assert f"rank {late} is slow in {phase}" in str(found)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    # Over two axes a reduction has one wait, of which nobody knows when its first half came.
    [
        ((2, 1), "gather"),
        ((2, 1), "reduce_scatter"),
        ((4, 1), "reduce_scatter"),
        ((2, 2), "gather"),
    ],
)
def test_a_link_that_is_slow_to_receive_is_told_apart(mesh: tuple[int, int], kind: str) -> None:
    late = mesh[0] * mesh[1] - 1

    def link(rank: int, step: int, *where: str) -> float:
        return 0.006 * (rank == late and step >= FIRST and where == (kind, "the root"))

    run = SyntheticRun(*mesh, num_steps=FIRST + WINDOW + 1, jitter_s=0.0001, link=link)
    found = late_in(run)
    assert {(each.rank, each.kind, each.group) for each in found} == {
        (late, "slow link", "the root")
    }
    assert all(each.first_step == FIRST for each in found)
    assert f"the link of rank {late} is slow in " in str(found[0])


def test_a_link_that_is_slow_to_send_keeps_all_others_waiting() -> None:
    def link(rank: int, step: int, *where: str) -> float:
        return 0.012 * (rank != 2 and step >= FIRST and where == ("reduce_scatter", "the root"))

    [found] = late_in(SyntheticRun(4, num_steps=FIRST + WINDOW + 1, jitter_s=0.0001, link=link))
    assert (found.rank, found.kind) == (2, "slow link")


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_of_three_ranks_the_links_of_two_are_not_told_from_that_of_one(num_ranks: int) -> None:
    def link(rank: int, step: int, *where: str) -> float:
        del step
        return 0.02 * (rank != 0 and where[0] == "gather")

    found = late_in(SyntheticRun(num_ranks, num_steps=12, jitter_s=0.0001, link=link))
    assert found
    assert {(each.rank, each.kind) for each in found} == {(0, "slow link")}
    sentence = "the link of rank 0, or those of all others, is slow in backward"
    assert any(sentence in str(each) for each in found) == (num_ranks == 3)


def test_two_slow_links_of_four_are_the_network() -> None:
    def link(rank: int, step: int, *where: str) -> float:
        del step
        return 0.02 * (rank in {1, 3} and where[0] == "gather")

    assert late_in(SyntheticRun(4, num_steps=20, jitter_s=0.0001, link=link)) == []


def test_a_link_that_is_slow_now_and_then_is_irregular() -> None:
    def link(rank: int, step: int, *where: str) -> float:
        return 0.08 * (rank == 1 and step % 9 == 4 and where == ("reduce_scatter", "the root"))

    [found] = late_in(SyntheticRun(4, num_steps=40, jitter_s=0.0002, link=link))
    assert (found.rank, found.kind, found.num_steps) == (1, "irregular link", 4)


def test_what_all_ranks_do_longer_is_nobodys_lateness() -> None:
    def delay(rank: int, step: int, *where: str) -> float:
        del rank
        return 0.05 * (step % 7 == 0 and where == ("forward", "layers.0"))

    assert late_in(SyntheticRun(4, num_steps=30, jitter_s=0.0002, delay=delay)) == []


def test_a_slow_network_is_nobodys_lateness() -> None:
    assert late_in(SyntheticRun(4, num_steps=20, network_s=0.03, jitter_s=0.0002)) == []


def test_a_rank_that_is_late_now_and_then_is_irregular() -> None:
    def delay(rank: int, step: int, *where: str) -> float:
        return 0.08 * (rank == 1 and step % 9 == 4 and where == ("backward", "layers.1"))

    [found] = late_in(SyntheticRun(4, num_steps=40, jitter_s=0.0002, delay=delay))
    assert (found.rank, found.phase, found.kind) == (1, "backward", "irregular")
    assert found.num_steps == 4


def noisy_steps(
    num_ranks: int, num_steps: int, seed: int, spread: float
) -> dict[int, list[TimeSlice]]:
    """Return slices of ranks that are alike: normal times, each hundredth half a step longer."""
    rng = random.Random(seed)
    by_rank: dict[int, list[TimeSlice]] = {}
    for rank in range(num_ranks):
        at, slices = 0.0, []
        for step in range(num_steps):
            for phase, share in PHASES.items():
                end = at + max(rng.gauss(share, spread / 2), 0) + 0.5 * (rng.random() < 0.001)
                slices.append(TimeSlice(at, end, step, phase, "", "compute"))
                at = end
        by_rank[rank] = slices
    return by_rank


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
@pytest.mark.parametrize("spread", [0.001, 0.02, 0.1])
def test_a_thousand_steps_of_equal_ranks_give_no_alarm(num_ranks: int, spread: float) -> None:
    found = late_ranks(noisy_steps(num_ranks, 1000, seed=num_ranks, spread=spread))
    assert typing.cast("list[LateRank]", found) == []


def alike(
    deviations: typing.Sequence[float], num_steps: int, seed: int, correlation: float = 0.0
) -> dict[int, list[TimeSlice]]:
    """Return slices of ranks with no delay, whose steps vary by a deviation of a step each.

    Args:
        deviations: Deviation of each rank.
        num_steps: Number of steps.
        seed: Number that chooses the values.
        correlation: Correlation of neighbouring steps.
    """
    rng = random.Random(seed)
    by_rank: dict[int, list[TimeSlice]] = {}
    for rank, deviation in enumerate(deviations):
        at, slices, extra = 0.0, [], 0.0
        fresh = deviation * (1 - correlation**2) ** 0.5
        for step in range(num_steps):
            extra = correlation * extra + rng.gauss(0, fresh)
            middle = at + 0.3
            end = middle + max(0.7 + extra, 0)
            slices.append(TimeSlice(at, middle, step, "forward", "", "compute"))
            slices.append(TimeSlice(middle, end, step, "backward", "", "compute"))
            at = end
        by_rank[rank] = slices
    return by_rank


ONE_OF_EIGHT = [0.002] * 3 + [0.05] + [0.002] * 4


@pytest.mark.parametrize(
    ("deviations", "correlation", "num_steps", "most"),
    [
        ([0.02] * 4, 0.9, 20, 12),  # 19 steps that say as much as one.
        ([0.02] * 4, 0.9, 100, 1),
        ([0.02] * 4, 0.6, 20, 1),
        (ONE_OF_EIGHT, 0.0, 20, 1),
        (ONE_OF_EIGHT, 0.0, 100, 1),
    ],
)
def test_alarms_in_50_runs_of_ranks_that_are_not_late(
    deviations: list[float], correlation: float, num_steps: int, most: int
) -> None:
    runs = (alike(deviations, num_steps, seed, correlation) for seed in range(50))
    assert sum(bool(late_ranks(run)) for run in runs) <= most


def later(run: dict[int, list[TimeSlice]], rank: int, first: int = 0, share: float = 0.03) -> None:
    """Let the backward of a rank take a share of a step longer from a step on."""
    moved = 0.0
    for i, each in enumerate(run[rank]):
        longer = share * (each.phase == "backward" and each.step >= first)
        run[rank][i] = each._replace(begin=each.begin + moved, end=each.end + moved + longer)
        moved += longer


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_delay_that_begins_is_found_within_five_steps_in_48_of_50_runs(num_ranks: int) -> None:
    num_found = 0
    for seed in range(50):
        run = alike([0.002] * num_ranks, 5 + WINDOW + 1, seed)
        later(run, 1, first=5)
        found = late_ranks(run)
        num_found += bool(found) and found[0][:2] == (1, "backward") and found[0].first_step >= 4
    assert num_found >= 48


@pytest.mark.parametrize("deviation", [0.002, 0.02, 0.05])
def test_a_delay_of_all_steps_is_told_with_its_length(deviation: float) -> None:
    run = alike([deviation] * 4, 1000, seed=1)
    later(run, 2)
    [found] = late_ranks(run)
    assert (found.rank, found.phase, found.kind) == (2, "backward", "slow")
    assert found.share == pytest.approx(0.03, abs=0.005)
    assert found.first_step < 30
    assert found.num_steps > 950


def test_a_rank_that_is_far_behind_in_all_of_a_few_noisy_steps_is_slow() -> None:
    num_slow = 0
    for seed in range(40):
        run = alike([0.05] * 4, 14, seed)
        later(run, 2, share=0.6)
        found = late_ranks(run)
        num_slow += bool(found) and (found[0].rank, found[0].kind) == (2, "slow")
    assert num_slow >= 38


def test_a_delay_that_ends_is_told_with_its_steps() -> None:
    def delay(rank: int, step: int, *where: str) -> float:
        return 0.03 * (rank == 1 and 30 <= step < 60 and where == ("backward", "layers.1"))

    [found] = late_in(SyntheticRun(4, num_steps=100, jitter_s=0.0001, delay=delay))
    assert (found.kind, found.first_step, found.num_steps) == ("slow", 30, 30)


def test_less_than_five_steps_say_nothing() -> None:
    run = SyntheticRun(2, num_steps=5)
    run.delay = lambda rank, step, phase, group: 0.1 * (rank == 1)  # noqa: ARG005
    assert late_in(run) == []
