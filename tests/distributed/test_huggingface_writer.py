"""torch's writer of safetensors gets all of a piece that begins or ends inside a row."""

from __future__ import annotations

import pathlib
import typing

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn


def write(folder: str, is_tied: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    if is_tied:  # safetensors refuses tensors of one file that share memory.
        model.append(nn.Linear(7, 5, bias=False))
        model[3].weight = model[1].weight
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)  # One bucket: cuts fall inside of rows.
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer)
    if dist.get_rank() == 0:
        (path,) = pathlib.Path(folder).glob("*.safetensors")
        found = load_file(path)
        assert found.keys() == whole.keys()
        for name, values in whole.items():
            assert torch.equal(found[name], values), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_tensors_are_written(spawn: Spawn, tmp_path: pathlib.Path, ranks: int) -> None:
    spawn(write, ranks, str(tmp_path), False)


def test_tied_parameters_are_written(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(write, 2, str(tmp_path), True)


def write_a_number(folder: str) -> None:
    model = fully_shard(nn.Linear(7, 5))
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save({**model.state_dict(), "step": 3}, storage_writer=writer)


def test_what_is_no_tensor_does_not_disturb(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(write_a_number, 2, str(tmp_path))
