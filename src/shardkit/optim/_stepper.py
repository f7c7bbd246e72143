"""One step of an optimizer, taken for some of its tensors at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer


class Stepper:
    """Steps parts of an optimizer's tensors, as if all were one step.

    Args:
        inner: The optimizer.
        reset: Gives its groups the settings that they had before the step.
    """

    def __init__(self, inner: Optimizer, reset: Callable[[Optimizer], None]) -> None:
        self._inner = inner
        self._reset = reset
        self._before: list[tuple[Tensor, Tensor]] | None = None

    def step(self, tensors: Sequence[nn.Parameter]) -> None:
        """Step some; the first call also where there are none, as an optimizer would.

        What a class counts in its parameter groups counts once: each call begins with the settings
        of before.
        """
        inner = self._inner
        if self._before is None:
            settings = (value for group in inner.param_groups for value in group.values())
            self._before = [(v, v.clone()) for v in settings if isinstance(v, Tensor)]
        elif not tensors:
            return
        else:
            self._reset(inner)
            for setting, value in self._before:
                setting.copy_(value)
        chosen = {id(tensor) for tensor in tensors}
        whole = [group["params"] for group in inner.param_groups]
        try:
            for group, params in zip(inner.param_groups, whole, strict=True):
                group["params"] = [param for param in params if id(param) in chosen]
            _compat.step_without_global_hooks(inner)
        finally:
            for group, params in zip(inner.param_groups, whole, strict=True):
                group["params"] = params
