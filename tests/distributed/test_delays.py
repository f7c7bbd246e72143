"""Delays of 3 % of a step on real ranks: found within five steps, each for what it is.

Layers sleep for as long as they would compute, so that ranks which share processors do not delay
each other. What is sent, what is waited for and all clocks are real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
import typing

import pytest
import torch
from torch import nn

from allocated import past_shared_memory
from reference import make_mesh
from shardkit import DeviceMesh, fully_shard, record
from shardkit.backends.process_group import WorkHandle
from shardkit.tracing.late import WINDOW
from shardkit.tracing.trace import Trace

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from workers import Spawn

NUM_LAYERS, LAYER_S = 3, 0.04
STEP_S = 3 * NUM_LAYERS * LAYER_S
DELAY_S = 0.03 * STEP_S
FIRST = 5  # Step in which a delay begins.
NUM_STEPS = FIRST + WINDOW + 1
PHASES = ("data", "forward", "backward", "optimizer")
CGROUP = pathlib.Path("/sys/fs/cgroup/cpu")


@dataclasses.dataclass(frozen=True)
class Delay:
    """What is late, and on which rank."""

    where: str  # Phase, or ``link``.
    rank: int  # Number of the rank.
    seconds: float = DELAY_S  # Length of it.
    every: int = 1  # Number of steps of which one is delayed.

    def folder(self, of: str) -> str:
        """Return the folder of its record."""
        return f"{of}/{self.where}-{self.rank}-{self.every}"


class Layer(nn.Module):
    """A layer that sleeps for as long as it would compute, and for a delay."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.delays: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.linear(x)
        time.sleep(LAYER_S + self.delays.get("forward", 0.0))
        if inner.requires_grad:
            delay = self.delays.get("backward", 0.0)
            inner.register_hook(lambda _: time.sleep(2 * LAYER_S + delay))
        return torch.relu(inner)


class Trainer:
    """A model, its optimizer, and what is delayed on this rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.layers = [Layer() for _ in range(NUM_LAYERS)]
        self.model = nn.Sequential(*self.layers)
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer.register_step_pre_hook(lambda *_: self.sleep("optimizer"))
        self.delays: dict[str, float] = {}

    def sleep(self, phase: str) -> None:
        """Sleep where a phase is delayed."""
        time.sleep(self.delays.get(phase, 0.0))

    def train(self, num_steps: int, first: int = 0, delay: Delay | None = None) -> None:
        """Train; from step `first` on with a delay on this rank."""
        for step in range(num_steps):
            is_late = delay is not None and step >= first and (step - first) % delay.every == 0
            self.delays = {delay.where: delay.seconds} if delay and is_late else {}
            self.layers[1].delays = self.delays
            self.sleep("data")
            self.model(torch.randn(4, 16)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@contextlib.contextmanager
def slow_to_receive(trainer: Trainer) -> Iterator[None]:
    """Let this rank have what it receives later, while its trainer's link is delayed."""
    wait = WorkHandle.wait

    def delayed(handle: WorkHandle) -> None:
        wait(handle)
        trainer.sleep("link")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkHandle, "wait", delayed)
        yield


@past_shared_memory()  # There is no link in that.
def train_with(folder: str, shape: tuple[int, ...], delays: list[Delay]) -> None:
    """Record some steps with each of the delays."""
    mesh = make_mesh(shape)
    trainer = Trainer(mesh)
    trainer.train(2)
    for delay in delays:
        mine = delay if mesh.get_rank() == delay.rank else None
        num_steps = NUM_STEPS if delay.every == 1 else 6 * delay.every
        with slow_to_receive(trainer), record(trainer.model, delay.folder(folder)):
            trainer.train(num_steps, FIRST, mine)


