"""On a card: checkpoints and copies, bit for bit, also from the card to ranks of the host."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist

import one_card
from checkpoints import WholeState, assert_same, make_sharded, whole_state
from models import CASES, Batch, Case
from one_card import CardDifferences, CardRanks, on_host
from reference import OPTIMIZERS, assert_within, full_parameters
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, checkpoint

if typing.TYPE_CHECKING:
    import pathlib

    from torch import nn

    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


IN_BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
OPTIONS: dict[str, dict[str, typing.Any]] = {
    "fp32": {},
    "bf16": IN_BF16,
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def losses_of(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]
) -> list[float]:
    """Train; return the losses of this rank."""
    losses = []
    for batch in batches:
        loss = case.loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# --- checkpoints ----------------------------------------------------------------------------------


def save(
    name: str, options: dict[str, typing.Any], folder: str, how: str
) -> tuple[WholeState, list[float]]:
    """Train, save, train on."""
    ranks, case = CardRanks(), CASES[name]
    model = ranks.shard(case, ranks.make(case), **options)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    losses_of(case, model, optimizer, [ranks.batch(case, step) for step in range(3)])
    handle = None
    if how == "save":
        checkpoint.save(folder, model, optimizer, step=3)
    else:
        handle = checkpoint.async_save(folder, model, optimizer, step=3)
    state = on_host(whole_state(model, optimizer))
    # An asynchronous save has copied what it writes: training changes it no more.
    losses = losses_of(case, model, optimizer, [ranks.batch(case, step) for step in range(3, 5)])
    if handle is not None:
        handle.result(timeout=60)
    return state, losses


def load(name: str, options: dict[str, typing.Any], folder: str) -> tuple[WholeState, list[float]]:
    """Load into a model of other values, train on."""
    ranks, case = CardRanks(), CASES[name]
    torch.manual_seed(7)
    model = ranks.shard(case, ranks.make(case), **options)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    assert checkpoint.load(folder, model, optimizer) == {"step": 3}
    state = on_host(whole_state(model, optimizer))
    return state, losses_of(case, model, optimizer, [ranks.batch(case, i) for i in range(3, 5)])


def load_on_host(name: str, folder: str) -> WholeState:
    """Load into a model on ranks of the host."""
    model, optimizer = make_sharded(CASES[name], (dist.get_world_size(),), seed=7)
    assert checkpoint.load(folder, model, optimizer) == {"step": 3}
    return whole_state(model, optimizer)


@pytest.mark.parametrize(
    ("options", "how"),
    [("fp32", "save"), ("fp32", "async_save"), ("bf16", "save"), ("offload", "async_save")],
)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_from_a_checkpoint(
    on_card: Spawn, tmp_path: pathlib.Path, world_size: int, name: str, options: str, how: str
) -> None:
    path = str(tmp_path / "x")
    saved = on_card(save, world_size, name, OPTIONS[options], path, how)
    loaded = on_card(load, world_size, name, OPTIONS[options], path)
    for (state, losses), (expected, expected_losses) in zip(loaded, saved, strict=True):
        assert_same(state, expected)
        # The same numbers; kernels that add atomically may add them in another order.
        assert losses == pytest.approx(expected_losses, rel=1e-2 if options == "bf16" else 1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_checkpoint_of_the_card_is_loaded_on_the_host(
    on_card: Spawn,
    spawn: Spawn,
    tmp_path: pathlib.Path,
    name: str,
    options: str,
    world_size: int,
) -> None:
    path = str(tmp_path / "x")
    [(expected, _)] = on_card(save, 1, name, OPTIONS[options], path, "save")
    for state in spawn(load_on_host, world_size, name, path):
        assert_same(state, expected)


def load_across(name: str, folder: str) -> WholeState:
    """Load a checkpoint of another number of ranks."""
    return load(name, {}, folder)[0]


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(on_card: Spawn, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "x")
    (expected, _), _ = on_card(save, 2, "gpt", {}, path, "save")
    [state] = on_card(load_across, 1, "gpt", path)
    assert_same(state, expected)


# --- copies ---------------------------------------------------------------------------------------


def train_a_copy(name: str, options: dict[str, typing.Any]) -> tuple[CardDifferences, bool, bool]:
    """Return how far a copy is from a model trained alike, whether the original stayed as it was.

    And whether the copy's numbers began as those of the original, bit for bit.
    """
    ranks, case = CardRanks(), CASES[name]
    plain = ranks.make(case)
    model, peer = (ranks.shard(case, plain, **options) for _ in range(2))
    batches = [ranks.batch(case, step) for step in range(4)]
    for each in (model, peer):
        losses_of(case, each, OPTIMIZERS["sgd"](each.parameters()), batches[:2])
    twin = copy.deepcopy(model)
    before = on_host(full_parameters(model))
    copied = on_host(full_parameters(twin))
    for each in (twin, peer):
        losses_of(case, each, OPTIMIZERS["sgd"](each.parameters()), batches[2:])
    after = on_host(full_parameters(model))
    differences = CardDifferences()
    differences.note_relative("parameter", full_parameters(twin), full_parameters(peer))
    assert all(param.grad is None for param in model.parameters())
    same = [all(torch.equal(a[key], before[key]) for key in before) for a in (after, copied)]
    return differences, same[0], same[1]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_trains_by_itself(on_card: Spawn, world_size: int, name: str, options: str) -> None:
    found = on_card(train_a_copy, world_size, name, OPTIONS[options])
    for _, is_unchanged, is_copied in found:
        assert is_unchanged
        assert is_copied
    # Both were trained by the same kernels on the same numbers, but for the order of atomic sums.
    tolerance = 2.0**-6 if options == "bf16" else 1e-4
    assert_within([differences for differences, _, _ in found], parameter=tolerance)
