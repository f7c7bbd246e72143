"""`dp_mesh_dims`: parameters that are DTensors on the whole mesh, sharded over some of its axes."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallel_models import forget_old_meshes
from shardkit import ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

if not hasattr(fsdp, "DataParallelMeshDims"):
    pytest.skip("this torch has no DataParallelMeshDims", allow_module_level=True)
DataParallelMeshDims = fsdp.DataParallelMeshDims

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


def train(case: str) -> None:
    forget_old_meshes()
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
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (typing.cast("typing.Any", param).full_tensor() - wanted).abs().max() < EXACT


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(spawn: Spawn, case: str) -> None:
    spawn(train, 4, case)


def mistake(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    placements = [Replicate(), Replicate()]
    if kind == "sharded":
        placements = [Shard(0), Replicate()]
    if kind != "plain":
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, placements))
    dims = DataParallelMeshDims(shard="fsdp" if kind == "name" else "dp")
    fully_shard(
        model,
        mesh=None if kind == "no mesh" else mesh,
        dp_mesh_dims=dims,
        shard_placement_fn=(lambda _: mesh["tp"]) if kind == "another mesh" else None,
    )


MISTAKES = {
    "plain": "'weight' is a plain parameter",
    "sharded": "over the data-parallel axis 'dp' it must be Replicate()",
    "name": "names ['fsdp'] of a mesh with axes ('dp', 'tp')",
    "no mesh": "got None",
    "another mesh": "dp_mesh_dims says where all parameters lie",
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(spawn_errors: Spawn, kind: str) -> None:
    for error in spawn_errors(mistake, 4, kind):
        assert MISTAKES[kind] in error.message
