"""Backwards for chosen parameters: ``backward(inputs=...)`` and ``torch.autograd.grad``."""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from models import CASES
from reference import Differences, assert_within, full, make_mesh, rank_batch, shard
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedTensor, fully_shard
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-12
CASE = CASES["mlp"]


def models(
    mesh_shape: tuple[int, ...] = (2,), **options: typing.Any
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = CASE.make().double()
    return shard(CASE, copy.deepcopy(plain), make_mesh(mesh_shape), **options), plain


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    x, y = rank_batch(CASE, dist.get_rank() if rank is None else rank, step)
    return CASE.loss(model, (x.double(), y.double()))


def mean_loss(plain: nn.Module, step: int) -> Tensor:
    ranks = range(dist.get_world_size())
    return sum(loss_of(plain, step, rank) for rank in ranks) / len(ranks)


# --- backward(inputs=...) -------------------------------------------------------------------------


def some_accumulate(
    mesh_shape: tuple[int, ...], when: str, names: tuple[str, ...], options: dict[str, typing.Any]
) -> Differences:
    model, plain = models(mesh_shape, **options)
    differences = Differences()
    given = {}
    for step in range(3):
        model.set_requires_gradient_sync(step != 0)
        if when == "before":
            given = dict(model.named_parameters())
        loss = loss_of(model, step)
        if when == "after":
            given = dict(model.named_parameters())
        if step == 2:
            loss.backward()
            mean_loss(plain, step).backward()
            continue
        loss.backward(inputs=[given[name] for name in names])
        wanted = dict(plain.named_parameters())
        mean_loss(plain, step).backward(inputs=[wanted[name] for name in names])
        if step == 1:
            differences.note_grads(model, plain)
    differences.note_grads(model, plain)
    return differences


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_backward_for_some_parameters(spawn: Spawn, mesh_shape: tuple[int, ...], when: str) -> None:
    names = ("layers.0.weight", "layers.2.bias")
    by_rank = spawn(some_accumulate, math.prod(mesh_shape), mesh_shape, when, names, {})
    assert_within(by_rank, grad=TOLERANCE)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_backward_for_all_parameters(spawn: Spawn, *, reshard_after_forward: bool) -> None:
    names = tuple(name for name, _ in CASE.make().named_parameters())
    options = {"reshard_after_forward": reshard_after_forward}
    by_rank = spawn(some_accumulate, 2, (2,), "before", names, options)
    assert_within(by_rank, grad=TOLERANCE)


@on_ranks(2)
def test_edges_of_the_graph_stand_for_their_parameters() -> None:
    model, plain = models()
    differences = Differences()
    edges = [get_gradient_edge(param) for param in model.parameters()]
    loss_of(model, 0).backward(inputs=edges)
    mean_loss(plain, 0).backward()
    differences.note_grads(model, plain)
    grads = torch.autograd.grad(loss_of(model, 1), edges)
    wanted = torch.autograd.grad(mean_loss(plain, 1), list(plain.parameters()))
    for grad, whole in zip(grads, wanted, strict=True):
        differences.note("grad", full(grad), whole)
    assert_within([differences], grad=TOLERANCE)


# --- autograd.grad --------------------------------------------------------------------------------


def grads_of_parameters(
    mesh_shape: tuple[int, ...], when: str, options: dict[str, typing.Any]
) -> Differences:
    model, plain = models(mesh_shape, **options)
    differences = Differences()
    params = list(model.parameters())
    for step in range(2):
        loss = loss_of(model, step)
        if when == "after":
            params = list(model.parameters())
        grads = torch.autograd.grad(loss, params)
        wanted = torch.autograd.grad(mean_loss(plain, step), list(plain.parameters()))
        for param, grad, whole in zip(model.parameters(), grads, wanted, strict=True):
            assert isinstance(grad, ShardedTensor)
            assert (grad.dtype, grad.device) == (param.dtype, param.device)
            differences.note("grad", full(grad), whole)
        assert all(param.grad is None for param in model.parameters())
        params = list(model.parameters())
    loss_of(model, 5).backward()
    mean_loss(plain, 5).backward()
    differences.note_grads(model, plain)
    return differences


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_gradients_are_the_average_of_the_ranks(
    spawn: Spawn, mesh_shape: tuple[int, ...], when: str
) -> None:
    by_rank = spawn(grads_of_parameters, math.prod(mesh_shape), mesh_shape, when, {})
    assert_within(by_rank, grad=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"reshard_after_forward": True}],
    ids=["offloaded", "resharded"],
)
def test_gradients_with_other_options(spawn: Spawn, options: dict[str, typing.Any]) -> None:
    assert_within(spawn(grads_of_parameters, 2, (2,), "after", options), grad=TOLERANCE)


def half_gradients() -> list[bool]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(4, 2), mp_policy=policy)
    grads = torch.autograd.grad(model(torch.ones(1, 4)).sum(), list(model.parameters()))
    return [grad.dtype == torch.float32 and bool((grad == 1).all()) for grad in grads]


def test_gradients_have_the_dtype_of_the_parameters(spawn: Spawn) -> None:
    assert spawn(half_gradients, 2) == [[True, True]] * 2


