"""Trains some steps of a sharded model in this process, for torch's sanitizer to watch.

    TORCH_CUDA_SANITIZER=1 python sanitized_training.py bf16

The sanitizer sees operators on plain tensors and the events between streams. It does not look into
operators on sharded tensors, as those of optimizers are, so parameters are updated here by way of
their pieces: what an optimizer writes and a gather reads is under watch as well.
"""

from __future__ import annotations

import sys
import typing

import torch

import one_card
from models import CASES
from one_card import CardRanks, reduce_by_buffers
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy

if typing.TYPE_CHECKING:
    from torch import nn

DONE = "trained without an error"
RACE = "race"
STEPS = 4

IN_BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
ALL_IN_BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}

# By name: the mesh, options of `fully_shard`, whether one rank reduces as several do, and whether
# it accumulates.
KINDS: dict[str, tuple[tuple[int, ...], dict[str, typing.Any], bool, bool]] = {
    "fp32": ((1,), {}, False, False),
    "bf16": ((1,), IN_BF16, False, False),
    "bf16, zero-2": ((1,), {**IN_BF16, "reshard_after_forward": False}, False, False),
    "bf16, reduced": ((1,), ALL_IN_BF16, True, False),
    "bf16, accumulated": ((1,), IN_BF16, True, True),
    "hybrid": ((1, 1), IN_BF16, False, False),
    "hybrid, reduced": ((1, 1), IN_BF16, True, False),
    "hybrid, accumulated": ((1, 1), ALL_IN_BF16, True, True),
    "offload": ((1,), {**IN_BF16, "offload_policy": CPUOffloadPolicy()}, False, False),
    "offload, not pinned": (
        (1,),
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        True,
        True,
    ),
}


@torch.no_grad()
def update(model: nn.Module) -> None:
    """Take a step of SGD on the pieces."""
    for param in model.parameters():
        grad: typing.Any = param.grad
        if grad is not None:
            param.to_local().add_(grad.to_local(), alpha=-0.05)
    model.zero_grad()


def train(kind: str, name: str, steps: int = STEPS) -> nn.Module:
    """Train a model; return it."""
    mesh_shape, options, buffers, accumulates = KINDS[kind]
    ranks, case = CardRanks(mesh_shape), CASES[name]
    torch.manual_seed(0)
    model = ranks.shard(case, ranks.make(case), **options)
    if buffers:
        reduce_by_buffers(model)
    for step in range(steps):
        if accumulates:
            model.set_requires_gradient_sync(step % 2 == 1)
        case.loss(model, ranks.batch(case, step)).backward()
        if not accumulates or step % 2 == 1:
            update(model)
    return model


def race() -> None:
    """Write on one stream what another reads, without an event between them."""
    numbers = torch.zeros(1 << 20, device=one_card.CARD)
    with torch.cuda.stream(torch.cuda.Stream()):
        numbers.add_(1)


def main() -> None:
    """Run what the command line names."""
    from torch.cuda import _sanitizer

    if not _sanitizer.cuda_sanitizer.enabled:
        sys.exit("set TORCH_CUDA_SANITIZER=1")
    one_card.choose_card()
    one_card.start_group()
    if sys.argv[1] == RACE:
        race()
    else:
        for name in ("mlp", "gpt", "unused"):
            train(sys.argv[1], name)
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()
    print(DONE)


if __name__ == "__main__":
    main()
