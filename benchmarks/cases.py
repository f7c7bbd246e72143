"""All benchmark cases, by name: a new case is one more line of the table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from checkpoint_case import CheckpointCase
from contenders import (
    EXPERTS,
    FLAT,
    FSDP2,
    FSDP2_EXPERTS,
    FSDP2_MUON,
    LISTS,
    LOCAL,
    MATRIX,
    ONE_GROUP,
    PLAIN,
    SHARDKIT,
    Workload,
)
from experts import ExpertsShape
from llama import LlamaShape
from models import GPTShape, ManyShape
from one_card_cases import FakeCase, OneRankCase
from optimizer_case import OptimizerCase
from overhead_case import OverheadCase
from pair_case import PairCase
from report import Report
from rounds import Settings
from training_case import TrainingCase
from xla_case import XlaCase


class Case(Protocol):
    """A benchmark that runs under the common settings and reports one table."""

    @property
    def summary(self) -> str:
        """The case in words."""

    def run(self, settings: Settings) -> Report:
        """Measure."""


_D512 = GPTShape(dim=512, num_layers=6, num_heads=8, batch=2, sequence=128)
_D1024 = GPTShape(dim=1024, num_layers=6, num_heads=16, batch=2, sequence=128)
_SMALL = GPTShape(dim=64, num_layers=48, num_heads=2, batch=2, sequence=32)
_XLA = GPTShape(dim=128, num_layers=6, num_heads=4, batch=2, sequence=64)
_EXPERTS = ExpertsShape(
    dim=256, hidden=512, num_experts=8, num_layers=6, num_heads=4, batch=2, sequence=64, ep=2
)
_MANY = ManyShape(num_layers=580, most=1000, batch=2, sequence=32)
_TINY = GPTShape(dim=16, num_layers=48, num_heads=1, batch=1, sequence=4)

# Layers of Llama 2 7B, few enough for three trainings side by side in 80 GB.
_LLAMA = LlamaShape(
    dim=4096, hidden=11008, num_layers=4, num_heads=32, batch=2, sequence=2048, vocab=32000
)
_SMALL_LLAMA = LlamaShape(
    dim=512, hidden=1376, num_layers=24, num_heads=8, batch=1, sequence=16, vocab=512
)
_BF16 = Workload(_LLAMA, stored_dtype=torch.bfloat16, reduce_dtype=None)
_MASTERS = Workload(_LLAMA, param_dtype=torch.bfloat16)

CASES: Mapping[str, Case] = {
    "gpt-d512": TrainingCase(
        "gpt-d512: 6 layers of 512, 2 x 128 tokens per rank, fp32",
        Workload(_D512),
        step_limit=0.60,
        ddp_limit=0.90,
    ),
    "gpt-d512-bf16": TrainingCase(
        "gpt-d512-bf16: the same, bf16 compute, fp32 reduction",
        Workload(_D512, torch.bfloat16),
        step_limit=0.58,
    ),
    "gpt-d1024": TrainingCase(
        "gpt-d1024: 6 layers of 1024, 2 x 128 tokens per rank, fp32",
        Workload(_D1024),
        step_limit=0.40,
    ),
    "small-48": TrainingCase(
        "small-48: 48 layers of 64, 2 x 32 tokens per rank, fp32",
        Workload(_SMALL),
        step_limit=0.30,
        ddp_limit=1.15,
    ),
    "gpt-d512-zero2": TrainingCase(
        "gpt-d512-zero2: gpt-d512, layers kept between forward and backward (ZeRO-2)",
        Workload(_D512, reshard_after_forward=False),
        step_limit=0.65,
    ),
    "gpt-d512-accumulate": TrainingCase(
        "gpt-d512-accumulate: gpt-d512, 4 microbatches a step, gradients synced in the last one",
        Workload(_D512, microbatches=4),
        step_limit=0.58,
    ),
    "gpt-d512-lora": TrainingCase(
        "gpt-d512-lora: gpt-d512, adapters of rank 8 trained, all else frozen",
        Workload(_D512, adapter_rank=8),
        step_limit=0.52,
    ),
    "gpt-d512-recompute": TrainingCase(
        "gpt-d512-recompute: gpt-d512, activations of each block recomputed",
        Workload(_D512, recompute=True),
        step_limit=0.66,
    ),
    "gpt-d512-4": TrainingCase(
        "gpt-d512-4: gpt-d512 on 4 ranks", Workload(_D512), step_limit=0.68, num_ranks=4
    ),
    "moe": PairCase(
        "moe: 8 experts in each of 6 layers of 256, split over 2 of 4 ranks, 2 x 64 tokens, fp32",
        Workload(_EXPERTS),
        EXPERTS,
        FSDP2_EXPERTS,
        step_limit=0.75,
        num_ranks=4,
    ),
    "many": PairCase(
        "many: 580 layers of one parameter of 1 to 1,000 floats, a group each, fp32",
        Workload(_MANY),
        SHARDKIT,
        ONE_GROUP,
        step_limit=1.15,
        num_ranks=2,
        others=(LISTS, PLAIN),
    ),
    "overhead": OverheadCase(
        "overhead: host time per group, 48 layers of 16, one CPU rank", Workload(_TINY)
    ),
    "optimizer": OptimizerCase(
        "optimizer: AdamW's step alone, 6 layers of 512, fp32",
        Workload(_D512),
        LOCAL,
        {FSDP2: 0.6, FLAT: 1.1},
        (SHARDKIT,),
    ),
    "muon": OptimizerCase(
        "muon: the step of Muon and AdamW, 48 layers of 64, fp32",
        Workload(_SMALL),
        MATRIX,
        {FSDP2_MUON: 0.5},
    ),
    "muon-d128": OptimizerCase(
        "muon-d128: the same, 6 layers of 128", Workload(_XLA), MATRIX, {FSDP2_MUON: 0.5}
    ),
    "checkpoint": CheckpointCase("checkpoint: model and AdamW's state to the disk and back"),
    "xla-spmd": XlaCase(
        "xla-spmd: SPMD mode, 4 virtual devices of the CPU, 6 layers of 128",
        {
            "shardkit": "spmd_shardkit",
            "SpmdFullyShardedDataParallel": "spmd_torch_xla",
        },
        num_devices=4,
        shape=_XLA,
    ),
    "xla-replica": XlaCase(
        "xla-replica: replica mode, 2 virtual devices of the CPU, 6 layers of 128",
        {
            "shardkit": "replica_shardkit",
            "XlaFullyShardedDataParallel": "replica_torch_xla",
            "the same, flattened": "replica_torch_xla_flat",
        },
        num_devices=2,
        shape=_XLA,
    ),
    "gpu-bf16": OneRankCase(
        "gpu-bf16: a world of one rank, 4 layers of 4096, 2 x 2048 tokens, bf16 parameters",
        _BF16,
        (PLAIN, FSDP2, SHARDKIT),
    ),
    "gpu-bf16-compiled": OneRankCase(
        "gpu-bf16-compiled: the same, torch.compile of each layer",
        replace(_BF16, compiled=True),
        (PLAIN, FSDP2, SHARDKIT),
    ),
    "gpu-fp32": OneRankCase(
        "gpu-fp32: the same model, fp32 parameters, bf16 compute, fp32 reduction",
        _MASTERS,
        (FSDP2, SHARDKIT),
    ),
    "gpu-fp32-compiled": OneRankCase(
        "gpu-fp32-compiled: the same, torch.compile of each layer",
        replace(_MASTERS, compiled=True),
        (FSDP2, SHARDKIT),
    ),
    "gpu-fake": FakeCase(
        "gpu-fake: one rank of a fake group, the model of gpu-fp32; host: 24 layers of 512",
        _MASTERS,
        replace(_MASTERS, shape=_SMALL_LLAMA),
        (8, 64, 512),
    ),
}
ONE_CARD = frozenset(name for name in CASES if name.startswith("gpu-"))
GROUPS: Mapping[str, Sequence[str]] = {"gpu": [name for name in CASES if name in ONE_CARD]}
