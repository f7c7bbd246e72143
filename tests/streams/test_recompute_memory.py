"""Peak memory of a step where blocks compute their activations again, on the simulated device."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from simulation import simulation
from trainings import WIDTH, Training

from shardkit import checkpoint_activations

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.streams

NUM_ROWS = 2048
ROW_NBYTES = 4 * NUM_ROWS

CHOICES: dict[str, dict[str, typing.Any] | None] = {
    "none": None,
    "half": {"every": 2},
    "matmuls": {"operators": "matmuls"},
    "all": {},
}


class LargeBatches(Training):
    """Activations take much more than parameters."""

    def batch(self, index: int, rank: int | None = None) -> torch.Tensor:
        """Return a rank's batch, this one's by default."""
        rank = dist.get_rank() if rank is None else rank
        generator = torch.Generator().manual_seed(100 * index + rank)
        return torch.randn(NUM_ROWS, WIDTH, generator=generator)


def peaks_of(choice: str) -> tuple[list[int], list[str]]:
    """Return the peaks of four steps, and what is wrong with the parameters after them."""
    with simulation() as run:
        training = LargeBatches(run)
        options = CHOICES[choice]
        if options is not None:
            checkpoint_activations(training.model, **options)
        for step in range(1, 5):
            with training.counted(step):
                training.backward(step)
                training.step()
            training.simulation.step = 0
            training.backward_plain(step)
            training.step(1)
        training.compare()
        return training.peaks, training.complaints


def test_the_peak_falls_with_each_choice(spawn: Spawn) -> None:
    steady = {}
    for choice in CHOICES:
        for peaks, complaints in spawn(peaks_of, 2, choice):
            assert not complaints
            steady[choice] = peaks[-1]
    # Besides its input, which is the output of the one before, a block keeps that of `tanh`.
    of_block = 2 * WIDTH * ROW_NBYTES
    # The last of four computes again while the others still keep what they keep.
    assert steady["none"] - steady["half"] == of_block
    assert steady["none"] - steady["all"] == 3 * of_block
    # Outputs of products are larger than that of `tanh` alone here.
    assert steady["all"] < steady["matmuls"]
