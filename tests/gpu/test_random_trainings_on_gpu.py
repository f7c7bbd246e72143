"""On a card: random trainings, in which the ranks use different parameters."""

from __future__ import annotations

import typing

import pytest

import one_card
from one_card import make_card_mesh
from random_trainings import worst_differences

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


def differences(numbers: range, shape: tuple[int, ...]) -> dict[int, float]:
    return worst_differences(numbers, make_card_mesh(shape))


@pytest.mark.parametrize(
    ("num_ranks", "shape", "numbers"),
    [(1, (1,), range(24)), (2, (2,), range(24, 48)), (2, (2, 1), range(48, 60))],
    ids=["one rank", "2 ranks over gloo", "2 replicas over gloo"],
)
def test_any_training_equals_the_plain_one(
    on_card: Spawn, num_ranks: int, shape: tuple[int, ...], numbers: range
) -> None:
    for found in on_card(differences, num_ranks, numbers, shape):
        assert max(found.values()) < one_card.FP64_TOLERANCE, found
