"""Memory that kernels of torch's CPU take while they run, apart from their results.

Each formula says the most that torch 2.9 to 2.13 takes. Files in comments are those of ATen/native.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardkit._layout import align_up
from shardkit.planning._kernels import ATTENTION, PRODUCTS, has_gaps, is_channels_last, is_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

AS_LARGE_AS_INPUT = frozenset(
    {"binary_cross_entropy", "smooth_l1_loss", "mse_loss", "soft_margin_loss", "col2im"}
)
"""Operators whose result is smaller than the first input, and keeps as much memory."""
_HALF, _FP32_NBYTES = 2, 4
_BLOCK = 16  # oneDNN computes convolutions with blocks of so many channels.
_COLUMNS = 3
"""The most columns of a kernel for which oneDNN computes channels of their own without blocks."""
_FEW = 4  # oneDNN leaves images with fewer channels as they are.
_SMALL = 1024
_MAX = 2  # Mode of an embedding bag.


class _Call(NamedTuple):
    """A call of an operator; `inputs` are the positional arguments that are tensors."""

    name: str
    args: Any
    inputs: list[Tensor]
    results: tuple[Tensor, ...]

    @property
    def first(self) -> Tensor:
        """The first input."""
        return self.inputs[0]

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.results[0]


def scratch_on_cpu(
    name: str, args: Any, options: Any, results: tuple[Tensor, ...]
) -> tuple[int, ...]:
    """Return the bytes that a kernel of the CPU takes while it runs, apart from its results."""
    del options
    formula = _FORMULAS.get(name)
    if formula is None:
        return ()
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    if not inputs or not results:
        return ()
    return (int(formula(_Call(name, args, inputs, results))),)


def _copies(inputs: Iterable[Tensor]) -> int:
    """Return the bytes of copies of all inputs that are not contiguous."""
    return sum(each.nbytes for each in inputs if not each.is_contiguous())


def _in_fp32(*tensors: Tensor) -> int:
    """Return the bytes of copies in fp32, if the first tensor has 16-bit numbers."""
    return _FP32_NBYTES * sum(t.numel() for t in tensors) if tensors[0].itemsize == _HALF else 0


def _of_product(call: _Call) -> int:
    """Return the bytes of the inputs that a product copies: those that its library does not take.

    In 16 bits this is the most that oneDNN copies: all of them, and some blocks.
    """
    if call.out.itemsize == _HALF:
        return sum(each.nbytes for each in call.inputs) + 68 * _SMALL
    return sum(each.nbytes for each in call.inputs[-2:] if has_gaps(each))


def _of_conversions(call: _Call) -> int:
    """Return the bytes of inputs, and of what is written in place, in their common dtype."""
    values = call.inputs[1:] if call.name == "where" else call.inputs
    inputs = [each for each in values if each.dim()]
    common = functools.reduce(torch.promote_types, (each.dtype for each in inputs), torch.bool)
    written = call.results if call.name.endswith("_") else ()
    return sum(e.numel() * common.itemsize for e in (*inputs, *written) if e.dtype != common)


def _of_sum(call: _Call) -> int:
    """Return the bytes of the input in the dtype of the result.

    A sum of 16-bit numbers over dims that do not lie side by side computes in fp32 (SumKernel.cpp).
    """
    first, out = call.first, call.out
    if first.dtype != out.dtype:
        return first.numel() * out.itemsize
    dims = call.args[1] if len(call.args) > 1 else None
    is_wide = call.name == "sum" and out.itemsize == _HALF and _num_runs(first, dims) > 1
    return _in_fp32(first, out) if is_wide else 0


def _num_runs(tensor: Tensor, dims: Iterable[int] | None) -> int:
    """Return the number of runs of dims, each of which one stride describes."""
    reduced = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    sizes = [(tensor.stride(dim), tensor.shape[dim]) for dim in reduced if tensor.shape[dim] > 1]
    pairs = itertools.pairwise(sorted(sizes))
    return 1 + sum(stride != inner * size for (inner, size), (stride, _) in pairs)


def _of_mean(call: _Call) -> int:
    """Return the bytes of the input and the result in fp32, for 16-bit numbers (ReduceOps.cpp)."""
    return _in_fp32(call.first, call.out)


# --- convolutions ---------------------------------------------------------------------------------


def _blocked(image: Tensor) -> int:
    """Return the bytes of an image with whole blocks of channels."""
    num = max(image.shape[1], 1)
    return image.nbytes // num * align_up(num, _BLOCK)


def _taken(image: Tensor) -> int:
    """Return the bytes of an image in the format that oneDNN reads."""
    return _blocked(image) if image.shape[1] >= _FEW else image.nbytes


def _columns(points: Tensor, weight: Tensor, *, is_whole: bool) -> int:
    """Return the bytes of a matrix with the inputs of each point (ConvolutionMM2d.cpp).

    Dilated and transposed kernels make it for one sample after the other.
    """
    num = points.numel() // max(points.shape[1] * (1 if is_whole else points.shape[0]), 1)
    return num * weight[0].numel() * points.itemsize


def _of_one(images: Tensor) -> int:
    """Return the bytes of one sample with whole blocks of channels, for each thread."""
    return torch.get_num_threads() * _blocked(images) // max(images.shape[0], 1)


def _in_blocks(weight: Tensor, num_groups: int) -> int:
    """Return the bytes of a weight with whole blocks of channels in each group."""
    outputs, inputs, *points = weight.shape
    of_group = align_up(inputs, _BLOCK) * align_up(-(-outputs // num_groups), _BLOCK)
    return num_groups * of_group * math.prod(points) * weight.itemsize


def _taken_weight(weight: Tensor, num_groups: int) -> int:
    """Return the bytes of a weight in the format of contiguous images."""
    if weight.shape[1] >= _FEW:
        return _in_blocks(weight, num_groups)
    return weight.nbytes // max(len(weight), 1) * align_up(len(weight), _BLOCK)


def _of_patches(weight: Tensor) -> int:
    """Return the bytes of the gradient of an embedding of patches; 0 for other layers.

    It comes in four parts in fp32, with something between them.
    """
    is_wide = weight.shape[-1] * weight.itemsize >= 4 * _BLOCK and weight.shape[1] < _BLOCK
    return 17 * weight.numel() if is_wide else 0


def _weight_gradient(call: _Call) -> int:
    """Return the bytes of a weight's gradient in fp32, in the format of `channels_last` images.

    Groups of one channel have a kernel without blocks for at most three columns, unless images have
    fewer rows than it.
    """
    (_, image, weight, *_), strides = call.inputs, call.args[4]
    dilation, num_groups = call.args[6], call.args[9]
    is_alone = num_groups == len(weight) > 1 == weight.shape[1] and weight.dim() == 4  # noqa: PLR2004
    is_narrow = weight.shape[-1] <= _COLUMNS and max(dilation) == 1
    if is_alone and is_narrow and image.shape[2] >= weight.shape[2] + strides[0] - 1:
        return weight.nbytes
    return _in_blocks(weight, num_groups) * max(_FP32_NBYTES // weight.itemsize, 1)


def _of_convolution(call: _Call) -> int:
    """Return the bytes of inputs and result in oneDNN's formats (mkldnn/Conv.cpp)."""
    (image, weight, *_), out, (dilation, is_transposed) = call.inputs, call.out, call.args[5:7]
    if image.dtype == torch.float64 or image.is_complex():
        columns = _columns(image if is_transposed else out, weight, is_whole=max(dilation) == 1)
        return _copies((image, weight)) + columns
    if is_channels_last(out):
        return 2 * weight.nbytes + 9 * _SMALL + (0 if is_packed(image) else image.nbytes)
    taken = _taken(image) + _taken_weight(weight, call.args[8]) + _SMALL
    if is_transposed:
        return _copies((image, weight)) + max(taken + out.nbytes, 2 * out.nbytes)
    is_pointwise = weight[0, 0].numel() == 1
    wide = _of_one(out) * 2 if out.itemsize == _HALF and is_pointwise else 0  # A sum in fp32.
    return _copies((image, weight)) + wide + max(taken + _blocked(out) - out.nbytes, _blocked(out))


