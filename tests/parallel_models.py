"""Models that tensor parallelism splits, and the meshes to do it on.

Runs inside workers.
"""

from __future__ import annotations

import copy
import dataclasses
import typing

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from models import (
    VOCABULARY,
    WIDTHS,
    Batch,
    Case,
    cross_entropy,
    regression_batch,
    squared_error,
    token_batch,
)
from reference import rank_batch
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    Plan = dict[str, ParallelStyle]

# The last axis is tensor-parallel; the first of three replicates.
AXES = ("replicate", "shard", "tp")


class MLP(nn.Module):
    """Two layers with biases that are split over ranks, and a plain parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTHS[0], 12)
        self.down = nn.Linear(12, WIDTHS[-1])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTHS[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


class GatedMLP(nn.Module):
    """A layer whose gate and up weights are one tensor, each rank with rows of both."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTHS[0], 2 * 12, bias=False)
        self.down = nn.Linear(12, WIDTHS[-1])

    def forward(self, x: Tensor) -> Tensor:
        weight, mesh = self.gate_up.weight, None
        if isinstance(weight, DTensor):
            weight, mesh = weight.to_local(), weight.device_mesh
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        return self.down(hidden if mesh is None else DTensor.from_local(hidden, mesh, [Shard(-1)]))


class SplitGateAndUp(ParallelStyle):
    """Give each rank rows of the gate and rows of the up weights, as one local tensor."""

    def _apply(self, module: nn.Module, device_mesh: TorchDeviceMesh) -> nn.Module:
        whole, ranks, rank = module.weight, device_mesh.size(), device_mesh.get_local_rank()
        local = whole.detach().unflatten(0, (2, ranks, -1))[:, rank].flatten(0, 1).contiguous()
        module.weight = nn.Parameter(
            DTensor.from_local(
                local,
                device_mesh,
                [_StridedShard(0, split_factor=2)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        )
        return module


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


def mlp_plan(_: nn.Module | None = None) -> Plan:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def gated_plan(_: nn.Module | None = None) -> Plan:
    return {"gate_up": SplitGateAndUp(), "down": RowwiseParallel()}


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
    "gated": ParallelCase(
        Case(GatedMLP, lambda _: [], regression_batch, squared_error), gated_plan
    ),
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


def make_meshes(shape: tuple[int, ...]) -> tuple[TorchDeviceMesh, TorchDeviceMesh]:
    """Return the data-parallel and the tensor-parallel part of a mesh."""
    names = AXES[-len(shape) :]
    mesh = init_torch_mesh("cpu", shape, mesh_dim_names=names)
    return mesh[names[:-1]], mesh["tp"]


def data_rank(mesh_shape: tuple[int, ...], rank: int | None = None) -> int:
    """Return which batch a rank gets: one for all ranks that differ on the last axis only."""
    return (dist.get_rank() if rank is None else rank) // mesh_shape[-1]


def parallelize(
    name: str, plain: nn.Module, mesh_shape: tuple[int, ...]
) -> tuple[nn.Module, TorchDeviceMesh]:
    """Return a copy whose layers are split, and the mesh to shard it over."""
    dp, tp = make_meshes(mesh_shape)
    model = copy.deepcopy(plain)
    return parallelize_module(model, tp, CASES[name].plan(model)), dp


def make(
    name: str, mesh_shape: tuple[int, ...], **options: typing.Any
) -> tuple[nn.Module, nn.Module]:
    """Make the plain model and the same one, split and sharded."""
    case = CASES[name].case
    plain = case.make()
    model, dp = parallelize(name, plain, mesh_shape)
    for module in case.groups(model):
        fully_shard(module, dp, **options)
    return plain, fully_shard(model, dp, **options)


def batches_of(
    name: str, mesh_shape: tuple[int, ...], steps: int
) -> tuple[list[Batch], list[Batch]]:
    """Return this rank's batches, and those of all data-parallel ranks concatenated.

    Ranks that differ on the last axis only get the same.
    """
    case = CASES[name].case
    num = dist.get_world_size() // mesh_shape[-1]
    mine, whole = [], []
    for step in range(steps):
        batches = [rank_batch(case, rank, step) for rank in range(num)]
        mine.append(batches[dist.get_rank() // mesh_shape[-1]])
        xs, ys = zip(*batches, strict=True)
        whole.append((torch.cat(xs), torch.cat(ys)))
    return mine, whole
