"""Optimizers of torchao and bitsandbytes on pieces, against the same ones on whole parameters."""

from __future__ import annotations

import copy
import importlib
import math
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from checkpoints import train_on_shares
from models import GPT, Case, Parameters, cross_entropy, token_batch
from reference import full, full_parameters, make_mesh, shard, whole_and_sharded
from shardkit import OptimizerError, ShardedTensor, checkpoint, fully_shard
from shardkit.optim import LocalOptimizer
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    import pathlib


pytestmark = pytest.mark.models

LONG_S = 240  # Each process imports the packages once, which takes long on few cores.
STEPS = 4
# Of whole blocks; cut inside of a block; not of whole blocks; too small to be coded.
SHAPES: dict[str, tuple[int, ...]] = {
    "first": (128, 96),
    "second": (96, 136),
    "odd": (67, 101),
    "small": (33,),
}
CODED = {
    "torchao 8 bits": ("torchao.optim", "AdamW8bit", {"lr": 1e-2}),
    "torchao 4 bits": ("torchao.optim", "AdamW4bit", {"lr": 1e-2}),
    "torchao fp8": ("torchao.optim", "AdamWFp8", {"lr": 1e-2}),
    "bitsandbytes 8 bits": ("bitsandbytes.optim", "AdamW8bit", {"lr": 1e-2}),
    "bitsandbytes Lion": ("bitsandbytes.optim", "Lion8bit", {"lr": 1e-3}),
    "bitsandbytes SGD": ("bitsandbytes.optim", "SGD8bit", {"lr": 1e-2, "momentum": 0.9}),
}
EXACT = {
    "torchao fp32": ("torchao.optim", "_AdamW", {"lr": 1e-2}),
    "bitsandbytes fp32": ("bitsandbytes.optim", "AdamW32bit", {"lr": 1e-2}),
    "torch": ("torch.optim", "AdamW", {"lr": 1e-2}),
}
EVERY = {**CODED, **EXACT}


def class_of(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, typing.Any]]:
    """Import a class; its compiled functions run as they are written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, class_name, options = EVERY[name]
        found = getattr(importlib.import_module(module), class_name)
    torch.compiler.set_stance("force_eager")
    return found, options


def local(name: str, model: nn.Module) -> LocalOptimizer:
    optimizer_class, options = class_of(name)
    return LocalOptimizer(model.parameters(), optimizer_class, **options)


def step_with(
    model: Parameters, optimizer: torch.optim.Optimizer, steps: typing.Iterable[int]
) -> None:
    """Take steps with gradients that depend on the step only."""
    for step in steps:
        model(model.draw_slopes(torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def differences(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Return the root mean square of what differs, of each parameter. Collective."""
    expected = full_parameters(reference)
    return {
        name: (value - expected[name]).square().mean().sqrt().item()
        for name, value in full_parameters(model).items()
    }


def coded_numel(optimizer: LocalOptimizer) -> int:
    """Count the elements whose first state is coded."""
    assert optimizer.inner is not None
    numel = 0
    for tensor, entries in optimizer.inner.state.items():
        state = next(v for v in entries.values() if getattr(v, "shape", ()) == tensor.shape)
        is_coded = type(state) is not torch.Tensor or state.dtype == torch.uint8
        numel += tensor.numel() if is_coded else 0
    return numel


def take_steps(mesh_shape: tuple[int, ...], name: str) -> tuple[dict[str, float], int]:
    optimizer_class, options = class_of(name)
    plain, sharded = whole_and_sharded(mesh_shape, SHAPES)
    step_with(plain, optimizer_class(plain.parameters(), **options), range(STEPS))
    optimizer = local(name, sharded)
    step_with(sharded, optimizer, range(STEPS))
    return differences(sharded, plain), coded_numel(optimizer)