def _of_convolution_backward(call: _Call) -> int:
    """Return the same of the kernels for both gradients, which run one after the other."""
    (grad, image, weight, *_), strides = call.inputs, call.args[4]
    dilation, is_transposed = call.args[6:8]
    if image.dtype == torch.float64 or image.is_complex():
        is_whole = max(dilation) == 1 and not is_transposed
        return _copies((grad, image, weight)) + _columns(grad, weight, is_whole=is_whole)
    if is_channels_last(image) or is_channels_last(weight):
        odd = sum(each.nbytes for each in (grad, image) if not is_packed(each))
        return 2 * weight.nbytes + _weight_gradient(call) + odd
    in_blocks = _taken_weight(weight, call.args[9])
    taken = _blocked(grad) + in_blocks + 8 * _SMALL
    if image.itemsize == _HALF:  # Transposed samples, and the gradient of the weight in fp32.
        taken += _of_one(image) + _of_one(grad) + 2 * in_blocks + 16 * _SMALL
    most = taken + _taken(image)
    if call.args[-1][0]:  # The gradient of the image.
        of_image = taken + _blocked(image) if max(strides) == 1 else 3 * image.nbytes
        most = max(most + image.nbytes, of_image)
    beside = most - sum(each.nbytes for each in call.results)
    if weight[0, 0].numel() > 1 or max(strides) > 1:
        # The weight's gradient comes in blocks, and is copied at the end.
        beside = max(beside, in_blocks + 8 * _SMALL, _of_patches(weight))
    return _copies((grad, image, weight)) + beside


