"""State of `MatrixOptimizer` in checkpoints: for other ranks, plain optimizers, torch's own."""

from __future__ import annotations

import copy
import functools
import math
import pathlib
import typing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as torch_state_dict

from matrix_cases import (
    CLASSES,
    compute_gradients,
    optimizers_of,
    step_both,
    train_both,
    whole,
    worst_difference,
)
from models import CASES
from reference import make_mesh, my_batch, shard
from shardkit import ShardedTensor, checkpoint
from shardkit.checkpoint._dcp.reader import DistributedCheckpoint
from workers import Spawn, in_each

if typing.TYPE_CHECKING:
    from torch import nn

    By = list[torch.optim.Optimizer]

pytestmark = pytest.mark.helpers


@pytest.fixture
def spawn(spawn: Spawn) -> Spawn:
    """Leave more time: the first optimizer of a process imports torch's compiler."""
    return functools.partial(spawn, timeout_s=180)


CASE = CASES["gpt"]


def fresh(
    name: str, mesh_shape: tuple[int, ...] | None, *, matrix: bool = True
) -> tuple[nn.Module, By]:
    """Make a model of other values, sharded or (None) plain, and its optimizers."""
    torch.manual_seed(1)
    model = CASE.make()
    if mesh_shape is not None:
        model = shard(CASE, model, make_mesh(mesh_shape))
    return model, optimizers_of(model, name, matrix=matrix)


def go_on(plain: nn.Module, model: nn.Module, plain_by: By, by: By) -> float:
    """Train two more steps; return the difference that there was before, or is after them."""
    before = worst_difference(plain, model)
    for step in range(10, 12):
        compute_gradients(CASE, model, [my_batch(CASE, step)])
        step_both(plain, model, plain_by, by)
    return max(before, worst_difference(plain, model))


def save(mesh_shape: tuple[int, ...], parent: str, writer: str, name: str) -> None:
    """Save a sharded run by either optimizer, and what an unsharded run has."""
    folder = f"{parent}/{name}"
    pathlib.Path(folder).mkdir(exist_ok=True)
    plain, model, plain_by, by = train_both(name, mesh_shape, batch_bytes=8000)
    if writer == "sharded":
        checkpoint.save(f"{folder}/checkpoint", model, by)
    elif dist.get_rank() == 0:
        checkpoint.save(f"{folder}/checkpoint", plain, plain_by)
    if dist.get_rank() == 0:
        states = [plain.state_dict(), *(each.state_dict() for each in plain_by)]
        torch.save(states, f"{folder}/plain.pt")


def plain_of(parent: str, name: str) -> tuple[nn.Module, By]:
    plain, plain_by = fresh(name, None, matrix=False)
    states = torch.load(f"{parent}/{name}/plain.pt")
    for target, state in zip((plain, *plain_by), states, strict=True):
        target.load_state_dict(state)
    return plain, plain_by


def load_sharded(mesh_shape: tuple[int, ...], parent: str, name: str) -> float:
    plain, plain_by = plain_of(parent, name)
    model, by = fresh(name, mesh_shape)
    checkpoint.load(f"{parent}/{name}/checkpoint", model, by)
    return go_on(plain, model, plain_by, by)


NAMES = {name: name for name in CLASSES}
ALIKE = dict.fromkeys(CLASSES, 0.0)


