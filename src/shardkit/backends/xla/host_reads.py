"""What the host cannot read: tensors of a region, which exist on the devices only.

XLA ends the process if such a tensor must leave the devices, and inside a forward that is still
traced it has no values yet. So operators that would take one to the host are refused before.
Those are reads by the user, and operators that torch_xla lets the host compute because it does not
have them. In forward a dispatch mode asks `check`. In backward, and after it for what Python has
kept, no mode is active, so the kernels themselves ask.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from shardkit._compat import torch_autograd
from shardkit._compat.once import once, wrap
from shardkit._errors import ShardedTensorError, StateError
from shardkit._host_values import HostValues
from shardkit._tree import iter_tensors
from shardkit.backends.xla.operators import replace_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_aten = torch.ops.aten
_ENTERS, _LEAVES = "sharding={manual}", "SPMDShardToFullShape"
_NAME = re.compile(r"%([\w.\-]+)")
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
"""Operators whose result, or the shape of it, the host has to know."""
_READS_LENGTHS = _aten._pack_padded_sequence.default
_NO_BACKWARD = {"glu", "logit", "_cdist_forward", "_pdist_forward", "multilabel_margin_loss"}
"""Names of operators that torch_xla has, but not those of their backward."""
_COPIES = {_aten._to_copy.default, _aten.copy_.default, _aten._copy_from.default}
_MASKED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
]
_HARMLESS = {_aten.detach.default, _aten.alias.default}


def may_read(func: Any) -> bool:
    """Whether an operator may need values on the host, depending on its arguments."""
    is_known = func in _READS or func in _COPIES or func in _MASKED
    return is_known or _is_missing(func) or _lacks_backward(func)


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an operator inside a region if XLA would end the process for it.

    Raises:
        StateError: The operator takes a tensor of the region to the host.
        ShardedTensorError: The operator reads a sharded parameter.
    """
    if func in _HARMLESS:
        return
    for arg in iter_tensors((args, kwargs), depth=0):
        if isinstance(arg, HostValues):
            _refuse_sharded(func, getattr(arg, "base", arg))  # For a view, its base.
    if any(map(_is_inside, _read_by(func, args, kwargs))):
        _refuse_read(func)


def _read_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors whose values the host would need."""
    if func in _COPIES:
        target = kwargs["device"] if "device" in kwargs else args[0].device
        if target is None or torch.device(target).type == "xla":
            return []
    elif func in _MASKED:
        args = tuple(i for i in args[1] if i is not None and i.dtype in {torch.bool, torch.uint8})
    elif func not in _READS and not _is_on_host(func):
        return []
    return [arg for arg in iter_tensors(args, depth=0) if arg.device.type == "xla"]


def _is_on_host(func: Any) -> bool:
    """Whether the host computes this operator, or would compute its backward."""
    return _is_missing(func) or (torch.is_grad_enabled() and _lacks_backward(func))


@functools.cache
def _is_missing(func: Any) -> bool:
    """Whether torch_xla lacks this operator, and lets the host compute it."""
    if func.namespace == "prim":  # An attribute of a tensor.
        return False
    is_known = any(func.has_kernel_for_dispatch_key(key) for key in _KEYS)
    return func == _READS_LENGTHS or not is_known


@functools.cache
def _lacks_backward(func: Any) -> bool:
    """Whether torch_xla lacks the operator that backward runs for this one."""
    name = func._schema.name.removeprefix("aten::")
    is_tpu_only = name in {"upsample_nearest2d", "upsample_bilinear2d"}
    if is_tpu_only and xr.device_type() == "TPU":
        return False
    return name in _NO_BACKWARD or "upsample_" in name


def _is_inside(tensor: Tensor) -> bool:
    """Whether a tensor is computed from a rank's data, and has not been taken out of the region."""
    xm.wait_device_ops()  # Results that a run has not delivered yet would crash the next line.
    graph: str = torch_xla._XLAC._get_xla_tensors_hlo([tensor])
    inside: set[str] = set()
    is_inside = False
    for line in graph.partition("\nENTRY")[2].splitlines()[1:]:
        name, *operands = _NAME.findall(line) or [""]
        is_inside = _LEAVES not in line and (_ENTERS in line or not inside.isdisjoint(operands))
        if is_inside:
            inside.add(name)
        if line.lstrip().startswith("ROOT"):
            break
    return is_inside


_local = threading.local()


@contextlib.contextmanager
def described() -> Iterator[None]:
    """Print tensors of a region without values, which do not exist yet."""
    before = getattr(_local, "is_inside", False)
    _local.is_inside = True
    try:
        yield
    finally:
        _local.is_inside = before


def _is_kept(tensor: Tensor) -> bool:
    """Whether a tensor that is to be read is a rank's, which Python has kept after a forward."""
    if tensor.device.type != "xla":
        return False
    # Run what computes it, as the read would: only then torch_xla says where its values are.
    torch_xla._XLAC._xla_sync_multi([tensor], [], True, False)
    sharding: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return sharding == "{manual}"


