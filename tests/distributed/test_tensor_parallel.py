"""Parameters that are DTensors on another mesh axis, sharded over the data-parallel ones."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models import Batch, Case, cross_entropy, regression_batch, squared_error, token_batch
from models import VOCABULARY, WIDTHS
from reference import Differences, assert_within, full_grads, full_parameters, rank_batch, train
from shardkit import FlatShard, MixedPrecisionPolicy, ShardedTensor, fully_shard

Spawn = typing.Callable[..., list[typing.Any]]
Plan = dict[str, ParallelStyle]

RANKS = 4
# The last axis is tensor-parallel; the first of three replicates.
MESHES = ((2, 2), (1, 4), (4, 1), (2, 1, 2), (1, 2, 2))
AXES = ("replicate", "shard", "tp")

# The sums over the batch, the ranks and the split dimensions are taken in another order than in
# the plain model; fp32 units in the last place (6e-8 at 1) of six steps, and Adam divides by small
# gradients.
TOLERANCE = 1e-5


class MLP(nn.Module):
    """Two layers with biases that are split over ranks, and a plain parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTHS[0], 12)
        self.down = nn.Linear(12, WIDTHS[-1])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTHS[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


class Attention(nn.Module):
    """Causal attention; on a rank, the heads whose queries, keys and values it has."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            linear(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, -1))


class Block(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, head_dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """A language model that between its layers holds a part of the sequence on each rank."""

    def __init__(self, dim: int = 32, num_blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 4) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def mlp_plan(model: nn.Module) -> Plan:
    del model
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def gpt_plan(model: nn.Module) -> Plan:
    """Megatron's layout with sequence parallelism; the vocabulary is split unevenly."""
    plan: Plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        at = f"blocks.{i}."
        plan |= {
            at + "norm1": SequenceParallel(),
            at + "attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            **{at + f"attention.{name}": ColwiseParallel() for name in "qkv"},
            at + "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            at + "norm2": SequenceParallel(),
            at + "fc1": ColwiseParallel(input_layouts=Shard(1)),
            at + "fc2": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan


@dataclasses.dataclass(frozen=True)
class ParallelCase:
    case: Case
    plan: typing.Callable[[nn.Module], Plan]


CASES = {
    "mlp": ParallelCase(Case(MLP, lambda _: [], regression_batch, squared_error), mlp_plan),
    "gpt": ParallelCase(
        Case(GPT, lambda model: list(model.blocks), token_batch, cross_entropy), gpt_plan
    ),
}

OPTIMIZERS: dict[str, typing.Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "adamw for-loop": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}


def forget_old_meshes() -> None:
    """Clear DTensor's caches: they hand out meshes of process groups that earlier calls ended."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()  # noqa: SLF001
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # noqa: SLF001 - 2.9 has none
        torch._C._clear_DTensor_sharding_propagator_cache()  # noqa: SLF001


def make_meshes(shape: tuple[int, ...]) -> tuple[TorchDeviceMesh, TorchDeviceMesh]:
    """Return the data-parallel and the tensor-parallel part of a mesh."""
    forget_old_meshes()
    names = AXES[-len(shape) :]
    mesh = init_torch_mesh("cpu", shape, mesh_dim_names=names)
    return mesh[names[:-1]], mesh["tp"]


def data_rank(mesh_shape: tuple[int, ...], rank: int | None = None) -> int:
    """Return which batch a rank gets: one for all ranks that differ on the last axis only."""
    return (dist.get_rank() if rank is None else rank) // mesh_shape[-1]


def make(
    name: str, mesh_shape: tuple[int, ...], **options: typing.Any
) -> tuple[nn.Module, nn.Module]:
    """Make the plain model and the same one, parallelized and sharded."""
    case, plan = CASES[name].case, CASES[name].plan
    plain = case.make()
    model = copy.deepcopy(plain)
    dp, tp = make_meshes(mesh_shape)
    parallelize_module(model, tp, plan(model))
    for module in case.groups(model):
        fully_shard(module, dp, **options)
    return plain, fully_shard(model, dp, **options)


def batches_of(
    name: str, mesh_shape: tuple[int, ...], steps: int
) -> tuple[list[Batch], list[Batch]]:
    """Return this rank's batches, and those of all data-parallel ranks concatenated."""
    case, num = CASES[name].case, RANKS // mesh_shape[-1]
    mine = [rank_batch(case, data_rank(mesh_shape), step) for step in range(steps)]
    whole = [
        tuple(torch.cat(ts) for ts in zip(*(rank_batch(case, r, step) for r in range(num))))
        for step in range(steps)
    ]
    return mine, typing.cast("list[Batch]", whole)


def mean_over_ranks(value: Tensor) -> Tensor:
    total = value.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def compare_training(
    name: str,
    mesh_shape: tuple[int, ...],
    models: tuple[nn.Module, nn.Module],
    optimizer: str = "sgd",
    steps: int = 6,
) -> Differences:
    plain, model = models
    case = CASES[name].case
    mine, whole = batches_of(name, mesh_shape, steps)
    differences = Differences()
    losses = train(case, model, OPTIMIZERS[optimizer](model.parameters()), mine)
    expected = train(case, plain, OPTIMIZERS[optimizer](plain.parameters()), whole)
    for loss, plain_loss in zip(losses, expected, strict=True):
        differences.note("loss", mean_over_ranks(loss), plain_loss.double())
        differences.note_grads(model, plain)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), max_norm=0.5).double() for m in models]
        differences.note("norm", norms[1], norms[0])
    differences.note_parameters(model, plain)
    return differences


def assert_close(by_rank: typing.Sequence[Differences]) -> None:
    assert_within(by_rank, loss=TOLERANCE, grad=TOLERANCE, norm=TOLERANCE, parameter=TOLERANCE)


# --- training -----------------------------------------------------------------------------------


def train_both(name: str, mesh_shape: tuple[int, ...], optimizer: str) -> Differences:
    return compare_training(name, mesh_shape, make(name, mesh_shape), optimizer)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_training_with_clipping_equals_plain_training(
    spawn: Spawn, name: str, mesh_shape: tuple[int, ...]
) -> None:
    assert_close(spawn(train_both, RANKS, name, mesh_shape, "sgd"))


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "sgd"])
@pytest.mark.parametrize("name", CASES)
def test_adamw_equals_plain_adamw(spawn: Spawn, name: str, optimizer: str) -> None:
    assert_close(spawn(train_both, RANKS, name, (2, 2), optimizer))
