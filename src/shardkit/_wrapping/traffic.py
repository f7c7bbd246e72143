"""What a step of a planned model gathers and reduces: the schedule is asked, nothing is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit._schedule.unshard import Op, UnshardSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shardkit._schedule.unshard import Action
    from shardkit._wrapping.records import GroupPlan


def plan_gathers(
    root: nn.Module,
    groups: Sequence[tuple[GroupPlan, Sequence[nn.Module]]],
    *,
    stays: bool,
    micro_batches: int,
    batches_small: bool,
) -> tuple[list[int], int]:
    """Rehearse steps in which modules run once each, in the order in which they are defined.

    Args:
        root: The model.
        groups: The groups with their modules.
        stays: Whether memory is kept after backward, to the next step.
        micro_batches: The number of forwards and backwards in a step.
        batches_small: Whether small groups are gathered several at a time.

    Returns:
        The number of gathers of each group in a step, and the most unsharded bytes at once, from
        the first step on.
    """
    rehearsal = _Rehearsal(root, groups, stays=stays, batches_small=batches_small)
    for _ in range(3):  # Learn the order in one step, take another, count in a third.
        rehearsal.counts = [0] * len(groups)
        for micro in range(micro_batches):
            rehearsal.run_pass(is_first=micro == 0)
    return rehearsal.counts, rehearsal.peak_nbytes


class _Rehearsal:
    """Steps of which only the schedule knows."""

    def __init__(
        self,
        root: nn.Module,
        groups: Sequence[tuple[GroupPlan, Sequence[nn.Module]]],
        *,
        stays: bool,
        batches_small: bool,
    ) -> None:
        self._root = root
        self._groups = groups
        nbytes = [group.unsharded_nbytes for group, _ in groups]
        self._schedule = UnshardSchedule(
            nbytes=nbytes if batches_small else (), is_idle=not any(nbytes)
        )
        options = self._schedule.options
        options.several_modules = {i for i, (_, modules) in enumerate(groups) if len(modules) > 1}
        options.no_reshard_after_forward = {
            i for i, (group, _) in enumerate(groups) if not group.is_resharded
        }
        options.no_reshard_after_backward = set(range(len(groups))) if stays else set()
        self._group_of = {id(m): i for i, (_, modules) in enumerate(groups) for m in modules}
        self._nbytes = 0
        self.peak_nbytes = 0
        self.counts = [0] * len(groups)

    def _do(self, actions: Sequence[Action]) -> None:
        for op, index in actions:
            nbytes = self._groups[index][0].unsharded_nbytes
            if op in (Op.GATHER, Op.PREFETCH):
                self.counts[index] += bool(nbytes)
                self._nbytes += nbytes
                self.peak_nbytes = max(self.peak_nbytes, self._nbytes)
            elif op is Op.FREE:
                self._nbytes -= nbytes

    def run_pass(self, *, is_first: bool) -> None:
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
        group, modules = self._groups[index]
        self._has_trainable |= bool(group.send_nbytes)
        if self._has_trainable:
            self._left.append(("exit", index, False))
        else:
            del self._left[entered]  # No backward comes here.
        self._do(
            self._schedule.exit_forward(
                index,
                needs_backward=self._has_trainable,
                is_unfinished=self._run[index] < len(modules),
            )
        )
