"""The norm of sharded gradients: a plain number on every rank, which scripts may ask for the whole.

FSDP2 returns a DTensor from ``clip_grad_norm_``, and scripts call ``full_tensor()`` on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Callable


class GlobalNorm(Tensor):
    """A norm over all ranks: the same number on each of them, and nothing to gather.

    It is a tensor like others, and what is computed from it is a plain one. Norms of several
    parameters that are put together (`stack`, `linalg.vector_norm`), and copies, are norms still.
    Pickles and ``repr`` are those of the plain tensor.
    """

    def full_tensor(self) -> Tensor:
        """Return the plain tensor; the same memory. No communication."""
        return plain(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function as on a plain tensor."""
        del types
        with _compat.plain_torch_functions():
            result = func(*args, **(kwargs or {}))
            return as_norm(result) if func in _STAY_NORMS and type(result) is Tensor else result

    def __repr__(self) -> str:  # type: ignore[override]
        """Show a plain tensor."""
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        """Format the number, as that of a plain tensor."""
        return format(plain(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the number."""
        memo[id(self)] = result = as_norm(plain(self).detach().clone())
        return result


_STAY_NORMS = frozenset(
    {
        torch.stack,
        torch.linalg.vector_norm,
        torch.clone,
        Tensor.clone,
        Tensor.contiguous,
        Tensor.cpu,
        Tensor.cuda,
        Tensor.detach,
        Tensor.double,
        Tensor.float,
        Tensor.norm,
        Tensor.to,
    }
)


def as_norm(value: Tensor) -> Tensor:
    """Return a plain tensor as a `GlobalNorm`; the same memory."""
    return value.as_subclass(GlobalNorm)


def plain(norm: Tensor) -> Tensor:
    """Return a `GlobalNorm` as a plain tensor; the same memory."""
    with _compat.plain_torch_functions():
        return norm.as_subclass(Tensor)
