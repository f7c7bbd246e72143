"""Hooks of users on the gradients of parameters: on each rank's whole gradient, as under DDP."""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import CASES
from reference import Differences, assert_each_within, assert_within, make_mesh, rank_batch, shard
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardkit._compat.torch_autograd import tensor_hooks
from workers import Spawn, spawn_each

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-6
CASE = CASES["mlp"]


def squash(grad: Tensor) -> Tensor:
    """What no average of the ranks' gradients gives: not linear, and other in each row."""
    mask = torch.ones(grad.shape, dtype=grad.dtype)
    mask[: len(mask) // 2] = 0.5
    return grad.sign() * grad.square() * 10 * mask


def hook_all(model: nn.Module) -> list[typing.Any]:
    return [param.register_hook(squash) for param in model.parameters()]


def train_with_hooks(
    mesh_shape: tuple[int, ...], options: dict[str, typing.Any], is_compiled: bool, when: str
) -> Differences:
    """Compare with the mean of what a plain model with the same hooks gives on each rank's data."""
    torch.manual_seed(0)
    plain = CASE.make().double()
    model = copy.deepcopy(plain)
    if when == "before":
        handles = hook_all(model)
    shard(CASE, model, make_mesh(mesh_shape), **options)
    if when == "after":
        handles = hook_all(model)
    elif when == "after a step":
        loss_of(model, 100, dist.get_rank()).backward()
        model.zero_grad()
        handles = hook_all(model)
    if is_compiled:
        model.layers[0].compile(backend="aot_eager")
    plain_handles = hook_all(plain)
    differences = compare_steps(model, plain, 0, 2)
    for handle in (*handles, *plain_handles):
        handle.remove()
    differences.note(
        "grad", torch.tensor(compare_steps(model, plain, 2, 3)["grad"]), torch.tensor(0.0)
    )
    return differences


def compare_steps(model: nn.Module, plain: nn.Module, first: int, last: int) -> Differences:
    differences, ranks = Differences(), range(dist.get_world_size())
    for step in range(first, last):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            loss_of(model, 2 * step + part, dist.get_rank()).backward()
            for rank in ranks:
                loss_of(plain, 2 * step + part, rank).backward()
        for param in plain.parameters():
            param.grad /= len(ranks)
        differences.note_grads(model, plain)
        for each in (model, plain):
            each.zero_grad()
    return differences


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = rank_batch(CASE, rank, step)
    return CASE.loss(model, (x.double(), y.double()))


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_a_hook_gets_the_whole_gradient_of_this_rank(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    times = {when: when for when in ("before", "after", "after a step")}
    found = spawn_each(spawn, times, train_with_hooks, math.prod(mesh_shape), mesh_shape, {}, False)
    assert_each_within(found, grad=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"reshard_after_forward": False}],
    ids=["offloaded", "kept"],
)
def test_hooks_with_other_options(spawn: Spawn, options: dict[str, typing.Any]) -> None:
    assert_within(spawn(train_with_hooks, 2, (2,), options, False, "before"), grad=TOLERANCE)


def test_hooks_on_a_compiled_layer(spawn: Spawn) -> None:
    assert_within(spawn(train_with_hooks, 2, (2,), {}, True, "after"), grad=TOLERANCE)


def seen_dtypes() -> tuple[list[torch.dtype], list[tuple[int, ...]], float]:
    model = shard(CASE, CASE.make(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: list[Tensor] = []
    weight = model.layers[0].weight
    weight.register_hook(lambda grad: seen.append(grad) or torch.zeros_like(grad))
    model = model.to(torch.float64)  # All parameters get other pieces.
    x, y = rank_batch(CASE, dist.get_rank(), 0)
    CASE.loss(model, (x, y)).backward()
    return [g.dtype for g in seen], [tuple(g.shape) for g in seen], weight.grad.abs().sum().item()


def test_a_hook_gets_the_compute_dtype_and_survives_a_conversion(spawn: Spawn) -> None:
    assert spawn(seen_dtypes, 2) == [([torch.bfloat16], [(13, 7)], 0.0)] * 2


def frozen_then_trained() -> list[float]:
    """Rows of an embedding that a hook masks stay as they are."""
    model = fully_shard(nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)))
    weight = model[0].weight
    before = weight.full_tensor().detach().clone()
    mask = torch.zeros(6, 1)
    mask[4:] = 1
    weight.register_hook(lambda grad: grad * mask)
    weight.requires_grad_(False)
    model(torch.arange(6)).sum().backward()
    weight.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    return (weight.full_tensor() - before).abs().sum(1).tolist()


