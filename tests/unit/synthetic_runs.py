"""Records of runs that never were: ranks whose times are computed, with delays that are known.

A collective takes `network_s` from the moment when its last rank has issued it. Whoever waits for
it goes on then. All ranks do the same operations in the same order.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import typing

from shardkit._events import StepEvent
from shardkit.tracing.clocks import Clock
from shardkit.tracing.records import RankHeader, RankRecord

Delay = typing.Callable[[int, int, str, str], float]
"""Seconds by which a rank is later in a step, a phase, and a group ("" outside of groups)."""


def no_delay(rank: int, step: int, phase: str, group: str) -> float:
    """Return 0 for all."""
    del rank, step, phase, group
    return 0.0


@dataclasses.dataclass
class SyntheticRun:
    """How long what takes, in seconds."""

    num_ranks: int = 2  # Number of ranks on the shard axis.
    num_replicas: int = 1  # Number of ranks on the replicate axis; 1: there is none.
    num_steps: int = 12
    num_layers: int = 3
    network_s: float = 0.002  # Time of a collective after its last rank has issued it.
    compute_s: float = 0.010
    data_s: float = 0.004
    optimizer_s: float = 0.006
    jitter_s: float = 0.0  # Deviation of each time.
    delay: Delay = no_delay  # Delay of what a rank does itself.
    # Delay of what a rank receives, by the kind of the collective in place of a phase.
    link: Delay = no_delay
    seed: int = 0

    def records(self) -> list[RankRecord]:
        """Return the records of all ranks."""
        return _Simulation(self).records()


class _Simulation:
    def __init__(self, run: SyntheticRun) -> None:
        self.run = run
        self.world_size = run.num_ranks * run.num_replicas
        self.random = random.Random(run.seed)
        self.step = 0
        self.now = [0.0] * self.world_size
        self.position = [0] * self.world_size
        self.events: list[list[StepEvent]] = [[] for _ in self.now]
        self.open: list[dict[tuple[str, str], tuple[float, int]]] = [{} for _ in self.now]
        self.issued: dict[tuple[str, str, int], float] = {}

    def records(self) -> list[RankRecord]:
        groups = ["the root", *(f"layers.{i}" for i in range(self.run.num_layers))]
        for step in range(self.run.num_steps):
            self.step = step
            self.take("data", "", step, self.run.data_s)
            self.forward(groups, step)
            self.backward(groups, step)
            self.begin("compute", "")
            self.take("optimizer", "", step, self.run.optimizer_s)
            self.end("compute", "", phase="optimizer")
        return [
            RankRecord(
                RankHeader(rank, self.world_size, axes=self.axes(rank)),
                sorted(events, key=lambda event: event.begin),
            )
            for rank, events in enumerate(self.events)
        ]

    def axes(self, rank: int) -> dict[str, list[int]]:
        size, replicas = self.run.num_ranks, self.run.num_replicas
        row = rank // size
        return {
            f"shard {size}": list(range(row * size, (row + 1) * size)),
            f"replicate {replicas}": list(range(rank % size, self.world_size, size)),
        }

    def members(self, rank: int, axis: str) -> list[int]:
        return next(of for name, of in self.axes(rank).items() if name.startswith(axis))

    # --- a step ---

    def forward(self, groups: list[str], step: int) -> None:
        self.begin("pass", "the root")
        self.issue("gather", groups[0])
        for number, group in enumerate(groups):
            self.wait("gather", group)
            if number + 1 < len(groups):
                self.issue("gather", groups[number + 1])
            self.begin("compute", group)
            self.take("forward", group, step, self.run.compute_s)
            self.end("compute", group, phase="forward")
        self.end("pass", "the root", phase="forward")

    def backward(self, groups: list[str], step: int) -> None:
        self.begin("pass", "the root")
        for group in reversed(groups):
            self.issue("gather", group)
            self.wait("gather", group)
            self.begin("compute", group)
            self.take("backward", group, step, 2 * self.run.compute_s)
            self.end("compute", group, phase="backward")
            self.issue("reduce_scatter", group)
            if self.run.num_replicas > 1:
                self.begin("all_reduce", group)
            if group != groups[-1]:
                self.finish(groups[groups.index(group) + 1])
        self.finish(groups[0])
        self.end("pass", "the root", phase="backward")

    def finish(self, group: str) -> None:
        self.begin("wait", group)
        self.meet("reduce_scatter", group, "shard")
        if self.run.num_replicas > 1:
            for rank, now in enumerate(self.now):
                self.issued["all_reduce", group, rank] = now
            self.meet("all_reduce", group, "replicate")
        self.end("wait", group, phase="backward")
        if self.run.num_replicas > 1:
            self.end("all_reduce", group, phase="backward")
        self.end("reduce_scatter", group, phase="backward")

    # --- what all ranks do ---

    def take(self, phase: str, group: str, step: int, seconds: float) -> None:
        for rank in range(self.world_size):
            noise = abs(self.random.gauss(0, self.run.jitter_s)) if self.run.jitter_s else 0.0
            self.now[rank] += seconds + noise + self.run.delay(rank, step, phase, group)

    def issue(self, kind: str, group: str) -> None:
        self.begin(kind, group)
        for rank, now in enumerate(self.now):
            self.issued[kind, group, rank] = now

    def wait(self, kind: str, group: str) -> None:
        self.begin("wait", group)
        self.meet(kind, group, "shard")
        self.end("wait", group, phase="forward")
        self.end(kind, group, phase="forward")

    def meet(self, kind: str, group: str, axis: str) -> None:
        for rank, now in enumerate(self.now):
            last = max(self.issued[kind, group, each] for each in self.members(rank, axis))
            noise = abs(self.random.gauss(0, self.run.jitter_s)) if self.run.jitter_s else 0.0
            late = noise + self.run.link(rank, self.step, kind, group)
            self.now[rank] = max(now, last + self.run.network_s + late)

    def begin(self, kind: str, group: str) -> None:
        for rank, now in enumerate(self.now):
            self.position[rank] += 1
            self.open[rank][kind, group] = (now, self.position[rank])

    def end(self, kind: str, group: str, *, phase: str) -> None:
        axis, size = "", 1
        if kind in {"gather", "reduce_scatter"}:
            axis, size = "shard", self.run.num_ranks
        elif kind == "all_reduce":
            axis, size = "replicate", self.run.num_replicas
        number = -1 if not group else 0 if group == "the root" else 1 + int(group.split(".")[1])
        for rank, now in enumerate(self.now):
            begin, opened = self.open[rank].pop((kind, group))
            self.position[rank] += 1
            words: typing.Any = {
                "kind": kind,
                "name": group,
                "phase": phase,
                "axis": axis,
            }
            self.events[rank].append(
                StepEvent(
                    **words,
                    group=-1 if kind == "pass" else number,
                    nbytes=1000 if axis else 0,
                    num_ranks=size,
                    begin=begin,
                    end=now,
                    opened=opened,
                    closed=self.position[rank],
                )
            )


def shifted(record: RankRecord, seconds: float) -> RankRecord:
    """Return a record in a clock that is `seconds` behind, which its header knows."""
    events = [
        event._replace(begin=event.begin - seconds, end=event.end - seconds)
        for event in record.events
    ]
    header = dataclasses.replace(record.header, clock=Clock(0.0, seconds))
    return RankRecord(header, events)


def kinds_of(record: RankRecord) -> collections.Counter[str]:
    """Return how many events of each kind a record has."""
    return collections.Counter(event.kind for event in record.events)
