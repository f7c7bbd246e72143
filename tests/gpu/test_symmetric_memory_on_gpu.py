"""On a card: small groups gather out of NCCL's symmetric memory, and train as without it."""

from __future__ import annotations

import typing

import pytest

import one_card
from models import CASES
from one_card import CardRanks, compare_training
from reference import TRAINED, assert_within
from shardkit._compat import torch_fsdp2
from shardkit._module.hooks import groups_in

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = [
    *one_card.NEEDS_CARD,
    pytest.mark.skipif(not torch_fsdp2.symmetric_kinds("cuda"), reason="torch has none"),
]


def train_out_of_symmetric_memory(max_bytes: int, sums_only: bool) -> typing.Any:
    ranks, case = CardRanks(), CASES["gpt"]
    model, plain = ranks.pair(case)
    modules: list[typing.Any] = [m for m in model.modules() if hasattr(m, "set_all_reduce_hook")]
    for module in modules:
        module.set_force_sum_reduction_for_comms(sums_only)
        module.set_symm_mem_for_comm(max_bytes=max_bytes)
    using = [
        g.settings.comm.all_gather is not None for m in modules for g in groups_in(m, recurse=False)
    ]
    return using, compare_training(case, model, plain, ranks)


@pytest.mark.parametrize("sums_only", [False, True])
@pytest.mark.parametrize("max_bytes", [64 << 20, 0])
def test_training_is_the_same(on_card: Spawn, max_bytes: int, sums_only: bool) -> None:
    [(using, found)] = on_card(train_out_of_symmetric_memory, 1, max_bytes, sums_only)
    assert set(using) == {max_bytes > 0}
    assert_within([found], **TRAINED)
