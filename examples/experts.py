"""A mixture of experts: each rank holds some experts, and tokens travel to them and back.

Use it if most parameters are experts. Experts are split over the axis `ep`, and sharded over the
ranks that hold the same experts. Everything else is sharded over all ranks. One call does both.

    torchrun --standalone --nproc-per-node 4 examples/experts.py
    torchrun --standalone --nproc-per-node 4 examples/experts.py --ep 4

Each rank also trains a plain model with the data of all ranks. The exit status is 1 if losses,
norms or trained parameters differ by more than rounding.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit import auto_shard

WIDTH, HIDDEN, EXPERTS, DEPTH, TOKENS = 32, 64, 8, 2, 128
ROUNDING = 1e-9  # In fp64; sums are added in another order.


class SendRows(torch.autograd.Function):
    """Send rows to the ranks of a group; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        result = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(result, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return result, None, None, None


def inverse(order: Tensor) -> Tensor:
    """Return the order that undoes `order`."""
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order), device=order.device)
    return result


class Experts(nn.Module):
    """Stacked feed-forward layers; the DTensors' local parts are this rank's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = enumerate(rows.split(counts))  # An expert without a token has no row.
        return torch.cat([F.gelu(part @ up[i]) @ down[i] for i, part in parts])


class Block(nn.Module):
    """A router, and experts that may be on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.ep = None  # A process group, if experts are on several ranks.

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        compute = self.compute_here if self.ep is None else self.compute_there
        return x + weights[:, None] * compute(rows[order], counts)[inverse(order)]

    def compute_here(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.experts(rows, counts.tolist())

    def compute_there(self, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = self.ep.size()
        counts_here = torch.empty_like(counts)  # By sender and expert.
        dist.all_to_all_single(counts_here, counts, group=self.ep)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = counts_here.view(ranks, -1).sum(1).tolist()
        rows = SendRows.apply(rows, sent, received, self.ep)
        own = torch.arange(EXPERTS // ranks, device=rows.device).repeat(ranks)
        order = own.repeat_interleave(counts_here).argsort(stable=True)
        rows = self.experts(rows[order], counts_here.view(ranks, -1).sum(0).tolist())
        return SendRows.apply(rows[inverse(order)], received, sent, self.ep)


def sizes_of(param: Tensor) -> tuple[int, int]:
    return param.to_local().numel(), param.numel()


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(DEPTH)))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Split experts over `ep`, then shard them over `fsdp` and the rest over all ranks."""
    for block in model[1:]:
        block.ep = mesh["ep"].get_group()
    auto_shard(model, mesh, Block, experts={Experts: "ep"})


def train(model: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Learn the squares of features, shifted by one; return losses and gradient norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for batch in batches:
        loss = F.mse_loss(model(batch), batch.square().roll(1, -1))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms


def differences(options: argparse.Namespace) -> float:
    """Train both ways; return the largest difference of losses, norms and parameters."""
    ranks, device = dist.get_world_size(), options.device
    shape = (ranks // options.ep, options.ep)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("fsdp", "ep"))
    torch.manual_seed(0)  # All ranks make the same model before it is split.
    plain = make_model().double().to(device)
    model = copy.deepcopy(plain)
    shard(model, mesh)

    # Each rank has tokens of another kind, which choose other experts.
    shifts = torch.linspace(-1, 1, ranks, dtype=torch.float64)[:, None, None]
    drawn = torch.randn(options.steps, ranks, TOKENS, WIDTH, dtype=torch.float64)
    batches = (drawn + shifts).to(device)
    losses, norms = train(model, list(batches[:, dist.get_rank()]))
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    mean_losses /= ranks
    wanted_losses, wanted_norms = train(plain, list(batches.flatten(1, 2)))
    apart = [(mean_losses - torch.stack(wanted_losses)).abs().max()]
    apart += [(a - b).abs() for a, b in zip(norms, wanted_norms, strict=True)]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        apart.append((ours.full_tensor() - theirs).abs().max())  # On all ranks.
    if dist.get_rank() == 0:
        experts = list(model[1].experts.parameters())
        held, number = (sum(sizes) for sizes in zip(*map(sizes_of, experts), strict=True))
        print(f"experts on a mesh {shape}: this rank holds {held} of {number} elements")
        print(f"loss {mean_losses[0]:.4f} -> {mean_losses[-1]:.4f}, ", end="")
        print(f"of one process {wanted_losses[-1]:.4f}")
    return torch.stack([torch.as_tensor(each) for each in apart]).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ep", type=int, default=2, help="ranks that hold different experts (2)")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if dist.get_world_size() % options.ep or EXPERTS % options.ep:
        sys.exit(
            f"{options.ep} must divide the {dist.get_world_size()} ranks and {EXPERTS} experts"
        )
    apart = differences(options)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank != 0:  # All ranks have the same figures.
        return
    found = f"losses, norms and parameters within {apart:.1e}"
    if not apart <= ROUNDING:  # True also for NaN.
        sys.exit(f"{found} of one process', where {ROUNDING:.0e} is rounding")
    print(f"CHECKED: {found} of one process'")


if __name__ == "__main__":
    main()
