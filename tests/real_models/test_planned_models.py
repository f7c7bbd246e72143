"""Plans of models of the transformers package, against the memory that a step of a rank takes."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor, nn

import shardkit
from allocated import peaks_of, start_counting
from shardkit.planning._command import read_model

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.models

VOCABULARY, WIDTH, LENGTH, ROWS = 512, 128, 64, 4
SIZES: dict[str, typing.Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
TOO_MUCH = 1.03


def make_llama() -> nn.Module:
    """Make a model whose heads share keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def make_gpt2() -> nn.Module:
    """Make a model that looks for padding in a batch without a mask."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 3}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_head=8, pad_token_id=0))


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES))


def make_mixtral() -> nn.Module:
    """Make a model that multiplies the rows of each expert in one grouped product, in fp32."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    )


MODELS = {
    make.__name__.removeprefix("make_"): make
    for make in (make_llama, make_gpt2, make_bert, make_mixtral)
}


def batch_of(*, is_masked: bool) -> dict[str, Tensor]:
    """Draw a batch as tokenizers make it: rows of several lengths, with a mask of the padding."""
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    if is_masked:
        ends = torch.tensor([LENGTH, LENGTH // 2, 3, 1])
        batch["attention_mask"] = (torch.arange(LENGTH) < ends[:, None]).long()
    return batch


def count_peak(name: str, batch: dict[str, Tensor]) -> int:
    """Return the most bytes that live in a step of one rank, of which it is the only one."""
    start_counting()
    before = max(peaks_of(lambda: None))
    model = MODELS[name]().train()
    shardkit.auto_shard(model, mesh=shardkit.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    output = loss = None

    def step() -> None:
        nonlocal output, loss
        output = model(**batch)
        loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return max(peaks_of(step)) - before


@pytest.mark.parametrize("is_masked", [False, True], ids=["no mask", "a mask of the padding"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_a_step(spawn: Spawn, name: str, is_masked: bool) -> None:
    model, batch = MODELS[name]().train(), batch_of(is_masked=is_masked)
    planned = shardkit.plan(model, batch, mesh=1, device="cpu").peak_nbytes
    (counted,) = spawn(count_peak, 1, name, batch)
    assert counted <= planned <= TOO_MUCH * counted


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recompute_is_advised_though_the_model_has_a_cache(name: str) -> None:
    model, batch = MODELS[name]().train(), batch_of(is_masked=True)
    found = shardkit.plan(model, batch, mesh=2, budget=1)
    model.config.use_cache = False
    again = shardkit.plan(model, batch, mesh=2, recompute=True)
    assert found.advice[0].change.startswith("compute activations of blocks again")
    assert found.advice[0].peak_nbytes == again.peak_nbytes < found.peak_nbytes


@pytest.mark.parametrize(
    ("named", "made"),
    [
        (["BartForConditionalGeneration"], "BartForConditionalGeneration"),
        (["NoSuchModel"], "BartForCausalLM"),
        (None, "BartForCausalLM"),
    ],
)
def test_a_config_stands_for_the_model_that_it_names(
    tmp_path: pathlib.Path, named: list[str] | None, made: str
) -> None:
    from transformers import BartConfig

    config = BartConfig(d_model=64, vocab_size=VOCABULARY, dtype="bfloat16", architectures=named)
    config.save_pretrained(tmp_path)
    model, batch = read_model(str(tmp_path))
    assert (type(model).__name__, batch) == (made, None)
    kinds = {(param.dtype, param.device.type) for param in model.parameters()}
    assert kinds == {(torch.bfloat16, "meta")}


def test_operations_of_experts_are_those_of_all_their_rows() -> None:
    """In bf16, as on cards, and in fp32."""
    batch = batch_of(is_masked=False)
    counted = []
    for policy in (None, shardkit.MixedPrecisionPolicy(torch.bfloat16)):
        plan = shardkit.plan(
            make_mixtral(), batch, mesh=1, hardware="h100", mp_policy=policy, optimizer="none"
        )
        assert plan.time is not None
        counted.append(plan.time.flops)
    rows, layers = ROWS * LENGTH, SIZES["num_hidden_layers"]
    of_experts = 3 * 2 * (2 * rows) * 3 * WIDTH * 2 * WIDTH * layers  # 2 of 4, and 3 matrices.
    of_projections = 3 * 2 * rows * WIDTH * (2 * WIDTH + 2 * WIDTH // 4 + 4) * layers
    of_head = 3 * 2 * rows * WIDTH * VOCABULARY
    of_scores = 2 * ROWS * LENGTH * LENGTH * WIDTH * layers
    # 2 in forward, and 4 in backward; flash attention, for 16 bits only, computes scores again.
    assert counted == [
        of_experts + of_projections + of_head + number * of_scores for number in (6, 7)
    ]
