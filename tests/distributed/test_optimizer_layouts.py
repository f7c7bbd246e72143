"""Whole optimizer state by names and by numbers: to and from plain optimizers and FSDP1."""

from __future__ import annotations

import copy
import functools
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from checkpoints import train_on_shares
from models import CASES, Block, Case
from parity import in_turns
from reference import OPTIMIZERS, full_parameters, make_mesh, shard
from shardkit import CheckpointError, CPUOffloadPolicy
from shardkit.checkpoint import (
    gather_optimizer_state,
    rekey_optimizer_state,
    scatter_optimizer_state,
)
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


pytestmark = pytest.mark.helpers

MESHES = ((1,), (2,), (4,), (2, 2))
LAYOUTS = ("names", "ids")
# Sums over ranks are taken in another order; Adam divides by small numbers.
TOLERANCE = 2e-5


def ranks_of(mesh: tuple[int, ...]) -> int:
    return torch.Size(mesh).numel()


def no_decay(model: nn.Module) -> list[dict[str, typing.Any]]:
    """Return two parameter groups: matrices, and the rest without weight decay."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1, "lr": 2e-3},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "groups":
        return torch.optim.AdamW(no_decay(model), lr=1e-3)
    return OPTIMIZERS[name](model.parameters())


def plain_after(
    case: Case, optimizer: str, steps: Sequence[int]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    plain = case.make()
    by = make_optimizer(optimizer, plain)
    train_plain(case, plain, by, steps)
    return plain, by


def train_plain(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]
) -> None:
    from checkpoints import global_batch

    for step in steps:
        case.loss(model, global_batch(case, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close(found: typing.Any, expected: typing.Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        assert type(found) is Tensor, where
        assert found.shape == expected.shape, where
        assert torch.allclose(found.cpu(), expected, atol=TOLERANCE), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_close(found[i], value, f"{where}.{i}")
    else:
        assert found == expected, where


# --- plain optimizers -----------------------------------------------------------------------------


def to_and_from_plain(
    name: str, mesh: tuple[int, ...], optimizer: str, layout: str, options: dict[str, typing.Any]
) -> None:
    case = CASES[name]
    plain, plain_by = plain_after(case, optimizer, range(3))
    torch.manual_seed(0)
    model = shard(case, case.make(), make_mesh(mesh), **options)
    by = make_optimizer(optimizer, model)
    train_on_shares(case, model, by, range(3))

    # To a plain one, which trains on.
    state = gather_optimizer_state(model, by, layout=layout, rank0_only=False)
    numbered = rekey_optimizer_state(state, model, by, layout="ids")
    assert_close(numbered, plain_by.state_dict())
    other = copy.deepcopy(plain)
    other_by = make_optimizer(optimizer, other)
    assert_close(rekey_optimizer_state(state, other, other_by, layout="ids"), numbered)
    other_by.load_state_dict(rekey_optimizer_state(state, other, other_by, layout="ids"))

    # From a plain one: a sharded one that was never stepped trains on.
    state = plain_by.state_dict()
    if layout == "names":
        state = rekey_optimizer_state(state, plain, plain_by, layout="names")
    for from_rank0 in (True, False):
        again = shard(case, copy.deepcopy(plain), make_mesh(mesh), **options)
        again_by = make_optimizer(optimizer, again)
        has_it = not from_rank0 or dist.get_rank() == 0
        scatter_optimizer_state(
            copy.deepcopy(state) if has_it else None, again, again_by, from_rank0=from_rank0
        )
        gathered = gather_optimizer_state(again, again_by, layout="ids", rank0_only=False)
        assert_close(gathered, plain_by.state_dict())
        train_on_shares(case, again, again_by, range(3, 6))
        if from_rank0:
            expected = copy.deepcopy(plain)
            expected_by = make_optimizer(optimizer, expected)
            expected_by.load_state_dict(copy.deepcopy(plain_by.state_dict()))
            train_plain(case, expected, expected_by, range(3, 6))
            train_plain(case, other, other_by, range(3, 6))
            assert_close(full_parameters(other), full_parameters(expected))
        assert_close(full_parameters(again), full_parameters(expected))


@pytest.mark.parametrize(
    ("mesh", "optimizer", "layout"),
    in_turns(MESHES, ["adamw", "sgd", "groups"], LAYOUTS),
    ids=str,
)
def test_training_goes_on_as_with_a_plain_optimizer(
    spawn: Spawn, mesh: tuple[int, ...], layout: str, optimizer: str
) -> None:
    spawn(to_and_from_plain, ranks_of(mesh), "frozen", mesh, optimizer, layout, {})


@pytest.mark.parametrize("name", ["gpt", "tied", "tiny"])
def test_with_tied_weights_and_without_dims(spawn: Spawn, name: str) -> None:
    spawn(to_and_from_plain, 2, name, (2,), "adamw", "names", {})
    spawn(to_and_from_plain, 4, name, (2, 2), "adamw", "ids", {})


def test_with_offloaded_shards(spawn: Spawn) -> None:
    options = {"offload_policy": CPUOffloadPolicy()}
    spawn(to_and_from_plain, 2, "mlp", (2,), "adamw", "ids", options)


@on_ranks(2)
def test_other_ranks_get_nothing() -> None:
    case = CASES["mlp"]
    model = shard(case, case.make(), make_mesh((2,)))
    by = OPTIMIZERS["adamw"](model.parameters())
    train_on_shares(case, model, by, range(2))
    for layout in LAYOUTS:
        state = gather_optimizer_state(model, by, layout=layout)
        assert bool(state) == (dist.get_rank() == 0)
        if state:
            keys = list(range(6)) if layout == "ids" else [n for n, _ in model.named_parameters()]
            assert list(state["state"]) == keys
            assert state["param_groups"][0]["params"] == keys


# --- FSDP1 ----------------------------------------------------------------------------------------


def wrap_by_fsdp1(model: nn.Module) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # It is deprecated.
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=False,
            device_id=torch.device("cpu"),
        )


def quiet(function: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
    @functools.wraps(function)
    def quietly(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return quietly


@quiet
def with_fsdp1() -> None:
    case = CASES["gpt"]
    steps, more = range(3), range(3, 5)
    torch.manual_seed(0)
    plain = case.make()
    theirs = wrap_by_fsdp1(copy.deepcopy(plain))
    their_by = OPTIMIZERS["adamw"](theirs.parameters())
    model = shard(case, copy.deepcopy(plain), make_mesh((2,)))
    by = OPTIMIZERS["adamw"](model.parameters())
    train_on_shares(case, theirs, their_by, steps)
    train_on_shares(case, model, by, steps)

    # Theirs to ours.
    state = FullyShardedDataParallel.full_optim_state_dict(theirs, their_by, rank0_only=True)
    mine = gather_optimizer_state(model, by)
    if dist.get_rank() == 0:
        assert state["state"].keys() == mine["state"].keys()
        assert_close(mine["state"], state["state"])
    else:
        assert not state
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(theirs, writeback=False):
        values = [param.clone() for param in theirs.parameters()]
    torch.manual_seed(1)
    again = case.make()
    with torch.no_grad():
        for param, value in zip(again.parameters(), values, strict=True):
            param.copy_(value)
    again = shard(case, again, make_mesh((2,)))
    again_by = OPTIMIZERS["adamw"](again.parameters())
    scatter_optimizer_state(state, again, again_by)

    # Ours to theirs.
    wrapped = wrap_by_fsdp1(copy.deepcopy(plain))
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(wrapped):
        for param, value in zip(wrapped.parameters(), values, strict=True):
            param.copy_(value)
    wrapped_by = OPTIMIZERS["adamw"](wrapped.parameters())
    cut = FullyShardedDataParallel.scatter_full_optim_state_dict(
        mine if dist.get_rank() == 0 else None, wrapped, optim=wrapped_by
    )
    wrapped_by.load_state_dict(cut)
    for each, each_by in ((theirs, their_by), (again, again_by), (wrapped, wrapped_by)):
        train_on_shares(case, each, each_by, more)
    expected = full_parameters(again)
    for each in (theirs, wrapped):
        with FullyShardedDataParallel.summon_full_params(each, writeback=False):
            for param, value in zip(each.parameters(), expected.values(), strict=True):
                assert torch.allclose(param, value, atol=TOLERANCE)


def test_both_ways_with_fsdp1(spawn: Spawn) -> None:
    spawn(with_fsdp1, 2)


@quiet
def rekeyed_by_fsdp1() -> None:
    """FSDP1's own function makes numbers of the same names."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    plain = case.make()
    plain_by = OPTIMIZERS["adamw"](plain.parameters())
    train_plain(case, plain, plain_by, range(2))
    kinds = torch.distributed.fsdp.fully_sharded_data_parallel.OptimStateKeyType
    rekey = FullyShardedDataParallel.rekey_optim_state_dict
    named = rekey(plain_by.state_dict(), kinds.PARAM_NAME, plain)
    mine = rekey_optimizer_state(plain_by.state_dict(), plain, plain_by, layout="names")
    for group in mine["param_groups"]:
        group["params"].sort()
    assert_close(mine, named)
    assert_close(rekey_optimizer_state(named, plain, plain_by, layout="ids"), plain_by.state_dict())


