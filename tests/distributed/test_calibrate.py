"""A profile of the ranks of this machine, measured in short."""

from __future__ import annotations

import typing

import pytest

import shardkit
from shardkit.planning import _calibrate
from shardkit.planning._profile import HardwareProfile, profile_text, read_profile

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn


def measure() -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_calibrate, "_ROUNDS", 2)
        patch.setattr(_calibrate, "_WINDOW_S", 0.002)
        patch.setattr(_calibrate, "_PRODUCTS", (32, 256))
        patch.setattr(_calibrate, "_MEMORY", (2**12, 2**20))
        patch.setattr(_calibrate, "_SENT", (2**14, 2**20))
        patch.setenv("WORLD_SIZE", "2")
        return _calibrate.calibrate("cpu")


def measure_by_a_clock_that_is_set() -> float:
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_calibrate.time, "perf_counter", lambda: now)
        patch.setattr(_calibrate, "_WINDOW_S", 0.0)
        mesh = shardkit.init_device_mesh("cpu", (2,))
        times = iter([1.0, 1.0, *([2.0, 9.0, 2.0] if mesh.get_rank() else [9.0, 1.0, 1.0])])

        def call() -> None:
            nonlocal now
            now += next(times)

        clock = _calibrate._Clock(mesh, "cpu")  # noqa: SLF001 - its numbers are those of no clock
        probe = clock.add(call)
        for _ in range(3):
            clock.measure()
        clock.settle()
    return probe.seconds


@pytest.mark.helpers
def test_a_time_is_the_median_of_what_the_slowest_rank_takes(spawn: Spawn) -> None:
    # Rounds take 9, 9 and 2 seconds.
    assert spawn(measure_by_a_clock_that_is_set, 2) == [9.0, 9.0]


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
