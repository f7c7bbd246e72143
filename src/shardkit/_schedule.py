"""When groups are gathered, freed and reduced: decisions only, no torch, no communication."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit._settings import BackwardPrefetch

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterable, Iterator, Sequence


# --- options --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ScheduleOptions:
    """Choices of users, by group number.

    They may change between passes: then a set is replaced by another one, and never written.
    """

    # Groups that are not resharded after forward.
    no_reshard_after_forward: set[int] = field(default_factory=set)
    # Groups of more than one module, which are not freed between their modules in backward either.
    several_modules: set[int] = field(default_factory=set)
    # Groups that are not resharded after backward.
    no_reshard_after_backward: set[int] = field(default_factory=set)
    # Groups whose parameters backward does not need.
    no_unshard_in_backward: set[int] = field(default_factory=set)
    prefetch_in_forward: bool = True  # Whether forward gathers ahead.
    # Moment when backward gathers ahead.
    prefetch_in_backward: BackwardPrefetch = BackwardPrefetch.PRE
    # Groups to gather when a group is entered, instead of those that came next in the last pass.
    next_in_forward: dict[int, list[int]] = field(default_factory=dict)
    # Groups to gather when a group is entered in backward.
    next_in_backward: dict[int, list[int]] = field(default_factory=dict)


# --- the order of forward -------------------------------------------------------------------------


class ForwardOrder:
    """The order of groups in the last pass of every root, which predicts the next pass.

    Each root has its own order: a head that is called alone, chunk by chunk, does not disturb the
    model's order.
    """

    def __init__(self) -> None:
        # With each order, the last position of each group in it.
        self._last_orders: dict[Hashable, tuple[list[int], dict[int, int]]] = {}
        self._whole_orders: dict[Hashable, list[int]] = {}
        self._order: list[int] = []
        self._root: Hashable = None
        self._position = 0

    def begin_pass(self, root: Hashable) -> None:
        """Begin a pass of a root."""
        self._order = []
        self._root = root
        self._position = 0

    def enter(self, group: int) -> Iterable[int] | None:
        """Note a group that is entered; return the groups that followed it in the last pass.

        None: it was entered just before, and nothing is to be gathered for later. Ranks may use
        more modules of a list, or fewer, and must gather alike.
        """
        if self._order[-1:] == [group]:
            return None
        self._order.append(group)
        order, last_positions = self._last_orders.get(self._root, ([], {}))
        position = self._position
        if last_positions.get(group, -1) < position:
            return ()
        while order[position] != group:
            position += 1
        self._position = position + 1
        return (order[index] for index in range(position + 1, len(order)))

    def end_pass(self) -> None:
        """End the pass."""
        order = self._whole_orders[self._root] = self._order
        self._last_orders[self._root] = order, {group: i for i, group in enumerate(order)}

    def last(self, root: Hashable) -> Sequence[int]:
        """Return the order of the last pass of a root that came to its end; `clear` keeps it.

        Ranks decide by this order, so it must be equal on all ranks even after an exception on one.
        """
        return self._whole_orders.get(root, ())

    def clear(self) -> None:
        """Drop all orders: after an exception ranks may have noted different ones."""
        self._last_orders.clear()
        self._order = []
        self._position = 0


# --- the state of a group -------------------------------------------------------------------------


class Memory(enum.Enum):
    """Whether a group has unsharded memory.

    PREFETCHED: It has memory, or will have it soon, and nothing has needed that memory yet.
    """

    FREED = "freed"
    PREFETCHED = "prefetched"
    LIVE = "live"


@dataclass(slots=True)
class GroupState:
    """Where one group is in a step; print its `repr` first when a step goes wrong."""

    number: int  # Number of the group.
    memory: Memory = Memory.FREED  # Whether it has unsharded memory.
    num_forwards: int = 0  # Number of forwards that are under way, one inside another.
    in_recompute: bool = False  # Whether a forward runs again inside backward.
    # Number of forwards of it that reentrant checkpoints have run again, and not left in backward.
    num_recomputed: int = 0
    in_backward: bool = False  # Whether backward is inside one of its forwards.
    is_user_held: bool = False  # Whether the user called `unshard`.
    # Whether it stays user-held through forwards and backwards until `reshard`.
    is_lent: bool = False
    has_unseen_backward: bool = False  # Whether an ended forward's backward will not be reported.
    has_unreported_exit: bool = False  # Whether one may begin whose end will not be reported.
    is_retained: bool = False  # Whether the graph of the last backward was retained.
    awaits_other_modules: bool = False  # Whether other modules of it may run before other groups.
    rests_after_backward: bool = False  # Whether it keeps its memory after backward, by choice.
    num_expected: int = 0  # Number of gradients that come if this backward uses every parameter.
    num_arrived: int = 0  # Number of gradients that came in this backward.
    # Number of forwards that backward is inside, and whose end it reports.
    num_watched: int = 0
    is_complete: bool = False  # Whether this backward brings no more gradients.

    # --- memory ---

    @property
    def in_use(self) -> bool:
        """Whether a forward, a backward or the user needs the memory now."""
        return (
            self.num_forwards > 0
            or self.in_backward
            or self.in_recompute
            or self.is_user_held
            or self.has_unseen_backward
        )

    @property
    def is_claimed(self) -> bool:
        """Whether the memory is needed now or must stay."""
        return self.in_use or self.awaits_other_modules or self.rests_after_backward

    def gather(self, *, ahead: bool) -> None:
        """Get memory, for use now or later."""
        self._require(self.memory is Memory.FREED, "gathered")
        self.memory = Memory.PREFETCHED if ahead else Memory.LIVE

    def use(self) -> None:
        """Mark the memory, which is there, as used."""
        self._require(self.memory is not Memory.FREED, "used")
        self.memory = Memory.LIVE
        self.rests_after_backward = False

    def free(self) -> None:
        """Give the memory back."""
        self._require(self.memory is not Memory.FREED, "freed")
        self.memory = Memory.FREED
        self.rests_after_backward = False

    def leave_forward(self) -> None:
        """Leave a forward; the last one ends the user's hold."""
        self.num_forwards = max(self.num_forwards - 1, 0)
        if not self.num_forwards:
            self.is_user_held = self.is_lent

    def leave_backward(self) -> None:
        """Leave the forwards that backward was inside."""
        self.in_backward = self.in_recompute = False
        self.is_user_held = self.is_lent

    def release(self) -> None:
        """End the user's hold on the memory."""
        self.is_user_held = self.is_lent = False
        self.has_unseen_backward = self.awaits_other_modules = False
        self.rests_after_backward = self.in_backward = False

    def begin_pass(self) -> None:
        """Begin a root's forward; a backward of an earlier one may still come unseen."""
        self.awaits_other_modules = False

    def end_pass(self) -> None:
        """End a root's forward, also after an exception of a layer that the root has caught."""
        self.num_forwards = 0
        self.awaits_other_modules = False

    def end_backward(self) -> None:
        """The engine is done; this ends the user's hold, also if backward did not enter the group.

        Code may use parameters that it has unsharded without the module's forward (fused losses,
        adapters). Ranks must agree, so it does not matter whether gradients came.
        """
        self.is_user_held = self.is_lent
        self.in_backward = self.in_recompute = False
        self.has_unseen_backward = self.awaits_other_modules = False
        self.num_recomputed = 0

    # --- gradients of one backward ---

    def expect_gradients(self, number: int) -> None:
        """Set how many gradients will come, before the first one of a backward."""
        self.num_expected = number

    def count_gradients(self, number: int) -> bool:
        """Note that gradients came; return whether the last expected one is among them."""
        before = self.num_arrived
        self.num_arrived += number
        return before < self.num_expected <= self.num_arrived

    def forget_gradients(self) -> None:
        """Clear the counts of gradients at the end of a backward."""
        self.num_expected = self.num_arrived = self.num_watched = 0
        self.is_complete = False

    def _require(self, is_legal: bool, verb: str) -> None:  # noqa: FBT001
        if not is_legal:
            msg = f"a group cannot be {verb} now: {self!r}"
            raise RuntimeError(msg)


