"""Buckets whose parameters were converted: what is refused, and what the error says to do."""

from __future__ import annotations

import types
import typing

import pytest
import torch

from shardkit import CPUOffloadPolicy, OffloadPolicy, StateError
from shardkit._params.make import rebuild

Stub = types.SimpleNamespace


def rebuild_on(*params: tuple[str, torch.dtype], home: str, policy: OffloadPolicy) -> None:
    """Rebuild a bucket at home on `home`, of parameters that are now elsewhere."""
    entries: typing.Any = [
        Stub(name=f"w{i}", param=Stub(dtype=dtype, grad_dtype=dtype, device=torch.device(device)))
        for i, (device, dtype) in enumerate(params)
    ]
    bucket: typing.Any = Stub(plan=Stub(home_device=torch.device(home), offload=policy))
    rebuild(bucket, entries)


@pytest.mark.parametrize(
    ("policy", "where"),
    [
        (CPUOffloadPolicy(), "its shards on the host, by its offload policy"),
        (OffloadPolicy(), "its shards on cpu"),
    ],
)
def test_a_device_that_is_not_that_of_the_shards_is_refused(
    policy: OffloadPolicy, where: str
) -> None:
    with pytest.raises(StateError, match=r"'w0' is now on cuda:0") as raised:
        rebuild_on(("cuda:0", torch.float32), home="cpu", policy=policy)
    assert where in str(raised.value)
    assert "model.to_empty(device='cpu')" in str(raised.value)


def test_parameters_of_one_buffer_are_converted_alike() -> None:
    both = ("cpu", torch.float32), ("cpu", torch.bfloat16)
    with pytest.raises(StateError, match=r"'w1' is now torch\.bfloat16 on cpu.*with 'w0'"):
        rebuild_on(*both, home="cpu", policy=OffloadPolicy())
