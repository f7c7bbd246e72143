"""What type checkers and editors know after `fully_shard`. mypy reads this, nobody runs it."""

from __future__ import annotations

import functools
import typing
from collections.abc import Sequence

from torch import Tensor, nn

from shardkit import FSDPModule, auto_shard, from_config, fully_shard, strategy


def one_module() -> None:
    model = fully_shard(nn.Linear(4, 4))
    typing.assert_type(model, FSDPModule)
    typing.assert_type(model.clip_grad_norm_(1.0), Tensor)
    model.set_requires_gradient_sync(False)
    typing.assert_type(model.memory_stats(), dict[str, int])
    model.layers[0].weight.zero_()  # What the class before had.
    typing.assert_type(model.state_dict()["weight"], typing.Any)
    wrap = functools.partial(fully_shard, reshard_after_forward=False)
    model.blocks.apply(wrap)


def several() -> None:
    typing.assert_type(fully_shard([nn.Linear(4, 4), nn.ReLU()]), Sequence[FSDPModule])
    fully_shard(4)  # type: ignore[call-overload]


def names() -> None:
    strategy("zero2").arguments(None)
    strategy("FULL_SHARD")
    auto_shard(nn.Linear(4, 4), strategy="hybrid")
    auto_shard(nn.Linear(4, 4), strategy="zero4")  # type: ignore[arg-type]


def configured() -> None:
    typing.assert_type(from_config("fsdp.yaml").apply(nn.Linear(4, 4)), FSDPModule)