def test_names_and_numbers_are_those_of_fsdp1(spawn: Spawn) -> None:
    spawn(rekeyed_by_fsdp1, 1)


# --- fairscale ------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_layout_of_fairscale() -> None:
    """fairscale numbers each wrapper's parameters one after the other: leftovers of the root first.

    ``param_id_map`` and ``uncollected_local_ids`` are what it has besides.
    """
    case = CASES["gpt"]
    plain, plain_by = plain_after(case, "adamw", range(2))
    names = [name for name, _ in plain.named_parameters()]
    order = [n for n in names if "blocks" not in n] + [n for n in names if "blocks" in n]
    named = rekey_optimizer_state(plain_by.state_dict(), plain, plain_by, layout="names")
    theirs = {
        "state": {i: named["state"][name] for i, name in enumerate(order)},
        "param_groups": [{**named["param_groups"][0], "params": list(range(len(order)))}],
        "param_id_map": {},
        "uncollected_local_ids": [],
    }
    model = shard(case, copy.deepcopy(plain), make_mesh((2,)))
    by = OPTIMIZERS["adamw"](model.parameters())
    state = rekey_optimizer_state(theirs, model, by, layout="names", names=order)
    scatter_optimizer_state(state, model, by)
    gathered = gather_optimizer_state(model, by, layout="ids", rank0_only=False)
    assert_close(gathered, plain_by.state_dict())
    with pytest.raises(CheckpointError, match=r"parameters of numbers without a name: \[2, 3,"):
        rekey_optimizer_state(theirs, model, by, layout="names", names=order[:2])


