"""Laws of the layout: ranges tile, nothing is lost, all ranks plan the same, starts are aligned."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import typing

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardkit
import strategies
from shardkit import LayoutError
from shardkit._layout import ALIGN_NBYTES, FlatLayout, align_up

if typing.TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Shape = tuple[int, ...]

layouts = st.builds(
    FlatLayout.plan,
    strategies.shape_lists,
    world_size=strategies.world_sizes,
    itemsize=strategies.itemsizes,
)
any_layouts = st.builds(
    FlatLayout.plan,
    strategies.any_shape_lists,
    world_size=st.one_of(strategies.world_sizes, st.integers(10, 16_384)),
    itemsize=strategies.itemsizes,
)


def params_and_ranks(layout: FlatLayout) -> Iterator[tuple[int, int]]:
    """Yield every (parameter, rank); of many ranks only those where something begins or ends."""
    for index, offset in enumerate(layout.offsets):
        near = {0, layout.world_size - 1}
        for place in (offset, offset + layout.numels[index]):
            rank = place // max(layout.shard_numel, 1)
            near.update((rank - 1, rank, rank + 1))
        ranks = range(layout.world_size) if layout.world_size <= 9 else sorted(near)
        yield from ((index, rank) for rank in ranks if 0 <= rank < layout.world_size)


# --- every element has one owner ----------------------------------------------------------------


@given(layout=layouts)
def test_ranges_tile_every_parameter_in_rank_order(layout: FlatLayout) -> None:
    for index, numel in enumerate(layout.numels):
        elements: list[int] = []
        for rank in range(layout.world_size):
            elements += range(*layout.owned_range(index, rank))
        assert elements == list(range(numel))


@given(layout=any_layouts)
def test_ranges_of_any_size_meet(layout: FlatLayout) -> None:
    for index, numel in enumerate(layout.numels):
        assert layout.owned_range(index, 0)[0] == 0
        assert layout.owned_range(index, layout.world_size - 1)[1] == numel
    for index, rank in params_and_ranks(layout):
        start, stop = layout.owned_range(index, rank)
        assert 0 <= start <= stop <= layout.numels[index]
        if rank > 0:
            assert layout.owned_range(index, rank - 1)[1] == start


@given(layout=layouts)
def test_pieces_in_a_shard_do_not_overlap(layout: FlatLayout) -> None:
    for rank in range(layout.world_size):
        taken: list[int] = []
        for index in range(len(layout.shapes)):
            taken += range(*layout.shard_range(index, rank))
        assert len(set(taken)) == len(taken)
        assert all(0 <= place < layout.shard_numel for place in taken)
        assert taken == sorted(taken)


# --- shard and unshard --------------------------------------------------------------------------

PADDING = -1


def numbered_params(layout: FlatLayout) -> list[list[int]]:
    """Return the flattened parameters; no number occurs twice."""
    numbers = iter(range(sum(layout.numels)))
    return [[next(numbers) for _ in range(numel)] for numel in layout.numels]


def cut(layout: FlatLayout, params: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Return a rank's shard."""
    shard = [PADDING] * layout.shard_numel
    for index, param in enumerate(params):
        start, stop = layout.owned_range(index, rank)
        to_start, to_stop = layout.shard_range(index, rank)
        shard[to_start:to_stop] = param[start:stop]
    return shard


def gather(layout: FlatLayout, shards: Sequence[Sequence[int]]) -> list[list[int]]:
    """Put the shards end to end, as an all-gather does; return the parameters seen in it."""
    flat = [element for shard in shards for element in shard]
    assert len(flat) == layout.padded_numel
    places = zip(layout.offsets, layout.numels, strict=True)
    return [flat[offset : offset + numel] for offset, numel in places]


@given(layout=layouts)
def test_unshard_inverts_shard(layout: FlatLayout) -> None:
    params = numbered_params(layout)
    shards = [cut(layout, params, rank) for rank in range(layout.world_size)]
    assert gather(layout, shards) == params
    assert [len(shard) for shard in shards] == [layout.shard_numel] * layout.world_size
    padding = sum(shard.count(PADDING) for shard in shards)
    assert padding == layout.padding_numel