# --- other layers ---------------------------------------------------------------------------------


def _of_attention(call: _Call) -> int:
    """Return the bytes of tiles of scores, for each thread (cpu/FlashAttentionKernel.cpp)."""
    is_backward, inputs = call.name.endswith("_backward"), call.inputs
    query, key = inputs[1:3] if is_backward else inputs[:2]
    is_half = query.itemsize == _HALF
    tile = next(n for least, n in ((768, 256), (192, 64), (0, 32)) if query.shape[-2] >= least)
    rows, columns = min(query.shape[-2], tile), min(key.shape[-2], 512)
    wide = align_up(query.shape[-1], 64) if is_half else query.shape[-1]
    num = rows * (2 * columns + 1 if is_backward else columns + 2 + wide)
    num += rows * (columns + 1) if is_half else 0
    is_copied = is_backward and not inputs[0].transpose(1, 2).is_contiguous()
    copied = inputs[0].nbytes if is_copied else 0
    blocks = 16 * _SMALL if is_half else 0
    return torch.get_num_threads() * (num * max(4, query.itemsize) + blocks) + copied


def _of_fft(call: _Call) -> int:
    """Return the bytes of copies in which the transformed dims are last (mkl/SpectralOps.cpp)."""
    first, dims = call.first, call.args[1]
    last = {*range(first.dim() - len(dims), first.dim())}
    is_moved = {dim % first.dim() for dim in dims} != last or not first.is_contiguous()
    if call.name == "_fft_c2r":
        return 2 * first.nbytes if is_moved or len(dims) > 1 else 0
    return first.nbytes if is_moved else 0


