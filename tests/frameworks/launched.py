"""What frameworks find in a rank that a launcher has started, and how they begin anew."""

from __future__ import annotations

import importlib.util
import os

import torch.distributed as dist

TIMEOUT_S = 240  # Of a call: the first one imports the package.


def set_launchers_variables() -> None:
    """Set what torchrun sets; the pool's process group is there already."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=world_size,
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
        TORCHELASTIC_RUN_ID="tests",
        HF_HUB_OFFLINE="1",
        ACCELERATE_USE_CPU="true",
    )


def forget_accelerate() -> None:
    """Let the next Accelerator be the first one of this process, if that package is there."""
    if not importlib.util.find_spec("accelerate"):
        return
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
        del os.environ[name]