@given(layout=any_layouts)
def test_owned_and_shard_range_are_the_same_elements(layout: FlatLayout) -> None:
    for index, rank in params_and_ranks(layout):
        start, stop = layout.owned_range(index, rank)
        in_shard = layout.shard_range(index, rank)
        if start == stop:
            assert in_shard == (0, 0)
            continue
        assert in_shard[1] - in_shard[0] == stop - start
        assert rank * layout.shard_numel + in_shard[0] == layout.offsets[index] + start
        assert 0 <= in_shard[0] < in_shard[1] <= layout.shard_numel


@given(layout=any_layouts)
def test_owners_are_the_ranks_that_own_something(layout: FlatLayout) -> None:
    for index, rank in params_and_ranks(layout):
        start, stop = layout.owned_range(index, rank)
        assert (rank in layout.owners(index)) == (start < stop)


@given(
    shapes=strategies.shape_lists,
    extra=strategies.shape_lists,
    world_size=strategies.world_sizes,
    itemsize=strategies.itemsizes,
)
@example(shapes=[(7,)], extra=[(1,)], world_size=3, itemsize=4)  # same place, other range size
def test_equal_cuts_mean_equal_pieces(
    shapes: list[Shape], extra: list[Shape], world_size: int, itemsize: int
) -> None:
    """Also of parameters of other shapes and other buckets."""

    def plan(shapes: Sequence[Shape]) -> FlatLayout:
        return FlatLayout.plan(shapes, world_size=world_size, itemsize=itemsize)

    one, flattened = plan(shapes), plan([(math.prod(shape),) for shape in shapes])
    longer = plan([*shapes, *extra])
    for index in range(len(shapes)):
        assert one.cut(index) == flattened.cut(index)
        for other in (flattened, longer):
            if one.cut(index) != other.cut(index):
                continue
            for rank in range(world_size):
                assert one.owned_range(index, rank) == other.owned_range(index, rank)


def test_other_cuts_are_told_apart() -> None:
    base = FlatLayout.plan([(8,), (40,)], world_size=4, itemsize=4).cut(1)
    others = (
        FlatLayout.plan([(8,), (40,)], world_size=3, itemsize=4),
        FlatLayout.plan([(8,), (40,)], world_size=5, itemsize=4),  # with ranges of the same size
        FlatLayout.plan([(12,), (40,)], world_size=4, itemsize=4),
        FlatLayout.plan([(8,), (36,)], world_size=4, itemsize=4),
        FlatLayout.plan([(8,), (40,), (400,)], world_size=4, itemsize=4),
    )
    for other in others:
        assert other.cut(1) != base


# --- all ranks plan the same --------------------------------------------------------------------


@given(
    shapes=strategies.any_shape_lists,
    world_size=strategies.world_sizes,
    itemsize=strategies.itemsizes,
)
def test_a_plan_depends_on_its_arguments_only(
    shapes: list[Shape], world_size: int, itemsize: int
) -> None:
    lists = [list(shape) for shape in shapes]
    one = FlatLayout.plan(shapes, world_size=world_size, itemsize=itemsize)
    other = FlatLayout.plan(lists, world_size=world_size, itemsize=itemsize)
    assert one == other
    assert hash(one) == hash(other)
    assert one.shapes == tuple(shapes)
    assert one.numels == tuple(math.prod(shape) for shape in shapes)
    assert one.world_size == world_size


# Without shardkit/__init__, which imports torch.
PLAN_ON_A_RANK = """
import sys, types
package = types.ModuleType("shardkit")
package.__path__ = sys.argv[1:]
sys.modules["shardkit"] = package
from shardkit._layout import FlatLayout
layout = FlatLayout.plan([(7, 13), (5,), (), (3, 2, 5)], world_size=4, itemsize=2)
print(layout, [layout.owned_range(i, r) for i in range(4) for r in range(4)])
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


def plan_on_rank(rank: int) -> list[str]:
    """Plan in a process of its own; return the lines it printed."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "PYTHONHASHSEED": str(rank + 1),
    }
    [path] = shardkit.__path__
    command = [sys.executable, "-c", PLAN_ON_A_RANK, path]
    return subprocess.check_output(command, env=environment, text=True).splitlines()


