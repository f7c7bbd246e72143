"""`dp_mesh_dims`: parameters that are DTensors on the whole mesh, sharded over some of its axes."""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from reference import step_all
from shardkit import ShardedTensor, fully_shard
from workers import Spawn, on_ranks

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("this torch has no DataParallelMeshDims", allow_module_level=True)
DataParallelMeshDims = fsdp.DataParallelMeshDims
ShardPlacementResult = fsdp._fully_shard._fsdp_common.ShardPlacementResult  # noqa: SLF001
_get_mesh_info = fsdp._fully_shard._fsdp_init._get_mesh_info  # noqa: SLF001 - as torchtitan does

EXACT = 1e-12  # Sums in another order, in fp64.

CASES = {
    "shard": ((4,), ("dp",), DataParallelMeshDims(shard="dp")),
    "two as one": ((2, 2), ("dp", "cp"), DataParallelMeshDims(shard=("dp", "cp"))),
    "with tp": ((2, 2), ("dp", "tp"), DataParallelMeshDims(shard="dp")),
    "hybrid": ((2, 2), ("rep", "dp"), DataParallelMeshDims(shard="dp", replicate="rep")),
    "hybrid with tp": (
        (2, 1, 2),
        ("rep", "dp", "tp"),
        DataParallelMeshDims(shard="dp", replicate="rep"),
    ),
    "replicate": ((2, 2), ("rep", "tp"), DataParallelMeshDims(replicate="rep")),
}


class Columns(nn.Module):
    """A linear layer, the output features of which may be split over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, inputs: Tensor) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return torch.tanh(inputs @ self.weight.T) * self.scale
        # The batch is another one on each data-parallel rank: local tensors.
        mesh, weight = self.weight.device_mesh, self.weight
        part = torch.tanh(inputs @ weight.to_local().T)
        placements = [Shard(1) if p.is_shard() else Replicate() for p in weight.placements]
        whole = DTensor.from_local(part, mesh, placements).full_tensor()
        return whole * typing.cast("DTensor", self.scale).to_local()


@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_training_equals_one_process(case: str) -> None:
    shape, names, dims = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    plain = nn.Sequential(Columns(), nn.Linear(6, 5), Columns()).double()
    plain[1] = nn.Identity()
    plain[2].weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    model = copy.deepcopy(plain)
    whole = [Replicate() for _ in names]
    # The second one is whole, so that its inputs' gradients are whole on each rank.
    split = [Shard(0) if name == "tp" else Replicate() for name in names]
    for each, splits in ((model[0], split), (model[2], whole)):
        each.weight = nn.Parameter(distribute_tensor(each.weight.detach(), mesh, splits))
        each.scale = nn.Parameter(distribute_tensor(each.scale.detach(), mesh, whole))
        fully_shard(each, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    tp = 2 if "tp" in names else 1
    num_batches = dist.get_world_size() // tp
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(num_batches, 3, 5, generator=generator, dtype=torch.float64)
        own = batches[dist.get_rank() // tp]
        plain(batches.flatten(0, 1)).square().mean().backward()
        loss = model(own).square().mean()
        loss.backward()
        for (name, param), (_, wanted) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert isinstance(param, ShardedTensor)
            found: typing.Any = param.grad
            assert wanted.grad is not None
            assert (found.full_tensor() - wanted.grad).abs().max() < EXACT, name
            ranks = dist.get_world_size() // tp // (2 if dims.replicate else 1)
            assert param.to_local().numel() <= -(-wanted.numel() // ranks) + 16
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
        assert abs(norms[0].item() - norms[1].item()) < EXACT
        step_all(optimizers)
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (typing.cast("typing.Any", param).full_tensor() - wanted).abs().max() < EXACT


class Experts(nn.Module):
    """A layer on one mesh, and rows on another one, of which a rank holds those of its place."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Columns()
        self.rows = nn.Parameter(torch.randn(4, 6))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.rows
        if isinstance(rows, DTensor):  # Every rank has a batch of its own, on all axes.
            mesh = rows.device_mesh
            sums = [Partial()] * (mesh.ndim - 1)
            own = rows.to_local(grad_placements=[*sums, Shard(0)])
            spread = DTensor.from_local(own, mesh["ep"], [Shard(0)])
            rows = spread.full_tensor(grad_placements=[Partial()])
        hidden = self.dense(inputs)
        return typing.cast("Tensor", torch.softmax(hidden @ rows.T, dim=-1) @ rows)


