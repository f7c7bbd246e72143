"""Random trainings on gloo ranks: each equals the plain one."""

from __future__ import annotations

import typing

import pytest
import torch

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
