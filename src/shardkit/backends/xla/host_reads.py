"""Refusal of what the host cannot read: inside a region a tensor has other values on every rank.

XLA ends the process when such a tensor is to leave the devices, so what would is refused before.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

from shardkit._errors import ShardedTensorError, StateError
from shardkit._host_values import HostValues
from shardkit._tree import iter_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_aten = torch.ops.aten
_ENTERS = "SPMDFullToShardShape"
_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.allclose.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
}
"""Operators whose result, or its shape, the host has to know."""
_COPIES = {_aten._to_copy.default, _aten.copy_.default, _aten._copy_from.default}
_MASKED = {_aten.index.Tensor}
_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
]
_HARMLESS = {_aten.detach.default, _aten.alias.default}


def may_read(func: Any) -> bool:
    """Whether an operator may need values on the host, depending on its arguments."""
    return func in _READS or func in _COPIES or func in _MASKED or _is_missing(func)


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an operator inside a region if XLA would end the process for it.

    Raises:
        StateError: It takes a tensor of the region to the host.
        ShardedTensorError: It is one on a sharded parameter.
    """
    if func in _HARMLESS:
        return
    for arg in iter_tensors((args, kwargs), depth=0):
        if isinstance(arg, HostValues):
            _refuse_sharded(func, getattr(arg, "base", arg))  # Of a view, what it views.
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
    xm.wait_device_ops()  # What a run has not delivered yet would crash the next line.
    graph = torch_xla._XLAC._get_xla_tensors_hlo([tensor])
    return _ENTERS in graph


_local = threading.local()


@contextlib.contextmanager
def described() -> Iterator[None]:
    """Have tensors of a region printed without values: nobody has them yet."""
    before = getattr(_local, "is_inside", False)
    _local.is_inside = True
    try:
        yield
    finally:
        _local.is_inside = before


@functools.cache
def install_description() -> None:
    """Let `described` work: printing takes dispatch modes away, so it is caught before."""
    cls: Any = Tensor
    for name in ("__repr__", "__format__"):
        setattr(cls, name, _describing(getattr(cls, name)))


def _describing(as_usual: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(as_usual)
    def describe(tensor: Tensor, *args: Any, **options: Any) -> str:
        may_be_inside = getattr(_local, "is_inside", False) and tensor.device.type == "xla"
        if may_be_inside and _is_inside(tensor):
            return (
                f"<a rank's tensor inside of a forward, of shape {tuple(tensor.shape)}, "
                f"{tensor.dtype}; values after it only>"
            )
        return as_usual(tensor, *args, **options)

    return describe


def _refuse_read(func: Any) -> NoReturn:
    msg = (
        f"{func} inside a forward takes a tensor's values to the host (item(), print, cpu(), "
        f"an `if` or a mask by values). There it has other values on every rank, and none yet: "
        f"the forward is traced, and runs later. Return the tensor from the model and read it "
        f"outside; for a choice by values use torch.where."
    )
    raise StateError(msg)


def _refuse_sharded(func: Any, tensor: Any) -> NoReturn:
    msg = (
        f"{func} on sharded {tensor.spec.name!r} of shape {tuple(tensor.shape)} inside the forward "
        f"of another module: it is not gathered there. Shard both modules in one group, or call "
        f"unshard() on the module that has it before the forward."
    )
    raise ShardedTensorError(msg)
