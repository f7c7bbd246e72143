"""Laws of who owns which matrix, and of what ranks send each other for it."""

from __future__ import annotations

import itertools
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit._layout import Box, FlatLayout, Part
from shardkit.optim._owners import (
    HeldPart,
    Spread,
    Traffic,
    assign_owners,
    loads_of,
    matrix_cost,
    owned_layout,
    plan_batches,
    plan_traffic,
)

if typing.TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


shapes = st.lists(
    st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=12
)
costs = st.lists(st.integers(0, 10_000), max_size=60)

MAX_RATIO = 1.15
NUM_RANKS = (8, 16, 32, 64, 128, 256, 512)


# --- owners ---------------------------------------------------------------------------------------


def least_load(costs: Sequence[float], num_ranks: int) -> float:
    """Return a load that some rank has at least, however whole matrices are given out.

    The largest of: the mean; the dearest matrix; and for each k what k + 1 of the k N + 1 dearest
    ones cost at least, since some rank has so many of them.
    """
    if not costs:
        return 0
    best = max(sum(costs) / num_ranks, *costs) if len(costs) > 1 else costs[0]
    dearest = sorted(costs, reverse=True)
    for last in range(num_ranks, len(dearest), num_ranks):
        together = last // num_ranks + 1
        best = max(best, sum(dearest[last + 1 - together : last + 1]))
    return best


@given(costs=costs, num_ranks=st.integers(1, 40))
def test_no_rank_has_more_than_the_bound_of_the_algorithm(costs: list[int], num_ranks: int) -> None:
    """Graham's bound for the dearest first, against what some rank must have anyway."""
    owners = assign_owners(costs, num_ranks)
    assert owners == assign_owners(costs, num_ranks), "the same on all ranks"
    loads = loads_of(costs, owners, num_ranks)
    assert sum(loads) == sum(costs)
    assert least_load(costs, num_ranks) <= max(loads)
    # A load is at most the mean and the cost of the matrix that came last to that rank.
    assert max(loads) <= sum(costs) / num_ranks + max(costs, default=0)


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    num_ranks=st.integers(1, 4),
)
def test_the_least_load_is_below_what_any_assignment_has(costs: list[int], num_ranks: int) -> None:
    every = itertools.product(range(num_ranks), repeat=len(costs))
    best = min(max(loads_of(costs, owners, num_ranks)) for owners in every)
    assert least_load(costs, num_ranks) <= best
    assert max(loads_of(costs, assign_owners(costs, num_ranks), num_ranks)) <= best * 4 / 3


@given(costs=costs, start=st.lists(st.integers(0, 5_000), min_size=1, max_size=9))
def test_loads_from_before_are_counted(costs: list[int], start: list[int]) -> None:
    owners = assign_owners(costs, len(start), start)
    loads = [a + b for a, b in zip(start, loads_of(costs, owners, len(start)), strict=True)]
    assert max(loads) <= max(*start, sum(loads) / len(start) + max(costs, default=0))


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=40),
    st.integers(1, 6),
    st.integers(1, 2_000),
)
def test_each_matrix_is_in_one_batch(
    matrices: list[tuple[int, int]], num_ranks: int, batch_nbytes: int
) -> None:
    costs, nbytes = [a for a, _ in matrices], [b for _, b in matrices]
    owners = assign_owners(costs, num_ranks)
    batches = plan_batches(costs, nbytes, owners, batch_nbytes)
    assert sorted(itertools.chain(*batches)) == list(range(len(matrices)))
    assert all(batch == sorted(batch) and batch for batch in batches)
    if sum(nbytes) <= batch_nbytes:
        assert len(batches) <= 1


@given(shapes=shapes, world_size=st.integers(1, 6), data=st.data())
def test_an_owned_tensor_is_whole_at_one_rank(
    shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject
) -> None:
    shape = shapes[0]
    owner = data.draw(st.integers(0, world_size - 1))
    layout = owned_layout(shape, owner, world_size)
    numel = math.prod(shape)
    for rank in range(world_size):
        start, stop = layout.owned_range(0, rank)
        assert stop - start == (numel if rank == owner else 0)
        assert layout.shard_range(0, rank) == ((0, numel) if rank == owner and numel else (0, 0))
    assert list(layout.owners(0)) == ([owner] if numel else [])
    if numel:
        others = [owned_layout(shape, rank, world_size).cut(0) for rank in range(world_size)]
        assert others.count(layout.cut(0)) == 1


# --- the layers of real models --------------------------------------------------------------------


def llama(num_layers: int, dim: int, kv_dim: int, hidden: int) -> list[tuple[int, int]]:
    """Return the matrices of the layers, as Llama 3 has them."""
    layer = [(dim, dim), (kv_dim, dim), (kv_dim, dim), (dim, dim)]
    return [*layer, (hidden, dim), (hidden, dim), (dim, hidden)] * num_layers


MODELS = {"8B": llama(32, 4096, 1024, 14336), "70B": llama(80, 8192, 1024, 28672)}

