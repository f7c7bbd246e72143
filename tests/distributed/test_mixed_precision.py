"""Mixed precision beside the same arithmetic by hand: what is computed, summed, in which dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from models import CASES, Case
from parity import Ranks, Run, on_meshes
from reference import OPTIMIZERS, STEPS, Differences, assert_within, full_parameters, train
from shardkit import MixedPrecisionPolicy, fully_shard

MESHES = ((2,), (4,), (2, 2))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- mixed precision ----------------------------------------------------------------------------


def policy_step(
    ranks: Ranks, case: Case, master: nn.Module, policy: MixedPrecisionPolicy, step: int
) -> list[Tensor]:
    """Put into the fp32 ``master`` the gradients that the policy means, of all ranks' batches.

    A rank computes on a copy of the parameters in the dtype that the policy has for each. Its
    gradients are cast to ``reduce_dtype``, then summed in fp32 and divided by the number of ranks.

    Returns:
        The loss of each rank.
    """
    dtypes = [
        policy.for_param(parameter).dtypes_for(FP32, FP32)[:2] for parameter in master.parameters()
    ]
    sums = [torch.zeros_like(parameter) for parameter in master.parameters()]
    losses = []
    for x, y in ranks.rank_batches(case, step):
        compute = copy.deepcopy(master).to(policy.param_dtype)  # With its buffers.
        for parameter, whole, (dtype, _) in zip(
            compute.parameters(), master.parameters(), dtypes, strict=True
        ):
            parameter.data = whole.detach().to(dtype, copy=True)
        casts_x = policy.cast_forward_inputs and x.is_floating_point()
        loss = case.loss(compute, (x.to(policy.param_dtype) if casts_x else x, y))
        loss.backward()
        losses.append(loss.detach())
        for total, parameter, (_, dtype) in zip(sums, compute.parameters(), dtypes, strict=True):
            total.add_(parameter.grad.to(dtype).float())
    for parameter, total in zip(master.parameters(), sums, strict=True):
        parameter.grad = total / len(losses)
    return losses


class Scaled(nn.Module):
    """Scales hidden numbers by a parameter whose dtype shows in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.scale = nn.Parameter(torch.rand(1, 7) + 0.5)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last((hidden.float() * self.scale).to(hidden.dtype))


def keeps_scale(param: nn.Parameter) -> torch.dtype | None:
    """Keep the dtype of parameters that scale."""
    return param.dtype if param.shape == (1, 7) else None


SCALED = Case(
    Scaled,
    lambda model: [model.last],
    lambda generator: (torch.randn(3, 8, generator=generator), torch.ones(3)),
    lambda model, batch: model(batch[0]).float().square().mean(),
)


def train_mixed_precision(ranks: Ranks, name: str, reduce_dtype: torch.dtype | None) -> Differences:
    """Compare single steps from equal parameters: another bf16 rounding is 2**-9 off at once."""
    case = SCALED if name == "scaled" else CASES[name]
    policy = MixedPrecisionPolicy(BF16, reduce_dtype, param_dtype_override_fn=keeps_scale)
    reference = case.make()
    model = ranks.shard(case, reference, mp_policy=policy)
    optimizer, plain_optimizer = (
        OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)
    )
    differences = Differences()
    for step in range(STEPS):
        reference.load_state_dict(
            full_parameters(model), strict=False
        )  # No tied weight's second name.
        expected = policy_step(ranks, case, reference, policy, step)
        batch = ranks.batch(case, step)
        for loss in train(case, model, optimizer, [batch], ranks.end_step):
            differences.note_grads(model, reference)
            differences.note("loss", loss, ranks.send_loss(expected))
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        differences.note_parameters(model, reference)
    return differences


# Casts are exact, and so are fp32 sums of bf16 numbers in any order, unless they differ by 2**16:
# then the last bits of a gradient below 0.01 may.
MIXED_TOLERANCES = {"loss": 0.0, "grad": 1e-9, "parameter": 1e-7}
# XLA rounds to bf16 at other places inside of an operator: units in the last place (2**-8) of
# numbers below 1. A step of SGD, momentum and all, is less than the half of such a gradient.
XLA_MIXED_TOLERANCES = {"loss": 2**-8, "grad": 2**-8, "parameter": 2**-9}


