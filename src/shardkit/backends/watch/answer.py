"""What a rank tells of itself."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from shardkit.backends.watch.place import Place


@dataclass(slots=True)
class ChannelState:
    """What a rank did on one process group.

    Attributes:
        ranks: Of the group, in the world.
        position: Number of collectives issued.
        recent: The last of them, each with its position.
        wish: The collective that it would issue next, if the others agreed; or None.
    """

    ranks: list[int]
    position: int
    recent: list[tuple[int, str]]
    wish: str | None = None

    def at(self, position: int) -> str | None:
        """Return the collective that was issued, or is wished for, at a position, if known."""
        if position == self.position:
            return self.wish
        first = self.position - len(self.recent)
        return self.recent[position - first][1] if first <= position < self.position else None


@dataclass(slots=True)
class WaitState:
    """What a rank waits for.

    Attributes:
        channel: Name of the process group.
        position: Of the collective in its sequence.
        of: The collective.
        for_s: Seconds so far.
        is_main: The main thread waits.
    """

    channel: str
    position: int
    of: str
    for_s: float
    is_main: bool = True


@dataclass(slots=True)
class Answer:
    """What a rank tells of itself.

    Attributes:
        rank: In the world.
        host: Name.
        pid: Of its process.
        state: ``"runs"``, ``"destroyed"`` (its process group), ``"ended"`` or ``"raised"``; for a
            rank that does not answer ``"gone"``, ``"stopped"``, ``"busy"`` or ``"silent"``.
        step: Number of root forwards so far.
        place: Where its main thread is.
        is_still: The main thread did not move while it was looked at, inside torch.distributed.
        error: The last exception that left a forward, or ended the process; or None.
        channels: By name.
        waits: What it waits for, or None.
        verdict: What it has already been told, or None.
        silent_s: Seconds for which it has not answered.
        stack: Of the main thread.
        engine: What the engine of an accelerator knows; see `flight_recorder`.
    """

    rank: int
    host: str = "?"
    pid: int = 0
    state: str = "runs"
    step: int = 0
    place: Place = field(default_factory=Place)
    is_still: bool = False
    error: str | None = None
    channels: dict[str, ChannelState] = field(default_factory=dict)
    waits: WaitState | None = None
    verdict: str | None = None
    silent_s: float = 0.0
    stack: str = ""
    engine: list[str] = field(default_factory=list)

    def dump(self) -> str:
        """Return it as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str | bytes) -> Answer:
        """Return what was dumped."""
        found: dict[str, Any] = json.loads(text)
        found["place"] = Place(**found["place"])
        found["channels"] = {
            name: ChannelState(**{**state, "recent": [tuple(each) for each in state["recent"]]})
            for name, state in found["channels"].items()
        }
        if found["waits"] is not None:
            found["waits"] = WaitState(**found["waits"])
        return cls(**found)
