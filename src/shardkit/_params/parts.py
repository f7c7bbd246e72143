"""Tensors that a frozen parameter lies over: how it is taken apart, and put together again.

Three kinds of parameters have parts. Classes that users register by `register_parts`. Wrapper
subclasses, which torch asks by ``__tensor_flatten__`` and ``__tensor_unflatten__``. And the
parameters of bitsandbytes, which keep their scales in attributes: they are known by these
attributes, and nothing is imported.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat
from shardkit._errors import WrapError
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Flatten = Callable[[Any], tuple[dict[str, Tensor], Any]]
    Unflatten = Callable[[dict[str, Tensor], Any], Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """How tensors of one class are taken apart.

    Attributes:
        flatten: Function that returns parts by name, and whatever else it takes to put them
            together.
        unflatten: Function that puts other parts of the same shapes together.
        problem: Function that says what is wrong with a tensor that has no parts yet; None:
            nothing.
        kept: Attributes that stay on the sharded parameter as they are, whole on every rank.
        prepare: Function called with the parameter and each module that holds it, before `flatten`.
        release: Function called with each such module when nothing may hold the whole parts any
            more.
    """

    flatten: Flatten
    unflatten: Unflatten
    problem: Callable[[Any], str | None] | None = None
    kept: tuple[str, ...] = ()
    prepare: Callable[[Any, nn.Module], None] | None = None
    release: Callable[[nn.Module], None] | None = None


_registered: dict[type, Parts] = {}


def register_parts(cls: type[Tensor], flatten: Flatten, unflatten: Unflatten) -> None:
    """Say which tensors frozen parameters of a class lie over, so that `fully_shard` cuts these.

    For quantized weights of classes that keep codes and scales in attributes. A class with
    ``__tensor_flatten__`` and ``__tensor_unflatten__`` needs no registration. Call it before
    `fully_shard`, on all ranks.

    Args:
        cls: Class of the parameter; classes derived from it are taken apart in the same way.
        flatten: Function of the parameter. It returns the parts, a dict of dense tensors of any
            shape and dtype on the parameter's device, and a context: anything that is no tensor.
        unflatten: Function of parts with the same names, shapes, strides and dtypes, and of the
            context. It returns a tensor of `cls` over these very parts, not over copies. It does
            not read their values, which come with each gather. Modules see its result in their
            forward.

    Raises:
        WrapError: `cls` is no tensor class, or one that torch makes plain parameters of.

    Cost: none here. In `fully_shard` the parts are copied once.
    """
    given: Any = cls
    is_class = isinstance(given, type) and issubclass(given, Tensor)
    if not is_class or given in (Tensor, nn.Parameter):
        msg = (
            f"register_parts takes a class of tensors of your own, got {cls!r}. Plain parameters "
            f"are sharded without it."
        )
        raise WrapError(msg)
    _registered[cls] = Parts(flatten, unflatten)


def parts_of(tensor: Any) -> Parts | None:
    """Return how a tensor is taken apart; None: it is plain, sharded, or has no known parts."""
    for cls in type(tensor).__mro__:
        if cls in _registered:
            return _registered[cls]
    if isinstance(tensor, ShardedTensor) or tensor_parallel_of(tensor) is not None:
        return None
    if hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__"):
        return _WRAPPER
    return next((parts for is_such, parts in _BY_ATTRIBUTES if is_such(tensor)), None)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor as a plain one over the same memory; a plain one itself."""
    if type(tensor) is Tensor:
        return tensor
    with _compat.plain_torch_functions():
        return tensor.detach().as_subclass(Tensor)


def check_no_hidden_parts(name: str, param: nn.Parameter) -> None:
    """Refuse a frozen parameter of a class of its own that keeps tensors in attributes.

    Raises:
        WrapError: There is one: as a plain parameter it would lose its class.
    """
    if param.requires_grad or type(param) is nn.Parameter or isinstance(param, ShardedTensor):
        return
    for attribute, value in vars(param).items():
        values = vars(value).values() if hasattr(value, "__dict__") else ()
        if isinstance(value, nn.Module):
            continue
        if any(isinstance(each, Tensor) for each in (value, *values)):
            msg = (
                f"parameter {name!r} is a frozen {type(param).__name__}, which keeps tensors in "
                f"its attribute {attribute!r}: they would stay whole on every rank. Say by "
                f"shardkit.register_parts which tensors it lies over, or pass it in ignored_params."
            )
            raise WrapError(msg)


