"""Hybrid sharding: copies of the model, each sharded over some of the ranks.

Use it if a gather over all ranks is slow, for example between hosts. Gathers and reduce-scatters
stay within a copy. Between copies there is an all-reduce of 1/N of the gradients, once in a step:
`set_requires_all_reduce` leaves it out in all micro-batches except the last.

Two copies on two ranks each:

    torchrun --standalone --nproc-per-node 4 examples/hybrid.py
    torchrun --standalone --nproc-per-node gpu examples/hybrid.py --device cuda

Each rank also trains a plain model with the data of all ranks. The exit status is 1 if the losses
differ by more than rounding, or if the copies are not equal bit by bit.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit import fully_shard, init_device_mesh

WIDTH, DEPTH, BATCH, MICRO_BATCHES = 64, 3, 16, 2
# The ranks add the same numbers in another order. One fp32 rounding is 6e-8 of the loss; a few
# hundred of them, over all steps, are less than this part of it.
ROUNDING = 2e-5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def make_model(device: str) -> nn.Sequential:
    torch.manual_seed(0)  # All ranks make the same model.
    return nn.Sequential(*(Residual() for _ in range(DEPTH))).to(device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def micro_batches(step: int, rank: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Draw the samples of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(MICRO_BATCHES, BATCH, WIDTH, generator=generator).to(device)
    return [(each, each.roll(1, dims=1).sin()) for each in x]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean() / MICRO_BATCHES


def train_plain(options: argparse.Namespace) -> Tensor:
    """Train without sharding; return the mean loss over the data of all ranks, for each step."""
    model = make_model(options.device)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(options.steps):
        total = 0.0
        for rank in range(dist.get_world_size()):
            for x, y in micro_batches(step, rank, options.device):
                loss = loss_of(model, x, y) / dist.get_world_size()
                loss.backward()
                total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)


def train_sharded(options: argparse.Namespace) -> Tensor:
    """Train the same model on a mesh of two axes; return the same losses."""
    ranks_per_copy = dist.get_world_size() // options.replicate
    mesh = init_device_mesh(
        options.device,
        (options.replicate, ranks_per_copy),
        mesh_dim_names=("replicate", "shard"),  # In this order. Neighbouring ranks form a copy.
    )
    model = make_model(options.device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(options.steps):
        total = torch.zeros((), device=options.device)
        for i, (x, y) in enumerate(micro_batches(step, mesh.get_rank(), options.device)):
            model.set_requires_all_reduce(i == MICRO_BATCHES - 1)
            loss = loss_of(model, x, y)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    model.check_replicas()  # Raises on all ranks, and names the parameter that differs.
    if dist.get_rank() == 0:
        whole = sum(param.numel() * param.element_size() for param in model.parameters())
        held = model.memory_stats()["shard_nbytes"]
        print(f"mesh {mesh.shape}: this rank holds {held:,} of {whole:,} bytes of parameters")
    return torch.tensor(losses, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--replicate", type=int, default=2, help="copies of the model (2)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if dist.get_world_size() % options.replicate:
        sys.exit(f"{dist.get_world_size()} ranks cannot form {options.replicate} equal copies")

    sharded, plain = train_sharded(options), train_plain(options)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank != 0:  # All ranks have the same figures.
        return
    print(f"loss {sharded[0]:.4f} -> {sharded[-1]:.4f}, of plain training {plain[-1]:.4f}")
    apart = (sharded / plain - 1).abs().max().item()
    if not apart <= ROUNDING:  # True also for NaN.
        sys.exit(f"losses differ by {apart:.1e} of plain training's, more than {ROUNDING:.0e}")
    print(f"CHECKED: losses within {apart:.1e} of plain training, copies equal bit by bit")


if __name__ == "__main__":
    main()
