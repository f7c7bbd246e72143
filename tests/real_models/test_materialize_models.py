"""Models of transformers on meta: values module by module, as their `_init_weights` says."""

from __future__ import annotations

import typing

import pytest
import torch
from zoo import TIMEOUT_S, ZOO

from reference import full_parameters, make_mesh, my_batch, shard
from shardkit import materialize

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.models


def materialized(name: str) -> None:
    case = ZOO[name]
    with torch.device("meta"):
        plain = case.make()
        model = shard(case, case.make(), make_mesh((2,)))
    for each in (plain, model):
        torch.manual_seed(4)
        materialize(each)
    for key, whole in full_parameters(model).items():
        assert torch.equal(whole, plain.get_parameter(key)), key
        assert whole.isfinite().all(), key
    for key, buffer in case.make().named_buffers():  # They are computed, not drawn.
        assert torch.equal(model.get_buffer(key), buffer), key
    case.loss(model, my_batch(case, 0)).backward()


@pytest.mark.parametrize("name", ZOO)
def test_values_are_those_of_the_plain_model(spawn: Spawn, name: str) -> None:
    spawn(materialized, 2, name, timeout_s=TIMEOUT_S)


def as_initialized_by_the_model() -> None:
    """The same seed before `initialize_weights` of the plain model."""
    case = ZOO["llama"]
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh((2,)))
    torch.manual_seed(4)
    materialize(model)
    plain = typing.cast("typing.Any", case.make())
    for module in plain.modules():
        module._is_hf_initialized = False  # noqa: SLF001 - as in a new model
    torch.manual_seed(4)
    plain.initialize_weights()
    for key, whole in full_parameters(model).items():
        assert torch.equal(whole, plain.get_parameter(key)), key


def test_values_are_those_of_initialize_weights(spawn: Spawn) -> None:
    spawn(as_initialized_by_the_model, 2, timeout_s=TIMEOUT_S)
