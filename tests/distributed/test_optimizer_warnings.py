"""Optimizers that update what no group holds, or another model, are noticed at their first step."""

from __future__ import annotations

import copy
import gc
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from models import CASES
from reference import make_mesh, my_batch
from shardkit import fully_shard, init_device_mesh

if typing.TYPE_CHECKING:
    from workers import Spawn

CASE = CASES["gpt"]


def warnings_of_training(
    world_size: int, what: str, optimizer_class: type[torch.optim.Optimizer]
) -> list[str]:
    """Train two steps; return what is warned of."""
    torch.manual_seed(0)
    model, mesh = CASE.make(), make_mesh((world_size,))
    plain = [param for name, param in model.named_parameters() if not name.startswith("blocks.")]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=set(plain) if what == "ignored" else None)
    if what in {"all sharded", "a copy"}:
        fully_shard(model, mesh=mesh)
    trained = copy.deepcopy(model) if what == "a copy" else model
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            CASE.loss(trained, my_batch(CASE, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in caught]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_forgotten_root_is_named_once(
    spawn: Spawn, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    for found in spawn(warnings_of_training, 2, 2, "no root", optimizer_class):
        [said] = found
        assert said.startswith("test_optimizer_warnings.py: no group of fully_shard holds '"), said
        assert "'positions'" in said
        assert "'blocks." not in said
        assert "Call fully_shard on the root as well" in said


def warnings_after_ignored_ones() -> list[str]:
    """Train models in turns, one with ignored parameters and one with a forgotten root."""
    found = []
    for _ in range(10):
        assert warnings_of_training(2, "ignored", torch.optim.SGD) == []
        gc.collect()
        found += warnings_of_training(2, "no root", torch.optim.SGD)
    return found


def test_parameters_of_a_dropped_model_are_no_longer_ignored(spawn: Spawn) -> None:
    """New parameters have the ids of those that are gone."""
    for found in spawn(warnings_after_ignored_ones, 2):
        assert len(found) == 10
        for said in found:
            assert all(name in said for name in ("'tokens.weight'", "'positions'", "'norm.bias'"))


def test_an_optimizer_of_another_model_is_named_once(spawn: Spawn) -> None:
    for found in spawn(warnings_of_training, 2, 2, "a copy", torch.optim.SGD):
        [said] = found
        assert said.startswith("test_optimizer_warnings.py: none of this optimizer's "), said
        assert "SGD(model.parameters())" in said


@pytest.mark.parametrize(
    ("world_size", "what"), [(2, "all sharded"), (2, "ignored"), (1, "no root")]
)
def test_what_is_right_or_meant_is_not_warned_of(spawn: Spawn, world_size: int, what: str) -> None:
    assert spawn(warnings_of_training, world_size, world_size, what, torch.optim.SGD) == [
        [] for _ in range(world_size)
    ]


def warnings_of_optimizers_of_parts() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=make_mesh((2,)))
    fully_shard(model)
    model[1].requires_grad_(requires_grad=False)
    optimizers = [torch.optim.AdamW(layer.parameters()) for layer in model]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(1, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [str(each.message) for each in caught]


def test_an_optimizer_of_frozen_layers_is_not_warned_of(spawn: Spawn) -> None:
    assert spawn(warnings_of_optimizers_of_parts, 2) == [[], []]


def warnings_of_a_copy_with_ignored_parameters() -> list[str]:
    torch.manual_seed(0)
    model = CASE.make()
    fully_shard(model, mesh=make_mesh((2,)), ignored_params={model.positions})
    trained = copy.deepcopy(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CASE.loss(trained, my_batch(CASE, 0)).backward()
        optimizer.step()
    return [str(each.message) for each in caught]


def test_copies_of_ignored_parameters_are_not_warned_of(spawn: Spawn) -> None:
    assert spawn(warnings_of_a_copy_with_ignored_parameters, 2) == [[], []]


def step_with_a_closure() -> list[str]:
    """Let an optimizer compute the first gradients itself, beside a model that has some."""
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    other, model = (fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2))
    other(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(closure)
    return [str(each.message) for each in caught]


def test_a_closure_may_make_the_gradients(spawn: Spawn) -> None:
    assert spawn(step_with_a_closure, 2) == [[], []]


def steps_without_sync(how: str) -> list[str]:
    """Train with accumulation; return what is warned of."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), mesh=make_mesh((2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            if how == "forgotten" and step == 2:
                model.set_requires_gradient_sync(False)
            if how == "accumulates":
                model.set_requires_gradient_sync(step % 2 == 1)
            model(torch.ones(1, 4)).sum().backward()
            if how == "forgotten" or step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in caught]


@pytest.mark.helpers
def test_steps_that_move_nothing_are_told_once(spawn: Spawn) -> None:
    for found in spawn(steps_without_sync, 2, "forgotten"):
        [said] = found
        assert said.startswith("test_optimizer_warnings.py: this SGD steps without a gradient"), (
            said
        )
        assert "'weight'" in said
        assert "set_requires_gradient_sync(True)" in said
    assert spawn(steps_without_sync, 2, "accumulates") == [[], []]


def train_on_an_axis(names: tuple[str, ...], used: tuple[str, ...], maker: str) -> list[str]:
    """Train two steps on a submesh; return what is warned of."""
    make = init_torch_mesh if maker == "torch" else init_device_mesh
    mesh = make("cpu", (2, 2), mesh_dim_names=names)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), mesh=mesh[used])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in caught]


def train_on_meshes_by_hand(case: str) -> list[str]:
    """Train two steps on a mesh of two ranks of four; return what is warned of."""
    rank = dist.get_rank()
    ranks = [[0, 1], [2, 3]]
    meshes = [TorchDeviceMesh("cpu", each) for each in ranks]
    mesh = meshes[rank // 2]
    torch.manual_seed(rank // 2 if case == "other values" else 0)
    width = 3 + rank // 2 if case == "other shapes" else 4
    if case == "experts":
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=TorchDeviceMesh("cpu", [0, 1, 2, 3]))
        params = model[1].parameters()
    elif case == "tensor parallel":
        # Model copies along the rows (0, 2), (1, 3); each row of `ranks` splits matrices.
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
        columns = [TorchDeviceMesh("cpu", each) for each in ([0, 2], [1, 3])]
        model, params = fully_shard(model, mesh=columns[rank % 2]), model.parameters()
    else:
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        params = model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.ones(1, 4, requires_grad=case == "a pipeline" and rank >= 2)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in caught]


@pytest.mark.helpers
def test_copies_on_meshes_by_hand_are_told_once(spawn: Spawn) -> None:
    found = spawn(train_on_meshes_by_hand, 4, "copies")
    [said] = [each for of_rank in found for each in of_rank]
    assert said.startswith("test_optimizer_warnings.py: '0.weight' is sharded over ranks [")
    assert "Nobody averages gradients over both" in said
    assert "It is right where" in said


@pytest.mark.helpers
@pytest.mark.parametrize(
    "case", ["other values", "other shapes", "a pipeline", "experts", "tensor parallel"]
)
def test_meshes_by_hand_that_are_right_are_not_warned_of(spawn: Spawn, case: str) -> None:
    assert spawn(train_on_meshes_by_hand, 4, case) == [[]] * 4


@pytest.mark.helpers
@pytest.mark.parametrize("maker", ["shardkit", "torch"])
def test_an_axis_that_nobody_averages_over_is_told_once(spawn: Spawn, maker: str) -> None:
    axes = ("replicate", "shard")
    for found in spawn(train_on_an_axis, 4, axes, ("shard",), maker):
        [said] = found
        assert said.startswith("test_optimizer_warnings.py: 'weight' is sharded over axis 'shard'")
        assert "mesh['replicate', 'shard']" in said
        assert "It is right where" in said
    for found in spawn(train_on_an_axis, 4, ("outer", "inner"), ("inner",), maker):
        [said] = found
        assert "mesh['outer', 'inner']" in said
    for names, used in (
        (axes, axes),
        (("outer", "inner"), ("outer", "inner")),
        (("pp", "dp"), ("dp",)),
        (("dp", "tp"), ("dp",)),
        (("expert", "shard"), ("shard",)),
    ):
        assert spawn(train_on_an_axis, 4, names, used, maker) == [[]] * 4
