"""Train a classifier of handwritten digits (scikit-learn's), sharded over all ranks.

One loop for CPU processes, GPUs and XLA devices:

    torchrun --standalone --nproc-per-node 2 examples/digits.py
    torchrun --standalone --nproc-per-node gpu examples/digits.py --device cuda
    python examples/digits.py --device xla

On XLA one process computes for all devices, so it passes whole batches; elsewhere each process
passes its share. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shardkit import fully_shard, init_device_mesh

BATCH = 64  # Over all ranks: a multiple of their number.
WIDTH = 128


class Block(nn.Module):
    """Two layers, added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.first(self.norm(x))), 0.1, self.training)
        return x + self.second(hidden)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def start(device_type: str) -> tuple[int, int]:
    """Return this process's position among the processes, and how many there are."""
    if device_type == "xla":
        return 0, 1
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size()


def make_mesh(device_type: str, num_processes: int) -> object:
    if device_type == "xla":
        import torch_xla.runtime as xr

        return init_device_mesh("xla", (xr.global_runtime_device_count(),))
    return init_device_mesh(device_type, (num_processes,))


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and digits to train on, and every fifth of them to test on."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.5
    y = torch.tensor(digits.target)
    is_test = torch.arange(len(x)) % 5 == 0
    return x[~is_test], y[~is_test], x[is_test], y[is_test]


@torch.no_grad()
def num_right(model: nn.Module, x: Tensor, y: Tensor, device: str) -> int:
    """Return how many digits are recognized. All ranks do the same."""
    model.eval()
    found = 0
    for rows, digits in zip(x.split(BATCH), y.split(BATCH), strict=True):
        padded = F.pad(rows, (0, 0, 0, BATCH - len(rows)))  # XLA compiles once for each shape.
        found += (model(padded.to(device)).argmax(1).cpu()[: len(rows)] == digits).sum().item()
    model.train()
    return int(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), default="cpu")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()

    rank, num_processes = start(options.device)
    mesh = make_mesh(options.device, num_processes)  # On XLA before a device is used.
    torch.manual_seed(0)
    model = Classifier().to(options.device)
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    x, y, x_test, y_test = read_digits()
    order = torch.Generator().manual_seed(1)  # The same on all ranks.
    for epoch in range(options.epochs):
        for rows in torch.randperm(len(x), generator=order).split(BATCH)[:-1]:
            mine = rows.chunk(num_processes)[rank]
            loss = F.cross_entropy(model(x[mine].to(options.device)), y[mine].to(options.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if options.device == "xla":
                import torch_xla

                torch_xla.sync()
        last = loss.item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss of the last batch {last:.4f}", flush=True)
    right = num_right(model, x_test, y_test, options.device)
    if rank == 0:
        print(f"accuracy {right / len(x_test):.2%} of {len(x_test)} digits held out")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
