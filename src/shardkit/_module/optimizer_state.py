"""State that an optimizer made of whole parameters is cut before the optimizer uses it again.

An optimizer may be older than `fully_shard`: Adagrad makes its state when it is constructed, others
at their first step. `load_state_dict` may bring whole state as well, of a plain training.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._errors import StateError
from shardkit._state.full import STATE_NUMBERS, cut_whole, map_leaves
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.optim.optimizer import Optimizer

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose state was looked at since it could last become whole."""

_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that are looked at again after ``load_state_dict``."""


def forget_known() -> None:
    """Look at every optimizer again: other parameters have been sharded."""
    _known.clear()


def cut_whole_state(optimizer: Optimizer, *_: Any) -> None:
    """Cut state that has the whole shape of a sharded parameter, as the parameter is cut.

    Torch calls it before each step of any optimizer.

    All ranks must hold the same state. Nothing is sent. It is looked at once, and again after
    ``optimizer.load_state_dict``. State of other shapes stays whole: rows and columns of Adafactor,
    what LBFGS keeps of all parameters in one vector.

    Raises:
        StateError: State is on the meta device, and its parameter is not any more.
    """
    if optimizer in _known:
        return
    _known.add(optimizer)
    if optimizer not in _hooked:
        _hooked.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_known.discard)
    if isinstance(optimizer, torch.optim.LBFGS):
        return  # Its vectors may have the length of its only parameter.
    numbers = _numbers(optimizer)
    for param, state in optimizer.state.items():
        if isinstance(param, ShardedTensor):
            for name, value in state.items():
                leaves = list(_tensors_in(value))
                _check_has_values(optimizer, leaves, name, param)
                is_number = param.ndim == 0 and name in numbers
                if not is_number and any(_is_whole(leaf, param) for leaf in leaves):
                    state[name] = _cut(value, name, param)


def _cut(value: Any, name: str, param: ShardedTensor) -> Any:
    def cut(leaf: Any) -> Any:
        return cut_whole(leaf, param, name) if _is_whole(leaf, param) else leaf

    return map_leaves(value, cut)


def _is_whole(leaf: Any, param: ShardedTensor) -> bool:
    return (
        isinstance(leaf, Tensor)
        and not isinstance(leaf, ShardedTensor)
        and leaf.shape == param.shape
    )


def _numbers(optimizer: Optimizer) -> set[str]:
    """Return the names of state that is one number for each parameter, whatever its shape.

    Only of a parameter without dimensions it has the parameter's shape, too.
    """
    found = set(STATE_NUMBERS)
    for key, state in optimizer.state.items():
        param: Any = key
        if getattr(param, "ndim", 0) > 0:
            found |= {n for n, v in state.items() if isinstance(v, Tensor) and v.ndim == 0}
    return found


def _tensors_in(value: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    if isinstance(value, (Tensor, dict, list, tuple)):
        map_leaves(value, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    yield from found


def _check_has_values(
    optimizer: Optimizer, leaves: list[Tensor], name: str, param: ShardedTensor
) -> None:
    if not param.is_meta and any(leaf.is_meta for leaf in leaves):
        kind = type(optimizer).__name__
        msg = (
            f"state {name!r} of parameter {param.spec.name!r} is on the meta device, without "
            f"values: this {kind} was made, and made its state, before the parameters got values. "
            f"Make the {kind} after materialize(), load_full() or to_empty()."
        )
        raise StateError(msg)
