"""A profile of the ranks of this machine, measured in short."""

from __future__ import annotations

import typing

import pytest

from shardkit.planning import _calibrate
from shardkit.planning._profile import profile_text, read_profile

if typing.TYPE_CHECKING:
    import pathlib

    from shardkit.planning._profile import HardwareProfile
    from workers import Spawn


def measure() -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_calibrate, "_WINDOW_S", 0.002)
        patch.setattr(_calibrate, "_PRODUCTS", (32, 256))
        patch.setattr(_calibrate, "_MEMORY", (2**12, 2**20))
        patch.setattr(_calibrate, "_SENT", (2**14, 2**20))
        patch.setenv("WORLD_SIZE", "2")
        return _calibrate.calibrate("cpu")


@pytest.mark.helpers
def test_ranks_measure_one_profile_that_is_read_again(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    first, second = spawn(measure, 2)
    assert first == second
    assert {(link.op, link.num_ranks, link.span) for link in first.links} == {
        ("all_gather", 2, 2),
        ("reduce_scatter", 2, 2),
        ("all_reduce", 2, 2),
    }
    assert first.products["float32"][1][1] > 1e8
    assert -1 <= first.overlap <= 1
    path = tmp_path / "here.toml"
    path.write_text(profile_text(first, "Of a test."))
    assert read_profile(str(path)).device == "cpu"
