"""State dicts of whole tensors, in files of every kind as others write them."""

from __future__ import annotations

import copy
import json
import pathlib

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import full

StateDict = dict[str, Tensor]

KINDS = ["nested.pt", "model.safetensors", "directory"]


def draw(state: StateDict) -> StateDict:
    """Return a state dict of the same names and ties with other values."""
    generator = torch.Generator().manual_seed(11)
    state = copy.deepcopy(state)
    for value in state.values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator))
        else:
            value.fill_(7)
    return state


def without_ties(state: StateDict) -> StateDict:
    """Leave out later names of a tensor, as libraries do that write safetensors."""
    first = {value.data_ptr(): name for name, value in reversed(state.items())}
    return {name: value for name, value in state.items() if first[value.data_ptr()] == name}


def write(state: StateDict, kind: str, folder: str) -> pathlib.Path:
    """Write a state dict as others do, on rank 0."""
    path = pathlib.Path(folder) / kind
    if dist.get_rank() == 0:
        if kind == "nested.pt":
            torch.save({"model": state, "epoch": 3}, path)
        elif kind == "model.safetensors":
            safetensors.torch.save_file(without_ties(state), path)
        else:
            path.mkdir()
            places = {name: f"part-{i}.safetensors" for i, name in enumerate(without_ties(state))}
            for name, file in places.items():
                safetensors.torch.save_file({name: state[name]}, path / file)
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    dist.barrier()
    return path


@torch.no_grad()
def assert_holds(model: nn.Module, state: StateDict) -> None:
    mine = model.state_dict()
    assert list(mine) == list(state)
    for name, value in state.items():
        whole = full(mine[name])
        assert whole.dtype == value.dtype, name
        assert torch.equal(whole, value), name
