"""What users choose once: dtypes, where shards are, when backward gathers ahead."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from shardkit._errors import WrapError

_MIXED_PRECISION = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: shards are on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state are on the host; unsharded parameters on the device.

    On a mesh of CPU ranks nothing changes.

    Args:
        pin_memory: Whether to keep shards and gradients in page-locked memory, so that copies from
            and to the device overlap with compute.
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
        output_dtype: Dtype that floating-point outputs of the module's forward are cast to.
        cast_forward_inputs: Whether to cast floating-point inputs of the module's forward to
            `param_dtype`.
        buffer_dtype: Dtype that floating-point buffers are cast to once, in `fully_shard`.

    Raises:
        WrapError: A dtype is not one of real floating-point numbers, which only are cast.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Refuse dtypes that would round gradients or parameters to integers."""
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                continue
            msg = (
                f"MixedPrecisionPolicy: {name} must be a floating-point dtype such as "
                f"torch.bfloat16, or None for no cast, got {dtype!r}."
            )
            raise WrapError(msg)

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


def as_mixed_precision(policy: Any) -> MixedPrecisionPolicy:
    """Return a policy of FSDP2 as shardkit's, and shardkit's as it is.

    Raises:
        WrapError: It is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if all(hasattr(policy, name) for name in _MIXED_PRECISION):
        return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in _MIXED_PRECISION})
    msg = (
        f"mp_policy takes a MixedPrecisionPolicy of shardkit or of FSDP2, got {policy!r}. Leave it "
        f"out to cast nothing."
    )
    raise WrapError(msg)


def as_offload(policy: Any) -> OffloadPolicy:
    """Return a policy of FSDP2 as shardkit's, and shardkit's as it is; a class as its defaults.

    Raises:
        WrapError: It is neither.
    """
    if isinstance(policy, type) and policy.__name__ in ("OffloadPolicy", "CPUOffloadPolicy"):
        policy = policy()  # The class means its defaults.
    if isinstance(policy, OffloadPolicy):
        return policy
    kinds = {each.__name__ for each in type(policy).__mro__}
    if "CPUOffloadPolicy" in kinds:
        return CPUOffloadPolicy(pin_memory=policy.pin_memory)
    if "OffloadPolicy" in kinds:
        return OffloadPolicy()
    msg = (
        f"offload_policy takes an OffloadPolicy or a CPUOffloadPolicy of shardkit or of FSDP2, got "
        f"{policy!r}."
    )
    raise WrapError(msg)
