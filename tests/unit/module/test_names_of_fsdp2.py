"""What torch's FSDP2 has in public is here as well, and what packages read from its state."""

# ruff: noqa: SLF001 - names that packages read

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
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


def test_the_state_tells_what_users_chose() -> None:
    """NeMo, Axolotl and OLMo read it."""
    mesh, _ = recording_mesh((2,))
    policy = shardkit.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    root: Any = nn.Sequential(nn.Linear(2, 2))
    module: Any = shardkit.fully_shard(root[0], mesh, policy)
    shardkit.fully_shard(root, mesh, policy)
    get_state: Any = shardkit.fully_shard.state  # type: ignore[attr-defined]
    state = module._get_fsdp_state()
    assert get_state(module) is state
    assert get_state(nn.Linear(2, 2)) is None
    assert state._mp_policy == state._fsdp_param_group.mp_policy == policy
    assert root._get_fsdp_state()._fsdp_param_group is None  # The layer has all parameters.
    assert state._comm_ctx is state._comm_ctx is not root._get_fsdp_state()._comm_ctx
    for is_freed in (True, False):
        module.set_reshard_after_backward(is_freed)
        assert state._fsdp_param_group.reshard_after_backward is is_freed
    for each, name in ((state, "_lazy_init"), (state._fsdp_param_group, "fsdp_params")):
        assert not hasattr(each, name)
        with pytest.raises(AttributeError, match=rf"'{name}' .* is internal to FSDP2"):
            getattr(each, name)
    with pytest.raises(AttributeError, match=r"'reshard_after_backward' .* cannot be set"):
        state._fsdp_param_group.reshard_after_backward = True
    twin = copy.deepcopy(module)
    assert twin._get_fsdp_state().__self__.module is twin


def test_symmetric_memory_is_refused_where_there_is_none() -> None:
    module = shardkit.fully_shard(nn.Linear(2, 2), mesh=recording_mesh((1,))[0])
    with pytest.raises(StateError, match=r"is on 'cpu' devices.*CUDA devices, from torch 2\.12"):
        module.set_symm_mem_for_comm()
