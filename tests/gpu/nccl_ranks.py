"""One of two ranks over NCCL on one card: python nccl_ranks.py (works | mlp 2 | gpt 1,2 | ...).

NCCL refuses two ranks on one card of one host. It goes by what NCCL_HOSTID says of the host, so
with two names the ranks talk over the network, as those of two hosts do. That is slow, and right.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import one_card
from models import CASES
from one_card import CARD, LOSS_TOLERANCE, SGD_TOLERANCE, CardRanks, compare_training
from reference import assert_within
from shardkit import MixedPrecisionPolicy

DONE = "numbers are right"


def reach_each_other() -> None:
    """Reduce and gather a little."""
    number = torch.ones(1, device=CARD)
    dist.all_reduce(number)
    gathered = torch.empty(2, device=CARD)
    dist.all_gather_into_tensor(gathered, number)
    assert gathered.tolist() == [2.0, 2.0]


def train(name: str, mesh_shape: tuple[int, ...], *, is_narrow: bool) -> None:
    """Train beside a plain model on the batches of both ranks."""
    ranks, case = CardRanks(mesh_shape), CASES[name]
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = ranks.pair(case, **({"mp_policy": policy} if is_narrow else {}))
    found = [compare_training(case, model, plain, ranks)]
    if is_narrow:
        assert_within(found, loss=0.05)  # Some units in the last place of bf16 near 5.
    else:
        assert_within(found, loss=LOSS_TOLERANCE, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def main() -> None:
    """Run what the command line names."""
    one_card.choose_card()
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group("nccl")
    if sys.argv[1] == "works":
        reach_each_other()
    else:
        shape = tuple(int(size) for size in sys.argv[2].split(","))
        train(sys.argv[1], shape, is_narrow=sys.argv[3:] == ["bf16"])
    torch.cuda.synchronize()
    dist.destroy_process_group()
    print(DONE)


if __name__ == "__main__":
    main()
