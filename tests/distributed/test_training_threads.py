"""Threads of one process may train a model each, over process groups of their own."""

from __future__ import annotations

import threading
import time
import typing

import torch
import torch.distributed as dist

from shardkit.backends.groups import sub_group

if typing.TYPE_CHECKING:
    from workers import Spawn


def make_groups_in_threads() -> list[float]:
    """Make parts of two groups in threads, which ranks start in opposite orders; sum over each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(size)) for _ in range(2)]
    totals = [torch.tensor(-1.0) for _ in groups]

    def make(number: int) -> None:
        made = sub_group(groups[number], [range(size)])
        total = torch.tensor(10.0**number)
        dist.all_reduce(total, group=made)
        totals[number] = total

    threads = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(2)]
    for thread in threads if rank else reversed(threads):
        thread.start()
        time.sleep(0.5)  # By then it waits for the same thread of the other ranks.
    for thread in threads:
        thread.join(20)
    return [float(total) for total in totals]


def test_process_groups_may_be_made_in_any_order(spawn: Spawn) -> None:
    assert spawn(make_groups_in_threads, 2) == [[2.0, 20.0]] * 2
