"""Everything that can be benchmarked, by name. A new case is one more line of the table."""

from collections.abc import Mapping
from typing import Protocol

import torch

from checkpoint_case import CheckpointCase
from contenders import Workload
from models import GPTShape
from overhead_case import OverheadCase
from report import Report
from rounds import Settings
from training_case import TrainingCase
from xla_case import XlaCase


class Case(Protocol):
    """Anything that can be run under the common settings and reports one table."""

    @property
    def summary(self) -> str:
        """The case in words."""

    def run(self, settings: Settings) -> Report:
        """Measure."""


_D512 = GPTShape(dim=512, num_layers=6, num_heads=8, batch=2, sequence=128)
_D1024 = GPTShape(dim=1024, num_layers=6, num_heads=16, batch=2, sequence=128)
_SMALL = GPTShape(dim=64, num_layers=48, num_heads=2, batch=2, sequence=32)
_XLA = GPTShape(dim=128, num_layers=6, num_heads=4, batch=2, sequence=64)
_TINY = GPTShape(dim=16, num_layers=48, num_heads=1, batch=1, sequence=4)

CASES: Mapping[str, Case] = {
    "gpt-d512": TrainingCase(
        "gpt-d512: 6 layers of 512, 2 x 128 tokens per rank, fp32", Workload(_D512), step_limit=0.75
    ),
    "gpt-d512-bf16": TrainingCase(
        "gpt-d512-bf16: the same, bf16 compute, fp32 reduction", Workload(_D512, torch.bfloat16)
    ),
    "gpt-d1024": TrainingCase(
        "gpt-d1024: 6 layers of 1024, 2 x 128 tokens per rank, fp32",
        Workload(_D1024),
        step_limit=0.65,
    ),
    "small-48": TrainingCase(
        "small-48: 48 layers of 64, 2 x 32 tokens per rank, fp32", Workload(_SMALL), step_limit=0.5
    ),
    "overhead": OverheadCase(
        "overhead: host time per group, 48 layers of 16, one CPU rank", Workload(_TINY)
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
}