def test_masked_rows_stay(spawn: Spawn) -> None:
    for moved in spawn(frozen_then_trained, 2):
        assert moved[:4] == [0.0] * 4
        assert min(moved[4:]) > 0


def hooks_of_weights_used_elsewhere() -> tuple[list[str], float]:
    """A weight that is used outside of its forward: its sharded gradient passes through as well."""
    model = fully_shard(nn.Linear(4, 2))
    seen: list[str] = []
    model.weight.register_hook(lambda grad: seen.append(type(grad).__name__) or grad * 0)
    (model.weight.square().sum() + model(torch.ones(1, 4)).sum()).backward()
    return sorted(seen), model.weight.grad.abs().sum().item()


def test_a_gradient_outside_of_the_forward_passes_through_too(spawn: Spawn) -> None:
    assert spawn(hooks_of_weights_used_elsewhere, 2) == [(["ShardedTensor", "Tensor"], 0.0)] * 2


def masked_outside_of_the_forward(when: str) -> tuple[set[str], str, float]:
    """Mask the gradient of a weight that a loss uses; say what hooks got, and how wrong it is."""
    model = fully_shard(nn.Linear(4, 2))
    seen: set[str] = set()

    def hook(grad: Tensor) -> Tensor:
        seen.add(type(grad).__name__)
        return grad * torch.tensor([[0.0], [3.0]])

    def backward() -> None:
        x = torch.full((1, 4), 1.0 + dist.get_rank())
        uses = [nn.functional.linear(x, weight) for weight in (model.weight, model.weight * 2)]
        sum(uses).sum().backward()

    if when == "before":
        model.weight.register_hook(hook)
    backward()
    if when == "after":
        model.weight.register_hook(hook)
    model.zero_grad()
    backward()
    expected = torch.tensor([[0.0], [3.0 * 3 * 1.5]]).expand(2, 4)
    grad = model.weight.grad
    return seen, type(grad).__name__, (grad.full_tensor() - expected).abs().max().item()


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_hook_makes_of_a_sharded_gradient_is_one(spawn: Spawn, when: str) -> None:
    found = spawn(masked_outside_of_the_forward, 2, when)
    assert found == [({"ShardedTensor"}, "ShardedTensor", 0.0)] * 2


def calls_without_hooks() -> list[int]:
    """Count hooks on what modules compute with: only of parameters that have had one."""
    model = shard(CASE, CASE.make())
    first = model.layers[0].weight.register_hook(torch.Tensor.clone)
    first.remove()
    model.layers[1].weight.register_hook(torch.Tensor.clone)
    model.unshard()
    counts = []
    for layer in model.layers:
        layer.unshard()
        counts += [len(tensor_hooks(param) or {}) for param in layer.parameters()]
        layer.reshard()
    return counts


def test_nothing_is_on_parameters_without_hooks(spawn: Spawn) -> None:
    assert spawn(calls_without_hooks, 1) == [[1, 0, 1, 0, 0, 0]]


# --- hooks that a module adds in its forward, on the parameters that it sees there ----------------


class Doubling(nn.Module):
    """A layer whose first forward hooks its parameters, as shared adapters of experts do."""

    def __init__(self, *, anew: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.anew = anew
        self.handles: list[typing.Any] = []
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.anew:
            while self.handles:
                self.handles.pop().remove()
        if not self.handles:
            for param in self.linear.parameters():
                self.handles.append(param.register_post_accumulate_grad_hook(self.double))
        return torch.tanh(self.linear(x))

    def double(self, param: Tensor) -> None:
        assert param.grad is not None
        assert param.grad.shape in ((5, 5), (5,))
        param.grad.mul_(2)
        self.num_calls += 1


def double_in_forward(anew: bool) -> None:
    model = nn.Sequential(Doubling(anew=anew), Doubling(anew=anew), nn.Linear(5, 3)).double()
    plain = copy.deepcopy(model)
    mesh = make_mesh((dist.get_world_size(),))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(1, 4):
        batches = torch.randn(mesh.size(), 4, 5, dtype=torch.float64)
        model(batches[mesh.get_rank()]).square().mean().backward()
        plain(batches).square().mean().backward()
        for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]
        assert [layer.num_calls for layer in model[:2]] == [2 * step] * 2
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("anew", [False, True], ids=["once", "anew in each step"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_hook_added_in_a_forward_changes_the_gradient(
    spawn: Spawn,
    world_size: int,
    anew: bool,
) -> None:
    """The gradient is taken after it ran, also the first time."""
    spawn(double_in_forward, world_size, anew)
