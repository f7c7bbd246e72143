"""Groups of frozen and trained parameters, of several dtypes, frozen and thawed along the way."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from one_backward import MODES
from torch import Tensor, nn

from models import CASES, WIDTHS, Case, regression_batch, squared_error
from parity import compare_training
from reference import (
    OPTIMIZERS,
    SGD_TOLERANCE,
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
    full_grads,
    global_batch,
    make_mesh,
    my_batch,
    rank_batch,
    shard,
    step_all,
)
from shardkit import MixedPrecisionPolicy, fully_shard
from workers import Spawn, on_ranks, spawn_each

pytestmark = pytest.mark.helpers

# --- adapters on a frozen base --------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank, as LoRA has it."""

    def __init__(self, in_features: int, out_features: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class AdaptedMLP(nn.Module):
    """Adapted layers, the last one of which is frozen altogether; a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(WIDTHS[0], WIDTHS[0]) for _ in range(4))
        self.layers[-1].requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTHS[0], WIDTHS[-1])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


ADAPTED = Case(AdaptedMLP, lambda model: list(model.layers), regression_batch, squared_error)


def train_adapters(mesh_shape: tuple[int, ...], reshard_after_forward: bool | None) -> Differences:
    """Return the differences; every frozen parameter has the value it began with."""
    plain = ADAPTED.make()
    begin = {name: param.clone() for name, param in plain.named_parameters()}
    mesh = make_mesh(mesh_shape)
    model = shard(ADAPTED, copy.deepcopy(plain), mesh, reshard_after_forward=reshard_after_forward)
    differences = compare_training(ADAPTED, model, plain, "sgd")
    frozen = [
        torch.equal(param.full_tensor(), begin[name])
        for name, param in model.named_parameters()
        if not param.requires_grad
    ]
    assert len(frozen) == 4 * 2 + 2
    assert all(frozen)
    return differences


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_adapters_in_the_group_of_their_frozen_base(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    found = spawn_each(spawn, MODES, train_adapters, math.prod(mesh_shape), mesh_shape)
    assert_each_within(found, **TRAINED)


def bytes_to_reduce() -> tuple[int, int]:
    """Return the most bytes of gradient buffers, and the bytes of all trained parameters."""
    model = shard(ADAPTED, ADAPTED.make())
    ADAPTED.loss(model, my_batch(ADAPTED, 0)).backward()
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return model.memory_stats()["reduce_buffer_nbytes"], 4 * trained


def test_frozen_parameters_take_no_room_in_gradient_buffers(spawn: Spawn) -> None:
    """On two ranks half as much again is received as is sent; the padding is 16 bytes a piece."""
    for buffers, trained in spawn(bytes_to_reduce, 2):
        padding = 2 * 16 * 8
        assert 0 < buffers <= trained * 1.5 + padding


class Prompted(nn.Module):
    """What is trained first goes through a frozen layer, and then through a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.head = nn.Linear(4, 1)

    def forward(self) -> Tensor:
        self.inner = self.prompt * 1
        if not self.inner.requires_grad:
            self.inner.requires_grad_()
        return self.head(self.frozen(self.inner)).sum()


@pytest.mark.parametrize("what", ["an ignored parameter", "a tensor of its own"])
@on_ranks(2)
def test_backward_goes_on_through_frozen_layers_after_the_last_gradient(what: str) -> None:
    torch.manual_seed(0)
    plain = Prompted()
    plain.prompt.requires_grad_(what == "an ignored parameter")
    model = copy.deepcopy(plain)
    ignored = {model.prompt} if model.prompt.requires_grad else set()
    fully_shard(model, mesh=make_mesh((2,)), ignored_params=ignored)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each().backward()
        first = "prompt" if model.prompt.requires_grad else "inner"
        assert torch.equal(getattr(model, first).grad, getattr(plain, first).grad)
        assert model.memory_stats()["unsharded_nbytes"] == 0


# --- frozen and thawed later ----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("frozen", ["layers.0.weight", "layers.1.bias", "layers.2.weight"])
@on_ranks(2)
def test_a_parameter_frozen_and_thawed_between_steps(frozen: str, optimizer: str) -> None:
    """While frozen its gradient is None, and the optimizer's momentum leaves it alone."""
    case = CASES["mlp"]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain))
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in (model, plain)]
    differences = Differences()
    for step in range(6):
        for each in (model, plain):
            each.get_parameter(frozen).requires_grad_(requires_grad=step // 2 != 1)
        case.loss(model, my_batch(case, step)).backward()
        case.loss(plain, global_batch(case, step)).backward()
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    tolerance = {"sgd": SGD_TOLERANCE, "adamw": 2e-5}[optimizer]
    assert_within([differences], grad=tolerance, parameter=tolerance)


@on_ranks(2)
def test_layers_thawed_one_after_another() -> None:
    """Groups that were frozen when they were sharded are trained from then on."""
    case = CASES["mlp"]
    plain = case.make()
    for layer in plain.layers[:-1]:
        layer.requires_grad_(requires_grad=False)
    model = shard(case, copy.deepcopy(plain))
    optimizers = [
        OPTIMIZERS["sgd"](param for param in each.parameters() if param.requires_grad)
        for each in (model, plain)
    ]
    differences = Differences()
    for step in range(6):
        if step in (2, 4):
            for each, own in zip((model, plain), optimizers, strict=True):
                layer = each.layers[1 if step == 2 else 0]
                layer.requires_grad_(requires_grad=True)
                own.add_param_group({"params": list(layer.parameters())})
        case.loss(model, my_batch(case, step)).backward()
        case.loss(plain, global_batch(case, step)).backward()
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    assert_within([differences], grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


@pytest.mark.parametrize("frozen", ["layers.0", "layers.1", "layers.2"])
@on_ranks(2)
def test_a_layer_frozen_between_forward_and_backward(frozen: str) -> None:
    """Freeze a part between a forward and its backward: it gets no gradient."""
    case = CASES["mlp"]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain))
    differences = Differences()
    for step in range(2):
        losses = case.loss(model, my_batch(case, step)), case.loss(plain, global_batch(case, step))
        for each, loss in zip((model, plain), losses, strict=True):
            each.get_submodule(frozen).requires_grad_(requires_grad=False)
            loss.backward()
        differences.note_grads(model, plain)
        for each in (model, plain):
            each.zero_grad()
            each.get_submodule(frozen).requires_grad_(requires_grad=True)
    assert_within([differences], grad=SGD_TOLERANCE)


