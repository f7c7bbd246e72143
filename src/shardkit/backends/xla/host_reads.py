"""Refusal of what the host cannot read: inside a region a tensor has other values on every rank.

XLA ends the process when such a tensor is to leave the devices, so what would is refused before.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
import torch_xla
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardkit._errors import ShardedTensorError, StateError
from shardkit._sharded import ShardedTensor
from shardkit._tree import iter_tensors

_aten = torch.ops.aten
_ENTERS = "SPMDFullToShardShape"
_READS = {
    _aten._local_scalar_dense.default,  # noqa: SLF001 - of item(), bool(), tolist()
    _aten.equal.default,
    _aten.allclose.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,  # noqa: SLF001
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
}
"""Operators whose result, or its shape, the host has to know."""
_COPIES = {_aten._to_copy.default, _aten.copy_.default, _aten._copy_from.default}  # noqa: SLF001
_MASKED = {_aten.index.Tensor}
_KEYS = [
    getattr(torch._C.DispatchKey, name)  # noqa: SLF001
    for name in ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
]
_HARMLESS = {_aten.detach.default, _aten.alias.default}


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an operator inside a region if XLA would end the process for it.

    Raises:
        StateError: It takes a tensor of the region to the host.
        ShardedTensorError: It is one on a sharded parameter.
    """
    if func in _HARMLESS:
        return
    for arg in iter_tensors((args, kwargs), depth=0):
        if isinstance(arg, ShardedTensor):
            _refuse_sharded(func, arg)
    source = _read_by(func, args, kwargs)
    if source is not None and _is_inside(source):
        _refuse_read(func)


def _read_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor of which the host would have to know the values."""
    if func in _READS or _is_missing(func):
        return _on_xla(args)
    if func in _COPIES:
        target = kwargs["device"] if "device" in kwargs else args[0].device
        leaves = target is not None and torch.device(target).type != "xla"
        return _on_xla(args) if leaves else None
    if func in _MASKED:
        masks = [i for i in args[1] if i is not None and i.dtype in {torch.bool, torch.uint8}]
        return _on_xla(tuple(masks))
    return None


@functools.cache
def _is_missing(func: Any) -> bool:
    """Whether torch_xla has no such operator, and has the host compute it."""
    return not any(func.has_kernel_for_dispatch_key(key) for key in _KEYS)


def _on_xla(args: tuple[Any, ...]) -> Tensor | None:
    return next((arg for arg in iter_tensors(args, depth=0) if arg.device.type == "xla"), None)


def _is_inside(tensor: Tensor) -> bool:
    """Whether a tensor is computed of what a rank has; not so of what came from outside alone."""
    graph = torch_xla._XLAC._get_xla_tensors_hlo([tensor])  # noqa: SLF001
    return _ENTERS in graph


class Described(TorchFunctionMode):
    """A context in which tensors of a region are printed without values: nobody has them yet."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Describe, or run `func` as it is."""
        del types
        prints = func in {Tensor.__repr__, Tensor.__format__}
        if prints and args[0].device.type == "xla" and _is_inside(args[0]):
            tensor = args[0]
            return (
                f"<a rank's tensor inside of a forward, of shape {tuple(tensor.shape)}, "
                f"{tensor.dtype}; values after it only>"
            )
        return func(*args, **(kwargs or {}))


def _refuse_read(func: Any) -> NoReturn:
    msg = (
        f"{func} inside a forward takes a tensor's values to the host (item(), print, cpu(), "
        f"an `if` or a mask by values). There it has other values on every rank, and none yet: "
        f"the forward is traced, and runs later. Return the tensor from the model and read it "
        f"outside; for a choice by values use torch.where."
    )
    raise StateError(msg)


def _refuse_sharded(func: Any, tensor: ShardedTensor) -> NoReturn:
    msg = (
        f"{func} on sharded {tensor.spec.name!r} of shape {tuple(tensor.shape)} inside the forward "
        f"of another module: it is not gathered there. Shard both modules in one group, or call "
        f"unshard() on the module that has it before the forward."
    )
    raise ShardedTensorError(msg)
