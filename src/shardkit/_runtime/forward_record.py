"""One forward of one group, and how autograd tells of its backward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from shardkit._runtime.grad_hooks import BackwardListener
    from shardkit._runtime.group import ParamGroup


class ForwardRecord:
    """One forward of one group; autograd's graph keeps it alive until its backward.

    Attributes:
        group: The group.
        in_pass: The schedule's number of the pass; None for one that runs inside backward.
        versions: Of the shards, when the forward used them.
        has_input_grads: Backward will tell when the gradients of the inputs have come.
        active: Backward is inside.
        is_first: No forward had entered the group since the last backward.
        may_lack_outputs: That it returns nothing to differentiate is no mistake.
    """

    __slots__ = (
        "active",
        "group",
        "has_input_grads",
        "in_pass",
        "is_first",
        "may_lack_outputs",
        "versions",
    )

    def __init__(self, group: ParamGroup, in_pass: int | None) -> None:
        self.group = group
        self.in_pass = in_pass
        self.versions = group.shard_versions
        self.has_input_grads = False
        self.active = False
        self.is_first = False
        self.may_lack_outputs = False

    @property
    def runtime(self) -> BackwardListener:
        """The group's runtime of now: another than at the forward, if a larger root ran since."""
        listener = self.group.listener
        assert listener is not None
        return listener

    def watch_outputs(self, outputs: Iterable[Tensor]) -> bool:
        """Tell the runtime when the first gradient of `outputs` comes; return if there are any."""
        hook = functools.partial(_enter_backward, self)
        has_any = False
        for output in outputs:
            has_any = True
            output.register_hook(hook)
        return has_any


def _enter_backward(record: ForwardRecord, grad: Tensor) -> None:
    """Hook of a group's outputs."""
    record.runtime.enter_backward(record, grad)


class InputGrads(torch.autograd.Function):
    """Identity on a group's inputs; its backward runs when backward is done with the group."""

    @staticmethod
    def forward(ctx: Any, record: ForwardRecord, *inputs: Tensor) -> Any:
        """Pass the inputs through."""
        ctx.record = record
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Tell the runtime, pass the gradients through."""
        ctx.record.runtime.exit_backward(ctx.record)
        return (None, *grads)
