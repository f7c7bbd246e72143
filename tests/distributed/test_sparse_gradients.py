"""Sparse gradients cannot be cut into flat ranges: they are refused by name, before any is sent."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import CASES, SEQUENCE, VOCABULARY, Case, cross_entropy, token_batch
from parity import compare_training
from reference import (
    TRAINED,
    Differences,
    assert_within,
    my_batch,
    shard,
)
from shardkit import StateError, fully_shard
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    import workers

Errors = typing.Callable[..., "list[workers.Raised | None]"]


class Sparse(nn.Module):
    """A language model whose embeddings ask for sparse gradients, if `sparse` says so."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.sparse = sparse
        self.table = nn.Parameter(torch.randn(VOCABULARY, 8))
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(F.embedding(x, self.table, sparse=self.sparse))))


SPARSE = Case(Sparse, lambda model: [model.hidden], token_batch, cross_entropy)


def embedding() -> None:
    fully_shard(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)))


def bag() -> None:
    fully_shard(nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), nn.Linear(4, 4)))


@pytest.mark.parametrize(("wrap", "kind"), [(embedding, "Embedding"), (bag, "EmbeddingBag")])
def test_a_module_with_sparse_gradients_is_refused_when_it_is_sharded(
    spawn_errors: Errors, wrap: Callable[[], None], kind: str
) -> None:
    for error in spawn_errors(wrap, 2):
        assert error is not None
        assert error.type_name == "WrapError"
        for text in ("'0.weight'", kind, "sparse=True", "ignored_params"):
            assert text in error.message


def functional() -> None:
    """The call asks for it: nobody knows before the gradient comes."""
    model = shard(SPARSE, Sparse())
    SPARSE.loss(model, my_batch(SPARSE, 0)).backward()


def thawed() -> None:
    """An embedding that was frozen when it was sharded, and is thawed later."""
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    model[0].requires_grad_(requires_grad=False)
    fully_shard(model)
    model[0].requires_grad_(requires_grad=True)
    model(torch.ones(2, dtype=torch.long)).sum().backward()


def outside() -> None:
    """A look-up in a table outside of the forward of its module."""
    F.embedding(
        torch.ones(2, dtype=torch.long), shard(SPARSE, Sparse()).table, sparse=True
    ).sum().backward()


@pytest.mark.parametrize(
    ("use", "name", "type_name"),
    [
        (functional, "'table'", "StateError"),
        (thawed, "'0.weight'", "StateError"),
        (outside, "'table'", "ShardedTensorError"),
    ],
)
def test_a_sparse_gradient_is_refused_when_it_comes(
    spawn_errors: Errors, use: Callable[[], None], name: str, type_name: str
) -> None:
    for error in spawn_errors(use, 2):
        assert error is not None
        assert error.type_name == type_name
        for text in (name, "sparse"):
            assert text in error.message


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@on_ranks(2)
def test_training_goes_on_after_a_refused_gradient(reshard_after_forward: bool | None) -> None:
    """No parameter has a gradient of the refused step; training goes on with dense ones."""
    plain = Sparse(sparse=False)
    model = shard(SPARSE, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    parameters = list(model.parameters())
    for sparse in (False, True):
        model.zero_grad()
        model.sparse = sparse
        loss = SPARSE.loss(model, my_batch(SPARSE, 0))
        if sparse:
            with pytest.raises(StateError, match="table"):
                loss.backward()
            assert parameters[0].grad is None
        else:
            loss.backward()
    model.sparse = False
    for parameter in parameters:
        parameter.grad = None
    assert_within([compare_training(SPARSE, model, plain)], **TRAINED)


class Frozen(nn.Module):
    """Sparse embeddings that are never trained, or that are ignored, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Embedding(VOCABULARY, 8, sparse=True).requires_grad_(requires_grad=False)
        self.ignored = nn.Embedding(SEQUENCE, 8, sparse=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x) + self.ignored(torch.arange(SEQUENCE)))


def train_beside_sparse_gradients() -> tuple[Differences, bool]:
    case = Case(Frozen, lambda _: [], token_batch, CASES["gpt"].loss)
    plain = Frozen()
    model = copy.deepcopy(plain)
    fully_shard(model, ignored_params={model.ignored.weight})
    differences = Differences()
    case.loss(model, my_batch(case, 0)).backward()
    case.loss(plain, my_batch(case, 0)).backward()
    differences.note(
        "grad", model.ignored.weight.grad.to_dense(), plain.ignored.weight.grad.to_dense()
    )
    return differences, model.ignored.weight.grad.is_sparse


def test_frozen_and_ignored_embeddings_may_be_sparse(spawn: Spawn) -> None:
    found = spawn(train_beside_sparse_gradients, 2)
    assert all(is_sparse for _, is_sparse in found)
    assert_within([differences for differences, _ in found], grad=0.0)