def test_ranks_plan_the_same_without_torch() -> None:
    plan, modules = plan_on_rank(0)
    assert plan_on_rank(3)[0] == plan
    assert plan.startswith("FlatLayout(")
    assert modules == "[]"


# --- alignment and padding ----------------------------------------------------------------------


@given(layout=any_layouts, itemsize=strategies.itemsizes)
def test_starts_are_aligned_in_every_dtype_not_smaller(layout: FlatLayout, itemsize: int) -> None:
    replanned = FlatLayout.plan(layout.shapes, world_size=layout.world_size, itemsize=itemsize)
    for wire_itemsize in (size for size in (1, 2, 4, 8) if size >= itemsize):
        for offset in (*replanned.offsets, replanned.shard_numel):
            assert offset * wire_itemsize % ALIGN_NBYTES == 0
    assert ALIGN_NBYTES == 16


@given(layout=any_layouts, itemsize=strategies.itemsizes)
def test_padding_is_under_16_bytes_per_parameter_and_rank(
    layout: FlatLayout, itemsize: int
) -> None:
    replanned = FlatLayout.plan(layout.shapes, world_size=layout.world_size, itemsize=itemsize)
    limit_nbytes = ALIGN_NBYTES * (len(replanned.shapes) + replanned.world_size)
    assert 0 <= replanned.padding_numel * itemsize < limit_nbytes
    assert replanned.padded_numel == replanned.padding_numel + sum(replanned.numels)
    assert replanned.offsets == tuple(sorted(replanned.offsets))


@given(numel=st.integers(0, 2**60), multiple=st.integers(1, 64))
def test_align_up_gives_the_next_multiple(numel: int, multiple: int) -> None:
    aligned = align_up(numel, multiple)
    assert aligned % multiple == 0
    assert numel <= aligned < numel + multiple


def attention_layer(hidden: int, ffn: int, key_value: int, *, biases: bool) -> list[Shape]:
    """Return the shapes of a layer of the Llama family."""
    shapes: list[Shape] = [(hidden, hidden), (key_value, hidden), (key_value, hidden)]
    shapes += [(hidden,), (key_value,), (key_value,)] if biases else []
    shapes += [(hidden, hidden), (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden,), (hidden,)]
    return shapes


GPT2_NORMS_AND_BIASES: list[Shape] = [(768,)] * 6 + [(2304,), (3072,)]
LAYERS: dict[str, list[Shape]] = {
    "gpt2": [*GPT2_NORMS_AND_BIASES, (2304, 768), (768, 768), (3072, 768), (768, 3072)],
    "qwen2.5-7b": attention_layer(3584, 18944, 512, biases=True),
    "llama-8b": attention_layer(4096, 14336, 1024, biases=False),
    "llama-70b": attention_layer(8192, 28672, 1024, biases=False),
}


@pytest.mark.parametrize(
    ("layer", "world_size"),
    [
        ("gpt2", 64),
        ("qwen2.5-7b", 7),
        ("qwen2.5-7b", 512),
        ("llama-8b", 9),
        ("llama-8b", 1024),
        ("llama-70b", 4096),
        ("llama-70b", 16_384),
    ],
)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_padding_of_large_layers_is_below_a_thousandth(
    layer: str, world_size: int, itemsize: int
) -> None:
    layout = FlatLayout.plan(LAYERS[layer], world_size=world_size, itemsize=itemsize)
    assert layout.padding_numel < 0.001 * sum(layout.numels)


# --- small and large ----------------------------------------------------------------------------


