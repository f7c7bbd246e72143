"""Kernels that a device would choose where torch chooses others for meta tensors."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from shardkit._compat.torch_tensors import flop_formula
from shardkit._layout import align_up
from shardkit._tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_HEAD_DIMS = range(0, 257, 8)  # Head dims of flash attention on CUDA.


def fused_attention(cast: Callable[[Any], Any], *, on_cpu: bool) -> AbstractContextManager[object]:
    """Compute attention on meta like fused kernels do, without torch's matrix of scores.

    `cast` converts the inputs as autocast does.

    Meanwhile the function of torch is replaced. A dispatch mode would not work: it is off in a
    backward, where activation checkpointing runs a forward again. The kernels are that of the CPU,
    or those of CUDA: flash attention, or memory-efficient attention if there is a mask.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    kernel = _on_cpu if on_cpu else _on_cuda

    @functools.wraps(original)
    def attention(*args: Any, **options: Any) -> Any:
        fused = kernel(**cast({**dict(zip(_NAMES, args, strict=False)), **options}))
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


@contextlib.contextmanager
def transformers_without_values() -> Iterator[None]:
    """Make models of transformers decide nothing by values, which tensors on meta lack.

    They treat these tensors like those of a tracer: they check no values, and a mask in the batch
    counts as one that hides something. Each row of a batch without a mask counts as one sequence;
    otherwise they read the positions to see whether it holds several. Tested with 5.24; the names
    are those of 5.20 to 5.24.
    """

    def replace(module: str, name: str, made: Callable[[Any], Callable[[Any], Any]]) -> None:
        if (original := getattr(sys.modules.get(module), name, None)) is not None:
            stack.enter_context(patch.object(sys.modules[module], name, made(original)))

    with contextlib.ExitStack() as stack:
        replace(
            "transformers.utils.import_utils",
            "is_fake_tensor",
            lambda original: lambda each: original(each) or getattr(each, "is_meta", False),
        )
        replace(
            "transformers.masking_utils", "find_packed_sequence_indices", lambda _: lambda _: None
        )
        stack.enter_context(patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"))
        yield


def switch_cache_off(model: nn.Module) -> None:
    """Let a model of transformers keep no keys and values of its forward for the next tokens."""
    if (config := getattr(model, "config", None)) is not None and hasattr(config, "use_cache"):
        config.use_cache = config.get_text_config().use_cache = False  # Its layers use these.


def _are_fused(query: Any, key: Any, value: Any, options: Any) -> bool:
    """Whether fused kernels take these inputs: they broadcast only heads, and only on request."""
    if query.dim() != 4 or not query.shape[0] == key.shape[0] == value.shape[0]:  # noqa: PLR2004
        return False
    return query.shape[1] == key.shape[1] == value.shape[1] or bool(options.get("enable_gqa"))


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
    causal, scale = options.get("is_causal", False), options.get("scale")
    return kernel(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]


def _on_cuda(*, query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    """Return the result of the CUDA kernel that keeps the least memory; None if none fits.

    Only flash attention lets heads share keys.
    """
    if not _are_fused(query, key, value, options):
        return None
    dropout, causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
    scale, ops = options.get("scale"), torch.ops.aten
    is_half = query.dtype in {torch.float16, torch.bfloat16}
    is_narrow = query.shape[-1] == value.shape[-1] and query.shape[-1] in _HEAD_DIMS
    if attn_mask is None and is_half and is_narrow:
        flash = ops._scaled_dot_product_flash_attention  # noqa: SLF001
        return flash(query, key, value, dropout, causal, False, scale=scale)[0]
    if key.shape[1] != query.shape[1]:
        return None
    if attn_mask is not None:
        attn_mask = _added(attn_mask, query).expand(*query.shape[:2], query.shape[2], key.shape[2])
    efficient = ops._scaled_dot_product_efficient_attention  # noqa: SLF001
    return efficient(query, key, value, attn_mask, True, dropout, causal, scale=scale)[0]


# --- memory that kernels of CUDA take while they run ---

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


def has_gaps(matrices: Tensor) -> bool:
    """Whether neither rows nor columns are contiguous, as in the gradient of a sum."""
    if matrices.dim() < 2:  # noqa: PLR2004
        return False
    (rows, columns), (down, right) = matrices.shape[-2:], matrices.stride()[-2:]
    by_rows = right == 1 and down >= max(columns, 1)
    return not by_rows and not (down == 1 and right >= max(rows, 1))


_NUM_PROCESSORS, _THREADS_OF_PROCESSOR = 132, 2048  # Of the H100 and the H200.
_REDUCTIONS = frozenset({"sum", "mean", "linalg_vector_norm"})
ATTENTION = "_scaled_dot_product_"


def scratch_on_cuda(
    name: str, args: Any, options: Any, results: tuple[Tensor, ...]
) -> tuple[int, ...]:
    """Return the bytes that a kernel of CUDA takes while it runs, apart from its results.

    Each is freed before the next is taken. Only large scratch memory is known: of reductions over
    rows, of attention's backward, and copies of a product's inputs that have gaps.
    """
    if name in _REDUCTIONS and results:
        dims = args[1] if len(args) > 1 else options.get("dim")
        if name == "linalg_vector_norm":
            dims = args[2] if len(args) > 2 else options.get("dim")  # noqa: PLR2004
        return (_scratch_of_reduction(args[0], dims),)
    if name in PRODUCTS:
        return tuple(t.nbytes for t in args if isinstance(t, torch.Tensor) and has_gaps(t))
    if name == f"{ATTENTION}flash_attention_backward":
        return (_scratch_of_flash(args[1], args[2]),)
    if name == f"{ATTENTION}efficient_attention_backward":
        return _scratch_of_efficient(args[1], args[2])
    return ()


def _scratch_of_reduction(tensor: Tensor, dims: Any) -> int:
    """Return the bytes in which blocks of threads leave partial results for each other.

    This follows `setReduceConfig` of ATen/native/cuda/Reduce.cuh (torch 2.9 to 2.13). It is little
    memory unless the fastest dimension is kept: then each thread of a block has its own.
    """
    if dims is None or isinstance(dims, bool) or not tensor.dim():
        return 0
    listed = [dims] if isinstance(dims, int) else dims
    reduced = {dim % tensor.dim() for dim in listed} or {*range(tensor.dim())}
    sizes = [(tensor.stride(d), tensor.shape[d], d in reduced) for d in range(tensor.dim())]
    sizes = sorted(size for size in sizes if size[1] > 1)
    if not sizes or sizes[0][2]:
        return 0
    num_inputs = math.prod(size for _, size, is_reduced in sizes if is_reduced)
    num_outputs = math.prod(size for _, size, is_reduced in sizes if not is_reduced)
    at_once = 1  # Outputs of a thread, which it loads as a vector.
    if sizes[0][0] == 1:
        at_once = math.gcd(4, sizes[0][1], *(stride for stride, *_ in sizes[1:]))
    most = 512 // at_once  # Threads of a block.
    across, down = (
        1 << min(n, most).bit_length() - 1 for n in (num_outputs // at_once, num_inputs)
    )
    width = min(across, 32)
    height = min(down, most // width)
    width = min(across, most // height)
    per_thread = -(-num_inputs // height) if num_inputs >= min(16 * height, 256) else 0
    blocks = -(-num_outputs // (at_once * width))
    wanted = _NUM_PROCESSORS * (_THREADS_OF_PROCESSOR // (width * height))
    if per_thread < 256 or blocks > wanted:  # noqa: PLR2004
        return 0
    parts = max(min(-(-wanted // blocks), -(-per_thread // 16)), -(-per_thread // 256))
    size = max(4, tensor.element_size())  # Of a partial result.
    return size * num_outputs * parts * width * at_once if parts > 1 else 0


def _scratch_of_flash(query: Tensor, key: Tensor) -> int:
    """Return the bytes of the query's gradient in fp32, and of a number for each row of scores.

    If queries share keys, the gradients of keys and values of each query head come on top. cuDNN,
    which computes the same on an H100, takes 256 bytes more.
    """
    *heads, rows, wide = query.shape
    wide = align_up(wide, 32 if wide <= 128 else 64)  # noqa: PLR2004
    of_rows = 4 * math.prod(heads) * align_up(rows, 128) * (wide + 1) + 256
    is_shared = key.shape[1] != query.shape[1]
    return of_rows + (2 * key.nbytes // key.shape[1] * query.shape[1] if is_shared else 0)


def _scratch_of_efficient(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Return the bytes of a product, and of gradients in fp32: wide 16-bit keys' and values', too.

    The product is that of output and gradient.
    """
    *heads, rows, wide = query.shape
    num = align_up(rows, 64) * wide + 64
    if query.element_size() < 4 and wide > 64:  # noqa: PLR2004
        num += 2 * align_up(key.shape[-2], 64) * wide
    return 4 * query.numel(), 4 * math.prod(heads) * num


# --- images whose channels are next to each other ---

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes images, or a convolution's weight, as ones whose channels come last.

    This follows `is_channels_last_strides_2d` of c10/core/MemoryFormat.h.
    """
    if tensor.dim() not in CHANNELS_LAST or not tensor.stride(1):
        return False
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if not size or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * size
    return True


def is_packed(tensor: Tensor) -> bool:
    """Whether images lie in memory without gaps, with their channels last."""
    return tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.dim()])


_CONVOLUTIONS = {
    torch.ops.aten.convolution: slice(2),
    torch.ops.aten.convolution_backward: slice(1, 3),
}
"""Operators, and where their image and weight are in the arguments."""
_OF_IMAGES = {
    torch.ops.aten.native_batch_norm: slice(1),
    torch.ops.aten.native_batch_norm_backward: slice(1, 2),
    torch.ops.aten.pixel_shuffle: slice(1),
    torch.ops.aten.pixel_unshuffle: slice(1),
    torch.ops.aten.roll: slice(1),
}
"""The same of operators whose results have other strides on the CPU than on meta."""


def _in_format(images: slice, func: Any, *args: Any, **options: Any) -> Any:
    """Run an operator on meta; its results have their channels last if an image has them there."""
    is_last = any(map(is_channels_last, args[images]))

    def formatted(tensor: Tensor) -> Tensor:
        has_points = tensor.dim() in CHANNELS_LAST
        format_ = CHANNELS_LAST[tensor.dim()] if is_last and has_points else torch.contiguous_format
        return tensor.contiguous(memory_format=format_)

    return map_tensors(formatted, func(*args, **options))


# --- products of groups of rows with the matrices of experts ---

GROUPED_PRODUCT = torch.ops.aten._grouped_mm  # noqa: SLF001


def _grouped_product(first: Tensor, second: Tensor, offs: Tensor | None = None, *_: Any) -> Tensor:
    """Return the result on meta of a grouped product, of any dtype: torch's has it for bf16 only.

    An input with two dims consists of groups of rows or columns, whose ends are in `offs`.
    """
    shape = [first.shape[-2], second.shape[-1]]
    if first.dim() == second.dim():
        shape.insert(0, len(first) if offs is None else len(offs))
    return first.new_empty(shape)


# --- steps of optimizers ---


def _number(tensor: Tensor) -> float:
    """Return 1 for a number on meta, which those optimizers only compute with."""
    if not tensor.is_meta or tensor.dtype == torch.bool:
        return tensor.item()
    return 1.0 if tensor.is_floating_point() else 1


def _written(*_: Any, **__: Any) -> None:
    """Write into tensors on meta, where torch lacks the kernel."""


_IN_STEPS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense: _number,  # noqa: SLF001
    torch.ops.aten._fused_sgd_: _written,
    torch.ops.aten._fused_adagrad_: _written,
}
"""Operators that run otherwise on meta while an optimizer of torch steps."""


# --- what runs in the place of an operator ---


def kernel_of(func: Any, args: Any, *, in_torch_optim: bool, on_cpu: bool) -> Callable[..., Any]:
    """Return what runs for an operator on meta: most often the operator itself."""
    packet = func.overloadpacket
    images = _CONVOLUTIONS.get(packet) or (_OF_IMAGES.get(packet) if on_cpu else None)
    if images is not None:
        return functools.partial(_in_format, images, func)
    if packet is GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:
        return _grouped_product
    found: Callable[..., Any] = _IN_STEPS.get(packet, func) if in_torch_optim else func
    return found


# --- operations ---


def flops_of(func: Any, args: Any, options: Any, results: tuple[Tensor, ...]) -> int:
    """Return the floating-point operations of an operator; 0 if no formula counts them."""
    name = func.overloadpacket.__name__
    if name.startswith(ATTENTION):  # 2 products; 5 in backward, which recomputes scores.
        is_backward = name.endswith("_backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        wide, deep = query.shape[-1], value.shape[-1]
        of_score = 2 * (3 * wide + 2 * deep if is_backward else wide + deep)
        return int(math.prod(query.shape[:-1]) * key.shape[-2] * of_score)
    if func.overloadpacket is GROUPED_PRODUCT:
        first, second = args[:2]
        num_groups = len(first) if first.dim() == second.dim() == 3 else 1  # noqa: PLR2004
        return int(2 * num_groups * math.prod(first.shape[-2:]) * second.shape[-1])
    formula = flop_formula(func.overloadpacket)
    if formula is not None:
        out = results[0] if len(results) == 1 else results
        with contextlib.suppress(Exception):  # Formulas may be users', and may raise.
            return int(formula(*args, **options, out_val=out))
    return 0
