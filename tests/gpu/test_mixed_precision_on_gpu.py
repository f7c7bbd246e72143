"""On a card: bf16 and fp16 against what the policy means, computed on a plain model by hand."""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
from torch import Tensor, nn

import one_card
from models import CASES, Case
from one_card import CardDifferences, CardRanks, reduce_by_buffers
from reference import OPTIMIZERS, assert_within, full_grads, full_parameters, step_all
from shardkit import MixedPrecisionPolicy

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Half a unit in the last place of 1.
ROUNDING = {BF16: 2.0**-9, FP16: 2.0**-12}

# Every step begins with equal parameters. But kernels are chosen by alignment, and add up in
# another order: then a number is rounded to its other neighbour now and then, twice `ROUNDING`
# away, which the following layers carry on and round again. On the host, changes of what linear
# layers compute by 3e-7 of it, before it is rounded, came to 8 roundings of the largest gradient of
# a parameter. Here twice as many are allowed.
ROUNDINGS = 16


def policy_step(
    ranks: CardRanks,
    case: Case,
    master: nn.Module,
    policy: MixedPrecisionPolicy,
    step: int,
    change: Callable[[Tensor, int], Tensor] = lambda loss, rank: loss,  # noqa: ARG005
) -> list[Tensor]:
    """Put into the fp32 `master` the gradients that the policy means, of all ranks' batches.

    A rank computes on a copy of the parameters in ``param_dtype``. Its gradients are cast to
    ``reduce_dtype``, then summed in fp32 and divided by the number of ranks.

    Args:
        ranks: All of them.
        case: The case of the model.
        master: Plain.
        policy: Of the sharded model.
        step: Of the batch.
        change: What becomes of the loss of a rank before its backward.

    Returns:
        The loss of each rank, unchanged.
    """
    assert policy.param_dtype is not None
    reduce_dtype = policy.reduce_dtype or policy.param_dtype
    sums = [torch.zeros_like(parameter) for parameter in master.parameters()]
    losses = []
    for rank, (x, y) in enumerate(ranks.rank_batches(case, step)):
        compute = copy.deepcopy(master).to(policy.param_dtype)
        loss = case.loss(compute, (x.to(policy.param_dtype) if x.is_floating_point() else x, y))
        change(loss, rank).backward()
        losses.append(loss.detach())
        for total, parameter in zip(sums, compute.parameters(), strict=True):
            assert parameter.grad is not None
            total.add_(parameter.grad.to(reduce_dtype).float())
    for parameter, total in zip(master.parameters(), sums, strict=True):
        parameter.grad = total / len(losses)
    return losses


def set_equal(plain: nn.Module, model: nn.Module) -> None:
    """Give the plain model the sharded one's parameters."""
    plain.load_state_dict(full_parameters(model), strict=False)  # No tied weight's second name.


# --- bf16 -----------------------------------------------------------------------------------------


