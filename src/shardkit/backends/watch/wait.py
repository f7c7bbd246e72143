"""A wait, and how long it may be before the other ranks are asked."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from shardkit._watch_settings import watch_settings
from shardkit.backends.watch.answer import WaitState

if TYPE_CHECKING:
    from shardkit.backends.watch.sequence import Collective


class Wait:
    """A wait of a thread of this process.

    Attributes:
        channel: Name of the process group.
        position: Of the collective in its sequence.
        what: The collective.
        since: When it began, of `time.monotonic`.
        is_main: It is the main thread's.
        next_look: When to ask the others (again).
    """

    def __init__(self, channel: str, position: int, what: Collective) -> None:
        self.channel = channel
        self.position = position
        self.what = what
        self.since = time.monotonic()
        self.is_main = threading.current_thread() is threading.main_thread()
        self.restart()

    def restart(self) -> None:
        """Be patient anew."""
        self.next_look = self.since + watch_settings.ask_after_s

    def state(self) -> WaitState:
        """Return what others are told of it."""
        for_s = time.monotonic() - self.since
        return WaitState(self.channel, self.position, str(self.what), for_s, self.is_main)
