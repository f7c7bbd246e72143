"""Methods that run as forwards: what they see of the parameters, what they cost, what fails."""

from __future__ import annotations

import copy
import pickle
import typing

import pytest
import torch
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import (
    ShardedTensor,
    StateError,
    fully_shard,
    register_fsdp_forward_method,
)
from shardkit._module.fully_shard import ForwardMethod

Log = list[tuple[str, typing.Any]]


class Speaker(nn.Module):
    """An encoder that is called by itself and a forward that is called once per token.

    As encoder-decoder models do when they generate: the embedding is the root's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 8)
        self.seen: list[bool] = []

    def look(self) -> None:
        """Note whether the root's own parameter is unsharded."""
        self.seen.append(not isinstance(self.embedding.weight, ShardedTensor))

    def encode(self, tokens: Tensor) -> Tensor:
        self.look()
        return self.encoder(self.embedding(tokens))

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        self.look()
        memory = self.encode(tokens) if memory is None else memory
        return self.decoder(self.embedding(tokens) + memory) @ self.embedding.weight.t()

    @torch.no_grad()
    def generate(self, tokens: Tensor, steps: int = 3) -> Tensor:
        memory = self.encode(tokens)
        for _ in range(steps):
            tokens = self(tokens, memory).argmax(-1)
            self.look()
        return tokens

    def fail(self, tokens: Tensor) -> None:
        self.encode(tokens)
        msg = "from a method"
        raise ValueError(msg)

    def recover(self, tokens: Tensor) -> Tensor:
        """Catch an exception of forward, then go on."""
        with pytest.raises(IndexError):
            self(tokens + 100)
        return self.encode(tokens)


TOKENS = torch.arange(6).reshape(2, 3)
METHODS = ("generate", "encode", "fail", "recover")


def make_speaker(
    world_size: int = 2, *, register: typing.Iterable[str] = METHODS
) -> tuple[Speaker, Log]:
    mesh, log = recording_mesh((world_size,))
    torch.manual_seed(0)
    model = Speaker()
    fully_shard(model.encoder, mesh)
    fully_shard(model.decoder, mesh)
    fully_shard(model, mesh)
    for name in register:
        register_fsdp_forward_method(model, name)
    return model, log


def all_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, ShardedTensor) for param in model.parameters())


def train(model: Speaker) -> None:
    """Run a step, and see that it left every gradient."""
    model.zero_grad()
    model(TOKENS).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert all_sharded(model)


# --- what a method sees ---------------------------------------------------------------------------


def test_a_method_and_the_forwards_in_it_see_unsharded_parameters() -> None:
    """Also between two forwards; with gradients enabled around it there is no warning."""
    model, _ = make_speaker()
    model.generate(TOKENS)
    assert model.seen == [True] * 7
    assert all_sharded(model)


def test_a_method_that_is_not_registered_gathers_what_it_uses() -> None:
    """Each operator for itself; of large ones a warning says what to do instead."""
    model, log = make_speaker(register=())
    model.generate(TOKENS)
    assert model.seen[0] is False
    assert ("all_gather", model.embedding.weight.numel()) in log
    assert all_sharded(model)


def test_forward_may_call_a_registered_method() -> None:
    model, _ = make_speaker()
    for _ in range(2):
        train(model)
    assert model.seen == [True] * 4


@pytest.mark.parametrize("between", ["nothing", "training", "no_grad"])
def test_a_method_gives_what_it_gives_unsharded(between: str) -> None:
    """On one rank, where the numbers of the recording mesh mean something."""
    model, _ = make_speaker(1)
    torch.manual_seed(0)
    plain = Speaker()
    if between == "training":
        train(model)
    elif between == "no_grad":
        with torch.no_grad():
            model(TOKENS)
    assert torch.equal(model.generate(TOKENS), plain.generate(TOKENS))