def assert_within_mixed(found: list[Differences], run: Run) -> None:
    assert_within(found, **(MIXED_TOLERANCES if run.backend == "gloo" else XLA_MIXED_TOLERANCES))


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@on_meshes(*MESHES)
def test_bf16_compute_with_fp32_reduction(run: Run, name: str) -> None:
    assert_within_mixed(run(train_mixed_precision, name, torch.float32), run)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, None])
@on_meshes((2,), (4,), xla=())  # XLA sums in the dtype itself.
def test_bf16_reduction_sums_in_fp32(run: Run, reduce_dtype: torch.dtype | None) -> None:
    """None means ``param_dtype``, and fp32 from torch 2.15 on."""
    assert_within_mixed(run(train_mixed_precision, "gpt", reduce_dtype), run)


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32, None])
@on_meshes((2,), (4,))
def test_some_parameters_keep_their_dtype(run: Run, reduce_dtype: torch.dtype | None) -> None:
    assert_within_mixed(run(train_mixed_precision, "scaled", reduce_dtype), run)


class Weighted(nn.Module):
    """Multiplies by ones, which are parameters: their gradients are sums of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def powers_of_two(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw for each rank another power of two, times small ones that sum exactly in bf16."""
    exponents = torch.randint(4, (4, 2, 8), generator=generator)
    shift = 6 * torch.randint(3, (1,), generator=generator)
    return torch.exp2(exponents - shift), torch.ones(4)


WEIGHTED = Case(
    Weighted, lambda _: [], powers_of_two, lambda model, batch: model(batch[0]).float().mean()
)


def exact_mixed_gradients(ranks: Ranks) -> Differences:
    """Compare gradients that are exact in bf16, and whose sum over the ranks is in fp32 only."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = WEIGHTED.make()
    model = ranks.shard(WEIGHTED, reference, mp_policy=policy)
    differences = Differences()
    for step in range(3):
        expected = policy_step(ranks, WEIGHTED, reference, policy, step)
        loss = WEIGHTED.loss(model, ranks.batch(WEIGHTED, step))
        loss.backward()
        differences.note_grads(model, reference)
        differences.note("loss", loss.detach(), ranks.send_loss(expected))
        model.zero_grad()
    gradient = reference.weight.grad
    assert not torch.equal(gradient, gradient.bfloat16().float()), "bf16 would do"
    return differences


@on_meshes(*MESHES)
def test_gradients_of_bf16_compute_are_summed_exactly_in_fp32(run: Run) -> None:
    assert_within(run(exact_mixed_gradients), loss=0.0, grad=0.0)


class DtypeProbe(nn.Module):
    """Records the dtypes that its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x.dtype, self.linear.weight.dtype, self.offset.dtype)
        return self.linear(x.to(self.linear.weight.dtype)) + self.offset.to(
            self.linear.weight.dtype
        )


def observed_dtypes(ranks: Ranks, policy: MixedPrecisionPolicy) -> list[torch.dtype]:
    """Return the dtypes of forward's input, weight, buffer, its output, the shard, its gradient."""
    model = fully_shard(ranks.put(DtypeProbe()), ranks.mesh, mp_policy=policy)
    output = model(ranks.send([torch.ones(2, 4)] * ranks.world_size))
    output.float().sum().backward()
    weight = model.linear.weight
    return [*model.seen, output.dtype, weight.dtype, weight.grad.dtype]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (MixedPrecisionPolicy(), [FP32] * 6),
        (MixedPrecisionPolicy(param_dtype=BF16), [BF16, BF16, FP32, BF16, FP32, FP32]),
        (
            MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32),
            [BF16, BF16, FP32, FP32, FP32, FP32],
        ),
        (
            MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16),
            [BF16, BF16, BF16, BF16, FP32, FP32],
        ),
        (
            MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),
            [FP32, BF16, FP32, BF16, FP32, FP32],
        ),
        (MixedPrecisionPolicy(output_dtype=FP16), [FP32, FP32, FP32, FP16, FP32, FP32]),
    ],
    ids=["default", "param", "output", "buffer", "no-input-cast", "output-only"],
)
@on_meshes((2,))
def test_each_dtype_of_the_policy_is_where_it_belongs(
    run: Run, policy: MixedPrecisionPolicy, expected: list[torch.dtype]
) -> None:
    assert all(found == expected for found in run(observed_dtypes, policy))
