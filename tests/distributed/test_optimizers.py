"""Optimizers on sharded parameters against the same ones on whole parameters."""

from __future__ import annotations

import copy
import functools
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import CASES, Parameters
from parity import in_turns
from reference import (
    Differences,
    assert_each_within,
    assert_within,
    make_mesh,
    rank_batch,
    shard,
    step_all,
    whole_and_sharded,
)
from shardkit import ShardedTensor, fully_shard
from shardkit.optim import LocalOptimizer
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Iterable


STEPS = 6


class Lion(torch.optim.Optimizer):
    """Sign momentum (arXiv:2302.06675), written as users write one: parameter by parameter."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = (state["momentum"] * beta1 + parameter.grad * (1 - beta1)).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    update, alpha=-group["lr"]
                )
                state["momentum"].lerp_(parameter.grad, 1 - beta2)


class ByAddress(torch.optim.Optimizer):
    """Momentum of halves of parameters, which finds its state by the addresses of these halves."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})
        self.momenta: dict[typing.Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                middle = parameter.numel() // 2
                for part in (slice(middle), slice(middle, None)):
                    half, slope = parameter.view(-1)[part], parameter.grad.view(-1)[part]
                    momentum = self.momenta.get((half.data_ptr(), half.numel()))
                    momentum = slope.clone() if momentum is None else momentum * 0.9 + slope
                    self.momenta[half.data_ptr(), half.numel()] = momentum
                    half.sub_(momentum * 0.1)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, typing.Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
}
FUSED = ("SGD", "SGD nesterov", "Adam", "AdamW amsgrad", "Adagrad")
LOOPS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}

# torch's fused CPU kernels round differently in their vector loop and in its remainder, so that an
# element's result depends on its position: plain torch on pieces of a tensor differs from plain
# torch on the whole by as much.
FUSED_TOLERANCE = 1e-6
FUSED_TOLERANCES = {"grad": 0.0, "parameter": FUSED_TOLERANCE, "state": FUSED_TOLERANCE}
EXACT = {"grad": 0.0, "parameter": 0.0, "state": 0.0}


def give_gradients(plain: Parameters, sharded: nn.Module, generator: torch.Generator) -> None:
    """Give whole and sharded parameters the same gradients."""
    slopes = plain.draw_slopes(generator)
    for model in (plain, sharded):
        model(slopes).backward()


def take_steps(
    mesh_shape: tuple[int, ...],
    extra: dict[str, typing.Any],
    kind: tuple[type[torch.optim.Optimizer], dict[str, typing.Any]],
) -> Differences:
    """Step whole and sharded parameters, given the same gradients; compare state as well.

    With ``local`` among the options a `LocalOptimizer` steps the sharded ones. With ``before`` they
    are sharded after so many steps.
    """
    optimizer_class, options = kind[0], {**kind[1], **extra}
    first = options.pop("before", None)
    plain = Parameters()
    sharded = copy.deepcopy(plain)
    if first is None:
        fully_shard(sharded, make_mesh(mesh_shape))
    if options.pop("local", False):
        of_sharded: typing.Any = functools.partial(LocalOptimizer, optimizer_class=optimizer_class)
    else:
        of_sharded = optimizer_class
    optimizers = [
        optimizer_class(plain.parameters(), **options),
        of_sharded(sharded.parameters(), **options),
    ]
    generator = torch.Generator()
    differences = Differences()
    for step in range((first or 0) + STEPS):
        if step == first:
            fully_shard(sharded, make_mesh(mesh_shape))
        give_gradients(plain, sharded, generator)
        if step >= (first or 0):
            differences.note_grads(sharded, plain)
        step_all(optimizers)
    differences.note_parameters(sharded, plain)
    check_state_is_sharded(optimizers[1])
    note_state(differences, optimizers[1], optimizers[0])
    return differences