class _States(dict[int, GroupState]):
    """Records of groups by number; the first access makes a record."""

    def __missing__(self, group: int) -> GroupState:
        """Make the record of a group."""
        state = self[group] = GroupState(group)
        return state


# --- forwards that wait for a backward ------------------------------------------------------------
#
# Ranks decide by these records what to prefetch, keep and reduce. So the records hold only facts
# that are the same on all ranks: modules called, engine runs that began and ended, shards that
# changed. Whether a graph still exists is no such fact: one rank may have kept an output that other
# ranks dropped.

MAX_PASSES = 1024
"""Passes that are kept; an evaluation that does not switch gradients off adds more and more."""

_numbers = itertools.count(1)  # One count per process: a forward may outlive its root.


@dataclass(slots=True)
class _Pass:
    """Groups of one pass, in the order in which their forwards ended, and how often each is there.

    Searches in the list would take longer with each group of a model.
    """

    groups: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)


class PendingBackwards:
    """The groups that await a backward, by pass, in the order in which their forwards ended.

    A pass is dropped at the end of a backward that reached it, or when parameters have changed,
    because its backward would then be an error. A pass without a backward stays until then. If the
    forward of the pass's root still runs, only the forwards that backward reached are dropped: the
    root may call ``backward()`` on a loss inside its forward, and return another loss.

    A wrong prediction costs at most one extra gather or reduction, identically on all ranks.
    """

    def __init__(self) -> None:
        self.number = 0  # Number of the pass that began last.
        self._is_open = False
        self._last = _Pass()
        self._passes: dict[int, _Pass] = {}
        self._reached: set[int] = set()
        # Passes of the forwards that backward is inside of, by group.
        self._inside: dict[int, list[int]] = {}

    def begin_pass(self, *, has_changed: bool) -> None:
        """Begin a new pass; if parameters have changed, drop all earlier passes."""
        if has_changed:
            self._passes.clear()
        elif not self._last.groups:
            self._passes.pop(self.number, None)
        if len(self._passes) >= MAX_PASSES:
            del self._passes[next(iter(self._passes))]
        self.number = next(_numbers)
        self._is_open = True
        self._last = self._passes[self.number] = _Pass()

    def end_pass(self) -> None:
        """Note that the root's forward has ended."""
        self._is_open = False

    def add(self, group: int) -> None:
        """Note that a forward of the group has ended that may have a backward."""
        self._last.groups.append(group)
        self._last.counts[group] = self._last.counts.get(group, 0) + 1

    def reach(self, group: int, in_pass: int | None) -> None:
        """Note that backward has reached a forward of the group; None: its pass is not known."""
        number = self._number_of(group) if in_pass is None else in_pass
        if number is not None:
            self._reached.add(number)
            self._inside.setdefault(group, []).append(number)

    def remove(self, group: int, in_pass: int | None) -> None:
        """Remove the group's last forward in a pass, as given to `reach`: its backward is done."""
        number = self._number_of(group) if in_pass is None else in_pass
        if number is not None:
            self._forget(number, group)
            inside = self._inside.get(group, [])
            if number in inside:
                inside.remove(number)

    def end_backward(self) -> None:
        """Drop the passes that backward reached, at the end of the engine's run."""
        for number in self._reached:
            if number != self.number or not self._is_open:
                self._passes.pop(number, None)
        for group, inside in self._inside.items():
            for number in inside:
                self._forget(number, group)
        self._reached.clear()
        self._inside.clear()

    def clear(self) -> None:
        """Drop all passes."""
        self._is_open = False
        self._last = _Pass()
        self._passes.clear()
        self._reached.clear()
        self._inside.clear()

    @property
    def groups(self) -> set[int]:
        """Groups of which any forward may still have a backward."""
        return {group for each in self._passes.values() for group in each.counts}

    @property
    def expects_last(self) -> bool:
        """Whether any forward of the pass that began last may have a backward."""
        return bool(self._last.groups)

    def awaits(self, group: int, in_pass: int | None = None) -> bool:
        """Whether any forward of the group, or one in a pass, may still have a backward."""
        if in_pass is not None:
            return in_pass in self._passes and group in self._passes[in_pass].counts
        return any(group in each.counts for each in self._passes.values())

    def awaits_another(self, group: int) -> bool:
        """Whether a forward of the group that backward has not reached may have a backward."""
        num_inside = len(self._inside.get(group, ()))
        return sum(each.counts.get(group, 0) for each in self._passes.values()) > num_inside

    def before(self, group: int, in_pass: int | None) -> Iterator[int]:
        """Yield the groups whose forwards ended before the group's last one, nearest first.

        Nothing is yielded if the group is not in the pass. Groups of earlier passes follow, because
        one backward may go through several passes. Forwards of one group that ended one after the
        other count as one, because ranks may run more modules of a list, or fewer.
        """
        previous: int | None = None
        for number in reversed(self._passes):
            if in_pass is not None and number > in_pass:
                continue
            for other in reversed(self._passes[number].groups):
                if previous is None:
                    previous = group if other == group else None
                elif other != previous:
                    previous = other
                    yield other
            if in_pass is not None and previous is None:
                return

    def _number_of(self, group: int) -> int | None:
        """Return the number of the last pass that has the group."""
        numbers = reversed(self._passes)
        return next((n for n in numbers if group in self._passes[n].counts), None)

    def _forget(self, number: int, group: int) -> None:
        """Remove the last forward of a group from a pass."""
        of = self._passes.get(number)
        if of is None or group not in of.counts:
            return
        index = len(of.groups) - 1
        while of.groups[index] != group:  # It is near the end.
            index -= 1
        del of.groups[index]
        of.counts[group] -= 1
        if not of.counts[group]:
            del of.counts[group]


