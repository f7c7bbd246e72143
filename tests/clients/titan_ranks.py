"""torchtitan's own Trainer on CPU ranks, once on FSDP2 and once on shardkit: what a rank does.

Nothing of torchtitan is changed. It gets a device type (without an accelerator it takes CUDA for
granted), a tokenizer and a text, all made here, and models in which scaled dot-product attention
stands for FlexAttention, which has no backward on CPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import os
import random
import types
import typing
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import shardkit

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping

SHARDERS = ("fsdp2", "shardkit")
VOCABULARY = 512
SEQUENCE = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """One training."""

    ranks: int = 2  # Number of ranks.
    # Fields of torchtitan's ``ParallelismConfig``.
    parallelism: Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)
    # Fields of ``TrainingConfig``.
    training: Mapping[str, typing.Any] = dataclasses.field(default_factory=dict)
    recompute: str = "none"  # ``"none"``, ``"selective"`` or ``"full"``.
    optimizer: str = "for-loop"  # Implementation: ``"for-loop"``, ``"foreach"`` or ``"fused"``.
    model: str = "llama3"  # ``"llama3"``, ``"deepseek_v3"`` or ``"qwen3_moe"``.
    is_tied: bool = False  # Whether the head's weight is that of the embedding.
    # Whether the head and the loss run chunk by chunk, as in torchtitan's configs.
    is_chunked: bool = False
    # Whether experts compute in fp32, and not in bf16 as torchtitan writes, and squares of
    # gradients are summed in fp64, not in fp32 as torch does.
    has_exact_experts: bool = False
    steps: int = 4  # Number of steps.
    tolerance: float = 1e-6  # Largest relative difference of losses.
    norm_tolerance: float = 1e-6  # The same of norms of gradients.


@dataclasses.dataclass(frozen=True)
class Files:
    """What a training reads and writes."""

    assets: pathlib.Path  # Folder with the tokenizer and the text.
    output: pathlib.Path  # Folder of this training.
    # Folder of its checkpoints, from the last of which it goes on; None: none.
    checkpoints: pathlib.Path | None = None
    interval: int = 2  # Steps between two checkpoints.
    # How they are saved: ``"disabled"`` (not in the background) or ``"async"``.
    mode: str = "disabled"
    exports: bool = False  # Whether the last one is a file as transformers reads it.


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of a training."""

    steps: list[int]  # Numbers of the steps.
    losses: list[float]  # Average over all tokens, by step.
    norms: list[float]  # Norm of the gradient before clipping, by step.
    # Sum and sum of squares of each parameter at the end, by name.
    weights: dict[str, tuple[float, float]]
    classes: list[str]  # Names of the classes of parameters.

    def after(self, step: int) -> Trained:
        """Return the same without the steps up to this one."""
        first = self.steps.index(step) + 1
        losses, norms = self.losses[first:], self.norms[first:]
        return dataclasses.replace(self, steps=self.steps[first:], losses=losses, norms=norms)


def make_assets(folder: pathlib.Path) -> None:
    """Write a tokenizer of words and a text of 400 documents."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {str(i): {"content": words[i], "special": True} for i in (1, 2)}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    draw = random.Random(0)
    text = folder / "text"
    text.mkdir()
    with (text / "train.jsonl").open("w") as file:
        for _ in range(400):
            # Neighbours depend on each other, so that there is something to learn.
            start, stride = draw.randrange(VOCABULARY), draw.choice((1, 3, 7))
            document = [f"w{(start + stride * i) % 300}" for i in range(draw.randrange(9, 60))]
            file.write(json.dumps({"text": " ".join(document)}) + "\n")


def train(sharder: str, case: Case, files: Files) -> Trained:
    """Train a case by torchtitan's Trainer; a process stays with the sharder of its first call."""
    _begin(sharder, files)
    from torchtitan.tools.utils import device_type

    assert device_type == "cpu"
    config = _config(case, files)
    trainer = config.build()
    for part in trainer.model_parts:
        _fill(part)
    if trainer.parallel_dims.pp_enabled:
        _give_whole_batches(trainer.pp_schedule)
    steps, losses, norms = [], [], []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, largest: float, norm: float, **rest: typing.Any) -> None:
        steps.append(step)
        losses.append(loss)
        norms.append(norm)
        log(step, loss, largest, norm, **rest)

    trainer.metrics_processor.log = record
    try:
        with _exactly() if case.has_exact_experts else contextlib.nullcontext():
            trainer.train()
        weights = {
            name: _figures(param)
            for part in trainer.model_parts
            for name, param in part.named_parameters()
        }
        classes = {type(p).__name__ for part in trainer.model_parts for p in part.parameters()}
    finally:
        trainer.close()
    return Trained(steps, losses, norms, weights, sorted(classes))


@contextlib.contextmanager
def _exactly() -> Iterator[None]:
    """Have experts keep fp32 that cast to bf16 in torchtitan, and norms summed in fp64."""
    narrow, total = Tensor.bfloat16, nn.utils.get_total_norm

    def total_in_fp64(grads: list[Tensor], *args: typing.Any) -> Tensor:
        return total([grad.double() for grad in grads], *args)

    Tensor.bfloat16 = Tensor.float
    nn.utils.get_total_norm = total_in_fp64
    try:
        yield
    finally:
        Tensor.bfloat16 = narrow
        nn.utils.get_total_norm = total


