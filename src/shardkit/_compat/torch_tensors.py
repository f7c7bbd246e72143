"""Private names of torch about tensors and operators.

| branch | until which torch |
| --- | --- |
| ``HAS_STORAGE_SWAP``: older torch cannot exchange the memory behind two storages | 2.11 |
| ``track_views``: XLA tensors that are made inside a dispatch | torch_xla 2.9.0, the last one |
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OPERATOR_KINDS: tuple[type, ...] = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)
"""What names an operator: `torch.ops.aten.mm.default`, `torch.ops.aten.mm`, `flex_attention`."""

P = ParamSpec("P")

T = TypeVar("T")

HAS_STORAGE_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""torch >= 2.12 can exchange the memory behind two storages (pytorch#177449); older resizes."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""Tensor subclasses that only want `__torch_dispatch__` skip `__torch_function__` with it."""

plain_torch_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not called."""


def swap_storage(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange memory and nbytes of two storages of one device; one of them has none."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` runs, such as vmap or jvp."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that transforms of `torch.func` have wrapped, or itself."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_batched(tensor: Any) -> bool:
    """Whether a tensor stands for several: inside of a vmap, torch's older one included."""
    functorch: Any = torch._C._functorch
    return isinstance(tensor, Tensor) and bool(
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


# Operators whose names are private, though every optimizer and `model.to` calls them.
copy_to_op = torch.ops.aten._to_copy.default

unsafe_view_op = torch.ops.aten._unsafe_view.default

item_op = torch.ops.aten._local_scalar_dense.default

foreach_max_op = torch.ops.aten._foreach_max.default

foreach_norm_op = torch.ops.aten._foreach_norm.Scalar

unscale_op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

propagate_xla_data_op = torch.ops.aten._propagate_xla_data.default

# On lists of tensors, by few kernels on an accelerator.
foreach_norm: Any = torch._foreach_norm

foreach_copy: Any = torch._foreach_copy_

foreach_add: Any = torch._foreach_add_

flattened: Any = torch._C._nn.flatten_dense_tensors
"""Copies tensors of any shapes end to end, without a call for each of them."""

make_wrapper: Any = Tensor._make_wrapper_subclass
"""Makes a tensor of a class with a shape, a dtype and a device, and no memory of its own."""


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """Return the function that counts an operator's operations of floating point, if there is one.

    The public counter is a mode that counts all together; each operator's own are wanted here.
    """
    from torch.utils import flop_counter  # Late: it imports triton.

    formula: Callable[..., int] | None = flop_counter.flop_registry.get(operator)
    return formula


def track_views(tensor: Tensor) -> Tensor:
    """Return a tensor whose views follow when it is written, where the device has no storages.

    XLA tensors are wrapped so when they are made, but not inside a dispatch (torch 2.9.0).
    """
    if is_tracked(tensor) or tensor.device.type != "xla":
        return tensor
    return torch._to_functional_tensor(tensor)


def is_tracked(tensor: Tensor) -> bool:
    """Whether views of an XLA tensor follow when it is written; see `track_views`."""
    return torch._is_functional_tensor(tensor)


def without_tracking(tensor: Tensor) -> Tensor:
    """Return a tensor as operators must see it inside a dispatch; see `track_views`."""
    if tensor.device.type != "xla" or not is_tracked(tensor):
        return tensor
    key = torch._C.DispatchKey.Functionalize
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(key):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(tensor)


def without_dispatch_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function's operators pass by dispatch modes, each of which costs microseconds."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with _python_dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return wrapped


def unseen_by_transforms(function: Callable[P, T]) -> Callable[P, T]:
    """Have selective checkpointing and transforms of `torch.func` not see a function's operators.

    Selective checkpointing counts the operators of a forward, and finds what it kept by counting
    those of the repetition. What gathers and frees is not the same in both. Transforms refuse
    writes to tensors that are not their arguments. Other modes see the operators.
    """
    checkpoint: Any = torch.utils.checkpoint
    selective = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if in_function_transform():
            from torch._functorch import pyfunctorch  # It is loaded where a transform runs.

            with pyfunctorch.temporarily_clear_interpreter_stack():
                return wrapper(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack() == 0:
            return function(*args, **kwargs)
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        if not any(isinstance(mode, selective) for mode in modes):
            return function(*args, **kwargs)
        with _python_dispatch._disable_current_modes(), contextlib.ExitStack() as stack:
            for mode in modes:
                if not isinstance(mode, selective):
                    _python_dispatch._push_mode(mode)
                    stack.callback(_python_dispatch._pop_mode)
            return function(*args, **kwargs)

    return wrapper


def operator_name(operator: Any) -> str:
    """Return an operator's name without its overload, a higher-order one's as it is."""
    packet = getattr(operator, "overloadpacket", operator)
    name: str = getattr(packet, "_qualified_op_name", None) or operator.name()
    return name


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been written; there is no public way to ask."""
    return tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often tensors have been written."""
    return [tensor._version for tensor in tensors]


def preserve_versions(tensors: Sequence[Tensor]) -> Any:
    """Return a context in which writes to tensors do not raise their version counters."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def is_mutable_op(func: Any) -> bool:
    """Whether the operator writes to one of its arguments."""
    return bool(func._schema.is_mutable)


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int | str, ...], tuple[str, ...]]:
    """Return which arguments an operator writes: those that it changes, those it only fills.

    By position, and those that can be given by name only by name (``out=``).
    """
    changed: list[int | str] = []
    filled: list[str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only and argument.is_out:
                filled.append(argument.name)
            else:
                changed.append(argument.name if argument.kwarg_only else position)
    return tuple(changed), tuple(filled)
