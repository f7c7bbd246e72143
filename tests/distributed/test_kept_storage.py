"""Memory of unsharded parameters that stays while they are resharded."""

from __future__ import annotations

import torch
from torch import nn

from parity import Pair, Ranks, Run, on_meshes
from shardkit import MixedPrecisionPolicy


def addresses(model: nn.Module) -> list[int]:
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        found = [param.data_ptr() for param in model.parameters()]
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    return found


def train_in_kept_memory(ranks: Ranks) -> None:
    """Parameters have one address while the memory is kept, and steps are as usual."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    pair = Pair(ranks, "gpt", mp_policy=policy)
    pair.sharded.set_keep_unsharded_storage(True)
    first = addresses(pair.sharded)
    for _ in range(3):
        pair.backward(pair.draw())
        pair.assert_equal_gradients()
        pair.update()
        pair.sharded.zero_grad()
        pair.plain.zero_grad()
        assert addresses(pair.sharded) == first
    assert len(set(first)) == len(first)  # No group takes the memory of another one.
    pair.sharded.set_keep_unsharded_storage(False)
    for _ in range(2):
        pair.backward(pair.draw())
    pair.assert_equal_gradients()


@on_meshes((2,), (2, 2), xla=())
def test_unsharded_parameters_keep_their_address(run: Run) -> None:
    run(train_in_kept_memory)