def note_state(
    differences: Differences, actual: torch.optim.Optimizer, expected: torch.optim.Optimizer
) -> None:
    """Compare state dicts. Collective."""
    differences["state"] = 0.0
    found, wanted = actual.state_dict(), expected.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            have = found["state"][number][name]
            if isinstance(have, ShardedTensor):
                differences.note("state", have.full_tensor(), value, name)
            else:
                assert have == value, name


def check_state_is_sharded(optimizer: torch.optim.Optimizer) -> None:
    """State of a parameter's size must be cut as the parameter is; a step counter need not."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                assert isinstance(value, ShardedTensor), name
                assert value.to_local().shape == parameter.to_local().shape, name


@pytest.mark.parametrize("form", LOOPS)
def test_pointwise_optimizers_are_exact(spawn: Spawn, form: str) -> None:
    found = spawn_each(spawn, OPTIMIZERS, take_steps, 4, (4,), LOOPS[form])
    assert_each_within(found, **EXACT)


def test_fused_optimizers_round_as_in_plain_torch(spawn: Spawn) -> None:
    kinds = {name: OPTIMIZERS[name] for name in FUSED}
    found = spawn_each(spawn, kinds, take_steps, 4, (4,), {"fused": True})
    assert_each_within(found, **FUSED_TOLERANCES)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_an_optimizer_written_by_hand_is_exact(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    found = spawn(take_steps, math.prod(mesh_shape), mesh_shape, {}, (Lion, {}))
    assert_within(found, **EXACT)


# --- LocalOptimizer -------------------------------------------------------------------------------

ELEMENTWISE = {
    **OPTIMIZERS,
    "SGD plain": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad filled": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}


@pytest.mark.helpers
@pytest.mark.parametrize("form", LOOPS)
def test_elementwise_classes_are_exact_in_a_local_optimizer(spawn: Spawn, form: str) -> None:
    extra = {"local": True, **LOOPS[form]}
    assert_each_within(spawn_each(spawn, ELEMENTWISE, take_steps, 4, (4,), extra), **EXACT)


@pytest.mark.helpers
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_local_optimizers_on_every_mesh(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    kinds = {name: OPTIMIZERS[name] for name in ("SGD", "AdamW amsgrad", "NAdam")}
    world_size = math.prod(mesh_shape)
    found = spawn_each(spawn, kinds, take_steps, world_size, mesh_shape, {"local": True})
    # A third of the sum of three equal gradients is not always that gradient.
    tolerance = 1e-6 if mesh_shape == (3,) else 0.0
    assert_each_within(found, grad=tolerance, parameter=tolerance, state=tolerance)


@pytest.mark.helpers
def test_fused_kernels_in_a_local_optimizer(spawn: Spawn) -> None:
    kinds = {name: OPTIMIZERS[name] for name in FUSED}
    found = spawn_each(spawn, kinds, take_steps, 4, (4,), {"local": True, "fused": True})
    assert_each_within(found, **FUSED_TOLERANCES)


# --- more kinds of parameters and optimizers ------------------------------------------------------


class TwoAlike(Parameters):
    """Parameters of which some have the same number of elements; the last ranks have few."""

    def __init__(self) -> None:
        super().__init__({"matrix": (4, 3), "vector": (12,), "column": (2, 1), "row": (1, 2)})


@on_ranks(4)
def test_an_optimizer_that_finds_its_state_by_address_is_exact() -> None:
    torch.manual_seed(0)
    plain = TwoAlike()
    sharded = fully_shard(copy.deepcopy(plain))
    optimizers = [ByAddress(model.parameters()) for model in (plain, sharded)]
    generator = torch.Generator()
    differences = Differences()
    for _ in range(STEPS):
        give_gradients(plain, sharded, generator)
        step_all(optimizers)
    differences.note_parameters(sharded, plain)
    assert_within([differences], parameter=0.0)


class Rotations(nn.Module):
    """Complex parameters, of which torch's optimizers update the real and imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs().sum() * self.scale.sum()


