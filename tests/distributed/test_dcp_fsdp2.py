"""Checkpoints and state dicts exchanged with torch FSDP2, both ways, bit for bit."""

from __future__ import annotations

import math
import typing
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoints import (
    CHECKPOINT_CASES,
    assert_same,
    make_fsdp2,
    make_sharded,
    train_on_shares,
    whole,
    whole_state,
)
from shardkit import ShardedTensor
from waiting import until
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.helpers

MAKERS: dict[str, Callable[..., typing.Any]] = {"shardkit": make_sharded, "FSDP2": make_fsdp2}


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model_state, optim_state = torch_functions.get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load as torch's tutorial does."""
    model_state, optim_state = torch_functions.get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    torch_functions.set_state_dict(
        model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state
    )


def metadata_of(folder: str) -> dict[str, typing.Any]:
    """Return what a checkpoint says of its entries, but for the chunks."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {
        key: (entry.size, entry.properties) if isinstance(entry, TensorStorageMetadata) else entry
        for key, entry in metadata.state_dict_metadata.items()
    }


def exchange(writer: str, reader: str, name: str, mesh_shape: tuple[int, ...], at: str) -> None:
    case = CHECKPOINT_CASES[name]
    model, optimizer = MAKERS[writer](case, mesh_shape)
    train_on_shares(case, model, optimizer, range(2))
    save(model, optimizer, f"{at}/first")
    expected = whole_state(model, optimizer)
    losses = train_on_shares(case, model, optimizer, range(2, 4))

    other, other_optimizer = MAKERS[reader](case, mesh_shape, seed=7)
    load(other, other_optimizer, f"{at}/first")
    assert_same(whole_state(other, other_optimizer), expected)
    save(other, other_optimizer, f"{at}/second")
    # Sums over ranks are taken in another order.
    assert train_on_shares(case, other, other_optimizer, range(2, 4)) == pytest.approx(
        losses, rel=1e-6
    )
    assert metadata_of(f"{at}/second") == metadata_of(f"{at}/first")


@pytest.mark.parametrize(
    ("name", "mesh_shape"),
    [("gpt", (2,)), ("mlp", (3,)), ("frozen", (2, 2))],
)
@pytest.mark.parametrize(("writer", "reader"), [("FSDP2", "shardkit"), ("shardkit", "FSDP2")])
def test_one_writes_the_other_trains_on(
    spawn: Spawn, tmp_path: Path, writer: str, reader: str, name: str, mesh_shape: tuple[int, ...]
) -> None:
    world_size = math.prod(mesh_shape)
    spawn(exchange, world_size, writer, reader, name, mesh_shape, str(tmp_path))


# --- torch's functions on both --------------------------------------------------------------------

OPTIONS = {
    "sharded": {},
    "sharded, on the host": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full on rank 0": {"full_state_dict": True, "cpu_offload": True},
    "full, flat": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "trainable ones": {"ignore_frozen_params": True, "full_state_dict": True},
}


def equal_models(name: str, mesh_shape: tuple[int, ...], folder: str) -> list[typing.Any]:
    """Return a model of each kind and their optimizers, with equal state."""
    case = CHECKPOINT_CASES[name]
    ours = make_sharded(case, mesh_shape)
    train_on_shares(case, *ours, range(2))
    save(*ours, folder)
    theirs = make_fsdp2(case, mesh_shape, seed=7)
    load(*theirs, folder)
    return [ours, theirs]


@pytest.mark.parametrize(("name", "mesh_shape"), [("gpt", (2,)), ("frozen", (2, 2))])
@on_ranks("mesh_shape")
def test_torch_gets_the_same_from_both(
    tmp_path: Path, name: str, mesh_shape: tuple[int, ...]
) -> None:
    folder = str(tmp_path)
    ours, theirs = equal_models(name, mesh_shape, folder)
    for label, flags in OPTIONS.items():
        options = torch_functions.StateDictOptions(**flags)
        (model, optim), (their_model, their_optim) = (
            torch_functions.get_state_dict(*pair, options=options) for pair in (ours, theirs)
        )
        if label == "full on rank 0" and dist.get_rank() > 0:
            assert (model, optim) == (their_model, their_optim) == ({}, {})
            continue
        if flags.get("full_state_dict"):
            assert not any(isinstance(value, ShardedTensor) for value in model.values())
            assert_same(model, their_model)
            assert_same(optim, their_optim)
        else:
            assert_same(whole(model), whole(their_model))
            assert_same(whole(optim), whole(their_optim))


SET_OPTIONS = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
    "flat": {"flatten_optimizer_state_dict": True},  # torch cannot set full flat ones at all.
}


@pytest.mark.parametrize(("name", "mesh_shape"), [("gpt", (2,)), ("tiny", (3,)), ("tied", (2, 2))])
@on_ranks("mesh_shape")
def test_torch_sets_full_states(name: str, mesh_shape: tuple[int, ...]) -> None:
    case = CHECKPOINT_CASES[name]
    model, optimizer = make_sharded(case, mesh_shape)
    train_on_shares(case, model, optimizer, range(2))
    expected = whole_state(model, optimizer)
    for flags in SET_OPTIONS.values():
        options = torch_functions.StateDictOptions(**flags)
        saved, saved_optim = torch_functions.get_state_dict(model, optimizer, options=options)
        other, other_optimizer = make_sharded(case, mesh_shape, seed=7)
        # Not `set_state_dict`, in which a rank without a model's state loads no model at all.
        torch_functions.set_model_state_dict(other, saved, options=options)
        torch_functions.set_optimizer_state_dict(
            other, other_optimizer, saved_optim, options=options
        )
        assert_same(whole_state(other, other_optimizer), expected)
        for param, own in zip(other.parameters(), model.parameters(), strict=True):
            kinds = {key: type(value) for key, value in optimizer.state[own].items()}
            state = other_optimizer.state[param]
            assert {key: type(value) for key, value in state.items()} == kinds


def most_received_at_once() -> int:
    """Return how many whole tensors exist beside the one that is sent, at most."""
    case = CHECKPOINT_CASES["gpt"]
    model, _ = make_sharded(case, (2,))
    options = torch_functions.StateDictOptions(
        full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True
    )
    saved = torch_functions.get_model_state_dict(model, options=options)
    other, _ = make_sharded(case, (2,), seed=7)
    received: list[weakref.ref[torch.Tensor]] = []
    most = 0
    broadcast = dist.broadcast

    def alive() -> int:
        return sum(ref() is not None for ref in received)

    def note(tensor: torch.Tensor, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        nonlocal most
        # A thread of gloo lets go of the last one a moment later.
        until(lambda: alive() <= 1)
        most = max(most, alive())
        if tensor.dtype.is_floating_point and dist.get_rank() > 0:
            received.append(weakref.ref(tensor))
        return broadcast(tensor, *args, **kwargs)

    with mock.patch.object(dist, "broadcast", note):
        torch_functions.set_model_state_dict(other, saved, options=options)
    assert dist.get_rank() == 0 or len(received) == len(saved or other.state_dict())
    return most


def test_what_rank_0_sends_is_cut_before_the_next_one_comes(spawn: Spawn) -> None:
    assert max(spawn(most_received_at_once, 2)) <= 1


# --- files of torch.save --------------------------------------------------------------------------


def write_for_torch(folder: str) -> dict[str, typing.Any]:
    case = CHECKPOINT_CASES["gpt"]
    model, optimizer = make_sharded(case, (2,))
    train_on_shares(case, model, optimizer, range(2))
    save(model, optimizer, folder)
    return whole(model.state_dict())


def read_from_torch(folder: str) -> dict[str, typing.Any]:
    model, _ = make_sharded(CHECKPOINT_CASES["gpt"], (3,), seed=7)
    state = {"model": torch_functions.get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    torch_functions.set_model_state_dict(model, state["model"])
    return whole(model.state_dict())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.9's own
def test_converted_to_a_torch_file_and_back(spawn: Spawn, tmp_path: Path) -> None:
    expected, *_ = spawn(write_for_torch, 2, str(tmp_path / "sharded"))
    format_utils.dcp_to_torch_save(tmp_path / "sharded", tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_same(loaded["model"], expected)
    format_utils.torch_save_to_dcp(tmp_path / "whole.pt", tmp_path / "again")
    for state in spawn(read_from_torch, 3, str(tmp_path / "again")):
        assert_same(state, expected)
