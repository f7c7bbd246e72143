"""Private names of torch for tensors and operators.

| branch | until which torch |
| --- | --- |
| ``HAS_STORAGE_SWAP``: older torch cannot exchange the memory behind two storages | 2.11 |
| ``HAS_GRAD_DTYPE``: in older torch every gradient has the dtype of its tensor | 2.9 |
| ``is_grad_dtype_chosen``: older torch does not say that a tensor's own dtype was chosen | 2.14 |
| ``track_views``: XLA tensors that are made inside a dispatch | torch_xla 2.9.0, the last one |
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from shardkit._compat import torch_modules
from shardkit._errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

OPERATOR_KINDS: tuple[type, ...] = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)
"""Types of operators: `torch.ops.aten.mm.default`, `torch.ops.aten.mm`, `flex_attention`."""

P = ParamSpec("P")

T = TypeVar("T")

HAS_STORAGE_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""torch >= 2.12 can exchange two storages' memory (pytorch#177449); older ones are resized."""

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""torch >= 2.10 lets users choose the dtype of a gradient."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""Value of `__torch_function__` in tensor subclasses that only need `__torch_dispatch__`."""

plain_torch_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which `__torch_function__` of subclasses is not called."""


def grad_dtype_of(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype that torch wants of a tensor's gradient; None: any."""
    if not HAS_GRAD_DTYPE:
        return tensor.dtype
    with plain_torch_functions():
        dtype: torch.dtype | None = tensor.grad_dtype
    return dtype


def is_grad_dtype_chosen(tensor: Tensor) -> bool:
    """Whether a user has chosen the dtype of a tensor's gradient, so that conversions keep it."""
    with plain_torch_functions():
        differs = grad_dtype_of(tensor) is not tensor.dtype
        return bool(getattr(tensor, "_has_grad_dtype_override", differs))


def keep_grad_dtype(tensor: Tensor, like: Tensor) -> None:
    """Let the gradient of a tensor have the dtype that was chosen for another tensor's."""
    if is_grad_dtype_chosen(like):
        set_grad_dtype(tensor, grad_dtype_of(like))


