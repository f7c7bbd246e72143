"""Hooks that users put on the gradients of parameters (``param.register_hook``).

A forward computes with the unsharded parameter, so that is where gradients come. It gets one hook
that runs those of the sharded one, as soon as there is any. Without any nothing is paid.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

_RELAYED = "_shardkit_relays"
"""Where an unsharded parameter keeps whose hooks it runs."""


class OwnHook:
    """Base of hooks that shardkit itself puts on sharded tensors: they are not relayed."""


class _Relay:
    """Runs hooks as torch would; one that was removed has left their list.

    Args:
        hooks: Hooks as torch keeps them on the sharded parameter. Held weakly: a hook may hold the
            model.
    """

    def __init__(self, hooks: Any) -> None:
        self._hooks = weakref.ref(hooks)

    def __call__(self, grad: Tensor) -> Tensor:
        """Return what the hooks make of a gradient."""
        for hook in list((self._hooks() or {}).values()):
            if not isinstance(hook, OwnHook):
                result = hook(grad)
                grad = grad if result is None else result
        return grad


def relay_hooks(param: Tensor, unsharded: nn.Parameter) -> None:
    """Have an unsharded parameter's gradients pass through the hooks of the sharded one."""
    hooks = _compat.tensor_hooks(param)
    if hooks is None or unsharded.__dict__.get(_RELAYED) is hooks:
        return
    if all(isinstance(hook, OwnHook) for hook in hooks.values()):
        return
    unsharded.__dict__[_RELAYED] = hooks
    with while_trainable(unsharded):
        unsharded.register_hook(_Relay(hooks))


@contextlib.contextmanager
def while_trainable(param: nn.Parameter) -> Iterator[None]:
    """Let hooks be put on a parameter, also on one that is frozen for now or has no memory."""
    was_frozen = not param.requires_grad
    with _compat.plain_torch_functions():
        if was_frozen:
            param.requires_grad_(True)
        yield
        if was_frozen:
            param.requires_grad_(False)