def _check_read(what: str, tensor: Tensor) -> None:
    """Refuse a read of a rank's tensor. In a forward, a dispatch mode calls `check` before."""
    if torch_autograd.in_backward() and _is_inside(tensor):
        _refuse_read(what)
    _check_kept(what, tensor)


def _check_kept(what: str, tensor: Tensor) -> None:
    """Refuse a read of a tensor that a forward has kept."""
    if _is_kept(tensor):
        msg = (
            f"{what} of a tensor of shape {tuple(tensor.shape)} that a forward has kept beside its "
            f"outputs (in a list, in an attribute, by a hook). It has other values on every rank, "
            f"and only outputs are put together from those of all ranks: return it from the model."
        )
        raise StateError(msg)


def _may_be_inside() -> bool:
    return getattr(_local, "is_inside", False) or torch_autograd.in_backward()


@once
def install_refusals() -> None:
    """Catch what dispatch modes do not see, in a forward while `described`, and in a backward.

    That is printing, which removes them, values that hooks of backward read, reads of what a
    forward has kept, and torch_xla's way of letting the host compute an operator, which may depend
    on the operator's options (`addmm` with a `beta`).
    """
    for name in ("__repr__", "__format__"):
        wrap(Tensor, name, _describing)
    kernels: dict[str, Callable[..., Any]] = {
        "_to_cpu": _computing,
        "_local_scalar_dense": _reading_one,
        "_to_copy": _converting,
        "copy_": _copying,
    }
    replace_kernels(kernels)


def _computing(kernel: Any, keys: Any, tensors: list[Tensor]) -> Any:
    if _may_be_inside() and any(map(_is_inside, tensors)):
        _refuse_missing("an operator")
    for tensor in tensors:
        _check_kept("an operator that the host computes", tensor)
    return kernel.call_boxed(keys, tensors)


def _reading_one(kernel: Any, keys: Any, tensor: Tensor) -> Any:
    _check_read("item()", tensor)
    return kernel.call_boxed(keys, tensor)


def _converting(kernel: Any, keys: Any, tensor: Tensor, **options: Any) -> Any:
    device = options.get("device")
    if device is not None and device.type != "xla":
        _check_read("cpu(), tolist() or to()", tensor)
    return kernel.call_boxed(keys, tensor, **options)


def _copying(kernel: Any, keys: Any, target: Tensor, source: Tensor, *options: Any) -> Any:
    if target.device.type != "xla":
        _check_read("copy_()", source)
    return kernel.call_boxed(keys, target, source, *options)


def _describing(as_usual: Callable[..., str], tensor: Tensor, *args: Any, **options: Any) -> str:
    if tensor.device.type != "xla":
        return as_usual(tensor, *args, **options)
    of = f"of shape {tuple(tensor.shape)}, {tensor.dtype}"
    if _may_be_inside() and _is_inside(tensor):
        return f"<a rank's tensor inside of a {_pass()}, {of}; values after it only>"
    try:
        return as_usual(tensor, *args, **options)
    except StateError:
        return f"<a rank's tensor that a forward has kept, {of}; return it to see its values>"


def _pass() -> str:
    return "forward" if getattr(_local, "is_inside", False) else "backward"


def _refuse_read(func: Any) -> NoReturn:
    if not isinstance(func, str) and func not in _READS and _is_on_host(func):
        _refuse_missing(str(func))
    instead = (
        "Return the tensor from the model and read it outside"
        if _pass() == "forward"
        else "Read gradients of parameters and of the model's inputs after the backward"
    )
    msg = (
        f"{func} inside a {_pass()} takes a tensor's values to the host (item(), print, cpu(), "
        f"an `if` or a mask by values). There it has other values on every rank, and none yet: "
        f"the {_pass()} is traced, and runs later. {instead}; for a choice by values use "
        f"torch.where."
    )
    raise StateError(msg)


def _refuse_missing(what: str) -> NoReturn:
    if _pass() == "backward" and (node := torch_autograd.current_node_name()):
        what = f"{what} of {node}"
    msg = (
        f"{what} inside a {_pass()}: torch_xla does not have this operator, or its backward, or "
        f"not with these options, and would compute it on the host. There its operands have no "
        f"values yet: the {_pass()} is traced, and runs later. Compute the same by other "
        f"operators, or outside of the model."
    )
    raise StateError(msg)


def _refuse_sharded(func: Any, tensor: Any) -> NoReturn:
    msg = (
        f"{func} on sharded {tensor.spec.name!r} of shape {tuple(tensor.shape)} inside the forward "
        f"of another module: it is not gathered there. Shard both modules in one group, or call "
        f"unshard() on the module that has it before the forward."
    )
    raise ShardedTensorError(msg)
