"""Checkpoints of `LocalOptimizer`: on other numbers of ranks, and into the class itself."""

from __future__ import annotations

import math
import typing

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from checkpoints import Outcome, assert_same, leaves, train_on_shares, whole, whole_state
from models import CASES
from reference import make_mesh, shard
from shardkit import MixedPrecisionPolicy, ShardedTensor, checkpoint, fully_shard
from shardkit.optim import LocalOptimizer
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterable

    Make = Callable[[Iterable[typing.Any]], torch.optim.Optimizer]

pytestmark = pytest.mark.helpers

MAKERS: dict[str, Make] = {
    "direct": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "local": lambda params: LocalOptimizer(params, torch.optim.AdamW, lr=1e-2),
    "masters": lambda params: LocalOptimizer(
        params, torch.optim.AdamW, lr=1e-2, master_dtype=torch.float32
    ),
}


def make(
    name: str, mesh_shape: tuple[int, ...], kind: str, seed: int, dtype: torch.dtype
) -> tuple[nn.Module, torch.optim.Optimizer]:
    case = CASES[name]
    torch.manual_seed(seed)
    policy = MixedPrecisionPolicy(cast_forward_inputs=dtype != torch.float32, param_dtype=dtype)
    model = shard(case, case.make().to(dtype), make_mesh(mesh_shape), mp_policy=policy)
    return model, MAKERS[kind](model.parameters())


def save(
    name: str, mesh_shape: tuple[int, ...], kind: str, folder: str, dtype: torch.dtype
) -> Outcome:
    """Train, save, train on."""
    model, optimizer = make(name, mesh_shape, kind, 0, dtype)
    train_on_shares(CASES[name], model, optimizer, range(2))
    checkpoint.save(folder, model, optimizer, step=2)
    return whole_state(model, optimizer), train_on_shares(
        CASES[name], model, optimizer, range(2, 4)
    )


def load(
    name: str,
    mesh_shape: tuple[int, ...],
    kind: str,
    folder: str,
    dtype: torch.dtype,
    steps_before: int,
) -> Outcome:
    model, optimizer = make(name, mesh_shape, kind, 7, dtype)
    train_on_shares(CASES[name], model, optimizer, range(20, 20 + steps_before))
    assert checkpoint.load(folder, model, optimizer) == {"step": 2}
    state = whole_state(model, optimizer)
    return state, train_on_shares(CASES[name], model, optimizer, range(2, 4))


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("gpt", ("local", (2,)), ("local", (3,))),
        ("gpt", ("direct", (2,)), ("local", (4,))),
        ("gpt", ("local", (3,)), ("direct", (2, 2))),
        ("tiny", ("local", (4,)), ("local", (1,))),
        ("unused", ("direct", (2, 2)), ("local", (3,))),
        ("frozen", ("local", (1,)), ("direct", (2,))),
    ],
)
def test_training_goes_on(
    spawn: Spawn,
    tmp_path: pathlib.Path,
    name: str,
    saved: tuple[str, tuple[int, ...]],
    loaded: tuple[str, tuple[int, ...]],
    steps_before: int,
) -> None:
    path = str(tmp_path / "x")
    dtype = torch.float32
    kind, mesh = saved
    (expected, losses), *_ = spawn(save, math.prod(mesh), name, mesh, kind, path, dtype)
    kind, mesh = loaded
    outcomes = spawn(load, math.prod(mesh), name, mesh, kind, path, dtype, steps_before)
    for state, others in outcomes:
        assert_same(state, expected)
        assert others == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("mesh", [(2,), (3,), (1,)], ids=str)
def test_masters_are_saved(
    spawn: Spawn, tmp_path: pathlib.Path, mesh: tuple[int, ...], steps_before: int
) -> None:
    path = str(tmp_path / "x")
    dtype = torch.bfloat16
    (expected, losses), *_ = spawn(save, 2, "gpt", (2,), "masters", path, dtype)
    found = spawn(load, math.prod(mesh), "gpt", mesh, "masters", path, dtype, steps_before)
    for state, others in found:
        assert_same(state, expected)
        masters = [e["master"] for e in state["optimizers"][0]["state"].values()]
        assert all(master.dtype == torch.float32 for master in masters)
        # Sums over other ranks are rounded to bf16.
        assert others == (losses if mesh == (2,) else pytest.approx(losses, rel=2e-2))


