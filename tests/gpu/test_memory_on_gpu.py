"""On a card: the memory of a step is the same in every step, to the byte."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from torch import nn

import one_card
from models import CASES, GPT
from one_card import CardRanks, reduce_by_buffers
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


STEPS = 12
STEADY_FROM = 2  # Counted from 0: the first makes optimizer state, the second forward prefetches.

# Large enough that each block is a gather of its own, and takes pages of its own.
CASE = dataclasses.replace(CASES["gpt"], make=lambda: GPT(dim=256, num_blocks=4))

IN_BF16 = {
    "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
}

OPTIONS: dict[str, dict[str, typing.Any]] = {
    "fp32": {},
    "bf16": IN_BF16,
    "bf16, kept after forward": {**IN_BF16, "reshard_after_forward": False},
    "bf16, all reduced": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reshard_after_forward": True,
    },
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def memory_by_step(
    options: dict[str, typing.Any], mesh_shape: tuple[int, ...], buffers: bool, micro_batches: int
) -> tuple[list[int], list[int], int]:
    """Return by step the peak and what is left after it, and the allocator's retries of all."""
    ranks = CardRanks(mesh_shape)
    model = ranks.shard(CASE, ranks.make(CASE), **options)
    if buffers:
        reduce_by_buffers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [ranks.batch(CASE, i) for i in range(micro_batches)]

    def step() -> None:
        for i, batch in enumerate(batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            CASE.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_accumulated_memory_stats()
    peaks, left = [], []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        step()
        # Not after the card is done: a peak that depends on how far it is would differ here.
        peaks.append(torch.cuda.max_memory_allocated())
        left.append(torch.cuda.memory_allocated())
    return peaks, left, torch.cuda.memory_stats()["num_alloc_retries"]


@pytest.mark.parametrize(
    ("mesh_shape", "buffers", "micro_batches"),
    [((1,), False, 1), ((1,), True, 1), ((1,), True, 3), ((1, 1), True, 1)],
    ids=["at once", "buffers", "accumulated", "hybrid"],
)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_step_takes_the_same_memory(
    on_card: Spawn, options: str, mesh_shape: tuple[int, ...], buffers: bool, micro_batches: int
) -> None:
    found = on_card(memory_by_step, 1, OPTIONS[options], mesh_shape, buffers, micro_batches)
    for peaks, left, retries in found:
        assert len(set(peaks[STEADY_FROM:])) == 1, f"peaks: {peaks}"
        assert len(set(left[STEADY_FROM:])) == 1, f"left after a step: {left}"
        assert retries == 0


NUM_BLOCKS = 8
DEEP_CASE = dataclasses.replace(CASES["gpt"], make=lambda: GPT(dim=512, num_blocks=NUM_BLOCKS))


def peak_of_forward(reshard_after_forward: bool) -> int:
    """Return what a forward takes at most of the card's memory in a steady step, in bytes."""
    ranks = CardRanks()
    model = ranks.shard(
        DEEP_CASE, ranks.make(DEEP_CASE), reshard_after_forward=reshard_after_forward, **IN_BF16
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = ranks.batch(DEEP_CASE, 0)
    one_card.take_steps(DEEP_CASE, model, optimizer, [batch] * 3)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    DEEP_CASE.loss(model, batch)
    return torch.cuda.max_memory_allocated() - before


def test_resharding_after_forward_gives_memory_back(on_card: Spawn) -> None:
    """Two or three blocks are unsharded at once instead of eight; some may be there before."""
    [kept] = on_card(peak_of_forward, 1, False)
    [freed] = on_card(peak_of_forward, 1, True)
    block_nbytes = 2 * sum(p.numel() for p in GPT(dim=512, num_blocks=1).blocks.parameters())
    assert kept - freed > 2 * block_nbytes, (kept, freed, block_nbytes)
