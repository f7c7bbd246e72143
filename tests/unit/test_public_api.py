"""What users import and call: names, signatures as FSDP2's, the cost of importing."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import types
import typing

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import shardkit
from recording import recording_mesh
from shardkit import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardkit._wrapping.strategies import STRATEGIES, StrategyName

if typing.TYPE_CHECKING:
    from collections.abc import Callable

Parameters = typing.Mapping[str, inspect.Parameter]


# --- names --------------------------------------------------------------------------------------


def test_all_is_sorted_and_each_name_once() -> None:
    assert list(shardkit.__all__) == sorted(set(shardkit.__all__))


@pytest.mark.parametrize("name", shardkit.__all__)
def test_each_public_name_exists_and_says_what_it_is(name: str) -> None:
    item = getattr(shardkit, name)
    assert inspect.getdoc(item)
    assert item.__name__ == name


def test_nothing_else_looks_public() -> None:
    names = {
        name
        for name, item in vars(shardkit).items()
        if not name.startswith("_") and not isinstance(item, types.ModuleType)
    }
    assert names == set(shardkit.__all__)


def test_parts_are_imported_when_they_are_used() -> None:
    """Messages and pages name `shardkit.checkpoint`, and ``import shardkit`` stands above."""
    code = (
        "import sys, shardkit\n"
        "names = 'checkpoint', 'compression', 'optim'\n"
        "assert not any(f'shardkit.{name}' in sys.modules for name in names)\n"
        "assert shardkit.checkpoint.save and shardkit.compression.PowerSGD\n"
        "assert shardkit.optim.LocalOptimizer and not hasattr(shardkit, 'other')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", shardkit.__version__)


def test_names_that_torch_has_too_are_those_of_torch() -> None:
    """A script moves over by changing its import."""
    moved = {
        "CPUOffloadPolicy",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnshardHandle",
        "fully_shard",
        "register_fsdp_forward_method",
    }
    assert moved <= set(shardkit.__all__)
    assert all(hasattr(fsdp, name) for name in moved)


# --- signatures ---------------------------------------------------------------------------------


def parameters(function: Callable[..., object]) -> Parameters:
    return inspect.signature(function).parameters


def test_fully_shard_takes_what_fsdp2_takes_by_the_same_names() -> None:
    mine, theirs = parameters(fully_shard), parameters(fsdp.fully_shard)
    assert list(mine) == [
        "module",
        "mesh",
        "mp_policy",
        "reshard_after_forward",
        "shard_placement_fn",
        "offload_policy",
        "ignored_params",
        "dp_mesh_dims",
    ]
    for name, parameter in mine.items():
        if name == "dp_mesh_dims" and name not in theirs:
            continue  # It came after torch 2.9.
        assert name in theirs
        if name not in ("module", "mp_policy", "offload_policy"):
            assert parameter.default is theirs[name].default is None
    assert mine["mp_policy"].default == MixedPrecisionPolicy()
    assert mine["module"].default is inspect.Parameter.empty


def test_mesh_and_policy_may_be_passed_by_position() -> None:
    """FSDP2 takes the mesh by its name only, so the documentation passes it so."""
    mesh, _ = recording_mesh((2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(4, 4), mesh, policy, True)
    assert model(torch.ones(1, 4)).dtype == torch.bfloat16


def public_methods(cls: type) -> dict[str, Callable[..., object]]:
    functions = inspect.getmembers(cls, inspect.isfunction)
    return {name: function for name, function in functions if not name.startswith("_")}


OWN_METHODS = {"memory_stats", "set_prefetch_policy"}
# Newer than the oldest torch: what there is to compare with depends on the version.
METHODS = sorted(set(public_methods(fsdp.FSDPModule)) & set(public_methods(FSDPModule)))
NOT_HERE = {"set_symm_mem_for_comm"}  # NCCL's symmetric memory


def test_a_sharded_module_has_all_methods_of_fsdp2() -> None:
    assert set(public_methods(fsdp.FSDPModule)) - set(METHODS) <= NOT_HERE
    assert set(public_methods(FSDPModule)) >= OWN_METHODS


@pytest.mark.parametrize("name", METHODS)
def test_each_method_can_be_called_as_fsdp2s(name: str) -> None:
    mine = parameters(public_methods(FSDPModule)[name])
    theirs = parameters(public_methods(fsdp.FSDPModule)[name])
    assert list(mine)[: len(theirs)] == list(theirs)
    more = [*mine.values()][len(theirs) :]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in more)
    assert all(each.default is not inspect.Parameter.empty for each in more)
    for parameter, other in zip(mine.values(), theirs.values(), strict=False):
        assert parameter.default == other.default
        assert parameter.kind in (other.kind, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def test_a_handle_of_unshard_can_be_waited_for() -> None:
    assert list(public_methods(shardkit.UnshardHandle)) == ["wait"]
    assert list(parameters(shardkit.UnshardHandle.wait)) == ["self"]


def test_all_names_of_strategies_are_in_their_type() -> None:
    names = {name for each in STRATEGIES for name in (each.name, *each.aliases)}
    assert set(typing.get_args(StrategyName)) == names


# --- the module's class -------------------------------------------------------------------------


class Net(nn.Linear):
    """A module with a method of its own."""

    def greet(self) -> str:
        return "hello"


def sharded(module: nn.Module) -> typing.Any:
    return fully_shard(module, recording_mesh((2,))[0])


def test_a_sharded_module_is_what_it_was_and_more() -> None:
    model = sharded(Net(2, 2))
    assert isinstance(model, Net)
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPNet"
    assert type(model).__mro__[:3] == (type(model), FSDPModule, Net)
    assert model.greet() == "hello"


def test_the_module_itself_is_returned_and_its_parameters_are_the_same_objects() -> None:
    module = Net(2, 2)
    before = list(module.parameters())
    assert sharded(module) is module
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert all(isinstance(param, shardkit.ShardedTensor) for param in before)
    assert all(isinstance(param, nn.Parameter) for param in before)


def test_two_modules_of_a_class_get_one_class() -> None:
    assert type(sharded(Net(2, 2))) is type(sharded(Net(3, 3)))
    assert type(Net(2, 2)) is Net


def test_a_sequential_can_still_be_sliced() -> None:
    """Slicing makes a new container of the class of the old one."""
    model = sharded(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    part = model[:2]
    assert len(part) == 2
    assert part[0] is model[0]


# --- importing ----------------------------------------------------------------------------------

LOOK = """
import json, sys
import torch.distributed as dist
import shardkit
print(json.dumps({"modules": sorted(sys.modules), "initialized": dist.is_initialized()}))
"""
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",  # Imports triton where it is installed.
    "torch_xla",
    "triton",
    "sympy",
    "numpy.testing",
)


@pytest.fixture(scope="module")
def after_import() -> dict[str, typing.Any]:
    """Return what a fresh interpreter looks like after ``import shardkit``."""
    result: dict[str, typing.Any] = json.loads(
        subprocess.check_output([sys.executable, "-W", "error", "-c", LOOK], text=True)
    )
    return result


def test_importing_starts_no_process_group(after_import: dict[str, typing.Any]) -> None:
    assert not after_import["initialized"]


@pytest.mark.parametrize("name", HEAVY)
def test_importing_leaves_heavy_packages_alone(
    after_import: dict[str, typing.Any], name: str
) -> None:
    assert name not in after_import["modules"]


@pytest.mark.parametrize("backend", ["accelerator", "gloo", "recording", "tensor_parallel"])
def test_importing_leaves_backends_for_when_they_are_needed(
    after_import: dict[str, typing.Any], backend: str
) -> None:
    assert f"shardkit.backends.{backend}" not in after_import["modules"]
