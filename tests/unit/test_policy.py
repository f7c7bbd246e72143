"""Which dtypes a policy gives to parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchNoOffload

from recording import recording_mesh
from shardkit import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    WrapError,
    fully_shard,
)
from shardkit._settings import REDUCES_AS_STORED, as_mixed_precision, as_offload

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("policy", "orig_dtype", "param_dtype", "reduce_dtype"),
    [
        (MixedPrecisionPolicy(), FP32, FP32, FP32),
        (MixedPrecisionPolicy(), BF16, BF16, BF16),
        (MixedPrecisionPolicy(), FP64, FP64, FP64),
        (MixedPrecisionPolicy(param_dtype=BF16), FP32, BF16, FP32 if REDUCES_AS_STORED else BF16),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), FP32, BF16, FP32),
        (MixedPrecisionPolicy(param_dtype=FP32), BF16, FP32, BF16 if REDUCES_AS_STORED else FP32),
        (MixedPrecisionPolicy(reduce_dtype=FP32), BF16, BF16, FP32),
        (MixedPrecisionPolicy(reduce_dtype=FP16), FP32, FP32, FP16),
        (MixedPrecisionPolicy(output_dtype=FP16), FP32, FP32, FP32),
    ],
)
def test_dtypes_of_a_floating_parameter(
    policy: MixedPrecisionPolicy,
    orig_dtype: torch.dtype,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> None:
    """Without a `reduce_dtype` gradients are reduced as in the FSDP2 of this torch."""
    assert policy.dtypes_for(orig_dtype, orig_dtype) == (param_dtype, reduce_dtype, orig_dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_and_bools_are_never_cast(dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    assert policy.dtypes_for(dtype, dtype) == (dtype, dtype, dtype)
    assert MixedPrecisionPolicy(param_dtype=BF16).dtypes_for(dtype, dtype) == (dtype, dtype, dtype)


def test_a_complex_parameter_stays_complex() -> None:
    dtypes = MixedPrecisionPolicy(param_dtype=BF16).dtypes_for(torch.complex64, torch.complex64)
    assert set(dtypes) == {torch.complex64}


@pytest.mark.parametrize(
    ("policy", "chosen", "reduce_dtype", "grad_dtype"),
    [
        (MixedPrecisionPolicy(), FP32, FP32, FP32),
        (MixedPrecisionPolicy(reduce_dtype=FP16), FP32, FP16, FP32),
        (MixedPrecisionPolicy(reduce_dtype=FP32), None, FP32, FP32),
        (MixedPrecisionPolicy(), None, BF16, BF16),
    ],
)
def test_gradients_of_a_chosen_dtype_are_reduced_in_it(
    policy: MixedPrecisionPolicy,
    chosen: torch.dtype | None,
    reduce_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    assert policy.dtypes_for(BF16, chosen) == (BF16, reduce_dtype, grad_dtype)


def test_gradients_of_any_dtype_are_reduced_as_computed() -> None:
    assert MixedPrecisionPolicy(param_dtype=BF16).dtypes_for(FP32, None) == (BF16, BF16, BF16)


def test_the_fields_are_those_of_fsdp2_with_the_same_defaults() -> None:
    mine = {field.name: field.default for field in dataclasses.fields(MixedPrecisionPolicy)}
    theirs = {field.name: field.default for field in dataclasses.fields(TorchPolicy)}
    assert {name: mine[name] for name in theirs} == theirs
    positional = [field.name for field in dataclasses.fields(TorchPolicy) if not field.kw_only]
    assert list(mine)[: len(positional)] == positional
    assert set(mine) - set(theirs) <= {"buffer_dtype", "param_dtype_override_fn"}


def test_a_parameter_may_keep_its_dtype() -> None:
    kept = nn.Parameter(torch.ones(2))
    policy = MixedPrecisionPolicy(
        BF16, param_dtype_override_fn=lambda param: param.dtype if param is kept else None
    )
    assert policy.for_param(kept) == MixedPrecisionPolicy(FP32)
    others = MixedPrecisionPolicy(BF16)
    assert policy.for_param(nn.Parameter(torch.ones(2))) == policy.for_param(None) == others
    assert others.for_param(kept) is others
    codes = nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)
    own = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda param: param.dtype)
    assert set(own.for_param(codes).dtypes_for(codes.dtype, codes.dtype)) == {torch.uint8}


@pytest.mark.parametrize("answer", [FP16, "bf16", True])
def test_a_parameter_has_no_third_dtype(answer: object) -> None:
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(
        BF16,
        param_dtype_override_fn=lambda _: answer,  # type: ignore[arg-type,return-value]
    )
    with pytest.raises(WrapError, match=r"for a parameter of shape \(3,\) in torch\.float32"):
        policy.for_param(nn.Parameter(torch.ones(3)))


def test_a_policy_is_a_value() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    assert policy == MixedPrecisionPolicy(param_dtype=BF16)
    assert hash(policy) == hash(MixedPrecisionPolicy(param_dtype=BF16))
    assert policy != MixedPrecisionPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = FP32  # type: ignore[misc]


def test_policies_of_fsdp2_are_understood() -> None:
    """Also where a script holds on to torch's, from before `install`."""
    theirs = TorchPolicy(BF16, FP32, FP16, cast_forward_inputs=False)
    assert as_mixed_precision(theirs) == MixedPrecisionPolicy(BF16, FP32, FP16, False)
    assert as_offload(TorchOffload(pin_memory=False)) == CPUOffloadPolicy(pin_memory=False)
    assert as_offload(TorchNoOffload()) == OffloadPolicy()
    for ours in (MixedPrecisionPolicy(buffer_dtype=BF16), CPUOffloadPolicy()):
        convert = as_offload if isinstance(ours, OffloadPolicy) else as_mixed_precision
        assert convert(ours) is ours


