"""What a step of a planned model gathers and reduces: the schedule is asked, nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._schedule.unshard import Op, UnshardSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shardkit._schedule.unshard import Action


@dataclass(frozen=True, slots=True)
class GroupToRun:
    """A group as far as the schedule is concerned.

    Attributes:
        modules: Of the group.
        unsharded_nbytes: 0: nothing is gathered.
        is_trainable: It has gradients.
        reshard_after_forward: Its memory is freed between forward and backward.
        reshard_after_backward: Its memory is freed after backward.
    """

    modules: Sequence[nn.Module]
    unsharded_nbytes: int
    is_trainable: bool
    reshard_after_forward: bool
    reshard_after_backward: bool


@dataclass(slots=True)
class PlannedGathers:
    """What is gathered.

    Attributes:
        counts: How often each group is gathered in a step, by number.
        peak_nbytes: The most unsharded bytes at once, from the first step on.
    """

    counts: list[int]
    peak_nbytes: int


def plan_gathers(
    root: nn.Module, groups: Sequence[GroupToRun], *, micro_batches: int, batches_small: bool
) -> PlannedGathers:
    """Return what a step gathers, if modules run once each, in the order in which they are defined.

    Args:
        root: The model.
        groups: Its groups.
        micro_batches: Forwards and backwards in a step.
        batches_small: Small groups are gathered several at a time.
    """
    return _Rehearsal(root, groups, batches_small=batches_small).run(micro_batches)


class _Rehearsal:
    """Steps of which only the schedule knows."""

    def __init__(
        self, root: nn.Module, groups: Sequence[GroupToRun], *, batches_small: bool
    ) -> None:
        self._root = root
        self._groups = groups
        nbytes = [group.unsharded_nbytes for group in groups]
        self._schedule = UnshardSchedule(
            nbytes=nbytes if batches_small else (), is_idle=not any(nbytes)
        )
        options = self._schedule.options
        options.several_modules = {i for i, g in enumerate(groups) if len(g.modules) > 1}
        options.no_reshard_after_forward = {
            i for i, g in enumerate(groups) if not g.reshard_after_forward
        }
        options.no_reshard_after_backward = {
            i for i, g in enumerate(groups) if not g.reshard_after_backward
        }
        self._group_of = {id(m): i for i, group in enumerate(groups) for m in group.modules}
        self._nbytes = 0
        self._peak = 0
        self._counts = [0] * len(groups)

    def run(self, micro_batches: int) -> PlannedGathers:
        """Learn the order in one step, take another, count in a third."""
        for _ in range(3):
            self._counts = [0] * len(self._groups)
            for micro in range(micro_batches):
                self._pass(is_first=micro == 0)
        return PlannedGathers(self._counts, self._peak)

    def _do(self, actions: Sequence[Action]) -> None:
        for op, index in actions:
            nbytes = self._groups[index].unsharded_nbytes
            if op in (Op.GATHER, Op.PREFETCH):
                self._counts[index] += bool(nbytes)
                self._nbytes += nbytes
                self._peak = max(self._peak, self._nbytes)
            elif op is Op.FREE:
                self._nbytes -= nbytes

    def _pass(self, *, is_first: bool) -> None:
        """Run one forward and backward; before the first one of a step shards have changed."""
        schedule = self._schedule
        self._stale = set(schedule.live) if is_first else set()
        self._left: list[tuple[str, int, bool]] = []
        self._run: dict[int, int] = {}
        self._has_trainable = False
        schedule.begin_pass(has_changed=is_first)
        self._forward(self._root, set())
        self._do(schedule.end_pass(needs_backward=self._has_trainable))
        for what, index, is_last in reversed(self._left):
            if what == "exit":  # Backward goes through the forward from its end.
                self._do(schedule.enter_backward(index))
            else:
                self._do(schedule.exit_backward(index, is_last=is_last))
        self._do(schedule.end_backward())

    def _forward(self, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        index = self._group_of.get(id(module))
        if index is not None:
            if index in self._stale:
                self._stale.discard(index)
                self._do(self._schedule.refresh(index))
            self._do(self._schedule.enter_forward(index))
            entered = len(self._left)
            self._left.append(("enter", index, index not in self._run))
            self._run[index] = self._run.get(index, 0) + 1
        for child in module.children():
            self._forward(child, seen)
        if index is None:
            return
        group = self._groups[index]
        self._has_trainable |= group.is_trainable
        if self._has_trainable:
            self._left.append(("exit", index, False))
        else:
            del self._left[entered]  # No backward comes here.
        self._do(
            self._schedule.exit_forward(
                index,
                needs_backward=self._has_trainable,
                is_unfinished=self._run[index] < len(group.modules),
            )
        )