@pytest.mark.parametrize(
    ("saved", "loaded"), [((4,), (3,)), ((2,), (2, 2)), ((2, 2), (1,))], ids=str
)
def test_training_goes_on_with_other_ranks(
    spawn: Spawn, tmp_path: pathlib.Path, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    spawn(in_each, math.prod(saved), NAMES, save, saved, str(tmp_path), "sharded")
    found = spawn(in_each, math.prod(loaded), NAMES, load_sharded, loaded, str(tmp_path))
    assert found == [ALIKE] * len(found)


def load_plain(parent: str, name: str) -> float:
    """Load what a sharded run saved into an unsharded one."""
    plain, plain_by = plain_of(parent, name)
    model, by = fresh(name, None, matrix=False)
    checkpoint.load(f"{parent}/{name}/checkpoint", model, by)
    model.set_requires_gradient_sync = lambda _: None  # type: ignore[assignment]
    return go_on(plain, model, plain_by, by)


def test_a_plain_run_goes_on(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(in_each, 3, NAMES, save, (3,), str(tmp_path), "sharded")
    assert spawn(in_each, 1, NAMES, load_plain, str(tmp_path)) == [ALIKE]


def test_a_sharded_run_goes_on_from_a_plain_one(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(in_each, 1, NAMES, save, (1,), str(tmp_path), "plain")
    assert spawn(in_each, 2, NAMES, load_sharded, (2,), str(tmp_path)) == [ALIKE] * 2


# --- state dicts ----------------------------------------------------------------------------------


def by_state_dicts(mesh_shape: tuple[int, ...], how: str, name: str) -> float:
    """Hand state over to a new run, by the functions of torch, or of the optimizer."""
    plain, model, plain_by, by = train_both(name, mesh_shape)
    other, other_by = fresh(name, mesh_shape)
    other.load_state_dict(model.state_dict())
    full = torch_state_dict.StateDictOptions(full_state_dict=True)
    if how == "own":
        for ours, theirs in zip(other_by, by, strict=True):
            ours.load_state_dict(theirs.state_dict())
    elif how == "plain":
        for ours, theirs in zip(other_by, plain_by, strict=True):
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    elif how == "full":
        state = torch_state_dict.get_optimizer_state_dict(model, by, options=full)
        torch_state_dict.set_optimizer_state_dict(other, other_by, state, options=full)
    else:
        state = torch_state_dict.get_optimizer_state_dict(model, by)
        torch_state_dict.set_optimizer_state_dict(other, other_by, state)
    return go_on(plain, other, plain_by, other_by)


@pytest.mark.parametrize("how", ["own", "plain", "full", "sharded"])
def test_state_dicts(spawn: Spawn, how: str) -> None:
    names = {name: name for name in ("muon", "adafactor", "soap")}
    found = spawn(in_each, 3, names, by_state_dicts, (3,), how)
    assert found == [dict.fromkeys(names, 0.0)] * 3


def shown_state(name: str) -> dict[str, typing.Any]:
    """Return what a state dict shows of one parameter."""
    _, _, plain_by, by = train_both(name, (2, 2))
    mine, theirs = (each.state_dict()["state"] for each in (by[0], plain_by[0]))
    assert mine.keys() == theirs.keys()
    numel = 0
    for number, entries in theirs.items():
        assert mine[number].keys() == entries.keys()
        for key, value in entries.items():
            ours = mine[number][key]
            if isinstance(value, torch.Tensor) and value.ndim:
                assert isinstance(ours, ShardedTensor)
                assert ours.shape == value.shape
                assert torch.equal(whole(ours), value), key
                numel += ours.to_local().numel()
            elif not isinstance(value, list):
                assert ours == value
    return {
        "numel": numel,
        "whole": sum(p.numel() for g in by[0].param_groups for p in g["params"]),
    }


def test_state_belongs_to_owners(spawn: Spawn) -> None:
    found = spawn(shown_state, 4, "muon")
    assert sum(each["numel"] for each in found) == found[0]["whole"]
    assert max(each["numel"] for each in found) < 0.5 * found[0]["whole"]
    spawn(shown_state, 4, "soap")


def load_where_one_rank_cannot_read(folder: str, when: int) -> None:
    """Load into an optimizer that has stepped; one read of rank 1 fails."""
    model, by = train_both("muon", (2,), batch_bytes=8000)[1::2]
    real, calls = DistributedCheckpoint.fill, []

    def fill(self: DistributedCheckpoint, targets: typing.Any) -> typing.Any:
        if targets:
            calls.append(0)
        if dist.get_rank() == 1 and len(calls) == when:
            msg = "Input/output error"
            raise OSError(msg)
        return real(self, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedCheckpoint, "fill", fill)
        checkpoint.load(f"{folder}/muon/checkpoint", model, by)


@pytest.mark.parametrize("when", [1, 2, 3])
def test_all_ranks_hear_why_one_could_not_read(
    spawn: Spawn, spawn_errors: Spawn, tmp_path: pathlib.Path, when: int
) -> None:
    """Though other ranks communicate when they make room for what is read, and when it is put."""
    spawn(save, 2, (2,), str(tmp_path), "sharded", "muon")
    for error in spawn_errors(load_where_one_rank_cannot_read, 2, str(tmp_path), when):
        assert error is not None
        assert error.type_name == "CheckpointError", error.traceback
        assert "[rank 1] OSError: Input/output error" in error.message
