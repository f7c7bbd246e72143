"""Frozen parameters over several tensors, as one tensor of bytes.

[Note: packed parameters]
A quantized weight lies over codes, scales and the like: its *parts*, of different dtypes. They may
be such tensors themselves; in the end there are plain ones, the *leaves*. `Packing` lays the leaves
end to end, each on 16 bytes, in one 1-D uint8 tensor, which is cut, gathered and saved like any
other. It is the same for every number of ranks. The unsharded parameter is put together once, over
leaves that are views of the unsharded buffer. So a gather moves the few bits that there are, and
nothing is copied before or after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import WrapError
from shardkit._params.parts import check_no_hidden_parts, parts_of, plain
from shardkit._params.sites import ParamEntry
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._params.parts import Parts

_ALIGNMENT = 16  # Bytes; as the layout's.


@dataclass(frozen=True, slots=True)
class Leaf:
    """A plain tensor in the bytes.

    Attributes:
        path: Names of the parts that lead to it.
        dtype: Dtype of the leaf.
        shape: Shape of the leaf.
        stride: Stride of a dense tensor, maybe not in the order of the dims.
        start: Position of its first byte.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def over(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """Return the tensor in memory that begins with the bytes at `start`.

        It has a version counter of its own, see `flat_store`.
        """
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        offset = (start + self.start) // self.dtype.itemsize
        return empty.set_(storage, offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Node:
    """A tensor with parts: how to put it together from them."""

    parts: Parts
    context: Any
    children: tuple[tuple[str, _Node | int], ...]


class Packing:
    """How the leaves of one parameter lie in bytes; see the module's docstring.

    Attributes:
        cls: Class of the parameter.
        shape: Shape that users see.
        dtype: Dtype that users see, whatever the leaves' are.
        nbytes: Size of all leaves and the gaps between them in bytes.
        leaves: Leaves in the order of their bytes.
        parts: Functions that take the outermost tensor apart.
    """

    def __init__(self, name: str, param: Tensor) -> None:
        self.cls: type[Tensor] = type(param)
        self.shape = tuple(param.shape)
        self.dtype = param.dtype
        self._name = name
        self.nbytes = 0
        self.leaves: list[Leaf] = []
        tensors, root = _take_apart(name, param)
        assert isinstance(root, _Node)
        self._root, self.parts = root, root.parts
        for path, tensor in tensors:
            start = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
            stride = tensor.stride() if _is_dense(tensor) else tensor.contiguous().stride()
            leaf = Leaf(path, tensor.dtype, tuple(tensor.shape), tuple(stride), start)
            self.leaves.append(leaf)
            self.nbytes = start + leaf.nbytes

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor:
        """Return the bytes of a tensor with the same parts: 1-D uint8, in memory of its own.

        Raises:
            WrapError: Its parts are others.
        """
        tensors = self._checked(tensor)
        result = torch.zeros(self.nbytes, dtype=torch.uint8, device=tensors[0][1].device)
        for leaf, (_, values) in zip(self.leaves, tensors, strict=True):
            if leaf.nbytes:
                leaf.over(result.untyped_storage(), 0).copy_(values)
        return result

    def check(self, tensor: Tensor) -> None:
        """Raise if `pack` does not take a tensor.

        Raises:
            WrapError: Its parts are others, or it has none.
        """
        self._checked(tensor)

    def _checked(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        tensors, _ = _take_apart(self._name, tensor)
        found = [(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in tensors]
        expected = [(leaf.path, leaf.dtype, leaf.shape) for leaf in self.leaves]
        if found != expected:
            msg = (
                f"parameter {self._name!r} is a {self.cls.__name__} over {expected}, got a "
                f"{type(tensor).__name__} over {found}. Quantize both in the same way."
            )
            raise WrapError(msg)
        return tensors

    def unpack(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """Return the tensor over bytes that begin at `start` in memory, not copied."""
        leaves = [leaf.over(storage, start) for leaf in self.leaves]
        result: Tensor = _put_together(self._root, leaves)
        return result

    def as_parameter(self, tensor: Tensor) -> nn.Parameter:
        """Return a frozen parameter of the tensor's own class."""
        if isinstance(tensor, nn.Parameter):  # A class of parameters, made as it is.
            return tensor
        return nn.Parameter(tensor, requires_grad=False)

    def leaves_of(self, tensor: Tensor, storage: torch.UntypedStorage, start: int) -> list[Tensor]:
        """Return the leaves of a tensor that `unpack` made over bytes that begin at `start`.

        Raises:
            WrapError: A part is in memory of its own, where later bytes do not come.
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
    """Return how a parameter is packed; None if it is not.

    Raises:
        WrapError: Its class has parts, and it cannot be packed.
    """
    param, name = entry.param, entry.name
    if isinstance(param, ShardedTensor):
        packing: Packing | None = param.spec.packing  # type: ignore[assignment]
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
            raise _trainable_error(name, param)
        return None
    _prepare(entry, parts)
    packing = Packing(name, param)
    if gathers_itself and _is_one_plain(packing):
        return None
    return packing


def _prepare(entry: ParamEntry, parts: Parts) -> None:
    """Let a parameter have its parts, or refuse it."""
    problem = parts.problem(entry.param) if parts.problem is not None else None
    if problem is not None:
        msg = f"parameter {entry.name!r}, a {type(entry.param).__name__}, {problem}."
        raise WrapError(msg)
    if parts.prepare is not None:
        for module, _ in entry.sites:
            parts.prepare(entry.param, module)


def _is_one_plain(packing: Packing) -> bool:
    """Whether there is one leaf that looks like the parameter: its class's hooks gather that."""
    seen = [(leaf.shape, leaf.dtype) for leaf in packing.leaves]
    return seen == [(packing.shape, packing.dtype)]


def stored_dtype(entry: ParamEntry) -> torch.dtype:
    """Return in which dtype a parameter is cut."""
    return torch.uint8 if packing_of(entry) is not None else entry.param.dtype


def numel_and_dtype(param: nn.Parameter) -> tuple[int, torch.dtype]:
    """Return how many elements of which dtype `fully_shard` cuts of a parameter."""
    packing = packing_of(ParamEntry("?", param, []))
    return (param.numel(), param.dtype) if packing is None else (packing.nbytes, torch.uint8)


def _trainable_error(name: str, param: Tensor) -> WrapError:
    return WrapError(
        f"parameter {name!r} is a {type(param).__name__} that is to be trained, and has no "
        f"fsdp_pre_all_gather and fsdp_post_all_gather to say how it is gathered. Freeze it "
        f"(requires_grad_(False)) before fully_shard, add the two methods to its class, or pass "
        f"it in ignored_params."
    )


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
    """Return the leaves of a tensor, each memory once, and how to put it together."""
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
    """Whether the elements fill a range of memory, each place once."""
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((st, si) for st, si in dims if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
