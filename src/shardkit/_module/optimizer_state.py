"""State that an optimizer made of whole parameters is cut before the optimizer uses it again.

An optimizer may be older than `fully_shard`: Adagrad makes its state when it is constructed, others
at their first step. `load_state_dict` may bring whole state as well, of a plain training.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit._state.full import STATE_NUMBERS, cut_whole
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from torch.optim import Optimizer

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose state was looked at since it could last become whole."""


def forget_known() -> None:
    """Look at every optimizer again: other parameters have been sharded."""
    _known.clear()


def cut_whole_state(optimizer: Optimizer, *_: Any) -> None:
    """Cut state that has the whole shape of a sharded parameter, as the parameter is cut.

    Torch calls it before each step of any optimizer.

    All ranks must hold the same state. Nothing is sent. It is looked at once, and again after
    ``optimizer.load_state_dict``.
    """
    if optimizer in _known:
        return
    _known.add(optimizer)
    optimizer.register_load_state_dict_post_hook(_known.discard)
    for param, state in optimizer.state.items():
        if isinstance(param, ShardedTensor):
            for name, value in state.items():
                if _is_whole(value, name, param):
                    state[name] = cut_whole(value, param, name)


def _is_whole(value: Any, name: str, param: ShardedTensor) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, ShardedTensor)
        and value.shape == param.shape
        and name not in STATE_NUMBERS
    )
