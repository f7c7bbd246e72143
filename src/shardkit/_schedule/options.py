"""What users choose about when groups have memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardkit._policy import BackwardPrefetch


@dataclass(slots=True)
class ScheduleOptions:
    """What users chose, by group number; may change between passes.

    Attributes:
        kept: Not resharded after forward.
        several_modules: Of more than one module: not given back between them in backward either.
        resting: Not resharded after backward.
        idle_in_backward: Backward does not need their parameters.
        forward_prefetch: Whether forward gathers ahead.
        backward_prefetch: When backward gathers ahead.
        next_in_forward: What to gather when a group is entered, instead of what came next in the
            last pass.
        next_in_backward: The same in backward.
    """

    kept: set[int] = field(default_factory=set)
    several_modules: set[int] = field(default_factory=set)
    resting: set[int] = field(default_factory=set)
    idle_in_backward: set[int] = field(default_factory=set)
    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE
    next_in_forward: dict[int, list[int]] = field(default_factory=dict)
    next_in_backward: dict[int, list[int]] = field(default_factory=dict)