def set_grad_dtype(tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Let the gradient of a tensor have a dtype, past the checks of subclasses; None: any."""
    descriptor: Any = torch.Tensor.grad_dtype
    descriptor.__set__(tensor, dtype)


def swap_storage(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange memory and nbytes of two storages of one device; one of them is empty."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


@torch_modules.untraced  # Torch 2.11 cannot compile the question.
def in_dispatch() -> bool:
    """Whether a `__torch_dispatch__` runs, or torch looks for the one to call.

    Torch 2.10 and 2.11 ask there whether an object is a DTensor, and then read what only a DTensor
    has.
    """
    key: Any = torch._C.DispatchKey
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key.PythonTLSSnapshot)


def heeding_conjugates() -> AbstractContextManager[object]:
    """Return a context for a dispatch in which operators work as outside of it.

    In a dispatch they do not look at the bits that mark views of conjugates and negatives, and so
    those that make such views inside, as `torch.linalg.pinv` does, compute something else.
    """
    core: Any = torch._C
    bits = core.DispatchKeySet(core.DispatchKey.Conjugate).add(core.DispatchKey.Negative)
    excluded = core._dispatch_tls_local_exclude_set() - bits
    guard: AbstractContextManager[object] = core._ForceDispatchKeyGuard(
        core._dispatch_tls_local_include_set(), excluded
    )
    return guard


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` runs, such as vmap or jvp."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_other_graphs() -> bool:
    """Whether a forward makes graphs that gradients of its inputs and outputs do not report.

    Transforms of `torch.func` do, and the tangents of `torch.autograd.forward_ad`.
    """
    in_dual_level = forward_ad._current_level >= 0
    # Not `in_function_transform`: each forward of a group asks twice, and a call takes time.
    return in_dual_level or torch._C._functorch.peek_interpreter_stack() is not None


def inside_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of `torch.func` transforms, or the tensor itself."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def is_recording_operators() -> bool:
    """Whether operators are recorded, as `make_fx` and torch's compiler do."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_batched(tensor: Any) -> bool:
    """Whether a tensor is a batch of tensors inside of a vmap, torch's older vmap included."""
    functorch: Any = torch._C._functorch
    return isinstance(tensor, Tensor) and bool(
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


# Operators with private names that every optimizer and `model.to` call.
copy_to_op = torch.ops.aten._to_copy.default

unsafe_view_op = torch.ops.aten._unsafe_view.default

item_op = torch.ops.aten._local_scalar_dense.default

foreach_max_op = torch.ops.aten._foreach_max.default

foreach_norm_op = torch.ops.aten._foreach_norm.Scalar

unscale_op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

# It returns what its backward reads only if an operand requires a gradient.
sparse_mm_reduce_op = torch.ops.aten._sparse_mm_reduce_impl.default

propagate_xla_data_op = torch.ops.aten._propagate_xla_data.default

# For lists of tensors, with few kernels on an accelerator.
foreach_norm: Any = torch._foreach_norm

foreach_copy: Any = torch._foreach_copy_

foreach_add: Any = torch._foreach_add_

flattened: Any = torch._C._nn.flatten_dense_tensors
"""Function that copies tensors of any shapes end to end, in one call."""

make_wrapper: Any = Tensor._make_wrapper_subclass
"""Function that makes a tensor of a class with shape, dtype and device, but without memory."""


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """Return the function that counts an operator's floating-point operations; None: unknown.

    The public counter is a mode, which only counts all operators together.
    """
    from torch.utils import flop_counter  # Late: it imports triton.

    formula: Callable[..., int] | None = flop_counter.flop_registry.get(operator)
    return formula


def track_views(tensor: Tensor) -> Tensor:
    """Return a tensor whose views follow its writes, for devices without storages.

    XLA tensors are wrapped in this way when they are made, but not inside a dispatch (torch 2.9.0).
    """
    if is_tracked(tensor) or tensor.device.type != "xla":
        return tensor
    return torch._to_functional_tensor(tensor)


def is_tracked(tensor: Tensor) -> bool:
    """Whether views of an XLA tensor follow its writes; see `track_views`."""
    return torch._is_functional_tensor(tensor)


def without_tracking(tensor: Tensor) -> Tensor:
    """Return a tensor in the form for operators inside a dispatch; see `track_views`."""
    if tensor.device.type != "xla" or not is_tracked(tensor):
        return tensor
    key = torch._C.DispatchKey.Functionalize
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(key):
        return tensor
    torch._sync(tensor)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(tensor)


def without_dispatch_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function's operators skip dispatch modes, each of which costs microseconds."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with _python_dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return wrapped


_COPIES = (
    "torch.autograd.graph.allow_mutation_on_saved_tensors() copies what autograd has saved, and so "
    "would read parameters of sharded modules whose memory has been given back. Leave it before a "
    "forward or backward of a sharded module, and clone what the forward writes."
)


_TRACED = (
    "a sharded model cannot be traced by torch.func.linearize or make_fx, because it gathers its "
    "parameters while it runs. Call torch.func.jvp for each direction, or trace a plain model: "
    "make one, and load the file that shardkit.checkpoint.save_full(path, model) writes."
)


def unseen_by_transforms(function: Callable[P, T]) -> Callable[P, T]:
    """Hide a function's operators from selective checkpointing and transforms of `torch.func`.

    Selective checkpointing counts the operators of a forward, and finds its kept outputs by the
    same count in the recomputation. Gathering and freeing use different operators in the two.
    Transforms refuse writes to tensors that are not their arguments. Other modes see the operators.

    Raises:
        StateError: A mode is on that traces, or copies saved tensors when they are written.
    """
    checkpoint: Any = torch.utils.checkpoint
    selective = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
    copying = torch.autograd.graph._CloneArgBeforeMutateMode

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if in_function_transform():
            from torch._functorch import pyfunctorch  # Already loaded if a transform runs.

            with pyfunctorch.temporarily_clear_interpreter_stack():
                return wrapper(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack() == 0:
            return function(*args, **kwargs)
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        if any(isinstance(mode, copying) for mode in modes):
            raise StateError(_COPIES)
        if is_recording_operators():
            raise StateError(_TRACED)
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
    """Return an operator's name without its overload; a higher-order operator's own name."""
    packet = getattr(operator, "overloadpacket", operator)
    name: str = getattr(packet, "_qualified_op_name", None) or operator.name()
    return name


def version_of(tensor: Tensor) -> int:
    """Return the number of writes to a tensor so far; there is no public way to ask.

    Tensors that were made in inference mode have none: nothing writes to them outside of it.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the numbers of writes to tensors so far."""
    return [tensor._version for tensor in tensors]


def preserve_versions(tensors: Sequence[Tensor]) -> Any:
    """Return a context in which writes to tensors do not raise their version counters."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def is_mutable_op(func: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    return bool(func._schema.is_mutable)


def is_composite_op(func: Any) -> bool:
    """Whether torch defines an operator by other ones only, such as ``to`` and ``reshape``.

    Autograd carries out the others; a dispatch sees such an operator in inference mode only.
    """
    return bool(func._can_decompose())


def is_collective(func: Any) -> bool:
    """Whether an operator is a collective of ``torch.distributed``, such as ``all_reduce``."""
    return func.namespace in ("c10d", "_c10d_functional")


@functools.cache
def is_send(func: Any) -> bool:
    """Whether an operator sends tensors to one rank, and the other ranks do not call it."""
    return func.name() in ("c10d::send", "_c10d_functional::isend")


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments."""
    return [argument.name for argument in operator._schema.arguments]


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int | str, ...], tuple[str, ...]]:
    """Return the arguments that an operator changes, and those that it only fills.

    They are given by position, and keyword-only arguments by name (``out=``).
    """
    if func.namespace == "c10d":  # Their schemas do not tell.
        return ((0,) if func.name().endswith("_") else ()), ()
    changed: list[int | str] = []
    filled: list[str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only and argument.is_out:
                filled.append(argument.name)
            else:
                changed.append(argument.name if argument.kwarg_only else position)
    return tuple(changed), tuple(filled)
