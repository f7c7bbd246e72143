"""Models whose ranks may not hold them whole: their memory is limited, each in its own process."""

from __future__ import annotations

import json
import pathlib
import typing

import pytest
from larger_than_memory import plain_digest

from launching import start_ranks

pytestmark = pytest.mark.helpers

SCRIPT = str(pathlib.Path(__file__).with_name("larger_than_memory.py"))
WHOLE_MIB = 124
LAYER_MIB = 4
LIMIT_MIB = 100
SLACK_MIB = 8  # The allocator's and Python's own.


def run(way: str, world_size: int, limit_mib: float) -> list[dict[str, typing.Any]]:
    ended = start_ranks([SCRIPT, way, str(limit_mib)], world_size, limit_s=150)
    assert [each.code for each in ended] == [0] * world_size, ended[0].output
    lines = [line for each in ended for line in each.output.splitlines() if "RESULT" in line]
    return [json.loads(line.split("RESULT")[1]) for line in lines]


@pytest.fixture(scope="module")
def plain() -> str:
    return plain_digest()


@pytest.mark.parametrize("way", ["build", "from_meta"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_peak_is_a_layer_above_the_shard(plain: str, way: str, world_size: int) -> None:
    for found in run(way, world_size, 0):
        assert found["shards"] == pytest.approx(WHOLE_MIB / world_size, abs=1)
        assert found["grown"] < found["shards"] + 2 * LAYER_MIB + SLACK_MIB
        assert found["digest"] == plain


@pytest.mark.parametrize("way", ["build", "from_meta"])
def test_a_model_is_made_and_takes_a_step_in_less_memory_than_it_has(plain: str, way: str) -> None:
    for found in run(way, 4, LIMIT_MIB):
        assert found["digest"] == plain


def test_the_limit_is_one() -> None:
    """The whole model does not fit."""
    ended = start_ranks([SCRIPT, "whole_first", str(LIMIT_MIB)], 1, limit_s=100)
    for each in ended:
        assert each.code != 0
        assert "can't allocate memory" in each.output
