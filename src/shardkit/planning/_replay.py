"""What runs beside what: tasks on lanes, by a clock. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ROUNDING_S = 1e-15


@dataclass(slots=True, eq=False)
class Task:
    """Something that takes time.

    Attributes:
        lane: Name of what it runs on: ``host``, ``compute``, or a stream of collectives. Tasks of a
            lane run one after the other, in the order in which they are given.
        seconds: Time that it takes if nothing runs beside it.
        after: Tasks that end before it begins.
        name: Name of it.
        link: Name of what its bytes travel over; empty: it sends none.
        begin: Time of the beginning in seconds; set by `replay`.
        end: Time of the end.
    """

    lane: str
    seconds: float
    after: Sequence[Task] = ()
    name: str = ""
    link: str = ""
    begin: float = -1.0
    end: float = -1.0


def replay(tasks: Iterable[Task], overlap: float) -> float:
    """Set the times of tasks, and return the time of the last end.

    Collectives on one link share it. A collective and compute at the same time hinder each other:
    what would take both a second takes them ``2 - overlap`` seconds together.

    Args:
        tasks: Tasks, each behind those that it comes after.
        overlap: Part of a collective that costs compute beside it nothing.
    """
    lanes: dict[str, deque[Task]] = {}
    for task in tasks:
        task.begin = task.end = -1.0
        lanes.setdefault(task.lane, deque()).append(task)
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
    """Start what may start; what takes no time ends at once, and may let others start."""
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
        lane: hindered / sharing[task.link]
        if task.link
        else (hindered if lane == "compute" else 1.0)
        for lane, task in running.items()
    }
