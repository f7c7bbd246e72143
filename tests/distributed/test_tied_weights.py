"""One Parameter in several places: in one group it trains right, across groups it is refused."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from one_backward import MODES
from torch import Tensor, nn

from models import CASES, MLP, VOCABULARY, Case, cross_entropy, token_batch
from parity import Ranks, Run, compare_training, on_meshes
from recording import recording_mesh
from reference import (
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
)
from shardkit import ShardedTensor, WrapError, fully_shard
from workers import on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    import workers

Errors = typing.Callable[..., "list[workers.Raised | None]"]


class TiedModel(nn.Module):
    """Embedding and head hold one weight; between them layers, or nothing that is sharded."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_layers))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


# --- in one group ---------------------------------------------------------------------------------

TIED = Case(TiedModel, lambda model: list(model.layers), token_batch, cross_entropy)


class Inner(nn.Module):
    """Holds a whole tied model, which is sharded as one group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TiedModel()
        self.last = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.model(x))


INNER = Case(Inner, lambda model: [model.model], token_batch, cross_entropy)


def train_tied(ranks: Ranks, inner: bool, reshard_after_forward: bool | None) -> Differences:
    case = INNER if inner else TIED
    plain = case.make()
    model = ranks.shard(case, plain, reshard_after_forward=reshard_after_forward)
    return compare_training(case, model, plain, ranks=ranks)


@pytest.mark.parametrize("inner", [True, False])
@on_meshes((2,))
def test_a_weight_tied_within_a_group(run: Run, inner: bool) -> None:
    found = run.each(MODES, train_tied, inner)
    assert_each_within(found, **TRAINED)


# --- across groups --------------------------------------------------------------------------------


def two_groups() -> None:
    model = TiedModel()
    fully_shard(model.tokens)
    fully_shard(model.head)


def one_group_and_the_root() -> None:
    """The head is left to the root: its weight would not be gathered when it runs."""
    model = TiedModel()
    fully_shard(model.tokens)
    fully_shard(model)


def the_root_and_the_other() -> None:
    model = TiedModel()
    fully_shard(model.head)
    fully_shard(model)


@pytest.mark.parametrize(
    ("wrap", "texts"),
    [
        (two_groups, ["'weight' of Linear", "'weight' of Embedding"]),
        (one_group_and_the_root, ["'head.weight' of TiedModel", "'weight' of Embedding"]),
        (the_root_and_the_other, ["'tokens.weight' of TiedModel", "'weight' of Linear"]),
    ],
)
def test_a_weight_tied_across_groups_is_refused_by_both_names(
    spawn_errors: Errors, wrap: typing.Callable[[], None], texts: list[str]
) -> None:
    for error in spawn_errors(wrap, 2):
        assert error is not None
        assert error.type_name == "WrapError"
        for text in (*texts, "in one fully_shard call"):
            assert text in error.message


@on_ranks(2)
def test_a_refusal_leaves_both_modules_as_they_were() -> None:
    """The refused module is as it was, so the caller may do it right after all."""
    plain = Inner()
    model = copy.deepcopy(plain)
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    other = nn.Linear(VOCABULARY, VOCABULARY, bias=False)
    other.weight = model.last.weight
    fully_shard(model.last)
    with pytest.raises(WrapError, match="fully_shard call"):
        fully_shard(other)
    assert type(other) is nn.Linear
    assert isinstance(other.weight, ShardedTensor)
    fully_shard(model)
    assert_within([compare_training(INNER, model, plain, steps=3)], **TRAINED)


def modules_in_two_places(ranks: Ranks) -> Differences:
    """A module that is held twice is one module."""
    plain = MLP((7, 7, 7, 5))
    plain.layers[1] = plain.layers[0]
    model = ranks.put(plain)
    fully_shard(model.layers[0], ranks.mesh)
    fully_shard(model, ranks.mesh)
    return compare_training(CASES["mlp"], model, plain, ranks=ranks)


def copies_of_tied_models(ranks: Ranks) -> Differences:
    plain = TiedModel()
    model = copy.deepcopy(ranks.shard(TIED, plain))
    assert model.head.weight is model.tokens.weight
    return compare_training(TIED, model, plain, ranks=ranks)


def copies_of_models_tied_later(ranks: Ranks) -> Differences:
    """One of the two parameters is held nowhere any more."""
    plain = TiedModel()
    apart = copy.deepcopy(plain)
    apart.head.weight = nn.Parameter(torch.zeros_like(apart.head.weight))
    model: typing.Any = ranks.shard(TIED, apart)
    model.head.weight = model.tokens.weight
    model = copy.deepcopy(model)
    assert model.head.weight is model.tokens.weight
    return compare_training(TIED, model, plain, ranks=ranks)


def copies_without_a_removed_head(ranks: Ranks) -> Differences:
    plain = MLP()
    model: typing.Any = ranks.put(plain)
    model.head = ranks.put(nn.Linear(5, 5))
    fully_shard(model, ranks.mesh)
    del model.head
    return compare_training(CASES["mlp"], copy.deepcopy(model), plain, ranks=ranks)


def wrap_around_an_unsharded_module(ranks: Ranks) -> Differences:
    """The root is sharded while a layer shows its unsharded parameters."""
    plain = MLP()
    model = ranks.put(plain)
    fully_shard(model.layers[0], ranks.mesh)
    model.layers[0].unshard()
    assert not isinstance(model.layers[0].weight, ShardedTensor)
    fully_shard(model, ranks.mesh)
    return compare_training(CASES["mlp"], model, plain, ranks=ranks)


@pytest.mark.parametrize(
    "train",
    [
        modules_in_two_places,
        copies_of_tied_models,
        copies_of_models_tied_later,
        copies_without_a_removed_head,
        wrap_around_an_unsharded_module,
    ],
)
@on_meshes((2,))
def test_what_is_no_tie_or_a_good_one(run: Run, train: Callable[[Ranks], Differences]) -> None:
    assert_within(run(train), **TRAINED)


# --- one memory, two Parameters -------------------------------------------------------------------


def tied_by_memory(*, is_trainable: bool = True) -> TiedModel:
    model = TiedModel()
    model.head.weight = nn.Parameter(model.tokens.weight.data, requires_grad=is_trainable)
    return model


@pytest.mark.parametrize("inner", [True, False])
def test_two_parameters_over_one_memory_are_warned_of_by_name(inner: bool) -> None:
    mesh, _ = recording_mesh((2,))
    model = tied_by_memory()
    first = "tokens.weight"
    if inner:
        fully_shard(model.tokens, mesh)
        first = "weight"
    with pytest.warns(UserWarning, match=f"'{first}' and 'head.weight' share one memory") as found:
        fully_shard(model, mesh)
    assert len(found) == 1


def without_values() -> nn.Module:
    with torch.device("meta"):
        return tied_by_memory(is_trainable=False)


def parts_of_one_memory() -> nn.Module:
    memory = torch.randn(2, 8, 8)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer, part in zip(layers, memory, strict=True):
        layer.weight = nn.Parameter(part)
    return layers


@pytest.mark.parametrize("make", [TiedModel, without_values, parts_of_one_memory])
def test_no_warning_of_what_does_not_train_apart(
    make: Callable[[], nn.Module], recwarn: pytest.WarningsRecorder
) -> None:
    mesh, _ = recording_mesh((2,))
    fully_shard(make(), mesh)
    assert not [str(each.message) for each in recwarn if "one memory" in str(each.message)]
