"""Laws of the schedule over random events: what hooks can report, in any order they can come in."""

from __future__ import annotations

import collections
import typing

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from shardkit._schedule import BATCH_NBYTES, Action, Op, ReduceOrder, UnshardSchedule

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


ROOT = 0
groups = st.integers(0, 4)
layers = st.integers(1, 4)
sizes = st.sampled_from([0, 1, BATCH_NBYTES // 3, BATCH_NBYTES - 1, BATCH_NBYTES])


class ScheduleMachine(RuleBasedStateMachine):
    """Reports events as hooks would, and keeps its own account of memory and of what is in use.

    A forward may be nested, repeated, without backward or ended by an exception; a backward may
    visit outstanding forwards in any order, leave some out, recompute any group, also inside a
    forward (``autograd.grad``); the user may unshard and reshard at any time between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.schedule = UnshardSchedule()
        self.nbytes: list[int] = []
        self.live: set[int] = set()
        self.prefetched: set[int] = set()  # and not waited for
        self.gathered: collections.Counter[int] = collections.Counter()
        self.freed: collections.Counter[int] = collections.Counter()
        self.stack: list[int] = []  # forwards that have begun
        self.with_grad = False
        # Groups of forwards that wait for backward, with their passes.
        self.outstanding: collections.Counter[tuple[int, int]] = collections.Counter()
        self.in_backward: dict[int, list[int]] = {}  # passes of its forwards, by group
        self.reached: set[int] = set()  # passes
        self.in_recompute: list[int] = []
        self.backward_runs = False
        self.by_hand: set[int] = set()

    @initialize(
        kept=st.sets(groups),
        nbytes=st.one_of(st.just([]), st.lists(sizes, min_size=5, max_size=5)),
    )
    def start(self, kept: set[int], nbytes: list[int]) -> None:
        self.schedule = UnshardSchedule(nbytes=nbytes)
        self.schedule.options.no_reshard_after_forward = kept
        self.nbytes = nbytes or [BATCH_NBYTES] * 5

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the runtime does; memory must come and go as it can."""
        for op, group in actions:
            if op in (Op.GATHER, Op.PREFETCH):
                assert group not in self.live, f"{group} is gathered over itself"
                self.live.add(group)
                self.gathered[group] += 1
                self.prefetched |= {group} if op is Op.PREFETCH else set()
            elif op is Op.WAIT:
                assert group in self.live, f"wait for {group}, which nobody gathered"
                self.prefetched.discard(group)
            else:
                assert group in self.live, f"{group} is freed twice"
                self.live.remove(group)
                self.freed[group] += 1
                self.prefetched.discard(group)

    def carry_out_use(self, actions: Sequence[Action], group: int) -> None:
        """Do what the entry of a group leads to: it is waited for, no prefetch is undone."""
        assert (Op.WAIT, group) in actions
        assert not any(op is Op.FREE and other in self.prefetched for op, other in actions)
        self.carry_out(actions)

    @property
    def in_use(self) -> set[int]:
        """Groups that something computes with, or that the user has."""
        return {*self.stack, *self.in_backward, *self.in_recompute, *self.by_hand}

    # --- forward ---

    @precondition(lambda self: not self.stack and not self.backward_runs)
    @rule(with_grad=st.booleans(), has_changed=st.booleans())
    def begin_pass(self, *, with_grad: bool, has_changed: bool = False) -> None:
        if has_changed:
            self.outstanding.clear()
        self.schedule.begin_pass(has_changed=has_changed)
        self.with_grad = with_grad
        self.enter(ROOT)

    @precondition(lambda self: self.stack and not self.backward_runs)
    @rule(group=layers)
    def enter_layer(self, group: int) -> None:
        self.enter(group)

    def enter(self, group: int) -> None:
        self.carry_out_use(self.schedule.enter_forward(group), group)
        self.stack.append(group)

    @precondition(lambda self: self.stack and not self.backward_runs)
    @rule(output_requires_grad=st.booleans())
    def exit_forward(self, *, output_requires_grad: bool) -> None:
        group = self.stack.pop()
        needs_backward = self.with_grad and output_requires_grad
        if group not in self.stack:
            self.by_hand.discard(group)
        self.outstanding[group, self.schedule.current_pass] += needs_backward
        self.carry_out(self.schedule.exit_forward(group, needs_backward=needs_backward))
        if self.stack:
            return
        self.carry_out(self.schedule.end_pass(needs_backward=needs_backward))
        assert self.prefetched <= self.in_use | self.schedule.options.no_reshard_after_forward, (
            "prefetched in vain"
        )
        if not needs_backward:
            assert self.live <= self.in_use | self.schedule.options.no_reshard_after_forward

    # --- backward ---

    @precondition(lambda self: any(self.outstanding.values()))
    @rule(data=st.data())
    def enter_backward(self, data: st.DataObject) -> None:
        self.enter_backward_of(*data.draw(st.sampled_from(sorted(self.outstanding.elements()))))

    def enter_backward_of(self, group: int, in_pass: int) -> None:
        self.backward_runs = True
        self.outstanding[group, in_pass] -= 1
        self.in_backward.setdefault(group, []).append(in_pass)
        self.reached.add(in_pass)
        self.carry_out_use(self.schedule.enter_backward(group, in_pass), group)

    @precondition(lambda self: set(self.in_backward) - set(self.in_recompute))
    @rule(data=st.data(), is_last=st.booleans())
    def exit_backward(self, data: st.DataObject, *, is_last: bool) -> None:
        can_exit = set(self.in_backward) - set(self.in_recompute)
        self.exit_backward_of(data.draw(st.sampled_from(sorted(can_exit))), is_last=is_last)

    def exit_backward_of(self, group: int, *, is_last: bool = False) -> None:
        in_pass = self.in_backward[group].pop()
        if self.in_backward[group]:
            return  # the runtime tells the schedule of the last one only
        del self.in_backward[group]
        self.by_hand.discard(group)
        self.carry_out(self.schedule.exit_backward(group, in_pass, is_last=is_last))
        may_stay = not is_last and self.schedule.awaits_backward(group)
        assert may_stay or group in self.stack or group not in self.live

    @precondition(lambda self: any(self.outstanding.values()))
    @rule(group=groups)
    def enter_recompute(self, group: int) -> None:
        if group in self.in_recompute:
            return
        self.backward_runs = True
        self.in_recompute.append(group)
        self.carry_out_use(self.schedule.enter_recompute(group), group)

    @precondition(lambda self: self.in_recompute)
    @rule()
    def exit_recompute(self) -> None:
        self.carry_out(self.schedule.exit_recompute(self.in_recompute.pop()))

    @precondition(lambda self: self.backward_runs and not self.in_recompute)
    @rule()
    def end_backward(self) -> None:
        self.by_hand.clear()
        self.in_backward.clear()
        self.backward_runs = False
        # The root may go backward inside its forward, and return another loss.
        open_pass = self.schedule.current_pass if self.stack else None
        for entry in [entry for entry in self.outstanding if entry[1] in self.reached]:
            if entry[1] != open_pass:
                del self.outstanding[entry]
        self.reached.clear()
        self.carry_out(self.schedule.end_backward())
        assert self.live == self.in_use
        for group in range(5):
            waits = any(count for (other, _), count in self.outstanding.items() if other == group)
            assert self.schedule.awaits_backward(group) == waits

    # --- by hand, and exceptions ---

    @rule(group=groups)
    def unshard(self, group: int) -> None:
        self.carry_out(self.schedule.unshard(group))
        self.prefetched.discard(group)  # Claimed by the user.
        self.by_hand.add(group)

    @rule(group=groups)
    def reshard(self, group: int) -> None:
        if group in (*self.stack, *self.in_backward, *self.in_recompute):
            return
        self.by_hand.discard(group)
        self.carry_out(self.schedule.reshard(group))
        assert group not in self.live

    @precondition(lambda self: not self.in_recompute)
    @rule(group=groups)
    def refresh(self, group: int) -> None:
        self.carry_out(self.schedule.refresh(group))

    @rule(chance=st.integers(0, 9))
    def fail(self, chance: int) -> None:
        if chance == 0:  # else few steps would reach their end
            self.reset()

    def reset(self) -> None:
        self.stack.clear()
        self.in_recompute.clear()
        self.in_backward.clear()
        self.outstanding.clear()
        self.reached.clear()
        self.by_hand.clear()
        self.backward_runs = False
        self.carry_out(self.schedule.reset())
        assert not self.live

    # --- laws ---

    @invariant()
    def the_schedule_knows_what_is_live(self) -> None:
        assert set(self.schedule.live) == self.live

    @invariant()
    def what_is_in_use_is_live(self) -> None:
        assert self.in_use <= self.live
        assert all(self.schedule.in_use(group) for group in self.in_use)

    @invariant()
    def spare_groups_are_bounded(self) -> None:
        spare = self.live - self.in_use - self.schedule.options.no_reshard_after_forward
        assert len(spare) <= 1 or spare <= self.prefetched
        ahead = self.prefetched - self.in_use - self.schedule.options.no_reshard_after_forward
        ahead_nbytes = sum(self.nbytes[group] for group in ahead)
        assert len(ahead) <= 1 or ahead_nbytes < BATCH_NBYTES

    def check_laws(self) -> None:
        self.the_schedule_knows_what_is_live()
        self.what_is_in_use_is_live()
        self.spare_groups_are_bounded()

    def teardown(self) -> None:
        self.reset()
        assert self.gathered == self.freed


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=200, stateful_step_count=60)


@given(
    passes=st.lists(st.lists(layers, max_size=6), min_size=1, max_size=4),
    nbytes=st.one_of(st.just([]), st.lists(sizes, min_size=5, max_size=5)),
    with_backward=st.booleans(),
)
def test_steps_through_other_layers_each_time(
    passes: list[list[int]], nbytes: list[int], *, with_backward: bool
) -> None:
    """What is expected next is often wrong; the laws hold and every step ends with nothing."""
    machine = ScheduleMachine()
    machine.start(kept=set(), nbytes=nbytes)
    for order in passes:
        machine.begin_pass(with_grad=with_backward)
        for group in order:
            machine.enter_layer(group=group)
            machine.check_laws()
            machine.exit_forward(output_requires_grad=True)
            machine.check_laws()
        machine.exit_forward(output_requires_grad=True)
        machine.check_laws()
        if with_backward:
            in_pass = machine.schedule.current_pass
            machine.enter_backward_of(ROOT, in_pass)
            for group in reversed(order):
                machine.enter_backward_of(group, in_pass)
                machine.check_laws()
                machine.exit_backward_of(group)
                machine.check_laws()
            machine.end_backward()
        assert machine.live == set()


# --- reductions ---------------------------------------------------------------------------------


class Backward(typing.NamedTuple):
    """What one step reports to `ReduceOrder`."""

    entered: list[int]
    withdrawn: set[int]
    completed: list[int]


backwards = st.builds(
    Backward,
    st.lists(groups, max_size=10),
    st.sets(groups, max_size=3),
    st.lists(groups, max_size=10),
)


def run_backward(order: ReduceOrder, step: Backward) -> tuple[list[int], list[int]]:
    """Run a step; return the groups reduced in order and those reduced at once."""
    for group in step.entered:
        order.enter_forward(group)
    for group in step.withdrawn:
        order.withdraw(group)
    order.begin_backward()
    in_order: list[int] = []
    at_once: list[int] = []
    expected = expected_order(step)
    for group in step.completed:
        ready = order.complete(group)
        if group in in_order or group not in expected:
            assert ready == [group], "late or never entered: reduced at once"
            at_once.append(group)
        else:
            in_order += ready
    return in_order + order.end_backward(), at_once


def expected_order(step: Backward) -> list[int]:
    """Return the groups of a step, in the reverse of the order they were first entered in."""
    entered = list(dict.fromkeys(step.entered))
    return [group for group in reversed(entered) if group not in step.withdrawn]


@given(steps=st.lists(backwards, min_size=1, max_size=3))
def test_each_entered_group_is_reduced_once_in_reverse(steps: list[Backward]) -> None:
    """Whatever completes, in whatever order, and in every step anew."""
    order = ReduceOrder()
    for step in steps:
        in_order, _ = run_backward(order, step)
        assert in_order == expected_order(step)


@given(
    entered=st.lists(groups, max_size=8),
    mine=st.lists(groups, unique=True),
    theirs=st.lists(groups, unique=True),
)
def test_ranks_that_use_different_parameters_reduce_alike(
    entered: list[int], mine: list[int], theirs: list[int]
) -> None:
    """Each rank completes other groups in another order; collectives pair up all the same."""
    inside = set(entered)
    issued = []
    for completed in (mine, theirs):
        known = [group for group in completed if group in inside]
        issued.append(run_backward(ReduceOrder(), Backward(entered, set(), known))[0])
    assert issued[0] == issued[1]


@given(entered=st.lists(groups, unique=True, min_size=1), data=st.data())
def test_nothing_waits_longer_than_it_must(entered: list[int], data: st.DataObject) -> None:
    """A complete group is reduced as soon as all that were entered after it are complete."""
    completed = data.draw(st.permutations(entered))
    order = ReduceOrder()
    for group in entered:
        order.enter_forward(group)
    order.begin_backward()
    issued: list[int] = []
    for count, group in enumerate(completed, start=1):
        issued += order.complete(group)
        done = set(completed[:count])
        ready = 0
        while ready < len(entered) and entered[-1 - ready] in done:
            ready += 1
        assert issued == entered[::-1][:ready]
    assert order.end_backward() == []