def _fill(model: nn.Module) -> None:
    """Set all parameters by their names alone: DTensors draw other numbers on CPUs than plain ones.

    Buffers keep what they have.
    """
    whole = {}
    for path, param in model.named_parameters():
        name = path.replace("_checkpoint_wrapped_module.", "")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        scale = 1.0 if "tok_embeddings" in name else 0.05
        whole[name] = (drawn * scale + ("norm" in name)).to(param.dtype)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, whole, options=options)


def _give_whole_batches(schedule: typing.Any) -> None:
    """Give a schedule of torch one batch, where it does not take micro-batches (to torch 2.13)."""
    inner = schedule.step
    if "arg_mbs" in inspect.signature(inner).parameters:
        return

    def step(
        *, arg_mbs: typing.Any, kwarg_mbs: typing.Any, target_mbs: typing.Any, **rest: typing.Any
    ) -> typing.Any:
        args = [torch.cat(each) for each in zip(*arg_mbs or (), strict=True)]
        kwargs = {name: torch.cat([each[name] for each in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = torch.cat(target_mbs) if target_mbs else None
        return inner(*args, target=target, **kwargs, **rest)

    schedule.step = step


def _figures(param: typing.Any) -> tuple[float, float]:
    """Return sums over a whole parameter, in double precision."""
    whole = param.full_tensor() if hasattr(param, "full_tensor") else param
    whole = whole.detach().double()
    return whole.sum().item(), whole.square().sum().item()


def _begin(sharder: str, files: Files) -> None:
    """Set what a launcher sets, put shardkit in FSDP2's place, in a process."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=ranks,
        LOCAL_WORLD_SIZE=ranks,
        HF_HUB_OFFLINE="1",
        HF_HOME=str(files.assets / "cache"),
        HF_DATASETS_CACHE=str(files.assets / f"cache-{rank}"),
    )
    _let_cpu_be_a_device()
    _send_tokens_on_gloo()
    if sharder == "shardkit":
        shardkit.install()
    else:
        _let_fsdp2_sum_on_gloo()
    assert (fsdp.fully_shard is shardkit.fully_shard) == (sharder == "shardkit")
    import torchtitan.trainer  # noqa: F401

    logging.getLogger("root").setLevel(logging.WARNING)


def _let_cpu_be_a_device() -> None:
    """Have torch answer for the CPU what torchtitan asks of each device."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: typing.Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda _: "CPU"
    cpu.get_device_properties = lambda _: types.SimpleNamespace(total_memory=2**30)
    cpu.memory_stats = lambda _: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    if not hasattr(dist, "set_timeout"):  # Newer than torch 2.13.
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout


def _send_tokens_on_gloo() -> None:
    """Let gloo, which takes lists of equal sizes only, send tokens as ``spmd_types`` does."""

    def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: typing.Any = None) -> None:
        received, sizes = torch.cat(outputs), [len(each) for each in outputs]
        dist.all_to_all_single(
            received, torch.cat(inputs), sizes, [len(each) for each in inputs], group=group
        )
        for output, part in zip(outputs, received.split(sizes), strict=True):
            output.copy_(part)

    dist.all_to_all = all_to_all


def _let_fsdp2_sum_on_gloo() -> None:
    """Have FSDP2 multiply by the factor that is set, for gloo has no sum that does so itself."""
    module: typing.Any = fsdp.FSDPModule
    if not hasattr(module.set_gradient_divide_factor, "__wrapped__"):
        inner = module.set_gradient_divide_factor

        @functools.wraps(inner)
        def set_both(self: typing.Any, factor: float) -> None:
            inner(self, factor)
            self.set_force_sum_reduction_for_comms(True)

        module.set_gradient_divide_factor = set_both


def _config(case: Case, files: Files) -> typing.Any:
    """Return torchtitan's config of a case: that of its small models, with fewer layers."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import CommConfig, DebugConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.trainer import Trainer

    spec = _model(case)
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    training = {"mixed_precision_param": "float32", **case.training}
    optimizer = default_adamw(lr=2e-3)
    optimizer.implementation = case.optimizer
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=str(files.assets),
        dump_folder=str(files.output),
        loss=ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=4) if case.is_chunked else loss,
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4,
            seq_len=SEQUENCE,
            steps=case.steps,
            disable_cuda_graphs=True,
            **training,
        ),
        dataloader=HuggingFaceTextDataLoader.Config(
            dataset="c4_test", dataset_path=str(files.assets / "text")
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
            **{"spmd_backend": "partial_dtensor", **case.parallelism},
        ),
        checkpoint=CheckpointManager.Config(
            enable=files.checkpoints is not None,
            folder=str(files.checkpoints),
            interval=files.interval,
            async_mode=files.mode,
            last_save_model_only=files.exports,
            last_save_in_hf=files.exports,
        ),
        activation_checkpoint={
            "none": lambda: None,
            "selective": SelectiveAC.Config,
            "full": FullAC.Config,
        }[case.recompute](),
        comm=CommConfig(train_timeout_seconds=600),
        debug=DebugConfig(seed=7),
    )


def _model(case: Case) -> typing.Any:
    from importlib import import_module

    from torchtitan.models.common.attention import ScaledDotProductAttention

    registry = import_module(f"torchtitan.models.{case.model.removesuffix('_moe')}")
    spec = registry.model_registry("debugmodel_moe" if case.model == "qwen3_moe" else "debugmodel")
    config = spec.model
    config.layers = config.layers[:4]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if case.is_tied:
        config.enable_weight_tying = True
    return spec