# --- wrapper subclasses ---


def _flatten_wrapper(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    return parts, (type(tensor), context, tensor.size(), tensor.stride())


def _unflatten_wrapper(parts: dict[str, Tensor], context: Any) -> Any:
    cls, inner, size, stride = context
    return cls.__tensor_unflatten__(parts, inner, size, stride)


_WRAPPER = Parts(_flatten_wrapper, _unflatten_wrapper)


# --- parameters of bitsandbytes ---


def _is_4bit(tensor: Any) -> bool:
    own = getattr(tensor, "__dict__", {})
    return "bnb_quantized" in own and "quant_state" in own


def _flatten_4bit(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    state = tensor.quant_state
    parts = {"data": plain(tensor)}
    for prefix, holder in (("", state), ("state2.", getattr(state, "state2", None))):
        if holder is not None:
            parts |= {prefix + k: v for k, v in vars(holder).items() if isinstance(v, Tensor)}
    # Not the module: it would be that of another model in a copy.
    own = {k: v for k, v in vars(tensor).items() if k not in ("quant_state", "module")}
    return parts, (type(tensor), own, _without_tensors(state))


def _unflatten_4bit(parts: dict[str, Tensor], context: Any) -> Any:
    cls, own, state = context
    state = copy.copy(state)
    if getattr(state, "state2", None) is not None:
        state.state2 = copy.copy(state.state2)
    for name, part in parts.items():
        *path, attribute = name.split(".")
        if name != "data":
            setattr(state.state2 if path else state, attribute, part)
    result = parts["data"].as_subclass(cls)
    result.__dict__.update(own, quant_state=state, module=None)
    return result


def _without_tensors(state: Any) -> Any:
    """Return a copy of a quantization state that keeps no tensor alive."""
    result = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(result, name, None)
    if getattr(state, "state2", None) is not None:
        result.state2 = _without_tensors(state.state2)
    return result


def _release_4bit(module: Any) -> None:
    """Drop the module's own reference to the state, which is made anew for each gather's memory."""
    if getattr(module, "quant_state", None) is not None:
        module.quant_state = None
    if hasattr(module, "support_avx512bf16_for_cpu"):
        # In eval its forward would put a repacked whole weight into the parameter, for good.
        module.support_avx512bf16_for_cpu = False


def _is_8bit(tensor: Any) -> bool:
    own = getattr(tensor, "__dict__", {})
    return own.get("has_fp16_weights") is False and "CB" in own and "SCB" in own


def _prepare_8bit(tensor: Any, module: Any) -> None:
    """Take back what the module's first forward took from the parameter."""
    state = getattr(module, "state", None)
    if tensor.CB is None and getattr(state, "CB", None) is not None:
        tensor.CB, tensor.SCB = module.state.CB, module.state.SCB


def _flatten_8bit(tensor: Any) -> tuple[dict[str, Tensor], Any]:
    return {"data": plain(tensor)}, (type(tensor), tensor.SCB)


def _unflatten_8bit(parts: dict[str, Tensor], context: Any) -> Any:
    cls, scales = context
    result = parts["data"].as_subclass(cls)
    result.__dict__.update(CB=parts["data"], SCB=scales, has_fp16_weights=False)
    return result


def _release_8bit(module: Any) -> None:
    """Let the module's next forward take the codes from the parameter again."""
    if getattr(module, "state", None) is not None:
        module.state.CB = module.state.SCB = None


def _not_quantized(tensor: Any) -> str | None:
    is_quantized = tensor.quant_state is not None if _is_4bit(tensor) else _is_int8(tensor)
    if is_quantized:
        return None
    return (
        f"is not quantized yet: bitsandbytes does that when a layer is moved to its device. Call "
        f"module.to(device={tensor.device.type!r}) before fully_shard"
    )


def _is_int8(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int8


_BY_ATTRIBUTES: list[tuple[Callable[[Any], bool], Parts]] = [
    (_is_4bit, Parts(_flatten_4bit, _unflatten_4bit, _not_quantized, release=_release_4bit)),
    (
        _is_8bit,
        Parts(
            _flatten_8bit,
            _unflatten_8bit,
            _not_quantized,
            # One number for each row: its modules save and load them by themselves.
            kept=("SCB",),
            prepare=_prepare_8bit,
            release=_release_8bit,
        ),
    ),
]
"""How they are known, and taken apart."""
