"""In which order groups are reduced: decisions only, no torch, no communication."""

from __future__ import annotations


class ReduceOrder:
    """Decides when groups are reduced: in one order on all ranks, each once per backward.

    Ranks may use different parameters, so which group completes first may differ between them,
    and one may not complete at all; collectives of one process group must be issued in one order
    everywhere all the same. So groups are reduced in the reverse of the order in which forward
    entered them, a complete one waiting for those before it; what has not completed when the
    engine is done is reduced then, with zeros for what is missing.
    """

    def __init__(self) -> None:
        self._entered: dict[int, None] = {}
        self._waiting: list[int] = []
        self._complete: set[int] = set()
        self._issued: set[int] = set()

    @property
    def entered(self) -> tuple[int, ...]:
        """Groups that forwards entered since the last backward, in order."""
        return tuple(self._entered)

    def enter_forward(self, group: int) -> bool:
        """A forward that may have a backward enters the group; return whether it is the first."""
        is_first = group not in self._entered
        self._entered[group] = None
        return is_first

    def withdraw(self, group: int) -> None:
        """The first forward that entered the group has no backward after all."""
        self._entered.pop(group, None)

    def begin_backward(self) -> None:
        """A backward starts: fix the order."""
        self._waiting = list(reversed(self._entered))
        self._complete.clear()
        self._issued.clear()

    def complete(self, group: int) -> list[int]:
        """All gradients of a group have come; return the groups to reduce now.

        One that was reduced already in this backward, or that no forward entered, is reduced at
        once.
        """
        if group in self._issued or group not in self._waiting:
            return [group]
        self._complete.add(group)
        return self._issue_complete()

    def end_backward(self) -> list[int]:
        """The engine is done; return the rest, in order."""
        rest = self._waiting
        self._waiting = []
        self._entered.clear()
        return rest

    def cancel(self) -> None:
        """No gradient came in this backward (``autograd.grad``): nothing is reduced."""
        self._waiting = []

    def reset(self) -> None:
        """Forget everything after an exception."""
        self.cancel()
        self._entered.clear()

    def _issue_complete(self) -> list[int]:
        ready = []
        while self._waiting and self._waiting[0] in self._complete:
            group = self._waiting.pop(0)
            self._issued.add(group)
            ready.append(group)
        return ready
