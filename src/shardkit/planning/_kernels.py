"""Kernels that a device would choose where torch chooses others for meta tensors."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from shardkit._compat.torch_tensors import flop_formula

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_HEAD_DIMS = 8
"""Fused kernels of CUDA need head dims that are a multiple of this."""


def fused_attention(*, on_cpu: bool) -> AbstractContextManager[object]:
    """Compute attention on meta like fused kernels do, without torch's matrix of scores.

    Meanwhile the function of torch is replaced. A dispatch mode would not work: it is off in a
    backward, where activation checkpointing runs a forward again.

    Args:
        on_cpu: Whether to use the kernel of the CPU. Otherwise those of CUDA: flash attention, or
            memory-efficient attention if there is a mask.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    kernel = _on_cpu if on_cpu else _on_cuda

    @functools.wraps(original)
    def attention(*args: Any, **options: Any) -> Any:
        fused = kernel(**{**dict(zip(_NAMES, args, strict=False)), **options})
        return original(*args, **options) if fused is None else fused

    return patch.object(torch.nn.functional, "scaled_dot_product_attention", attention)


def seen_random_states(note: Callable[[Tensor], object]) -> AbstractContextManager[object]:
    """Note the random states that activation checkpointing keeps, which no operator shows."""
    original = torch.get_rng_state

    @functools.wraps(original)
    def get_state() -> Tensor:
        state = original()
        note(state)
        return state

    return patch.object(torch, "get_rng_state", get_state)


def without_packed_sequences() -> AbstractContextManager[object]:
    """Make models of transformers treat each row of a batch without a mask as one sequence.

    Otherwise they read the positions to see whether rows hold several. Tested with 5.20 to 5.23.
    """
    masks, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    has_it = hasattr(masks, name)
    return patch.object(masks, name, lambda _: None) if has_it else contextlib.nullcontext()


def _are_fused(query: Any, key: Any, value: Any, options: Any) -> bool:
    """Whether fused kernels take these inputs: they broadcast only heads, and only on request."""
    if query.dim() != 4 or not query.shape[0] == key.shape[0] == value.shape[0]:  # noqa: PLR2004
        return False
    return query.shape[1] == key.shape[1] == value.shape[1] or bool(options.get("enable_gqa"))


def _whole_heads(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return the inputs with as many key heads as query heads."""
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return query, key, value
    return query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def _added(mask: Any, query: Any) -> Any:
    """Return a mask in the form that kernels add to scores; torch converts boolean masks to it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, 0.0)


def _on_cpu(*, query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    """Return the result of the CPU's kernel; None if it does not take these inputs."""
    has_mask_grad = attn_mask is not None and attn_mask.requires_grad
    are_alike = _are_fused(query, key, value, options) and query.shape[-1] == value.shape[-1]
    if not are_alike or options.get("dropout_p") or has_mask_grad:
        return None
    attn_mask = _added(attn_mask, query)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    inputs = _whole_heads(query, key, value)
    causal, scale = options.get("is_causal", False), options.get("scale")
    return kernel(*inputs, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]


def _on_cuda(*, query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    """Return the result of the CUDA kernel that keeps the least memory; None if none fits."""
    if not _are_fused(query, key, value, options):
        return None
    inputs = _whole_heads(query, key, value)
    dropout, causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
    scale, ops = options.get("scale"), torch.ops.aten
    is_half = query.dtype in {torch.float16, torch.bfloat16}
    are_whole = query.shape[-1] == value.shape[-1] and query.shape[-1] % _HEAD_DIMS == 0
    if attn_mask is None and is_half and are_whole:
        flash = ops._scaled_dot_product_flash_attention  # noqa: SLF001
        return flash(*inputs, dropout, causal, False, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = _added(attn_mask, query).expand(*query.shape[:2], query.shape[2], key.shape[2])
    efficient = ops._scaled_dot_product_efficient_attention  # noqa: SLF001
    return efficient(*inputs, attn_mask, True, dropout, causal, scale=scale)[0]


_ATTENTION = "_scaled_dot_product_"


def flops_of(func: Any, args: Any, options: Any, results: tuple[Tensor, ...]) -> int:
    """Return the floating-point operations of an operator; 0 if no formula counts them."""
    name = func.overloadpacket.__name__
    if name.startswith(_ATTENTION):  # 2 products; 5 in backward, which recomputes scores.
        is_backward = name.endswith("_backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        wide, deep = query.shape[-1], value.shape[-1]
        of_score = 2 * (3 * wide + 2 * deep if is_backward else wide + deep)
        return int(math.prod(query.shape[:-1]) * key.shape[-2] * of_score)
    formula = flop_formula(func.overloadpacket)
    if formula is not None:
        out = results[0] if len(results) == 1 else results
        with contextlib.suppress(Exception):  # Formulas may be users', and may raise.
            return int(formula(*args, **options, out_val=out))
    return 0