def check(folder: str, delay: Delay) -> None:
    """Assert that the delay is found, as what it is, and that nothing else costs half as much."""
    found = Trace.read(pathlib.Path(delay.folder(folder))).late
    assert found, f"{delay} was not found"
    first, *others = found
    manner = "slow" if delay.every == 1 else "irregular"
    is_link = delay.where == "link"
    assert first.rank == delay.rank, f"{delay}: {found}"
    assert first.kind == (f"{manner} link" if is_link else manner), f"{delay}: {found}"
    if not is_link:
        assert first.phase == delay.where, f"{delay}: {found}"
        assert first.group == ("1" if delay.where in {"forward", "backward"} else "")
    assert FIRST <= first.first_step < FIRST + WINDOW, f"{delay}: {found}"
    # A link is delayed in each gather, of forward and backward.
    cost = first.seconds * first.num_steps
    is_alike = all((each.rank, each.kind) == (first.rank, first.kind) for each in others)
    rest = sum(each.seconds * each.num_steps for each in others)
    assert rest < cost / 2 or (is_link and is_alike), f"{delay}: {found}"


def test_a_link_is_told_from_a_rank(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    """A small part of the below, with a delay of which a busy machine makes no secret."""
    delay = Delay("link", 0, 0.06)
    spawn(train_with, 2, str(tmp_path), (2,), [delay])
    found = Trace.read(pathlib.Path(delay.folder(str(tmp_path)))).late
    assert found, f"{delay} was not found"
    first = found[0]
    assert (first.rank, first.kind) == (0, "slow link")


@pytest.mark.late
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_delays_of_3_percent_are_found_within_five_steps(
    spawn: Spawn, tmp_path: pathlib.Path, shape: tuple[int, ...]
) -> None:
    size = 2 if len(shape) == 1 and shape[0] == 2 else 4
    delays = [Delay(where, rank) for where in (*PHASES, "link") for rank in (0, size - 1)]
    delays += [Delay("backward", 1, 5 * DELAY_S, every=5), Delay("link", 1, 3 * DELAY_S, every=5)]
    spawn(train_with, size, str(tmp_path), shape, delays, timeout_s=300)
    wrong = []
    for delay in delays:
        try:
            check(str(tmp_path), delay)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join([f"{len(wrong)} of {len(delays)}:", *wrong])


def train_alike(folder: str, num_steps: int) -> None:
    """Record steps of ranks that are alike, and compute."""
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    layers = [nn.Linear(128, 128) for _ in range(3)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with record(fully_shard(model, mesh=mesh), folder):
        for _ in range(num_steps):
            model(torch.randn(64, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.late
def test_a_thousand_steps_of_ranks_that_are_alike(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(train_alike, 2, str(tmp_path), 1000, timeout_s=200)
    trace = Trace.read(tmp_path)
    # Other processes of the machine may take a processor from one rank for a while: that is no
    # delay of the test, but one of the rank.
    assert len(trace.late) <= 1, trace.late
    # Ranks of one host have one clock, which each compares as if it had its own: all that it finds
    # is an error, and it says how large that may be.
    for clock in (of_rank.header.clock for of_rank in trace.records):
        assert abs(clock.offset_s) < 50e-6
        assert abs(clock.offset_s) <= clock.error_s


@contextlib.contextmanager
def a_part_of_a_processor(share: float) -> Iterator[None]:
    """Let this process have a part of a processor only, by a control group."""
    group = CGROUP / f"shardkit-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("10000")
        (group / "cpu.cfs_quota_us").write_text(str(int(10000 * share)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def train_with_less_processor(folder: str, late: int) -> None:
    """Record steps of ranks of which one has 60 % of a processor."""
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    layers = [nn.Linear(512, 512) for _ in range(3)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    is_late = mesh.get_rank() == late
    quota = a_part_of_a_processor(0.6) if is_late else contextlib.nullcontext()
    with quota, record(model, folder):
        for _ in range(40):  # Steps of such a rank vary by 10 %.
            model(torch.randn(2048, 512)).square().mean().backward()


@pytest.mark.late
@pytest.mark.skipif(
    not os.access(CGROUP, os.W_OK) or not (CGROUP / "cgroup.procs").exists(),
    reason="needs control groups of version 1 that this user may make",
)
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_with_less_of_its_processor_is_found(
    spawn: Spawn, tmp_path: pathlib.Path, late: int
) -> None:
    spawn(train_with_less_processor, 2, str(tmp_path), late)
    found = Trace.read(tmp_path).late
    assert found, f"rank {late} was not found"
    assert (found[0].rank, found[0].kind, found[0].phase) == (late, "slow", "backward")
