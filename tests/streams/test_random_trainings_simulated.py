"""Random trainings on the simulated accelerator: every use of memory is ordered."""

from __future__ import annotations

import typing

import pytest
from simulation import simulation
from test_scenarios import OPTIONS

from random_trainings import worst_difference
from reference import make_mesh

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.streams


def failures(numbers: range, shape: tuple[int, ...], options: dict[str, bool]) -> dict[int, str]:
    """Return what is wrong, by the number of the training."""
    found = {}
    for number in numbers:
        try:
            with simulation(**options):
                difference = worst_difference(number, make_mesh(shape))
        except AssertionError as error:
            found[number] = str(error)
        else:
            if difference >= 1e-12:
                found[number] = f"differs by {difference}"
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_any_training_is_ordered(spawn: Spawn, options: str) -> None:
    first = 10 * list(OPTIONS).index(options)
    for found in spawn(failures, 2, range(first, first + 10), (2,), OPTIONS[options]):
        assert not found, found