@on_ranks(3)
def test_complex_parameters_train_as_whole_ones() -> None:
    torch.manual_seed(0)
    whole = Rotations()
    for optimizer_class, options in OPTIMIZERS.values():
        for form in LOOPS.values():
            plain = copy.deepcopy(whole)
            sharded = fully_shard(copy.deepcopy(whole))
            models = (plain, sharded)
            optimizers = [optimizer_class(m.parameters(), **options, **form) for m in models]
            for _ in range(3):
                for model in models:
                    model(torch.ones(2, 5)).backward()
                for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
                    b.grad.copy_(a.grad)
                step_all(optimizers)
            differences = Differences()
            differences.note_parameters(sharded, plain)
            assert_within([differences], parameter=0.0)


# --- clipping -----------------------------------------------------------------------------------


def norm_and_clip(
    mesh_shape: tuple[int, ...], max_norm: float, norm_type: float, foreach: bool | None
) -> Differences:
    plain, sharded = whole_and_sharded(mesh_shape)
    slopes = plain.draw_slopes(torch.Generator())
    norms = []
    for model in (sharded, plain):
        model(slopes).backward()
        norms.append(
            nn.utils.clip_grad_norm_(
                model.parameters(), max_norm=max_norm, norm_type=norm_type, foreach=foreach
            )
        )
    differences = Differences()
    differences.note("norm", *norms)
    differences.note_grads(sharded, plain)
    return differences


# The norm of 130 normal numbers: 104 for p=1, 11 for p=2, 3 for inf; its sum is taken in another
# order, so a few units in the last place of 104 (8e-6). Clipping divides by it: the relative error
# of gradients of size 3 is the same.
CLIPPING_TOLERANCES = {"norm": 2e-5, "grad": 1e-6}


@pytest.mark.parametrize(
    ("norm_type", "foreach", "mesh_shape"),
    in_turns([1.0, 2.0, math.inf], [None, True, False], [(4,), (2, 2)]),
    ids=str,
)
def test_clipping_by_norm_is_that_of_whole_gradients(
    spawn: Spawn, mesh_shape: tuple[int, ...], norm_type: float, foreach: bool | None
) -> None:
    found = spawn(norm_and_clip, math.prod(mesh_shape), mesh_shape, 1.0, norm_type, foreach)
    assert_within(found, **CLIPPING_TOLERANCES)


def test_a_norm_below_the_limit_leaves_gradients_as_they_are(spawn: Spawn) -> None:
    found = spawn(norm_and_clip, 4, (4,), 1e6, 2.0, None)
    assert_within(found, norm=CLIPPING_TOLERANCES["norm"], grad=0.0)


@on_ranks(4)
def test_clipping_by_value_is_exact() -> None:
    plain, sharded = whole_and_sharded((4,))
    slopes = plain.draw_slopes(torch.Generator())
    for model in (sharded, plain):
        model(slopes).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
    differences = Differences()
    differences.note_grads(sharded, plain)
    assert_within([differences], grad=0.0)


@pytest.mark.parametrize("foreach", [None, True, False])
@on_ranks(2)
def test_clipping_counts_ordinary_gradients_once(foreach: bool | None) -> None:
    """Clip gradients of which one is an ordinary tensor."""
    plain, sharded = Parameters(), Parameters()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, make_mesh((2,)), ignored_params={sharded.vector})
    assert not isinstance(sharded.vector, ShardedTensor)
    slopes = plain.draw_slopes(torch.Generator())
    differences = Differences()
    norms = []
    for model in (sharded, plain):
        model(slopes).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0, foreach=foreach))
    differences.note("norm", *norms)
    differences.note_grads(sharded, plain)
    assert_within([differences], **CLIPPING_TOLERANCES)


def refuse_non_finite_norm(norm_type: float, position: int) -> None:
    plain, sharded = whole_and_sharded((2,))
    slopes = plain.draw_slopes(torch.Generator())
    slopes["matrix"].view(-1)[position] = math.nan
    sharded(slopes).backward()
    nn.utils.clip_grad_norm_(
        sharded.parameters(), max_norm=1.0, norm_type=norm_type, error_if_nonfinite=True
    )


