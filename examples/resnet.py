"""Train a small ResNet on handwritten digits (scikit-learn's), sharded over all ranks.

Convolutions and inputs are in channels_last. Batch normalization uses the statistics of each rank's
part of the batch. The running statistics are averaged over the ranks before the test; on XLA each
forward does this.

The same loop runs on CPU processes, GPUs and XLA devices:

    torchrun --standalone --nproc-per-node 2 examples/resnet.py
    torchrun --standalone --nproc-per-node gpu examples/resnet.py --device cuda
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/resnet.py --device xla

On XLA one process computes for all devices, so it passes whole batches; elsewhere each process
passes its share. Needs scikit-learn. The exit status is 1 if too few digits are recognized.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shardkit import DeviceMesh, auto_shard, init_device_mesh, size_based_auto_wrap_policy

BATCH = 64  # Samples over all ranks, in equal shares.
ENOUGH = 0.97  # Share of the held-out digits.


class Block(nn.Module):
    """Two convolutions, added to their input; a third one adapts the input's shape if needed."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if (in_channels, stride) != (channels, 1):
            convolution = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.stages = nn.ModuleList([Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x.contiguous(memory_format=torch.channels_last)))
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)))


def shard(model: ResNet, mesh: DeviceMesh) -> None:
    """Make each module of 10,000 parameters or more a group, and the rest another group."""
    large = functools.partial(size_based_auto_wrap_policy, min_num_params=10_000)
    auto_shard(model, mesh=mesh, policy=large, verbose=True)


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


def read_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and digits for training, and every fifth of them for testing."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    y = torch.tensor(digits.target)
    is_test = torch.arange(len(x)) % 5 == 0
    return x[~is_test], y[~is_test], x[is_test], y[is_test]


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Give all ranks the same running statistics: the means over the ranks."""
    if dist.is_initialized():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, device: str) -> float:
    """Return the share of the digits that the sharded model recognizes; all ranks must call it."""
    model.eval()
    num_rows = len(x) // 8 * 8  # On XLA this must be a multiple of the number of devices.
    guesses = model(x[:num_rows].to(device)).argmax(1).cpu()
    return (guesses == y[:num_rows]).float().mean().item()


def train(options: argparse.Namespace) -> int:
    """Train and test; return the exit status."""
    rank, num_processes = start(options.device)
    mesh = make_mesh(options.device, num_processes)  # On XLA before a device is used.
    torch.manual_seed(0)
    model = ResNet().to(options.device, memory_format=torch.channels_last)
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    x, y, x_test, y_test = read_digits()
    order = torch.Generator().manual_seed(1)  # The same order on all ranks.
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
        scheduler.step()
        last = loss.item()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss of the last batch {last:.4f}", flush=True)
    average_statistics(model)
    found = accuracy(model, x_test, y_test, options.device)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        print(f"accuracy {found:.2%} of the digits held out")
        if found < ENOUGH:
            print(f"less than {ENOUGH:.0%}", file=sys.stderr)
    return 0 if found >= ENOUGH else 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), default="cpu")
    parser.add_argument("--epochs", type=int, default=4)
    sys.exit(train(parser.parse_args()))


if __name__ == "__main__":
    main()
