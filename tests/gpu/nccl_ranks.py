"""One of two ranks over NCCL on one card: python nccl_ranks.py (works | random 0,8 | mlp 2 | ...).

NCCL refuses two ranks on one card of one host. It goes by what NCCL_HOSTID says of the host, so
with two names the ranks talk over the network, as those of two hosts do. That is slow, and right.
"""

from __future__ import annotations

import os
import sys
import time
import typing

import torch
import torch.distributed as dist
from test_captures_on_gpu import OPTIONS, TOLERANCES, train_captured
from test_mixed_precision_on_gpu import ROUNDING, ROUNDINGS, train_bf16
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import one_card
from models import CASES
from one_card import (
    CARD,
    CardRanks,
    compare_training,
    make_card_mesh,
)
from random_trainings import worst_differences
from reference import TRAINED, assert_within

DONE = "numbers are right"
LATE_STEP = 12
ASK_AFTER_S = float(os.environ.get("SHARDKIT_ASK_AFTER_S", "2"))


def reach_each_other() -> None:
    """Reduce and gather a little."""
    number = torch.ones(1, device=CARD)
    dist.all_reduce(number)
    gathered = torch.empty(2, device=CARD)
    dist.all_gather_into_tensor(gathered, number)
    assert gathered.tolist() == [2.0, 2.0]


def train(name: str, mesh_shape: tuple[int, ...], **options: typing.Any) -> None:
    """Train beside a plain model on the batches of both ranks."""
    torch.manual_seed(0)
    ranks, case = CardRanks(mesh_shape), CASES[name]
    model, plain = ranks.pair(case, **options)
    found = [compare_training(case, model, plain, ranks)]
    assert_within(found, **TRAINED)


def train_on_several_meshes(name: str) -> None:
    """Train with groups of two communicators, and of parameters that both ranks hold whole."""
    other = init_device_mesh(CARD.type, (2,))

    def place(param: nn.Parameter) -> typing.Any:
        if param.dim() == 1:
            return Replicate()
        return other if param.shape[0] > param.shape[1] else None

    train(name, (2,), shard_placement_fn=place)


def train_in_bf16(name: str) -> None:
    """Train as the policy means it, by hand."""
    torch.manual_seed(0)
    tolerance = ROUNDINGS * ROUNDING[torch.bfloat16]
    found = train_bf16(name, torch.float32, None, through_buffers=False)
    assert_within([found], loss=tolerance, grad=tolerance, parameter=tolerance)


def train_at_random(first: int, last: int) -> None:
    """Train the random trainings of these numbers beside plain ones, in fp64."""
    found = worst_differences(range(first, last), make_card_mesh((2,)))
    assert max(found.values()) < one_card.FP64_TOLERANCE, found


def train_by_replays(name: str, num_parts: int, *mesh_shape: int) -> None:
    """Train by replays of a step beside steps as they are; rank 1 is late for one of them."""

    def be_late(index: int) -> None:
        if dist.get_rank() == 1 and index == LATE_STEP:
            time.sleep(2 * ASK_AFTER_S)

    worst = train_captured(OPTIONS[name], num_parts, mesh_shape or None, be_late)
    assert worst <= TOLERANCES[name], worst


_MODES = {"bf16": train_in_bf16, "meshes": train_on_several_meshes}


def main() -> None:
    """Run what the command line names."""
    one_card.choose_card()
    torch.set_float32_matmul_precision("highest")
    # What is captured needs an engine for the host, too.
    dist.init_process_group("cpu:gloo,cuda:nccl" if sys.argv[1] == "captured" else "nccl")
    if sys.argv[1] == "works":
        reach_each_other()
    elif sys.argv[1] == "random":
        train_at_random(*map(int, sys.argv[2].split(",")))
    elif sys.argv[1] == "captured":
        name, *sizes = sys.argv[2].split(",")
        train_by_replays(name, *map(int, sizes))
    elif sys.argv[2] in _MODES:
        _MODES[sys.argv[2]](sys.argv[1])
    else:
        shape = tuple(int(size) for size in sys.argv[2].split(","))
        train(sys.argv[1], shape)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print(DONE)


if __name__ == "__main__":
    main()
