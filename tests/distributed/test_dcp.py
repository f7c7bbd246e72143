"""Plain ``dcp.save`` and ``dcp.load`` of sharded models and their optimizers."""

from __future__ import annotations

import math
import subprocess
import sys
import typing

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from checkpoints import (
    CHECKPOINT_CASES,
    WholeState,
    assert_same,
    make_sharded,
    train_on_shares,
    whole_state,
)
from launching import environment_of, free_port
from shardkit.checkpoint import CheckpointReader

if typing.TYPE_CHECKING:
    from pathlib import Path

    from workers import Spawn


def save(name: str, mesh_shape: tuple[int, ...], folder: str) -> tuple[WholeState, list[float]]:
    """Train, save, train on."""
    case = CHECKPOINT_CASES[name]
    model, optimizer = make_sharded(case, mesh_shape)
    train_on_shares(case, model, optimizer, range(2))
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    return whole_state(model, optimizer), train_on_shares(case, model, optimizer, range(2, 4))


def load(name: str, mesh_shape: tuple[int, ...], folder: str) -> tuple[WholeState, list[float]]:
    """Load into a model of other values, as torch's tutorial does, train on."""
    case = CHECKPOINT_CASES[name]
    model, optimizer = make_sharded(case, mesh_shape, seed=7)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    return whole_state(model, optimizer), train_on_shares(case, model, optimizer, range(2, 4))


@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [
        ("gpt", (2,), (3,)),
        ("gpt", (3,), (2, 2)),
        ("gpt", (2, 2), (2,)),
        ("mixed", (4,), (2,)),
        ("frozen", (3,), (4,)),
        ("tiny", (2,), (4,)),
        ("conv", (1,), (2,)),
        ("tied", (2,), (1,)),
    ],
)
def test_saved_on_n_ranks_loads_on_m(
    spawn: Spawn,
    tmp_path: Path,
    name: str,
    saved: tuple[int, ...],
    loaded: tuple[int, ...],
) -> None:
    world_size = math.prod(saved)
    (expected, losses), *_ = spawn(save, world_size, name, saved, str(tmp_path))
    files = sorted(path.name for path in tmp_path.glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(world_size)]
    for state, others in spawn(load, math.prod(loaded), name, loaded, str(tmp_path)):
        assert_same(state, expected)
        if name == "conv":
            continue  # Batch statistics are those of a rank's own samples.
        # Sums over ranks are taken in another order.
        assert others == pytest.approx(losses, rel=1e-5)


SAVE_IN_A_PROCESS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from shardkit.checkpoint import CheckpointWriter

# Torch's own may be taken by a connection before that process listens.
_async_process_executor.get_free_port = lambda: int(sys.argv[2])
dist.init_process_group("gloo")
dcp.async_save(
    {"a": torch.arange(4.0)},
    storage_writer=CheckpointWriter(sys.argv[1]),
    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
).result()
dist.destroy_process_group()
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_process_saves(tmp_path: Path) -> None:
    environment = environment_of(0, 1, free_port(), LOCAL_RANK="0")
    command = [sys.executable, "-c", SAVE_IN_A_PROCESS, str(tmp_path / "x"), str(free_port())]
    subprocess.run(command, env=environment, check=True, timeout=120)
    state = {"a": torch.zeros(4)}
    dcp.load(state, storage_reader=CheckpointReader(tmp_path / "x"), no_dist=True)
    assert state["a"].tolist() == [0, 1, 2, 3]
