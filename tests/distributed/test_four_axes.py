"""One script on a mesh of four axes: pipeline, data, context and tensor parallel, as one process.

Each rank has a part of the layers (`pp`), of the batch (`dp`), of each sequence (`cp`) and of each
layer (`tp`). What is left of a layer is sharded over `dp` and `cp` taken as one axis.
"""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from reference import step_all
from shardkit import ShardedTensor, fully_shard
from workers import on_ranks

pytestmark = pytest.mark.helpers

AXES = ("pp", "dp", "cp", "tp")
WIDTH, HEAD, DEPTH, SEQUENCE, STEPS = 8, 2, 4, 8, 3
BATCH = 4  # Of a data-parallel rank.
MICRO_BATCHES = 2
EXACT = 1e-12  # Sums in another order, in fp64.


class Block(nn.Module):
    """Causal attention over the whole sequence, of which a rank may have a part, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.cp: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        q, k, v = (
            each(hidden).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        at = torch.arange(q.shape[2])
        if self.cp is not None:
            at = at + self.cp.get_local_rank() * len(at)
            k, v = (
                DTensor.from_local(each, self.cp, [Shard(2)]).full_tensor(
                    grad_placements=[Partial()]
                )
                for each in (k, v)
            )
        mask = torch.arange(k.shape[2]) <= at.unsqueeze(-1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
PLAN |= {name: RowwiseParallel() for name in ("out", "down")}


def batch_of(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    x, y = torch.randn(2, BATCH, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def make_part(plain: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Sequential, nn.Sequential]:
    """Return this rank's layers as they are in one process, and split and sharded."""
    depth = DEPTH // mesh["pp"].size()
    first = mesh["pp"].get_local_rank() * depth
    part = plain[first : first + depth]
    model = copy.deepcopy(part)
    sharded_over = mesh["dp", "cp"]._flatten("dp_shard_cp")  # noqa: SLF001 - as torchtitan does
    for block in model:
        if mesh["cp"].size() > 1:
            block.cp = mesh["cp"]
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=sharded_over)
    fully_shard(model, mesh=sharded_over)
    return part, model


class Step:
    """A forward and a backward of this rank's layers, by a schedule where there are others."""

    def __init__(self, model: nn.Sequential, mesh: DeviceMesh) -> None:
        self.model, self.pp = model, mesh["pp"]
        self.schedule = None
        if self.pp.size() > 1:
            rank, size, group = self.pp.get_local_rank(), self.pp.size(), self.pp.get_group()
            stage = PipelineStage(model, rank, size, torch.device("cpu"), group=group)
            self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=F.mse_loss)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of this rank's tokens; 0 where it has not the last layer."""
        if self.schedule is None:
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            return loss.detach()
        losses: list[Tensor] = []
        inputs = [x] if self.pp.get_local_rank() == 0 else []
        self.schedule.step(*inputs, target=y, losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros((), dtype=x.dtype)


def total_norm(model: nn.Module, pp: DeviceMesh) -> Tensor:
    """Return the norm of all gradients, also of other ranks' layers."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    squares = norm.detach().clone().square()
    dist.all_reduce(squares, group=pp.get_group())
    return squares.sqrt()


@pytest.mark.parametrize("shape", [(2, 2, 1, 2), (1, 2, 2, 2)], ids=["pp, dp, tp", "dp, cp, tp"])
@on_ranks(8, timeout_s=600)
def test_four_axes_equal_one_process(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    _, dp, cp, _ = shape
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(DEPTH))).double()
    part, model = make_part(plain, mesh)
    step_of = Step(model, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    here = mesh["cp"].get_local_rank() * (SEQUENCE // cp)
    for step in range(STEPS):
        batches = [batch_of(step, rank) for rank in range(dp)]
        x, y = (torch.cat(each) for each in zip(*batches, strict=True))
        wanted = F.mse_loss(plain(x), y)
        wanted.backward()
        x, y = (
            each[:, here : here + SEQUENCE // cp].contiguous()
            for each in batches[mesh["dp"].get_local_rank()]
        )
        loss = step_of(x, y)
        dist.all_reduce(loss)  # Ranks of `tp` have the same; those without the last layer have 0.
        assert abs(loss * shape[0] / dist.get_world_size() - wanted.detach()) < EXACT
        norms = [
            nn.utils.get_total_norm([p.grad for p in plain.parameters()]),
            total_norm(model, mesh["pp"]),
        ]
        assert abs(norms[0] - norms[1]) < EXACT
        for each, norm in zip((plain, model), norms, strict=True):
            nn.utils.clip_grads_with_norm_(each.parameters(), 0.5, norm)
        step_all(optimizers)
    for (name, param), whole in zip(model.named_parameters(), part.parameters(), strict=True):
        assert isinstance(param, ShardedTensor)
        found: typing.Any = param
        assert (found.full_tensor() - whole).abs().max() < EXACT, name
    model.check_replicas()