# --- the order of reductions ----------------------------------------------------------------------


class ReduceOrder:
    """The order of reductions: the same on all ranks, each group once per backward.

    Ranks may use different parameters. So different groups may complete first on different ranks,
    and a group may not complete at all. But the collectives of one process group must be issued in
    the same order on all ranks. So groups are reduced in the reverse of the order in which forward
    entered them, and a complete group waits for the groups before it. When the engine is done, the
    groups that are not complete are reduced, with zeros for missing gradients.
    """

    def __init__(self) -> None:
        self._entered: dict[int, None] = {}
        self._ended: dict[int, None] = {}
        self._queue: deque[int] = deque()  # Groups that wait, in the order of their reduction.
        self._waiting: set[int] = set()  # The same groups.
        self._reached: dict[int, None] = {}
        self._complete: set[int] = set()
        self._issued: set[int] = set()

    @property
    def entered(self) -> tuple[int, ...]:
        """Groups that forwards entered which may have a backward, in order."""
        return tuple(self._entered)

    def expects(self, group: int) -> bool:
        """Whether a forward entered the group whose backward may be this one."""
        return group in self._entered

    def enter_forward(self, group: int) -> bool:
        """Note a forward of a group that may have a backward; return whether it is the first."""
        is_first = group not in self._entered
        self._entered[group] = None
        return is_first

    def withdraw(self, group: int) -> None:
        """Note that the first forward that entered the group has no backward after all."""
        self._entered.pop(group, None)

    def begin_backward(self) -> None:
        """Fix the order at the start of a backward."""
        self._queue = deque(reversed(self._entered))
        self._waiting = set(self._queue)
        self._reached.clear()
        self._complete.clear()
        self._issued.clear()

    def reach(self, group: int) -> None:
        """Note that backward has come to a group; if it does not wait, the graph was retained."""
        if group not in self._waiting:
            self._reached[group] = None

    def complete(self, group: int) -> list[int]:
        """Note that all gradients of a group have come; return the groups to reduce now.

        A group that was already reduced in this backward, or that no forward entered, is reduced at
        once.
        """
        if group in self._issued or group not in self._waiting:
            self._reached.pop(group, None)
            return [group]
        self._complete.add(group)
        ready = []
        while self._queue and self._queue[0] in self._complete:
            ready.append(self._queue.popleft())
        self._waiting.difference_update(ready)
        self._issued.update(ready)
        return ready

    def end_backward(self) -> list[int]:
        """Return the groups that are left when the engine is done, in order."""
        rest = [*self._queue, *self._reached]
        self.cancel()
        self._ended, self._entered = self._entered, {}
        return rest

    def keep(self, awaited: Container[int]) -> None:
        """After the end: groups of other forwards, which await their backward, stay entered."""
        self._entered = {**{g: None for g in self._ended if g in awaited}, **self._entered}
        self._ended = {}

    def cancel(self) -> None:
        """Cancel reductions: no gradient came in this backward (``autograd.grad``)."""
        self._queue.clear()
        self._waiting.clear()
        self._reached.clear()

    def reset(self) -> None:
        """Drop all state after an exception."""
        self.cancel()
        self._entered.clear()
        self._ended.clear()


