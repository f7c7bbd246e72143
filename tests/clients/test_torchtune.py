"""torchtune's functions for sharded models, unchanged, with shardkit in FSDP2's place."""

from __future__ import annotations

import typing

import pytest
import torch
from tune_ranks import MODELS, SHARDERS, Tuned, tune

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn

pytestmark = pytest.mark.clients

# Losses lie around 4; sums over ranks and norms are added up in other orders.
TOLERANCE = 1e-5


def largest_difference(found: Tuned, wanted: Tuned) -> float:
    """Return the largest difference of losses, norms, parameters and optimizer state."""
    pairs = [
        *zip(found.losses, wanted.losses, strict=True),
        *zip(found.norms, wanted.norms, strict=True),
    ]
    differences = [abs(a - b) for a, b in pairs]
    states = [*zip(found.states, wanted.states, strict=True)]
    states += [(found.adapters, wanted.adapters), (found.optimizer, wanted.optimizer)]
    for state, expected in states:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert type(value) is torch.Tensor, name
            assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype), name
            differences.append(float((value - expected[name]).abs().max()))
    return max(differences)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_its_functions_give_what_they_give_with_fsdp2(
    spawn: Spawn, tell: Callable[[str, str, str], None], model: str, shape: tuple[int, ...]
) -> None:
    ranks = torch.Size(shape).numel()
    wanted, found = (spawn(tune, ranks, each, model, shape, timeout_s=300) for each in SHARDERS)
    assert wanted[0].classes == {("DTensor", True)}
    assert found[0].classes == {("ShardedTensor", True)}
    assert len(found[0].states[0]) > 10
    assert found[1].states == [{}, {}]
    difference = max(map(largest_difference, found, wanted))
    tell("torchtune", f"{model}, shard_model, load and save, {shape}", f"{difference:.1e}")
    assert difference <= TOLERANCE
