"""Train a Vision Transformer on handwritten digits; build it in less memory than it takes whole.

Each block gets real memory, is sharded at once inside the model's ``__init__``, and frees the whole
parameters before the next block is made. On the CPU the system limits the memory of each process:
while the model is built, and again while it is trained. Both limits are below what a process needs
without sharding: with ``--plain`` the script fails.

    torchrun --standalone --nproc-per-node 2 examples/vit.py
    torchrun --standalone --nproc-per-node 2 examples/vit.py --plain
    python examples/vit.py --device xla --blocks 4

On XLA one process computes for all devices, so there is no limit. Needs scikit-learn. The exit
status is 1 if too few digits are recognized, or if the memory is not enough.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shardkit import DeviceMesh, fully_shard, init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 64  # Samples over all ranks, in equal shares.
WIDTH, HEADS = 320, 8
SIDE, PATCH = 8, 4  # Sides of an image and of a patch, in pixels.
ENOUGH = 0.93  # Share of the held-out digits.
MIB = 2**20
M_MMAP_THRESHOLD = -3  # From glibc's malloc.h.


class Block(nn.Module):
    """Attention and two layers, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.second(F.gelu(self.first(self.norm2(x))))


class ViT(nn.Module):
    """A model of patches, blocks, and the mean over the patches.

    Args:
        num_blocks: Number of blocks.
        shard: A function called with each block when it is made, and at the end with the model.
        device: The device on which the model is made.
    """

    def __init__(
        self, num_blocks: int, shard: Callable[[nn.Module], nn.Module], device: str
    ) -> None:
        super().__init__()
        num_patches = (SIDE // PATCH) ** 2
        self.embedding = nn.Linear(PATCH**2, WIDTH).to(device)
        self.places = nn.Parameter(0.02 * torch.randn(num_patches, WIDTH).to(device))
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            self.blocks.append(shard(Block().to(device)))  # One whole block at a time.
        self.norm = nn.LayerNorm(WIDTH).to(device)
        self.head = nn.Linear(WIDTH, 10).to(device)
        shard(self)  # The rest.

    def forward(self, images: Tensor) -> Tensor:
        patches = images.view(-1, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
        patches = patches.transpose(2, 3).reshape(len(images), -1, PATCH**2)
        x = self.embedding(patches) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


# --- memory ---------------------------------------------------------------------------------------


def whole_mib(num_blocks: int) -> float:
    """Return the size of the whole parameters, without allocating them."""
    with torch.device("meta"):
        model = ViT(num_blocks, lambda module: module, "meta")
    return sum(param.nbytes for param in model.parameters()) / MIB


def status_mib(key: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) / 1024


class Limit:
    """A limit on the memory that this process takes beyond its memory now."""

    def __init__(self) -> None:
        # The system counts freed memory that glibc's heap keeps, so tensors get pages of their own.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
        gc.collect()
        self._data = status_mib("VmData")
        self._resident = status_mib("VmRSS")

    def set(self, mib: float) -> None:
        """Make larger allocations fail."""
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (int((self._data + mib) * MIB), hard))

    @property
    def peak_mib(self) -> float:
        """Peak of the resident memory."""
        return status_mib("VmHWM") - self._resident


# --- training -------------------------------------------------------------------------------------


def start(device_type: str) -> tuple[int, int, DeviceMesh]:
    """Return this process's position, the number of processes, and the mesh."""
    if device_type == "xla":
        import torch_xla.runtime as xr

        return 0, 1, init_device_mesh("xla", (xr.global_runtime_device_count(),))
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    if BATCH % dist.get_world_size():
        sys.exit(f"{dist.get_world_size()} ranks cannot share batches of {BATCH} equally")
    world_size = dist.get_world_size()
    return dist.get_rank(), world_size, init_device_mesh(device_type, (world_size,))


def warm_up(mesh: DeviceMesh, device: str) -> None:
    """Take one step of a small model, so that first-step costs do not count for the large model."""
    model = fully_shard(nn.Linear(8, 8).to(device), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 8, device=device)).sum().backward()
    optimizer.step()


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and digits for training, and every fifth of them for testing."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.5
    y = torch.tensor(digits.target)
    is_test = torch.arange(len(x)) % 5 == 0
    return x[~is_test], y[~is_test], x[is_test], y[is_test]


class Training:
    """A model, its optimizer, and this process's place among the ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = options.device
        self.rank, self.num_processes, mesh = start(self.device)
        self.x, self.y, self.x_test, self.y_test = read_digits()
        torch.manual_seed(0)  # The same model on all ranks.
        warm_up(mesh, self.device)
        whole = whole_mib(options.blocks)
        self.limit = Limit() if self.device == "cpu" else None
        if self.limit is not None:
            self.limit.set(0.8 * whole)
        self.say(f"the model has {whole:.0f} MiB as a whole")
        self.model = ViT(
            options.blocks,
            (lambda module: module)
            if options.plain
            else (lambda module: fully_shard(module, mesh=mesh)),
            self.device,
        )
        if self.limit is not None:
            self.say(f"built in {self.limit.peak_mib:.0f} MiB on rank 0")
            # Parameters, gradients and two states of AdamW are 4 times the model.
            self.limit.set(3 * whole)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.05)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def run(self, epochs: int) -> None:
        order = torch.Generator().manual_seed(1)  # The same order on all ranks.
        batches = len(self.x) // BATCH
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-3, total_steps=epochs * batches, pct_start=0.2
        )
        for epoch in range(epochs):
            for rows in torch.randperm(len(self.x), generator=order).split(BATCH)[:-1]:
                loss = self.step(rows.chunk(self.num_processes)[self.rank])
                scheduler.step()
            self.say(f"epoch {epoch + 1}: loss of the last batch {loss.item():.4f}")

    def step(self, rows: Tensor) -> Tensor:
        outputs = self.model(self.x[rows].to(self.device))
        loss = F.cross_entropy(outputs, self.y[rows].to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync()
        return loss

    def sync(self) -> None:
        if self.device == "xla":
            import torch_xla

            torch_xla.sync()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of the held-out digits that are recognized, over all ranks."""
        mine = torch.arange(len(self.x_test)).tensor_split(self.num_processes)[self.rank]
        outputs = self.model(self.x_test[mine].to(self.device))
        right = (outputs.argmax(1).cpu() == self.y_test[mine]).sum().to(self.device)
        if dist.is_initialized():
            dist.all_reduce(right)
        return right.item() / len(self.x_test)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), default="cpu")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--plain", action="store_true", help="do not shard: it does not fit")
    options = parser.parse_args()
    training = Training(options)
    training.run(options.epochs)
    found = training.accuracy()
    if training.limit is not None:
        training.say(f"trained in {training.limit.peak_mib:.0f} MiB on rank 0")
    training.say(f"accuracy {found:.2%} of {len(training.x_test)} digits held out")
    if dist.is_initialized():
        dist.destroy_process_group()
    if found < ENOUGH:
        print(f"less than {ENOUGH:.0%}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
