"""Unsharded parameters while there is no memory behind them: any use raises, with the name."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from shardkit import _compat
from shardkit._errors import FreedParameterError
from shardkit._tree import iter_tensors

NAME_ATTRIBUTE = "_shardkit_fqn"
"""Where an unsharded parameter keeps its name; no other parameter has it."""

_READ_MEMORY = ("T", "mT", "H", "mH", "data", "real", "imag")
"""Attributes that are tensors over the same memory."""
_NEED_NO_MEMORY = (
    "__set__",
    "__delete__",
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_floating_point",
    "nelement",
    "numel",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "stride",
)


def is_unsharded(param: nn.Parameter) -> bool:
    """Whether a parameter is the unsharded one that a bucket shows while it is in use."""
    return NAME_ATTRIBUTE in param.__dict__


def _needs_no_memory(func: Any) -> bool:
    """Whether a torch function can be called on a parameter without memory."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _READ_MEMORY
    return name in _NEED_NO_MEMORY


class _Freed:
    """What the classes of parameters without memory have in common."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        """Show the name; there are no values to show."""
        shape = tuple(self.shape)
        return f"{type(self).__name__}({self.__dict__[NAME_ATTRIBUTE]!r}, shape={shape})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let attributes be read and hooks work; refuse everything else."""
        del types
        if _needs_no_memory(func):
            with _compat.plain_torch_functions():
                return func(*args, **(kwargs or {}))
        given = iter_tensors([args, kwargs or {}])
        raise _freed_error(next((a for a in given if isinstance(a, _Freed)), None))


def _freed_error(param: Any) -> FreedParameterError:
    name = "?" if param is None else param.__dict__[NAME_ATTRIBUTE]
    return FreedParameterError(
        f"unsharded parameter {name!r} is used outside its module's forward and backward: its "
        f"memory has been given back. Do not keep it; take the sharded one from "
        f"module.parameters(), or call unshard() on its module around the use."
    )


class FreedParameter(_Freed, nn.Parameter):  # type: ignore[misc]  # Tensor.__repr__ takes more.
    """Class of an unsharded parameter whose memory is gone: any use raises, with its name.

    Reading freed memory can kill the process, so the class of the Parameter object is exchanged,
    which costs nothing, rather than its contents.
    """


class FreedLeaf(_Freed, Tensor):  # type: ignore[misc]
    """Class of a tensor that an unsharded parameter lies over, while its memory is gone."""

    def __deepcopy__(self, memo: object) -> Any:
        """Return itself: a module may refer to it, and its copy gets others in its forward."""
        del memo
        return self


@functools.cache
def class_without_memory(cls: type) -> type:
    """Return what the class of an unsharded parameter is exchanged with, e.g. a DTensor's."""
    if cls is nn.Parameter:
        return FreedParameter

    def refuse(self: Any, *args: object, **kwargs: object) -> Any:
        del args, kwargs
        raise _freed_error(self)

    methods = ("to_local", "full_tensor", "redistribute")  # No functions of torch: not seen above.
    return type(f"Freed{cls.__name__}", (_Freed, cls), dict.fromkeys(methods, refuse))
