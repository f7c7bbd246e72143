"""Kernels in plans: which one attention takes, how many operations each has, and what memory."""

from __future__ import annotations

import itertools
import math
import typing
import unittest.mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from planned_runs import Mlp
from shardkit import plan
from shardkit.planning._cpu_kernels import scratch_on_cpu
from shardkit.planning._kernels import flops_of, scratch_on_cuda
from shardkit.planning._meter import MemoryMeter
from shardkit.planning._run import Run, batch_on_meta, dry_run

Shape = tuple[int, ...]
NUM_ROWS, NUM_HEADS, LENGTH, DIM = 2, 4, 512, 32


class Attention(nn.Module):
    """Attention whose keys and values are a part of what the queries are made of.

    Args:
        rows: Number of rows of the batch that keys and values are of.
        heads: Number of heads of keys and values.
        value_dim: Size of the values.
        options: Options of torch's function.
    """

    def __init__(
        self,
        rows: int = NUM_ROWS,
        heads: int = NUM_HEADS,
        value_dim: int = DIM,
        **options: typing.Any,
    ) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.rows, self.heads, self.value_dim, self.options = rows, heads, value_dim, options

    def forward(self, x: Tensor) -> Tensor:
        query = self.project(x)
        key = query[: self.rows, : self.heads]
        return F.scaled_dot_product_attention(
            query, key, key[..., : self.value_dim], **self.options
        )


def _batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(NUM_ROWS, NUM_HEADS, LENGTH, DIM, dtype=dtype, device="meta")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({}, True),
        ({"is_causal": True}, True),
        ({"heads": 2, "enable_gqa": True}, True),  # On CUDA only flash attention, for 16 bits.
        ({"rows": 1}, False),  # Keys broadcast, for which torch has the matrix of scores only.
        ({"heads": 1}, False),
        ({"value_dim": 16}, None),  # Some kernels of CUDA take it, that of the CPU does not.
    ],
)
def test_attention_is_planned_and_counted_whatever_broadcasts(
    device: str, dtype: torch.dtype, options: dict[str, typing.Any], is_fused: bool | None
) -> None:
    if device == "cuda" and "enable_gqa" in options:
        is_fused = dtype == torch.bfloat16
    model, batch = Attention(**options).to(dtype), _batch(dtype)
    assert plan(model, batch, mesh=2, device=device).num_params == DIM * DIM + DIM
    seen = dry_run(Run(model, batch_on_meta(batch), (2,), device=device), is_timed=True)
    scores = NUM_ROWS * NUM_HEADS * LENGTH * LENGTH
    has_scores = any(
        memory.nbytes >= scores * dtype.itemsize and memory.kind == "activations"
        for memory in seen.memories
    )
    assert has_scores is not (device == "cuda" if is_fused is None else is_fused)
    counted = sum(each.flops for each in seen.operators)
    linear = 2 * 2 * batch.numel() * DIM  # Nobody asks for the gradient of the batch.
    attention = 3 * 2 * scores * (DIM + options.get("value_dim", DIM))
    again = 0 if has_scores else 2 * scores * DIM
    assert counted == linear + attention + again


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_fused_attention_has_as_many_operations_as_torch_counts(name: str) -> None:
    ops: typing.Any = torch.ops.aten
    query, key = torch.empty(2, 4, 64, 32, device="meta"), torch.empty(2, 4, 16, 32, device="meta")
    forward = getattr(ops, f"_scaled_dot_product_{name}_attention")
    backward = getattr(ops, f"_scaled_dot_product_{name}_attention_backward")
    value, grad = key[..., :8], query[..., :8]
    for func, args in ((forward, (query, key, value)), (backward, (grad, query, key, value))):
        formula = flop_registry[func]
        assert flops_of(func.default, args, {}, (grad,)) == formula(*args, out_val=grad)


