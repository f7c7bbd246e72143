"""Which forwards may still have a backward, and the order in which their groups come back in it.

Ranks prefetch, keep and reduce by what stands here, so it holds only what all ranks see alike:
modules called, engine runs that began and ended, shards that changed. Whether a graph still exists
is not among it: one rank may have kept an output that the others dropped.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PASSES = 1024
"""Passes that are remembered; without gradients switched off an evaluation adds more and more."""

_numbers = itertools.count(1)  # Of the process: a forward may outlive the root that it ran in.


class PendingBackwards:
    """Groups by pass, in the order in which their forwards ended.

    A pass is forgotten when a backward that came to it is over, or when parameters have changed
    since: its backward would be an error. A pass without a backward stays until then. Of a pass
    whose root's forward still runs, only the forwards that backward came to are forgotten: the
    root may call ``backward()`` on a loss inside its forward, and return another one.

    A wrong prediction costs at most one extra gather or reduction, identically on all ranks.

    Attributes:
        number: Number of the pass that began last.
    """

    def __init__(self) -> None:
        self.number = 0
        self._is_open = False
        self._last: list[int] = []
        self._passes: dict[int, list[int]] = {}
        self._reached: set[int] = set()
        self._inside: list[tuple[int, int]] = []

    def begin_pass(self, *, has_changed: bool) -> None:
        """Write on a new pass; if parameters have changed, forget those before."""
        if has_changed:
            self._passes.clear()
        elif not self._last:
            self._passes.pop(self.number, None)
        if len(self._passes) >= MAX_PASSES:
            del self._passes[next(iter(self._passes))]
        self.number = next(_numbers)
        self._is_open = True
        self._last = self._passes[self.number] = []

    def end_pass(self) -> None:
        """The root's forward has ended."""
        self._is_open = False

    def add(self, group: int) -> None:
        """A forward of the group has ended that may have a backward."""
        self._last.append(group)

    def reach(self, group: int, in_pass: int | None) -> None:
        """Backward has come to a forward of the group.

        Args:
            group: The group.
            in_pass: Pass of that forward. None: not known, the last one that it is on.
        """
        number = self._number_of(group) if in_pass is None else in_pass
        if number is not None:
            self._reached.add(number)
            self._inside.append((number, group))

    def remove(self, group: int, in_pass: int | None) -> None:
        """Backward is done with the group's last forward in a pass, as given to `reach`."""
        number = self._number_of(group) if in_pass is None else in_pass
        if number is not None:
            self._forget(number, group)
            if (number, group) in self._inside:
                self._inside.remove((number, group))

    def end_backward(self) -> None:
        """The engine is done: forget the passes that it came to."""
        for number in self._reached:
            if number != self.number or not self._is_open:
                self._passes.pop(number, None)
        for number, group in self._inside:
            self._forget(number, group)
        self._reached.clear()
        self._inside.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._is_open = False
        self._last = []
        self._passes.clear()
        self._reached.clear()
        self._inside.clear()

    @property
    def expects_last(self) -> bool:
        """Whether any forward of the pass that began last may have a backward."""
        return bool(self._last)

    def awaits(self, group: int) -> bool:
        """Whether any forward of the group may still have a backward."""
        return any(group in groups for groups in self._passes.values())

    def awaits_in(self, group: int, in_pass: int | None) -> bool:
        """Whether one of a pass may; None: of any."""
        return self.awaits(group) if in_pass is None else group in self._passes.get(in_pass, ())

    def before(self, group: int, in_pass: int | None) -> Iterator[int]:
        """Yield the groups whose forwards ended before the group's last one, nearest first.

        Args:
            group: Group to look for; nothing comes if it is not on the pass.
            in_pass: Pass, as in `reach`. Earlier passes follow: one backward may go through
                several.
        """
        found = False
        for number in reversed(self._passes):
            if in_pass is not None and number > in_pass:
                continue
            for other in reversed(self._passes[number]):
                if found:
                    yield other
                elif other == group:
                    found = True
            if in_pass is not None and not found:
                return

    def _number_of(self, group: int) -> int | None:
        """Return the last pass that the group is on."""
        on = (number for number in reversed(self._passes) if group in self._passes[number])
        return next(on, None)

    def _forget(self, number: int, group: int) -> None:
        """Take the last forward of a group from a pass."""
        groups = self._passes.get(number, [])
        for position in range(len(groups) - 1, -1, -1):
            if groups[position] == group:
                del groups[position]
                break
