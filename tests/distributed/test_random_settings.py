"""Random trainings with any choice of settings: each equals the plain one."""

from __future__ import annotations

import typing

import pytest
import torch

from random_settings import train_all

if typing.TYPE_CHECKING:
    from workers import Spawn


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((2,), [1007, 1053, *range(4)]), ((2, 2), [2012, 2064, 2099])],
    ids=["2 ranks", "2 replicas"],
)
def test_any_training_equals_the_plain_one(
    spawn: Spawn, shape: tuple[int, ...], numbers: list[int]
) -> None:
    spawn(train_all, torch.Size(shape).numel(), numbers, shape)