class SharedKeys(nn.Module):
    """Attention of eight heads over two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(DIM, 8 * DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (
            each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (self.query, self.key)
        )
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heads_that_share_keys_have_no_copies_of_them(device: str) -> None:
    batch = batch_on_meta(_like(2, LENGTH, DIM, dtype=torch.bfloat16))
    meter = dry_run(Run(SharedKeys().bfloat16(), batch, (1,), device=device))
    of_key = 2 * LENGTH * 2 * DIM * 2
    kept = [each.nbytes for each in meter.memories if each.kind == "activations"]
    assert kept.count(of_key) == 2  # One in each step; values are keys.
    assert kept.count(4 * of_key) == 4  # Queries and results.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((48, 16), (3, 16, 32), (48, 32)),  # Rows of three experts, and their matrices.
        ((16, 48), (48, 32), (3, 16, 32)),  # The gradients of the matrices.
        ((3, 8, 16), (16, 48), (8, 48)),
        ((3, 8, 16), (3, 16, 32), (3, 8, 32)),
    ],
)
def test_grouped_products_have_one_result_and_all_operations(
    dtype: torch.dtype, first: Shape, second: Shape, expected: Shape
) -> None:
    meter = MemoryMeter(on_cpu=True, is_timed=True)
    offs = None if len(first) == len(second) == 3 else _like(3, dtype=torch.int32)
    inputs = (_like(*first, dtype=dtype), _like(*second, dtype=dtype))
    with meter:
        result = torch.ops.aten._grouped_mm(*inputs, offs)  # noqa: SLF001
    assert (result.shape, result.dtype) == (expected, dtype)
    num_products = 3 if len(first) == len(second) == 3 else 1
    assert [each.flops for each in meter.operators] == [
        2 * num_products * math.prod(first[-2:]) * second[-1]
    ]


def test_a_formula_that_raises_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(*args: object, **options: object) -> int:
        raise AssertionError(args, options)

    rows = torch.empty(8, 16, device="meta")
    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, formula)
    assert plan(Mlp(16, 1), rows, mesh=2, hardware="h100").time is not None


def test_operators_are_recorded_only_for_the_time_of_a_step() -> None:
    run = Run(Mlp(16, 1), batch_on_meta(torch.empty(8, 16)), (2,))
    assert not dry_run(run).operators
    assert dry_run(run, is_timed=True).operators


# --- memory that kernels take ---------------------------------------------------------------------


def _like(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("name", "args", "seen"),
    [
        ("sum", (_like(8192, 2000), [0]), [131_072_000]),
        ("sum", (_like(8192, 2000, dtype=torch.bfloat16), [0]), [131_072_000]),
        ("sum", (_like(8192, 8000), [0]), [139_264_000]),
        ("sum", (_like(4096, 1024), [0]), [33_554_432]),
        ("sum", (_like(4096, 2048), [0], True), [67_108_864]),
        ("sum", (_like(4096, 2048), [1]), []),
        ("sum", (_like(4096, 2048),), []),
        ("sum", (_like(64, 2048), [0]), []),
        ("sum", (_like(), [0]), []),
        ("sum", (_like(0, 2048), [0]), []),
        ("sum", (_like(4096, 0), [0]), []),
        ("mean", (_like(8192, 2000), (), False), []),
        ("mm", (_like(1).expand(4096, 61), _like(61, 1024)), [999_424]),
        ("mm", (_like(4096, 61).t(), _like(4096, 1024)), []),
        (
            "_scaled_dot_product_efficient_attention_backward",
            (_like(8, 4, 512, 256), *(_like(8, 4, 512, 256) for _ in range(3))),
            [16_777_216, 16_785_408],
        ),
        (
            "_scaled_dot_product_flash_attention_backward",
            [_like(8, 4, 512, 256, dtype=torch.bfloat16) for _ in range(4)],
            [16_843_008],
        ),
    ],
)
def test_the_memory_of_kernels_is_what_an_h100_took(
    name: str, args: typing.Any, seen: list[int]
) -> None:
    """The sizes are those of the allocator's history with torch 2.11."""
    assert [n for n in scratch_on_cuda(name, args, {}, (_like(1),)) if n] == seen


