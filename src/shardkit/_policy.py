"""What users choose once: dtypes, where shards are, when backward gathers ahead."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards are on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state are on the host; unsharded parameters on the device.

    On a mesh of CPU ranks nothing changes.

    Args:
        pin_memory: Keep shards and gradients in page-locked memory, so that copies from and to the
            device overlap with compute.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one group; the meaning of the names is FSDP2's.

    The sharded parameters keep the dtype they were made in (`orig_dtype`), and the optimizer
    steps in it. ``None`` everywhere means: no cast anywhere.

    Args:
        param_dtype: Dtype of the unsharded parameters, hence of compute and of the all-gather.
            ``None``: the parameter's own.
        reduce_dtype: Dtype of gradients on the wire. Numbers of a dtype below fp32 are
            added in fp32 where shardkit does the sum (gloo). ``None``:
            `param_dtype`.
        output_dtype: Floating-point outputs of the module's forward are cast to it.
        cast_forward_inputs: Cast floating-point inputs of the module's forward to `param_dtype`.
        buffer_dtype: Floating-point buffers are cast to it once, in `fully_shard`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None

    def dtypes_for(self, orig_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return (compute dtype, reduce dtype) of a parameter stored in `orig_dtype`.

        Only floating-point parameters are cast: complex ones would lose their other half.
        """
        if not orig_dtype.is_floating_point:
            return orig_dtype, orig_dtype
        param_dtype = self.param_dtype or orig_dtype
        return param_dtype, self.reduce_dtype or param_dtype


class BackwardPrefetch(enum.Enum):
    """When backward gathers the group that it needs next.

    PRE: Before the gradients of the current group are computed: full overlap, two groups alive.
    POST: After them: one group less alive, less overlap.
    NONE: When it is entered.
    """

    PRE = "pre"
    POST = "post"
    NONE = "none"
