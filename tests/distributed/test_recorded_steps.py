"""Steps of real ranks are recorded: where the time goes, and who is late."""

from __future__ import annotations

import itertools
import statistics
import time
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reference import make_mesh
from shardkit import StateError, fully_shard, record
from shardkit.tracing.exposed import TimeSlice, Waits, seconds_by, slices_of
from shardkit.tracing.late import late_ranks
from shardkit.tracing.records import RankRecord, read_folder

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

NUM_STEPS = 14
DELAY_S = 0.12
WIDTH = 64


class Delayed(nn.Module):
    """A layer that sleeps in its forward or in its backward, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.sleeps_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        if self.sleeps_in == "forward":
            time.sleep(DELAY_S)
        if self.sleeps_in == "backward" and out.requires_grad:
            out.register_hook(lambda _: time.sleep(DELAY_S))
        return torch.relu(out)


def train(folder: str, shape: tuple[int, ...], late: int, phase: str) -> list[float]:
    """Train with a rank that sleeps in a phase of each step; return the lengths of steps."""
    mesh = make_mesh(shape)
    torch.manual_seed(0)
    layers = [Delayed() for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    is_late = mesh.get_rank() == late
    layers[1].sleeps_in = phase if is_late else ""
    if phase == "optimizer" and is_late:
        optimizer.register_step_pre_hook(lambda *_: time.sleep(DELAY_S))
    ends = []
    with record(model, folder) as run:
        for _ in range(NUM_STEPS):
            if phase == "data" and is_late:
                time.sleep(DELAY_S)
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            ends.append(time.perf_counter())
            optimizer.zero_grad()
    assert run.num_events > NUM_STEPS * 20
    return [after - before for before, after in itertools.pairwise(ends)]


def sliced(folder: pathlib.Path) -> tuple[list[RankRecord], dict[int, list[TimeSlice]]]:
    records = read_folder(folder)
    waits = Waits(records)
    return records, {record.header.rank: slices_of(record, waits) for record in records}


def check(folder: pathlib.Path, lengths: list[list[float]], late: int, phase: str) -> None:
    """Assert that sums are the steps, and that the rank that sleeps is found."""
    records, by_rank = sliced(folder)
    assert [record.header.rank for record in records] == list(range(len(lengths)))
    assert all(record.is_whole for record in records)
    for rank, measured in enumerate(lengths):
        of_step = seconds_by(by_rank[rank], "step")
        ratios = [of_step[step,] / length for step, length in enumerate(measured, 1)]
        # Now and then the system takes the processor away between two clocks that are read.
        assert statistics.median(ratios) == pytest.approx(1, rel=0.01)
    num_late = len(lengths[0])
    for rank, slices in by_rank.items():
        found = seconds_by((s for s in slices if s.late_rank >= 0 and s.step > 0), "late_rank")
        if rank != late:
            # Others are late by chance, too, on processors that ranks share.
            assert found[late,] > 0.5 * DELAY_S * num_late
            assert found[late,] == max(found.values())
    first = late_ranks(by_rank)[0]
    assert (first.rank, first.phase, first.kind) == (late, phase, "slow")
    assert first.group == ("1" if phase in {"forward", "backward"} else "")
    assert first.seconds == pytest.approx(DELAY_S, rel=0.5)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_rank_that_sleeps_is_found(spawn: Spawn, tmp_path: pathlib.Path, phase: str) -> None:
    lengths = spawn(train, 2, str(tmp_path), (2,), 1, phase)
    check(tmp_path, lengths, 1, phase)


def train_with_a_shifted_clock(folder: str) -> list[float]:
    """Train on ranks of which the second one's clock is 5 s behind."""
    shift = 5.0 * dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit.tracing.recorder._now", lambda: time.perf_counter() - shift)
        return train(folder, (2,), 1, "forward")


def test_clocks_that_differ_are_aligned(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(train_with_a_shifted_clock, 2, str(tmp_path))
    records, by_rank = sliced(tmp_path)
    first, second = (record.header.clock for record in records)
    assert first.offset_s == 0.0
    assert abs(second.offset_s - 5.0) <= second.error_s
    late = seconds_by((s for s in by_rank[0] if s.late_rank == 1 and s.step > 0), "late_rank")
    assert late[1,] > 0.5 * DELAY_S * (NUM_STEPS - 1)


@pytest.mark.helpers
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_rank_that_sleeps_is_found_among_four(
    spawn: Spawn, tmp_path: pathlib.Path, shape: tuple[int, ...], phase: str
) -> None:
    lengths = spawn(train, 4, str(tmp_path), shape, 2, phase)
    check(tmp_path, lengths, 2, phase)


def record_into(folder: str) -> str:
    try:
        with record(folder=folder):
            return ""
    except StateError as error:
        return str(error)


def test_a_file_that_rank_0_cannot_remove_is_an_error_of_all_ranks(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "rank-1.jsonl.gz" / "other").mkdir(parents=True)
    errors = spawn(record_into, 2, str(tmp_path))
    assert errors[0] == errors[1]
    assert "rank-1.jsonl.gz cannot be removed: " in errors[0]
