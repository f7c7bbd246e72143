"""Training and generating through methods other than forward, against the unsharded model."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import Tensor, nn

from models import GPT, Case, cross_entropy, token_batch
from parity import compare_training
from reference import (
    LOSS_TOLERANCE,
    assert_within,
    make_mesh,
    my_batch,
    rank_batch,
    shard,
)
from shardkit import register_fsdp_forward_method
from workers import on_ranks

if typing.TYPE_CHECKING:
    from models import Batch
    from workers import Spawn

# The gradient of the temperature is about 4: some units in its last place, over ten steps of SGD.
TOLERANCE = 3e-6


class Scored(nn.Module):
    """A GPT whose loss is a method: it calls forward, and uses the root's own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens) * self.temperature

    def score(self, batch: Batch) -> Tensor:
        """Return the loss of two forwards, one of them used without its gradient."""
        tokens, targets = batch
        with torch.no_grad():
            teacher = self(tokens.flip(0)).flip(0)
        logits = self(tokens) / self.temperature.abs() + 0.1 * teacher
        return cross_entropy(lambda _: logits, (tokens, targets)) + self.temperature.square()

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Add tokens, each the likeliest; scale by the root's own parameter."""
        for _ in range(count):
            chosen = (self(tokens)[:, -1:] * self.temperature).argmax(-1)
            tokens = torch.cat([tokens[:, 1:], chosen], 1)
        return tokens


CASE = Case(
    Scored,
    lambda model: list(model.gpt.blocks),
    token_batch,
    lambda model, batch: model.score(batch),
)


def make_scored(
    mesh_shape: tuple[int, ...], *, reshard_after_forward: bool | None
) -> tuple[nn.Module, nn.Module]:
    plain = CASE.make()
    model = shard(
        CASE,
        copy.deepcopy(plain),
        make_mesh(mesh_shape),
        reshard_after_forward=reshard_after_forward,
    )
    for name in ("score", "generate"):
        register_fsdp_forward_method(model, name)
    return model, plain


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@on_ranks("mesh_shape")
def test_a_loss_that_is_a_method_trains_as_in_plain_training(
    mesh_shape: tuple[int, ...], reshard_after_forward: bool | None
) -> None:
    model, plain = make_scored(mesh_shape, reshard_after_forward=reshard_after_forward)
    assert_within(
        [compare_training(CASE, model, plain)],
        loss=LOSS_TOLERANCE,
        grad=TOLERANCE,
        parameter=TOLERANCE,
    )


def generate_between_steps(reshard_after_forward: bool | None) -> list[bool]:
    """Return whether the same is generated, before training and between steps."""
    model, plain = make_scored((2,), reshard_after_forward=reshard_after_forward)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.5)) for each in (model, plain)]
    equal = []
    for step in range(3):
        tokens, _ = my_batch(CASE, step)
        generated, expected = (each.generate(tokens, 6) for each, _ in pairs)
        assert expected.unique().numel() > expected.shape[0]
        equal.append(torch.equal(generated, expected))
        batch = rank_batch(CASE, 0, step)  # The same on both ranks, so that no average matters.
        for each, optimizer in pairs:
            each.score(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return equal


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_a_method_generates_the_same_between_steps(
    spawn: Spawn, *, reshard_after_forward: bool | None
) -> None:
    assert spawn(generate_between_steps, 2, reshard_after_forward) == [[True] * 3] * 2
