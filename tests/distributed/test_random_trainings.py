"""Random trainings on gloo ranks: each equals the plain one."""

from __future__ import annotations

import typing

import pytest
import torch

from allocated import all_read_directly
from random_trainings import worst_differences
from reference import make_mesh

if typing.TYPE_CHECKING:
    from workers import Spawn


def differences(numbers: range, shape: tuple[int, ...]) -> dict[int, float]:
    return worst_differences(numbers, make_mesh(shape))


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((2,), range(60)), ((4,), range(60, 70)), ((2, 2), range(70, 80))],
    ids=["2 ranks", "4 ranks", "2 replicas"],
)
def test_any_training_equals_the_plain_one(
    spawn: Spawn, shape: tuple[int, ...], numbers: range
) -> None:
    for found in spawn(differences, torch.Size(shape).numel(), numbers, shape):
        assert max(found.values()) < 1e-12, found


def differences_of_direct_reads(numbers: range) -> dict[int, float]:
    with all_read_directly():
        return worst_differences(numbers, make_mesh((torch.distributed.get_world_size(),)))


@pytest.mark.parametrize(
    ("size", "numbers"), [(2, range(80, 110)), (4, range(110, 118))], ids=["2 ranks", "4 ranks"]
)
def test_trainings_whose_ranks_read_from_each_other(
    spawn: Spawn, size: int, numbers: range
) -> None:
    """Ranks that use different layers start exchanges, and wait for them, in different orders."""
    for found in spawn(differences_of_direct_reads, size, numbers):
        assert max(found.values()) < 1e-12, found