@pytest.mark.parametrize("position", [0, -1], ids=["first rank", "last rank"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_nan_in_one_piece_is_an_error_of_clipping_on_every_rank(
    spawn_errors: Spawn, norm_type: float, position: int
) -> None:
    for error in spawn_errors(refuse_non_finite_norm, 2, norm_type, position):
        assert error is not None, "the norm of gradients with a NaN was finite"
        assert "non-finite" in error.message


def scaled_step(overflow: bool) -> tuple[float, Differences]:
    """Take a step with a gradient scaler; one element, on one rank, may overflow."""
    plain, sharded = whole_and_sharded((2,))
    slopes = plain.draw_slopes(torch.Generator())
    if overflow:
        slopes["cube"][-1, -1, -1] = math.inf
    scalers = []
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model(slopes)).backward()
        scaler.step(optimizer)
        scaler.update()
        scalers.append(scaler)
    assert scalers[0].get_scale() == (512.0 if overflow else 1024.0), (
        "the reference does not overflow"
    )
    differences = Differences()
    differences.note_parameters(sharded, plain)
    return scalers[1].get_scale() / scalers[0].get_scale(), differences


@pytest.mark.parametrize("overflow", [False, True])
def test_an_overflow_in_one_piece_skips_the_step_on_every_rank(
    spawn: Spawn, overflow: bool
) -> None:
    for scale_ratio, differences in spawn(scaled_step, 2, overflow):
        assert scale_ratio == 1.0
        assert differences == {"parameter": 0.0}


# --- clipping -----------------------------------------------------------------------------------


class MixedDtypes(nn.Module):
    """Two layers, one of them in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).double())


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@on_ranks(2)
def test_a_module_clips_gradients_of_several_dtypes(order: float) -> None:
    torch.manual_seed(0)
    plain = MixedDtypes()
    sharded: typing.Any = fully_shard(copy.deepcopy(plain))
    x = torch.randn(4, 7)
    for model in (plain, sharded):
        model(x).square().sum().backward()
    # As the plain model has only one rank, whose batch is that of each.
    found = sharded.clip_grad_norm_(0.5, order)
    norms = [p.grad.detach().double().norm(order) for p in plain.parameters()]
    expected = torch.stack(norms).norm(order)
    scale = min(1.0, 0.5 / (expected.item() + 1e-6))
    gradients = zip(plain.parameters(), sharded.parameters(), strict=True)
    assert_within(
        [
            {
                "norm": (found.double() - expected).abs().item(),
                "gradient": max(
                    (a.grad * scale - b.grad.full_tensor()).abs().max() for a, b in gradients
                ),
            }
        ],
        norm=1e-5,
        gradient=1e-6,
    )


def clip_what_is_not_finite() -> tuple[str, float]:
    model: typing.Any = fully_shard(nn.Linear(3, 2))
    model(torch.full((1, 3), math.inf)).sum().backward()
    try:
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error), float(model.clip_grad_norm_(1.0))
    return "no error", 0.0


def test_norms_that_are_not_finite_raise_if_asked_for(spawn: Spawn) -> None:
    for message, norm in spawn(clip_what_is_not_finite, 2):
        assert "the gradients' norm of order 2.0 is inf" in message
        assert norm == math.inf


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("form", LOOPS)
def test_an_optimizer_may_have_state_before_its_parameters_are_sharded(
    spawn: Spawn, form: str, steps: int
) -> None:
    extra = {"before": steps, **LOOPS[form]}
    assert_each_within(spawn_each(spawn, OPTIMIZERS, take_steps, 4, (2, 2), extra), **EXACT)


@on_ranks(2)
def test_numbers_stay_plain() -> None:
    """State of a parameter without dimensions looks like a number, and the other way round."""
    model = fully_shard(Parameters({"scale": (), "matrix": (3, 5)}), make_mesh((2,)))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(model.draw_slopes(torch.Generator())).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[model.scale]
    assert type(state["mu_product"]) is type(state["step"]) is Tensor
    assert isinstance(state["exp_avg"], ShardedTensor)


@on_ranks(2)
def test_whole_state_may_be_loaded() -> None:
    """Load the state dict of a plain optimizer between two steps of the sharded one."""
    mesh_shape = (2,)
    plain, sharded = whole_and_sharded(mesh_shape)
    models = (plain, sharded)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    generator = torch.Generator()
    differences = Differences()
    for step in range(STEPS):
        slopes = plain.draw_slopes(generator)
        for model in models:
            model(slopes).backward()
        differences.note_grads(sharded, plain)
        if step in (0, 3):  # Before its first step, and after some.
            for state in optimizers[0].state.values():
                state["exp_avg"].add_(0.1)
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        step_all(optimizers)
    differences.note_parameters(sharded, plain)
    check_state_is_sharded(optimizers[1])
    assert_within([differences], grad=0.0, parameter=0.0)


@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@on_ranks(2)
def test_state_of_a_model_that_is_sharded_otherwise_may_be_loaded(form: dict[str, bool]) -> None:
    """Its tensors are cut otherwise than the parameters, and each step writes to them."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
    layers, root = copy.deepcopy(plain), copy.deepcopy(plain)
    for layer in layers:
        fully_shard(layer, make_mesh((2,)))
    fully_shard(root, make_mesh((2,)))
    models = (plain, layers, root)
    by = [torch.optim.AdamW(each.parameters(), amsgrad=True, **form) for each in models]
    differences = Differences()
    for step in range(STEPS):
        if step == 1:
            root.load_state_dict(layers.state_dict())
            by[2].load_state_dict(copy.deepcopy(by[1].state_dict()))
        for model in models:
            model(torch.ones(1, 3)).sin().sum().backward()
        step_all(by)
        for model in (layers, root) if step else (layers,):
            differences.note_parameters(model, plain)
    assert_within([differences], parameter=FUSED_TOLERANCE)


# --- closures -------------------------------------------------------------------------------------


def train_by_closures(mesh_shape: tuple[int, ...], search: str | None, returns: str) -> Differences:
    """Train by LBFGS, whose closure returns the rank's own loss, as every tutorial's does."""
    case = CASES["mlp"]
    plain = case.make().double()
    model = shard(case, copy.deepcopy(plain), make_mesh(mesh_shape))
    optimizers = [
        torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=6, line_search_fn=search)
        for each in (model, plain)
    ]
    world_size = dist.get_world_size()
    differences = Differences()

    def loss_of(each: nn.Module, rank: int, step: int) -> Tensor:
        inputs, *rest = rank_batch(case, rank, step)
        return case.loss(each, (inputs.double(), *(part.double() for part in rest)))

    for step in range(3):

        def closure(step: int = step) -> Tensor | float:
            optimizers[0].zero_grad()
            loss = loss_of(model, dist.get_rank(), step)
            loss.backward()
            return loss if returns == "tensor" else loss.item()

        def plain_closure(step: int = step) -> Tensor:
            optimizers[1].zero_grad()
            losses = [loss_of(plain, rank, step) for rank in range(world_size)]
            loss = torch.stack(losses).mean()
            loss.backward()
            return loss

        found, expected = optimizers[0].step(closure), optimizers[1].step(plain_closure)
        differences.note("loss", torch.as_tensor(found).detach().double(), expected.detach())
    differences.note_parameters(model, plain)
    return differences


@pytest.mark.helpers
@pytest.mark.parametrize("returns", ["tensor", "number"])
@pytest.mark.parametrize("search", ["strong_wolfe", None])
def test_closures_return_the_ranks_own_loss(spawn: Spawn, search: str | None, returns: str) -> None:
    for mesh_shape in ((2,), (2, 2)):
        found = spawn(train_by_closures, math.prod(mesh_shape), mesh_shape, search, returns)
        # A number is made a tensor of fp32 to be compared.
        assert_within(found, loss=1e-6, parameter=1e-8)
