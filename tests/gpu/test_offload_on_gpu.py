"""On a card: shards, gradients and optimizer state on the host, compute on the card."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor, nn

import one_card
from models import CASES, Case, regression_batch, squared_error
from one_card import CARD, LOSS_TOLERANCE, TOLERANCES, CardDifferences, CardRanks, compare_training
from reference import OPTIMIZERS, assert_within, full_grads, full_parameters, shard
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


HOST = torch.device("cpu")


class Normed(nn.Module):
    """Layers with buffers: the statistics of a batch normalization, and one of the root's own."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(in_features, 16), nn.BatchNorm1d(16), nn.Tanh())
            for in_features in (7, 16)
        )
        self.head = nn.Linear(16, 5)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.shift


NORMED = Case(Normed, lambda model: list(model.layers), regression_batch, squared_error)


def assert_placed(model: nn.Module, optimizer: torch.optim.Optimizer, *, pinned: bool) -> None:
    """Check where everything is between backward and the optimizer's step."""
    for name, param in model.named_parameters():
        grad: typing.Any = param.grad
        piece = typing.cast("typing.Any", param).to_local()
        assert param.device == HOST, name
        assert piece.device == HOST, name
        assert piece.is_pinned() == pinned or not piece.numel(), name
        assert grad.device == HOST, name
        assert grad.to_local().device == HOST, name
    for state in optimizer.state.values():
        assert all(entry.device == HOST for entry in state.values() if isinstance(entry, Tensor))
    assert all(buffer.device == CARD for buffer in model.buffers())


# --- training -------------------------------------------------------------------------------------


def train_offloaded(
    name: str, pinned: bool, optimizer: str, reshard_after_forward: bool | None
) -> CardDifferences:
    ranks, case = CardRanks(), CASES[name]
    policy = CPUOffloadPolicy(pin_memory=pinned)
    model, plain = ranks.pair(
        case, offload_policy=policy, reshard_after_forward=reshard_after_forward
    )
    differences = compare_training(case, model, plain, ranks, optimizer=optimizer)
    own = OPTIMIZERS[optimizer](model.parameters())
    for step in range(2):
        case.loss(model, ranks.batch(case, step)).backward()
        assert_placed(model, own, pinned=pinned)
        own.step()
        own.zero_grad()
    return differences


def assert_trained(found: list[CardDifferences], optimizer: str = "sgd") -> None:
    tolerance = TOLERANCES[optimizer]
    assert_within(found, loss=max(LOSS_TOLERANCE, tolerance), grad=tolerance, parameter=tolerance)


@pytest.mark.parametrize(
    ("optimizer", "reshard_after_forward"), [("sgd", None), ("adamw", None), ("sgd", False)]
)
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_training_equals_plain_training(
    on_card: Spawn,
    world_size: int,
    name: str,
    pinned: bool,
    optimizer: str,
    reshard_after_forward: bool | None,
) -> None:
    found = on_card(train_offloaded, world_size, name, pinned, optimizer, reshard_after_forward)
    assert_trained(found, optimizer)


def read_at_once(pinned: bool, policy: MixedPrecisionPolicy) -> CardDifferences:
    """Read gradients right after backward, while the card is far behind the host."""
    ranks, case = CardRanks(), CASES["gpt"]
    offload = CPUOffloadPolicy(pin_memory=pinned)
    model, late = (
        ranks.shard(case, plain, offload_policy=offload, mp_policy=policy)
        for plain in [ranks.make(case)] * 2
    )
    differences = CardDifferences()
    for step in range(4):
        batch = ranks.batch(case, step)
        one_card.delay_card(100)
        case.loss(late, batch).backward()
        at_once = {n: p.grad.to_local().clone() for n, p in late.named_parameters()}
        torch.cuda.synchronize()
        case.loss(model, batch).backward()
        torch.cuda.synchronize()
        afterwards = {n: p.grad.to_local() for n, p in model.named_parameters()}
        differences.note_relative("grad", at_once, afterwards)
        for each in (model, late):
            each.zero_grad()
    return differences


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)])
@pytest.mark.parametrize("pinned", [True, False])
def test_gradients_are_there_when_backward_returns(
    on_card: Spawn, pinned: bool, policy: MixedPrecisionPolicy
) -> None:
    # The same kernels on the same numbers; those that add atomically may add in another order.
    assert_within(on_card(read_at_once, 1, pinned, policy), grad=2.0**-7)


def overwrite_at_once(pinned: bool) -> CardDifferences:
    """Write shards on the host right after forward and backward, while the card is behind."""
    ranks, case = CardRanks(), CASES["gpt"]
    model, plain = ranks.pair(case, offload_policy=CPUOffloadPolicy(pin_memory=pinned))
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = CardDifferences()
    for step in range(4):
        one_card.delay_card(100)
        loss = case.loss(model, ranks.batch(case, step))
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        expected = case.loss(plain, ranks.global_batch(case, step))
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        differences.note("loss", loss, expected)
    with torch.no_grad():  # An evaluation, after which the host writes at once.
        one_card.delay_card(100)
        loss = case.loss(model, ranks.batch(case, 0))
        for param in model.parameters():
            param.zero_()
        differences.note("loss", loss, case.loss(plain, ranks.global_batch(case, 0)))
    return differences


