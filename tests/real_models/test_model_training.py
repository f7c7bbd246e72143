"""Models of the transformers package trained sharded, against plain training on all data."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn
from zoo import TIMEOUT_S, ZOO

from parity import compare_training
from reference import OPTIMIZERS, Differences, assert_within, global_batch, my_batch, shard, train
from shardkit import MixedPrecisionPolicy, ShardedTensor
from workers import Spawn, on_ranks

pytestmark = pytest.mark.models


STEPS = 5
# Losses lie between 1 and 6: some units in their last place. Gradients are smaller than that.
TOLERANCE = 3e-6


def make_both(name: str) -> tuple[nn.Module, nn.Module]:
    """Make a plain model, in training mode, and the same one with its layers and root sharded."""
    plain = ZOO[name].make().train()
    return plain, shard(ZOO[name], copy.deepcopy(plain))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ZOO)
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_training_equals_plain_training(name: str, optimizer: str) -> None:
    plain, model = make_both(name)
    differences = compare_training(ZOO[name], model, plain, optimizer, STEPS)
    if optimizer == "adamw":
        # The gradient of a bias of keys is zero but for rounding, and what is left of it AdamW
        # divides by its own size. No loss and no other gradient depends on such a bias.
        del differences["parameter"]
    tolerances = {"loss": TOLERANCE, "grad": TOLERANCE, "parameter": TOLERANCE}
    if optimizer == "adamw":
        del tolerances["parameter"]
    assert_within([differences], **tolerances)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ZOO)
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_gradient_checkpointing_equals_training_without(name: str, use_reentrant: bool) -> None:
    plain, model = make_both(name)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_within(
        [compare_training(ZOO[name], model, plain, steps=2)],
        loss=TOLERANCE,
        grad=TOLERANCE,
        parameter=TOLERANCE,
    )


def count_forwards() -> tuple[int, int]:
    """Return how often attention runs in a step, without checkpointing and with it."""
    _, model = make_both("llama")
    calls: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    ZOO["llama"].loss(model, my_batch(ZOO["llama"], 0)).backward()
    without = len(calls)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ZOO["llama"].loss(model, my_batch(ZOO["llama"], 1)).backward()
    return without, len(calls) - without


def test_gradient_checkpointing_runs_layers_again(spawn: Spawn) -> None:
    """Or the test above would compare training without it."""
    assert spawn(count_forwards, 2, timeout_s=TIMEOUT_S) == [(3, 6)] * 2


@pytest.mark.parametrize("name", ["tied_llama", "t5", "whisper", "mixtral"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_accumulated_gradients_equal_those_of_plain_training(name: str) -> None:
    """Compare gradients of two steps, each of three micro-batches of which one is synced."""
    case = ZOO[name]
    plain, model = make_both(name)
    differences = Differences()
    for step in range(2):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            number = 3 * step + micro
            for each, draw in ((model, my_batch), (plain, global_batch)):
                (case.loss(each, draw(case, number)) / 3).backward()
        differences.note_grads(model, plain)
        for each in (model, plain):
            each.zero_grad()
    assert_within([differences], grad=TOLERANCE)


@pytest.mark.parametrize("name", ZOO)
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_mixed_precision_computes_what_a_model_in_bfloat16_does(name: str) -> None:
    """Compare with a model whose parameters are bfloat16; buffers are fp32 in both."""
    plain = ZOO[name].make().eval()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(ZOO[name], copy.deepcopy(plain), mp_policy=policy)
    for param in plain.parameters():
        param.data = param.data.to(torch.bfloat16)
    inputs, labels = my_batch(ZOO[name], 0)
    whole = inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs
    differences = Differences()
    differences.note(
        "logits", model(inputs, labels=labels).logits, plain(whole, labels=labels).logits
    )
    assert_within([differences], logits=0.0)


# --- between steps --------------------------------------------------------------------------------


def evaluate_between_steps(name: str, context: str) -> list[Differences]:
    case = ZOO[name]
    plain, model = make_both(name)
    # Without momentum, and on the same batch everywhere, so that only the evaluations may differ.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    found = []
    for step in range(3):
        batch = my_batch(case, step)
        differences = Differences()
        with getattr(torch, context)():
            inputs, labels = batch
            actual, expected = (each.eval()(inputs, labels=labels) for each in (model, plain))
        differences.note("loss", actual.loss, expected.loss)
        differences.note("logits", actual.logits, expected.logits)
        assert not actual.logits.requires_grad
        found.append(differences)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            shared = case.batch(torch.Generator().manual_seed(step))
            for _ in train(case, each.train(), optimizer, [shared]):
                pass
    return found


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", ZOO)
def test_evaluation_between_steps_gives_the_same_logits(
    spawn: Spawn, name: str, context: str
) -> None:
    for by_step in zip(
        *spawn(evaluate_between_steps, 2, name, context, timeout_s=TIMEOUT_S), strict=True
    ):
        assert_within(by_step, loss=TOLERANCE, logits=TOLERANCE)


# --- names and tied weights -----------------------------------------------------------------------


def tied_names(model: nn.Module) -> set[frozenset[str]]:
    """Return the sets of names under which one and the same Parameter object is found."""
    by_object = collections.defaultdict(set)
    for name, param in model.named_parameters(remove_duplicate=False):
        by_object[id(param)].add(name)
    return {frozenset(names) for names in by_object.values() if len(names) > 1}


TIED = {
    "tied_llama": {frozenset({"lm_head.weight", "model.embed_tokens.weight"})},
    "gpt2": {frozenset({"lm_head.weight", "transformer.wte.weight"})},
    "bert": {
        frozenset({"cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"}),
        frozenset({"cls.predictions.decoder.bias", "cls.predictions.bias"}),
    },
    "t5": {
        frozenset(
            {
                "shared.weight",
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
                "lm_head.weight",
            }
        )
    },
    "whisper": {frozenset({"proj_out.weight", "model.decoder.embed_tokens.weight"})},
}


@pytest.mark.parametrize("name", ZOO)
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_names_stay_those_of_the_plain_model_and_tied_weights_stay_one(name: str) -> None:
    """Compare the names that the model shows with the plain one's, before, in and after steps."""
    case = ZOO[name]
    plain, model = make_both(name)
    tied = TIED.get(name, set())
    assert tied_names(plain) == tied
    params = list(model.parameters())
    optimizer = OPTIMIZERS["adamw"](params)

    def look(*_: object) -> None:
        assert tied_names(model) == tied
        for each in ("named_parameters", "named_buffers"):
            names, expected = ([n for n, _ in getattr(m, each)()] for m in (model, plain))
            assert names == expected
        assert list(model.state_dict()) == list(plain.state_dict())

    look()
    model.register_forward_pre_hook(look)
    for _ in train(case, model, optimizer, (my_batch(case, step) for step in range(3))):
        look()
    look()
    assert all(now is then for now, then in zip(model.parameters(), params, strict=True))
    whole = {
        key: value.full_tensor()
        for key, value in model.state_dict().items()
        if isinstance(value, ShardedTensor)
    }
    for names in tied:
        first, *others = sorted(names)
        assert all(torch.equal(whole[first], whole[other]) for other in others)
    for key, before in plain.named_parameters():  # Whisper's positions of sound are frozen.
        assert torch.equal(whole[key], before) != before.requires_grad