# A step moves each element by up to the learning rate. What is coded elsewhere, or not coded, where
# a block is cut or short, makes another step; its size follows from the number of bits.
NOISE = {"4 bits": 5e-3, "8 bits": 5e-4, "fp8": 3e-3, "Lion": 5e-4, "SGD": 5e-4}


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (4,), (2, 2)], ids=str)
def test_steps(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    num_ranks = math.prod(mesh_shape)
    names = {name: name for name in EVERY}
    for name, outcomes in spawn_each(spawn, names, take_steps, num_ranks, mesh_shape).items():
        for found, _ in outcomes:
            assert found["small"] == 0.0, name
            noise = 0.0 if name in EXACT else NOISE[name.partition(" ")[2]]
            assert max(found.values()) <= noise, (name, found)
            if mesh_shape == (1,):
                assert found["first"] == found["second"] == 0.0, name
        if name in CODED:
            # Whether state is coded does not depend on the cuts, but for less than a block at each
            # end of a piece, and pieces below the size that the packages code.
            whole = sum(math.prod(shape) for shape in SHAPES.values())
            coded = sum(numel for _, numel in outcomes) / (2 if len(mesh_shape) == 2 else 1)
            assert coded >= whole * {1: 0.99, 2: 0.85}.get(num_ranks, 0.5), (name, coded / whole)


# --- checkpoints --------------------------------------------------------------------------------


def make(name: str, mesh_shape: tuple[int, ...], seed: int) -> tuple[Parameters, LocalOptimizer]:
    torch.manual_seed(seed)
    model = fully_shard(Parameters(SHAPES), make_mesh(mesh_shape))
    return model, local(name, model)


def shown_state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """Return what is shown of the state, whole. Collective."""
    return {
        (number, key): full(torch.as_tensor(value)).detach().clone()
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def save(name: str, mesh_shape: tuple[int, ...], folder: str) -> typing.Any:
    model, optimizer = make(name, mesh_shape, 0)
    step_with(model, optimizer, range(3))
    checkpoint.save(folder, model, optimizer)
    state = shown_state(optimizer)
    assert all(v.dtype == torch.float32 for v in state.values() if v.ndim)
    step_with(model, optimizer, range(3, 6))
    return state, full_parameters(model)


def load(name: str, mesh_shape: tuple[int, ...], folder: str, before: int) -> typing.Any:
    model, optimizer = make(name, mesh_shape, 1)
    step_with(model, optimizer, range(20, 20 + before))
    checkpoint.load(folder, model, optimizer)
    state = shown_state(optimizer)
    step_with(model, optimizer, range(3, 6))
    return state, full_parameters(model), coded_numel(optimizer)


def check_loaded(saved: typing.Any, loaded: typing.Any, noise: float) -> None:
    state, params = saved
    found, others, _ = loaded
    assert {key for key in state if key[1] != "step"} == {k for k in found if k[1] != "step"}
    for key, value in found.items():
        assert torch.equal(value, state.get(key, value)), key
    for key, value in others.items():
        assert (value - params[key]).square().mean().sqrt().item() <= noise, key


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("meshes", [((2,), (2,)), ((2,), (3,)), ((2, 2), (1,))], ids=str)
@pytest.mark.parametrize("name", ["torchao 8 bits", "torchao 4 bits", "bitsandbytes 8 bits"])
def test_other_meshes(
    spawn: Spawn, tmp_path: pathlib.Path, name: str, meshes: typing.Any, before: int
) -> None:
    path = str(tmp_path / "x")
    one, other = meshes
    saved = spawn(save, math.prod(one), name, one, path, timeout_s=LONG_S)[0]
    # Where the cuts are the same, so are the codes.
    noise = 0.0 if one == other else NOISE[name.partition(" ")[2]]
    for loaded in spawn(load, math.prod(other), name, other, path, before, timeout_s=LONG_S):
        check_loaded(saved, loaded, noise)
        assert loaded[2] > 0


@pytest.mark.parametrize(
    "names",
    [
        ("torch", "torchao 8 bits"),
        ("torchao 8 bits", "torch"),
        ("torch", "bitsandbytes 8 bits"),
        ("bitsandbytes 8 bits", "torch"),
        ("torchao 4 bits", "bitsandbytes fp32"),
    ],
)
def test_other_classes(spawn: Spawn, tmp_path: pathlib.Path, names: tuple[str, str]) -> None:
    path = str(tmp_path / "x")
    saved = spawn(save, 2, names[0], (2,), path, timeout_s=LONG_S)[0]
    for loaded in spawn(load, 3, names[1], (3,), path, 0, timeout_s=LONG_S):
        check_loaded(saved, loaded, 1e-2)


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "on all ranks"])
@on_ranks(2, timeout_s=LONG_S)
def test_whole_codes_are_loaded(is_sent: bool) -> None:
    """Load what a whole optimizer keeps coded: from all ranks, or from the first one."""
    optimizer_class, options = class_of("torchao 8 bits")
    plain, sharded = whole_and_sharded((2,), SHAPES)
    whole = optimizer_class(plain.parameters(), **options)
    step_with(plain, whole, range(3))
    wanted = get_optimizer_state_dict(plain, whole)["state"]
    given = get_optimizer_state_dict(plain, whole) if not is_sent or dist.get_rank() == 0 else {}
    optimizer = local("torchao 8 bits", sharded)
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_sent)
    set_optimizer_state_dict(sharded, optimizer, given, options=how)
    whole_state = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(sharded, optimizer, options=whole_state)["state"]
    for name in ("first", "second"):
        for key in ("exp_avg", "exp_avg_sq"):
            codes = wanted[name][key]
            assert type(codes).__name__ == "OptimState8bit"
            assert torch.equal(found[name][key], codes.dequantize()), (name, key)
    assert torch.equal(found["small"]["exp_avg"], wanted["small"]["exp_avg"])


