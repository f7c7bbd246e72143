"""Training with `LocalOptimizer` against the same class on the sharded parameters: bit by bit."""

from __future__ import annotations

import copy
import math
import pickle
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel_models
from checkpoints import leaves
from models import CASES, Case, Parameters
from reference import full_parameters, make_mesh, my_batch, rank_batch, shard
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedTensor, fully_shard
from shardkit.optim import LocalOptimizer
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Change = Callable[[nn.Module, torch.optim.Optimizer, int], object]

pytestmark = pytest.mark.helpers

STEPS = 5
ADAMW: dict[str, typing.Any] = {"lr": 1e-2, "weight_decay": 0.1}


def direct(params: Iterable[typing.Any], **options: typing.Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{**ADAMW, **options})


def local(params: Iterable[typing.Any], **options: typing.Any) -> LocalOptimizer:
    return LocalOptimizer(params, torch.optim.AdamW, **{**ADAMW, **options})


def two_models(name: str, mesh_shape: tuple[int, ...], **options: typing.Any) -> list[nn.Module]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    return [shard(case, m, make_mesh(mesh_shape), **options) for m in (model, copy.deepcopy(model))]


def train_both(
    case: Case,
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    steps: Iterable[int] = range(STEPS),
    change: Change = lambda model, optimizer, step: None,  # noqa: ARG005
) -> None:
    """Train both; `change` comes between backward and step."""
    for step in steps:
        for model, optimizer in zip(models, optimizers, strict=True):
            case.loss(model, my_batch(case, step)).backward()
            change(model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()


def assert_equal(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Check parameters and state dicts, bit for bit. Collective."""
    expected, actual = (full_parameters(model) for model in models)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    wanted, found = (leaves(optimizer.state_dict()) for optimizer in optimizers)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        if isinstance(value, ShardedTensor):
            assert torch.equal(found[path].full_tensor(), value.full_tensor()), path
        elif isinstance(value, Tensor):
            assert torch.equal(found[path], value), path
        else:
            assert found[path] == value, path


# --- models -------------------------------------------------------------------------------------


def train_case(mesh_shape: tuple[int, ...], options: dict[str, typing.Any], name: str) -> int:
    models = two_models(name, mesh_shape, **options)
    other = local(models[1].parameters())
    optimizers = [direct(models[0].parameters()), other]
    train_both(CASES[name], models, optimizers)
    assert_equal(models, optimizers)
    inner = other.inner
    assert inner is not None
    return sum(tensor.numel() > 1 for group in inner.param_groups for tensor in group["params"])


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_models(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    names = {name: name for name in CASES}
    spawn_each(spawn, names, train_case, math.prod(mesh_shape), mesh_shape, {})


def test_a_bucket_is_one_run(spawn: Spawn) -> None:
    assert spawn(train_case, 2, (2,), {}, "gpt")[1] == 3  # Two blocks and the root.


@pytest.mark.parametrize(
    "options",
    [
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"reshard_after_forward": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_of_groups(spawn: Spawn, options: dict[str, typing.Any]) -> None:
    spawn(train_case, 2, (2,), options, "gpt")


def test_one_rank(spawn: Spawn) -> None:
    spawn(train_case, 1, (1,), {}, "gpt")


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4), (1, 2, 2)], ids=str)
@on_ranks(4)
def test_parts_of_tensor_parallelism(mesh_shape: tuple[int, ...]) -> None:
    name = "gpt"
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(parallel_models.make(name, mesh_shape)[1])
    optimizers = [direct(models[0].parameters()), local(models[1].parameters())]
    mine, _ = parallel_models.batches_of(name, mesh_shape, 3)
    batches = list(mine)
    for model, optimizer in zip(models, optimizers, strict=True):
        for batch in batches:
            parallel_models.CASES[name].case.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(models, optimizers)


# --- groups and what changes between steps ------------------------------------------------------


def in_groups(model: nn.Module) -> list[dict[str, typing.Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]


@on_ranks(2)
def test_groups_schedulers_clipping() -> None:
    models = two_models("gpt", (2,))
    optimizers = [direct(in_groups(models[0])), local(in_groups(models[1]))]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=STEPS + 1)
        for optimizer in optimizers
    ]
    assert optimizers[1].param_groups[0]["betas"] == optimizers[0].param_groups[0]["betas"]

    def change(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05
        if step == 3:
            optimizer.param_groups[1]["weight_decay"] = 0.5
        schedulers[optimizers.index(optimizer)].step()

    train_both(CASES["gpt"], models, optimizers, change=change)
    assert_equal(models, optimizers)


@on_ranks(2)
def test_accumulation_and_gradients_set_to_zero() -> None:
    models = two_models("gpt", (2,))
    optimizers = [direct(models[0].parameters()), local(models[1].parameters())]
    case = CASES["gpt"]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(6):
            model.set_requires_gradient_sync(step % 3 == 2)
            case.loss(model, my_batch(case, step)).backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    assert_equal(models, optimizers)


def drop_gradients(_: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Have other parameters without a gradient in each step, as layer drop does."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for position, param in enumerate(params):
        if (position * 7 + step * 3) % 4 == 0:
            param.grad = None


def skip() -> int:
    models = two_models("gpt", (3,))
    optimizers = [direct(models[0].parameters()), local(models[1].parameters())]
    train_both(CASES["gpt"], models, optimizers, change=drop_gradients)
    assert_equal(models, optimizers)
    steps = {float(entry["step"]) for entry in optimizers[1].state_dict()["state"].values()}
    return len(steps)


def test_parameters_without_gradients_are_skipped(spawn: Spawn) -> None:
    assert spawn(skip, 3) == [2] * 3  # Different parameters have made different steps.


@on_ranks(2)
def test_masters_have_wide_state_from_the_first_gradient_on() -> None:
    """Adagrad makes its state in its constructor, also of parameters without gradients."""
    torch.manual_seed(0)
    model = fully_shard(Parameters(dict.fromkeys("abcd", (8,)), torch.bfloat16), make_mesh((2,)))
    params = list(model.parameters())
    wholes = [nn.Parameter(param.full_tensor().float()) for param in params]
    options = {"lr": 0.1, "initial_accumulator_value": 0.1}  # bf16 would round the second one.
    optimizer = LocalOptimizer(params, torch.optim.Adagrad, master_dtype=torch.float32, **options)
    plain = torch.optim.Adagrad(wholes, **options)
    generator = torch.Generator()
    for used in ("ab", "b", "bd", "abcd", "abcd"):
        model(model.draw_slopes(generator)).backward()
        for name, whole, param in zip("abcd", wholes, params, strict=True):
            whole.grad = param.grad.full_tensor().float() if name in used else None
            param.grad = param.grad if name in used else None
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
        names = [sorted(optimizer.state.get(param, {})) for param in params]
        of_ranks: list[typing.Any] = [None, None]
        dist.all_gather_object(of_ranks, names)
        assert of_ranks == [names, names], used
    for whole, param in zip(wholes, params, strict=True):
        assert torch.equal(optimizer.state[param]["master"].full_tensor(), whole)


@on_ranks(2)
def test_a_group_added_later() -> None:
    models = two_models("mlp", (2,))
    firsts = [list(model.layers[0].parameters()) for model in models]
    optimizers = [direct(firsts[0]), local(firsts[1])]
    train_both(CASES["mlp"], models, optimizers, range(2))
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.add_param_group({"params": list(model.layers[1:].parameters()), "lr": 0.1})
    train_both(CASES["mlp"], models, optimizers, range(2, 5))
    assert_equal(models, optimizers)


@on_ranks(2)
def test_an_optimizer_older_than_sharding() -> None:
    """Make optimizers of plain models, step them, then shard."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    model = case.make()
    models = [model, copy.deepcopy(model)]
    optimizers = [direct(models[0].parameters()), local(models[1].parameters())]
    for m, optimizer in zip(models, optimizers, strict=True):
        case.loss(m, rank_batch(case, 0, 99)).backward()
        optimizer.step()
        optimizer.zero_grad()
        shard(case, m, make_mesh((2,)))
    train_both(case, models, optimizers)
    assert_equal(models, optimizers)


@on_ranks(2)
def test_plain_parameters_beside_sharded_ones() -> None:
    case = CASES["gpt"]
    torch.manual_seed(0)
    model = case.make()
    models = [model, copy.deepcopy(model)]
    for m in models:
        shard(case, m, make_mesh((2,)), ignored_params={m.norm.weight, m.positions})
    optimizers = [direct(models[0].parameters(), foreach=False), local(models[1].parameters())]

    def average(model: nn.Module, _: torch.optim.Optimizer, __: int) -> None:
        for param in (model.norm.weight, model.positions):
            dist.all_reduce(param.grad)

    train_both(case, models, optimizers, change=average)
    for optimizer in optimizers:
        optimizer.param_groups[0]["foreach"] = None
    assert_equal(models, optimizers)


# --- copies and state ---------------------------------------------------------------------------


@on_ranks(2)
def test_copies_and_pickles() -> None:
    models = two_models("gpt", (2,))
    optimizer = local(models[0].parameters())
    train_both(CASES["gpt"], models[:1], [optimizer], range(2))
    model, other = copy.deepcopy((models[0], optimizer))
    assert other.inner is None
    train_both(CASES["gpt"], [models[0], model], [optimizer, other], range(2, 4))
    assert_equal([models[0], model], [optimizer, other])
    again = pickle.loads(pickle.dumps(other))
    assert again.optimizer_class is torch.optim.AdamW
    assert leaves(again.state_dict()).keys() == leaves(other.state_dict()).keys()


@on_ranks(3)
def test_states_are_two_way() -> None:
    """Each loads what the other saved, between steps and before the first one."""
    case, models = CASES["gpt"], two_models("gpt", (3,))
    optimizers = [direct(in_groups(models[0])), local(in_groups(models[1]))]
    train_both(case, models, optimizers, range(2), drop_gradients)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    train_both(case, models, optimizers, range(2, 3))
    for optimizer, state in zip(optimizers, reversed(states), strict=True):
        optimizer.load_state_dict(state)
    train_both(case, models, optimizers, range(3, 5))
    assert_equal(models, optimizers)
    fresh = [direct(in_groups(models[0])), local(in_groups(models[1]))]
    for optimizer, other in zip(fresh, reversed(optimizers), strict=True):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    train_both(case, models, fresh, range(5, 7))
    assert_equal(models, fresh)


@on_ranks(2)
def test_what_is_written_to_the_state_counts() -> None:
    models = two_models("gpt", (2,))
    optimizers = [direct(models[0].parameters()), local(models[1].parameters())]
    train_both(CASES["gpt"], models, optimizers, range(2))
    for optimizer in optimizers:
        for number, entries in enumerate(optimizer.state.values()):
            entries["exp_avg"].mul_(0.5)  # In place
            if number % 2:
                entries["exp_avg_sq"] = entries["exp_avg_sq"] * 4  # Another tensor
    train_both(CASES["gpt"], models, optimizers, range(2, 4))
    assert_equal(models, optimizers)


@on_ranks(2)
def test_gradient_scalers() -> None:
    models = two_models("mlp", (2,))
    optimizers = [direct(models[0].parameters()), local(models[1].parameters())]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    case = CASES["mlp"]
    for step in range(5):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            loss = scaler.scale(case.loss(model, my_batch(case, step)))
            (loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_equal(models, optimizers)
    assert all(float(e["step"]) == 4 for e in optimizers[1].state_dict()["state"].values())
