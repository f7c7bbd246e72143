"""When groups are gathered and freed: decisions only, no torch, no communication.

`UnshardSchedule` is a state machine: an event in, a list of actions out. The runtime carries the
actions out; tests compare the lists.

Live groups (those whose unsharded memory exists) are bounded. Besides the groups in use and those
that are not resharded after forward there are at most `prefetch_depth` spare ones: a prefetched
group, or one whose use is over but whose memory nobody has needed since::

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
from shardkit._schedule.state import GroupState, Memory

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
        prefetch_depth: Number of groups gathered ahead of use; 0 gathers each when it is entered.
        nbytes: Unsharded bytes of each group: small ones are prefetched several at a time, up to
            `BATCH_NBYTES`. Empty: none is small.
        is_idle: Whether no group needs memory of its own (one rank, no casts): uses are noted, and
            there is nothing to do.

    Attributes:
        options: Options that users chose.
    """

    def __init__(
        self, *, prefetch_depth: int = 1, nbytes: Sequence[int] = (), is_idle: bool = False
    ) -> None:
        self.prefetch_depth = prefetch_depth
        self.batch_nbytes = BATCH_NBYTES if nbytes else 0
        self.options = ScheduleOptions()
        self._nbytes = nbytes
        self._is_idle = is_idle
        self._states: dict[int, GroupState] = {}
        self._live: dict[int, GroupState] = {}
        self._order = ForwardOrder()
        self._pending = PendingBackwards()
        self._hold = False

    def set_sizes(self, nbytes: Sequence[int], *, is_idle: bool) -> None:
        """Take other sizes, between passes."""
        self._nbytes = nbytes
        self._is_idle = is_idle

    # --- state ---

    def state(self, group: int) -> GroupState:
        """Return the record of a group; only the schedule changes what is said of memory."""
        state = self._states.get(group)
        if state is None:
            state = self._states[group] = GroupState(group)
        return state

    @property
    def live(self) -> tuple[int, ...]:
        """Groups that have unsharded memory, in the order they got it."""
        return tuple(self._live)

    def in_use(self, group: int) -> bool:
        """Whether a forward, a backward or the user needs the group's memory now."""
        return self.state(group).in_use

    def in_forward(self, group: int) -> bool:
        """Whether a forward of the group is under way; another may have been called within it."""
        return self.state(group).num_forwards > 0

    def last_order(self, root: Hashable) -> Sequence[int]:
        """Return the groups that the last pass of a root entered; none if it made none."""
        return self._order.last(root)

    def _spare(self) -> list[GroupState]:
        kept = self.options.no_reshard_after_forward
        return [s for s in self._live.values() if not s.is_claimed and s.number not in kept]

    # --- forward ---

    def begin_pass(self, *, has_changed: bool = False, root: Hashable = None) -> None:
        """A root forward starts.

        Args:
            has_changed: Whether shards were written to since the last one.
            root: Key of the root module: what comes next is taken from its last pass.
        """
        self._order.begin_pass(root)
        for state in self._states.values():
            state.begin_pass()
        self._pending.begin_pass(has_changed=has_changed)

    def enter_forward(self, group: int) -> list[Action]:
        """A group's forward starts: gather it if need be, then the one expected next."""
        state = self.state(group)
        actions = self._use(state)
        state.num_forwards += 1
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
            needs_backward: Whether a backward of it will be reported.
            is_watched: Whether every backward of it is reported. If not, keep the memory for the
                others.
            is_unfinished: Whether other modules of the group have not run in this pass; keep it for
                them.
        """
        state = self.state(group)
        state.leave_forward()
        state.has_unseen_backward |= not is_watched
        state.awaits_other_modules = is_unfinished
        if needs_backward:
            self._pending.add(group)
        return self._trim_spare()

    def end_pass(self, *, needs_backward: bool) -> list[Action]:
        """A root forward ends: what was prefetched in vain goes, without backward all spare."""
        self._order.end_pass()
        # In `functional_call` outputs may want gradients of given values alone.
        needs_backward = needs_backward and self._pending.expects_last
        self._pending.end_pass()
        for state in self._states.values():
            state.end_pass()
        if self._hold:
            return []
        doomed = [s for s in self._spare() if not needs_backward or s.memory is Memory.PREFETCHED]
        return self._free_all(doomed) + self._trim_spare()

    def enter_recompute(self, group: int) -> list[Action]:
        """A forward runs again inside backward (activation checkpointing)."""
        state = self.state(group)
        actions = self._use(state)
        state.in_recompute = True
        return actions

    def exit_recompute(self, group: int) -> list[Action]:
        """The repeated forward ends; its backward follows at once, as a rule."""
        self.state(group).in_recompute = False
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
            in_pass: Pass of its forward. None: not known, the last one that it is on.
        """
        self._pending.reach(group, in_pass)
        state = self.state(group)
        actions = [] if group in self.options.no_unshard_in_backward else self._use(state)
        state.in_backward = True
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
            in_pass: Pass, as in `enter_backward`.
            is_last: Whether no other forward of it has its backward in this run of the engine.
                False: not known; one that may have stays if there is room.
        """
        state = self.state(group)
        state.leave_backward()
        is_late = self.options.prefetch_in_backward is BackwardPrefetch.POST and not self._is_idle
        before = self._before(group, in_pass) if is_late else []
        self._pending.remove(group, in_pass)
        if self._is_idle:
            return []
        return self._leave_backward(state, in_pass, is_last=is_last) + self._prefetch(before)

    def _leave_backward(
        self, state: GroupState, in_pass: int | None, *, is_last: bool
    ) -> list[Action]:
        group = state.number
        if self._hold or state.num_forwards or group not in self._live:
            return []
        has_modules_left = group in self.options.several_modules and self._pending.awaits_in(
            group, in_pass
        )
        state.awaits_other_modules = has_modules_left
        if has_modules_left:
            return []
        if not is_last and self._pending.awaits(group):
            return self._trim_spare()
        if group in self.options.no_reshard_after_backward:
            state.rests_after_backward = True
            return []
        return self._free_all([state])

    def end_backward(self) -> list[Action]:
        """The engine is done: free all that no forward is using."""
        self._pending.end_backward()
        for state in self._states.values():
            state.end_backward()
        if self._hold:
            return []
        for group in self.options.no_reshard_after_backward.intersection(self._live):
            self._live[group].rests_after_backward = True
        return self._free_all([s for s in self._live.values() if not s.is_claimed])

    def hold(self, *, on: bool) -> None:
        """Free nothing: a graph of the backward itself (``create_graph=True``) reads the memory."""
        self._hold = on

    # --- by hand ---

    def unshard(self, group: int) -> list[Action]:
        """The user asks for a group's memory; its next exit or `reshard` gives it back."""
        state = self.state(group)
        actions = [] if group in self._live else self._gather(state)
        if state.memory is Memory.PREFETCHED:
            state.memory = Memory.LIVE
        state.is_user_held = True
        return actions

    def refresh(self, group: int) -> list[Action]:
        """A shard changed since the group was gathered: free it if nothing computes with it."""
        state = self.state(group)
        if group not in self._live or state.num_forwards or state.in_backward:
            return []
        actions = self._free_all([state])
        return actions + self._gather(state) if state.is_user_held else actions

    def reshard(self, group: int) -> list[Action]:
        """The user gives a group's memory back."""
        state = self.state(group)
        state.release()
        return self._free_all([state]) if group in self._live else []

    def reset(self) -> list[Action]:
        """Forget everything after an exception; all memory goes back."""
        actions = self._free_all(list(self._live.values()))
        self._states.clear()
        self._pending.clear()
        self._order.clear()
        self._hold = False
        return actions

    # --- parts ---

    def _use(self, state: GroupState) -> list[Action]:
        if self._is_idle:
            return []
        actions = [] if state.number in self._live else self._gather(state)
        state.use()
        actions.append((Op.WAIT, state.number))
        return actions

    def _gather(self, state: GroupState, *, ahead: bool = False) -> list[Action]:
        state.gather(ahead=ahead)
        self._live[state.number] = state
        return [(Op.PREFETCH if ahead else Op.GATHER, state.number)]

    def _prefetch(self, candidates: Sequence[int]) -> list[Action]:
        """Gather the nearest candidates: as deep as is asked for, or a batch of small ones."""
        if self.prefetch_depth == 0:
            return []
        has_prefetched = any(s.memory is Memory.PREFETCHED for s in self._live.values())
        chosen = [] if has_prefetched else self._batch(candidates)
        is_batch = bool(chosen)
        if not is_batch:
            chosen = [g for g in candidates[: self.prefetch_depth] if g not in self._live]
        if not chosen:
            return []
        actions = self._trim_spare(room=self.prefetch_depth if is_batch else len(chosen))
        if not is_batch:
            chosen = chosen[: max(self.prefetch_depth - len(self._spare()), 0)]
        return actions + self._prefetch_all(chosen)

    def _prefetch_all(self, groups: Sequence[int]) -> list[Action]:
        """Gather these, however much it is."""
        actions = []
        for group in groups:
            if group not in self._live:
                actions += self._gather(self.state(group), ahead=True)
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
        used = [state for state in spare if state.memory is not Memory.PREFETCHED]
        return self._free_all(used[:surplus])

    def _free_all(self, states: Iterable[GroupState]) -> list[Action]:
        actions: list[Action] = []
        for state in states:
            state.free()
            del self._live[state.number]
            actions.append((Op.FREE, state.number))
        return actions

    def _before(self, group: int, in_pass: int | None) -> list[int]:
        """Return what backward needs after `group`, nearest first."""
        unneeded = self.options.no_unshard_in_backward
        return self._nearest(g for g in self._pending.before(group, in_pass) if g not in unneeded)

    def _nearest(self, groups: Iterable[int]) -> list[int]:
        """Return the first few different ones."""
        longest = max(self.prefetch_depth, _MAX_BATCH if self.batch_nbytes else 0)
        few: dict[int, None] = {}
        for group in groups:
            if len(few) == longest:
                break
            few[group] = None
        return list(few)
