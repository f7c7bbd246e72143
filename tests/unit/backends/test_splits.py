"""How tensor parallelism cuts a dimension: as torch does."""

from __future__ import annotations

import itertools

import pytest
import torch

from recording import RecordingAxis
from shardkit.backends.dtensor import Split


@pytest.mark.parametrize("dim", [0, 1])
def test_cuts_are_those_of_torch_chunk(dim: int) -> None:
    for size, num in itertools.product(range(14), range(1, 6)):
        shape = [3, 3]
        shape[dim] = size
        whole = torch.arange(3 * size).view(shape)
        chunks = list(whole.chunk(num, dim)) if size else []
        chunks += [whole.narrow(dim, 0, 0)] * (num - len(chunks))  # torch leaves empty ones out.
        for rank, chunk in enumerate(chunks):
            split = Split(RecordingAxis([], num, rank), dim, size)
            assert torch.equal(split.cut(whole), chunk)


def test_a_gather_is_one_collective_of_the_padded_whole() -> None:
    log: list[tuple[str, int]] = []
    split = Split(RecordingAxis(log, 4, 3), 1, 6)  # Chunks of 2, 2, 2 and 0.
    assert split.gather(torch.empty(5, 0)).shape == (5, 6)
    assert log == [("all_gather", 4 * 2 * 5)]


def test_a_gather_over_one_rank_is_free() -> None:
    log: list[tuple[str, int]] = []
    part = torch.randn(2, 3)
    assert Split(RecordingAxis(log, 1, 0), 0, 2).gather(part) is part
    assert log == []
