"""Streams and events, as far as the library uses those of torch's devices."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """A point on a stream, as torch's modules of devices record it. A fence is one, or None."""

    def query(self) -> bool:
        """Whether all work before it is done."""

    def synchronize(self) -> None:
        """Block the host until then."""


class Stream(Protocol):
    """A queue of work on a device, as torch's modules of devices make it."""

    def record_event(self) -> Event:
        """Return an event that comes after all work issued so far."""

    def wait_event(self, event: Event) -> None:
        """Let work issued from now on come after `event`."""


class InGraph:
    """The fence of what the compiler orders: nobody has to wait."""

    def query(self) -> bool:
        """Whether it is done: for whoever asks outside of the graph."""
        return True

    def synchronize(self) -> None:
        """Return at once."""
