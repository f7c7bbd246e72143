"""On a card: what a plan says of a step is what a rank of a fake group does, and holds."""

from __future__ import annotations

import gc
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import one_card
from allocated import Issued
from one_card import CARD
from planned_runs import (
    BF16,
    BF16_SUMMED_WIDE,
    Adapters,
    Case,
    Mlp,
    Seen,
    Training,
    edges_of,
    planned,
)
from shardkit import CPUOffloadPolicy
from shardkit._compat.torch_groups import init_fake_process_group
from shardkit._events import StepEvent, StepObserver, observed_by
from wrapped_models import Stack

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD

MIB = 2**20
ALLOCATED, RESERVED = 1.02, 1.05


def _stack() -> nn.Module:
    return Stack(dim=1024, num_blocks=8)


def _mlp() -> nn.Module:
    return Mlp(width=2000, depth=5)


def _adapters() -> nn.Module:
    return Adapters(width=4096)


def _tokens() -> Tensor:
    return torch.zeros(8, 512, dtype=torch.long)


def _rows() -> Tensor:
    return torch.ones(8192, 2000)


CASES: dict[str, Case] = {
    "transformer": Case(_stack, _tokens, (64,)),
    "one rank": Case(_stack, _tokens, (1,)),
    "dense, bf16": Case(_mlp, _rows, (64,), options={"mp_policy": BF16}),
    "bf16 summed in fp32": Case(_stack, _tokens, (8,), options={"mp_policy": BF16_SUMMED_WIDE}),
    "kept": Case(_mlp, _rows, (8,), options={"reshard_after_forward": False}),
    "recompute": Case(_stack, _tokens, (8,), recompute={}),
    "accumulation": Case(_mlp, _rows, (8,), accumulate=3),
    "hybrid": Case(_stack, _tokens, (4, 8)),
    "adapters": Case(_adapters, _tokens, (64,)),
    "offloaded": Case(_mlp, _rows, (8,), options={"offload_policy": CPUOffloadPolicy()}),
}


class OnCard(typing.NamedTuple):
    """What a step did, and the most bytes that the card's allocator gave out, and held."""

    seen: Seen
    allocated: int
    reserved: int


def _take_workspaces() -> None:
    """Have the libraries take what they keep, in the thread of backward as well."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, dtype=dtype, device=CARD)
        layer(torch.ones(64, 64, dtype=dtype, device=CARD)).sum().backward()


def run_on_card(name: str) -> OnCard:
    """Train as one rank of a fake group, and count what the allocator gives out."""
    case = CASES[name]
    dist.destroy_process_group()
    init_fake_process_group(0, math.prod(case.mesh))
    _take_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    run, events = Training(case, CARD), list[StepEvent]()
    with Issued() as issued, observed_by(StepObserver(events.append)):
        run.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        run.step()
    torch.cuda.synchronize()
    after = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    dist.destroy_process_group()
    allocated, reserved = (most - own for most, own in zip(after, before, strict=True))
    return OnCard(Seen(issued.found, edges_of(events), []), allocated, reserved)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_a_card_holds(name: str, on_card: Spawn) -> None:
    plan = planned(CASES[name], 0, "cuda")
    [(real, allocated, reserved)] = on_card(run_on_card, 1, name)
    most = max(plan.peaks)
    print(f"{name}: plan {most / MIB:.1f} MiB, {allocated / MIB:.1f}, {reserved / MIB:.1f}")
    assert plan.collectives == real.collectives
    assert plan.edges == real.edges
    assert allocated <= most <= ALLOCATED * allocated
    assert most <= reserved <= RESERVED * most