EXPERTS = {
    "shard": (((4,), ("dp",)), ((2, 2), ("efsdp", "ep"))),
    "on every rank": (((4,), ("dp",)), ((1, 4), ("efsdp", "ep"))),
    "hybrid": (((2, 2), ("rep", "dp")), ((2, 1, 2), ("rep", "efsdp", "ep"))),
}


@pytest.mark.parametrize("case", EXPERTS)
@on_ranks(4)
def test_experts_on_a_mesh_of_their_own(case: str) -> None:
    dense, sparse = (
        init_device_mesh("cpu", shape, mesh_dim_names=names) for shape, names in EXPERTS[case]
    )
    replicate = "rep" if "rep" in (dense.mesh_dim_names or ()) else None
    dims, sparse_dims = (
        DataParallelMeshDims(shard=name, replicate=replicate) for name in ("dp", "efsdp")
    )
    torch.manual_seed(1)
    plain = Experts().double()
    model = copy.deepcopy(plain)
    for each in ("weight", "scale"):
        whole = getattr(model.dense, each).detach()
        spread = distribute_tensor(whole, dense, [Replicate()] * dense.ndim)
        setattr(model.dense, each, nn.Parameter(spread))
    placements = [*[Replicate()] * (sparse.ndim - 1), Shard(0)]
    model.rows = nn.Parameter(distribute_tensor(model.rows.detach(), sparse, placements))
    rows = model.rows

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        if param is not rows:
            return None
        return ShardPlacementResult(Shard(0), _get_mesh_info(sparse, sparse_dims))

    fully_shard(model, mesh=dense, dp_mesh_dims=dims, shard_placement_fn=place)
    model.set_gradient_divide_factor(4.0)
    found: typing.Any = model.rows
    assert found.to_local().numel() == plain.rows.numel() // math.prod(sparse.shape[-2:])
    assert found.device_mesh.mesh_dim_names == sparse.mesh_dim_names
    around: typing.Any = model.dense.weight
    assert around.device_mesh.mesh_dim_names == dense.mesh_dim_names
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
        plain(batches.flatten(0, 1)).square().mean().backward()
        model(batches[dist.get_rank()]).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
        assert abs(norms[0].item() - norms[1].item()) < EXACT
        step_all(optimizers)
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (typing.cast("typing.Any", param).full_tensor() - wanted).abs().max() < EXACT
    model.check_replicas()


def mistake(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    placements = [Replicate(), Replicate()]
    if kind == "sharded":
        placements = [Shard(0), Replicate()]
    if kind != "plain":
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, placements))
    dims = DataParallelMeshDims(shard="fsdp" if kind == "name" else "dp")
    answer: typing.Any = mesh["tp"] if kind == "another mesh" else None
    if kind == "another mesh of DTensors":
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        answer = ShardPlacementResult(Shard(0), _get_mesh_info(world, dims))
    fully_shard(
        model,
        mesh=None if kind == "no mesh" else mesh,
        dp_mesh_dims=dims,
        shard_placement_fn=lambda _: answer,
    )


MISTAKES = {
    "plain": "'weight' is a plain parameter",
    "sharded": "over the data-parallel axis 'dp' it must be Replicate()",
    "name": "names ['fsdp'] of a mesh with axes ('dp', 'tp')",
    "no mesh": "got None",
    "another mesh": "the meshes must have this rank only in common",
    "another mesh of DTensors": "or on the one that shard_placement_fn returned for them",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(spawn_errors: Spawn, kind: str) -> None:
    for error in spawn_errors(mistake, 4, kind):
        assert MISTAKES[kind] in error.message
