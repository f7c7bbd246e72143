"""Frozen parameters over several tensors, as one tensor of bytes.

[Note: packed parameters]
A quantized weight consists of *parts* of different dtypes, such as codes and scales. Parts may
have parts themselves; the innermost are plain tensors, the *leaves*. `Packing` lays the leaves end
to end, each aligned to 16 bytes, in one 1-D uint8 tensor, which is cut, gathered and saved like any
other. That tensor is the same for every number of ranks. The unsharded parameter is put together
once, over leaves that are views of the unsharded buffer. So a gather moves only the quantized bits,
and nothing is copied before or after it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._compat import torch_tensors
from shardkit._errors import WrapError
from shardkit._layout import align_up
from shardkit._params.sites import ParamEntry
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Flatten = Callable[[Any], tuple[dict[str, Tensor], Any]]
    Unflatten = Callable[[dict[str, Tensor], Any], Any]
    from collections.abc import Sequence


# --- parts ----------------------------------------------------------------------------------------
#
# Three kinds of parameters have parts: classes that users register by `register_parts`; wrapper
# subclasses with ``__tensor_flatten__`` and ``__tensor_unflatten__``; and the parameters of
# bitsandbytes, which keep their scales in attributes. The last are recognized by these attributes,
# and nothing is imported.


@dataclass(frozen=True, slots=True)
class Parts:
    """How tensors of one class are taken apart."""

    flatten: Flatten  # Returns parts by name, and all else that is needed to put them together.
    unflatten: Unflatten  # Puts other parts of the same shapes together.
    # Returns what is wrong with a tensor that has no parts yet; None: nothing.
    problem: Callable[[Any], str | None] = lambda _: None
    # Attributes that the sharded parameter keeps unchanged, whole on every rank.
    kept: tuple[str, ...] = ()
    # Called with the parameter and each module that holds it, before `flatten`.
    prepare: Callable[[Any, nn.Module], None] = lambda *_: None
    # Called with each such module, which must then drop the whole parts.
    release: Callable[[nn.Module], None] = lambda _: None


_registered: dict[type, Parts] = {}


def register_parts(cls: type[Tensor], flatten: Flatten, unflatten: Unflatten) -> None:
    """Say which tensors frozen parameters of a class consist of, so that `fully_shard` cuts them.

    It is for quantized weights whose class keeps codes and scales in attributes. A class with
    ``__tensor_flatten__`` and ``__tensor_unflatten__`` needs no registration. Call it before
    `fully_shard`, on all ranks.

    Args:
        cls: Class of the parameter; subclasses are taken apart in the same way.
        flatten: Function of the parameter. It returns the parts, a dict of dense tensors of any
            shape and dtype on the parameter's device, and a context: anything that is no tensor.
        unflatten: Function of parts with the same names, shapes, strides and dtypes, and of the
            context. It returns a tensor of `cls` over these very parts, not over copies. It does
            not read their values, which come with each gather. Modules see its result in their
            forward.

    Raises:
        WrapError: `cls` is no tensor class, or a class of which torch makes plain parameters; or
            `flatten` or `unflatten` is no function.

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
    functions: Any = (flatten, unflatten)
    if not all(map(callable, functions)):
        msg = f"flatten and unflatten must be functions, got {flatten!r} and {unflatten!r}."
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
    """Return a plain tensor over the memory of a tensor; a plain tensor is returned itself."""
    if type(tensor) is Tensor:
        return tensor
    with torch_tensors.plain_torch_functions():
        return tensor.detach().as_subclass(Tensor)


def check_no_hidden_parts(name: str, param: nn.Parameter) -> None:
    """Refuse a frozen parameter whose class keeps tensors in attributes, which it would lose."""
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
    # Leave out the module: in a copy it would be the module of another model.
    own = {k: v for k, v in vars(tensor).items() if k not in ("quant_state", "module")}
    return parts, (type(tensor), own, _without_tensors(state))


def _unflatten_4bit(parts: dict[str, Tensor], context: Any) -> Any:
    cls, own, state = context
    state = _without_tensors(state)  # A copy.
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
    """Drop the module's own reference to the state, which is made again for each gather."""
    if getattr(module, "quant_state", None) is not None:
        module.quant_state = None
    if hasattr(module, "support_avx512bf16_for_cpu"):
        # In eval its forward would permanently put a repacked whole weight into the parameter.
        module.support_avx512bf16_for_cpu = False


def _is_8bit(tensor: Any) -> bool:
    own = getattr(tensor, "__dict__", {})
    return own.get("has_fp16_weights") is False and "CB" in own and "SCB" in own


def _prepare_8bit(tensor: Any, module: Any) -> None:
    """Give back to the parameter what the module's first forward took from it."""
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
    is_4bit, is_int8 = _is_4bit(tensor), tensor.dtype == torch.int8
    if (is_4bit and tensor.quant_state is not None) or (is_int8 and not is_4bit):
        return None
    return (
        f"is not quantized yet: bitsandbytes does that when a layer is moved to its device. Call "
        f"module.to(device={tensor.device.type!r}) before fully_shard"
    )


