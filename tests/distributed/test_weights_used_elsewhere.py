"""Weights used outside of their module's forward, in training: each rank has data of its own.

What is compared with is plain training on the mean of the ranks' losses.
"""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parity import in_turns
from reference import Differences, assert_each_within, assert_within, make_mesh, step_all
from shardkit import fully_shard
from workers import Spawn, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.helpers

WIDTH, WORDS, STEPS = 6, 11, 3
# Means over ranks are taken in another order, in fp64, of numbers up to some thousands.
TOLERANCE = 1e-10


class Model(nn.Module):
    """Looks words up and scores them; parts of it are used from outside."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.noises = nn.Parameter(torch.tensor([0.1, -0.2]))
        self.is_tied = is_tied

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.body(self.embed(words)).tanh())
        return hidden @ self.embed.weight.t() if self.is_tied else hidden


def head_outside(model: Model, words: Tensor) -> Tensor:
    """As fused losses do: the head's weight is an operand of the loss."""
    hidden = model(words)
    return F.cross_entropy(F.linear(hidden, model.embed.weight), words.flip(0))


def transposed_outside(model: Model, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words) @ model.embed.weight.t(), words.flip(0))


def scaled_outside(model: Model, words: Tensor) -> Tensor:
    """As CLIP does: a learned number scales what is computed of a rank's data."""
    hidden = model(words)
    return F.cross_entropy(model.scale.exp() * (hidden @ hidden.t()), words % len(words))


def weighed_outside(model: Model, words: Tensor) -> Tensor:
    """Learned weights of losses, each a number of the rank's data."""
    hidden = model(words)
    losses = [hidden.square().mean() * words.sum(), hidden.exp().mean()]
    both = [loss * torch.exp(-s) + s for loss, s in zip(losses, model.noises, strict=True)]
    return sum(both) + losses[0] * model.scale + model.scale.square()


def rows_outside(model: Model, words: Tensor) -> Tensor:
    return (model(words) - model.embed.weight[words] * model.norm.weight).square().sum()


def regularized(model: Model, words: Tensor) -> Tensor:
    """Penalties, with a factor that differs between ranks."""
    factor = 0.01 * words.double().mean()
    penalty = sum(p.square().sum() + p.norm() * 0.5 for p in model.parameters())
    return model(words).sum() + factor * penalty


def orthogonal(model: Model, words: Tensor) -> Tensor:
    weight = model.body.weight
    return model(words).sum() + (weight @ weight.t() - torch.eye(WIDTH)).square().sum()


def same_shape(model: Model, words: Tensor) -> Tensor:
    """A rank's data may have the very shape of a parameter."""
    hidden = model(words)[:1].expand(WIDTH, -1)
    return (model.body.weight * hidden).sum() + (model.norm.bias - hidden[0]).square().sum()


USES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "head outside": head_outside,
    "transposed outside": transposed_outside,
    "scaled outside": scaled_outside,
    "weighed outside": weighed_outside,
    "rows outside": rows_outside,
    "regularized": regularized,
    "orthogonal": orthogonal,
    "same shape": same_shape,
    "tied in the root's forward": lambda model, words: F.cross_entropy(model(words), words.flip(0)),
}


def words_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (5 + step,), generator=generator)


def train(mesh_shape: tuple[int, ...], is_delayed: bool, choice: tuple[str, bool]) -> Differences:
    """Train beside a plain model a use of weights; `is_apart`: each module is a group."""
    name, is_apart = choice
    plain = Model(is_tied="tied" in name).double()
    torch.manual_seed(2)
    for param in plain.parameters():
        nn.init.normal_(param, std=0.5)
    model, mesh = copy.deepcopy(plain), make_mesh(mesh_shape)
    for part in (model.embed, model.body, model.norm) if is_apart else ():
        fully_shard(part, mesh)
    fully_shard(model, mesh)
    use, differences = USES[name], Differences()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
    ranks = range(dist.get_world_size())
    for step in range(STEPS):
        for part in range(1 + is_delayed):
            model.set_requires_gradient_sync(part == is_delayed)
            losses = [use(plain, words_of(rank, 10 * step + part)) for rank in ranks]
            (sum(losses) / len(ranks)).backward()
            loss = use(model, words_of(dist.get_rank(), 10 * step + part))
            differences.note("loss", loss.detach(), losses[dist.get_rank()].detach())
            loss.backward()
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    return differences


MESHES = ((2,), (3,), (2, 2))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_gradients_are_averaged_over_ranks_with_data_of_their_own(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    turns = in_turns(USES, MESHES, [True, False])
    choices = {name: (name, is_apart) for name, mesh, is_apart in turns if mesh == mesh_shape}
    found = spawn_each(spawn, choices, train, math.prod(mesh_shape), mesh_shape, False)
    assert_each_within(found, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize("name", ["head outside", "weighed outside", "tied in the root's forward"])
def test_gradients_of_several_backwards_add_up(spawn: Spawn, name: str) -> None:
    """Those of uses elsewhere are averaged at once, the others with the last backward."""
    by_rank = spawn(train, 2, (2,), True, (name, True))
    assert_within(by_rank, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)