# --- dtypes ---------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Weights of a narrow dtype beside a norm and a gate in fp32, as mixtures of experts have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.gate = nn.Linear(7, 1)
        self.mix = nn.Linear(7, 7, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        mixed = self.mix(normed.to(self.mix.weight.dtype))
        return x + torch.sigmoid(self.gate(normed)) * mixed.to(x.dtype)


class GatedMLP(nn.Module):
    """Two such layers and a head that is a third dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Gated(torch.bfloat16), Gated(torch.float16)])
        self.head = nn.Linear(7, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.to(self.head.weight.dtype)).float()


GATED = Case(GatedMLP, lambda model: list(model.layers), regression_batch, squared_error)


def set_mean_grads(case: Case, model: nn.Module, step: int) -> None:
    """Set gradients to the mean over ranks, summed in fp32 or wider and rounded once."""
    sums: dict[str, Tensor] = {}
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        case.loss(model, rank_batch(case, rank, step)).backward()
        for name, param in model.named_parameters():
            wide = param.grad.to(torch.promote_types(param.dtype, torch.float32))
            sums[name] = sums[name] + wide if name in sums else wide
    for name, param in model.named_parameters():
        param.grad = (sums[name] / dist.get_world_size()).to(param.dtype)


@pytest.mark.parametrize("one_group", [True, False])
@pytest.mark.parametrize("mesh_shape", [(2,), (1, 2)], ids=str)
@on_ranks("mesh_shape")
def test_several_storage_dtypes_in_one_group_are_exact(
    mesh_shape: tuple[int, ...], one_group: bool
) -> None:
    """Each dtype is gathered and reduced as it is; the sum of two is rounded once, as here."""
    plain = GATED.make()
    case = Case(GATED.make, lambda _: [], GATED.batch, GATED.loss) if one_group else GATED
    model = shard(case, copy.deepcopy(plain), make_mesh(mesh_shape))
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = Differences()
    for step in range(5):
        GATED.loss(model, my_batch(GATED, step)).backward()
        set_mean_grads(GATED, plain, step)
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    assert_within([differences], grad=0.0, parameter=0.0)


def dtypes_with_a_policy() -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype]]:
    """Return the dtypes seen in forward, and those of parameters and gradients between steps."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(GATED, GATED.make(), mp_policy=policy)
    seen: set[torch.dtype] = set()
    for layer in model.layers:
        for child in layer.children():
            child.register_forward_pre_hook(lambda child, _: seen.add(child.weight.dtype))
    GATED.loss(model, my_batch(GATED, 0)).backward()
    kept = {param.dtype for param in model.parameters()}
    return seen, kept, {grad.dtype for grad in full_grads(model).values() if grad is not None}


def test_a_policy_computes_in_one_dtype_what_is_stored_in_several(spawn: Spawn) -> None:
    stored = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
    assert spawn(dtypes_with_a_policy, 2) == [({torch.bfloat16}, stored, stored)] * 2
