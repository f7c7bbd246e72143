"""Exceptions in the middle of a step, of every kind and place; then training goes on as if not."""

from __future__ import annotations

import contextlib
import copy
import itertools
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from one_backward import MODES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allocated import all_read_directly
from models import CASES, MLP, Case, regression_batch, squared_error
from parity import compare_training, in_turns
from reference import (
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
    make_mesh,
    my_batch,
    shard,
)
from shardkit import MixedPrecisionPolicy, ShardedTensor, StateError, fully_shard
from shardkit._params.memory import SlotPool
from shardkit.backends.direct_reads import DirectExchange
from workers import Spawn, on_ranks, spawn_each

EXCEPTIONS: dict[str, tuple[type[BaseException], str]] = {
    "memory": (RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
    "interrupt": (KeyboardInterrupt, "^C"),
}


class Fuse:
    """Raises when it is armed with the place that calls it."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.exception = ""

    def at(self, place: str) -> None:
        if place == self.armed:
            kind, text = EXCEPTIONS[self.exception]
            raise kind(text)  # No variable holds it: torch 2.9 cleans up when it is collected.


fuse = Fuse()


class Burn(torch.autograd.Function):
    """Identity, whose backward may raise, as one that cannot allocate does."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        fuse.at("backward of a layer")
        return grad


class FragileLayer(nn.Module):
    """A linear layer that may raise after its forward or inside its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        x = Burn.apply(self.linear(x))
        fuse.at("forward of a layer")
        return self.norm(x)


class Fragile(nn.Module):
    """Layers, one of them recomputed; it may raise between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FragileLayer() for _ in range(3))
        self.last = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        fuse.at("forward of the root")
        x = torch.tanh(checkpoint(self.layers[1], x, use_reentrant=False))
        x = self.layers[2](x)
        if x.requires_grad:
            x.register_hook(burn_in_hook)
        return self.head(self.last(x))


def burn_in_hook(grad: Tensor) -> None:  # noqa: ARG001
    fuse.at("hook of a tensor")


FRAGILE = Case(Fragile, lambda model: [*model.layers, model.last], regression_batch, squared_error)

PLACES = (
    "forward of a layer",
    "forward of the root",
    "backward of a layer",
    "hook of a tensor",
    "forward pre-hook",
    "forward hook",
    "backward hook",
    "hook of a parameter",
)