def test_what_only_a_newer_fsdp2_has_is_refused() -> None:
    """Where it is asked for: it would be left out without a word."""

    @dataclasses.dataclass(frozen=True)
    class NewerPolicy(TorchPolicy):
        accumulate_dtype: torch.dtype | None = None

    @dataclasses.dataclass
    class NewerOffload(TorchOffload):
        max_nbytes: int = 0

    NewerPolicy.__module__, NewerOffload.__module__ = (
        TorchPolicy.__module__,
        TorchOffload.__module__,
    )
    assert as_mixed_precision(NewerPolicy(BF16)) == MixedPrecisionPolicy(BF16)
    assert as_offload(NewerOffload(pin_memory=False)) == CPUOffloadPolicy(pin_memory=False)
    with pytest.raises(WrapError, match=r"NewerPolicy has accumulate_dtype=torch\.float32, which"):
        as_mixed_precision(NewerPolicy(BF16, accumulate_dtype=FP32))
    with pytest.raises(WrapError, match="NewerOffload has max_nbytes=8, which"):
        as_offload(NewerOffload(max_nbytes=8))
    NewerPolicy.__module__ = "train"  # A user's own field is for the user.
    assert as_mixed_precision(NewerPolicy(accumulate_dtype=FP32)) == MixedPrecisionPolicy()


def test_a_class_of_offload_policies_means_its_defaults() -> None:
    """Scripts for FSDP2 pass ``offload_policy=CPUOffloadPolicy``, and it raises nothing."""
    assert as_offload(CPUOffloadPolicy) == CPUOffloadPolicy()
    assert as_offload(TorchOffload) == CPUOffloadPolicy()
    assert type(as_offload(OffloadPolicy)) is OffloadPolicy


def test_no_offload_policy_offloads_nothing() -> None:
    """As with FSDP2: scripts pass None where a setting of theirs is off."""
    mesh, _ = recording_mesh((2,))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=None)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert type(as_offload(None)) is OffloadPolicy


def test_none_is_no_policy_of_precision() -> None:
    with pytest.raises(WrapError, match=r"got None\. Leave it out to cast nothing"):
        as_mixed_precision(None)


@pytest.mark.parametrize("policy", [0, torch.bfloat16, MixedPrecision(param_dtype=BF16)])
def test_other_policies_are_refused(policy: object) -> None:
    """FSDP1's has other fields."""
    with pytest.raises(WrapError, match="takes a MixedPrecisionPolicy of shardkit or of FSDP2"):
        as_mixed_precision(policy)
    with pytest.raises(WrapError, match="takes an OffloadPolicy or a CPUOffloadPolicy"):
        as_offload(policy)


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_shared_buffer_is_cast_and_stays_one(*, is_apart: bool) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    first.register_buffer("table", torch.ones(2))
    second.register_buffer("table", first.table)
    model, policy = nn.Sequential(first, second), MixedPrecisionPolicy(buffer_dtype=BF16)
    mesh, _ = recording_mesh((2,))
    for module in (*model, model) if is_apart else (model,):
        fully_shard(module, mesh, policy)
    assert first.table is second.table
    assert first.table.dtype == BF16


def test_buffers_inside_of_a_sharded_module_keep_its_dtype() -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2))
    mesh, _ = recording_mesh((2,))
    fully_shard(model[0], mesh)
    fully_shard(model, mesh, MixedPrecisionPolicy(buffer_dtype=BF16))
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers() if "mean" in name}
    assert dtypes == {"0.0.running_mean": torch.float32, "1.running_mean": BF16}


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "bfloat16"])
def test_dtypes_that_would_lose_the_values_are_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(WrapError, match=f"{name} must be a floating-point dtype .* got "):
        MixedPrecisionPolicy(**{name: dtype})


def test_a_policy_of_fsdp2_is_checked_too() -> None:
    with pytest.raises(WrapError, match=r"reduce_dtype .* got torch\.int32"):
        as_mixed_precision(TorchPolicy(reduce_dtype=torch.int32))