# --- errors ---------------------------------------------------------------------------------------


def refuse(what: str) -> None:
    case = CASES["mlp"]
    plain, plain_by = plain_after(case, "adamw", range(1))
    model = shard(case, copy.deepcopy(plain), make_mesh((2,)))
    state: typing.Any = plain_by.state_dict()
    by = OPTIMIZERS["adamw"](model.parameters())
    if what == "layout":
        gather_optimizer_state(model, by, layout="flat")  # type: ignore[arg-type]
    if what == "several":
        gather_optimizer_state(model, [by, by], layout="ids")  # type: ignore[arg-type]
    if what == "groups":
        by = torch.optim.AdamW(no_decay(model))
    if what == "missing":
        state = rekey_optimizer_state(state, plain, plain_by, layout="names")
        del state["state"]["layers.1.bias"]
        state["param_groups"][0]["params"].remove("layers.1.bias")
    if what == "nothing":
        state = None
    if what == "parts":
        state = {"optimizer": state}
    if what == "form":
        del state["param_groups"][0]["params"]
    # Only rank 0 knows.
    scatter_optimizer_state(state if dist.get_rank() == 0 else None, model, by)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("layout", "layout must be 'names' or 'ids', got 'flat'"),
        ("several", "numbers the parameters of one optimizer, got 2 optimizers"),
        (
            "groups",
            r"of parameter groups of \[6\] parameters, those of the optimizer have \[3, 3\]",
        ),
        ("missing", "the state has nothing of 1 of the optimizer's parameters: 'layers.1.bias'"),
        ("nothing", "has 'state' and 'param_groups', this one has nothing"),
        ("parts", "has 'state' and 'param_groups', this one has 'optimizer'"),
        ("form", "has not the form of an optimizer's: KeyError: 'params'"),
    ],
)
def test_all_ranks_raise(spawn_errors: Spawn, what: str, message: str) -> None:
    import re

    for error in spawn_errors(refuse, 2, what):
        assert error.type_name == CheckpointError.__name__
        assert re.search(message, error.message)
