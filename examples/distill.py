"""Three sharded models in one script: a teacher, a student, and the student's average (EMA).

Use it as a pattern for distillation, for EMA weights, and for reference models in reinforcement
learning. Each model is its own root. A model that is not trained takes 1/N of its parameters on
each rank, and no memory for gradients or optimizer state.

    torchrun --standalone --nproc-per-node 2 examples/distill.py
    torchrun --standalone --nproc-per-node gpu examples/distill.py --device cuda

The teacher learns scikit-learn's handwritten digits. The student, a fifth of its size, sees no
label: it learns the teacher's answers. The exit status is 1 if the student's average recognizes
too few of the held-out digits, or if the teacher changed. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shardkit import DeviceMesh, fully_shard, init_device_mesh

BATCH = 64  # Samples over all ranks, in equal shares.
TEMPERATURE = 4.0
DECAY = 0.95  # Weight of the old average in each step.
ENOUGH = 0.96  # Share of the held-out digits.


def make_model(width: int, mesh: DeviceMesh, device: str) -> nn.Sequential:
    """Return a sharded classifier of images of 64 pixels."""
    blocks = [
        nn.Sequential(nn.Linear(64, width), nn.GELU()),
        nn.Sequential(nn.Linear(width, width), nn.GELU()),
        nn.Linear(width, 10),
    ]
    for block in blocks:
        fully_shard(block.to(device), mesh=mesh)
    return fully_shard(nn.Sequential(*blocks), mesh=mesh)


def read_digits(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and digits for training, and every fifth of them for testing."""
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16 - 0.5
    y = torch.tensor(digits.target, device=device)
    is_test = torch.arange(len(x), device=device) % 5 == 0
    return x[~is_test], y[~is_test], x[is_test], y[is_test]


def my_batches(num_samples: int, epochs: int) -> list[Tensor]:
    """Return the rows of this rank in each step; all steps have the same number of rows."""
    order = torch.Generator().manual_seed(1)  # The same order on all ranks.
    return [
        rows.chunk(dist.get_world_size())[dist.get_rank()]
        for _ in range(epochs)
        for rows in torch.randperm(num_samples, generator=order).split(BATCH)[:-1]
    ]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share that is recognized; all ranks must call it, because a forward gathers."""
    return (model(x).argmax(1) == y).float().mean().item()


def train_teacher(teacher: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for rows in my_batches(len(x), epochs):
        F.cross_entropy(teacher(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def distill(student: nn.Module, teacher: nn.Module, x: Tensor, epochs: int) -> nn.Module:
    """Let the student learn the teacher's answers to `x`; return the student's average."""
    # A copy of this rank's shards: no communication, on the same mesh, in the same groups.
    average = copy.deepcopy(student).requires_grad_(requires_grad=False).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3)
    for rows in my_batches(len(x), epochs):
        with torch.no_grad():
            targets = F.softmax(teacher(x[rows]) / TEMPERATURE, dim=1)
        answers = F.log_softmax(student(x[rows]) / TEMPERATURE, dim=1)
        (F.kl_div(answers, targets, reduction="batchmean") * TEMPERATURE**2).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            # Elementwise on shards: no communication.
            torch._foreach_lerp_([*average.parameters()], [*student.parameters()], 1 - DECAY)
    return average


def number_of(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())  # `numel` is the whole tensor's.


def run(options: argparse.Namespace) -> tuple[float, bool]:
    """Return the accuracy of the student's average, and whether the teacher is unchanged."""
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    torch.manual_seed(0)  # All ranks make the same models.
    teacher, student = (make_model(width, mesh, options.device) for width in (256, 96))
    x, y, x_test, y_test = read_digits(options.device)

    train_teacher(teacher, x, y, options.epochs)
    teacher.requires_grad_(requires_grad=False).eval()
    before = [param.to_local().clone() for param in teacher.parameters()]
    average = distill(student, teacher, x, options.epochs)

    pairs = zip(before, teacher.parameters(), strict=True)
    changed = torch.tensor(
        float(not all(torch.equal(old, param.to_local()) for old, param in pairs)),
        device=options.device,
    )
    dist.all_reduce(changed)  # Each rank compared its own shards.
    models = {"teacher": teacher, "student": student, "average": average}
    found = {name: accuracy(model.eval(), x_test, y_test) for name, model in models.items()}
    if dist.get_rank() == 0:
        for name, model in models.items():
            size, held = number_of(model), model.memory_stats()["shard_nbytes"]
            print(f"{name}: accuracy {found[name]:.2%}, {size:,} parameters, {held:,} bytes here")
    return found["average"], changed.item() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--epochs", type=int, default=30, help="of the teacher, then of the student"
    )
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if BATCH % dist.get_world_size():
        sys.exit(f"{dist.get_world_size()} ranks cannot share batches of {BATCH} equally")
    found, is_unchanged = run(options)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank != 0:  # All ranks have the same figures.
        return
    if not is_unchanged:
        sys.exit("the teacher's parameters changed while the student learned")
    if found < ENOUGH:
        sys.exit(f"the student's average recognizes {found:.2%}, less than {ENOUGH:.0%}")
    print(f"CHECKED: the student's average recognizes {found:.2%}, the teacher is unchanged")


if __name__ == "__main__":
    main()
