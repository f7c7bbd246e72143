"""Plain parameters that the package spmd_types describes, as torchtitan makes them by default."""

from __future__ import annotations

import copy
import typing

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from reference import step_all
from shardkit import ShardedTensor, fully_shard
from shardkit.checkpoint import load, save
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    import pathlib


pytestmark = pytest.mark.clients

EXACT = 1e-12  # Sums in another order, in fp64.
Dims = fsdp.DataParallelMeshDims

CASES = {
    "shard": ((4,), ("dp",), Dims(shard="dp")),
    "two as one": ((2, 2), ("dp", "cp"), Dims(shard=("dp", "cp"))),
    "with tp": ((2, 2), ("dp", "tp"), Dims(shard="dp")),
    "tp first": ((2, 2), ("tp", "dp"), Dims(shard="dp")),
    "hybrid": ((2, 2), ("rep", "dp"), Dims(shard="dp", replicate="rep")),
    "hybrid with tp": ((2, 1, 2), ("rep", "dp", "tp"), Dims(shard="dp", replicate="rep")),
    "replicate": ((2, 2), ("rep", "tp"), Dims(replicate="rep")),
    "tp alone": ((1, 4), ("dp", "tp"), Dims(shard="dp")),
}


class Block(nn.Module):
    """Two products, the first of which cuts features over `tp`, and the second sums over it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.up = nn.Parameter(torch.randn(8, 6))
        self.up_bias = nn.Parameter(torch.randn(8))
        self.down = nn.Parameter(torch.randn(6, 8))
        self.down_bias = nn.Parameter(torch.randn(6))
        self.tp: typing.Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.tp is not None:  # Each rank has a part of the gradients of these and of `scale`.
            inputs = spmd.convert(inputs, self.tp, src=spmd.I, dst=spmd.R)
        hidden = inputs * self.scale
        outputs = torch.tanh(hidden @ self.up.T + self.up_bias) @ self.down.T
        if self.tp is not None:
            outputs = spmd.all_reduce(outputs, self.tp, src=spmd.P, dst=spmd.I)
        return typing.cast("Tensor", outputs + self.down_bias)


def describe(block: Block, mesh: DeviceMesh, dims: typing.Any) -> None:
    """Leave each rank its parts, and note what they are."""
    names = mesh.mesh_dim_names or ()
    axes = {name: spmd.MeshAxis.of(mesh.get_group(name)) for name in names}
    # The axes over which fully_shard shards need not be described.
    told = {axis: spmd.R for name, axis in axes.items() if name in dims.shard_names}
    kinds: dict[str, typing.Any] = {}
    if "tp" in names:
        block.tp = mesh.get_group("tp")
        kinds = {"up": spmd.S(0), "up_bias": spmd.S(0), "down": spmd.S(1), "scale": spmd.R}
        kinds["down_bias"] = spmd.I
    for name, param in list(block.named_parameters()):
        part, told_here = param.detach(), dict(told)
        if "tp" in names:
            kind = told_here[axes["tp"]] = kinds[name]
            if isinstance(kind, spmd.Shard):
                part = part.chunk(mesh["tp"].size(), kind.dim)[mesh["tp"].get_local_rank()]
        setattr(block, name, nn.Parameter(part.clone()))
        spmd.assert_type(getattr(block, name), told_here)


def make(case: str) -> tuple[nn.Module, typing.Any, int]:
    """Return the plain model, the sharded one, and the number of ranks with data of their own."""
    shape, names, dims = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block()).double()
    model = copy.deepcopy(plain)
    for block in model:
        describe(typing.cast("Block", block), mesh, dims)
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    tp = mesh["tp"].size() if "tp" in names else 1
    return plain, model, dist.get_world_size() // tp


def batch_of(mesh: DeviceMesh, batches: Tensor) -> Tensor:
    """Return the batch of this rank's data-parallel place."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    place = 0
    for name in names:
        place = place * mesh[name].size() + mesh[name].get_local_rank()
    return batches[place]


@pytest.mark.parametrize("case", CASES)
@on_ranks(4)
def test_training_equals_one_process(case: str) -> None:
    shape, names, _ = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain, model, num_batches = make(case)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(num_batches, 3, 6, generator=generator, dtype=torch.float64)
        plain(batches.flatten(0, 1)).square().mean().backward()
        model(batch_of(mesh, batches)).square().mean().backward()
        for (name, param), (_, wanted) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert isinstance(param, ShardedTensor)
            assert param.shape == wanted.shape
            found: typing.Any = param.grad
            assert wanted.grad is not None
            assert (found.full_tensor() - wanted.grad).abs().max() < EXACT, name
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
        assert abs(norms[0].item() - norms[1].item()) < EXACT
        step_all(optimizers)
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (typing.cast("typing.Any", param).full_tensor() - wanted).abs().max() < EXACT
    model.check_replicas()


@on_ranks(4)
def test_checkpoints_hold_whole_tensors(tmp_path: pathlib.Path) -> None:
    plain, model, _ = make("with tp")
    save(tmp_path / "saved", model)
    _, other, _ = make("two as one")
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    load(tmp_path / "saved", other)
    for param, wanted in zip(other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), wanted)


@on_ranks(4)
def test_modules_see_what_is_described() -> None:
    shape, names, dims = CASES["with tp"]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    block = Block()
    describe(block, mesh, dims)
    noted = {name: dict(spmd.get_local_type(p)) for name, p in block.named_parameters()}
    cuts = {name: spmd.get_partition_spec(p) for name, p in block.named_parameters()}
    params = list(block.parameters())
    fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    block.double()  # Makes new unsharded parameters.
    block.unshard()
    for name, param in block.named_parameters():
        assert type(param) is nn.Parameter
        assert spmd.get_local_type(param) == noted[name]
        assert spmd.get_partition_spec(param) == cuts[name]
    block.reshard()
    block(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    # As other plain parameters, the objects are still the same.
    assert all(now is before for now, before in zip(block.parameters(), params, strict=True))
    assert all(param.grad is not None for param in params)


MISTAKES = {
    "no dims": "is described by spmd_types, and fully_shard must know on which mesh",
    "axis left out": "fully_shard takes R, I and S(dim) for each axis of ('dp', 'tp')",
    "a sum": "fully_shard takes R, I and S(dim) for each axis of ('dp', 'tp')",
    "another part on each rank": "fully_shard takes R, I and S(dim) for each axis",
    "cut where it is sharded": "and R only for ('dp',)",
    "order": "and the mesh has these axes in another order",
    "gradient": "has a gradient, and spmd_types describes it",
}


def mistake(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    kinds: dict[str, typing.Any] = {
        "axis left out": {dp: spmd.R},
        "a sum": {tp: spmd.P},
        "another part on each rank": {tp: spmd.V},
        "cut where it is sharded": {dp: spmd.S(0), tp: spmd.R},
    }
    dims: typing.Any = None if kind == "no dims" else Dims(shard="dp")
    if kind == "order":
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
        a, b = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("a", "b"))
        cuts = spmd.PartitionSpec((b, a), None)
        spmd.assert_type(model.weight, {a: spmd.V, b: spmd.V}, partition_spec=cuts)
    else:
        spmd.assert_type(model.weight, kinds.get(kind, {tp: spmd.S(0)}))
    if kind == "gradient":
        model.weight.grad = torch.zeros(4, 4)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(spawn_errors: Spawn, kind: str) -> None:
    for error in spawn_errors(mistake, 4, kind):
        assert MISTAKES[kind] in error.message