_BY_ATTRIBUTES: list[tuple[Callable[[Any], bool], Parts]] = [
    (_is_4bit, Parts(_flatten_4bit, _unflatten_4bit, _not_quantized, release=_release_4bit)),
    (
        _is_8bit,
        Parts(
            _flatten_8bit,
            _unflatten_8bit,
            _not_quantized,
            # One number for each row, which the modules themselves save and load.
            kept=("SCB",),
            prepare=_prepare_8bit,
            release=_release_8bit,
        ),
    ),
]
"""Tests that recognize these parameters, and how to take them apart."""


# --- packing --------------------------------------------------------------------------------------

_ALIGNMENT = 16  # Bytes, as in the layout.


@dataclass(frozen=True, slots=True)
class Leaf:
    """A plain tensor in the bytes."""

    path: str  # Names of the parts that lead to it.
    dtype: torch.dtype  # Dtype of the leaf.
    shape: tuple[int, ...]  # Shape of the leaf.
    stride: tuple[int, ...]  # Stride of a dense tensor, maybe not in the order of the dims.
    start: int  # Position of its first byte.

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def over(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """Return the tensor over the bytes of memory from `start` on.

        It has its own version counter, see `flat_store`.
        """
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = (start + self.start) // self.dtype.itemsize
        return empty.set_(storage, offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Node:
    """A tensor with parts, and how to put it together from them."""

    parts: Parts
    context: Any
    children: tuple[tuple[str, _Node | int], ...]


class Packing:
    """Positions of one parameter's leaves in bytes; see the module's docstring."""

    def __init__(self, name: str, param: Tensor) -> None:
        self.cls: type[Tensor] = type(param)  # Class of the parameter.
        self.shape = tuple(param.shape)  # Shape that users see.
        self.dtype = param.dtype  # Dtype that users see, whatever the dtypes of the leaves are.
        self._name = name
        self.nbytes = 0  # Size of all leaves and the gaps between them in bytes.
        self.leaves: list[Leaf] = []  # Leaves in the order of their bytes.
        tensors, root = _take_apart(name, param)
        assert isinstance(root, _Node)
        self._root = root
        self.parts = root.parts  # Functions that take the outermost tensor apart.
        for path, tensor in tensors:
            start = align_up(self.nbytes, _ALIGNMENT)
            stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
            leaf = Leaf(path, tensor.dtype, tuple(tensor.shape), tuple(stride), start)
            self.leaves.append(leaf)
            self.nbytes = start + leaf.nbytes

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor:
        """Return the bytes of a tensor with the same parts: 1-D uint8, in new memory."""
        tensors = self.check(tensor)
        result = torch.zeros(self.nbytes, dtype=torch.uint8, device=tensors[0].device)
        for leaf, values in zip(self.leaves, tensors, strict=True):
            if leaf.nbytes:
                leaf.over(result.untyped_storage(), 0).copy_(values)
        return result

    def check(self, tensor: Tensor) -> list[Tensor]:
        """Return the leaves of a tensor for `pack`; refuse a tensor with other parts, or none."""
        tensors, _ = _take_apart(self._name, tensor)
        found = [(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in tensors]
        expected = [(leaf.path, leaf.dtype, leaf.shape) for leaf in self.leaves]
        if found != expected:
            msg = (
                f"parameter {self._name!r} is a {self.cls.__name__} over {expected}, got a "
                f"{type(tensor).__name__} over {found}. Quantize both in the same way."
            )
            raise WrapError(msg)
        return [leaf for _, leaf in tensors]

    def unpack(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """Return the tensor over the bytes of memory from `start` on, without a copy."""
        leaves = [leaf.over(storage, start) for leaf in self.leaves]
        result: Tensor = _put_together(self._root, leaves)
        return result

    def as_parameter(self, tensor: Tensor) -> nn.Parameter:
        """Return a frozen parameter of the tensor's own class."""
        if isinstance(tensor, nn.Parameter):  # The class is itself a class of parameters.
            return tensor
        return nn.Parameter(tensor, requires_grad=False)

    def leaves_of(self, tensor: Tensor, storage: torch.UntypedStorage, start: int) -> list[Tensor]:
        """Return the leaves of a tensor that `unpack` made over bytes that begin at `start`.

        Refuse a part in other memory, which later gathers do not fill.
        """
        tensors, _ = _take_apart(self._name, tensor)
        places = {leaf.path: start + leaf.start for leaf in self.leaves}
        for path, leaf in tensors:
            is_there = leaf.untyped_storage().data_ptr() == storage.data_ptr()
            first = leaf.storage_offset() * leaf.dtype.itemsize
            if leaf.numel() and not (is_there and first == places.get(path)):
                msg = (
                    f"parameter {self._name!r} is a {self.cls.__name__}, whose part {path!r} is a "
                    f"copy when it is put together: gathered values would not come there. Have "
                    f"its __tensor_unflatten__, or what register_parts got, keep the tensors that "
                    f"it is given, or pass the parameter in ignored_params."
                )
                raise WrapError(msg)
        return [leaf for _, leaf in tensors]


def packing_of(entry: ParamEntry) -> Packing | None:
    """Return how a parameter is packed; None: it is not. Refuse parts that cannot be packed."""
    param, name = entry.param, entry.name
    if isinstance(param, ShardedTensor):
        packing: Packing | None = param.spec.packing
        return packing
    if tensor_parallel_of(param) is not None:
        _check_tensor_parallel(name, param)
        return None
    parts = parts_of(param)
    gathers_itself = hasattr(param, "fsdp_pre_all_gather")
    if parts is None:
        if not gathers_itself:
            check_no_hidden_parts(name, param)
        return None
    if param.requires_grad:
        if not gathers_itself:
            msg = (
                f"parameter {name!r} is a {type(param).__name__} that is to be trained, and has no "
                f"fsdp_pre_all_gather and fsdp_post_all_gather to say how it is gathered. Freeze "
                f"it (requires_grad_(False)) before fully_shard, add the two methods to its class, "
                f"or pass it in ignored_params."
            )
            raise WrapError(msg)
        return None
    problem = parts.problem(param)
    if problem is not None:
        msg = f"parameter {name!r}, a {type(param).__name__}, {problem}."
        raise WrapError(msg)
    for module, _ in entry.sites:
        parts.prepare(param, module)
    packing = Packing(name, param)
    # A single leaf that looks like the parameter: the hooks of its class gather it.
    looks = [(leaf.shape, leaf.dtype) for leaf in packing.leaves]
    is_one_plain = looks == [(packing.shape, packing.dtype)]
    return None if gathers_itself and is_one_plain else packing


def stored_dtype(entry: ParamEntry) -> torch.dtype:
    """Return the dtype in which a parameter is cut."""
    return torch.uint8 if packing_of(entry) is not None else entry.param.dtype


def numel_and_dtype(name: str, param: nn.Parameter) -> tuple[int, torch.dtype]:
    """Return the number and dtype of the elements that `fully_shard` cuts of a parameter."""
    packing = packing_of(ParamEntry(name, param, []))
    return (param.numel(), param.dtype) if packing is None else (packing.nbytes, torch.uint8)


def _check_tensor_parallel(name: str, param: Any) -> None:
    (inner, *_), _ = param.__tensor_flatten__()  # `to_local` is an operator on the part.
    part = getattr(param, inner)
    if parts_of(part) is not None:
        msg = (
            f"parameter {name!r} is a DTensor over a {type(part).__name__}, whose parts cannot be "
            f"cut twice. Leave quantized layers out of parallelize_module, or do not quantize the "
            f"layers that tensor parallelism splits."
        )
        raise WrapError(msg)


def _take_apart(name: str, tensor: Tensor) -> tuple[list[tuple[str, Tensor]], _Node | int]:
    """Return the leaves of a tensor, once per memory, and how to put it together."""
    leaves: list[tuple[str, Tensor]] = []
    known: dict[tuple[Any, ...], int] = {}

    def visit(part: Any, path: str) -> _Node | int:
        parts = parts_of(part) if isinstance(part, Tensor) else None
        if parts is None:
            leaf = _checked(part, tensor, name, path)
            where = _memory_of(leaf)
            if where not in known:
                known[where] = len(leaves)
                leaves.append((path, leaf))
            return known[where]
        children, context = parts.flatten(part)
        inner = ((key, visit(each, f"{path}.{key}".strip("."))) for key, each in children.items())
        return _Node(parts, context, tuple(inner))

    return leaves, visit(tensor, "")


def _memory_of(leaf: Tensor) -> tuple[Any, ...]:
    where = id(leaf) if leaf.is_meta or not leaf.numel() else leaf.data_ptr()
    return where, leaf.dtype, leaf.shape, leaf.stride()


def _checked(part: Any, whole: Tensor, name: str, path: str) -> Tensor:
    """Return a leaf as a plain tensor."""
    is_tensor = isinstance(part, Tensor) and not isinstance(part, ShardedTensor)
    if not is_tensor or part.layout != torch.strided or part.device != whole.device:
        found = f"{part.layout} on {part.device}" if is_tensor else type(part).__name__
        msg = (
            f"parameter {name!r} is a {type(whole).__name__} on {whole.device}, whose part "
            f"{path!r} is {found}: parts must be dense tensors on the parameter's device. Move "
            f"the module to one device, or pass the parameter in ignored_params."
        )
        raise WrapError(msg)
    return plain(part)


def _put_together(node: _Node | int, leaves: Sequence[Tensor]) -> Any:
    if isinstance(node, int):
        return leaves[node]
    parts = {name: _put_together(child, leaves) for name, child in node.children}
    return node.parts.unflatten(parts, node.context)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory, with one element per place."""
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((st, si) for st, si in dims if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
