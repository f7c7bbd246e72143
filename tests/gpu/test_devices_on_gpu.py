"""On a card: how process groups and devices are chosen."""

from __future__ import annotations

import os
import typing

import pytest
import torch
from torch import nn

import one_card
from launching import environment_of, free_port
from models import CASES
from one_card import (
    CARD,
    CardDifferences,
    CardRanks,
    compare_training,
    reduce_by_buffers,
)
from reference import TRAINED, assert_within
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


def train_separately(name: str, mesh_shape: tuple[int, ...], bound: bool) -> CardDifferences:
    """Train with reductions on a process group of their own."""
    if bound:
        one_card.start_group(device_id=CARD)
    ranks, case = CardRanks(mesh_shape), CASES[name]
    model, plain = ranks.pair(case)
    model.set_separate_reduce_scatter_group(True)
    reduce_by_buffers(model)
    return compare_training(case, model, plain, ranks)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize(
    ("mesh_shape", "bound"),
    [((1,), True), ((1, 1), True), ((1,), False), ((2,), False)],
    ids=str,
)
def test_reductions_may_have_a_group_of_their_own(
    on_card: Spawn, mesh_shape: tuple[int, ...], bound: bool, name: str
) -> None:
    """Also where the default group was bound to the card when it was made."""
    found = on_card(train_separately, torch.Size(mesh_shape).numel(), name, mesh_shape, bound)
    assert_within(found, **TRAINED)


def train_with_an_engine_for_the_host() -> CardDifferences:
    one_card.start_group("cpu:gloo,cuda:nccl")
    ranks, case = CardRanks(), CASES["gpt"]
    model, plain = ranks.pair(case)
    return compare_training(case, model, plain, ranks)


def test_a_group_may_have_an_engine_for_the_host_as_well(on_card: Spawn) -> None:
    found = on_card(train_with_an_engine_for_the_host, 1)
    assert_within(found, **TRAINED)


def train_from_the_environment() -> CardDifferences:
    """Let the mesh start NCCL, as under a launcher."""
    torch.distributed.destroy_process_group()
    os.environ.update(environment_of(0, 1, free_port(), LOCAL_RANK="0"))
    ranks, case = CardRanks((1,)), CASES["mlp"]
    assert "nccl" in torch.distributed.get_backend_config()
    model, plain = ranks.pair(case)
    return compare_training(case, model, plain, ranks)


def test_the_mesh_starts_nccl_where_a_launcher_says_who_is_who(on_card: Spawn) -> None:
    found = on_card(train_from_the_environment, 1)
    assert_within(found, **TRAINED)


def shard_on_another_card() -> str:
    """Return what `fully_shard` says of a model on one card while the other is the current one."""
    torch.cuda.set_device(1)
    mesh = one_card.make_card_mesh((1,))
    try:
        fully_shard(nn.Linear(4, 4).to("cuda:0"), mesh)
    except Exception as error:  # noqa: BLE001 - the test judges
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.skipif(one_card.NUM_CARDS < 2, reason="needs two CUDA devices, torch sees fewer")
def test_a_model_on_another_card_than_the_current_one_is_refused(on_card: Spawn) -> None:
    [found] = on_card(shard_on_another_card, 1)
    assert found.startswith("WrapError")
    assert "set_device" in found
