"""Laws of boxes: those of a range tile it in order, are few, and put together give the tensor."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import strategies
from shardkit._layout import Box, FlatLayout, Part, boxes_of_range

Shape = tuple[int, ...]
Range = tuple[Shape, int, int]


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    shape = draw(strategies.any_shapes)
    first = draw(st.integers(0, math.prod(shape)))
    second = draw(st.integers(0, math.prod(shape)))
    return shape, min(first, second), max(first, second)


def first_element(box: Box, shape: Shape) -> int:
    """Return where a box begins in the flattened tensor."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(box.offsets))


@given(ranges())
@example(((), 0, 1))
@example(((), 0, 0))
@example(((0, 4), 0, 0))
@example(((5,), 1, 4))
@example(((4, 6), 4, 21))
@example(((3, 3, 3, 3), 1, 80))
def test_boxes_tile_the_range_in_order(drawn: Range) -> None:
    shape, start, stop = drawn
    boxes = boxes_of_range(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    position = start
    for box in boxes:
        assert box.start == position - start
        assert first_element(box, shape) == position
        assert box.numel > 0
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
            assert 0 <= offset < offset + size <= extent
        position += box.numel
    assert position == stop


@given(ranges())
def test_a_box_is_contiguous(drawn: Range) -> None:
    """Up to one dimension its sizes are 1, behind it the tensor's own."""
    shape, start, stop = drawn
    for box in boxes_of_range(shape, start, stop):
        wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if wide:
            behind = slice(wide[0] + 1, None)
            assert box.sizes[behind] == shape[behind]
            assert not any(box.offsets[behind])


@given(strategies.shapes, st.data())
def test_boxes_hold_the_elements_of_the_range(shape: Shape, data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    for box in boxes_of_range(shape, start, stop):
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        expected = range(start + box.start, start + box.stop)
        assert part.flatten().tolist() == list(expected)


@given(strategies.shapes, strategies.shapes)
def test_offsets_of_a_part_move_boxes(shape: Shape, moved: Shape) -> None:
    origin = (moved * len(shape))[: len(shape)] if moved else (0,) * len(shape)
    numel = math.prod(shape)
    for here, there in zip(
        boxes_of_range(shape, 0, numel),
        Part(shape, origin).boxes(0, numel),
        strict=True,
    ):
        assert there.offsets == tuple(map(sum, zip(here.offsets, origin, strict=True)))
        assert (there.sizes, there.start) == (here.sizes, here.start)


@given(strategies.shapes.filter(bool), st.integers(2, 3), st.integers(1, 3), st.data())
def test_a_part_may_be_a_chunk_of_each_group(
    shape: Shape, num_groups: int, num_chunks: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    chunk, behind = shape[dim], shape[dim + 1 :]
    group_size = num_chunks * chunk
    whole = torch.arange(math.prod(shape) * num_groups * num_chunks)
    first = data.draw(st.integers(0, num_chunks - 1)) * chunk
    grouped = whole.view(*shape[:dim], num_groups, group_size, *behind)
    held = grouped.narrow(dim + 1, first, chunk)
    offsets = tuple(first if each == dim + 1 else 0 for each in range(held.ndim))
    part = Part(tuple(held.shape), offsets, dim, group_size)
    start = data.draw(st.integers(0, held.numel()))
    stop = data.draw(st.integers(start, held.numel()))
    found, at = [], 0
    for box in part.boxes(start, stop):
        assert box.start == at
        at += box.numel
        view = whole.view(*shape[:dim], num_groups * group_size, *behind)
        for each, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            view = view.narrow(each, offset, size)
        found += view.flatten().tolist()
    assert found == held.flatten()[start:stop].tolist()


@given(strategies.shape_lists, st.lists(strategies.world_sizes, min_size=2, max_size=2))
def test_pieces_of_n_ranks_give_those_of_m(shapes: list[Shape], world_sizes: list[int]) -> None:
    """Written as boxes by any number of ranks, read as boxes by any other: the same elements."""
    saved, loaded = (
        FlatLayout.plan(shapes, world_size=world_size, itemsize=4) for world_size in world_sizes
    )
    for index, shape in enumerate(shapes):
        numel = math.prod(shape)
        file = torch.full(shape, -1)
        for rank in range(saved.world_size):
            start, stop = saved.owned_range(index, rank)
            piece = torch.arange(start, stop)
            for box in boxes_of_range(shape, start, stop):
                place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert (file[place] == -1).all(), "two ranks write one element"
                file[place] = piece[box.start : box.stop].view(box.sizes)
        assert file.flatten().tolist() == list(range(numel))
        for rank in range(loaded.world_size):
            start, stop = loaded.owned_range(index, rank)
            piece = torch.full((stop - start,), -1)
            for box in boxes_of_range(shape, start, stop):
                place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                piece[box.start : box.stop].view(box.sizes).copy_(file[place])
            assert piece.tolist() == list(range(start, stop))


def test_every_range_of_a_small_tensor() -> None:
    shape = (3, 3, 1, 3)
    numel = math.prod(shape)
    most = 0
    for start, stop in itertools.combinations(range(numel + 1), 2):
        boxes = boxes_of_range(shape, start, stop)
        assert sum(box.numel for box in boxes) == stop - start
        most = max(most, len(boxes))
    assert most == 2 * 3 - 1  # The dimension of one element adds none.
