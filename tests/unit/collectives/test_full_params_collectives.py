"""What `summon_full_params` and `apply_full` send, and how much memory they take at once."""

from __future__ import annotations

import typing
import weakref

import pytest
import torch
from torch import Tensor, nn

from models import GPT
from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, apply_full, fully_shard, summon_full_params
from shardkit._params.flat_store import FlatStore

pytestmark = pytest.mark.helpers

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Recorded:
    """A GPT over four ranks of which this process plays one; what was sent."""

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        mesh, self.log = recording_mesh((4,))
        self.model: typing.Any = GPT(num_blocks=3)
        self.groups = [*self.model.blocks, self.model]
        for module in self.groups:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        self.log.clear()
        # What is gathered of each group, the root first: its parameters in fp32, padded.
        firsts = [self.model.positions, *(block.fc1.weight for block in self.model.blocks)]
        self.numels = [param.spec.layout.padded_numel for param in firsts]


@pytest.mark.parametrize("policy", [FP32, BF16], ids=["fp32", "bf16"])
def test_one_all_gather_for_each_group_and_nothing_at_the_end(
    policy: MixedPrecisionPolicy,
) -> None:
    recorded = Recorded(policy)
    with summon_full_params(recorded.model):
        gathered = [("all_gather", numel) for numel in recorded.numels]
        assert recorded.log == gathered
        with summon_full_params(recorded.model.blocks[0]):
            assert recorded.log == gathered
    assert recorded.log == gathered
    with summon_full_params(recorded.model, with_grads=True):
        pass
    assert recorded.log[4:] == [("all_gather", n) for n in recorded.numels for _ in range(2)]


def test_apply_full_gathers_each_group_once_and_has_few_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(FP32)
    alive: list[weakref.ref[Tensor]] = []
    gather_values = FlatStore.gather_values

    def noting(self: FlatStore, values: Tensor) -> Tensor:
        full = gather_values(self, values)
        alive.append(weakref.ref(full.untyped_storage()))  # type: ignore[arg-type]
        return full

    monkeypatch.setattr(FlatStore, "gather_values", noting)
    most = 0

    def count(module: nn.Module) -> None:
        nonlocal most
        del module
        most = max(most, sum(ref() is not None for ref in alive))

    apply_full(recorded.model, count)
    assert sorted(recorded.log) == sorted(("all_gather", numel) for numel in recorded.numels)
    assert len(alive) == 4
    first = most
    with summon_full_params(recorded.model):
        count(recorded.model)
        assert most == 4
    assert first == 2  # The root, whose embedding comes first and whose head last, and a block.