def _of_trilinear(call: _Call) -> int:
    """Return the bytes of a slice of both products, one after the other (Linear.cpp)."""
    expanded, summed = call.args[3:6], call.args[6]
    unrolled = call.args[7] if len(call.args) > 7 else 1  # noqa: PLR2004
    shapes: list[list[int]] = []
    for each, added in zip(call.inputs, expanded, strict=True):
        sizes = iter(each.shape)
        shapes.append([1 if d in added else next(sizes) for d in range(each.dim() + len(added))])
    left_out = {unrolled, *({*summed} & {*expanded[2]})}
    pairs = zip(*shapes[:2], strict=True)
    first = math.prod(max(pair) for dim, pair in enumerate(pairs) if dim not in left_out)
    times = 1 if unrolled in summed else max(shape[unrolled] for shape in shapes)
    return int(first * call.out.itemsize + call.out.nbytes // times)


def _of_lapack(times: float) -> Callable[[_Call], float]:
    """Return a formula: so many matrices, and blocks of columns that LAPACK asks for."""
    return lambda call: (
        times * call.out.nbytes + 66 * call.first.shape[-1] * call.first.itemsize + _SMALL
    )


_FORMULAS: dict[str, Callable[[_Call], float]] = {
    **dict.fromkeys(PRODUCTS, _of_product),
    **{
        f"{name}{suffix}": _of_conversions
        for name in (
            *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "fmod", "remainder"),
            *("atan2", "hypot", "where", "lerp", "addcmul", "addcdiv", "xlogy", "copysign"),
            *("eq", "ne", "lt", "le", "gt", "ge"),
        )
        for suffix in ("", "_")
    },
    **dict.fromkeys(("sum", "nansum", "prod", "cumsum", "cumprod", "linalg_vector_norm"), _of_sum),
    "mean": _of_mean,
    **dict.fromkeys(  # cpu/ScatterGatherKernel.cpp: 16-bit results in fp32.
        ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_"), lambda c: _in_fp32(c.out)
    ),
    "convolution": _of_convolution,
    "convolution_backward": _of_convolution_backward,
    f"{ATTENTION}flash_attention_for_cpu": _of_attention,
    f"{ATTENTION}flash_attention_for_cpu_backward": _of_attention,
    # transformers/attention.cpp: which scores are infinite, in rows, too.
    "_safe_softmax": lambda c: c.first.numel() + 2 * c.first.numel() // max(c.first.shape[-1], 1),
    # Normalization.cpp, layer_norm.cpp
    "native_batch_norm": lambda c: 2 * c.results[1].nbytes,
    "native_batch_norm_backward": lambda c: 0 if is_channels_last(c.inputs[1]) else c.out.nbytes,
    "native_group_norm_backward": lambda c: (
        (c.first.nbytes if is_channels_last(c.inputs[1]) else 0)
        + 2 * math.prod(c.first.shape[:2]) * c.first.itemsize
    ),
    # Kernels that only take contiguous inputs. Gradients of sums, and of what was expanded or
    # transposed, are not contiguous.
    **dict.fromkeys(
        (
            *("native_layer_norm", "native_layer_norm_backward", "gelu", "gelu_backward"),
            *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
            *("tril", "triu", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "col2im"),
            *("grid_sampler_2d_backward", "avg_pool2d_backward", "adaptive_max_pool2d_backward"),
            *(
                f"{mode}_pad{dims}d_backward"
                for mode in ("reflection", "replication")
                for dims in (1, 2, 3)
            ),
            *(
                f"upsample_{mode}_backward"
                for mode in ("nearest1d", "nearest2d", "linear1d", "bilinear2d", "bicubic2d")
            ),
        ),
        lambda c: _copies(c.inputs),
    ),
    "im2col": lambda c: c.first.nbytes,
    "_trilinear": _of_trilinear,
    # cpu/UpSampleKernel.cpp: in channels_last, or one dim after the other.
    **dict.fromkeys(
        ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d"),
        lambda c: 0 if is_channels_last(c.first) else c.first.nbytes + c.out.nbytes,
    ),
    **dict.fromkeys(  # Up to four indices and weights for each place along a dim.
        ("upsample_nearest1d", "upsample_linear1d", "upsample_bicubic2d"),
        lambda c: 48 * sum(c.out.shape[2:]),
    ),
    **dict.fromkeys(
        ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        lambda c: c.out.nbytes // c.out.shape[-2] * c.first.shape[-2] + 8 * _SMALL,
    ),
    # AffineGridGenerator.cpp: points with a 1.
    "affine_grid_generator": lambda c: c.out.nbytes // c.out.shape[-1] * (c.out.shape[-1] + 1),
    # MaxPooling.cpp, if the gradient is not in channels_last.
    "max_pool2d_with_indices_backward": lambda c: (
        c.out.nbytes + c.inputs[-1].nbytes
        if is_channels_last(c.out) and not is_channels_last(c.first)
        else _copies(c.inputs)
    ),
    "_adaptive_avg_pool2d_backward": lambda c: (
        c.out.nbytes
        if is_channels_last(c.inputs[1]) and not is_channels_last(c.first)
        else _copies(c.inputs)
    ),
    # Distance.cpp: both inputs with two columns more.
    "_euclidean_dist": lambda c: sum(
        each.nbytes // each.shape[-1] * (each.shape[-1] + 2) for each in c.inputs[:2]
    ),
    # EmbeddingBag.cpp: indices in the order of rows.
    "_embedding_bag_backward": lambda c: (
        4 * c.inputs[1].nbytes + (3 * c.first.nbytes + _SMALL * 64 if c.args[8] == _MAX else 0)
    ),
    # LossCTC.cpp, Loss.cpp
    "_ctc_loss_backward": lambda c: c.args[6].nbytes,
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), _of_mean),
    "binary_cross_entropy_with_logits": lambda c: 2 * c.first.nbytes + _of_mean(c),
    **dict.fromkeys(
        ("huber_loss", "smooth_l1_loss", "mse_loss"), lambda c: c.first.nbytes + _of_mean(c)
    ),
    "soft_margin_loss_backward": lambda c: 2 * c.inputs[1].nbytes,
    # Sorting.cpp, ReduceOps.cpp, Distributions.cpp, TensorAdvancedIndexing.cpp, UnaryOps.cpp
    "kthvalue": lambda c: c.first.nbytes + 8 * c.first.numel(),
    "sort": lambda c: 8 * c.first.numel() if c.first.dim() == 1 else 0,
    "median": lambda c: c.first.nbytes,
    "nanmedian": lambda c: c.first.nbytes,
    "logsumexp": lambda c: c.first.nbytes + 2 * c.out.nbytes,
    "multinomial": lambda c: 1.1 * c.first.nbytes,
    "masked_scatter_backward": lambda c: 3.6 * c.out.nbytes,
    "scatter_reduce": lambda c: 2.3 * c.out.nbytes if c.args[4] == "mean" else 0,
    "abs": lambda c: c.first.nbytes if c.first.is_complex() else 0,
    **dict.fromkeys(("_fft_r2c", "_fft_c2c", "_fft_c2r"), _of_fft),
    # BatchLinearAlgebra.cpp, LinearAlgebra.cpp
    "linalg_inv_ex": _of_lapack(1),
    "linalg_qr": _of_lapack(0),
    "linalg_householder_product": _of_lapack(0),
    "linalg_lu": _of_lapack(1),
    "linalg_lstsq": _of_lapack(1),
    "linalg_matrix_exp": _of_lapack(12),
    "linalg_pinv": _of_lapack(3),
    "cholesky_solve": _of_lapack(1),
    "_linalg_det": _of_lapack(0),
    "_linalg_slogdet": _of_lapack(0),
    "_linalg_eigh": lambda c: 24 * _SMALL + 66 * c.first.shape[-1] * c.first.itemsize,
    "_linalg_svd": lambda c: c.first.nbytes + 8 * _SMALL,
}
