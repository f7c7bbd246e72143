"""Random compositions of parallelisms on gloo ranks: each training equals the plain one."""

from __future__ import annotations

import typing

import pytest

from random_compositions import worst_differences

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers


@pytest.mark.parametrize(
    ("num_ranks", "numbers"), [(2, range(30)), (4, range(30, 34))], ids=["2 ranks", "4 ranks"]
)
def test_any_composition_equals_the_plain_model(
    spawn: Spawn, num_ranks: int, numbers: range
) -> None:
    for found in spawn(worst_differences, num_ranks, numbers, timeout_s=150):
        assert max(found.values()) < 1e-11, found
