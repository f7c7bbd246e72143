"""Models whose ranks may not hold them whole: their memory is limited, each in its own process."""

from __future__ import annotations

import json
import pathlib
import typing

import pytest
from larger_than_memory import plain_digest

from launching import start_ranks

SCRIPT = str(pathlib.Path(__file__).with_name("larger_than_memory.py"))
WHOLE_MIB = 188
LAYER_MIB = 4
LIMIT_MIB = 160
SLACK_MIB = 8
"""The allocator's and Python's own, and forwards and backwards of one row."""


def run(way: str, world_size: int, limit_mib: float) -> list[dict[str, typing.Any]]:
    ended = start_ranks([SCRIPT, way, str(limit_mib)], world_size, limit_s=150)
    assert [each.code for each in ended] == [0] * world_size, ended[0].output
    lines = [line for each in ended for line in each.output.splitlines() if "RESULT" in line]
    return [json.loads(line.split("RESULT")[1]) for line in lines]


@pytest.fixture(scope="module")
def plain() -> str:
    return plain_digest()


@pytest.mark.parametrize(("way", "world_size"), [("build", 2), ("build", 4), ("from_meta", 4)])
def test_the_peak_is_a_layer_above_the_shard(plain: str, way: str, world_size: int) -> None:
    """The limit holds for a step as well: gradients as large as the shard, and unsharded layers.

    At two ranks the state of a step is as large as the whole model, which a limit cannot tell.
    """
    for found in run(way, world_size, LIMIT_MIB if world_size == 4 else 2 * WHOLE_MIB):
        assert found["shards"] == pytest.approx(WHOLE_MIB / world_size, abs=1)
        assert found["grown"] < found["shards"] + 2 * LAYER_MIB + SLACK_MIB
        assert found["digest"] == plain


@pytest.mark.parametrize("way", ["build", "from_meta"])
def test_one_rank_has_the_same_values(plain: str, way: str) -> None:
    (found,) = run(way, 1, 4 * WHOLE_MIB)
    assert found["grown"] < found["shards"] + 2 * LAYER_MIB + SLACK_MIB
    assert found["digest"] == plain


def test_the_limit_is_one() -> None:
    """The whole model does not fit."""
    ended = start_ranks([SCRIPT, "whole_first", str(LIMIT_MIB)], 1, limit_s=100)
    for each in ended:
        assert each.code != 0
        assert "can't allocate memory" in each.output
