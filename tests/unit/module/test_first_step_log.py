"""The first forward of a root logs once what is sharded, on the rank that speaks for all."""

from __future__ import annotations

import logging
import typing

import torch
from torch import nn

from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, fully_shard

if typing.TYPE_CHECKING:
    import pytest


def train(**mesh: typing.Any) -> None:
    """Train a model of two groups for three steps."""
    made, _ = recording_mesh((2, 2), **mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2))
    fully_shard(model[0], mesh=made, mp_policy=policy)
    fully_shard(model, mesh=made, mp_policy=policy)
    for _ in range(3):
        model(torch.ones(1, 512)).sum().backward()


def test_it_says_what_is_sharded_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardkit"):
        train()
    [record] = [r for r in caplog.records if "groups of" in r.getMessage()]
    assert record.levelno == logging.INFO
    text = record.getMessage()
    # 512 * 513 + 2 * 513 parameters of four bytes, of which two ranks hold a half each.
    assert text.startswith("Sequential: 2 groups of 0.3 million parameters, 1.0 MiB; 0.5 MiB are")
    assert "The mesh of cpu ranks is 2 x 2" in text
    assert "The largest group (0) takes 0.5 MiB while it is unsharded" in text
    assert "Computed in bfloat16, reduced in float32." in text
    # Both halves of pairs in float32; the freed layer and the root that stays in bfloat16.
    assert "a step: 1.0 MiB of parameters and gradients, 0.5 MiB unsharded; " in text


def test_other_ranks_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardkit"):
        train(rank=1)
    assert caplog.records == []


def test_axes_of_the_mesh_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardkit"):
        train(mesh_dim_names=("replicate", "shard"))
    assert "cpu ranks is 2 x 2 (replicate, shard)" in caplog.text


def test_one_group_is_no_plural(caplog: pytest.LogCaptureFixture) -> None:
    mesh, _ = recording_mesh((2,))
    with caplog.at_level(logging.INFO, logger="shardkit"):
        fully_shard(nn.Linear(4, 4), mesh)(torch.ones(1, 4))
    assert "Linear: 1 group of 0.0 million parameters" in caplog.text