@pytest.mark.parametrize("use", ["product", "penalty"])
@on_ranks(2)
def test_gradients_can_be_differentiated(use: str) -> None:
    """Differentiate gradients of parameters: a product with the Hessian, a penalty."""
    model, plain = models()
    differences = Differences()
    torch.manual_seed(1)
    params, plain_params = list(model.parameters()), list(plain.parameters())
    directions = [torch.randn_like(param) for param in plain_params]
    if use == "product":
        products = []
        for each, loss in ((params, loss_of(model, 0)), (plain_params, mean_loss(plain, 0))):
            grads = torch.autograd.grad(loss, each, create_graph=True)
            dot = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
            products.append(torch.autograd.grad(dot, each))
        for product, wanted in zip(*products, strict=True):
            differences.note("grad", full(product), wanted)
    for each, loss in ((params, loss_of(model, 1)), (plain_params, mean_loss(plain, 1))):
        grads = torch.autograd.grad(loss, each, create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()
    differences.note_grads(model, plain)
    assert_within([differences], grad=TOLERANCE)


@on_ranks(2)
def test_a_graph_of_gradients_can_be_run_many_times() -> None:
    """Multiply with the Hessian again and again, as conjugate gradients do, and train after it."""
    model, plain = models()
    loss_of(model, 1).backward()
    model.zero_grad()
    kept = model.memory_stats()["unsharded_nbytes"]
    differences = Differences()
    results = []
    for it, loss in ((model, loss_of(model, 0)), (plain, mean_loss(plain, 0))):
        params = list(it.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        products = [grad.detach() for grad in grads]
        for _ in range(3):
            products = torch.autograd.grad(grads, params, products, retain_graph=True)
            with torch.no_grad():
                loss_of(it, 2)
        results.append(products)
    for product, wanted in zip(*results, strict=True):
        differences.note("grad", full(product), wanted)
    loss_of(model, 1).backward()
    mean_loss(plain, 1).backward()
    differences.note_grads(model, plain)
    assert_within([differences], grad=TOLERANCE)
    assert model.memory_stats()["unsharded_nbytes"] == kept


@on_ranks(2)
def test_a_graph_of_gradients_after_another_backward_is_explained() -> None:
    model, _ = models()
    loss = loss_of(model, 0)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError) as caught:
        sum(grad.square().sum() for grad in grads).backward()
    (note,) = caught.value.__notes__
    assert "If create_graph=True made its graph: run it before the next other backward" in note


@on_ranks(2)
def test_a_backward_after_a_reshard_by_hand_is_explained() -> None:
    model = fully_shard(nn.Linear(3, 3))
    model.unshard()
    loss = (torch.ones(2, 3, requires_grad=True) @ model.weight.t()).sum()
    model.reshard()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    (note,) = caught.value.__notes__
    assert "If reshard() was called after the forward, call it after the backward" in note


class Branches(nn.Module):
    """What rank `i` uses is layer `i`; nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[dist.get_rank()](x)


def unused_parameters() -> tuple[list[float | None], str]:
    model = fully_shard(Branches())
    weights = [layer.weight for layer in model.layers]
    loss = model(torch.ones(1, 2)).sum()
    grads = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(loss, weights)
    sums = [None if grad is None else grad.full_tensor().sum().item() for grad in grads]
    return sums, str(caught.value)


def test_parameters_that_some_ranks_use(spawn: Spawn) -> None:
    for sums, message in spawn(unused_parameters, 2):
        assert sums == [2.0, 2.0, None]
        assert "not have been used in the graph: 'layers.2.weight'" in message


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_the_module_says_by_what_to_divide(num_ranks: int) -> None:
    model: typing.Any = fully_shard(nn.Linear(4, 2))
    model.set_gradient_divide_factor(8)
    (grad,) = torch.autograd.grad(model(torch.ones(1, 4)).sum(), [model.weight])
    assert torch.equal(grad.full_tensor(), torch.full((2, 4), num_ranks / 8))


def inside_and_outside() -> float:
    model = fully_shard(nn.Linear(4, 2))
    loss = model(torch.ones(1, 4)).sum() + 3 * model.weight.sum()
    (grad,) = torch.autograd.grad(loss, [model.weight])
    return grad.full_tensor().mean().item()


def of_unsharded() -> tuple[str, float]:
    """Between `unshard` and the next forward whoever works with whole parameters gets wholes."""
    model = fully_shard(nn.Linear(4, 2))
    model.unshard()
    loss = (model.weight * (1 + dist.get_rank())).sum()
    (grad,) = torch.autograd.grad(loss, [model.weight])
    return type(grad).__name__, grad.mean().item()


def test_uses_outside_of_the_forward(spawn: Spawn) -> None:
    assert spawn(inside_and_outside, 2) == [4.0, 4.0]
    assert spawn(of_unsharded, 2) == [("Tensor", 1.0), ("Tensor", 2.0)]


def batched() -> None:
    model = fully_shard(nn.Linear(4, 2))
    out = model(torch.ones(1, 4)).sum(0)
    torch.autograd.grad(out, [model.weight], torch.eye(2), is_grads_batched=True)


def test_batched_gradients_are_refused(spawn_errors: Spawn) -> None:
    for error in spawn_errors(batched, 2):
        assert error.type_name == "StateError", error.traceback
        assert "Call it for each output" in error.message
