"""Tensor-parallel parameters with everything else that can be chosen for a model."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from parallel_models import CASES, GPT, batches_of, gpt_plan, make, make_meshes, parallelize
from reference import Differences, assert_within
from shardkit import CPUOffloadPolicy, ShardedTensor, fully_shard
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers

RANKS = 4
# Sums in another order than in the plain model, in fp32, over three steps.
TOLERANCE = 1e-6


def compare_training(
    mesh_shape: tuple[int, ...], plain: nn.Module, model: nn.Module
) -> Differences:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    batches = zip(*batches_of("gpt", mesh_shape, 3), strict=True)
    differences = Differences()
    differences.note_training(CASES["gpt"].case, (model, plain), optimizers, batches)
    differences.note_parameters(model, plain)
    return differences


def assert_close(by_rank: list[Differences]) -> None:
    # A loss between 4 and 8 has units of 5e-7 in the last place.
    assert_within(by_rank, loss=2e-6, grad=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize(
    ("mesh_shape", "options"),
    [
        ((2, 2), {"offload_policy": CPUOffloadPolicy()}),
        ((4, 1), {"reshard_after_forward": 2}),
    ],
    ids=["offload", "partial resharding"],
)
@on_ranks(RANKS)
def test_options_make_no_difference(
    mesh_shape: tuple[int, ...], options: dict[str, typing.Any]
) -> None:
    assert_close([compare_training(mesh_shape, *make("gpt", mesh_shape, **options))])


@on_ranks(RANKS)
def test_a_list_of_modules_is_one_group() -> None:
    plain = GPT()
    model, dp = parallelize("gpt", plain, (2, 2))
    fully_shard(list(model.blocks), dp)
    fully_shard([model.norm, model.head], dp)
    fully_shard(model, dp)
    assert_close([compare_training((2, 2), plain, model)])


def sharded_on_meta(mesh_shape: tuple[int, ...]) -> nn.Module:
    with torch.device("meta"):
        model = GPT()
    dp, tp = make_meshes(mesh_shape)
    parallelize_module(model, tp, gpt_plan(model))
    for module in (*model.blocks, model):
        fully_shard(module, dp)
    assert all(param.is_meta for param in model.parameters())
    return model


def train_materialized(mesh_shape: tuple[int, ...]) -> Differences:
    """Made on meta, sharded there, given memory, initialized as the plain model is."""
    plain, model = GPT(), sharded_on_meta(mesh_shape)
    model.to_empty(device="cpu")
    for m in (plain, model):
        torch.manual_seed(7)
        for param in m.parameters():
            nn.init.normal_(param, std=0.1)
    return compare_training(mesh_shape, plain, model)


def train_assigned(mesh_shape: tuple[int, ...]) -> Differences:
    plain, model = GPT(), sharded_on_meta(mesh_shape)
    model.load_state_dict(plain.state_dict(), assign=True)
    return compare_training(mesh_shape, plain, model)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("way", [train_materialized, train_assigned])
def test_a_model_from_the_meta_device_trains(
    spawn: Spawn,
    mesh_shape: tuple[int, ...],
    way: typing.Callable[[tuple[int, ...]], Differences],
) -> None:
    assert_close(spawn(way, RANKS, mesh_shape))


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="raises inside of the DTensor of torch 2.9"
)
@on_ranks(2)
def test_parameters_in_the_loss_of_split_logits() -> None:
    """The loss is a DTensor, and so is the gradient that comes to the parameters themselves."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    x, y = torch.randn(2, 4, 4), torch.randint(6, (2, 4))
    plain = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6))
    split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"1": split})
    fully_shard(model, mesh["dp"])

    def loss(module: nn.Module, rank: int) -> Tensor:
        squares = torch.stack([param.square().sum() for param in module.parameters()])
        return F.cross_entropy(module(x[rank]), y[rank]) + squares.sum()

    with loss_parallel():
        loss(model, dist.get_rank()).backward()
    (sum(loss(plain, rank) for rank in range(2)) / 2).backward()
    differences = Differences()
    differences.note_grads(model, plain)
    assert_within([differences], grad=TOLERANCE)


def look_at_state_dict_in_forward(mesh_shape: tuple[int, ...]) -> list[type]:
    _, model = make("gpt", mesh_shape)
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, _: object) -> None:
        seen.update(module.state_dict())

    model.blocks[0].attention.q.register_forward_pre_hook(look)
    mine, _ = batches_of("gpt", mesh_shape, 1)
    CASES["gpt"].case.loss(model, mine[0]).backward()
    return [type(value) for value in seen.values()]


def test_a_state_dict_in_forward_holds_sharded_tensors(spawn: Spawn) -> None:
    assert spawn(look_at_state_dict_in_forward, RANKS, (2, 2)) == [[ShardedTensor]] * RANKS