# From here on one matrix of the feed-forward layer costs more than a rank's share.
FIRST_TOO_MANY = {"8B": 256, "70B": 512}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_layers_of_llama_are_balanced(model: str, num_ranks: int) -> None:
    costs = [matrix_cost(shape) for shape in MODELS[model]]
    largest = max(loads_of(costs, assign_owners(costs, num_ranks), num_ranks))
    mean = sum(costs) / num_ranks
    assert largest <= MAX_RATIO * least_load(costs, num_ranks)
    if num_ranks < FIRST_TOO_MANY[model]:
        assert largest <= MAX_RATIO * mean
    else:
        assert largest == max(costs) > MAX_RATIO * mean, "nobody has more than one of the largest"


# --- traffic --------------------------------------------------------------------------------------


class World(typing.NamedTuple):
    """Matrices spread over a mesh (replicate, shard)."""

    spreads: list[Spread]
    owners: list[int]
    num_members: int


@st.composite
def worlds(draw: st.DrawFn) -> World:
    found, copies, num_shards = draw(shapes), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    layout = FlatLayout.plan(found, world_size=num_shards, itemsize=draw(st.sampled_from([2, 8])))
    members = [(copy, place) for copy in range(copies) for place in range(num_shards)]
    spreads = [
        Spread(
            shape=shape,
            replicas=tuple(copy for copy, _ in members),
            layout=layout,
            index=index,
            places=tuple(place for _, place in members),
        )
        for index, shape in enumerate(found)
    ]
    owners = assign_owners([matrix_cost(shape) for shape in found], len(members))
    return World(spreads, owners, len(members))


@st.composite
def split_worlds(draw: st.DrawFn) -> World:
    """Matrices whose rows or columns are split over an axis of its own, then cut flat."""
    num_parts, num_shards = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    members = [(place, part) for place in range(num_shards) for part in range(num_parts)]
    found = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=5))
    spreads = []
    for shape in found:
        dim = draw(st.integers(0, 1))
        parts = []
        for place, part in members:
            chunk = -(-shape[dim] // num_parts)
            start, stop = (min(at * chunk, shape[dim]) for at in (part, part + 1))
            own = tuple(stop - start if d == dim else size for d, size in enumerate(shape))
            offsets = tuple(start if d == dim else 0 for d in range(2))
            layout = FlatLayout.plan([own], world_size=num_shards, itemsize=16)
            parts.append(HeldPart(*layout.owned_range(0, place), Part(own, offsets)))
        layout = FlatLayout.plan([shape], world_size=1, itemsize=16)
        nowhere = (0,) * len(members)
        spreads.append(Spread(shape, nowhere, layout, 0, nowhere, tuple(parts)))
    owners = assign_owners([matrix_cost(shape) for shape in found], len(members))
    return World(spreads, owners, len(members))


def elements(spread: Spread, member: int) -> Iterator[int]:
    """Yield the elements of the flattened whole that a member holds, in the order of its piece."""
    shape, boxes = spread.boxes_of(member)
    for box in boxes:
        yield from elements_of_box(shape, box)


def elements_of_box(shape: tuple[int, ...], box: Box) -> Iterator[int]:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True)]
    for place in itertools.product(*ranges):
        yield sum(i * stride for i, stride in zip(place, strides, strict=True))


@given(world=st.one_of(worlds(), split_worlds()))
def test_owners_get_each_element_once_and_all_members_get_theirs(world: World) -> None:
    spreads, owners, num = world
    indices = range(len(spreads))
    gradients = [plan_traffic(*world[:2], indices, me, of_values=False) for me in range(num)]
    values = [plan_traffic(*world[:2], indices, me, of_values=True) for me in range(num)]
    for plans in (gradients, values):
        for a, b in itertools.product(range(num), repeat=2):
            assert plans[a].sends[b] == plans[b].gets[a], "what one sends is what the other expects"
        assert all(not plan.sends[me] and not plan.gets[me] for me, plan in enumerate(plans))
    for index, (spread, owner) in enumerate(zip(spreads, owners, strict=True)):
        from_ = [m for m in range(num) if index in gradients[owner].gets[m]]
        held = itertools.chain(*(elements(spread, m) for m in (owner, *from_)))
        assert sorted(held) == list(range(math.prod(spread.shape)))
        for member in range(num):
            assert len(list(elements(spread, member))) == spread.numel_of(member)
            has = index in values[member].gets[owner] or member == owner
            assert has or spread.numel_of(member) == 0


def sent_numel(spreads: Sequence[Spread], traffic: Traffic, me: int, *, of_values: bool) -> int:
    """Return how many elements `me` sends: its pieces of gradients, or others' of values."""
    return sum(
        spreads[index].numel_of(member if of_values else me)
        for member, indices in enumerate(traffic.sends)
        for index in indices
    )


@given(world=worlds())
def test_bytes_are_those_of_the_table_of_costs(world: World) -> None:
    spreads, owners, num = world
    indices = range(len(spreads))
    copies = max(spreads[0].replicas) + 1
    gradients = values = 0
    for me in range(num):
        plan = plan_traffic(spreads, owners, indices, me, of_values=False)
        gradients += sent_numel(spreads, plan, me, of_values=False)
        plan = plan_traffic(spreads, owners, indices, me, of_values=True)
        values += sent_numel(spreads, plan, me, of_values=True)
    whole = sum(math.prod(spread.shape) for spread in spreads)
    kept = sum(s.numel_of(o) for s, o in zip(spreads, owners, strict=True))
    assert gradients == whole - kept
    assert values == copies * whole - kept
