"""The time of a step: the records of a dry run as tasks on the lanes of a machine, by a profile.

A simulated clock runs the tasks (`replay`), and shows which tasks run at the same time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._events import StepEvent, edges_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardkit.planning._meter import MemoryMeter, Operator
    from shardkit.planning._profile import HardwareProfile
    from shardkit.planning._run import Run

_NUM_MODULES = 10
_OPS = {"gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"}
_ROUNDING_S = 1e-15


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """The compute of a module in a step, or of its backward.

    Attributes:
        name: Name of the module's pass, such as ``backward of blocks.3``.
        seconds: Time of its operators, with nothing else running.
        flops: Number of floating-point operations.
        nbytes: Bytes that its operators read and write.
    """

    name: str
    seconds: float
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs in a step.

    Attributes:
        lane: Name of the lane on which it runs: ``compute``, ``gather``, ``reduce``.
        name: Name of the work.
        begin: Time of the beginning in seconds.
        end: Time of the end in seconds.
    """

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step.

    Attributes:
        hardware: Name of the profile.
        seconds: Time of the step.
        exposed_s: Part of it that collectives cost: without them the step would be shorter by this.
        flops: Number of floating-point operations of a rank, without those of recomputes.
        utilization: Ratio of these to the most operations that the device can do in this time. If
            products have several dtypes, each counts by its own peak.
        modules: Modules with the longest compute, the longest first.
        spans: Times of all work, in the order of their start.
    """

    hardware: str
    seconds: float
    exposed_s: float
    flops: int
    utilization: float
    modules: tuple[ModuleCost, ...]
    spans: tuple[Span, ...]


def time_of(run: Run, meter: MemoryMeter, profile: HardwareProfile) -> StepTime:
    """Return the time of the step that a meter has recorded."""
    operators = meter.operators
    tasks = _Tasks(run, profile).of(meter.events, operators)
    seconds = replay(tasks, profile.overlap)
    spans = tuple(
        Span(task.lane, task.name, task.begin, task.end)
        for task in sorted(tasks, key=lambda task: task.begin)
        if task.end > task.begin and task.lane != "host"
    )
    for task in tasks:
        if task.link:
            task.seconds, task.link = task.copied_s, ""
    alone = replay(tasks, profile.overlap)
    counted = Counter[str]()
    for each in operators:
        if not each.is_again:
            counted[each.dtype] += each.flops
    at_best = sum(
        flops / profile.peak.get(dtype, profile.peak["float32"]) for dtype, flops in counted.items()
    )
    return StepTime(
        hardware=profile.name,
        seconds=seconds,
        exposed_s=seconds - alone,
        flops=counted.total(),
        utilization=at_best / seconds if seconds else 0.0,
        modules=_modules(operators, profile),
        spans=spans,
    )


def seconds_of(operator: Operator, profile: HardwareProfile) -> float:
    """Return the time of an operator on the device, without the host's work for it."""
    if operator.kind == "product":
        at_least = profile.memory_s(operator.nbytes, "in_place")
        return max(profile.product_s(operator.flops, operator.dtype), at_least, profile.kernel_s)
    return max(profile.memory_s(operator.nbytes, operator.kind), profile.kernel_s)


def _modules(operators: Iterable[Operator], profile: HardwareProfile) -> tuple[ModuleCost, ...]:
    found: dict[str, list[Operator]] = defaultdict(list)
    for each in operators:
        found[each.owner].append(each)
    costs = [
        ModuleCost(
            name,
            sum(seconds_of(each, profile) for each in own),
            sum(each.flops for each in own),
            sum(each.nbytes for each in own),
        )
        for name, own in found.items()
    ]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds)[:_NUM_MODULES])


