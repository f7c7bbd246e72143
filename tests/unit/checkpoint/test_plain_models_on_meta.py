"""Checkpoints that are loaded into models on meta whose parameters are not sharded."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor, nn

from shardkit import checkpoint

if typing.TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.norm = nn.BatchNorm1d(4)
        self.state: object = {"seen": 3}

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.words(words)))
        return result

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.arange(7)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_parameters_stay_the_same_objects(tmp_path: pathlib.Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    checkpoint.save(tmp_path / "x", model, optimizer)
    with torch.device("meta"):
        loaded = Tied()
    loaded.state = None
    params = [*loaded.parameters()]
    other = torch.optim.AdamW(params)
    checkpoint.load(tmp_path / "x", loaded, other)
    assert loaded.head.weight is loaded.words.weight
    assert all(a is b for a, b in zip(loaded.parameters(), params, strict=True))
    assert loaded.state == {"seen": 3}
    assert train(loaded, other) == train(model, optimizer)


def test_extras_on_meta_stay_tied(tmp_path: pathlib.Path) -> None:
    model = Tied()
    checkpoint.save(tmp_path / "x", teacher=model)
    with torch.device("meta"):
        loaded = Tied()
    params = [*loaded.parameters()]
    checkpoint.load(tmp_path / "x", teacher=loaded)
    assert loaded.head.weight is loaded.words.weight
    assert all(a is b for a, b in zip(loaded.parameters(), params, strict=True))
    assert torch.equal(loaded.head.weight, model.head.weight)
