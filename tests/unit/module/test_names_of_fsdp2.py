"""What torch's FSDP2 has in public is here as well."""

from __future__ import annotations

import inspect

import pytest
from torch import nn
from torch.distributed import fsdp

import shardkit
from recording import recording_mesh
from shardkit import StateError

METHODS = [name for name in vars(fsdp.FSDPModule) if not name.startswith("_")]


def parameters_of(function: object) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_every_argument_of_fully_shard() -> None:
    ours = parameters_of(shardkit.fully_shard)
    theirs = parameters_of(fsdp.fully_shard)
    assert "shard_placement_fn" in theirs
    assert not set(theirs) - set(ours)
    # By name, each of theirs can be given to ours.
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert all(ours[name].kind in by_name for name in theirs)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_with_its_arguments(name: str) -> None:
    ours = parameters_of(getattr(shardkit.FSDPModule, name))
    theirs = parameters_of(getattr(fsdp.FSDPModule, name))
    assert [*theirs] == [*ours][: len(theirs)]
    for parameter, default in theirs.items():
        assert ours[parameter].default == default.default, parameter


@pytest.mark.parametrize(
    "name", [name for name in fsdp.__all__ if inspect.isfunction(getattr(fsdp, name))]
)
def test_every_function(name: str) -> None:
    theirs = parameters_of(getattr(fsdp, name))
    assert set(theirs) <= set(parameters_of(getattr(shardkit, name)))


def test_symmetric_memory_is_refused_where_there_is_none() -> None:
    module = shardkit.fully_shard(nn.Linear(2, 2), mesh=recording_mesh((1,))[0])
    with pytest.raises(StateError, match=r"is on 'cpu' devices.*CUDA devices, from torch 2\.12"):
        module.set_symm_mem_for_comm()
