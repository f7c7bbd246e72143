"""Loads write into pieces: what was gathered from them is stale. Copies taken to be saved later."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import format_utils, staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from checkpoints import (
    CHECKPOINT_CASES,
    assert_same,
    make_sharded,
    train_on_shares,
    whole,
    whole_state,
)
from reference import make_mesh, shard
from shardkit import ShardedTensor, fully_shard
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from pathlib import Path


def outputs(case: typing.Any, model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return case.loss(model, case.batch(torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("how", ["kept after a forward", "held by the user", "in a forward"])
@on_ranks(2)
def test_what_was_gathered_before_a_load_is_gathered_anew(tmp_path: Path, how: str) -> None:
    folder = str(tmp_path)
    case = CHECKPOINT_CASES["gpt"]
    saved, _ = make_sharded(case, (2,))
    dcp.save({"model": saved.state_dict()}, checkpoint_id=folder)
    expected = outputs(case, saved)
    torch.manual_seed(7)
    model = shard(case, case.make(), make_mesh((2,)), reshard_after_forward=False)
    assert not torch.equal(outputs(case, model), expected)  # Groups are kept unsharded after it.
    if how == "held by the user":
        for module in (*case.groups(model), model):
            module.unshard()
    state = {"model": model.state_dict()}
    assert all(isinstance(value, ShardedTensor) for value in state["model"].values())
    if how == "in a forward":
        handle = case.groups(model)[0].register_forward_hook(
            lambda *_: dcp.load(state, checkpoint_id=folder)
        )
        outputs(case, model)
        handle.remove()
    else:
        dcp.load(state, checkpoint_id=folder)
    assert torch.equal(outputs(case, model), expected)
    assert_same(whole(model.state_dict()), whole(saved.state_dict()))


def saved_later(folder: str, stager: str, mesh_shape: tuple[int, ...]) -> None:
    """What is trained while a save is under way is not in it."""
    case = CHECKPOINT_CASES["gpt"]
    model, optimizer = make_sharded(case, mesh_shape)
    train_on_shares(case, model, optimizer, range(2))
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    options = {"async_stager": STAGERS[stager]()} if stager != "default" else {}
    expected = whole_state(model, optimizer)
    future = dcp.async_save(
        state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"), **options
    )
    future = getattr(future, "upload_completion", future)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    future.result()
    other, other_optimizer = make_sharded(case, mesh_shape, seed=7)
    train_on_shares(case, other, other_optimizer, range(1))
    state = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    assert_same(whole_state(other, other_optimizer), expected)


def reused_stager() -> typing.Any:
    """Return a stager that has been used before, as one kept from save to save."""
    return staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


STAGERS: dict[str, typing.Callable[[], typing.Any]] = {
    "shared memory": reused_stager,
    "blocking": staging.BlockingAsyncStager,
}


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("stager", ["default", *STAGERS])
def test_a_save_under_way_holds_what_was_there_when_it_began(
    spawn: Spawn, tmp_path: Path, stager: str, mesh_shape: tuple[int, ...]
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    spawn(saved_later, world_size, str(tmp_path), stager, mesh_shape)


def staged_sizes() -> tuple[int, int]:
    case = CHECKPOINT_CASES["gpt"]
    model, _ = make_sharded(case, (4,))
    staged = reused_stager().stage(model.state_dict())
    assert all(type(value) is ShardedTensor for value in staged.values())
    storages = {
        value.to_local().untyped_storage().data_ptr(): value.to_local().untyped_storage()
        for value in staged.values()
        if value.to_local().numel() > 0
    }
    whole_nbytes = sum(param.numel() * 4 for param in model.parameters())
    return sum(storage.nbytes() for storage in storages.values()), whole_nbytes


def test_a_copy_for_a_later_save_takes_the_memory_of_the_pieces(spawn: Spawn) -> None:
    for staged, whole_nbytes in spawn(staged_sizes, 4):
        assert staged < whole_nbytes * 0.3


VIEWS = {"transposed": torch.t, "rows": lambda weight: weight[:3], "flat": lambda w: w.view(-1)}


@pytest.mark.parametrize("which", VIEWS)
@on_ranks(2)
def test_views_are_loaded_and_refused_in_a_save(tmp_path: Path, which: str) -> None:
    """A rank would write its own object, and the others would wait when that is read."""
    plain = nn.Linear(5, 7)
    expected = VIEWS[which](plain.weight.detach().clone())
    weight = fully_shard(plain).weight.detach()
    with pytest.raises(CheckpointException, match=r"'part' is a view of sharded 'weight'"):
        dcp.save({"part": VIEWS[which](weight)}, checkpoint_id=str(tmp_path / "refused"))
    values = VIEWS[which](weight).full_tensor()
    dcp.save({"part": values}, checkpoint_id=str(tmp_path / "saved"))
    weight.zero_()
    part = VIEWS[which](weight)
    dcp.load({"part": part}, checkpoint_id=str(tmp_path / "saved"))
    assert torch.equal(part.full_tensor(), expected)


@on_ranks(2)
def test_the_reader_that_sends_whole_tensors_is_refused(tmp_path: Path) -> None:
    """It sends a tensor once for each box of a rank, and ranks have different numbers of boxes."""
    state = {"model": fully_shard(nn.Linear(5, 7)).state_dict()}
    path = tmp_path / f"rank{dist.get_rank()}.pt"
    torch.save({"model": nn.Linear(5, 7).state_dict()}, path)
    with pytest.raises(CheckpointException, match=r"load_full"):
        dcp.load(
            state,
            checkpoint_id=path,
            storage_reader=format_utils.BroadcastingTorchSaveReader(),
            planner=format_utils.DynamicMetaLoadPlanner(),
        )
