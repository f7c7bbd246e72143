"""`checkpoint_module`: less is kept, the numbers are the same."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from recording import recording_mesh
from shardkit import StateError, checkpoint_module, fully_shard
from shardkit._module import activation_checkpoint


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.num_forwards = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.num_forwards += 1
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5) * scale


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model(x, scale=2.0).square().sum().backward()
    return [param.grad for param in model.parameters()]


def test_forward_runs_again_with_the_same_random_numbers() -> None:
    plain = Counting()
    kept = copy.deepcopy(plain)
    assert checkpoint_module(kept) is kept
    x = torch.randn(3, 6)
    for found, expected in zip(gradients(kept, x), gradients(plain, x), strict=True):
        assert torch.equal(found, expected)
    assert (plain.num_forwards, kept.num_forwards) == (1, 2)


def test_it_keeps_inputs_only() -> None:
    saved: list[torch.Tensor] = []
    model = checkpoint_module(Counting())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x = torch.randn(3, 6, requires_grad=True)
        model(x)
    # Torch 2.9 saves an empty tensor besides.
    assert all(tensor is x or tensor.numel() == 0 for tensor in saved)


@pytest.mark.parametrize("first", ["checkpoint", "shard"])
def test_sharded_before_or_after(first: str) -> None:
    mesh, log = recording_mesh((1,))
    plain = Counting()
    model = copy.deepcopy(plain)
    if first == "checkpoint":
        fully_shard(checkpoint_module(model), mesh)
    else:
        checkpoint_module(fully_shard(model, mesh))
    x = torch.randn(3, 6)
    for found, expected in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(found.full_tensor(), expected)
    del log


def test_a_functional_call_differentiates_by_the_given_values() -> None:
    plain, x = Counting(), torch.randn(3, 6)
    values = {name: torch.randn_like(param) for name, param in plain.named_parameters()}
    results = []
    for model in (plain, checkpoint_module(copy.deepcopy(plain))):
        given = {name: value.clone().requires_grad_() for name, value in values.items()}
        torch.manual_seed(3)
        functional_call(model, given, (x,)).square().sum().backward()
        results.append([value.grad for value in given.values()])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_copies_and_pickles_are_independent() -> None:
    model = checkpoint_module(Counting())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gradients(copied, torch.randn(3, 6))
        assert (copied.num_forwards, model.num_forwards) == (2, 0)


class Buffered(nn.Module):
    """Writes to its buffers, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        y = self.norm(self.linear(x))
        self.steps += 1
        self.largest = torch.maximum(self.largest, self.steps * 2)
        return torch.tanh(y) * scale


def test_buffers_are_written_once() -> None:
    plain = Buffered()
    kept = checkpoint_module(copy.deepcopy(plain))
    x = torch.randn(3, 6)
    for _ in range(2):
        for found, expected in zip(gradients(kept, x), gradients(plain, x), strict=True):
            assert torch.equal(found, expected)
    for (name, found), expected in zip(kept.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), name
    assert kept.steps == 2


class Normalizer(nn.Module):
    """Reads its buffers, then writes them, in place and by assignment; and reads a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))
        self.register_buffer("table", torch.linspace(1, 2, 6))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        y = self.linear(x) * self.scale.clone() + self.shift
        if self.training:
            self.scale.mul_(0.5)
            self.shift = self.shift + y.detach().mean(0)
        return torch.tanh(y * self.table) * self.linear(y) * scale


def test_what_is_read_before_it_is_written_is_the_same_again() -> None:
    plain = Normalizer()
    kept = checkpoint_module(copy.deepcopy(plain))
    x = torch.randn(3, 6)
    for is_training in (False, True, True):
        for model in (plain, kept):
            model.train(is_training).zero_grad()
        for found, expected in zip(gradients(kept, x), gradients(plain, x), strict=True):
            assert torch.equal(found, expected)
        kept = pickle.loads(pickle.dumps(copy.deepcopy(kept)))
    for (name, found), expected in zip(kept.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), name


class Caching(nn.Module):
    """Makes a table when it is first needed, and counts its forwards by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", None)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(6.0)
        self.count = self.count + 1
        return torch.tanh(self.linear(x + self.table + self.count)) * scale


def test_buffers_may_be_made_in_inference_mode() -> None:
    plain = Caching()
    kept = checkpoint_module(copy.deepcopy(plain))
    x = torch.randn(3, 6)
    for model in (plain, kept):
        with torch.inference_mode():
            model(x)
    for _ in range(2):
        for found, expected in zip(gradients(kept, x), gradients(plain, x), strict=True):
            assert torch.equal(found, expected)
    assert kept.count == plain.count == 3


def test_only_buffers_that_are_written_are_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    original = activation_checkpoint.copy_of_buffer

    def note(buffer: torch.Tensor) -> torch.Tensor:
        copied.append(buffer.numel())
        return original(buffer)

    monkeypatch.setattr(activation_checkpoint, "copy_of_buffer", note)
    kept, x = checkpoint_module(Normalizer()), torch.randn(3, 6)
    nums = []
    for _ in range(3):
        gradients(kept, x)
        nums.append(len(copied))
        copied.clear()
    assert nums == [3 + 2, 2 + 2, 2 + 2]
    with torch.no_grad():
        kept(x)
    assert not copied


def test_a_name_is_no_module() -> None:
    with pytest.raises(StateError, match=r"this str is no module"):
        checkpoint_module("x")  # type: ignore[arg-type]


def test_twice_is_an_error() -> None:
    model = checkpoint_module(Counting())
    with pytest.raises(StateError, match="Counting is checkpointed already"):
        checkpoint_module(model)
    other = Counting()
    other.forward = lambda x: x
    with pytest.raises(StateError, match="has a forward of its own"):
        checkpoint_module(other)
