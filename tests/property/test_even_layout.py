"""Laws of the even layout: parts are equal, tile every parameter, and lie apart in a shard."""

from __future__ import annotations

import math
import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import strategies
from shardkit import LayoutError
from shardkit._layout import ALIGN_NUMEL, EvenLayout, FlatLayout

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

layouts = st.builds(EvenLayout.plan, strategies.shape_lists, world_size=strategies.world_sizes)


@given(layout=layouts)
def test_ranges_tile_every_parameter_in_rank_order(layout: EvenLayout) -> None:
    for index, numel in enumerate(layout.numels):
        elements: list[int] = []
        for rank in range(layout.world_size):
            elements += range(*layout.owned_range(index, rank))
        assert elements == list(range(numel))


@given(layout=layouts)
def test_parts_lie_apart_in_a_shard_of_whole_lanes(layout: EvenLayout) -> None:
    taken: list[int] = []
    for index in range(len(layout.shapes)):
        taken += range(*layout.columns(index))
    assert taken == list(range(layout.shard_numel - layout.tail_numel))
    assert layout.shard_numel % ALIGN_NUMEL == 0
    assert layout.tail_numel < ALIGN_NUMEL


@given(layout=layouts)
def test_a_piece_lies_at_the_start_of_its_columns(layout: EvenLayout) -> None:
    for index in range(len(layout.shapes)):
        for rank in range(layout.world_size):
            owned = layout.owned_range(index, rank)
            start, stop = layout.shard_range(index, rank)
            assert stop - start == owned[1] - owned[0]
            if start < stop:
                assert start == layout.columns(index)[0]
                assert stop <= layout.columns(index)[1]


@given(layout=layouts)
def test_owners_are_the_ranks_that_own_something(layout: EvenLayout) -> None:
    for index in range(len(layout.shapes)):
        owners = [
            rank
            for rank in range(layout.world_size)
            if layout.owned_range(index, rank)[0] < layout.owned_range(index, rank)[1]
        ]
        assert list(layout.owners(index)) == owners


@given(layout=layouts)
def test_a_flat_layout_of_one_with_the_same_cut_owns_the_same(layout: EvenLayout) -> None:
    for index, shape in enumerate(layout.shapes):
        flat = FlatLayout.of_one(shape, layout.cut(index))
        for rank in range(layout.world_size):
            assert flat.owned_range(0, rank) == layout.owned_range(index, rank)


@given(layout=layouts)
def test_padding_is_what_no_parameter_takes(layout: EvenLayout) -> None:
    assert layout.padded_numel == layout.padding_numel + sum(layout.numels)
    parts = sum(map(layout.padded_part_numel, range(len(layout.shapes))))
    assert parts - sum(layout.numels) <= (layout.world_size - 1) * len(layout.shapes)


@given(layout=layouts)
def test_columns_of_gathered_shards_are_the_parameters(layout: EvenLayout) -> None:
    params = [torch.randn(shape) for shape in layout.shapes]
    rows = torch.zeros(layout.world_size, layout.shard_numel)
    for index, param in enumerate(params):
        for rank in range(layout.world_size):
            start, stop = layout.shard_range(index, rank)
            rows[rank, start:stop] = param.reshape(-1)[slice(*layout.owned_range(index, rank))]
    for index, param in enumerate(params):
        flat = rows[:, slice(*layout.columns(index))].reshape(-1)[: math.prod(param.shape)]
        assert torch.equal(flat.view(param.shape), param)


@pytest.mark.parametrize(("shapes", "world_size"), [([(2,)], 0), ([(2, -1)], 2)])
def test_nonsense_is_refused(shapes: Sequence[Sequence[int]], world_size: int) -> None:
    with pytest.raises(LayoutError):
        EvenLayout.plan(shapes, world_size=world_size)
