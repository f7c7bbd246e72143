"""Accelerate's fp8 training, and adapters beside quantized weights, in models that it prepares."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from accelerate_runs import accelerate_ranks, fsdp2
from launched import TIMEOUT_S, forget_accelerate

import shardkit

if typing.TYPE_CHECKING:
    import pathlib

    from torch import Tensor, nn

    from workers import Spawn

pytestmark = pytest.mark.frameworks

STEPS = 5
TOLERANCE = 3e-6  # Losses lie between 4 and 5.


def make() -> typing.Any:
    """Make a Llama whose layers fit kernels of low precision."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes)).train()


class Run:
    """A training of a model on tokens; with an accelerator, on this rank's part of them."""

    def __init__(self, model: nn.Module, accelerator: typing.Any = None) -> None:
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
        self.accelerator = accelerator
        self.model: typing.Any = model
        self.optimizer: typing.Any = optimizer
        if accelerator is not None:
            self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, steps: range) -> None:
        tokens = torch.randint(97, (STEPS, 4, 8), generator=torch.Generator().manual_seed(3))
        for step in steps:
            own = tokens[step]
            if self.accelerator is not None:
                own = own.chunk(dist.get_world_size())[dist.get_rank()]
            loss = self.model(input_ids=own, labels=own).loss
            loss.backward()
            parameters = self.model.parameters()
            if self.accelerator is None:
                norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            else:
                norm = self.accelerator.clip_grad_norm_(parameters, 0.5)
            self.norms.append(float(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            value = loss.detach().float()
            if self.accelerator is not None:
                value = self.accelerator.reduce(value, "mean")
            self.losses.append(float(value))

    def train_and_resume(self, folder: str) -> None:
        """Train half of the steps, save, go astray, load, and train the rest."""
        self.train(range(3))
        self.accelerator.save_state(folder)
        self.train(range(3, 4))
        self.accelerator.load_state(folder)
        del self.losses[3:], self.norms[3:]
        self.train(range(3, STEPS))


def plugin(**settings: typing.Any) -> typing.Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    given = {"auto_wrap_policy": "transformer_based_wrap", **settings}
    given["transformer_cls_names_to_wrap"] = ["LlamaDecoderLayer"]
    return FullyShardedDataParallelPlugin(fsdp_version=2, **given)


# --- fp8 ------------------------------------------------------------------------------------------


def train_fp8(*, gathers_fp8: bool, folder: str | None) -> tuple[Run, dict[str, Tensor]]:
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torchao.float8 import Float8LinearConfig

    forget_accelerate()
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_fp8)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # Sums of which none is rounded.
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        fsdp_plugin=plugin(mixed_precision_policy=policy, state_dict_type="FULL_STATE_DICT"),
        kwargs_handlers=[AORecipeKwargs(config=config)],
    )
    run = Run(make(), accelerator)
    kinds = [type(module).__name__ for module in run.model.modules()]
    assert kinds.count("Float8Linear") == 13
    if folder is None:
        run.train(range(STEPS))
    else:
        run.train_and_resume(folder)
    return run, accelerator.get_state_dict(run.model)


def fp8_beside_fsdp2(folder: str, gathers_fp8: bool) -> None:
    with accelerate_ranks(fsdp2()):
        wanted, expected = train_fp8(gathers_fp8=gathers_fp8, folder=None)
        assert not isinstance(wanted.model, shardkit.FSDPModule)
    with accelerate_ranks():
        for saved in (None, folder):
            found, whole = train_fp8(gathers_fp8=gathers_fp8, folder=saved)
            assert isinstance(found.model, shardkit.FSDPModule)
            assert found.losses == pytest.approx(wanted.losses, rel=0, abs=TOLERANCE)
            assert found.norms == pytest.approx(wanted.norms, rel=2e-5)
            assert whole.keys() == expected.keys()
            for name, value in expected.items():
                # One number that is rounded to the other side changes some elements more.
                torch.testing.assert_close(whole[name], value, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("gathers_fp8", [False, True])
def test_fp8_training_equals_that_of_fsdp2(
    spawn: Spawn, tmp_path: pathlib.Path, gathers_fp8: bool
) -> None:
    spawn(fp8_beside_fsdp2, 2, str(tmp_path), gathers_fp8, timeout_s=TIMEOUT_S)


# --- adapters beside quantized weights ------------------------------------------------------------


def with_adapters(weights: str) -> typing.Any:
    """Make a model whose weights are quantized and frozen, with adapters."""
    import torchao.quantization
    from peft import LoraConfig, get_peft_model

    configs = {
        "int8": torchao.quantization.Int8WeightOnlyConfig,
        "int4": lambda: torchao.quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
        "float8": torchao.quantization.Float8WeightOnlyConfig,
    }

    def is_quantized(module: nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and "lm_head" not in name

    model = make()
    torchao.quantization.quantize_(model, configs[weights](), filter_fn=is_quantized)
    for param in model.parameters():
        param.requires_grad_(False)
    torch.manual_seed(1)
    layers = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=3, target_modules=layers, init_lora_weights=False))


def adapters_in(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "lora_" in name}


def tune(weights: str, files: str, folder: str) -> None:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    with accelerate_ranks():
        plain = Run(with_adapters(weights))
        plain.train(range(STEPS))
        expected = adapters_in(plain.model.state_dict())
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(state_dict_type=files))
        run = Run(with_adapters(weights), accelerator)
        base = run.model.base_model.model.model.layers[0].mlp.up_proj.weight
        assert isinstance(base, shardkit.ShardedTensor)
        run.train_and_resume(folder)
        assert run.losses == pytest.approx(plain.losses, rel=0, abs=TOLERANCE)
        assert run.norms == pytest.approx(plain.norms, rel=2e-5)
        whole = accelerator.get_state_dict(run.model)
        is_main = accelerator.is_main_process
        run.model.save_pretrained(folder, state_dict=dict(whole), is_main_process=is_main)
        if is_main:
            found = adapters_in(whole)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=name)
            saved = load_file(f"{folder}/adapter_model.safetensors")
            assert len(saved) == len(expected)
            for name, value in saved.items():
                assert torch.equal(value, found[name.replace(".weight", ".default.weight")])


@pytest.mark.parametrize(
    ("weights", "files"),
    [
        ("int8", "SHARDED_STATE_DICT"),
        ("int4", "FULL_STATE_DICT"),
        ("float8", "SHARDED_STATE_DICT"),
    ],
)
def test_adapters_beside_quantized_weights(
    spawn: Spawn, tmp_path: pathlib.Path, weights: str, files: str
) -> None:
    spawn(tune, 2, weights, files, str(tmp_path), timeout_s=TIMEOUT_S)


def tune_from_one_rank() -> None:
    from accelerate import Accelerator

    with accelerate_ranks():
        given = plugin(cpu_ram_efficient_loading=True)
        Run(with_adapters("int8"), Accelerator(cpu=True, fsdp_plugin=given))


def test_quantized_weights_are_loaded_on_all_ranks(spawn_errors: Spawn) -> None:
    for error in spawn_errors(tune_from_one_rank, 2, timeout_s=TIMEOUT_S):
        assert error.type_name == "IntegrationError"
        assert "is a Int8Tensor: the first rank can send plain tensors only" in error.message
