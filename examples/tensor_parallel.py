"""Tensor parallelism inside data parallelism: layers split over one axis, sharded over another.

Use it if one layer is too large or too slow for one device: torch's `parallelize_module` splits its
matrices over the axis `tp`, whose ranks compute together on the same data. Then `fully_shard`
shards each part over the axis `dp`, whose ranks have different data.

With two by two ranks:

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py
    torchrun --standalone --nproc-per-node gpu examples/tensor_parallel.py --device cuda

Each rank also trains a plain model with all data. The exit status is 1 if losses or trained
parameters differ by more than rounding.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit import fully_shard

WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 64, 4, 2, 32, 8
# Split sums are added in another order. One fp32 rounding is 6e-8; this is the bound for a whole
# training, relative to a loss, or to the largest element of a parameter.
ROUNDING = 1e-4


class Block(nn.Module):
    """A transformer layer; with tensor parallelism a rank computes some of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        # -1: the number of heads on this rank.
        q, k, v = (
            linear(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "attention_out": RowwiseParallel(),
    "mlp_in": ColwiseParallel(),
    "mlp_out": RowwiseParallel(),
}


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Split each block over `tp`, then shard the part of a rank over `dp`, in this order."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def tokens_of(text: Tensor, step: int, replica: int) -> Tensor:
    """Draw data; ranks that differ in `tp` only must get the same data."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def train(model: GPT, batches: list[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)  # After `shard`.
    losses = []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # Over both axes.
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def differences(options: argparse.Namespace) -> tuple[float, float]:
    """Train both ways; return the largest relative differences of losses and of parameters."""
    replicas = dist.get_world_size() // options.tp
    mesh = init_device_mesh(options.device, (replicas, options.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # All ranks make the same model before it is split.
    plain = GPT().to(options.device)
    model = copy.deepcopy(plain)
    shard(model, mesh)

    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    all_batches = [
        [tokens_of(text, step, replica).to(options.device) for replica in range(replicas)]
        for step in range(options.steps)
    ]
    mine = [batches[mesh.get_local_rank("dp")] for batches in all_batches]
    losses = torch.stack(train(model, mine))
    dist.all_reduce(losses)  # Over both axes, because the ranks of `tp` have the same losses.
    losses /= dist.get_world_size()
    expected = torch.stack(train(plain, [torch.cat(batches) for batches in all_batches]))

    apart = [
        ((ours.full_tensor() - theirs).abs().max() / theirs.abs().max()).item()  # On all ranks.
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    if dist.get_rank() == 0:
        weight = model.blocks[0].mlp_in.weight
        held = weight.to_local().numel()
        print(f"mesh {tuple(mesh.shape)}: this rank holds {held} of {weight.numel()} elements")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, of plain training {expected[-1]:.4f}")
    return (losses / expected - 1).abs().max().item(), torch.tensor(apart).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tp", type=int, default=2, help="ranks that a layer is split over (2)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if dist.get_world_size() % options.tp:
        sys.exit(f"{dist.get_world_size()} ranks cannot split layers over {options.tp} each")
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
