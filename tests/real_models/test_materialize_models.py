"""Models of transformers on meta: values module by module, as their `_init_weights` says."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from torch import nn
from zoo import DECODER, TIMEOUT_S, ZOO

from reference import full_parameters, make_mesh, my_batch, shard
from shardkit import materialize
from workers import on_ranks

pytestmark = pytest.mark.models


@pytest.mark.parametrize("name", ZOO)
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_values_are_those_of_the_plain_model(name: str) -> None:
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


GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def _untied(model: str, task: str, options: dict[str, typing.Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{model}Config")(tie_word_embeddings=False, **options)
    made: nn.Module = getattr(transformers, f"{model}{task}")(config)
    return made


def _untied_t5() -> nn.Module:
    made = typing.cast("typing.Any", _untied("T5", "ForConditionalGeneration", T5))
    for stack in (made.encoder, made.decoder):
        stack.embed_tokens = nn.Embedding(96, 32)
    made.lm_head = nn.Linear(32, 96, bias=False)
    return typing.cast("nn.Module", made)


UNTIED = {
    "llama": ZOO["llama"].make,
    "bert": lambda: _untied("Bert", "ForMaskedLM", DECODER),
    "gpt2": lambda: _untied("GPT2", "LMHeadModel", GPT2),
    "t5": _untied_t5,
}
"""Transformers draws tied parameters once for each module that holds them, `materialize` once."""


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", UNTIED)
@on_ranks("world_size", timeout_s=TIMEOUT_S)
def test_values_are_those_of_initialize_weights(name: str, world_size: int) -> None:
    """The same seed before `initialize_weights` of the plain model."""
    case = dataclasses.replace(ZOO[name], make=UNTIED[name])
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh((world_size,)))
    torch.manual_seed(4)
    materialize(model)
    plain = typing.cast("typing.Any", case.make())
    for module in plain.modules():
        module._is_hf_initialized = False  # noqa: SLF001 - as in a new model
    torch.manual_seed(4)
    plain.initialize_weights()
    for key, whole in full_parameters(model).items():
        assert torch.equal(whole, plain.get_parameter(key)), key


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_scales_are_those_of_the_constructor(name: str) -> None:
    """Tied parameters are drawn less often, so others are from other numbers, as large ones."""
    case = ZOO[name]
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh((2,)))
    materialize(model)
    plain = case.make()
    for key, whole in full_parameters(model).items():
        expected = plain.get_parameter(key).detach().std()
        assert (whole.std() - expected).abs() <= 0.25 * expected, key
