"""A schedule as lines, ``event: actions``, ``-`` for none; group 0 is the root, 1 to 3 layers."""

from __future__ import annotations

import typing

from shardkit._schedule import Action, UnshardSchedule

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


LAYERS = (1, 2, 3)


def line(event: str, actions: Sequence[Action]) -> str:
    """Return an event and what it leads to, as a line of text."""
    shown = ", ".join(f"{op.value} {group}" for op, group in actions)
    return f"{event}: {shown or '-'}"


def forward(
    schedule: UnshardSchedule,
    layers: Sequence[int] = LAYERS,
    *,
    has_changed: bool = False,
    needs_backward: bool = True,
) -> list[str]:
    """Run a pass of the root and these layers; return its lines."""
    schedule.begin_pass(has_changed=has_changed)
    lines = [line("enter 0", schedule.enter_forward(0))]
    for layer in layers:
        lines.append(line(f"enter {layer}", schedule.enter_forward(layer)))
        actions = schedule.exit_forward(layer, needs_backward=needs_backward)
        lines.append(line(f"exit {layer}", actions))
    lines.append(line("exit 0", schedule.exit_forward(0, needs_backward=needs_backward)))
    lines.append(line("end", schedule.end_pass(needs_backward=needs_backward)))
    return lines


def backward(schedule: UnshardSchedule, layers: Sequence[int] = LAYERS) -> list[str]:
    """Run the backward of such a pass; the layers are given in the order of forward."""
    lines = [line("enter 0", schedule.enter_backward(0))]
    for layer in reversed(layers):
        lines.append(line(f"enter {layer}", schedule.enter_backward(layer)))
        actions = schedule.exit_backward(layer, is_last=True)
        lines.append(line(f"exit {layer}", actions))
    lines.append(line("exit 0", schedule.exit_backward(0, is_last=True)))
    lines.append(line("end", schedule.end_backward()))
    return lines


def trained(*, kept: Sequence[int] = ()) -> UnshardSchedule:
    """Return a schedule after its first step."""
    schedule = UnshardSchedule()
    schedule.options.no_reshard_after_forward = set(kept)
    forward(schedule)
    backward(schedule)
    return schedule


FIRST_FORWARD = [
    "enter 0: gather 0, wait 0",
    "enter 1: gather 1, wait 1",
    "exit 1: -",
    "enter 2: gather 2, wait 2",
    "exit 2: free 1",
    "enter 3: gather 3, wait 3",
    "exit 3: free 2",
    "exit 0: free 0",
    "end: -",
]
FORWARD = [
    "enter 0: gather 0, wait 0, prefetch 1",
    "enter 1: wait 1, prefetch 2",
    "exit 1: free 1",
    "enter 2: wait 2, prefetch 3",
    "exit 2: free 2",
    "enter 3: wait 3",
    "exit 3: -",
    "exit 0: free 0",
    "end: -",
]
BACKWARD = [
    "enter 0: gather 0, wait 0",
    "enter 3: wait 3, prefetch 2",
    "exit 3: free 3",
    "enter 2: wait 2, prefetch 1",
    "exit 2: free 2",
    "enter 1: wait 1",
    "exit 1: free 1",
    "exit 0: free 0",
    "end: -",
]
