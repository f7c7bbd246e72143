"""Tensors inside the arguments and results of a forward.

This covers more than pytree: any mapping (Hugging Face outputs are dict subclasses), dataclasses,
namedtuples (`PackedSequence` is one) and, for finding only, plain objects.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)
_OPAQUE = (
    type,
    torch.nn.Module,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
)
_MAX_OBJECT_DEPTH = 3
"""Depth to which plain objects are searched, since an output may hold the model itself."""


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return `tree` with `fn` applied to its tensors; unchanged parts are the same objects."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return _map_sequence(fn, tree)
    if isinstance(tree, Mapping):
        changed = _changed(fn, tree)
        if not changed:
            return tree
        result: Any = copy.copy(tree)
        for key, value in changed.items():
            result[key] = value
        return result
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree)
    return tree


def _map_sequence(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    items = [map_tensors(fn, item) for item in tree]
    if all(new is old for new, old in zip(items, tree, strict=True)):
        return tree
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _map_dataclass(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    names = [field.name for field in dataclasses.fields(tree)]
    changed = _changed(fn, {name: getattr(tree, name, None) for name in names})
    if not changed:
        return tree
    result = copy.copy(tree)
    for name, value in changed.items():
        object.__setattr__(result, name, value)
    return result


def _changed(fn: Callable[[Tensor], Tensor], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the values that `fn` changes."""
    mapped = ((key, value, map_tensors(fn, value)) for key, value in tree.items())
    return {key: new for key, old, new in mapped if new is not old}


def iter_tensors(tree: Any, *, depth: int = _MAX_OBJECT_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in `tree`, including those in attributes of plain objects."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, _LEAVES):
        return
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from iter_tensors(item, depth=depth)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from iter_tensors(item, depth=depth)
    elif depth > 0 and not isinstance(tree, _OPAQUE):
        for item in _attributes(tree):
            yield from iter_tensors(item, depth=depth - 1)


def _attributes(tree: Any) -> list[Any]:
    """Return the values of a plain object's attributes, in ``__dict__`` or in slots."""
    values = list(getattr(tree, "__dict__", {}).values())
    for cls in type(tree).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        values += [getattr(tree, n) for n in names if n != "__weakref__" and hasattr(tree, n)]
    return values
