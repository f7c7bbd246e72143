"""Ranks that run more modules of a list, or fewer, gather the same groups at the same events."""

from __future__ import annotations

import dataclasses
import itertools
import random
import typing

import pytest

from shardkit._schedule import Action, BackwardPrefetch, Op, UnshardSchedule

SIZES = 100, 100, 1 << 19, 1 << 22
Log = list[typing.Any]


@dataclasses.dataclass
class Drawn:
    """A model whose forward visits groups in some order, and how its steps go."""

    num_groups: int  # Number of groups without the root's, which has the next number.
    lists: set[int]  # Groups of several modules.
    passes: list[list[int]]  # Groups that each pass visits, in order.
    nbytes: list[int]
    schedule_options: dict[str, typing.Any]  # What users chose.
    # Whether a visit runs again before its backward; "alone" if its first forward had no gradients,
    # as in a reentrant checkpoint.
    recompute: typing.Literal["no", "yes", "alone"]
    accumulate: bool  # Whether all passes of a step come before their backwards.


def draw_next(rng: random.Random, groups: range) -> dict[int, list[int]]:
    """Return what some groups prefetch by choice."""
    return {g: rng.choices(groups, k=rng.randint(0, 2)) for g in groups if rng.random() < 0.3}


def draw(number: int) -> Drawn:
    rng = random.Random(number)
    num = rng.randint(3, 7)
    groups = range(num)
    order = [group for group, _ in itertools.groupby(rng.choices(groups, k=rng.randint(3, 8)))]
    kept = {num, *(group for group in groups if rng.random() < 0.15)}
    return Drawn(
        num_groups=num,
        lists={rng.choice(groups), *(group for group in groups if rng.random() < 0.3)},
        passes=[order if rng.random() < 0.8 else order[: rng.randint(1, 8)] for _ in range(6)],
        nbytes=[rng.choice(SIZES) for _ in range(num + 1)],
        schedule_options={
            "no_reshard_after_forward": kept,
            "no_reshard_after_backward": {group for group in groups if rng.random() < 0.1},
            "prefetch_in_backward": rng.choice([BackwardPrefetch.PRE, BackwardPrefetch.POST]),
            "prefetch_in_forward": rng.random() < 0.9,
            "next_in_forward": draw_next(rng, groups),
            "next_in_backward": draw_next(rng, groups),
            "no_unshard_in_backward": {group for group in groups if rng.random() < 0.1},
        },
        recompute=rng.choice(["no", "yes", "alone"]),
        accumulate=rng.random() < 0.3,
    )


class Rank:
    """One rank's steps; `log` has what each event gathers."""

    def __init__(self, drawn: Drawn, seed: int) -> None:
        self.drawn, self.rng, self.log = drawn, random.Random(seed), typing.cast("Log", [])
        self.schedule = UnshardSchedule(nbytes=drawn.nbytes)
        options = {"several_modules": drawn.lists, **drawn.schedule_options}
        for name, value in options.items():
            setattr(self.schedule.options, name, value)

    def note(self, actions: list[Action]) -> None:
        gathered = [action for action in actions if action[0] in (Op.GATHER, Op.PREFETCH)]
        if gathered:
            self.log.append(gathered)

    def forward(self, order: list[int]) -> tuple[int, list[tuple[int, int]]]:
        """Make a pass; return its number, and how many modules ran in each visit."""
        root, needs_backward = self.drawn.num_groups, self.drawn.recompute != "alone"
        self.schedule.begin_pass(root="root")
        self.note(self.schedule.enter_forward(root))
        visits = [(g, self.rng.randint(1, 4) if g in self.drawn.lists else 1) for g in order]
        for group, number in visits:
            for _ in range(number):
                self.note(self.schedule.enter_forward(group))
                self.note(self.schedule.exit_forward(group, needs_backward=needs_backward))
        self.note(self.schedule.exit_forward(root, needs_backward=True, reports_exit=False))
        self.note(self.schedule.end_pass(needs_backward=True))
        return self.schedule.current_pass, visits

    def backward(self, number: int, visits: list[tuple[int, int]]) -> None:
        self.log.append("backward")
        self.note(self.schedule.enter_backward(self.drawn.num_groups, number))
        left = dict.fromkeys(range(self.drawn.num_groups), 0)
        for group, modules in visits:
            left[group] += modules
        in_pass = None if self.drawn.recompute == "alone" else number
        for group, modules in reversed(visits):
            for _ in range(modules if self.drawn.recompute != "no" else 0):
                self.note(self.schedule.enter_recompute(group))
                self.note(self.schedule.exit_recompute(group))
            for _ in range(modules):
                self.note(self.schedule.enter_backward(group, in_pass))
                left[group] -= 1
                is_last = in_pass is not None and not left[group]
                self.note(self.schedule.exit_backward(group, in_pass, is_last=is_last))
        self.note(self.schedule.end_backward())

    def train(self) -> Log:
        together = 2 if self.drawn.accumulate else 1
        for first in range(0, len(self.drawn.passes), together):
            made = [self.forward(each) for each in self.drawn.passes[first : first + together]]
            for number, visits in reversed(made):
                self.backward(number, visits)
        return self.log


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_ranks_gather_alike(first: int) -> None:
    for number in range(first, first + 100):
        drawn = draw(number)
        logs = [Rank(drawn, seed).train() for seed in range(3)]
        assert logs[0] == logs[1] == logs[2], (number, drawn)
