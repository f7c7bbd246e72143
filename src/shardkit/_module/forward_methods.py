"""Methods other than forward that use a sharded module's parameters, such as `generate`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shardkit._errors import StateError
from shardkit._module.hooks import get_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class ForwardMethod:
    """Stands in for a module's method and runs it as a forward of the module.

    An object rather than a closure, so that deep copies and pickles of the module get their own.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._module = module
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method while the module's parameters are the unsharded ones."""
        state = get_state(self._module)
        if state is None:  # Of a copy that holds no shards.
            return self._method(*args, **kwargs)
        return state.run_method(self._method, args, kwargs)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module use its parameters as forward does.

    For what is called from outside and is not forward, such as ``generate`` of an encoder-decoder
    model, whose encoder it calls by itself. Within the method the module's own parameters are
    unsharded, and modules inside are gathered and freed as usual; when it returns, all is as after
    a forward. It may call the module's forward, any number of times: the module's own parameters
    are gathered once. All ranks must call it, and in it the same modules in the same order:

        fully_shard(model)
        register_fsdp_forward_method(model, "generate")

    Inputs and outputs are cast as those of forward are. Register after `fully_shard`; a module
    that is not sharded is left alone, so that one script runs with and without sharding.

    Args:
        module: The module that `fully_shard` was called on.
        method_name: Name of one of its methods.

    Raises:
        StateError: It has no such method.

    Cost: as one forward, besides what the method calls.
    """
    if get_state(module) is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        msg = (
            f"{type(module).__name__} has no method {method_name!r} to register as a forward: "
            f"expected the name of a method, got {method!r}. Check the name, and that it belongs "
            f"to this module and not to one inside it."
        )
        raise StateError(msg)
    if not isinstance(method, ForwardMethod):
        module.__dict__[method_name] = ForwardMethod(module, method)
