"""Sequences of what users do, found by hypothesis, to a sharded model and its plain twin."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import typing

import hypothesis
import pytest
import twins
from defects import DEFECTS
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from simulation import simulated

from shardkit._compat import torch_tensors
from workers import Spawn, WorkerError

if typing.TYPE_CHECKING:
    import pathlib


pytestmark = pytest.mark.helpers

NUM_EXAMPLES = int(os.environ.get("SHARDKIT_TEST_SEQUENCES", "0"))
"""For each mesh; 0: few, as one of many tests."""
STEPS = 25
NUM_DRAWN = 100 if NUM_EXAMPLES else 8
"""Sequences that are drawn without hypothesis; a defect must be found in one of them."""
MESHES = [(2,), (2, 2)]
if NUM_EXAMPLES:
    MESHES += [(1,), (3,), (4,), (2, 3)]


def machine(spawn: Spawn, shape: tuple[int, ...], *args: object) -> type[RuleBasedStateMachine]:
    """Return a machine whose rules are the actions; ranks perform all of them in one call.

    Args:
        spawn: The fixture.
        shape: Of the mesh.
        *args: Of `twins.perform`, after the actions.
    """

    class Machine(RuleBasedStateMachine):
        layout = twins.LAYOUTS[0]

        def __init__(self) -> None:
            super().__init__()
            self.actions: list[tuple[str, list[int]]] = []

        @initialize(layout=st.sampled_from(twins.LAYOUTS))
        def shard(self, layout: str) -> None:
            self.layout = layout

        def teardown(self) -> None:
            try:
                spawn(twins.perform, math.prod(shape), shape, self.layout, self.actions, *args)
            except Exception as error:
                error.add_note(twins.script(shape, self.layout, self.actions))
                raise

    def rule_of(name: str, num: int) -> typing.Any:
        def note(self: Machine, numbers: list[int]) -> None:
            self.actions.append((name, numbers))

        note.__name__ = name
        return rule(numbers=st.lists(st.integers(0, 9), min_size=num, max_size=num))(note)

    for name, num in twins.ACTIONS.items():
        setattr(Machine, name, rule_of(name, num))
    return Machine


def settings(num_examples: int, **options: typing.Any) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=num_examples,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_any_sequence_of_actions_is_that_of_the_plain_model(
    spawn: Spawn, shape: tuple[int, ...]
) -> None:
    run_state_machine_as_test(machine(spawn, shape), settings=settings(NUM_EXAMPLES or 6))


@pytest.mark.skipif(
    not torch_tensors.HAS_STORAGE_SWAP,
    reason="the simulated device swaps storages, which torch before 2.12 cannot",
)
@pytest.mark.parametrize("shape", [(2,), (2, 2)] if NUM_EXAMPLES else [(2,)], ids=str)
def test_drawn_sequences_on_a_simulated_accelerator(spawn: Spawn, shape: tuple[int, ...]) -> None:
    for seed in range(NUM_DRAWN // 2):
        layout, actions = drawn(seed)
        # A copy of a state does not say that it belongs to the host. Compute adds to errors of
        # PowerSGD, and the stream that their memory belongs to does not wait for that at the end.
        if layout in ("offloaded", "compressed"):
            layout = "layers"
        # Nor does the number in `param[0] = 0.1`, of which torch makes a tensor.
        chosen = [each for each in actions if each[0] != "write" or each[1][1] % 4 != 1]
        spawn(simulated, math.prod(shape), twins.perform, shape, layout, chosen)


# --- defects --------------------------------------------------------------------------------------

SOME = [
    "a hook that was removed is called again",
    "a value that is loaded is lost",
    "what was not synced outlives an exception",
]


def drawn(seed: int) -> tuple[str, list[tuple[str, list[int]]]]:
    """Draw a way to shard and actions, all alike often: hypothesis tries few kinds at first."""
    draw = random.Random(seed)
    names = draw.choices(list(twins.ACTIONS), k=STEPS)
    actions = [(name, [draw.randrange(10) for _ in range(twins.ACTIONS[name])]) for name in names]
    return draw.choice(twins.LAYOUTS), actions


@pytest.mark.parametrize("defect", DEFECTS if NUM_EXAMPLES else SOME)
def test_a_defect_is_found(spawn: Spawn, defect: str) -> None:
    with pytest.raises(WorkerError):
        perform_drawn(spawn, (2, 2) if "replicas" in defect else (2,), defect)


@pytest.mark.parametrize("shape", [(2,), (2, 2)] if NUM_EXAMPLES else [(2,)], ids=str)
def test_without_a_defect_nothing_is_found(spawn: Spawn, shape: tuple[int, ...]) -> None:
    perform_drawn(spawn, shape)


def perform_drawn(spawn: Spawn, shape: tuple[int, ...], defect: str | None = None) -> None:
    for seed in range(NUM_DRAWN):
        spawn(twins.perform, math.prod(shape), shape, *drawn(seed), defect)


@pytest.mark.skipif(not NUM_EXAMPLES, reason="takes longer than most: run by `nox -s sequences`")
def test_a_failure_is_a_short_program(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    with pytest.raises(WorkerError) as caught:
        run_state_machine_as_test(
            machine(spawn, (2,), "a hook that was removed is called again"),
            settings=settings(50, derandomize=True),
        )
    program = next(note for note in caught.value.__notes__ if "Twins(" in note)
    assert program.count("twins.do(") <= 4
    path = tmp_path / "script.py"
    path.write_text(program)
    start = program.splitlines()[0].partition("torchrun ")[2].split()[:-1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", *start, str(path)]
    subprocess.run(command, env=environment, check=True)  # The defect is not there.
