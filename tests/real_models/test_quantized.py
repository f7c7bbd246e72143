"""Weights that torchao and bitsandbytes quantize, sharded: adapters train, classes gather."""

from __future__ import annotations

import math
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import TIMEOUT_S, ZOO

from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from pathlib import Path


from allocated import past_shared_memory
from models import Batch, Case
from parity import compare_training
from quantized import live_nbytes, nbytes_at_rest
from reference import Differences, assert_within, make_mesh, my_batch, shard
from shardkit import ShardedTensor, checkpoint, fully_shard, summon_full_params

pytestmark = pytest.mark.models

# Losses lie between 4 and 6: some units in their last place. Gradients are smaller than that.
TOLERANCE = 3e-6
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # Blocks of 64 elements fit.


# --- how models are quantized ---------------------------------------------------------------------


def is_quantized(name: str) -> bool:
    return "self_attn" in name or "mlp" in name


def replace_linears(model: nn.Module, make: typing.Callable[[nn.Linear], nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and is_quantized(name):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, make(module))


def by_torchao(config: str) -> typing.Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        import torchao.quantization as ao

        ao.quantize_(
            model,
            getattr(ao, config)(),
            lambda m, name: isinstance(m, nn.Linear) and is_quantized(name),
        )

    return quantize


def in_four_bits(*, twice: bool) -> typing.Callable[[nn.Module], None]:
    """Quantize as ``BitsAndBytesConfig(load_in_4bit=True)`` does, `twice` with its double quant."""

    def make(linear: nn.Linear) -> nn.Module:
        import bitsandbytes as bnb

        made = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=torch.float32,
            compress_statistics=twice,
            quant_type="nf4",
        )
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")

    return lambda model: replace_linears(model, make)


def in_eight_bits(model: nn.Module) -> None:
    """Quantize as ``BitsAndBytesConfig(load_in_8bit=True)`` does."""

    def make(linear: nn.Linear) -> nn.Module:
        import bitsandbytes as bnb

        made = bnb.nn.Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
        )
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")

    replace_linears(model, make)


QUANTIZERS: dict[str, typing.Callable[[nn.Module], None]] = {
    "torchao int8": by_torchao("Int8WeightOnlyConfig"),
    "torchao intx": by_torchao("IntxWeightOnlyConfig"),
    "torchao fp8": by_torchao("Float8WeightOnlyConfig"),
    "bnb nf4": in_four_bits(twice=False),
    "bnb nf4 twice": in_four_bits(twice=True),
    "bnb int8": in_eight_bits,
}


