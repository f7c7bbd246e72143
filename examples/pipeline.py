"""A pipeline of stages by torch's own schedules, each stage sharded over its ranks.

Use it if a model has more layers than data parallelism alone can hold, and the link between groups
of ranks is slow: only activations cross it. The batch of a rank is cut into micro-batches, so that
all stages work at once.

There are two stages on two ranks each. Other schedules give each rank two smaller stages.
`zero-bubble`, `zbv` and `dual-pipe-v` compute the gradients of weights when a rank would wait:

    torchrun --standalone --nproc-per-node 4 examples/pipeline.py
    torchrun --standalone --nproc-per-node 4 examples/pipeline.py --schedule zbv
    torchrun --standalone --nproc-per-node gpu examples/pipeline.py --device cuda

Each rank also trains the plain model with all data. The exit status is 1 if losses or trained
parameters differ by more than rounding.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardkit import DeviceMesh, fully_shard, init_device_mesh

WIDTH, DEPTH, BATCH, MICRO_BATCHES = 32, 8, 16, 4
SCHEDULES = {  # With the number of stages. Two ranks form a pipeline.
    "gpipe": (ScheduleGPipe, 2),
    "1f1b": (Schedule1F1B, 2),
    "interleaved": (ScheduleInterleaved1F1B, 4),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 4),
    "zbv": (ScheduleZBVZeroBubble, 4),
    "dual-pipe-v": (ScheduleDualPipeV, 4),
}
V_SHAPED = ("zbv", "dual-pipe-v")  # The first rank has the first and the last stage.
# Gradients are added in another order. One fp32 rounding is 6e-8; this is the bound for a whole
# training, relative to a loss, or to the largest element of a parameter.
ROUNDING = 1e-4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def make_stages(
    plain: nn.Sequential, num_stages: int, mesh: DeviceMesh, options: argparse.Namespace
) -> tuple[list[PipelineStage], list[nn.Sequential]]:
    """Return this rank's stages, sharded over `dp`, and the parts of `plain` that they copy."""
    depth = len(plain) // num_stages
    rank, device = mesh.get_local_rank("pp"), torch.device(options.device)
    indices = [*range(rank, num_stages, mesh.size("pp"))]
    if options.schedule in V_SHAPED:
        indices = [rank, num_stages - 1 - rank]
    stages, parts = [], []
    for index in indices:
        part = plain[index * depth : (index + 1) * depth]
        model = copy.deepcopy(part)
        # Each micro-batch runs the stage. Between them its parameters stay gathered.
        for layer in model:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
        group = mesh.get_group("pp")
        stages.append(PipelineStage(model, index, num_stages, device, group=group))
        parts.append(part)
    return stages, parts


def batch_of(step: int, pipeline: int, device: str) -> tuple[Tensor, Tensor]:
    """Draw a batch; all stages of one pipeline must get the same."""
    generator = torch.Generator().manual_seed(1000 * step + pipeline)
    x = torch.randn(BATCH, WIDTH, generator=generator).to(device)
    return x, x.roll(1, dims=1).sin()


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_plain(model: nn.Module, num_pipelines: int, options: argparse.Namespace) -> Tensor:
    """Train with the data of all pipelines; return the loss of each step."""
    optimizer = make_optimizer([*model.parameters()])
    losses = []
    for step in range(options.steps):
        batches = [batch_of(step, i, options.device) for i in range(num_pipelines)]
        x, y = (torch.cat(each) for each in zip(*batches, strict=True))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def differences(options: argparse.Namespace) -> tuple[float, float]:
    """Train both ways; return the largest relative differences of losses and of parameters."""
    num_pipelines = dist.get_world_size() // 2
    mesh = init_device_mesh(options.device, (2, num_pipelines), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)  # All ranks make the same model.
    plain = nn.Sequential(*(Residual() for _ in range(DEPTH))).to(options.device)
    make_schedule, num_stages = SCHEDULES[options.schedule]
    stages, parts = make_stages(plain, num_stages, mesh, options)
    schedule = make_schedule(
        stages if len(stages) > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss
    )
    ours = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = make_optimizer(ours)
    total = torch.zeros(options.steps, device=options.device)
    for step in range(options.steps):
        x, y = batch_of(step, mesh.get_local_rank("dp"), options.device)
        inputs = [x] if mesh.get_local_rank("pp") == 0 else []  # The first stage takes the inputs.
        losses: list[Tensor] = []  # The last stage gets one loss for each micro-batch.
        schedule.step(*inputs, target=y, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        total[step] = sum(losses) / MICRO_BATCHES
    dist.all_reduce(total)  # Ranks without the last stage add zeros.
    total /= num_pipelines

    expected = train_plain(plain, num_pipelines, options)
    theirs = [param for part in parts for param in part.parameters()]
    each_apart = [
        (mine.full_tensor() - whole).abs().max() / whole.abs().max()
        for mine, whole in zip(ours, theirs, strict=True)
    ]
    apart = torch.stack(each_apart).max()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)  # Each rank compared its own stages.
    if dist.get_rank() == 0:
        print(f"{num_pipelines} pipelines of {num_stages} stages, {MICRO_BATCHES} micro-batches")
        print(f"loss {total[0]:.4f} -> {total[-1]:.4f}, of plain training {expected[-1]:.4f}")
    return (total / expected - 1).abs().max().item(), apart.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if dist.get_world_size() % 2:
        sys.exit(f"{dist.get_world_size()} ranks cannot form pipelines of 2 ranks")
    of_losses, of_parameters = differences(options)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank != 0:  # All ranks have the same figures.
        return
    found = f"losses within {of_losses:.1e}, parameters within {of_parameters:.1e}"
    if not (of_losses <= ROUNDING and of_parameters <= ROUNDING):  # True also for NaN.
        sys.exit(f"{found} of plain training's, where {ROUNDING:.0e} is rounding")
    print(f"CHECKED: {found} of plain training's")


if __name__ == "__main__":
    main()
