"""What PowerSGD keeps of one bucket from step to step, and how a part of that is taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from shardkit.compression._low_rank import Matrix


class Sent(NamedTuple):
    """What was sent of one matrix: the error lacks `share` times `first` times `second`.T."""

    matrix: Matrix
    start: Tensor  # Second factor that the step began with.
    first: Tensor
    second: Tensor
    share: float


@dataclass(slots=True)
class BucketState:
    """What is kept of one bucket.

    Attributes:
        iteration: Number of reductions so far.
        error: 1-D, as long as the shard: what was left out, in units of the unscaled gradient.
        seconds: Second factors of the last step, by parameter name; nobody writes to them.
        sent: Parts that this backward sent, until it is known who used which parameters.
        error_before: Memory for a copy of `error`, where optimizer steps may be skipped.
        seconds_before: `seconds` when the optimizer step began, as in `error_before`; None: it has
            not begun.
    """

    iteration: int = 0
    error: Tensor | None = None
    seconds: dict[str, Tensor] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    error_before: Tensor | None = None
    seconds_before: dict[str, Tensor] | None = None

    def begin_step(self) -> None:
        """Copy error and factors, once in an optimizer step."""
        if self.error is not None and self.seconds_before is None:
            if self.error_before is None:
                self.error_before = torch.empty_like(self.error)
            self.error_before.copy_(self.error)
            self.seconds_before = dict(self.seconds)

    def end_step(self, *, is_skipped: bool) -> None:
        """Forget what there was when the optimizer step began, or go back to it."""
        if is_skipped and self.seconds_before is not None:
            assert self.error is not None
            assert self.error_before is not None
            self.error.copy_(self.error_before)
            self.seconds = self.seconds_before
        self.seconds_before = None

    def settle(self, unused: Collection[str]) -> None:
        """Take back what was sent of parameters whose gradients nobody gets."""
        sent, self.sent = self.sent, []
        for matrix, start, first, second, share in reversed(sent):
            if matrix.name not in unused:
                continue
            if self.error is not None:
                matrix.view(self.error).add_(first @ second.T, alpha=share)
            if matrix.name in self.seconds:
                self.seconds[matrix.name] = start
