"""Pieces that only some ranks pickle, after the last backward of a run."""

from __future__ import annotations

import pathlib

import pytest

from launching import start_ranks

pytestmark = pytest.mark.helpers

SCRIPT = pathlib.Path(__file__).with_name("pieces_of_one_rank.py")


def said(who: str, end: str, world_size: int) -> str:
    ranks = start_ranks([str(SCRIPT), who, end], world_size, limit_s=60)
    assert [rank.code for rank in ranks] == [0] * world_size, ranks
    return "".join(rank.output for rank in ranks)


@pytest.mark.parametrize(("who", "end"), [("one", "last line"), ("another", "destroys")])
def test_what_one_rank_saves_is_told_at_the_end(who: str, end: str) -> None:
    output = said(who, end, 2)
    assert output.count("one rank has pickled its shard of") == 1, output
    assert "save_full(path, model) on all ranks" in output


@pytest.mark.parametrize(("who", "world_size"), [("all", 2), ("a replica", 4), ("nobody", 2)])
def test_what_makes_wholes_is_not_told(who: str, world_size: int) -> None:
    assert said(who, "last line", world_size) == ""
