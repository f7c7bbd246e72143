"""A profile names the groups that are gathered, reduced and waited for."""

from __future__ import annotations

import typing

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from models import CASES
from reference import make_mesh, my_batch, shard
from shardkit._runtime import traffic

if typing.TYPE_CHECKING:
    from workers import Spawn


def names_in_a_profile() -> list[str]:
    """Return the names of ranges in the third step."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    model = shard(case, case.make(), make_mesh((2,)), reshard_after_forward=True)
    for step in range(2):
        case.loss(model, my_batch(case, step)).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        case.loss(model, my_batch(case, 2)).backward()
    verbs = ("gather ", "reduce ", "await ")
    return [event.name for event in profiler.events() if event.name.startswith(verbs)]


def test_groups_have_names_in_a_profile(spawn: Spawn) -> None:
    for names in spawn(names_in_a_profile, 2):
        for verb in ("gather", "reduce", "await gather", "await reduce"):
            of = " ".join(name for name in names if name.startswith(f"{verb} "))
            assert "blocks.0" in of, (verb, names)
            assert "blocks.1" in of, (verb, names)


def count_ranges_without_a_profiler() -> int:
    """Train a step; return how many ranges were made."""
    made: list[str] = []

    def note(name: str) -> typing.Any:
        made.append(name)
        return record_function(name)

    case = CASES["gpt"]
    torch.manual_seed(0)
    model = shard(case, case.make(), make_mesh((2,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traffic, "record_function", note)
        case.loss(model, my_batch(case, 0)).backward()
    return len(made)


def test_without_a_profiler_no_range_is_made(spawn: Spawn) -> None:
    assert spawn(count_ranges_without_a_profiler, 2) == [0, 0]
