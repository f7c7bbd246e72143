"""What users do inside a forward that XLA would end the process for: errors in Python instead."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from xla_ranks import on_xla

from shardkit import DeviceMesh, ShardedTensorError, StateError, checkpoint_module, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable


Use = typing.Callable[[torch.Tensor], object]


class Using(nn.Module):
    """Does something with its output besides."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.use = use
        self.constant = torch.tensor(2.0, device="xla")
        self.used: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.used = self.use(y)
        return y * self.constant


READS: dict[str, Use] = {
    "item": lambda y: y.sum().item(),
    "bool": lambda y: bool((y > 0).any()),
    "tolist": lambda y: y.tolist(),
    "cpu": lambda y: y.cpu(),
    "copy_": lambda y: torch.empty(y.shape).copy_(y.detach()),
    "equal": lambda y: torch.equal(y, y),
    "allclose": lambda y: torch.allclose(y, y),
    "nonzero": lambda y: y.nonzero(),
    "mask": lambda y: y[y > 0],
    "unique": lambda y: y.unique(),
    "write by a mask": lambda y: y.clone().__setitem__(y < 0, 0.0),
}
MISSING: dict[str, Use] = {
    "lgamma": torch.lgamma,
    "its backward": lambda y: nn.functional.glu(y.repeat(1, 2)),
    "called by another": lambda y: y.median(1),
    "its options": lambda y: torch.addmm(y, y @ y.T, y, beta=0.5),
    "packed by lengths": lambda y: pack_padded_sequence(y[None], y.sum(1).long().clamp(1, 1)),
    "of a constant first": lambda y: torch.searchsorted(torch.ones(3, device="xla"), y.detach()),
}
"""Operators that torch_xla lets the host compute."""


@pytest.mark.parametrize("name", READS)
def test_values_cannot_be_read(name: str, mesh: DeviceMesh) -> None:
    model = fully_shard(Using(READS[name]).to("xla"), mesh)
    with pytest.raises(StateError, match="inside a forward takes a tensor's values to the host"):
        model(torch.randn(8, 7))
    model.use = lambda _: None
    assert model(torch.randn(8, 7)).cpu().shape == (8, 3)


@pytest.mark.parametrize("name", MISSING)
def test_what_the_host_would_compute_is_refused(name: str, mesh: DeviceMesh) -> None:
    model = fully_shard(Using(MISSING[name]).to("xla"), mesh)
    with pytest.raises(StateError, match="torch_xla does not have this operator, or its"):
        model(torch.randn(8, 7))


def test_values_cannot_be_read_when_forward_runs_again(mesh: DeviceMesh) -> None:
    runs: list[object] = []
    layer = Using(lambda y: runs.append(y.sum().item() if runs else None))
    model = fully_shard(nn.Sequential(checkpoint_module(layer), nn.Linear(3, 2)).to("xla"), mesh)
    output = model(torch.randn(8, 7))
    with pytest.raises(StateError, match="inside a forward takes a tensor's values"):
        output.sum().backward()


def test_tensors_are_printed_without_values(mesh: DeviceMesh) -> None:
    model = fully_shard(Using(lambda y: f"{y} {y.sum():.3f} {y!r}").to("xla"), mesh)
    assert model(torch.randn(8, 7)).cpu().shape == (8, 3)
    described = "<a rank's tensor inside of a forward, of shape {}, torch.float32; {}>"
    shapes = ("(2, 3)", "()", "(2, 3)")
    assert model.used == " ".join(described.format(s, "values after it only") for s in shapes)


def test_what_is_the_same_on_all_ranks_can_be_read(mesh: DeviceMesh) -> None:
    model = Using(lambda _: None).to("xla")
    model.use = lambda _: model.constant.item() + torch.ones(3, device="xla").sum().item()
    fully_shard(model, mesh)(torch.randn(8, 7))
    assert model.used == 5.0


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "alone": lambda weight: weight.sum(),
    "with one of its own": lambda weight: (weight + weight).mean(),
    "with a plain one": lambda weight: (weight + torch.ones(3, 7, device="xla")).mean(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_s_parameter_is_refused(name: str, mesh: DeviceMesh) -> None:
    other = fully_shard(on_xla(nn.Linear(7, 3)), mesh)
    weight = other.weight
    model = fully_shard(Using(lambda y: y + OTHERS[name](weight)).to("xla"), mesh)
    with pytest.raises(ShardedTensorError, match=r"'weight' of shape \(3, 7\) inside the forward"):
        model(torch.randn(8, 7))
