"""Tensors inside the arguments and results of a forward.

This covers more than pytree: any mapping (Hugging Face outputs are dict subclasses), dataclasses,
namedtuples (`PackedSequence` is one) and, for finding only, plain objects.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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


Undo = list[Callable[[], None]]
"""Calls that put tensors back into containers; the last one comes first."""


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any, undo: Undo | None = None) -> Any:
    """Return `tree` with `fn` applied to its tensors; unchanged parts are the same objects.

    Args:
        fn: Function of a tensor.
        tree: Containers with tensors.
        undo: Containers that code may write to stay the same objects: their entries are replaced,
            and `put_back` undoes that by this list. None: changed containers are copied.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return _map_sequence(fn, tree, undo)
    if isinstance(tree, Mapping):
        return _map_mapping(fn, tree, undo)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree, undo)
    return tree


def map_inputs(
    fn: Callable[[Tensor], Tensor], args: Any, kwargs: dict[str, Any], undo: Undo
) -> tuple[Any, dict[str, Any]]:
    """Return the inputs of a forward with `fn` applied to their tensors, see `map_tensors`."""
    args = map_tensors(fn, args, undo)
    return args, {key: map_tensors(fn, value, undo) for key, value in kwargs.items()}


def put_back(undo: Undo) -> None:
    """Put the tensors back that `map_tensors` replaced, where nothing was written since."""
    while undo:
        undo.pop()()


def _map_sequence(fn: Callable[[Tensor], Tensor], tree: Any, undo: Undo | None) -> Any:
    items = [map_tensors(fn, item, undo) for item in tree]
    changed = [pair for pair in zip(items, tree, strict=True) if pair[0] is not pair[1]]
    if not changed:
        return tree
    if undo is not None and isinstance(tree, list):
        tree[:] = items
        undo.append(functools.partial(_put_into_list, tree, changed))
        return tree
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _put_into_list(tree: list[Any], changed: list[tuple[Any, Any]]) -> None:
    """Put old items back wherever the new ones are; others may have been put in or taken out."""
    olds = {id(new): old for new, old in changed}
    for index, item in enumerate(tree):
        if id(item) in olds:
            tree[index] = olds[id(item)]


def _map_mapping(fn: Callable[[Tensor], Tensor], tree: Any, undo: Undo | None) -> Any:
    changed = _changed(fn, tree, undo)
    if not changed:
        return tree
    result: Any = tree
    if undo is None or not isinstance(tree, MutableMapping):
        result = copy.copy(tree)
    else:
        pairs = {key: (new, tree[key]) for key, new in changed.items()}
        undo.append(functools.partial(_put_into_mapping, tree, pairs))
    for key, value in changed.items():
        result[key] = value
    return result


def _put_into_mapping(tree: MutableMapping[Any, Any], pairs: dict[Any, tuple[Any, Any]]) -> None:
    for key, (new, old) in pairs.items():
        if tree.get(key) is new:
            tree[key] = old


def _map_dataclass(fn: Callable[[Tensor], Tensor], tree: Any, undo: Undo | None) -> Any:
    names = [field.name for field in dataclasses.fields(tree)]
    changed = _changed(fn, {name: getattr(tree, name, None) for name in names}, undo)
    if not changed:
        return tree
    result = tree
    if undo is None or tree.__dataclass_params__.frozen:
        result = copy.copy(tree)
    else:
        pairs = {name: (new, getattr(tree, name)) for name, new in changed.items()}
        undo.append(functools.partial(_put_into_dataclass, tree, pairs))
    for name, value in changed.items():
        object.__setattr__(result, name, value)
    return result


def _put_into_dataclass(tree: Any, pairs: dict[str, tuple[Any, Any]]) -> None:
    for name, (new, old) in pairs.items():
        if getattr(tree, name, None) is new:
            object.__setattr__(tree, name, old)


def _changed(
    fn: Callable[[Tensor], Tensor], tree: Mapping[Any, Any], undo: Undo | None
) -> dict[Any, Any]:
    """Return the values that `fn` changes."""
    mapped = ((key, value, map_tensors(fn, value, undo)) for key, value in tree.items())
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