@pytest.mark.parametrize("pinned", [True, False])
def test_a_step_on_the_host_does_not_overtake_the_card(on_card: Spawn, pinned: bool) -> None:
    assert_within(on_card(overwrite_at_once, 1, pinned), loss=LOSS_TOLERANCE)


def train_partly_offloaded(name: str) -> CardDifferences:
    """Offload every other group."""
    ranks, case = CardRanks(), CASES[name]
    plain = ranks.make(case)
    model = ranks.put(plain)
    groups = case.groups(model)
    for module in groups[::2]:
        fully_shard(module, ranks.mesh, offload_policy=CPUOffloadPolicy())
    for module in groups[1::2]:
        fully_shard(module, ranks.mesh)
    fully_shard(model, ranks.mesh)
    differences = compare_training(case, model, plain, ranks, optimizer="adamw")
    offloaded = {id(param) for module in groups[::2] for param in module.parameters()}
    case.loss(model, ranks.batch(case, 0)).backward()
    for key, param in model.named_parameters():
        assert param.device == (HOST if id(param) in offloaded else CARD), key
        assert param.grad.device == param.device, key
    return differences


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_some_groups_may_be_offloaded(on_card: Spawn, world_size: int, name: str) -> None:
    assert_trained(on_card(train_partly_offloaded, world_size, name), "adamw")


def train_offloaded_in_bf16() -> list[bool]:
    """Compare an offloaded model with one on the card; clip by the norm of host gradients."""
    ranks, case = CardRanks(), CASES["gpt"]
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    plain = ranks.make(case)
    models = [
        ranks.shard(case, plain, mp_policy=policy, **options)
        for options in ({}, {"offload_policy": CPUOffloadPolicy()})
    ]
    closeness = []
    for model in models:
        case.loss(model, ranks.batch(case, 0)).backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.05) for model in models]
    closeness.append(torch.allclose(norms[0].cpu(), norms[1].cpu(), rtol=1e-3))
    grads, expected = full_grads(models[1]), full_grads(models[0])
    for name, grad in grads.items():
        other = expected[name]
        assert grad is not None
        assert other is not None
        closeness.append(torch.allclose(grad.cpu(), other.cpu(), rtol=2.0**-7, atol=1e-5))
    return closeness


@pytest.mark.parametrize("world_size", [1, 2])
def test_offload_in_bf16_computes_what_the_card_does(on_card: Spawn, world_size: int) -> None:
    for closeness in on_card(train_offloaded_in_bf16, world_size):
        assert all(closeness)


# --- buffers and meta -----------------------------------------------------------------------------


def train_with_buffers(made_on: str) -> CardDifferences:
    ranks = CardRanks()
    policy = CPUOffloadPolicy()
    plain = ranks.make(NORMED)
    if made_on == "meta":
        with torch.device("meta"):
            model = shard(NORMED, Normed(), ranks.mesh, offload_policy=policy)
        buffers = dict(plain.named_buffers())
        state = {
            name: (value if name in buffers else value.cpu()).clone()
            for name, value in plain.state_dict().items()
        }
        model.load_state_dict(state, assign=True)
    else:
        source = one_card.copy_on_host(plain) if made_on == "host" else ranks.put(plain)
        model = shard(NORMED, source, ranks.mesh, offload_policy=policy)
    differences = CardDifferences()
    differences.note_all("initial", full_parameters(model), full_parameters(plain))
    assert all(param.device == HOST for param in model.parameters())
    assert all(buffer.device == CARD for buffer in model.buffers())
    found = compare_training(NORMED, model, plain, ranks, steps=5)
    differences.update(found)
    differences.note_all("buffer", dict(model.named_buffers()), dict(plain.named_buffers()))
    return differences


@pytest.mark.parametrize("made_on", ["card", "host", "meta"])
def test_buffers_stay_on_the_card(on_card: Spawn, made_on: str) -> None:
    tolerance = TOLERANCES["sgd"]
    assert_within(
        on_card(train_with_buffers, 1, made_on),
        initial=0.0,
        loss=LOSS_TOLERANCE,
        grad=tolerance,
        parameter=tolerance,
        buffer=tolerance,
    )


def train_from_meta(name: str) -> CardDifferences:
    """Load a state of the host into a model without memory; each rank keeps its pieces."""
    ranks, case = CardRanks(), CASES[name]
    plain = ranks.make(case)
    with torch.device("meta"):
        model = shard(case, case.make(), ranks.mesh, offload_policy=CPUOffloadPolicy())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model.load_state_dict(one_card.copy_on_host(plain).state_dict(), assign=True)
    assert {param.device for group in optimizer.param_groups for param in group["params"]} == {HOST}
    return compare_training(case, model, plain, ranks, optimizer="adamw")


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_dict_is_assigned_to_an_offloaded_model_on_meta(
    on_card: Spawn, world_size: int, name: str
) -> None:
    assert_trained(on_card(train_from_meta, world_size, name), "adamw")