class _Tasks:
    """Makes tasks of events and operators, in the order in which the host reached them.

    On a CPU the host computes, so a collective begins when the host reaches it. On an accelerator
    the host runs ahead. There a gather waits for the host and for its memory, which its last reader
    gives back; a reduction also waits for compute.
    """

    def __init__(self, run: Run, profile: HardwareProfile) -> None:
        self._profile = profile
        self._on_cpu = run.on_cpu
        self._world_size = math.prod(run.mesh)
        self._tasks: list[Task] = []
        self._last: dict[str, Task] = {}  # Of each lane.
        self._busy_s = self._host_s = 0.0
        self._name = ""
        self._under_way: defaultdict[tuple[str, int], list[Task]] = defaultdict(list)
        self._joined: tuple[str, Task, int] | None = None
        self._returned: defaultdict[int, list[Task | None]] = defaultdict(list)
        self._taken: list[Task] = []
        self._copied_s = 0.0
        self._begun: Task | None = None  # A reduction that no other work has followed.

    def of(self, events: Iterable[StepEvent], operators: Sequence[Operator]) -> list[Task]:
        """Return the tasks of a step."""
        edges: list[tuple[float, StepEvent | Operator, bool]]
        edges = [*edges_of(events), *((each.after + 0.5, each, True) for each in operators)]
        for _, what, is_begin in sorted(edges, key=lambda edge: edge[0]):
            if isinstance(what, StepEvent):
                self._edge(what, is_begin=is_begin)
            else:
                self._operator(what)
        self._end_segment("")
        return self._tasks

    def _edge(self, event: StepEvent, *, is_begin: bool) -> None:
        """Process the start or the end of an event."""
        begun = self._begun
        if event.kind not in {"allocate", "free", "take", "return"}:
            self._begun = None
        if is_begin and event.kind in _OPS:
            self._collective(event)
        elif event.kind == "wait" and not is_begin:
            self._wait(event)
        elif event.kind == "compute":
            self._end_segment(event.name)
            self._host_s += self._profile.group_s / 2  # Once at its start, once at its end.
        elif event.kind == "copy":
            seconds = event.nbytes / self._profile.host_bytes_per_s
            if begun is None:  # Copies of shards, before the next gather.
                self._copied_s += seconds
            else:  # Copies of sums, after the current reduction.
                begun.copy_for(seconds)
        elif not self._on_cpu and event.kind == "take":
            self._take(event.nbytes)
        elif not self._on_cpu and event.kind == "return":
            self._end_segment(self._name)
            lane = "compute" if event.name.startswith("unsharded") else "reduce"
            self._returned[event.nbytes].append(self._last.get(lane))

    def _operator(self, operator: Operator) -> None:
        self._joined = None
        profile = self._profile
        self._busy_s += seconds_of(operator, profile)
        is_step = operator.owner == "optimizer"
        self._host_s += profile.sharded_operator_s if is_step else profile.operator_s
        if is_step:
            self._name = "optimizer"

    def _end_segment(self, name: str) -> None:
        """Make tasks of the operators since the last segment; later ones get the name `name`."""
        if self._busy_s or self._host_s:
            if self._on_cpu:
                self._add("compute", self._busy_s + self._host_s, ())
            else:
                before = self._last.get("host")
                issued = self._add("host", self._host_s, ())
                self._add("compute", self._busy_s, (before,))
                self._add("compute", 0.0, (issued,))  # It ends after it was issued.
            self._busy_s = self._host_s = 0.0
        self._name = name

    def _add(self, lane: str, seconds: float, after: Iterable[Task | None], link: str = "") -> Task:
        known = [task for task in after if task is not None]
        task = self._last[lane] = Task(lane, seconds, known, self._name, link)
        self._tasks.append(task)
        return task

    def _take(self, nbytes: int) -> None:
        """Let the next gather wait for its memory; memory from compute is taken first."""
        free = self._returned[nbytes]
        at = next((i for i, task in enumerate(free) if task and task.lane == "compute"), 0)
        if free and (task := free.pop(at)) is not None:
            self._taken.append(task)

    def _collective(self, event: StepEvent) -> None:
        """Start a collective, or add this one to the collective that started just before."""
        joined = self._joined if self._joined and self._joined[0] == event.kind else None
        name = self._name
        self._end_segment(event.name)
        lane = "gather" if event.kind == "gather" else "reduce"
        nbytes = event.nbytes + (joined[2] if joined else 0)
        seconds = self._sent_s(event, nbytes)
        if joined:
            task = joined[1]
            task.name = f"{task.name}, {event.name}"
            task.seconds += max(seconds - self._sent_s(event, joined[2]), 0.0)
        else:
            begun = self._last.get("compute") if self._on_cpu or lane == "reduce" else None
            before = (begun, self._last.get("host"), *self._taken)
            task = self._add(lane, seconds, before, event.axis or "all")
            self._taken = []
        task.copy_for(self._copied_s)
        self._copied_s = 0.0
        self._name, self._joined = name, (event.kind, task, nbytes)
        self._begun = task if event.kind == "reduce_scatter" else None
        self._under_way[lane, event.group].append(task)

    def _sent_s(self, event: StepEvent, nbytes: int) -> float:
        """Return the time of a collective like that of an event, with `nbytes` bytes."""
        span = self._world_size if event.axis == "replicate" else event.num_ranks
        return self._profile.collective_s(_OPS[event.kind], nbytes, event.num_ranks, span)

    def _wait(self, event: StepEvent) -> None:
        """Let compute wait for the collectives of the event's group."""
        self._end_segment(self._name)
        self._joined = None
        gathers = self._under_way.pop(("gather", event.group), None)
        self._add("compute", 0.0, gathers or self._under_way["reduce", event.group])


