"""Tensors inside the arguments and results of a forward.

This covers more than pytree: any mapping (Hugging Face outputs are dict subclasses), dataclasses,
classes of lists and tuples (`PackedSequence` is one) and, for finding only, plain objects and
mappings that cannot be written.
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
    if isinstance(tree, MutableMapping):
        return _map_entries(fn, tree, tree, undo, can_write=True)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        entries = {each.name: getattr(tree, each.name, None) for each in dataclasses.fields(tree)}
        is_frozen = tree.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return _map_entries(fn, tree, entries, undo, can_write=not is_frozen)
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
    if type(tree) in (list, tuple) or hasattr(tree, "n_fields"):  # `torch.max` returns the last.
        return type(tree)(items)
    if isinstance(tree, list):
        result = copy.copy(tree)
        result[:] = items
        return result
    # Not by the constructor, which may want other arguments.
    result = tuple.__new__(type(tree), items)
    if hasattr(tree, "__dict__"):  # Not if it has slots, as most named tuples.
        result.__dict__.update(tree.__dict__)
    return result


def _put_into_list(tree: list[Any], changed: list[tuple[Any, Any]]) -> None:
    """Put old items back wherever the new ones are; others may have been put in or taken out."""
    olds = {id(new): old for new, old in changed}
    for index, item in enumerate(tree):
        if id(item) in olds:
            tree[index] = olds[id(item)]


def _map_entries(
    fn: Callable[[Tensor], Tensor],
    tree: Any,
    entries: Mapping[Any, Any],
    undo: Undo | None,
    *,
    can_write: bool,
) -> Any:
    """Return a mapping or a dataclass with mapped entries, in place if `undo` and it allow that."""
    mapped = ((key, map_tensors(fn, old, undo), old) for key, old in entries.items())
    changed = [each for each in mapped if each[1] is not each[2]]
    if not changed:
        return tree
    result = tree
    if undo is None or not can_write:
        result = copy.copy(tree)
    else:
        undo.append(functools.partial(_put_into_entries, tree, changed))
    for key, new, _ in changed:
        _put(result, key, new)
    return result


def _put_into_entries(tree: Any, changed: list[tuple[Any, Any, Any]]) -> None:
    for key, new, old in changed:
        held = tree.get(key) if isinstance(tree, Mapping) else getattr(tree, key, None)
        if held is new:
            _put(tree, key, old)


def _put(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, Mapping):
        tree[key] = value  # type: ignore[index]
    else:
        object.__setattr__(tree, key, value)


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
