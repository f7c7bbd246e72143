"""The code inside a rank: it trains one contender, and measures its time or its memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from contenders import Trainer, Workload, build
from memory import meter_for, resident_bytes


@dataclass(frozen=True)
class StepTimes:
    """Seconds per training step on one rank, as means over a block of steps."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    zero_grad_s: float

    @property
    def forward_backward_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_backward_s + self.optimizer_s + self.zero_grad_s


class Clock(Protocol):
    """A clock that takes marks now and gives the seconds between them later."""

    def mark(self) -> None:
        """Take a mark."""

    def intervals_s(self) -> list[float]:
        """Return the seconds between neighbouring marks."""


class HostClock:
    """A clock of host time, for devices that compute when they are called."""

    def __init__(self) -> None:
        """Start without marks."""
        self._marks: list[float] = []

    def mark(self) -> None:
        """Take a mark."""
        self._marks.append(time.perf_counter())

    def intervals_s(self) -> list[float]:
        """Return the seconds between neighbouring marks."""
        return [after - before for before, after in pairwise(self._marks)]


class CudaClock:
    """A clock on the current stream: taking a mark does not wait."""

    def __init__(self) -> None:
        """Start without marks."""
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Take a mark."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def intervals_s(self) -> list[float]:
        """Wait for all marks; return the seconds between neighbouring ones."""
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._marks)]


def clock_for(device: torch.device) -> Clock:
    """Return a clock of the work on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class Training:
    """A trainer, and the one batch that this rank uses in every step."""

    def __init__(self, device: torch.device, contender: str, workload: Workload) -> None:
        """Build the contender and draw a batch, which differs between ranks."""
        self._trainer: Trainer = build(contender, workload, device)
        self._microbatches = workload.microbatches
        shape = workload.shape
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(
            shape.vocab, (shape.batch, shape.sequence + 1), generator=generator
        ).to(device)
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self, mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Train one step and return its loss, detached.

        Args:
            mark: A function called before the forward, backward, optimizer step and clearing of
                gradients. If there are several backwards, all but the last count as forward.
        """
        mark()
        for left in range(self._microbatches - 1, -1, -1):
            if self._microbatches > 1:
                self._trainer.set_sync(left == 0)
            loss = self._trainer.loss(self._inputs, self._targets) / self._microbatches
            if left:
                loss.backward()
        mark()
        loss.backward()
        mark()
        self._trainer.optimizer.step()
        mark()
        self._trainer.model.zero_grad(set_to_none=True)
        return loss.detach()

    def pieces(self) -> list[torch.Tensor]:
        """Return this rank's pieces of the parameters, to be written to."""
        parameters = list(self._trainer.model.parameters())
        return [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in parameters]


class TimedRank:
    """One contender on one rank, timed in blocks of steps."""

    def __init__(self, device: torch.device, contender: str, workload: Workload) -> None:
        """Build the contender; its resident memory counts from here on."""
        self._resident_before = resident_bytes()
        self._device = device
        self._training = Training(device, contender, workload)

    def block(self, num_steps: int) -> StepTimes:
        """Time steps after an untimed one, which warms caches that other contenders left cold."""
        clock = clock_for(self._device)
        self._training.step()
        self._wait_for_all()
        for _ in range(num_steps):
            self._training.step(clock.mark)
        clock.mark()
        intervals = clock.intervals_s()
        num_phases = len(intervals) // num_steps
        return StepTimes(
            *(sum(intervals[phase::num_phases]) / num_steps for phase in range(num_phases))
        )

    def loss(self) -> float:
        """Train one more step; return its loss on this rank's batch."""
        return self._training.step().item()

    def resident_peak(self) -> int:
        """Return the peak of this process's resident memory, above the imports."""
        return resident_bytes("VmHWM") - self._resident_before

    def _wait_for_all(self) -> None:
        dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class PeakBytes:
    """The most bytes of tensors alive at once on one rank, above the imports."""

    starting: int
    steady: int


class CountedRank:
    """One contender on one rank, with its memory counted from before its model is made."""

    def __init__(self, device: torch.device, contender: str, workload: Workload) -> None:
        """Start counting, before anything is built."""
        self._meter = meter_for(device)
        self._make_training = partial(Training, device, contender, workload)

    def peak(self, num_steps: int) -> PeakBytes:
        """Count the construction with two steps, then steps with all state in place."""
        trainings: list[Training] = []

        def start() -> None:
            trainings.append(self._make_training())
            train(2)

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                trainings[0].step()

        return PeakBytes(
            starting=self._meter.peak_during(start),
            steady=self._meter.peak_during(lambda: train(num_steps)),
        )
