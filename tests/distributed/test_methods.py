"""Training and generating through methods other than forward, against the unsharded model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import GPT, Batch, Case, cross_entropy, token_batch
from parity import compare_training
from reference import (
    LOSS_TOLERANCE,
    assert_within,
    make_mesh,
    my_batch,
    rank_batch,
    shard,
)
from shardkit import fully_shard, register_fsdp_forward_method
from workers import Spawn, on_ranks

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


class Coder(nn.Module):
    """A module that has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(5, 3)
        self.up = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(3))

    def encode(self, x: Tensor) -> Tensor:
        return self.down(x) * self.scale

    def decode(self, code: Tensor) -> Tensor:
        return self.up(code / self.scale.exp())


@on_ranks(2)
def test_a_module_without_forward_trains_by_its_methods() -> None:
    plain = Coder().double()
    model = fully_shard(copy.deepcopy(plain), make_mesh((2,)))
    for method in ("encode", "decode"):
        register_fsdp_forward_method(model, method)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    for _ in range(3):
        batches = torch.randn(2, 4, 5, dtype=torch.float64)
        for coder, x in ((model, batches[dist.get_rank()]), (plain, batches.flatten(0, 1))):
            (coder.decode(coder.encode(x)) - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other, rtol=0, atol=1e-14)
    with pytest.raises(NotImplementedError, match="forward"):
        model(batches[0])
