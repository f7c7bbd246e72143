"""Gradients in a dtype of their own (``Parameter.grad_dtype``), beside the same sums by hand."""

from __future__ import annotations

import copy
import io
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from models import Case
from parity import Ranks, Run, on_meshes
from reference import shard
from shardkit import MixedPrecisionPolicy, StateError, fully_shard, summon_full_params
from shardkit._compat.torch_tensors import HAS_GRAD_DTYPE
from shardkit._settings import KEEPS_WIDE_GRADIENTS
from shardkit.optim import LocalOptimizer, MatrixOptimizer

pytestmark = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Torch 2.9 has no grad_dtype.")

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

EXACT = 2**-22  # Of sums in fp32 of numbers up to one; one rounding to bf16 is 2**-9.


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x.to(next(model.parameters()).dtype)).float() - y).square().mean()


CASE = Case(
    lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)),
    lambda model: [model[0], model[2]],
    lambda generator: (
        torch.randn(4, 6, generator=generator),
        torch.randn(4, 3, generator=generator),
    ),
    loss_of,
)


def choose(model: nn.Module, dtype: torch.dtype | None) -> None:
    for param in model.parameters():
        param.grad_dtype = dtype


def made(ranks: Ranks, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a plain model and a copy: copies of plain parameters lose a chosen dtype."""
    plain = ranks.make(CASE).to(dtype)
    return plain, copy.deepcopy(plain)


def made_sharded(
    ranks: Ranks, dtype: torch.dtype, chosen: torch.dtype | None, **options: typing.Any
) -> tuple[nn.Module, nn.Module]:
    """Return a plain model, and one that is sharded after a dtype of gradients was chosen."""
    plain, given = made(ranks, dtype)
    choose(given, chosen)
    return plain, shard(CASE, given, ranks.mesh, **options)


def averages(ranks: Ranks, model: nn.Module, step: int) -> list[Tensor]:
    """Return the gradients of a plain model, averaged over the ranks' batches in fp64."""
    sums = [torch.zeros_like(param, dtype=FP64) for param in model.parameters()]
    for batch in ranks.rank_batches(CASE, step):
        each = copy.deepcopy(model)
        CASE.loss(each, batch).backward()
        for total, param in zip(sums, each.parameters(), strict=True):
            total.add_(param.grad.to(FP64))
    return [total / ranks.world_size for total in sums]


def backward(ranks: Ranks, sharded: nn.Module, step: int) -> None:
    CASE.loss(sharded, ranks.batch(CASE, step)).backward()


def assert_gradients(model: nn.Module, wanted: list[Tensor], dtype: torch.dtype) -> None:
    atol = EXACT if dtype == FP32 else 2**-8
    for (name, param), expected in zip(model.named_parameters(), wanted, strict=True):
        assert param.grad.dtype == dtype, name
        off = (param.grad.full_tensor().to(FP64) - expected).abs().max().item()
        assert off <= atol, f"{name}: {off}"


def train_with_fp32_gradients(ranks: Ranks, when: str) -> None:
    """Gradients of bf16 parameters are averaged, kept and added up in fp32."""
    plain, given = made(ranks, BF16)
    if when == "before":
        choose(given, FP32)
    sharded = shard(CASE, given, ranks.mesh)
    if when == "after":
        choose(sharded, FP32)
    assert {param.grad_dtype for param in sharded.parameters()} == {FP32}
    wanted = averages(ranks, plain, 0)
    backward(ranks, sharded, 0)
    assert_gradients(sharded, wanted, FP32)
    for step in (1, 2):  # Added to those that are there.
        backward(ranks, sharded, step)
        wanted = [a + b for a, b in zip(wanted, averages(ranks, plain, step), strict=True)]
        assert_gradients(sharded, wanted, FP32)
    sharded.zero_grad()
    sharded.set_requires_gradient_sync(False)
    backward(ranks, sharded, 3)
    sharded.set_requires_gradient_sync(True)
    backward(ranks, sharded, 4)
    both = zip(averages(ranks, plain, 3), averages(ranks, plain, 4), strict=True)
    assert_gradients(sharded, [a + b for a, b in both], FP32)


@pytest.mark.parametrize("when", ["before", "after"])
@on_meshes((1,), (2,), (2, 2), xla=())
def test_gradients_are_kept_in_the_chosen_dtype(run: Run, when: str) -> None:
    run(train_with_fp32_gradients, when)


def train_with_any_dtype(ranks: Ranks) -> None:
    """Without a dtype the gradient stays in that of the reduction; a narrower one is rounded."""
    policy = MixedPrecisionPolicy(reduce_dtype=FP32)
    for dtype, chosen, expected in ((BF16, None, FP32), (FP32, BF16, BF16)):
        plain, sharded = made_sharded(ranks, dtype, chosen, mp_policy=policy)
        backward(ranks, sharded, 0)
        assert_gradients(sharded, averages(ranks, plain, 0), expected)


@on_meshes((1,), (2,), (2, 2), xla=())
def test_any_dtype_and_a_narrower_one(run: Run) -> None:
    run(train_with_any_dtype)


def convert_with_any_dtype(ranks: Ranks) -> None:
    """Gradients that may have any dtype are converted with the parameters, as in plain modules."""
    _, sharded = made_sharded(ranks, FP32, None)
    backward(ranks, sharded, 0)
    before = [param.grad.full_tensor() for param in sharded.parameters()]
    sharded.to(BF16)
    for param, was in zip(sharded.parameters(), before, strict=True):
        assert (param.dtype, param.grad_dtype, param.grad.dtype) == (BF16, None, BF16)
        assert torch.equal(param.grad.full_tensor(), was.to(BF16))


@on_meshes((1,), (2,), xla=())
def test_gradients_of_any_dtype_are_converted(run: Run) -> None:
    run(convert_with_any_dtype)


def convert_and_copy(ranks: Ranks) -> None:
    """The choice, and gradients, survive conversions, copies, pickles and loads."""
    plain, sharded = made_sharded(ranks, FP32, FP64)
    backward(ranks, sharded, 0)
    before = averages(ranks, plain, 0)
    sharded.to(BF16)
    for param, wanted in zip(sharded.parameters(), before, strict=True):
        assert (param.dtype, param.grad_dtype, param.grad.dtype) == (BF16, FP64, FP64)
        torch.testing.assert_close(param.grad.full_tensor(), wanted)
    with summon_full_params(sharded, with_grads=True):
        for param, wanted in zip(sharded.parameters(), before, strict=True):
            torch.testing.assert_close(param.grad, wanted)
            param.grad.add_(1)
    for param, wanted in zip(sharded.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted + 1)
    if hasattr(torch.Tensor, "_has_grad_dtype_override"):  # Torch 2.15 knows that it was chosen.
        sharded.zero_grad()
        sharded.to(FP64).to(BF16)
        assert {param.grad_dtype for param in sharded.parameters()} == {FP64}
    plain.to(BF16)
    sharded.load_state_dict(sharded.state_dict(), assign=True)
    written = io.BytesIO()
    torch.save(sharded, written)
    written.seek(0)
    loaded = torch.load(written, weights_only=False)
    for model in (sharded, copy.deepcopy(sharded), loaded):
        model.zero_grad()
        backward(ranks, model, 1)
        for param, wanted in zip(model.parameters(), averages(ranks, plain, 1), strict=True):
            assert param.grad.dtype == FP64
            torch.testing.assert_close(param.grad.full_tensor(), wanted, rtol=1e-6, atol=1e-6)


@on_meshes((2,), (2, 2), xla=())
def test_the_choice_survives_conversions_and_copies(run: Run) -> None:
    run(convert_and_copy)


def mix_in_one_group(ranks: Ranks) -> None:
    """Before `fully_shard` each parameter may have its own; afterwards a group has one."""
    plain, given = made(ranks, BF16)
    given[0].bias.grad_dtype = FP32
    sharded = shard(CASE, given, ranks.mesh)
    backward(ranks, sharded, 0)
    assert_gradients(nn.ParameterList([sharded[0].bias]), averages(ranks, plain, 0)[1:2], FP32)
    assert sharded[0].weight.grad.dtype == BF16
    with pytest.raises(RuntimeError, match="already a gradient"):
        sharded[0].weight.grad_dtype = FP32
    sharded.zero_grad()
    sharded[2].weight.grad_dtype = FP32
    with pytest.raises(StateError, match=r"'2\.bias' has grad_dtype=torch.bfloat16.*before fully_"):
        backward(ranks, sharded, 1)
    sharded[2].bias.grad_dtype = FP32
    backward(ranks, sharded, 1)
    assert sharded[2].bias.grad.dtype == FP32


@on_meshes((2,), xla=())
def test_parameters_of_a_group_may_differ_before_it_is_made(run: Run) -> None:
    run(mix_in_one_group)


def step_masters(ranks: Ranks) -> None:
    """Masters in fp32 get gradients that were never rounded to bf16."""
    plain, sharded = made_sharded(ranks, BF16, FP32)
    optimizer = LocalOptimizer(sharded.parameters(), torch.optim.AdamW, master_dtype=FP32, lr=0.05)
    masters = [nn.Parameter(param.detach().float()) for param in plain.parameters()]
    reference = torch.optim.AdamW(masters, lr=0.05)
    for step in range(3):
        for master, grad in zip(masters, averages(ranks, plain, step), strict=True):
            master.grad = grad.float()
        reference.step()
        backward(ranks, sharded, step)
        optimizer.step()
        optimizer.zero_grad()
        for param, copied, master in zip(
            sharded.parameters(), plain.parameters(), masters, strict=True
        ):
            torch.testing.assert_close(param.full_tensor(), master.to(BF16), rtol=0, atol=0)
            copied.data.copy_(master)


@on_meshes((2,), (2, 2), xla=())
def test_masters_are_stepped_with_fp32_gradients(run: Run) -> None:
    run(step_masters)


def resume_by_torch(ranks: Ranks, full: bool) -> None:
    """Torch's functions make an optimizer's state by a step with zeros, and then load it."""
    options = StateDictOptions(full_state_dict=full)
    model, resumed = (made_sharded(ranks, BF16, FP32)[1] for _ in range(2))
    optimizer, later = (
        LocalOptimizer(sharded.parameters(), torch.optim.AdamW, master_dtype=FP32)
        for sharded in (model, resumed)
    )
    for step in range(2):
        backward(ranks, model, step)
        optimizer.step()
        optimizer.zero_grad()
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(resumed, get_model_state_dict(model, options=whole), options=whole)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(resumed, later, state, options=options)
    assert all(param.grad is None for param in resumed.parameters())
    for sharded, each in ((model, optimizer), (resumed, later)):
        backward(ranks, sharded, 2)
        assert {param.grad.dtype for param in sharded.parameters()} == {FP32}
        each.step()
    for param, other in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), param.full_tensor(), rtol=0, atol=0)