# --- by a clock -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Task:
    """A task that takes time on a lane."""

    # Name of the lane on which it runs: ``host``, ``compute``, or a stream of collectives. Tasks of
    # a lane run one after another, in the given order.
    lane: str
    seconds: float  # Time that it takes if nothing else runs.
    after: Sequence[Task] = ()  # Tasks that must end before it begins.
    name: str = ""
    link: str = ""  # Name of the link on which it sends bytes; empty: it sends none.
    copied_s: float = 0.0  # Part of its time in which it copies between host and device.
    begin: float = -1.0  # Start in seconds; set by `replay`.
    end: float = -1.0  # Time of the end.

    def copy_for(self, seconds: float) -> None:
        """Let the task also copy for this time."""
        self.seconds += seconds
        self.copied_s += seconds


def replay(tasks: Iterable[Task], overlap: float) -> float:
    """Set the times of tasks, and return the time at which the last one ends.

    Each task comes after all tasks that it waits for. Collectives on one link share it. A
    collective and compute at the same time slow each other down: if both take a second alone, they
    take ``2 - overlap`` seconds together.
    """
    lanes: dict[str, deque[Task]] = defaultdict(deque)
    for task in tasks:
        task.begin = task.end = -1.0
        lanes[task.lane].append(task)
    now = 0.0
    running: dict[str, Task] = {}
    left: dict[str, float] = {}
    while True:
        _start_ready(lanes, running, left, now)
        if not running:
            assert not any(lanes.values()), "a task waits for one behind it"
            return now
        speeds = _speeds(running, overlap)
        passed = min(left[lane] / speeds[lane] for lane in running)
        now += passed
        for lane in list(running):
            left[lane] -= passed * speeds[lane]
            if left[lane] <= _ROUNDING_S:
                running.pop(lane).end = now


def _start_ready(
    lanes: dict[str, deque[Task]], running: dict[str, Task], left: dict[str, float], now: float
) -> None:
    """Start all tasks that may start; tasks without duration end at once and may release others."""
    has_changed = True
    while has_changed:
        has_changed = False
        for lane, waiting in lanes.items():
            while lane not in running and waiting and all(t.end >= 0 for t in waiting[0].after):
                task = waiting.popleft()
                task.begin, has_changed = now, True
                if task.seconds <= _ROUNDING_S:
                    task.end = now
                else:
                    running[lane], left[lane] = task, task.seconds


def _speeds(running: dict[str, Task], overlap: float) -> dict[str, float]:
    sharing = Counter(task.link for task in running.values() if task.link)
    hindered = 1 / (2 - overlap) if sharing and "compute" in running else 1.0
    return {
        lane: hindered / max(sharing[task.link], 1) if task.link or lane == "compute" else 1.0
        for lane, task in running.items()
    }
