"""In which order forward enters groups: the last pass is what the next one is expected to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class ForwardOrder:
    """Remembers the last pass of every root, and follows it.

    Of each: a head that is called alone, chunk by chunk, does not disturb the model's order.
    """

    def __init__(self) -> None:
        self._last_orders: dict[Hashable, list[int]] = {}
        self._whole_orders: dict[Hashable, list[int]] = {}
        self._order: list[int] = []
        self._root: Hashable = None
        self._position = 0

    def begin_pass(self, root: Hashable) -> None:
        """A pass of a root begins."""
        self._order = []
        self._root = root
        self._position = 0

    def enter(self, group: int) -> Sequence[int]:
        """Note a group that is entered; return what came after it in the last pass."""
        if self._order[-1:] != [group]:  # Ranks may use different modules of a list.
            self._order.append(group)
        order, position = self._last_orders.get(self._root, []), self._position
        while position < len(order) and order[position] != group:
            position += 1
        if position >= len(order):
            return ()
        self._position = position + 1
        return order[position + 1 :]

    def end_pass(self) -> None:
        """The pass ends."""
        self._last_orders[self._root] = self._whole_orders[self._root] = self._order

    def last(self, root: Hashable) -> Sequence[int]:
        """Return the order of the last pass of a root that came to its end; `clear` keeps it.

        What ranks decide by it must be alike after an exception on one of them, too.
        """
        return self._whole_orders.get(root, ())

    def clear(self) -> None:
        """Forget everything: after an exception ranks may have noted different orders."""
        self._last_orders.clear()
        self._order = []
        self._position = 0
