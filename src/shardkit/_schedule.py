"""When groups are gathered, freed and reduced: decisions only, no torch, no communication.

`UnshardSchedule` and `ReduceOrder` are state machines: an event in, a list of actions out. The
runtime carries the actions out; tests compare the lists.

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
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit._tape import Tape

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


BATCH_NBYTES = 1 << 20
"""Neighbouring groups that are smaller than this together travel in one collective.

Latency, not bandwidth, is what a small collective costs; below this size it is most of it.
"""


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


class BackwardPrefetch(enum.Enum):
    """When backward gathers the group that it needs next.

    PRE: Before the gradients of the current group are computed: full overlap, two groups alive.
    POST: After them: one group less alive, less overlap.
    NONE: When it is entered.
    """

    PRE = "pre"
    POST = "post"
    NONE = "none"


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
        self._order: list[int] = []
        self._last_orders: dict[Hashable, list[int]] = {}
        self._pass: Hashable = None
        self._position = 0
        self._tape = Tape()
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
        return [g for g in self._live if not self._is_claimed(g) and g not in self.options.kept]

    # --- forward ---

    def begin_pass(self, *, has_changed: bool = False, root: Hashable = None) -> None:
        """A root forward starts.

        Args:
            has_changed: Shards were written to since the last one.
            root: Which module's: what comes next is taken from the last pass of the same one.
        """
        self._order = []
        self._pass = root
        self._position = 0
        self._unwatched.clear()
        self._unfinished.clear()
        self._tape.begin_pass(has_changed=has_changed)

    def enter_forward(self, group: int) -> list[Action]:
        """A group's forward starts: gather it if need be, then the one expected next."""
        actions = self._use(group)
        self._in_forward[group] = self._in_forward.get(group, 0) + 1
        if self._is_idle:
            return actions
        if self._order[-1:] != [group]:  # Ranks may use different modules of a list.
            self._order.append(group)
        expected = self._expect_next(group)
        if group in self.options.next_in_forward:
            return actions + self._prefetch_all(self.options.next_in_forward[group])
        return actions + (self._prefetch(expected) if self.options.forward_prefetch else [])

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
            self._tape.add(group)
        return self._trim_spare()

    def end_pass(self, *, needs_backward: bool) -> list[Action]:
        """A root forward ends: what was prefetched in vain goes, without backward all spare."""
        self._last_orders[self._pass] = self._order
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
        return self._tape.number

    def awaits_backward(self, group: int) -> bool:
        """Whether a forward of the group may still have its backward."""
        return self._tape.awaits(group)

    def enter_backward(self, group: int, in_pass: int | None = None) -> list[Action]:
        """The first gradient of a group's outputs came: gather it, then the one before it.

        Args:
            group: The group.
            in_pass: Of its forward. None: not known, the last one that it is on.
        """
        self._tape.reach(group, in_pass)
        actions = [] if group in self.options.idle_in_backward else self._use(group)
        self._in_backward.add(group)
        if self._is_idle:
            return actions
        if group in self.options.next_in_backward:
            return actions + self._prefetch_all(self.options.next_in_backward[group])
        if self.options.backward_prefetch is BackwardPrefetch.PRE:
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
        is_late = self.options.backward_prefetch is BackwardPrefetch.POST and not self._is_idle
        before = self._before(group, in_pass) if is_late else []
        self._tape.remove(group, in_pass)
        if self._is_idle:
            return []
        return self._leave_backward(group, in_pass, is_last=is_last) + self._prefetch(before)

    def _leave_backward(self, group: int, in_pass: int | None, *, is_last: bool) -> list[Action]:
        if self._hold or group in self._in_forward or group not in self._live:
            return []
        if group in self.options.several_modules and self._tape.awaits_in(group, in_pass):
            self._unfinished.add(group)
            return []
        self._unfinished.discard(group)
        if not is_last and self._tape.awaits(group):
            return self._trim_spare()
        if group in self.options.resting:
            self._resting.add(group)
            return []
        return self._free_all([group])

    def end_backward(self) -> list[Action]:
        """The engine is done: free all that no forward is using."""
        self._tape.end_backward()
        self._in_backward.clear()
        self._in_recompute.clear()
        self._unwatched.clear()
        self._unfinished.clear()
        if self._hold:
            return []
        self._resting.update(g for g in self._live if g in self.options.resting)
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
        self._tape.clear()
        self._order = []
        self._last_orders.clear()  # Ranks may have recorded different ones.
        self._position = 0
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

    def _expect_next(self, group: int) -> list[int]:
        """Follow the last pass: return what came after `group` there, nearest first."""
        order, position = self._last_orders.get(self._pass, []), self._position
        while position < len(order) and order[position] != group:
            position += 1
        if position >= len(order):
            return []
        self._position = position + 1
        following = dict.fromkeys(order[position + 1 :])
        return list(itertools.islice(following, self._longest_batch))

    def _before(self, group: int, in_pass: int | None) -> list[int]:
        """Return the groups whose forward ended before `group`'s last one, nearest first."""
        return self._nearest(self._tape.before(group, in_pass))

    def _nearest(self, groups: Iterable[int]) -> list[int]:
        """Return the first few different groups that backward needs."""
        needed = (g for g in groups if g not in self.options.idle_in_backward)
        return list(itertools.islice(dict.fromkeys(needed), self._longest_batch))

    @property
    def _longest_batch(self) -> int:
        return max(self.prefetch_depth, _MAX_BATCH if self.batch_nbytes else 0)


_MAX_BATCH = 16
"""Groups that travel together at the most."""


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