# --- gathers and frees ----------------------------------------------------------------------------
#
# `UnshardSchedule` is a state machine: it takes an event and returns a list of actions. The runtime
# carries the actions out; tests compare the lists.
# ARCHITECTURE.md ("When a group has memory") says what each event does, and what spare groups are.

BATCH_NBYTES = 1 << 20
"""Neighbouring groups whose sizes add up to less than this travel in one collective.

A small collective costs latency, not bandwidth; below this size latency is most of its time.
"""

_MAX_BATCH = 16  # Largest number of groups that travel together.


class Op(enum.Enum):
    """Action of the runtime on one group's unsharded memory.

    PREFETCH is a GATHER for later: the runtime may delay it until memory is free, but not beyond
    the group's WAIT.
    """

    GATHER = "gather"
    PREFETCH = "prefetch"
    WAIT = "wait"
    FREE = "free"


Action = tuple[Op, int]


class UnshardSchedule:
    """State machine that decides which groups have unsharded memory.

    Groups are numbers.
    """

    def __init__(self, *, nbytes: Sequence[int] = (), is_idle: bool = False) -> None:
        self.batch_nbytes = BATCH_NBYTES if nbytes else 0
        self.options = ScheduleOptions()  # Options that users chose.
        # Unsharded bytes of each group: several small groups are prefetched at a time, up to
        # `BATCH_NBYTES`. Empty: no group is small.
        self._nbytes = nbytes
        # Whether no group needs memory of its own (one rank, no casts). Then uses are noted, and
        # there are no actions.
        self._is_idle = is_idle
        self.states = _States()  # Records of the groups; only the schedule changes their memory.
        # Groups of several modules that forwards have left, and after which no other group was
        # entered. They keep their memory: ranks may run different modules of them, so no rank may
        # decide by which modules have run.
        self.visited: set[int] = set()
        self._live: dict[int, GroupState] = {}
        self._ahead: set[int] = set()  # Live groups that are prefetched and not used so far.
        # Groups that this rank freed in this backward before other ranks may do so. Decisions count
        # them as live.
        self._early: set[int] = set()
        # Live groups that are freed when nothing claims them; the others rest or are kept by
        # choice. `_kept` is the choice by which these were selected.
        self._passing: dict[int, GroupState] = {}
        self._kept: set[int] = self.options.no_reshard_after_forward
        self._order = ForwardOrder()
        self._pending = PendingBackwards()
        self.is_held = False  # Whether `hold` is on.

    def set_sizes(self, nbytes: Sequence[int], *, is_idle: bool) -> None:
        """Set new sizes, between passes."""
        self._nbytes = nbytes
        self._is_idle = is_idle

    # --- state ---

    @property
    def live(self) -> tuple[int, ...]:
        """Groups that have unsharded memory, in the order they got it."""
        return tuple(self._live)

    def in_use(self, group: int) -> bool:
        """Whether a forward, a backward or the user needs the group's memory now."""
        return self.states[group].in_use

    def stays_shown(self, group: int) -> bool:
        """Whether modules go on to hold the unsharded parameters: in use, or for other modules."""
        state = self.states[group]
        return state.in_use or state.awaits_other_modules

    @property
    def lends(self) -> bool:
        """Whether any group is unsharded until `reshard`."""
        return any(state.is_lent for state in self._live.values())

    def in_forward(self, group: int) -> bool:
        """Whether a forward of the group is under way; another may have been called within it."""
        return self.states[group].num_forwards > 0

    def last_order(self, root: Hashable) -> Sequence[int]:
        """Return the groups that the last pass of a root entered; none if it made none."""
        return self._order.last(root)

    def has_memory(self, group: int) -> bool:
        """Whether a group has unsharded memory."""
        return group in self._live

    def _spare(self) -> list[GroupState]:
        if self._kept is not self.options.no_reshard_after_forward:
            self._kept = self.options.no_reshard_after_forward
            self._passing = {
                number: state
                for number, state in self._live.items()
                if number not in self._kept and not state.rests_after_backward
            }
        return [s for s in self._passing.values() if not (s.in_use or s.awaits_other_modules)]

    def _rest(self, group: int) -> None:
        """Let a group keep its memory after backward, by choice."""
        self._live[group].rests_after_backward = True
        self._passing.pop(group, None)

    # --- forward ---

    def begin_pass(self, *, has_changed: bool = False, root: Hashable = None) -> None:
        """Begin the forward of a root.

        Args:
            has_changed: Whether shards were written since the last one.
            root: Key of the root module; its last pass predicts which group comes next.
        """
        self._order.begin_pass(root)
        for state in self.states.values():
            state.begin_pass()
        self.visited.clear()
        self._pending.begin_pass(has_changed=has_changed)

    def visits_before(self, group: int) -> list[int]:
        """Return the groups in `visited` that are done when a forward enters this group, in order.

        What is written to them is compared group by group, on all ranks in the same order.
        """
        return sorted(n for n in self.visited if n != group and not self.states[n].num_forwards)

    def enter_forward(self, group: int) -> list[Action]:
        """Enter a group's forward: gather the group if need be, then the one expected next."""
        state = self.states[group]
        actions = (self._end_visits(group) if self.visited else []) + self._use(state)
        state.num_forwards += 1
        if self._is_idle:
            return actions
        following = self._order.enter(group)
        if following is None:
            return actions
        if group in self.options.next_in_forward:
            return actions + self._prefetch_all(self.options.next_in_forward[group])
        if self.options.prefetch_in_forward:
            return actions + self._prefetch(following)
        return actions

    def _end_visits(self, group: int) -> list[Action]:
        """Free groups of several modules, as if their forward had ended now."""
        ended = self.visits_before(group)
        for number in ended:
            self.states[number].awaits_other_modules = False
        self.visited.difference_update(ended, (group,))
        return self._trim_spare() if ended else []

    def exit_forward(
        self,
        group: int,
        *,
        needs_backward: bool,
        is_watched: bool = True,
        reports_exit: bool = True,
    ) -> list[Action]:
        """Leave a group's forward; its memory is freed unless it is kept or the last one.

        A group of several modules keeps it until a forward enters another group.

        Args:
            group: The group.
            needs_backward: Whether a backward of this forward will be reported.
            is_watched: Whether every backward of it is reported. If not, the memory is kept for the
                others.
            reports_exit: Whether its backward reports that it is done with the group.
        """
        state = self.states[group]
        state.leave_forward()
        state.has_unseen_backward |= not is_watched
        if group in self.options.several_modules:
            state.awaits_other_modules = True
            self.visited.add(group)
        if needs_backward:
            self._pending.add(group)
            state.has_unreported_exit |= not reports_exit
        return self._trim_spare()

    def end_pass(self, *, needs_backward: bool) -> list[Action]:
        """End a root's forward: free unused prefetches, and without backward all spare groups."""
        self._order.end_pass()
        # In `functional_call` outputs may require gradients of the given values alone.
        needs_backward = needs_backward and self._pending.expects_last
        self._pending.end_pass()
        for state in self.states.values():
            state.end_pass()
        self.visited.clear()
        if self.is_held:
            return []
        doomed = [s for s in self._spare() if not needs_backward or s.memory is Memory.PREFETCHED]
        return self._free_all(doomed) + self._trim_spare()

    def enter_recompute(self, group: int) -> list[Action]:
        """Enter a forward that runs again inside backward (activation checkpointing)."""
        state = self.states[group]
        actions = self._use(state)
        state.in_recompute = True
        return actions

    def exit_recompute(self, group: int) -> list[Action]:
        """Leave the repeated forward; usually its backward follows at once."""
        state = self.states[group]
        state.in_recompute = False
        state.awaits_other_modules = group in self.options.several_modules
        state.num_recomputed += not self._pending.awaits(group)
        return self._trim_spare()

    # --- backward ---

    @property
    def current_pass(self) -> int:
        """Number of the pass that began last; `enter_backward` takes it for forwards in it."""
        return self._pending.number

    def awaits_backward(self, group: int) -> bool:
        """Whether a forward of the group may still have its backward."""
        return self._pending.awaits(group)

    def awaits_unreported(self, group: int) -> bool:
        """Whether another forward of the group may have a backward that does not report its end."""
        state = self.states[group]
        if not state.has_unreported_exit:
            return False
        return state.is_retained or self._pending.awaits_another(group)

    @property
    def awaited(self) -> set[int]:
        """Groups of which a forward may still have its backward."""
        return self._pending.groups

    def enter_backward(self, group: int, in_pass: int | None = None) -> list[Action]:
        """Enter a group's backward at its first gradient: gather it, then the group before it.

        `in_pass` is the pass of its forward; None: unknown, take the last pass that has the group.
        """
        self._pending.reach(group, in_pass)
        state = self.states[group]
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
        """Leave a group's backward: the gradients of the inputs of all open forwards came.

        With `is_last` no other forward of the group has its backward in this run of the engine.
        Without it that is unknown: a group that may have one keeps its memory if there is room.
        """
        state = self.states[group]
        state.leave_backward()
        is_late = self.options.prefetch_in_backward is BackwardPrefetch.POST and not self._is_idle
        before: list[int] = []
        if is_late:
            before += itertools.islice(self._before(group, in_pass), _MAX_BATCH)
        self._pending.remove(group, in_pass)
        if in_pass is None and state.num_recomputed:
            state.num_recomputed -= 1
        if self._is_idle and group not in self.options.several_modules:
            return []
        actions = self._leave_backward(state, in_pass, is_last=is_last)
        return actions if state.awaits_other_modules else actions + self._prefetch(before)

    def leave_early(self, group: int, in_pass: int | None = None) -> list[Action]:
        """Leave a group's backward, whose end is not reported: on this rank all gradients came.

        Other ranks may leave it only at the end of backward. So the memory is freed, but nothing is
        gathered, and what is gathered later does not depend on it.
        """
        state = self.states[group]
        state.leave_backward()
        if self._is_idle:
            return []
        actions = self._leave_backward(state, in_pass, is_last=True)
        if actions:
            self._early.add(group)
        return actions

    def _leave_backward(
        self, state: GroupState, in_pass: int | None, *, is_last: bool
    ) -> list[Action]:
        group = state.number
        if self.is_held or state.num_forwards or state.is_lent or state.has_unseen_backward:
            return []
        state.awaits_other_modules = group in self.options.several_modules and (
            state.num_recomputed > 0 or self._pending.awaits(group, in_pass)
        )
        if state.awaits_other_modules or group not in self._live:
            return []
        if not is_last and self._pending.awaits(group):
            return self._trim_spare()
        if group in self.options.no_reshard_after_backward:
            self._rest(group)
            return []
        return self._free_all([state])

    def end_backward(self, *, is_retained: bool = False) -> list[Action]:
        """End a run of the engine: free all groups that no forward is using.

        With `is_retained` another run may go through the same graph.
        """
        self._pending.end_backward()
        self._early.clear()
        for state in self.states.values():
            state.end_backward()
            if state.has_unreported_exit:
                state.is_retained = is_retained
                state.has_unreported_exit = is_retained or self._pending.awaits(state.number)
        if self.is_held:
            return []
        for group in self.options.no_reshard_after_backward.intersection(self._live):
            self._rest(group)
        return self._free_all([s for s in self._live.values() if not s.is_claimed])

    def hold(self, *, on: bool) -> None:
        """Free nothing: a graph of the backward itself (``create_graph=True``) reads the memory."""
        self.is_held = on

    # --- by hand ---

    def unshard(self, group: int, *, until_reshard: bool = False) -> list[Action]:
        """Gather a group for the user; its next exit, or only `reshard`, gives the memory back."""
        state = self.states[group]
        actions = [] if group in self._live else self._gather(state)
        if state.memory is Memory.PREFETCHED:
            state.memory = Memory.LIVE
            self._ahead.discard(group)
        state.is_user_held = True
        state.is_lent |= until_reshard
        return actions

    def refresh(self, group: int) -> list[Action]:
        """Free a group whose shard changed since it was gathered, if nothing computes with it."""
        state = self.states[group]
        if group not in self._live or state.num_forwards or state.in_backward:
            return []
        actions = self._free_all([state])
        return actions + self._gather(state) if state.is_user_held else actions

    def reshard(self, group: int) -> list[Action]:
        """Give a group's memory back for the user."""
        state = self.states[group]
        state.release()
        self.visited.discard(group)
        return self._free_all([state]) if group in self._live else []

    def reset(self) -> list[Action]:
        """Drop all state after an exception, and free all memory."""
        actions = self._free_all(list(self._live.values()))
        self.states.clear()
        self.visited.clear()
        self._early.clear()
        self._pending.clear()
        self._order.clear()
        self.is_held = False
        return actions

    # --- parts ---

    def _use(self, state: GroupState) -> list[Action]:
        if self._is_idle:
            return []
        actions = [] if state.number in self._live else self._gather(state)
        if state.rests_after_backward and state.number not in self._kept:
            self._passing[state.number] = state
        state.use()
        self._ahead.discard(state.number)
        actions.append((Op.WAIT, state.number))
        return actions

    def _gather(self, state: GroupState, *, ahead: bool = False) -> list[Action]:
        state.gather(ahead=ahead)
        self._live[state.number] = state
        if ahead:
            self._ahead.add(state.number)
        if state.number not in self._kept:
            self._passing[state.number] = state
        return [(Op.PREFETCH if ahead else Op.GATHER, state.number)]

    def _prefetch(self, following: Iterable[int]) -> list[Action]:
        """Gather the next group if there is room, or a batch of small groups."""
        may_batch = self.batch_nbytes > 0 and not self._ahead
        first: int | None = None
        batch: list[int] = []
        nbytes = 0
        for group in following:  # Look no farther than needed: this runs for each group.
            first = group if first is None else first
            if not may_batch or group in self._live or group in self._early:
                break
            if group in batch:
                continue
            nbytes += self._nbytes[group]
            if nbytes >= self.batch_nbytes:
                break
            batch.append(group)
            if len(batch) == _MAX_BATCH:
                break
        if batch:
            return self._trim_spare(room=1) + self._prefetch_all(batch)
        if first is None or first in self._live or first in self._early:
            return []
        actions = self._trim_spare(room=1)
        return actions + self._prefetch_all(() if self._spare() else (first,))

    def _prefetch_all(self, groups: Sequence[int]) -> list[Action]:
        """Gather these groups, whatever their size."""
        actions = []
        for group in groups:
            if group not in self._live and group not in self._early:
                actions += self._gather(self.states[group], ahead=True)
        return actions

    def _trim_spare(self, room: int = 0) -> list[Action]:
        """Free used spare groups, oldest first, until `room` more fit; prefetched groups stay."""
        if self.is_held:
            return []
        spare = self._spare()
        surplus = len(spare) + room - 1
        if surplus <= 0:
            return []
        used = [state for state in spare if state.memory is not Memory.PREFETCHED]
        return self._free_all(used[:surplus])

    def _free_all(self, states: Iterable[GroupState]) -> list[Action]:
        actions: list[Action] = []
        for state in states:
            state.free()
            del self._live[state.number]
            self._ahead.discard(state.number)
            self._passing.pop(state.number, None)
            actions.append((Op.FREE, state.number))
        return actions

    def _before(self, group: int, in_pass: int | None) -> Iterable[int]:
        """Return the groups that backward needs after `group`, nearest first."""
        before = self._pending.before(group, in_pass)
        unneeded = self.options.no_unshard_in_backward
        return (other for other in before if other not in unneeded) if unneeded else before