def train_bf16(
    name: str,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool | None,
    through_buffers: bool,
) -> CardDifferences:
    ranks, case = CardRanks(), CASES[name]
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model, plain = ranks.pair(case, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if through_buffers:
        reduce_by_buffers(model)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = CardDifferences()
    for step in range(5):
        set_equal(plain, model)
        expected = policy_step(ranks, case, plain, policy, step)
        loss = case.loss(model, ranks.batch(case, step))
        loss.backward()
        differences.note_relative("loss", {"": loss.detach()}, {"": ranks.send_loss(expected)})
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        differences.note_relative("grad", full_grads(model), full_grads(plain))
        step_all(optimizers)
        differences.note_relative("parameter", full_parameters(model), full_parameters(plain))
    return differences


@pytest.mark.parametrize("reduce_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize(
    ("world_size", "through_buffers", "reshard_after_forward"),
    [(1, False, None), (1, False, False), (1, True, None), (2, False, None)],
)
def test_bf16_computes_what_the_policy_means(
    on_card: Spawn,
    world_size: int,
    through_buffers: bool,
    name: str,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool | None,
) -> None:
    found = on_card(
        train_bf16, world_size, name, reduce_dtype, reshard_after_forward, through_buffers
    )
    tolerance = ROUNDINGS * ROUNDING[BF16]
    assert_within(found, loss=tolerance, grad=tolerance, parameter=tolerance)


def accumulate_bf16(reduce_dtype: torch.dtype) -> CardDifferences:
    """Three micro-batches, one synced: unsynced gradients add up in ``reduce_dtype``."""
    ranks, case = CardRanks(), CASES["gpt"]
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model, plain = ranks.pair(case, mp_policy=policy)
    sums: dict[str, Tensor] = {}
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        case.loss(model, ranks.batch(case, micro)).backward()
        policy_step(ranks, case, plain, policy, micro)
        for name, grad in full_grads(plain).items():
            assert grad is not None
            sums[name] = sums[name] + grad if name in sums else grad.clone()
    differences = CardDifferences()
    differences.note_relative("grad", full_grads(model), dict(sums))
    return differences


@pytest.mark.parametrize("reduce_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_gradients_of_micro_batches_add_up(
    on_card: Spawn, world_size: int, reduce_dtype: torch.dtype
) -> None:
    found = on_card(accumulate_bf16, world_size, reduce_dtype)
    # Each of the two additions in bf16 rounds once more.
    assert_within(found, grad=(ROUNDINGS + 2) * ROUNDING[BF16])


# --- fp16 -----------------------------------------------------------------------------------------

OVERFLOW_STEP = 2
INIT_SCALE = 1024.0


def train_scaled(
    name: str, reduce_dtype: torch.dtype, bad_rank: int, clip: bool
) -> tuple[CardDifferences, list[float], list[bool]]:
    """Train in fp16 with a stock scaler; in one step the loss of one rank is infinite."""
    ranks, case = CardRanks(), CASES[name]
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=reduce_dtype)
    model, plain = ranks.pair(case, mp_policy=policy)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    scalers = [torch.amp.GradScaler(one_card.CARD.type, init_scale=INIT_SCALE) for _ in range(2)]
    differences = CardDifferences()
    scales, skipped = [], []

    def scaled(loss: Tensor, rank: int, step: int, scaler: torch.amp.GradScaler) -> Tensor:
        is_bad = step == OVERFLOW_STEP and rank == bad_rank
        return scaler.scale(loss * math.inf if is_bad else loss)

    for step in range(5):
        set_equal(plain, model)
        before = full_parameters(model)
        own_rank = torch.distributed.get_rank()
        loss = case.loss(model, ranks.batch(case, step))
        scaled(loss, own_rank, step, scalers[0]).backward()
        policy_step(
            ranks,
            case,
            plain,
            policy,
            step,
            lambda loss, rank, step=step: scaled(loss, rank, step, scalers[1]),
        )
        for each, scaler, optimizer in zip((model, plain), scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(each.parameters(), 0.05)
        if step != OVERFLOW_STEP:
            differences.note_relative("grad", full_grads(model), full_grads(plain))
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        after = full_parameters(model)
        skipped.append(all(torch.equal(after[key], before[key]) for key in after))
        scales.append(scalers[0].get_scale())
        assert scales[-1] == scalers[1].get_scale()
        differences.note_relative("parameter", after, full_parameters(plain))
    return differences, scales, skipped


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("reduce_dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_with_a_stock_scaler_skips_the_step_that_overflows(
    on_card: Spawn, world_size: int, name: str, reduce_dtype: torch.dtype, clip: bool
) -> None:
    found = on_card(train_scaled, world_size, name, reduce_dtype, world_size - 1, clip)
    for _, scales, skipped in found:
        assert scales == [INIT_SCALE] * 2 + [INIT_SCALE / 2] * 3
        assert skipped == [step == OVERFLOW_STEP for step in range(5)]
    tolerance = ROUNDINGS * ROUNDING[FP16]
    assert_within([entry[0] for entry in found], grad=tolerance, parameter=tolerance)
