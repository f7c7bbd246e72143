"""What autograd tells of a backward: when it enters and leaves the forwards of groups."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from shardkit._params.bucket_gradients import BucketGradients


class BackwardListener(Protocol):
    """Who wants to know how far backward is: the root's `backward.Backward`."""

    def begin_backward(self) -> None:
        """A backward has begun; its end is to be told."""

    def is_user_held(self, group: int) -> bool:
        """Whether the user has unsharded a group, and no forward or backward has used it since."""

    def on_grad(self, group: int, gradients: BucketGradients, index: int, grad: Tensor) -> None:
        """The gradient of parameter `index` of one of a group's buckets came."""

    def enter_backward(self, record: ForwardRecord, grad: Tensor) -> None:
        """A gradient of a group's outputs came."""

    def exit_backward(self, record: ForwardRecord) -> None:
        """The gradients of a group's inputs came."""


class WatchedGroup(Protocol):
    """What a record needs of its group.

    Attributes:
        index: Number of the group in the root of now.
        listener: Listener of the root of now: another one if a larger root ran since the forward.
    """

    index: int
    listener: BackwardListener | None

    @property
    def shard_versions(self) -> tuple[int, ...]:
        """Changes whenever a shard is written to."""


class ForwardRecord:
    """One forward of one group; autograd's graph keeps it alive until its backward.

    Attributes:
        group: The group.
        in_pass: Number of the pass in the schedule; None for one that runs inside backward.
        versions: Versions of the shards when the forward used them.
        has_input_grads: Whether backward reports when the gradients of the inputs have come.
        active: Whether backward is inside.
        is_first: Whether no forward had entered the group since the last backward.
        may_lack_outputs: Whether it may return nothing to differentiate.
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

    def __init__(self, group: WatchedGroup, in_pass: int | None) -> None:
        self.group = group
        self.in_pass = in_pass
        self.versions = group.shard_versions
        self.has_input_grads = False
        self.active = False
        self.is_first = False
        self.may_lack_outputs = False

    @property
    def listener(self) -> BackwardListener:
        """Who wants to know of its backward."""
        listener = self.group.listener
        assert listener is not None
        return listener

    def watch_outputs(self, outputs: Iterable[Tensor]) -> bool:
        """Tell the listener when the first gradient of `outputs` comes; return if there are any."""
        hook = functools.partial(_enter_backward, self)
        has_any = False
        for output in outputs:
            has_any = True
            output.register_hook(hook)
        return has_any


def _enter_backward(record: ForwardRecord, grad: Tensor) -> None:
    """Hook of a group's outputs."""
    record.listener.enter_backward(record, grad)


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
        """Tell the listener, pass the gradients through."""
        ctx.record.listener.exit_backward(ctx.record)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        """Pass forward-mode gradients through."""
        del ctx
        return tuple(None if each is None else each.view_as(each) for each in tangents)
