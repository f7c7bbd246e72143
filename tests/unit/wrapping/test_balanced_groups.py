"""Groups that are chosen from sizes and order."""

from __future__ import annotations

import typing

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from models import GPT, ConvNet
from shardkit import MixedPrecisionPolicy, auto_shard
from shardkit._wrapping.policies import bounds, group_neighbours
from wrapped_models import Attention, Stack

if typing.TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.helpers

MIB = 1 << 20


def names(model: nn.Module, ranks: int = 4, **options: typing.Any) -> list[tuple[str, ...]]:
    plan = auto_shard(model, ranks, apply=False, **options)
    return [group.names for group in plan.groups]


# --- neighbours ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([3, 3], []),  # Together too small.
        ([10, 11], [[0], [1]]),
        ([5, 5, 5, 5], [[0, 1], [2, 3]]),
        ([4, 4, 4, 4, 4], [[0, 1, 2, 3, 4]]),  # Two would be 12 and 8.
        ([2, 20, 2, 20, 2], [[0, 1, 2], [3, 4]]),
        ([20, 6, 6, 20], [[0], [1, 2], [3]]),
        ([1, 1, 20], [[0, 1, 2]]),
    ],
)
def test_neighbours(sizes: list[int], groups: list[list[int]]) -> None:
    assert group_neighbours(sizes, 10) == groups


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 50))
def test_neighbours_stay_in_order_and_no_group_is_too_small(
    sizes: list[int], smallest: int
) -> None:
    groups = group_neighbours(sizes, smallest)
    assert [position for group in groups for position in group] == (
        list(range(len(sizes))) if groups else []
    )
    assert all(sum(sizes[i] for i in group) >= smallest for group in groups)
    assert bool(groups) == (sum(sizes) >= smallest)


def test_bounds_grow_with_the_ranks_up_to_an_eighth_of_the_model() -> None:
    assert bounds(10 * MIB, 4) == (MIB, 8 * MIB)
    assert bounds(1000 * MIB, 4) == (MIB, 125 * MIB)
    assert bounds(1000 * MIB, 64) == (8 * MIB, 125 * MIB)
    assert bounds(1000 * MIB, 4096) == (125 * MIB, 1000 * MIB)
    assert bounds(MIB, 1) == (MIB, 8 * MIB)


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Stack, GPT, ConvNet, Attention])
def test_a_small_model_is_one_group(make: Callable[[], nn.Module]) -> None:
    assert names(make()) == [("",)]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def stack(dim: int, num_blocks: int, vocabulary: int) -> nn.Module:
    return on_meta(lambda: Stack(dim, num_blocks, vocabulary))


def test_blocks_are_groups_and_the_small_rest_is_the_roots() -> None:
    found = names(stack(256, 12, 100))
    assert found == [*((f"blocks.{i}",) for i in range(12)), ("",)]


def test_a_large_embedding_and_head_are_groups_of_their_own() -> None:
    found = names(stack(256, 6, 32_000))
    blocks = [(f"blocks.{i}",) for i in range(6)]
    assert found == [("tokens",), *blocks, ("head",), ("",)]


def test_a_tied_embedding_stays_with_the_root() -> None:
    model = stack(256, 6, 32_000)
    model.head.weight = model.tokens.weight
    plan = auto_shard(model, 4, apply=False)
    assert [g.names for g in plan.groups] == [*((f"blocks.{i}",) for i in range(6)), ("",)]
    assert plan.without_group == ()


def test_small_blocks_are_joined_the_more_the_more_ranks() -> None:
    sizes = [len(names(stack(256, 24, 100), ranks)) for ranks in (2, 16, 64, 512)]
    assert sizes == [25, 25, 7, 7]


def test_sizes_are_those_that_are_gathered() -> None:
    bf16 = MixedPrecisionPolicy(torch.bfloat16)
    assert len(names(stack(256, 24, 100), 16)) == 25
    assert len(names(stack(256, 24, 100), 16, mp_policy=bf16)) == 13


def test_a_block_above_the_bound_is_looked_into() -> None:
    def half() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))

    found = names(on_meta(lambda: nn.Sequential(half(), half())))
    assert found == [(f"{h}.{i}",) for h in range(2) for i in range(8)]


def test_layers_of_a_part_that_occurs_once_are_groups() -> None:
    """Beside a head, and in a namespace."""
    blocks = [f"blocks.{i}" for i in range(8)]
    beside = on_meta(lambda: nn.Sequential(Stack(256, 8, 10), nn.Linear(10, 5)))
    assert names(beside) == [*((f"0.{name}",) for name in blocks), ("",)]

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"encoder": Stack(256, 8, 10)})

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["encoder"](x)

    assert names(on_meta(Parts)) == [*((f"parts.encoder.{name}",) for name in blocks), ("",)]