@pytest.mark.parametrize("kinds", [("direct", "masters"), ("masters", "direct")], ids=str)
def test_masters_and_none(spawn: Spawn, tmp_path: pathlib.Path, kinds: tuple[str, str]) -> None:
    path = str(tmp_path / "x")
    dtype = torch.bfloat16
    (_, losses), *_ = spawn(save, 2, "gpt", (2,), kinds[0], path, dtype)
    for _, others in spawn(load, 3, "gpt", (3,), kinds[1], path, dtype, 0):
        assert others == pytest.approx(losses, rel=3e-2)


# --- torch's own functions ------------------------------------------------------------------------


def save_by_torch(kind: str, folder: str) -> Outcome:
    model, optimizer = make("gpt", (2,), kind, 0, torch.float32)
    train_on_shares(CASES["gpt"], model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optim"), states, strict=True)), checkpoint_id=folder)
    return whole_state(model, optimizer), train_on_shares(
        CASES["gpt"], model, optimizer, range(2, 4)
    )


def load_by_torch(kind: str, folder: str) -> Outcome:
    model, optimizer = make("gpt", (3,), kind, 7, torch.float32)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"]
    )
    return whole_state(model, optimizer), train_on_shares(
        CASES["gpt"], model, optimizer, range(2, 4)
    )


@pytest.mark.parametrize("kinds", [("local", "local"), ("direct", "local"), ("local", "direct")])
def test_torchs_state_dicts(spawn: Spawn, tmp_path: pathlib.Path, kinds: tuple[str, str]) -> None:
    path = str(tmp_path / "x")
    (expected, losses), *_ = spawn(save_by_torch, 2, kinds[0], path)
    for state, others in spawn(load_by_torch, 3, kinds[1], path):
        assert_same(state, expected)
        assert others == pytest.approx(losses, rel=1e-5)


@on_ranks(2)
def test_whole_states() -> None:
    """Gather whole state, by shardkit and by torch, and put it into a fresh optimizer."""
    model, optimizer = make("gpt", (2,), "local", 0, torch.float32)
    train_on_shares(CASES["gpt"], model, optimizer, range(2))
    gathered = checkpoint.gather_optimizer_state(model, optimizer, rank0_only=False)
    options = StateDictOptions(full_state_dict=True)
    _, by_torch = get_state_dict(model, optimizer, options=options)
    for state in (gathered, by_torch):
        fresh = MAKERS["local"](model.parameters())
        checkpoint.scatter_optimizer_state(state, model, fresh, from_rank0=False)
        again = checkpoint.gather_optimizer_state(model, fresh, rank0_only=False)
        assert_same(again["state"], gathered["state"])
    numbered = checkpoint.gather_optimizer_state(model, optimizer, layout="ids", rank0_only=False)
    plain = CASES["gpt"].make()
    torch.optim.AdamW(plain.parameters(), lr=1e-2).load_state_dict(numbered)


def hold_state_once() -> tuple[int, int]:
    """Count the bytes of state, and of the storages behind what is shown."""
    model, optimizer = make("gpt", (2,), "local", 0, torch.float32)
    train_on_shares(CASES["gpt"], model, optimizer, range(2))
    shown = [
        v for v in leaves(optimizer.state_dict()["state"]).values() if isinstance(v, ShardedTensor)
    ]
    assert isinstance(optimizer, LocalOptimizer)
    inner = optimizer.inner
    assert inner is not None
    held = [v for entries in inner.state.values() for v in entries.values() if v.ndim]
    storages = {v.untyped_storage().data_ptr() for v in held}
    assert {v.local_piece.untyped_storage().data_ptr() for v in shown} <= storages
    return len(shown), len(held)


def test_shown_state_is_a_view(spawn: Spawn) -> None:
    for shown, held in spawn(hold_state_once, 2):
        assert held < shown / 2


@on_ranks(2)
def test_entries_may_be_in_another_order_for_each_parameter() -> None:
    """So it is in checkpoints of several ranks. Ranks cut the third parameter, where a run ends."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 9)), mesh=make_mesh((2,)))
    optimizers = [LocalOptimizer(model.parameters(), torch.optim.AdamW) for _ in range(2)]
    model(torch.ones(1, 4)).sum().backward()
    optimizers[0].step()
    state: typing.Any = whole(optimizers[0].state_dict())
    entries = state["state"][2]
    for key in sorted(entries, reverse=True):
        entries[key] = entries.pop(key)
    optimizers[1].load_state_dict(state)
    for optimizer in optimizers:
        optimizer.step()
    found, expected = [
        checkpoint.gather_optimizer_state(model, optimizer, rank0_only=False)["state"]
        for optimizer in optimizers[::-1]
    ]
    assert_same(found, expected)