@pytest.mark.parametrize("full", [False, True])
@on_meshes((2,), (2, 2), xla=())
def test_torch_loads_the_state_of_a_new_optimizer(run: Run, full: bool) -> None:
    run(resume_by_torch, full)


def step_matrices(ranks: Ranks) -> None:
    """Optimizers of whole matrices get gradients in the dtype of the parameter."""
    plain, sharded = made_sharded(ranks, BF16, FP32)
    optimizer = MatrixOptimizer(sharded.parameters(), torch.optim.Adafactor, lr=0.05)
    reference = torch.optim.Adafactor(plain.parameters(), lr=0.05)
    for step in range(2):
        for param, grad in zip(plain.parameters(), averages(ranks, plain, step), strict=True):
            param.grad = grad.to(BF16)
        reference.step()
        backward(ranks, sharded, step)
        optimizer.step()
        optimizer.zero_grad()
        for param, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), whole.detach(), rtol=0, atol=0)


@on_meshes((2,), (2, 2), xla=())
def test_matrices_are_stepped_with_gradients_of_their_dtype(run: Run) -> None:
    run(step_matrices)


class Scale(nn.Module):
    """Multiplies in fp32, so that autograd computes the gradient of the factors in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.rand(7) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.factors).to(x.dtype)


def train_with_wide_gradients(ranks: Ranks) -> None:
    """Gradients in fp32 are rounded before the reduction as the FSDP2 of this torch rounds them."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 7), Scale(), nn.Linear(7, 3))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for width in (1, 2):  # Alone in its group, and beside gradients in bf16.
        layers = copy.deepcopy(plain)
        groups = [layers[0], layers[1], layers[2]] if width == 1 else [layers[2]]
        for module in groups:
            fully_shard(module, mesh=ranks.mesh, mp_policy=policy)
        fully_shard(layers, mesh=ranks.mesh, mp_policy=policy)
        for step in range(2):
            CASE.loss(layers, ranks.batch(CASE, step)).backward()
        wanted = torch.zeros(7, dtype=FP64)
        for step in range(2):
            for batch in ranks.rank_batches(CASE, step):
                each = copy.deepcopy(plain).to(BF16)
                if KEEPS_WIDE_GRADIENTS:
                    each[1].factors.grad_dtype = None
                CASE.loss(each, batch).backward()
                assert each[1].factors.grad.dtype == (FP32 if KEEPS_WIDE_GRADIENTS else BF16)
                wanted += each[1].factors.grad.to(FP64) / ranks.world_size
        off = (layers[1].factors.grad.full_tensor().to(FP64) - wanted).abs().max().item()
        assert off <= EXACT, off


@on_meshes((1,), (2,), (2, 2), xla=())
def test_wide_gradients_are_rounded_as_by_fsdp2(run: Run) -> None:
    run(train_with_wide_gradients)
