"""Inputs and outputs in containers of all kinds."""

from __future__ import annotations

import collections
import dataclasses
import typing

import pytest
import torch
from one_backward import (
    MODES,
    TOLERANCE,
    assert_same_gradients,
    compare_later_training,
    compare_one_backward,
)
from torch import Tensor, nn

from models import CASES, Batch
from parity import Ranks, Run, on_meshes
from reference import LOSS_TOLERANCE, Differences, assert_each_within
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable


# --- outputs ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    """An output that pytree does not look into."""

    logits: Tensor
    hidden: list[Tensor]
    label: str = "output"


Pair = collections.namedtuple("Pair", ["logits", "hidden"])  # noqa: PYI024 - as users have it


class Plain:
    """An output that is no container at all."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


PACK: dict[str, Callable[[Tensor, Tensor], typing.Any]] = {
    "tuple": lambda logits, hidden: (logits, hidden),
    "dict": lambda logits, hidden: {"logits": logits, "nested": {"hidden": [hidden]}},
    "dataclass": lambda logits, hidden: Output(logits, [hidden]),
    "namedtuple": Pair,
    "object": lambda logits, hidden: Plain(logits),  # noqa: ARG005
}
UNPACK: dict[str, Callable[[typing.Any], Tensor]] = {
    "tuple": lambda output: output[0],
    "dict": lambda output: output["logits"],
    "dataclass": lambda output: output.logits,
    "namedtuple": lambda output: output.logits,
    "object": lambda output: output.logits,
}


class Packer(nn.Module):
    """Takes and returns its tensors in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, inputs: typing.Any) -> typing.Any:
        x = UNPACK[self.kind](inputs)
        return PACK[self.kind](self.norm(torch.tanh(self.linear(x))), x)


class Packed(nn.Module):
    """A chain of such modules."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Packer(kind) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        packed = PACK[self.kind](x, x)
        for layer in self.layers:
            packed = layer(packed)
        return self.head(UNPACK[self.kind](packed))


def train_packed(ranks: Ranks, kind: str, reshard_after_forward: bool | None) -> Differences:
    plain = Packed(kind)
    model = ranks.shard(CASES["mlp"], plain, reshard_after_forward=reshard_after_forward)
    return compare_later_training(ranks, model, plain)


@pytest.mark.parametrize("kind", PACK)
@on_meshes((2,))
def test_inputs_and_outputs_in_containers(run: Run, kind: str) -> None:
    found = run.each(MODES, train_packed, kind)
    assert_each_within(found, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def root_output(ranks: Ranks, kind: str) -> Differences:
    """Take the loss of what the root returns in a container."""

    def backward(model: nn.Module, batch: Batch) -> None:
        x, _ = batch
        UNPACK[kind](model(PACK[kind](x, x))).square().mean().backward()

    plain = Packer(kind)
    return compare_one_backward(ranks, fully_shard(ranks.put(plain), ranks.mesh), plain, backward)


@pytest.mark.parametrize("kind", [kind for kind in PACK if kind != "object"])
@on_meshes((2,))
def test_the_roots_output_in_a_container(run: Run, kind: str) -> None:
    assert_same_gradients(run(root_output, kind))


@on_meshes((2,), xla=())  # Refused there: what the ranks return would have no place to go.
def test_the_roots_output_in_an_object(run: Run) -> None:
    assert_same_gradients(run(root_output, "object"))
