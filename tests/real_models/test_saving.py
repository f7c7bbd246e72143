"""Checkpoints of the transformers package, written from sharded models and read into them."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from zoo import TIMEOUT_S, ZOO

from checkpoints import assert_same
from reference import OPTIMIZERS, full, full_parameters, my_batch, shard, train

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.models


def save_and_load(name: str, folder: str) -> None:
    """Train, save, and load into a plain model and into a sharded one."""
    case = ZOO[name]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for _ in train(case, model, optimizer, [my_batch(case, 0)]):
        pass
    expected = full_parameters(model)
    whole = {key: full(value).clone() for key, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)
        assert plain.config.architectures in (None, [type(plain).__name__])
        assert model.config.architectures == [type(plain).__name__]
    dist.barrier()

    loaded = type(plain).from_pretrained(folder)
    assert_same(dict(loaded.named_parameters()), expected)
    other = shard(case, case.make())
    other.load_state_dict(loaded.state_dict())
    assert_same(full_parameters(other), expected)
    again = shard(case, loaded)
    assert_same(full_parameters(again), expected)
    inputs, labels = my_batch(case, 1)
    with torch.no_grad():
        losses = [each.eval()(inputs, labels=labels).loss for each in (model, other, again)]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("name", ZOO)
def test_save_pretrained_and_from_pretrained(
    spawn: Spawn, tmp_path: pathlib.Path, name: str
) -> None:
    spawn(save_and_load, 2, name, str(tmp_path), timeout_s=TIMEOUT_S)
    assert (tmp_path / "model.safetensors").exists()