def add_hooks(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Register what users register: hooks that may raise."""
    layer = model.layers[1]
    layer.register_forward_pre_hook(lambda *_: fuse.at("forward pre-hook"))
    layer.register_forward_hook(lambda *_: fuse.at("forward hook"))
    model.layers[2].register_full_backward_hook(lambda *_: fuse.at("backward hook"))
    parameters[-4].register_post_accumulate_grad_hook(lambda _: fuse.at("hook of a parameter"))


def train_interrupted(place: str, choice: tuple[bool | None, str]) -> Differences:
    reshard_after_forward, exception = choice
    plain = Fragile()
    model = shard(FRAGILE, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    parameters = list(model.parameters())
    add_hooks(model, parameters)
    fuse.exception = exception
    for step in range(3):
        fuse.armed = None
        FRAGILE.loss(model, my_batch(FRAGILE, step)).backward()  # Leaves gradients behind.
        fuse.armed = place
        for _ in range(2):
            with pytest.raises(EXCEPTIONS[exception][0]):
                FRAGILE.loss(model, my_batch(FRAGILE, step)).backward()
            if step == 1:
                continue  # At once again.
            if exception != "interrupt":  # What ctrl-C leaves is tidied up by the next forward.
                model.zero_grad()
                assert all(isinstance(param, ShardedTensor) for param in model.parameters())
            for param in parameters:
                assert param.grad is None or exception == "interrupt"
    fuse.armed = None
    with torch.no_grad():
        FRAGILE.loss(model, my_batch(FRAGILE, 0))
    model.zero_grad()
    return compare_training(FRAGILE, model, plain, steps=4)


@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_after_an_exception_anywhere(spawn: Spawn, place: str) -> None:
    turns = in_turns(PLACES, [True, False, None], list(EXCEPTIONS))
    choices = {f"{how}, {what}": (how, what) for where, how, what in turns if where == place}
    found = spawn_each(spawn, choices, train_interrupted, 2, place)
    assert_each_within(found, **TRAINED)


def train_without_memory(reshard_after_forward: bool) -> Differences:
    """Have each request for memory of a step fail once, and go on each time."""
    plain = Fragile()
    model = shard(FRAGILE, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    acquire, calls = SlotPool.acquire, itertools.count()
    fails_at = 0

    def fail(*args: typing.Any) -> typing.Any:
        if next(calls) == fails_at:
            raise RuntimeError(EXCEPTIONS["memory"][1])
        return acquire(*args)

    with mock.patch.object(SlotPool, "acquire", fail):
        while True:
            calls = itertools.count()
            try:
                FRAGILE.loss(model, my_batch(FRAGILE, 0)).backward()
            except RuntimeError as error:
                assert "allocate" in str(error)  # noqa: PT017 - the last call raises nothing
            else:
                break
            model.zero_grad()
            fails_at += 1
    assert fails_at > len(FRAGILE.groups(model))
    model.zero_grad()
    return compare_training(FRAGILE, model, plain, steps=2)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_training_goes_on_after_any_memory_was_refused(
    spawn: Spawn, reshard_after_forward: bool
) -> None:
    assert_within(spawn(train_without_memory, 2, reshard_after_forward), **TRAINED)


# --- caught inside of the model -------------------------------------------------------------------


class Forgiving(MLP):
    """Goes on without a layer that raises."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = self.linear(x)
            if self.calls % 2 == 0:
                raise RuntimeError
            return torch.tanh(x)

    def __init__(self) -> None:
        super().__init__((7, 7, 7, 5))
        self.layers[1] = self.Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        try:
            x = self.layers[1](x)
        except RuntimeError:
            x = x * 2
        return self.layers[2](x)


FORGIVING = Case(Forgiving, CASES["mlp"].groups, regression_batch, squared_error)


def train_forgiving(reshard_after_forward: bool | None) -> Differences:
    plain = Forgiving()
    model = shard(FORGIVING, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    differences = compare_training(FORGIVING, model, plain, steps=6)
    assert model.layers[1].calls == 6
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return differences


def test_a_model_may_catch_what_a_layer_raises(spawn: Spawn) -> None:
    found = spawn_each(spawn, MODES, train_forgiving, 2)
    assert_each_within(found, **TRAINED)


def memory_after_an_exception() -> tuple[int, int]:
    """Return unsharded bytes after an exception in forward, before and after parameters()."""
    model = shard(FRAGILE, Fragile())
    fuse.armed, fuse.exception = "forward of the root", "memory"
    with pytest.raises(RuntimeError, match="allocate"):
        FRAGILE.loss(model, my_batch(FRAGILE, 0))
    before = model.memory_stats()["unsharded_nbytes"]
    list(model.parameters())
    fuse.armed = None
    return before, model.memory_stats()["unsharded_nbytes"]


def test_asking_for_parameters_after_an_exception_frees_memory(spawn: Spawn) -> None:
    for before, after in spawn(memory_after_an_exception, 2):
        assert before > 0
        assert after == 0


def call_a_hook_that_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    for module in (*model, model):
        fully_shard(module, make_mesh((2,)))
    calls = []

    def fail(_: torch.Tensor) -> None:
        calls.append(1)
        message = "on purpose"
        raise ValueError(message)

    for layer in model:
        layer.set_all_reduce_hook(fail)
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="on purpose"):
        model(x).sum().backward()
    num_calls = len(calls)
    for layer in model:
        layer.set_all_reduce_hook(None)
    model.zero_grad()
    model(x).sum().backward()
    plain(x).sum().backward()
    assert len(calls) == num_calls
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@on_ranks(2)
def test_a_hook_that_raised_is_not_called_again() -> None:
    """Several small groups travel together, and the hook of the first one raises.

    Of large ones a wait that makes room for the next gather calls the hook.
    """
    call_a_hook_that_raises()
    with all_read_directly():
        call_a_hook_that_raises()


@on_ranks(1)
def test_one_rank_calls_the_hook_of_each_large_group_once() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for module in (*model, model):
        fully_shard(module, make_mesh((1,)))
    calls: list[tuple[int, bool]] = []
    for number, layer in enumerate(model):

        def note(gradients: Tensor, number: int = number) -> None:
            calls.append((number, bool(gradients.any())))

        layer.set_all_reduce_hook(note)
    with all_read_directly():
        model(torch.ones(2, 4)).sum().backward()
    assert calls == [(2, True), (1, True), (0, True)]


def interrupt_the_wait(number: int) -> None:
    """Interrupt a wait for other ranks, as Ctrl-C does: memory is freed when it has ended."""
    case = CASES["mlp"]
    model = shard(case, case.make())
    case.loss(model, my_batch(case, 0)).backward()  # The ranks have found each other.
    wait, waits = DirectExchange.wait, list[DirectExchange]()

    def interrupted(exchange: DirectExchange) -> None:
        waits.append(exchange)
        if len(waits) == number:
            raise KeyboardInterrupt
        wait(exchange)

    with mock.patch.object(DirectExchange, "wait", interrupted):
        with pytest.raises(KeyboardInterrupt):
            case.loss(model, my_batch(case, 0)).backward()
        dist.barrier()
        model.reset_iter_state()
    assert waits[number - 1] in waits[number:]


@on_ranks(2)
def test_what_an_interrupt_leaves_unfinished_is_waited_for() -> None:
    with all_read_directly():
        for number in range(1, 8):
            interrupt_the_wait(number)


@on_ranks(2)
def test_dropped_gradients_of_earlier_backwards_are_told() -> None:
    """In the next forward, and only if there were some."""
    model = shard(CASES["mlp"], CASES["mlp"].make())
    x, _ = my_batch(CASES["mlp"], 0)

    def interrupt(*, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.cat([x, x], dim=-1))

    interrupt(is_last=False)
    model(x).sum().backward()  # Its gradients are the first that wait: no warning before.
    interrupt(is_last=True)
    with pytest.warns(UserWarning, match=r"not synced yet, are dropped.*zero_grad\(\)"):
        model(x).sum().backward()
    interrupt(is_last=True)
    model(x).sum().backward()


class Twice(nn.Module):
    """A layer that tries itself on other input first, which raises, and uses its weight then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.is_inner = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_inner:
            raise ValueError
        self.is_inner = True
        with contextlib.suppress(ValueError):
            self(x)
        self.is_inner = False
        return x @ self.linear.weight.t()


@on_ranks(2)
def test_a_layer_may_catch_what_a_call_of_itself_raises() -> None:
    """Its parameters stay unsharded, in the policy's dtype."""
    model = nn.Sequential(Twice(), nn.Linear(7, 5, bias=False)).double()
    plain = copy.deepcopy(model).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model, model):
        fully_shard(module, make_mesh((2,)), policy)
    for _ in range(2):
        x = torch.randn(4, 7, dtype=torch.bfloat16)
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_a_backward_may_follow_one_that_raised(reshard_after_forward: bool) -> None:
    """At once: nobody asked for the parameters, and no forward has run in between."""
    plain = Fragile()
    model = shard(FRAGILE, copy.deepcopy(plain), reshard_after_forward=reshard_after_forward)
    parameters = list(model.parameters())
    x, _ = my_batch(FRAGILE, 0)
    for _ in range(2):
        first, second = model(x), model(x)
        fuse.armed, fuse.exception = "backward of a layer", "memory"
        with pytest.raises(RuntimeError, match="allocate"):
            first.sum().backward()
        fuse.armed = None
        for param in parameters:  # The backward that raised may have set some.
            param.grad = None
        second.square().mean().backward()
        expected = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
        for param, grad in zip(parameters, expected, strict=True):
            dist.all_reduce(grad)
            torch.testing.assert_close(param.grad.full_tensor(), grad / 2)  # type: ignore[union-attr]


@on_ranks(2)
def test_parameters_are_sharded_after_a_root_was_refused_at_the_end_of_its_forward() -> None:
    class Freezing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.requires_grad_(False)
            return super().forward(x)

    model = fully_shard(Freezing(4, 4), make_mesh((2,)))
    with pytest.raises(StateError, match="requires_grad of 'weight' was changed"):
        model(torch.ones(2, 4))
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())


@on_ranks(2)
def test_what_an_interrupted_functional_call_was_given_is_not_used_again() -> None:
    plain = Fragile()
    model = shard(FRAGILE, copy.deepcopy(plain))
    x, _ = my_batch(FRAGILE, 0)
    first, second = (
        {name: torch.randn_like(param) for name, param in plain.named_parameters()}
        for _ in range(2)
    )
    for given in ({}, second):
        fuse.armed, fuse.exception = "forward of a layer", "interrupt"
        with pytest.raises(KeyboardInterrupt):
            torch.func.functional_call(model, first, (x,))
        fuse.armed = None
        found = torch.func.functional_call(model, given, (x,)) if given else model(x)
        torch.testing.assert_close(found, torch.func.functional_call(plain, given, (x,)))
