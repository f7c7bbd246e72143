"""What users choose about when groups have memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardkit._policy import BackwardPrefetch


@dataclass(slots=True)
class ScheduleOptions:
    """What users chose, by group number; may change between passes.

    Attributes:
        no_reshard_after_forward: Groups that are not resharded after forward.
        several_modules: Groups of more than one module: not given back between them in backward
            either.
        no_reshard_after_backward: Groups that are not resharded after backward.
        no_unshard_in_backward: Groups whose parameters backward does not need.
        prefetch_in_forward: Whether forward gathers ahead.
        prefetch_in_backward: Moment when backward gathers ahead.
        next_in_forward: Groups to gather when a group is entered, instead of what came next in the
            last pass.
        next_in_backward: Groups to gather when a group is entered in backward.
    """

    no_reshard_after_forward: set[int] = field(default_factory=set)
    several_modules: set[int] = field(default_factory=set)
    no_reshard_after_backward: set[int] = field(default_factory=set)
    no_unshard_in_backward: set[int] = field(default_factory=set)
    prefetch_in_forward: bool = True
    prefetch_in_backward: BackwardPrefetch = BackwardPrefetch.PRE
    next_in_forward: dict[int, list[int]] = field(default_factory=dict)
    next_in_backward: dict[int, list[int]] = field(default_factory=dict)
