"""Adapters of the peft package on sharded models, against plain training of the same adapters."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import Tensor, nn
from zoo import TIMEOUT_S, ZOO

from models import Batch, Case
from parity import compare_training
from reference import OPTIMIZERS, Differences, assert_within, full_parameters, my_batch, shard
from shardkit import ShardedTensor, register_fsdp_forward_method
from workers import Spawn, on_ranks

pytestmark = pytest.mark.models


NAMES = ["llama", "bert", "t5", "whisper"]
# Losses lie between 4 and 6: some units in their last place. Gradients are smaller than that.
TOLERANCE = 3e-6


def adapted(name: str) -> Case:
    """Return the case of a model whose linear layers have adapters, the only ones to be trained."""
    case = ZOO[name]

    def make() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        # Not initialized as usual, where one half of each adapter begins at zero.
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(case.make(), config).train()

    return Case(make, lambda model: case.groups(model.get_base_model()), case.batch, case.loss)


def make_both(name: str) -> tuple[nn.Module, nn.Module]:
    case = adapted(name)
    plain = case.make()
    return plain, shard(case, copy.deepcopy(plain))


def train_adapters(name: str, optimizer: str, use_checkpointing: bool) -> Differences:
    plain, model = make_both(name)
    if use_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    before = full_parameters(model)
    differences = compare_training(adapted(name), model, plain, optimizer, steps=5)
    after = full_parameters(model)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {key for key in before if "lora_" in key}
    return differences


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_only_adapters_train_and_as_in_plain_training(
    spawn: Spawn, name: str, optimizer: str
) -> None:
    found = spawn(train_adapters, 2, name, optimizer, False, timeout_s=TIMEOUT_S)
    assert_within(found, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


def test_adapters_train_with_gradient_checkpointing(spawn: Spawn) -> None:
    found = spawn(train_adapters, 2, "llama", "sgd", True, timeout_s=TIMEOUT_S)
    assert_within(found, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


# --- other kinds ----------------------------------------------------------------------------------


def make_config(kind: str) -> typing.Any:
    """Return the configuration of another kind of adapter, none of them without effect at first."""
    import peft

    if kind == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if kind == "prefix":
        return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if kind == "ia3":
        return peft.IA3Config(
            target_modules=["q_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
        )
    if kind == "dora":
        return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True)
    return peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])


@pytest.mark.parametrize("kind", ["prompt", "prefix", "ia3", "dora", "whole_head"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_other_kinds_of_adapters_train_as_in_plain_training(kind: str) -> None:
    llama = ZOO["llama"]

    def make() -> nn.Module:
        from peft import get_peft_model

        return get_peft_model(llama.make(), make_config(kind)).train()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens, labels = batch
        return model(input_ids=tokens, labels=labels).loss

    case = Case(make, lambda model: llama.groups(model.get_base_model()), llama.batch, loss)
    plain = make()
    model = shard(case, copy.deepcopy(plain))
    before = full_parameters(model)
    differences = compare_training(case, model, plain, steps=3)
    after = full_parameters(model)
    for key, param in model.named_parameters():
        assert torch.equal(before[key], after[key]) != param.requires_grad, key
    assert_within([differences], loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


# --- use ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "t5"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_adapters_are_saved_switched_off_and_generate(name: str) -> None:
    """Save adapters, switch them off, and generate with them."""
    from peft import get_peft_model_state_dict

    plain, model = (each.eval() for each in make_both(name))
    mine, theirs = (get_peft_model_state_dict(each) for each in (model, plain))
    assert list(mine) == list(theirs)
    for key, value in mine.items():
        assert isinstance(value, ShardedTensor)
        assert torch.equal(value.full_tensor(), theirs[key])

    inputs, labels = my_batch(ZOO[name], 0)
    with torch.no_grad():
        adapted_logits = plain(inputs, labels=labels).logits
        with model.disable_adapter(), plain.disable_adapter():
            found, expected = (each(inputs, labels=labels).logits for each in (model, plain))
        assert (found - expected).abs().max() <= TOLERANCE
        assert (adapted_logits - expected).abs().max() > 100 * TOLERANCE

    register_fsdp_forward_method(model, "generate")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    found, expected = (each.generate(inputs, **options) for each in (model, plain))
    assert torch.equal(found, expected)