def test_own_parameters_are_gathered_once_for_all_forwards_in_a_method() -> None:
    model, log = make_speaker()
    model.generate(TOKENS, steps=5)
    gathers = [count for what, count in log if what == "start all_gather"]
    assert gathers.count(12 * 8) == 1


def test_gradients_of_a_method_arrive() -> None:
    """One that uses the root's own parameters and not its forward."""
    model, log = make_speaker()
    for _ in range(2):
        model.zero_grad()
        log.clear()
        model.encode(TOKENS).sum().backward()
        assert model.embedding.weight.grad is not None
        assert model.encoder.weight.grad is not None
        assert sorted(count for what, count in log if what == "start reduce_scatter")
        assert all_sharded(model)


class Twice(nn.Module):
    """Calls itself, and then uses its parameter again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        return x * self.weight


def test_a_layer_may_call_itself() -> None:
    mesh, _ = recording_mesh((1,))
    plain = nn.Sequential(Twice(), nn.Linear(8, 8))
    model = copy.deepcopy(plain)
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    x = torch.randn(2, 8)
    for each in (plain, model):
        each(x).square().sum().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected.grad)


def test_a_layer_that_calls_itself_keeps_its_parameters_on_several_ranks() -> None:
    mesh, _ = recording_mesh((2,))
    model = nn.Sequential(Twice(), nn.Linear(8, 8))
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    model(torch.randn(2, 8)).sum().backward()
    assert all_sharded(model)


# --- exceptions -----------------------------------------------------------------------------------


def test_training_goes_on_after_a_method_has_failed() -> None:
    model, _ = make_speaker()
    with pytest.raises(ValueError, match="from a method"):
        model.fail(TOKENS)
    train(model)
    model.generate(TOKENS)
    assert all(model.seen)


def test_a_method_may_catch_what_forward_raises() -> None:
    model, _ = make_speaker()
    model.recover(TOKENS).sum().backward()
    assert all_sharded(model)
    train(model)


def test_after_a_failed_forward_a_method_uses_the_parameters_as_they_are_now() -> None:
    model, _ = make_speaker(1)
    with pytest.raises(IndexError):
        model(TOKENS + 100)
    torch.manual_seed(1)
    other = Speaker()
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.encode(TOKENS), other.encode(TOKENS))


def test_after_a_failed_forward_and_a_conversion_too() -> None:
    model, _ = make_speaker(1)
    with pytest.raises(IndexError):
        model(TOKENS + 100)
    model.to(torch.float64)
    assert model.encode(TOKENS).dtype == torch.float64


# --- registering ----------------------------------------------------------------------------------


def test_a_name_that_is_no_method_is_refused() -> None:
    model, _ = make_speaker()
    with pytest.raises(StateError, match=r"FSDPSpeaker has no method 'speak'.*got None"):
        register_fsdp_forward_method(model, "speak")
    with pytest.raises(StateError, match=r"no method 'seen'.*got \[\]"):
        register_fsdp_forward_method(model, "seen")


def test_a_module_that_is_not_sharded_is_left_alone() -> None:
    model = Speaker()
    register_fsdp_forward_method(model, "generate")
    assert "generate" not in vars(model)


def test_registering_twice_is_registering_once() -> None:
    model, _ = make_speaker()
    before = model.generate
    register_fsdp_forward_method(model, "generate")
    assert model.generate is before
    assert isinstance(before, ForwardMethod)
    assert before.__doc__ == Speaker.generate.__doc__
    assert before.__name__ == "generate"


def test_a_deep_copy_has_a_method_of_its_own() -> None:
    model, _ = make_speaker(1)
    model.generate(TOKENS)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert torch.equal(twin.encode(TOKENS), torch.zeros(2, 3, 8))
    assert model.encode(TOKENS).abs().sum() > 0


def test_a_method_can_be_pickled() -> None:
    """With its module, here one whose state is gone."""
    method = pickle.loads(pickle.dumps(ForwardMethod(plain := Speaker(), plain.encode)))
    assert torch.equal(method(TOKENS), plain.encode(TOKENS))