def make_base(kind: str, **sizes: int) -> nn.Module:
    import logging

    from transformers import LlamaConfig, LlamaForCausalLM

    logging.disable()  # torchao speaks of kernels that are built for other machines.
    options: dict[str, typing.Any] = {
        "vocab_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**options, **(SIZES | sizes)))
    QUANTIZERS[kind](model)
    # As `from_pretrained` sets it: peft asks which layers its adapters are for.
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = "nf4" in kind, kind == "bnb int8"
    for module in model.modules():
        # On CPUs with AVX512-BF16 its evaluation would compute by another kernel, in bf16.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.requires_grad_(requires_grad=False)


def make_adapted(kind: str, **sizes: int) -> typing.Any:
    from peft import LoraConfig, get_peft_model

    base = make_base(kind, **sizes)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(1)
    return get_peft_model(base, config).train()


def case_of(kind: str) -> Case:
    llama = ZOO["llama"]
    return Case(
        lambda: make_adapted(kind),
        lambda model: list(model.get_base_model().model.layers),
        llama.batch,
        llama.loss,
    )


# --- adapters -------------------------------------------------------------------------------------


def train_adapters(kind: str, mesh_shape: tuple[int, ...], optimizer: str) -> Differences:
    case = case_of(kind)
    plain, model = case.make(), case.make()
    classes = {type(m.weight) for n, m in plain.named_modules() if n.endswith("up_proj")}
    shard(case, model, make_mesh(mesh_shape))
    seen = set()
    for name, module in model.named_modules():
        if name.endswith("up_proj"):
            module.register_forward_pre_hook(lambda m, _: seen.add(type(m.weight)))
            assert isinstance(module.weight, ShardedTensor)
    differences = compare_training(case, model, plain, optimizer, steps=4)
    assert seen == classes
    assert all("lora_" in name for name, p in model.named_parameters() if p.grad is not None)
    return differences


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_adapters_over_quantized_weights_train_as_in_plain_training(
    spawn: Spawn, kind: str
) -> None:
    found = spawn(train_adapters, 2, kind, (2,), "adamw", timeout_s=TIMEOUT_S)
    # Adam divides by the size of gradients: rounding of small ones shows in the parameters.
    assert_within(found, loss=TOLERANCE, grad=TOLERANCE, parameter=2e-5)


@pytest.mark.parametrize("kind", ["torchao int8", "bnb nf4 twice", "bnb int8"])
def test_adapters_train_on_a_hybrid_mesh(spawn: Spawn, kind: str) -> None:
    found = spawn(train_adapters, 4, kind, (2, 2), "sgd", timeout_s=TIMEOUT_S)
    assert_within(found, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


# --- memory ---------------------------------------------------------------------------------------

SLACK = 4096  # Bytes of small tensors that steps make.


@past_shared_memory()
def measure_memory(kind: str) -> tuple[int, int, int]:
    """Return the bytes of all tensors: of the whole model, sharded, and after two steps."""
    case = case_of(kind)
    case.loss(case.make(), my_batch(case, 0)).backward()  # What packages make for themselves.
    empty = live_nbytes()
    model = make_adapted(kind, hidden_size=256, intermediate_size=1024)
    whole = live_nbytes() - empty
    shard(case, model)
    cut = live_nbytes() - empty
    for step in range(2):
        case.loss(model, my_batch(case, step)).backward()
        model.zero_grad()
    return whole, cut, nbytes_at_rest(empty + cut + SLACK) - empty


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_each_rank_holds_its_part_of_the_bits(spawn: Spawn, kind: str, world_size: int) -> None:
    found = spawn(measure_memory, world_size, kind, timeout_s=TIMEOUT_S)
    print(kind, world_size, found)
    for whole, cut, later in found:
        # Whole on every rank: buffers of positions, the scales of bitsandbytes' 8-bit rows.
        whole_everywhere = 4 * 2 * (1024 * 2 + 256 * 5) if kind == "bnb int8" else 0
        allowed = 1.02 * (whole - whole_everywhere) / world_size + whole_everywhere + 8192
        assert cut <= allowed
        assert later <= cut + SLACK


# --- saved, loaded, merged ------------------------------------------------------------------------


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(10).view(1, 10)).logits


def save(kind: str, folder: str) -> Tensor:
    case = case_of(kind)
    model = shard(case, case.make())
    checkpoint.save(folder, model)
    return logits(model)


def load(kind: str, folder: str) -> Tensor:
    case = case_of(kind)
    model = shard(case, case.make())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    checkpoint.load(folder, model)
    return logits(model)


@pytest.mark.parametrize("kind", ["torchao int8", "bnb nf4 twice", "bnb int8"])
def test_checkpoints_load_on_other_numbers_of_ranks(
    spawn: Spawn, tmp_path: Path, kind: str
) -> None:
    folder = str(tmp_path / "saved")
    expected, *_ = spawn(save, 2, kind, folder, timeout_s=TIMEOUT_S)
    for found in spawn(load, 3, kind, folder, timeout_s=TIMEOUT_S):
        assert torch.equal(found, expected)


def export_adapters(kind: str, folder: str) -> float:
    """Train, export the adapters as peft does; merge them where nothing is sharded."""
    import torch.distributed as dist
    from peft import PeftModel

    case = case_of(kind)
    model = shard(case, case.make())
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    for step in range(2):
        case.loss(model, my_batch(case, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = logits(model.eval())
    state = model.state_dict()
    whole = {name: state[name].full_tensor() for name in state if "lora_" in name}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)
    dist.barrier()
    read = PeftModel.from_pretrained(make_base(kind), folder).eval()
    assert torch.equal(logits(read), expected)
    return (logits(read.merge_and_unload()) - expected).abs().max().item()


@pytest.mark.parametrize("kind", ["bnb nf4", "bnb int8"])
def test_adapters_are_exported_and_merged(spawn: Spawn, tmp_path: Path, kind: str) -> None:
    for difference in spawn(export_adapters, 2, kind, str(tmp_path), timeout_s=TIMEOUT_S):
        assert difference < 0.2  # The merged weights are quantized anew.


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_adapters_are_merged_into_sharded_weights() -> None:
    """Add adapters to whole weights, which are cut again, and take them out."""
    case = case_of("bnb nf4")
    plain, model = (each.eval() for each in (case.make(), case.make()))
    shard(case, model)
    with summon_full_params(model):
        model.merge_adapter()
    plain.merge_adapter()
    assert torch.equal(logits(model), logits(plain))


# --- torchao's NF4, and its float8 training -------------------------------------------------------


class NF4Linear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(linear.weight.detach()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight)


class Layers(nn.Module):
    """Layers to be converted, between plain ones."""

    def __init__(self, convert: typing.Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 128, bias=False)
        self.blocks = nn.ModuleList(convert(nn.Linear(128, 128, bias=False)) for _ in range(3))
        self.last = nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def batch_of_16(generator: torch.Generator, rows: int = 16) -> Batch:
    x, y = torch.randn(2, rows, 16, generator=generator)
    return x, y


def layers_case(convert: typing.Callable[[nn.Linear], nn.Module]) -> Case:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Layers(convert)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return Case(make, lambda model: list(model.blocks), batch_of_16, loss)


@on_ranks(3, timeout_s=TIMEOUT_S)
def test_layers_beside_nf4_of_torchao_train_as_in_plain_training() -> None:
    case = layers_case(NF4Linear)
    plain, model = case.make(), case.make()
    shard(case, model)
    assert type(model.blocks[0].weight.full_tensor()).__name__ == "NF4Tensor"
    assert_within(
        [compare_training(case, model, plain, steps=4)],
        loss=TOLERANCE,
        grad=TOLERANCE,
        parameter=TOLERANCE,
    )


def to_float8(linear: nn.Linear, *, gathers: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
    return convert_to_float8_training(nn.Sequential(linear), config=config)


def train_in_float8(mesh_shape: tuple[int, ...], steps: int) -> float:
    """Return the largest difference of losses; each rank has the same batch, hence its scales."""
    sharded_case, plain_case = (
        layers_case(lambda linear, gathers=gathers: to_float8(linear, gathers=gathers))
        for gathers in (True, False)
    )
    plain, model = plain_case.make(), sharded_case.make()
    kinds = {type(param).__name__ for param in model.parameters()}
    assert "WeightWithDynamicFloat8CastTensor" in kinds
    shard(sharded_case, model, make_mesh(mesh_shape))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    difference = 0.0
    for step in range(steps):
        batch = batch_of_16(torch.Generator().manual_seed(step))
        losses = [plain_case.loss(each, batch) for each in (plain, model)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        difference = max(difference, (losses[0] - losses[1]).abs().item())
    return difference


# Three ranks, of which the last has a row that pads: the average of three equal gradients is
# rounded, and a weight beside a boundary of float8 falls on its other side. So there is one step.
@pytest.mark.parametrize(
    ("mesh_shape", "steps"), [((1,), 5), ((2,), 5), ((2, 2), 5), ((3,), 1)], ids=str
)
def test_float8_training_of_torchao_gathers_in_8_bits(
    spawn: Spawn, mesh_shape: tuple[int, ...], steps: int
) -> None:
    world_size = math.prod(mesh_shape)
    for difference in spawn(train_in_float8, world_size, mesh_shape, steps, timeout_s=TIMEOUT_S):
        assert difference <= TOLERANCE


@on_ranks(1, timeout_s=TIMEOUT_S)
def test_float8_weights_travel_in_8_bits() -> None:
    from recording import recording_mesh

    mesh, log = recording_mesh((2,))
    layer = to_float8(nn.Linear(128, 128, bias=False), gathers=True)
    fully_shard(layer, mesh)
    log.clear()
    layer(torch.randn(16, 128)).sum().backward()
    assert ("start all_gather", 128 * 128) in log  # Bytes.
