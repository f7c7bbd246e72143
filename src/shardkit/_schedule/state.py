"""Where one group is in a step: one record, its transitions, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Memory(enum.Enum):
    """Whether a group has unsharded memory.

    PREFETCHED: It has, or will have soon, and nobody has needed it yet.
    """

    FREED = "freed"
    PREFETCHED = "prefetched"
    LIVE = "live"


@dataclass(slots=True)
class GroupState:
    """Where one group is in a step; its `repr` is what to print first when a step goes wrong.

    Attributes:
        number: Number of the group.
        memory: Whether it has unsharded memory.
        num_forwards: Number of forwards that are under way, one within another.
        in_recompute: Whether a forward runs again inside backward.
        in_backward: Whether backward is inside one of its forwards.
        is_user_held: Whether the user called `unshard`.
        has_unseen_backward: Whether a forward ended whose backward nobody will report.
        awaits_other_modules: Whether others of its modules have not run in this pass.
        rests_after_backward: Whether it stays after backward, as the user chose.
        num_expected: Number of gradients that come if this backward uses every parameter.
        num_arrived: Number of gradients that came in this backward.
        num_watched: Number of forwards that backward is inside of, and that report when it leaves.
        is_complete: Whether this backward brings no more gradients.
        modules_run: Modules of the group that ran in this pass, by position.
    """

    number: int
    memory: Memory = Memory.FREED
    num_forwards: int = 0
    in_recompute: bool = False
    in_backward: bool = False
    is_user_held: bool = False
    has_unseen_backward: bool = False
    awaits_other_modules: bool = False
    rests_after_backward: bool = False
    num_expected: int = 0
    num_arrived: int = 0
    num_watched: int = 0
    is_complete: bool = False
    modules_run: set[int] = field(default_factory=set)

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
        """Whether the memory is needed now or was asked to stay."""
        return self.in_use or self.awaits_other_modules or self.rests_after_backward

    def gather(self, *, ahead: bool) -> None:
        """Get memory, now or ahead of use."""
        self._require(self.memory is Memory.FREED, "gathered")
        self.memory = Memory.PREFETCHED if ahead else Memory.LIVE

    def use(self) -> None:
        """Somebody needs the memory, which is there."""
        self._require(self.memory is not Memory.FREED, "used")
        self.memory = Memory.LIVE
        self.rests_after_backward = False

    def free(self) -> None:
        """Give the memory back."""
        self._require(self.memory is not Memory.FREED, "freed")
        self.memory = Memory.FREED
        self.rests_after_backward = False

    def leave_forward(self) -> None:
        """A forward ends; with the last one what the user held goes."""
        self.num_forwards = max(self.num_forwards - 1, 0)
        if not self.num_forwards:
            self.is_user_held = False

    def leave_backward(self) -> None:
        """Backward is done with the forwards that it was inside of."""
        self.in_backward = self.in_recompute = self.is_user_held = False

    def release(self) -> None:
        """The user gives the memory back."""
        self.is_user_held = self.has_unseen_backward = self.awaits_other_modules = False
        self.rests_after_backward = self.in_backward = False

    def begin_pass(self) -> None:
        """A root forward starts."""
        self.has_unseen_backward = self.awaits_other_modules = False
        self.modules_run.clear()

    def end_pass(self) -> None:
        """A root forward ends: the root may have caught what a layer raised."""
        self.num_forwards = 0
        self.awaits_other_modules = False

    def end_backward(self) -> None:
        """The engine is done."""
        self.in_backward = self.in_recompute = False
        self.has_unseen_backward = self.awaits_other_modules = False

    # --- gradients of one backward ---

    def expect_gradients(self, number: int) -> None:
        """Fix how many gradients come, before the first one of a backward."""
        self.num_expected = number

    def count_gradient(self) -> bool:
        """Note that a gradient came; return whether it was the last expected one."""
        self.num_arrived += 1
        return self.num_arrived == self.num_expected

    @property
    def has_all_gradients(self) -> bool:
        """Whether a gradient came for every parameter that wants one."""
        return 0 < self.num_expected <= self.num_arrived

    def forget_gradients(self) -> None:
        """A backward is over."""
        self.num_expected = self.num_arrived = self.num_watched = 0
        self.is_complete = False

    def _require(self, is_legal: bool, verb: str) -> None:  # noqa: FBT001
        if not is_legal:
            msg = f"a group cannot be {verb} now: {self!r}"
            raise RuntimeError(msg)
