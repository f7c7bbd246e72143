"""What PowerSGD keeps of one bucket from step to step, and how a part of that is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from shardkit.compression._low_rank import Matrix


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent of one matrix.

    Attributes:
        matrix: Which.
        start: Second factor that the step began with.
        first: First factor of the sum.
        second: Second factor of the sum.
        share: First times the transpose of second, times this, is what the error is short of.
    """

    matrix: Matrix
    start: Tensor
    first: Tensor
    second: Tensor
    share: float


@dataclass(frozen=True, slots=True)
class Before:
    """What a bucket had when an optimizer step began.

    Attributes:
        step: Which.
        error: A copy.
        seconds: Second factors; nobody writes to them.
    """

    step: int
    error: Tensor
    seconds: dict[str, Tensor]


@dataclass(slots=True)
class BucketState:
    """What is kept of one bucket.

    Attributes:
        iteration: Reductions so far.
        error: 1-D, as long as the shard: what was left out, in units of the unscaled gradient.
        seconds: Second factors of the last step, by parameter name.
        sent: What this backward sent, until it is known who used which parameters.
        before: What there was when the optimizer step began, where steps may be skipped.
    """

    iteration: int = 0
    error: Tensor | None = None
    seconds: dict[str, Tensor] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    before: Before | None = None

    def begin(self, step: int) -> None:
        """Keep error and factors as they are, if the optimizer step is a new one."""
        before = self.before
        if self.error is None or (before is not None and before.step == step):
            return
        copy = torch.empty_like(self.error) if before is None else before.error
        self.before = Before(step, copy.copy_(self.error), dict(self.seconds))

    def skip(self, step: int) -> None:
        """Go back to what there was when an optimizer step began."""
        before = self.before
        if before is not None and before.step == step and self.error is not None:
            self.error.copy_(before.error)
            self.seconds = dict(before.seconds)

    def settle(self, unused: Collection[str]) -> None:
        """Take back what was sent of parameters whose gradients nobody gets."""
        sent, self.sent = self.sent, []
        for each in reversed(sent):
            name = each.matrix.name
            if name not in unused:
                continue
            if self.error is not None:
                view = each.matrix.view(self.error)
                view.add_(each.first @ each.second.T, alpha=each.share)
            if name in self.seconds:
                self.seconds[name] = each.start
