"""Modules that several parents share: which group has their parameters."""

from __future__ import annotations

import pytest
from torch import nn

from shardkit import auto_shard
from wrapped_models import FeedForward, SharedLayers, SharingBlock

pytestmark = pytest.mark.helpers


def test_a_shared_module_belongs_to_what_is_around_all_of_its_parents() -> None:
    plan = auto_shard(SharedLayers(num_blocks=3), 4, SharingBlock, apply=False)
    assert [group.num_params for group in plan.groups] == [2, 2, 2, 3 + 4]
    assert [group.shared for group in plan.groups] == [(), (), (), ("blocks.0.shared",)]
    assert "shared: blocks.0.shared" in str(plan)
    assert not any(group.tied for group in plan.groups)


def test_a_unit_in_a_shared_module_keeps_its_parameters() -> None:
    units = {"blocks.*": {}, "blocks.0.shared.fc1": {}}
    plan = auto_shard(SharedLayers(num_blocks=2), 4, units, apply=False)
    assert {group.name: group.num_params for group in plan.groups} == {
        "blocks.0.shared.fc1": 2,
        "blocks.0": 2,
        "blocks.1": 2,
        "the root": 3 + 2,
    }


def test_a_list_of_all_parents_holds_a_shared_module() -> None:
    plan = auto_shard(SharedLayers(num_blocks=2), 4, {("blocks.*",): {}}, apply=False)
    assert [(group.num_params, group.shared, group.tied) for group in plan.groups] == [
        (2 * 2 + 4, (), ()),
        (3, (), ()),
    ]


def test_a_shared_module_may_be_a_group() -> None:
    plan = auto_shard(SharedLayers(num_blocks=2), 4, {SharingBlock, FeedForward}, apply=False)
    assert plan.groups[0].names == ("blocks.0.shared",)
    assert [group.num_params for group in plan.groups] == [4, 2, 2, 3]


def test_a_unit_that_has_shared_modules_alone_has_no_group() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    plan = auto_shard(model, 4, {"0": {}, "1": {}}, apply=False)
    assert plan.without_group == ("0", "1")
    assert "no groups of their own (tied or shared): 0; 1" in str(plan)


def test_a_module_shared_in_a_part_belongs_to_the_part() -> None:
    """Not to the root: every path to it goes through the part."""
    model = nn.Sequential(nn.Sequential(*SharedLayers(num_blocks=2).blocks), nn.Linear(32, 2))
    plan = auto_shard(model, 4, {"0": {}, "0.*": {}}, apply=False)
    assert [(group.name, group.num_params) for group in plan.groups] == [
        ("0.0", 2),
        ("0.1", 2),
        ("0", 4),
        ("the root", 2),
    ]
    assert plan.groups[2].shared == ("0.0.shared",)


def test_a_weight_tied_to_a_shared_module_belongs_to_what_is_around_both() -> None:
    model = SharedLayers(num_blocks=2)
    model.blocks[1].own.weight = model.blocks[0].shared.fc1.weight
    plan = auto_shard(model, 4, {SharingBlock, FeedForward}, apply=False)
    assert [group.num_params for group in plan.groups] == [3, 2, 1, 4]
    assert plan.groups[-1].tied == ("blocks.0.shared.fc1.weight",)


def test_neighbours_that_share_a_module_with_another_place_are_planned() -> None:
    """The second layer is in the first one as well, and beside it."""
    inner = nn.Linear(600, 600)
    outer = nn.Sequential(inner, nn.Linear(600, 600))
    model = nn.Sequential(outer, inner, *(nn.Linear(600, 600) for _ in range(6)))
    names = [group.names for group in auto_shard(model, 4, apply=False).groups]
    assert ("0.0",) in names
    assert ("0",) in names