def run_all(modules: typing.Any, x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


class OwnList(nn.ModuleList):
    forward = run_all


class OwnSequence(nn.Sequential):
    forward = run_all


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("num_layers", [2, 8])
def test_a_list_with_a_forward_is_divided_as_a_sequence_with_one(
    num_parts: int, num_layers: int
) -> None:
    def groups(kind: Callable[..., nn.Module]) -> list[tuple[str, ...]]:
        with torch.device("meta"):
            layers = [[nn.Linear(1024, 1024) for _ in range(num_layers)] for _ in range(num_parts)]
            parts = [kind(each) for each in layers]
            return names(nn.Sequential(*parts, nn.Linear(1024, 10)))

    found = groups(OwnList)
    assert found == groups(lambda layers: OwnSequence(*layers))
    whole = [(str(i),) for i in range(num_parts)]
    assert set(whole).issubset(found) == (num_parts == 2)


# --- children that code chooses among -------------------------------------------------------------


def experts(container: str) -> nn.Module:
    made = [nn.Linear(1024, 1024) for _ in range(4)]
    if container == "list":
        return nn.ModuleList(made)
    if container == "dict":
        return nn.ModuleDict({f"expert{i}": each for i, each in enumerate(made)})
    if container == "deep":  # Each is a chain, which is not divided either.
        return nn.ModuleList(nn.Sequential(each, nn.ReLU(), nn.Linear(1024, 1024)) for each in made)

    class Choose(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[int(x.sum()) % len(self)](x)

    return Choose(*made)


class Routed(nn.Module):
    def __init__(self, inner: nn.Module, dim: int = 1024) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4)
        self.experts = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(self.gate(x).sum()) % 4](x)


class Outer(nn.Module):
    """Routes in a child."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        self.routed = Routed(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(self.first(x))


@pytest.mark.parametrize("container", ["list", "dict", "deep", "own forward"])
@pytest.mark.parametrize("chain", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_experts_stay_in_one_group(chain: Callable[..., nn.Module], container: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = chain([Routed(experts(container)) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert names(on_meta(Net)) == [("layers.0",), ("layers.1",), ("layers.2",)]


def test_a_block_is_divided_around_its_experts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Outer(experts("list")) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x

    within = [("first.0",), ("first.1",), ()]
    expected = {(".".join([f"layers.{i}", *name]),) for i in range(3) for name in within}
    assert set(names(on_meta(Net))) == expected


def test_experts_that_blocks_share_are_the_roots() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = experts("list")
            self.layers = nn.ModuleList(Outer(shared) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            return x

    plan = auto_shard(on_meta(Net), 4, apply=False)
    assert [group.names for group in plan.groups] == [*((f"layers.{i}",) for i in range(12)), ("",)]
    assert plan.groups[-1].shared == ("layers.0.routed.experts",)


def test_lists_in_a_list_are_one_group_each() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.Linear(1024, 1024), nn.LayerNorm(1024)]) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert names(on_meta(Net)) == [(f"layers.{i}.0", f"layers.{i}.1") for i in range(4)]


def test_layers_that_are_attributes_are_split_off_by_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1000, 1000)
            self.second = nn.Linear(1000, 2000)
            self.third = nn.Linear(2000, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x)))

    assert names(on_meta(Net)) == [("second",), ("",)]


def test_units_that_are_named_leave_the_rest_balanced() -> None:
    found = names(stack(256, 4, 32_000), units=[("norm", "head"), "tokens"])
    blocks = [(f"blocks.{i}",) for i in range(4)]
    assert found == [("tokens",), *blocks, ("norm", "head")]


@pytest.mark.parametrize("policy", [None, "balanced", "BALANCED"])
def test_arguments_of_the_root_leave_the_choice_as_it_is(policy: str | None) -> None:
    model = stack(256, 4, 32_000)
    arguments = {"": {"reshard_after_forward": True}}
    plan = auto_shard(model, 4, policy, units=arguments, apply=False)
    assert [group.names for group in plan.groups] == names(model)
    assert plan.groups[-1].is_resharded


def test_the_name_of_the_balanced_choice_is_no_choice() -> None:
    """What is named does not count for the bounds."""
    model, units = stack(256, 24, 100_000), ["head", "tokens"]
    found = names(model, 128, units=units)
    assert len(found) == 2 + 6 + 1
    for policy in ("balanced", "BALANCED"):
        assert names(model, 128, policy=policy, units=units) == found


def test_ignored_parameters_do_not_count() -> None:
    model = stack(256, 6, 32_000)
    found = names(model, ignored_params={model.tokens.weight})
    assert ("tokens",) not in found
    assert ("head",) in found


def test_the_choice_is_the_same_with_memory_and_without() -> None:
    assert names(Stack(256, 4, 9_000)) == names(stack(256, 4, 9_000))
