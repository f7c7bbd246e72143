"""Takes gradients from the unsharded parameters of a group, and tells the runtime."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from shardkit import _compat
from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from shardkit._params.bucket import Bucket
    from shardkit._runtime.forward_record import ForwardRecord
    from shardkit._runtime.group import ParamGroup


class BackwardListener(Protocol):
    """Who wants to know how far backward is: the runtime."""

    def begin_backward(self) -> None:
        """A backward has begun; its end is to be told."""

    def on_grad(self, group: ParamGroup, bucket_index: int, index: int, grad: Tensor) -> None:
        """The gradient of parameter `index` of trainable bucket `bucket_index` came."""

    def enter_backward(self, record: ForwardRecord, grad: Tensor) -> None:
        """A gradient of a group's outputs came."""

    def exit_backward(self, record: ForwardRecord) -> None:
        """The gradients of a group's inputs came."""


class GradHooks:
    """Hooks on every parameter that can be trained, also on those frozen for now.

    Where nothing waits for a gradient (one rank, no casts), all are taken at the end of backward,
    and next to nothing runs for each of them until then.

    Args:
        group: Whose.
        buckets: Those of its buckets that can be trained.
        at_once: Take gradients when they come.

    Attributes:
        at_once: Gradients are taken when they come.
    """

    def __init__(self, group: ParamGroup, buckets: Sequence[Bucket], *, at_once: bool) -> None:
        # Weak, in hooks too: C++ keeps those, where the garbage collector sees no cycle to break.
        self._group = weakref.ref(group)
        self._buckets = buckets
        self._noted: list[Tensor] = []
        self._positions = {
            id(param): (i, index)
            for i, bucket in enumerate(buckets)
            for index, param in enumerate(bucket.unsharded)
        }
        self.at_once = False
        if at_once:
            self.collect_at_once()
        else:
            note = _notes_arrival(self._group, self._noted)
            for bucket in buckets:
                for param in bucket.unsharded:
                    _add_hook(param, note)

    def collect_at_once(self) -> None:
        """Take gradients when they come from now on, rather than at the end of backward."""
        if self.at_once:
            return
        self.at_once = True
        for i, bucket in enumerate(self._buckets):
            for index, param in enumerate(bucket.unsharded):
                _add_hook(param, functools.partial(_take_grad, self._group, i, index))

    @property
    def has_user_hooks(self) -> bool:
        """Whether users want to be told of gradients as they come."""
        return any(
            _compat.post_accumulate_grad_hooks(param)
            for bucket in self._buckets
            for param in bucket.sharded
        )

    def flush(self) -> None:
        """Take the gradients that came and have not been taken."""
        for param in self._noted:
            _take_grad(self._group, *self._positions[id(param)], param)
        self._noted.clear()

    def discard(self) -> None:
        """Forget them."""
        for param in self._noted:
            param.grad = None
        self._noted.clear()


def _notes_arrival(
    reference: weakref.ref[ParamGroup], arrived: list[Tensor]
) -> Callable[[Tensor], None]:
    """Return a hook that notes a parameter; the first one asks for the end of backward."""

    def note(param: Tensor) -> None:
        if not arrived:
            group = reference()
            if group is not None and group.listener is not None:
                group.listener.begin_backward()
        arrived.append(param)

    return note


def _add_hook(param: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register a post-accumulate-grad hook, also on a parameter that is frozen for now."""
    was_frozen = not param.requires_grad
    param.requires_grad_(True)
    param.register_post_accumulate_grad_hook(hook)
    if was_frozen:
        param.requires_grad_(False)


def _take_grad(
    reference: weakref.ref[ParamGroup], bucket_index: int, index: int, param: Tensor
) -> None:
    """Take a gradient from an unsharded parameter: its hook."""
    group, grad = reference(), param.grad
    if group is not None and grad is not None:
        param.grad = None
        if grad.layout is not torch.strided:
            name = group.grad_buckets[bucket_index].entries[index].name
            msg = (
                f"parameter {name!r} got a sparse gradient ({grad.layout}), which cannot be cut "
                f"into flat ranges and averaged: expected a dense one. Look it up with "
                f"sparse=False, or pass it in ignored_params of fully_shard."
            )
            raise StateError(msg)
        assert group.listener is not None
        group.listener.on_grad(group, bucket_index, index, grad)
