"""When groups are gathered and freed: decisions only, no torch, no communication.

`UnshardSchedule` is a state machine: an event in, a list of actions out. The runtime carries the
actions out; tests compare the lists.

Live groups (those whose unsharded memory exists) are bounded: besides the groups in use and the
kept ones there are at most `prefetch_depth` spare ones, a prefetched group or one whose use is
over but whose memory nobody has needed since::

    event                   in use    spare        actions
    enter_forward(root)     root      b0           GATHER root, WAIT root, PREFETCH b0
    enter_forward(b0)       root b0   b1           WAIT b0, PREFETCH b1
    exit_forward(b0)        root      b1           FREE b0
    ...
    exit_forward(b5)        root      b5           (stays: backward needs it first)
    enter_backward(b5)      root b5   b4           WAIT b5, PREFETCH b4
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from shardkit._policy import BackwardPrefetch
from shardkit._schedule.forward_order import ForwardOrder
from shardkit._schedule.options import ScheduleOptions
from shardkit._schedule.pending import PendingBackwards

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


BATCH_NBYTES = 1 << 20
"""Neighbouring groups that are smaller than this together travel in one collective.

Latency, not bandwidth, is what a small collective costs; below this size it is most of it.
"""

_MAX_BATCH = 16
"""Groups that travel together at the most."""


class Op(enum.Enum):
    """What the runtime does to one group's unsharded memory.

    PREFETCH is a GATHER for later: the runtime may put it off until memory is free, but not past
    the group's WAIT.
    """

    GATHER = "gather"
    PREFETCH = "prefetch"
    WAIT = "wait"
    FREE = "free"


Action = tuple[Op, int]


class UnshardSchedule:
    """Decides which groups have unsharded memory.

    Groups are numbers.

    Args:
        prefetch_depth: Groups gathered ahead of use; 0 gathers each when it is entered.
        nbytes: Unsharded bytes of each group: small ones are prefetched several at a time, up to
            `BATCH_NBYTES`. Empty: none is small.
        is_idle: No group needs memory of its own (one rank, no casts): uses are noted, and there
            is nothing to do.

    Attributes:
        options: What users chose.
    """

    def __init__(
        self, *, prefetch_depth: int = 1, nbytes: Sequence[int] = (), is_idle: bool = False
    ) -> None:
        self.prefetch_depth = prefetch_depth
        self.batch_nbytes = BATCH_NBYTES if nbytes else 0
        self._nbytes = nbytes
        self._is_idle = is_idle
        self.options = ScheduleOptions()
        self._live: dict[int, None] = {}
        self._in_forward: dict[int, int] = {}
        self._in_recompute: set[int] = set()
        self._in_backward: set[int] = set()
        self._by_hand: set[int] = set()
        self._unwatched: set[int] = set()
        self._unfinished: set[int] = set()
        self._resting: set[int] = set()
        self._prefetched: set[int] = set()
        self._order = ForwardOrder()
        self._pending = PendingBackwards()
        self._hold = False

    def set_sizes(self, nbytes: Sequence[int], *, is_idle: bool) -> None:
        """Take other sizes, between passes."""
        self._nbytes = nbytes
        self._is_idle = is_idle

    # --- state ---

    @property
    def live(self) -> tuple[int, ...]:
        """Groups that have unsharded memory, in the order they got it."""
        return tuple(self._live)

    def in_use(self, group: int) -> bool:
        """Whether a forward, a backward or the user needs the group's memory now."""
        return (
            group in self._in_forward
            or group in self._in_backward
            or group in self._in_recompute
            or group in self._by_hand
            or group in self._unwatched
        )

    def in_forward(self, group: int) -> bool:
        """Whether a forward of the group is under way; another may have been called within it."""
        return group in self._in_forward

    def _is_claimed(self, group: int) -> bool:
        """Whether the group's memory is needed now or was asked to stay."""
        return self.in_use(group) or group in self._unfinished or group in self._resting

    def _spare(self) -> list[int]:
        return [
            g
            for g in self._live
            if not self._is_claimed(g) and g not in self.options.no_reshard_after_forward
        ]

    # --- forward ---

    def begin_pass(self, *, has_changed: bool = False, root: Hashable = None) -> None:
        """A root forward starts.

        Args:
            has_changed: Shards were written to since the last one.
            root: Which module's: what comes next is taken from the last pass of the same one.
        """
        self._order.begin_pass(root)
        self._unwatched.clear()
        self._unfinished.clear()
        self._pending.begin_pass(has_changed=has_changed)

    def enter_forward(self, group: int) -> list[Action]:
        """A group's forward starts: gather it if need be, then the one expected next."""
        actions = self._use(group)
        self._in_forward[group] = self._in_forward.get(group, 0) + 1
        if self._is_idle:
            return actions
        following = self._order.enter(group)
        if group in self.options.next_in_forward:
            return actions + self._prefetch_all(self.options.next_in_forward[group])
        if self.options.prefetch_in_forward:
            return actions + self._prefetch(self._nearest(following))
        return actions

    def exit_forward(
        self,
        group: int,
        *,
        needs_backward: bool,
        is_watched: bool = True,
        is_unfinished: bool = False,
    ) -> list[Action]:
        """A group's forward ends; its memory is freed unless it is kept or the last one.

        Args:
            group: The group.
            needs_backward: A backward of it will be told of.
            is_watched: False: there may be one that nobody tells of; keep the memory for it.
            is_unfinished: Other modules of the group have not run in this pass; keep it for them.
        """
        count = self._in_forward.get(group, 1) - 1
        if count:
            self._in_forward[group] = count
        else:
            self._in_forward.pop(group, None)
            self._by_hand.discard(group)
        if not is_watched:
            self._unwatched.add(group)
        if is_unfinished:
            self._unfinished.add(group)
        else:
            self._unfinished.discard(group)
        if needs_backward:
            self._pending.add(group)
        return self._trim_spare()

    def end_pass(self, *, needs_backward: bool) -> list[Action]:
        """A root forward ends: what was prefetched in vain goes, without backward all spare."""
        self._order.end_pass()
        self._unfinished.clear()
        self._in_forward.clear()  # The root may have caught what a layer raised.
        if self._hold:
            return []
        doomed = [g for g in self._spare() if not needs_backward or g in self._prefetched]
        return self._free_all(doomed) + self._trim_spare()

    def enter_recompute(self, group: int) -> list[Action]:
        """A forward runs again inside backward (activation checkpointing)."""
        actions = self._use(group)
        self._in_recompute.add(group)
        return actions

    def exit_recompute(self, group: int) -> list[Action]:
        """The repeated forward ends; its backward follows at once, as a rule."""
        self._in_recompute.discard(group)
        return self._trim_spare()

    # --- backward ---

    @property
    def current_pass(self) -> int:
        """The pass that began last, to be given to `enter_backward` of a forward in it."""
        return self._pending.number

    def awaits_backward(self, group: int) -> bool:
        """Whether a forward of the group may still have its backward."""
        return self._pending.awaits(group)

    def enter_backward(self, group: int, in_pass: int | None = None) -> list[Action]:
        """The first gradient of a group's outputs came: gather it, then the one before it.

        Args:
            group: The group.
            in_pass: Of its forward. None: not known, the last one that it is on.
        """
        self._pending.reach(group, in_pass)
        actions = [] if group in self.options.no_unshard_in_backward else self._use(group)
        self._in_backward.add(group)
        if self._is_idle:
            return actions
        if group in self.options.next_in_backward:
            return actions + self._prefetch_all(self.options.next_in_backward[group])
        if self.options.prefetch_in_backward is BackwardPrefetch.PRE:
            return actions + self._prefetch(self._before(group, in_pass))
        return actions

    def exit_backward(
        self, group: int, in_pass: int | None = None, *, is_last: bool = False
    ) -> list[Action]:
        """The gradients of a group's inputs came for all that is under way.

        Args:
            group: The group.
            in_pass: As in `enter_backward`.
            is_last: No other forward of it has its backward in this run of the engine. False: not
                known; one that may have stays if there is room.
        """
        self._in_backward.discard(group)
        self._in_recompute.discard(group)
        self._by_hand.discard(group)
        is_late = self.options.prefetch_in_backward is BackwardPrefetch.POST and not self._is_idle
        before = self._before(group, in_pass) if is_late else []
        self._pending.remove(group, in_pass)
        if self._is_idle:
            return []
        return self._leave_backward(group, in_pass, is_last=is_last) + self._prefetch(before)

    def _leave_backward(self, group: int, in_pass: int | None, *, is_last: bool) -> list[Action]:
        if self._hold or group in self._in_forward or group not in self._live:
            return []
        if group in self.options.several_modules and self._pending.awaits_in(group, in_pass):
            self._unfinished.add(group)
            return []
        self._unfinished.discard(group)
        if not is_last and self._pending.awaits(group):
            return self._trim_spare()
        if group in self.options.no_reshard_after_backward:
            self._resting.add(group)
            return []
        return self._free_all([group])

    def end_backward(self) -> list[Action]:
        """The engine is done: free all that no forward is using."""
        self._pending.end_backward()
        self._in_backward.clear()
        self._in_recompute.clear()
        self._unwatched.clear()
        self._unfinished.clear()
        if self._hold:
            return []
        self._resting.update(g for g in self._live if g in self.options.no_reshard_after_backward)
        return self._free_all([g for g in self._live if not self._is_claimed(g)])

    def hold(self, *, on: bool) -> None:
        """Free nothing: a graph of the backward itself (``create_graph=True``) reads the memory."""
        self._hold = on

    # --- by hand ---

    def unshard(self, group: int) -> list[Action]:
        """The user asks for a group's memory; its next exit or `reshard` gives it back."""
        actions = [] if group in self._live else self._gather(group)
        self._prefetched.discard(group)
        self._by_hand.add(group)
        return actions

    def refresh(self, group: int) -> list[Action]:
        """A shard changed since the group was gathered: free it if nothing computes with it."""
        if group not in self._live or group in self._in_forward or group in self._in_backward:
            return []
        actions = self._free_all([group])
        return actions + self._gather(group) if group in self._by_hand else actions

    def reshard(self, group: int) -> list[Action]:
        """The user gives a group's memory back."""
        self._by_hand.discard(group)
        self._unwatched.discard(group)
        self._unfinished.discard(group)
        self._resting.discard(group)
        self._in_backward.discard(group)
        return self._free_all([group]) if group in self._live else []

    def reset(self) -> list[Action]:
        """Forget everything after an exception; all memory goes back."""
        actions = self._free_all(list(self._live))
        for state in (
            self._in_recompute,
            self._in_backward,
            self._by_hand,
            self._unwatched,
            self._unfinished,
            self._resting,
            self._prefetched,
        ):
            state.clear()
        self._in_forward.clear()
        self._pending.clear()
        self._order.clear()
        self._hold = False
        return actions

    # --- parts ---

    def _use(self, group: int) -> list[Action]:
        if self._is_idle:
            return []
        actions = [] if group in self._live else self._gather(group)
        self._prefetched.discard(group)
        self._resting.discard(group)
        actions.append((Op.WAIT, group))
        return actions

    def _gather(self, group: int) -> list[Action]:
        self._live[group] = None
        return [(Op.GATHER, group)]

    def _prefetch(self, candidates: Sequence[int]) -> list[Action]:
        """Gather the nearest candidates: as deep as is asked for, or a batch of small ones."""
        if self.prefetch_depth == 0:
            return []
        chosen = [] if self._prefetched else self._batch(candidates)
        is_batch = bool(chosen)
        if not is_batch:
            chosen = [g for g in candidates[: self.prefetch_depth] if g not in self._live]
        if not chosen:
            return []
        actions = self._trim_spare(room=self.prefetch_depth if is_batch else len(chosen))
        if not is_batch:
            chosen = chosen[: max(self.prefetch_depth - len(self._spare()), 0)]
        for group in chosen:
            self._prefetched.add(group)
            self._live[group] = None
            actions.append((Op.PREFETCH, group))
        return actions

    def _prefetch_all(self, groups: Sequence[int]) -> list[Action]:
        """Gather what the user named, however much it is."""
        actions = []
        for group in groups:
            if group not in self._live:
                self._prefetched.add(group)
                self._live[group] = None
                actions.append((Op.PREFETCH, group))
        return actions

    def _batch(self, candidates: Sequence[int]) -> list[int]:
        """Return the first candidates that are small enough to travel together; maybe none."""
        batch: list[int] = []
        nbytes = 0
        for group in candidates:
            nbytes += self._nbytes[group] if self.batch_nbytes else 0
            if nbytes >= self.batch_nbytes or group in self._live:
                break
            batch.append(group)
        return batch

    def _trim_spare(self, room: int = 0) -> list[Action]:
        """Free used spare groups, oldest first, until `room` more fit; prefetched ones stay."""
        if self._hold:
            return []
        spare = self._spare()
        surplus = len(spare) + room - max(self.prefetch_depth, 1)
        if surplus <= 0:
            return []
        used = [g for g in spare if g not in self._prefetched]
        return self._free_all(used[:surplus])

    def _free_all(self, groups: Iterable[int]) -> list[Action]:
        actions: list[Action] = []
        for group in groups:
            del self._live[group]
            self._prefetched.discard(group)
            self._resting.discard(group)
            actions.append((Op.FREE, group))
        return actions

    def _before(self, group: int, in_pass: int | None) -> list[int]:
        """Return what backward needs after `group`, nearest first."""
        idle = self.options.no_unshard_in_backward
        return self._nearest(g for g in self._pending.before(group, in_pass) if g not in idle)

    def _nearest(self, groups: Iterable[int]) -> list[int]:
        """Return the first few different ones."""
        longest = max(self.prefetch_depth, _MAX_BATCH if self.batch_nbytes else 0)
        few: dict[int, None] = {}
        for group in groups:
            if len(few) == longest:
                break
            few[group] = None
        return list(few)
