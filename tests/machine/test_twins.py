"""Sequences of what users do, found by hypothesis, to a sharded model and its plain twin."""

from __future__ import annotations

import math
import os
import typing

import hypothesis
import pytest
import twins
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers

NUM_EXAMPLES = int(os.environ.get("SHARDKIT_TEST_SEQUENCES", "2"))
STEPS = 25


def machine(spawn: Spawn, shape: tuple[int, ...]) -> type[RuleBasedStateMachine]:
    """Return a machine whose rules are the actions; ranks perform all of them in one call."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.actions: list[tuple[str, list[int]]] = []

        def teardown(self) -> None:
            spawn(twins.perform, math.prod(shape), shape, self.actions)

    def rule_of(name: str, num: int) -> typing.Any:
        def note(self: Machine, numbers: list[int]) -> None:
            self.actions.append((name, numbers))

        note.__name__ = name
        return rule(numbers=st.lists(st.integers(0, 9), min_size=num, max_size=num))(note)

    for name, num in twins.ACTIONS.items():
        setattr(Machine, name, rule_of(name, num))
    return Machine


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_any_sequence_of_actions_is_that_of_the_plain_model(
    spawn: Spawn, shape: tuple[int, ...]
) -> None:
    run_state_machine_as_test(
        machine(spawn, shape),
        settings=hypothesis.settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