_PLAIN = ([1, 1], [1, 1], [1, 1])
_FORWARD = (*_PLAIN, False, [0, 0], 1)
_STRIDED = ([2, 2], [1, 1], [1, 1])
_IMAGES, _FILTERS = _like(16, 64, 32, 32), _like(64, 64, 3, 3)
_BACKWARD = (False, [0, 0], 1, [True, True, True])
_ROWS, _EXPANDED = _like(16, 64, 64), _like(1).expand(16, 64, 64)
_HALVES = _like(16, 64, 64, dtype=torch.bfloat16)


def _in_channels_last(*shape: int) -> Tensor:
    return _like(*shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "args", "results", "seen"),
    [
        ("convolution", (_IMAGES, _FILTERS, None, *_FORWARD), (_IMAGES,), 4_341_760),
        ("convolution", (_IMAGES, _FILTERS, None, *_PLAIN, True, [0, 0], 1), (_IMAGES,), 8_536_192),
        (
            "convolution",
            (_like(32, 64, 32, 32), _like(3, 64, 3, 3), None, *_FORWARD),
            (_like(32, 3, 32, 32),),
            10_129_600,
        ),
        (
            "convolution",
            (_in_channels_last(16, 64, 32, 32), _FILTERS, None, *_FORWARD),
            (_in_channels_last(16, 64, 32, 32),),
            303_128,
        ),
        (
            "convolution_backward",
            (_IMAGES, _IMAGES, _FILTERS, [64], *_PLAIN, *_BACKWARD),
            (_IMAGES, _FILTERS, _like(64)),
            8_388_608,
        ),
        (
            "convolution_backward",
            (
                *(_like(32, 128, 16, 16), _like(32, 64, 32, 32), _like(128, 64, 3, 3), [128]),
                *(*_STRIDED, *_BACKWARD),
            ),
            (_like(32, 64, 32, 32), _like(128, 64, 3, 3), _like(128)),
            16_481_792,
        ),
        (  # Of ConvNeXt.
            "convolution_backward",
            (
                *([_in_channels_last(4, 128, 56, 56)] * 2), _like(128, 1, 7, 7), [128],
                *([1, 1], [3, 3], [1, 1], False, [0, 0], 128, [True, True, True]),
            ),
            (_in_channels_last(4, 128, 56, 56), _like(128, 1, 7, 7), _like(128)),
            6_448_128,
        ),
        (  # Of Segformer: its smallest images have fewer rows than the filters.
            "convolution_backward",
            (
                *([_in_channels_last(2, 64, 2, 2)] * 2), _like(64, 1, 3, 3), [64],
                *([1, 1], [1, 1], [1, 1], False, [0, 0], 64, [True, True, True]),
            ),
            (_in_channels_last(2, 64, 2, 2), _like(64, 1, 3, 3), _like(64)),
            592_384,
        ),
        (  # Of the end of a ResNet.
            "convolution_backward",
            (*([_like(8, 512, 3, 3)] * 2), _like(512, 512, 3, 3), [512], *_PLAIN, *_BACKWARD),
            (_like(8, 512, 3, 3), _like(512, 512, 3, 3), _like(512)),
            9_439_232,
        ),
        (  # Of a vision transformer.
            "convolution_backward",
            (
                *(_like(8, 128, 4, 4), _like(8, 3, 64, 64), _like(128, 3, 16, 16), [128]),
                *([16, 16], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True]),
            ),
            (_like(128, 3, 16, 16), _like(128)),
            1_649_920,
        ),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            [_like(2, 4, 2048, 32)] * 3,
            (_like(2, 4, 2048, 32),),
            559_104,
        ),
        ("native_layer_norm", (_like(16, 64, 99).mT, [64]), (_like(16, 99, 64),), 405_504),
        ("upsample_bilinear2d", (_IMAGES, [64, 64]), (_like(16, 64, 64, 64),), 20_971_520),
        ("mul", (_like(99, dtype=torch.bfloat16), _like(99)), (_like(99),), 396),
        ("add_", (_like(99, dtype=torch.bfloat16), _like(99)),
         (_like(99, dtype=torch.bfloat16),), 792),
        ("sum", (_like(64, 64, dtype=torch.bool),), (_like(dtype=torch.int64),), 32_768),
        ("sum", (_like(64, 64),), (_like(),), 0),
        ("linalg_matrix_exp", (_like(512, 512),), (_like(512, 512),), 12_582_936),
        ("_fft_c2c", (_like(16, 256, 99, dtype=torch.complex64), [1]), (_like(1),), 3_244_032),
        ("_fft_c2c", (_like(16, 256, 99, dtype=torch.complex64), [2]), (_like(1),), 0),
        *(
            (
                "convolution_backward",
                (
                    *(grad.bfloat16(), image.bfloat16(), weight.bfloat16(), [8]),
                    *(*_PLAIN, False, [0, 0], 1, [False, True, True]),
                ),
                (weight.bfloat16(), _like(8, dtype=torch.bfloat16)),
                seen,
            )
            for grad, image, weight, seen in (
                (_like(8, 3, 64, 64), _like(8, 16, 64, 64), _like(3, 16, 3, 3), 2_384_996),
                (_like(8, 64, 32, 32), _like(8, 32, 32, 32), _like(64, 32, 3, 3), 1_856_132),
                (_like(8, 128, 16, 16), _like(8, 128, 16, 16), _like(128, 128, 3, 3), 1_786_756),
            )
        ),
        (
            "convolution",
            (_like(8, 64, 32, 32).bfloat16(), _like(64, 64, 1, 1).bfloat16(), None, *_FORWARD),
            (_like(8, 64, 32, 32).bfloat16(),),
            1_319_040,
        ),
        ("gelu_backward", (_EXPANDED, _ROWS), (_ROWS,), 262_144),
        ("gelu_backward", (_ROWS, _ROWS), (_ROWS,), 0),
        ("_softmax_backward_data", (_EXPANDED, _ROWS, 1, torch.float32), (_ROWS,), 262_144),
        ("avg_pool2d_backward", (_EXPANDED, _ROWS, [1, 2]), (_ROWS,), 262_144),
        ("max_pool2d_with_indices_backward", (_EXPANDED, _ROWS), (_ROWS,), 262_144),
        ("reflection_pad1d_backward", (_EXPANDED, _ROWS, [3, 3]), (_ROWS,), 262_144),
        ("upsample_nearest1d_backward", (_EXPANDED, [64], [16, 64, 32]), (_ROWS,), 262_144),
        ("native_group_norm_backward", (_ROWS, _ROWS, None, None, None, 16, 64, 64, 8),
         (_ROWS,), 8_192),
        ("mse_loss", (_ROWS, _ROWS), (_like(),), 262_144),
        ("soft_margin_loss_backward", (_like(), _ROWS, _ROWS), (_ROWS,), 524_288),
        (
            "_trilinear",
            (*(_like(1024, 64), _like(8, 64, 64), _like(1024, 64)), *([1, 3], [0], [1, 2], [2, 3])),
            (_like(1024, 8),),
            266_240,
        ),
        (
            "_trilinear",
            (*(_like(1024, 8), _like(8, 64, 64), _like(1024, 64)), *([2, 3], [0], [1, 2], [1, 3])),
            (_like(1024, 64),),
            17_039_360,
        ),
        ("mean", (_HALVES, [1], True), (_like(16, 1, 64, dtype=torch.bfloat16),), 266_240),
        ("mean", (_ROWS, [1], True), (_like(16, 1, 64),), 0),
        ("mse_loss", (_HALVES, _HALVES), (_like(dtype=torch.bfloat16),), 393_220),
        ("binary_cross_entropy_with_logits", (_HALVES, _HALVES), (_like(dtype=torch.bfloat16),),
         524_292),
        ("sum", (_HALVES, [0, 2]), (_like(64, dtype=torch.bfloat16),), 262_400),
        ("sum", (_HALVES, [0, 1]), (_like(64, dtype=torch.bfloat16),), 0),
        ("sum", (_HALVES.mT, [0, 2]), (_like(64, dtype=torch.bfloat16),), 0),
        ("sum", (_like(64, dtype=torch.bfloat16).expand(64, 64),), (_like(dtype=torch.bfloat16),),
         16_388),
        ("scatter_add", (_HALVES, 1, _ROWS, _HALVES), (_HALVES,), 262_144),
        ("gather", (_HALVES, 1, _ROWS), (_HALVES,), 262_144),
        ("kthvalue", (_HALVES, 3, 1), (_like(16, 64, dtype=torch.bfloat16),), 655_360),
        (
            "mm",
            (_like(1024, 64, dtype=torch.bfloat16), _like(64, 64, dtype=torch.bfloat16)),
            (_like(1024, 64, dtype=torch.bfloat16),),
            205_824,
        ),
        ("im2col", (_like(16, 4, 32, 32), [3, 3]), (_like(16, 36, 900),), 262_144),
        ("col2im", (_like(16, 900, 36).mT, [32, 32]), (_like(16, 4, 32, 32),), 2_073_600),
        ("relu", (_IMAGES,), (_IMAGES,), 0),
    ],
)  # fmt: skip
def test_the_memory_of_kernels_is_what_a_cpu_took(
    name: str, args: typing.Any, results: tuple[Tensor, ...], seen: int
) -> None:
    """The sizes are those of the profiler with torch 2.13, one thread and AVX-512."""
    with unittest.mock.patch.object(torch, "get_num_threads", return_value=1):
        planned = sum(scratch_on_cpu(name, args, {}, results))
    assert seen <= planned <= 1.04 * seen