# --- training -----------------------------------------------------------------------------------

GPT_CASE = Case(
    lambda: GPT(dim=96, heads=4), lambda model: list(model.blocks), token_batch, cross_entropy
)


def train(name: str, mesh_shape: tuple[int, ...] | None) -> list[float]:
    """Train on the same global batches, sharded or whole; return the losses."""
    optimizer_class, options = class_of(name)
    torch.manual_seed(0)
    model = GPT_CASE.make()
    optimizer: torch.optim.Optimizer
    if mesh_shape is None:
        optimizer = optimizer_class(model.parameters(), **{**options, "lr": 1e-3})
    else:
        model = shard(GPT_CASE, model, make_mesh(mesh_shape))
        optimizer = LocalOptimizer(model.parameters(), optimizer_class, **{**options, "lr": 1e-3})
    return train_on_shares(GPT_CASE, model, optimizer, range(10))


@pytest.mark.parametrize("name", ["torchao 8 bits", "torchao fp8", "bitsandbytes 8 bits"])
def test_losses_are_those_of_a_whole_model(spawn: Spawn, name: str) -> None:
    expected = spawn(train, 1, name, None, timeout_s=LONG_S)[0]
    assert expected[-1] < 0.9 * expected[0]
    for mesh_shape in ((2,), (2, 2)):
        for losses in spawn(train, math.prod(mesh_shape), name, mesh_shape, timeout_s=LONG_S):
            assert losses == pytest.approx(expected, rel=5e-3)


# --- stochastic rounding ------------------------------------------------------------------------


def round_randomly(is_random: bool) -> tuple[float, bool]:
    """Make many steps of which each is below half a unit in the last place of the parameters.

    Returns:
        How far the parameters moved, of what they should; whether replicas are equal.
    """
    optimizer_class, _ = class_of("torchao fp32")
    torch.manual_seed(dist.get_rank())  # As dropout leaves it.
    model = Parameters({"weight": (64, 64)}, torch.bfloat16)
    nn.init.ones_(model.weight)
    fully_shard(model, make_mesh((2, 2)))
    optimizer = LocalOptimizer(
        model.parameters(),
        optimizer_class,
        lr=1e-4,
        weight_decay=0.0,
        bf16_stochastic_round=is_random,
    )
    slopes = {"weight": torch.ones(64, 64, dtype=torch.bfloat16)}
    before = torch.get_rng_state()
    for _ in range(100):
        model(slopes).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(torch.get_rng_state(), before)
    weight = model.weight
    assert isinstance(weight, ShardedTensor)
    mine = weight.to_local().float()
    replicas: list[typing.Any] = [None] * 4
    dist.all_gather_object(replicas, mine)
    moved = (1 - weight.full_tensor().float().mean().item()) / (100 * 1e-4)
    return moved, torch.equal(replicas[0], replicas[2]) and torch.equal(replicas[1], replicas[3])


