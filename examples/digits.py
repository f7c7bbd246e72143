"""Train a classifier of handwritten digits (scikit-learn's), sharded over all ranks.

Activations are computed again in backward rather than kept. Halfway the run saves a checkpoint and
goes on like a new run: with a fresh model that loads the checkpoint. At the end the last checkpoint
becomes one file, which a plain model on the CPU loads for the test.

The same loop runs on CPU processes, GPUs and XLA devices:

    torchrun --standalone --nproc-per-node 2 examples/digits.py
    torchrun --standalone --nproc-per-node gpu examples/digits.py --device cuda
    python examples/digits.py --device xla

On XLA one process computes for all devices, so it passes whole batches; elsewhere each process
passes its share. Needs scikit-learn. The exit status is 1 if too few digits are recognized.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shardkit import DeviceMesh, checkpoint, checkpoint_module, fully_shard, init_device_mesh

BATCH = 64  # Samples over all ranks, in equal shares.
WIDTH = 128
ENOUGH = 0.97  # Share of the held-out digits.


class Block(nn.Module):
    """Two layers, whose output is added to their input."""

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
    """Return this process's position, and the number of processes."""
    if device_type == "xla":
        return 0, 1
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    if BATCH % dist.get_world_size():
        sys.exit(f"{dist.get_world_size()} ranks cannot share batches of {BATCH} equally")
    return dist.get_rank(), dist.get_world_size()


def make_mesh(device_type: str, num_processes: int) -> DeviceMesh:
    if device_type == "xla":
        import torch_xla.runtime as xr

        return init_device_mesh("xla", (xr.global_runtime_device_count(),))
    return init_device_mesh(device_type, (num_processes,))


class Run:
    """A sharded model, its optimizer and its learning rates.

    Args:
        mesh: The mesh, made before a device is used.
        device: The device of the model.
        epochs: Number of epochs to train.
    """

    def __init__(self, mesh: DeviceMesh, device: str, epochs: int) -> None:
        self.device = device
        self.model = Classifier().to(device)
        for block in self.model.blocks:
            fully_shard(checkpoint_module(block), mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, epochs)

    def save(self, path: Path) -> None:
        """Save this rank's part, in place of a checkpoint of an earlier run."""
        state = (self.model, self.optimizer)
        checkpoint.save(path, *state, scheduler=self.scheduler, overwrite=True)

    def load(self, path: Path) -> None:
        """Load the checkpoint, and go on like the run that saved it."""
        checkpoint.load(path, self.model, self.optimizer, scheduler=self.scheduler)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one step and return the loss."""
        loss = F.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device == "xla":
            import torch_xla

            torch_xla.sync()
        return loss


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and digits for training, and every fifth of them for testing."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.5
    y = torch.tensor(digits.target)
    is_test = torch.arange(len(x)) % 5 == 0
    return x[~is_test], y[~is_test], x[is_test], y[is_test]


@torch.no_grad()
def accuracy(path: Path, x: Tensor, y: Tensor) -> float:
    """Return the share of the digits that a plain model recognizes, with weights from a file."""
    model = Classifier().eval()
    model.load_state_dict(torch.load(path))
    return (model(x).argmax(1) == y).float().mean().item()


def train(options: argparse.Namespace) -> int:
    """Train, save, load, go on and test; return the exit status."""
    rank, num_processes = start(options.device)
    mesh = make_mesh(options.device, num_processes)  # On XLA before a device is used.
    torch.manual_seed(0)
    run = Run(mesh, options.device, options.epochs)
    x, y, x_test, y_test = read_digits()
    order = torch.Generator().manual_seed(1)  # The same order on all ranks.
    for epoch in range(options.epochs):
        if epoch == options.epochs // 2:  # As if the run had stopped here.
            run.save(options.folder / "half")
            run = Run(mesh, options.device, options.epochs)
            run.load(options.folder / "half")
        for rows in torch.randperm(len(x), generator=order).split(BATCH)[:-1]:
            mine = rows.chunk(num_processes)[rank]
            loss = run.step(x[mine], y[mine])
        run.scheduler.step()
        last = loss.item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss of the last batch {last:.4f}", flush=True)
    run.save(options.folder / "last")
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank != 0:
        return 0
    whole = checkpoint.consolidate(options.folder / "last", options.folder / "model.pt")
    found = accuracy(whole, x_test, y_test)
    print(f"accuracy {found:.2%} of {len(x_test)} digits held out")
    if found < ENOUGH:
        print(f"less than {ENOUGH:.0%}", file=sys.stderr)
        return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), default="cpu")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/digits"))
    sys.exit(train(parser.parse_args()))


if __name__ == "__main__":
    main()
