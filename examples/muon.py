"""Muon for the matrices and AdamW for the rest, in one training loop of a sharded model.

Use it as a pattern for optimizers that need whole matrices: Muon, Adafactor, Shampoo, SOAP. Each
matrix belongs to one rank, and only this rank orthogonalizes its update. AdamW trains embeddings,
the head, biases and norms, as Muon's authors advise.

    torchrun --standalone --nproc-per-node 2 examples/muon.py
    torchrun --standalone --nproc-per-node gpu examples/muon.py --device cuda

A small transformer learns a text by heart. After an eighth of the steps both optimizers are saved,
and go on in a new run. Rank 0 also trains a plain copy on all data. The exit status is 1 if a loss
of the first quarter differs from the plain one, or if the text was not learned.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardkit import checkpoint, fully_shard, init_device_mesh
from shardkit.optim import MatrixOptimizer

TEXT = (
    b"Beautiful is better than ugly. Explicit is better than implicit. Simple is better than "
    b"complex. Complex is better than complicated. Flat is better than nested. Sparse is better "
    b"than dense. Readability counts. Special cases aren't special enough to break the rules. "
)
SEQUENCE = 32
BATCH = 24  # Samples over all ranks, in equal shares.
ENOUGH = 0.3  # Nats for each byte.
# Relative, in the first quarter. If gradients differ by rounding, Newton-Schulz in bf16 makes other
# updates, and each step increases the difference: late losses are close, and not equal.
TOLERANCE = 1e-3


class Block(nn.Module):
    """A pre-norm transformer block of four matrices."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model of bytes."""

    def __init__(self, dim: int = 48, num_blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, dim)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_optimizers(model: Transformer, *, is_sharded: bool) -> list[torch.optim.Optimizer]:
    """Return Muon for the blocks' matrices, and AdamW for all other parameters."""
    matrices = [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    ids = {id(param) for param in matrices}
    rest = [param for param in model.parameters() if id(param) not in ids]
    if is_sharded:
        muon = MatrixOptimizer(matrices, torch.optim.Muon, lr=0.02, weight_decay=0.01)
    else:
        muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
    return [muon, torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.01)]


def batch_of(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Return pieces of the text and their next bytes, for all ranks together."""
    text = torch.tensor(list(TEXT))
    starts = torch.randint(
        len(text) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step)
    )
    rows = starts[:, None] + torch.arange(SEQUENCE + 1)
    return text[rows[:, :-1]].to(device), text[rows[:, 1:]].to(device)


def take_step(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: tuple[Tensor, ...]
) -> Tensor:
    x, y = batch
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def shard(model: Transformer, device: str) -> Transformer:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_sharded(model: Transformer, options: argparse.Namespace, folder: str) -> list[float]:
    """Return the losses of all ranks' batches; most are from a new run that loads the first."""
    again = copy.deepcopy(model)
    model = shard(model, options.device)
    optimizers = make_optimizers(model, is_sharded=True)
    losses = []
    for step in range(options.steps):
        if step == options.steps // 8:
            checkpoint.save(f"{folder}/begun", model, optimizers)
            model = shard(again, options.device)
            optimizers = make_optimizers(model, is_sharded=True)
            checkpoint.load(f"{folder}/begun", model, optimizers)
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = tuple(part.chunk(size)[rank] for part in batch_of(step, options.device))
        loss = take_step(model, optimizers, mine)
        dist.all_reduce(loss)
        losses.append(loss.item() / size)
    muon = optimizers[0]
    if rank == 0:
        shares = ", ".join(f"{load / sum(muon.loads.values()):.1%}" for load in muon.loads.values())
        print(f"work of the ranks: {shares}")
    return losses


def train_plain(model: Transformer, options: argparse.Namespace) -> list[float]:
    optimizers = make_optimizers(model, is_sharded=False)
    return [
        take_step(model, optimizers, batch_of(step, options.device)).item()
        for step in range(options.steps)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--folder", default=None, help="for the checkpoint")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    if BATCH % dist.get_world_size():
        sys.exit(f"{dist.get_world_size()} ranks cannot share batches of {BATCH} equally")
    folders = [options.folder or (tempfile.mkdtemp() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(folders)
    torch.manual_seed(0)  # All ranks make the same model.
    model = Transformer().to(options.device)
    plain = copy.deepcopy(model)
    losses = train_sharded(model, options, folders[0])
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank != 0:
        return
    expected = train_plain(plain, options)
    last, of_plain = (sum(each[-10:]) / 10 for each in (losses, expected))
    print(f"loss {losses[0]:.4f} -> {last:.4f}, of plain training {of_plain:.4f}")
    first = list(zip(losses, expected, strict=True))[: options.steps // 4]
    most = max(abs(loss - plain) / plain for loss, plain in first)
    if last > ENOUGH:
        sys.exit(f"the loss is {last:.4f}, more than {ENOUGH}")
    if most > TOLERANCE:
        sys.exit(f"the first {len(first)} losses differ by up to {most:.1e} of plain training's")
    print(f"CHECKED: the first {len(first)} losses within {most:.1e} of plain training's")


if __name__ == "__main__":
    main()