def test_stochastic_rounding_moves_and_replicas_agree(spawn: Spawn) -> None:
    for moved, is_equal in spawn(round_randomly, 4, True, timeout_s=LONG_S):
        assert moved == pytest.approx(1.0, abs=0.1)
        assert is_equal
    assert spawn(round_randomly, 4, False, timeout_s=LONG_S)[0] == (0.0, True)


@on_ranks(2, timeout_s=LONG_S)
def test_copies_that_would_drift_apart_are_refused() -> None:
    optimizer_class, _ = class_of("torchao fp32")
    model = Parameters({"one": (8,), "other": (8,)}, torch.bfloat16)
    fully_shard(model, make_mesh((2,)), ignored_params={model.other})
    optimizer = LocalOptimizer(model.parameters(), optimizer_class, bf16_stochastic_round=True)
    with pytest.raises(OptimizerError, match="would round it otherwise on each"):
        step_with(model, optimizer, range(1))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LAMB8bit", "LARS", "PagedAdamW8bit with max_unorm", "AdEMAMix"])
def test_what_is_not_elementwise_is_refused(name: str) -> None:
    optim = importlib.import_module("bitsandbytes.optim")
    params = [nn.Parameter(torch.ones(8))]
    options: dict[str, typing.Any] = {"momentum": 0.9} if name == "LARS" else {}
    if "max_unorm" in name:
        name, options = "AdamW", {}
        made = importlib.import_module("bitsandbytes.optim.optimizer").Optimizer2State

        class Clipped(made):  # type: ignore[misc, valid-type]
            def __init__(self, params: typing.Any) -> None:
                super().__init__("adam", params, max_unorm=1.0)

        with pytest.raises(OptimizerError, match="max_unorm"):
            LocalOptimizer(params, Clipped)
        return
    if name == "AdEMAMix":
        optimizer = LocalOptimizer(params, optim.AdEMAMix)
        params[0].grad = torch.ones(8)
        with pytest.raises(OptimizerError, match="not one number for each"):
            optimizer.step()
        return
    with pytest.raises(OptimizerError, match=f"{name} cannot run on shards"):
        LocalOptimizer(params, getattr(optim, name), lr=1e-3, **options)


# --- given sharded parameters themselves ----------------------------------------------------------


def step_without_delegation(name: str, dtype: torch.dtype, options: dict[str, bool]) -> float:
    """Let a class step sharded parameters itself; return the distance to plain training."""
    optimizer_class, settings = class_of(name)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 8)).to(dtype)
    model = copy.deepcopy(plain)
    fully_shard(model[0], make_mesh((2,)))
    fully_shard(model, make_mesh((2,)))
    optimizers = [optimizer_class(m.parameters(), **settings, **options) for m in (model, plain)]
    for _ in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(torch.ones(4, 96, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((full(p) - q).abs().max()) for p, q in pairs)


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("torchao 8 bits", torch.float32, {}),
        ("torchao 4 bits", torch.float32, {}),
        ("torchao fp8", torch.float32, {}),
        ("torchao fp32", torch.float32, {}),
        ("torchao fp32", torch.bfloat16, {"bf16_stochastic_round": True}),
    ],
)
def test_torchao_names_the_line_to_write(
    spawn_errors: Spawn, name: str, dtype: torch.dtype, options: dict[str, bool]
) -> None:
    kind = EVERY[name][1]
    for error in spawn_errors(step_without_delegation, 2, name, dtype, options, timeout_s=LONG_S):
        assert error is not None
        assert error.type_name == "OptimizerError", error.traceback
        assert "cannot step sharded '0.weight' itself" in error.message
        assert f"LocalOptimizer(model.parameters(), {kind}, lr=0.01" in error.message


@pytest.mark.parametrize("name", ["bitsandbytes 8 bits", "bitsandbytes fp32"])
def test_others_train_as_unsharded(spawn: Spawn, name: str) -> None:
    for distance in spawn(step_without_delegation, 2, name, torch.float32, {}, timeout_s=LONG_S):
        assert distance < 1e-6  # Averages are summed in another order.