def test_a_convolution_copies_a_gradient_that_alone_is_in_channels_last() -> None:
    grad, image, weight = _in_channels_last(8, 8, 64, 64), _like(8, 3, 64, 64), _like(8, 3, 3, 3)
    args = (grad, image, weight, [8], *_PLAIN, False, [0, 0], 1, [False, True, True])
    planned = sum(scratch_on_cpu("convolution_backward", args, {}, (weight, _like(8))))
    assert 3_146_784 <= planned <= 1.13 * 3_146_784  # Seen by the profiler with torch 2.13.


@pytest.mark.parametrize("are_last", [*itertools.product([False, True], repeat=3)])
@pytest.mark.parametrize(("groups", "size"), [(1, 3), (32, 3), (1, 1), (32, 1)])
def test_results_of_convolutions_have_the_format_of_a_cpu(
    are_last: tuple[bool, ...], groups: int, size: int
) -> None:
    def formats(device: str) -> list[tuple[bool, ...]]:
        shapes = (2, 32, 8, 8), (32, 32 // groups, size, size), (2, 32, 7 + size, 7 + size)
        image, weight, grad = (
            torch.ones(shape, device=device).to(
                memory_format=torch.channels_last if is_last else torch.contiguous_format
            )
            for shape, is_last in zip(shapes, are_last, strict=True)
        )
        given = ([1, 1], [size - 1, size - 1], [1, 1], False, [0, 0], groups)
        out = torch.ops.aten.convolution(image, weight, None, *given)
        wanted = [True, True, True]
        of_all = torch.ops.aten.convolution_backward(grad, image, weight, [32], *given, wanted)
        kinds = (torch.contiguous_format, torch.channels_last)
        return [
            tuple(each.is_contiguous(memory_format=kind) for kind in kinds)
            for each in (out, *of_all[:2])
        ]

    real = formats("cpu")
    with MemoryMeter(on_cpu=True):
        assert formats("meta") == real


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("native_batch_norm", (None, None, None, None, True, 0.1, 1e-5)),
        ("pixel_shuffle", (2,)),
        ("pixel_unshuffle", (2,)),
        ("roll", ([1], [1])),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (2, 1, 0, 3)])
def test_results_of_other_layers_have_the_strides_of_a_cpu(
    name: str, args: tuple[typing.Any, ...], order: tuple[int, ...]
) -> None:
    shape = [0, 0, 0, 0]
    for dim, size in zip(order, (2, 8, 6, 6), strict=True):
        shape[dim] = size

    def strides(device: str) -> list[tuple[int, ...]]:
        image = torch.ones(shape, device=device).permute(order).requires_grad_()
        out = getattr(torch.ops.aten, name)(image, *args)
        first = out if isinstance(out, Tensor) else out[0]
        [grad] = torch.autograd.grad(first, image, torch.ones_like(first))
        return [first.stride(), grad.stride()]

    real = strides("cpu")
    with MemoryMeter(on_cpu=True):
        assert strides("meta") == real