def test_more_ranks_than_elements() -> None:
    """A scalar and a vector of 5 floats on 9 ranks: one 16-byte range each, the last ones empty."""
    layout = FlatLayout.plan([(), (5,)], world_size=9, itemsize=4)
    assert layout.offsets == (0, 4)
    assert layout.shard_numel == 4
    assert [layout.owned_range(0, rank) for rank in range(9)] == [(0, 1)] + [(1, 1)] * 8
    assert [layout.owned_range(1, r) for r in range(4)] == [(0, 0), (0, 4), (4, 5), (5, 5)]
    assert layout.owners(0) == range(1)
    assert layout.owners(1) == range(1, 3)


def test_a_cut_inside_a_parameter() -> None:
    """The picture in the module's docstring, in numbers."""
    layout = FlatLayout.plan([(3, 7), (3,), (5, 5)], world_size=4, itemsize=4)
    assert layout.offsets == (0, 24, 28)
    assert layout.shard_numel == 16
    assert layout.padding_numel == 64 - 21 - 3 - 25
    assert [layout.owned_range(0, r) for r in range(4)] == [(0, 16), (16, 21), (21, 21), (21, 21)]
    assert [layout.owned_range(2, r) for r in range(4)] == [(0, 0), (0, 4), (4, 20), (20, 25)]
    assert [layout.shard_range(2, r) for r in range(4)] == [(0, 0), (12, 16), (0, 16), (0, 5)]
    assert layout.owners(2) == range(1, 4)


@pytest.mark.parametrize("shapes", [[], [(0,)], [(3, 0), (0, 4)]])
def test_nothing_to_shard(shapes: list[Shape]) -> None:
    layout = FlatLayout.plan(shapes, world_size=4, itemsize=4)
    assert layout.shard_numel == layout.padded_numel == layout.padding_numel == 0
    for index in range(len(shapes)):
        assert [layout.owned_range(index, rank) for rank in range(4)] == [(0, 0)] * 4
        assert [layout.shard_range(index, rank) for rank in range(4)] == [(0, 0)] * 4
        assert len(layout.owners(index)) == 0


def test_an_empty_parameter_between_others() -> None:
    layout = FlatLayout.plan([(6,), (0, 5), (6,)], world_size=2, itemsize=4)
    assert layout.offsets == (0, 8, 8)
    assert len(layout.owners(1)) == 0
    assert layout.owned_range(2, 0) == (0, 0)
    assert layout.owned_range(2, 1) == (0, 6)


def test_one_rank_owns_all_without_end_padding_of_aligned_parameters() -> None:
    layout = FlatLayout.plan([(8, 8), (16,)], world_size=1, itemsize=4)
    assert layout.padding_numel == 0
    assert layout.owned_range(1, 0) == (0, 16)


def test_a_70b_layer_on_16384_ranks_takes_no_time() -> None:
    """Planning and all of one rank's ranges, for each of 80 layers: under 10 ms a layer."""
    num_layers, world_size = 80, 16_384
    start_s = time.perf_counter()
    for _ in range(num_layers):
        layout = FlatLayout.plan(LAYERS["llama-70b"], world_size=world_size, itemsize=2)
        for index in range(len(layout.shapes)):
            layout.owned_range(index, world_size - 1)
            layout.shard_range(index, world_size - 1)
            layout.owners(index)
    seconds_per_layer = (time.perf_counter() - start_s) / num_layers
    assert seconds_per_layer < 0.01
    assert sum(layout.numels) == 855_654_400
    assert layout.owners(0) == range(1285)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "itemsize"), [(0, 4), (-1, 4), (4, 0), (1, -2)])
def test_a_world_or_itemsize_below_one_is_refused(world_size: int, itemsize: int) -> None:
    expected = (
        rf"world_size and itemsize must be at least 1, got {world_size} and {itemsize}\. "
        r"Pass the size of the shard axis and the element size in bytes\."
    )
    with pytest.raises(LayoutError, match=expected):
        FlatLayout.plan([(2,)], world_size=world_size, itemsize=itemsize)


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (0, -1)])
def test_a_negative_dimension_is_refused(shape: Shape) -> None:
    with pytest.raises(LayoutError, match=r"not have negative dimensions, got \(.*-\d"):
        FlatLayout.plan([(2,), list(shape)], world_size=2, itemsize=4)
