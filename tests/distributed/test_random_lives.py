"""Random lives of trainings on gloo ranks: each equals the plain training."""

from __future__ import annotations

import typing

import pytest

from random_lives import worst_differences

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.helpers


def test_any_life_equals_the_plain_one(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    for found in spawn(worst_differences, 2, range(20, 60), str(tmp_path), timeout_s=120):
        assert max(found.values()) < 1e-9, found
