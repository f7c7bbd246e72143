"""Optimizers that round by random numbers (torchao's ``bf16_stochastic_round``).

Ranks that hold the same elements must round them alike, or they drift apart without an error. Each
rank draws from its own generator otherwise, which dropout has moved by then.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import OptimizerError
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def check_copies(params: Iterable[Any]) -> None:
    """Refuse parameters of which several ranks hold the same elements, cut in other ways.

    Raises:
        OptimizerError: A bf16 parameter is not sharded beside others that are, or is held by
            several ranks of an axis of tensor parallelism.
    """
    rounded = [param for param in params if param.dtype == torch.bfloat16]
    sharded = [param for param in rounded if type(param) is ShardedTensor]
    has_ranks = any(param.device_mesh.size() > 1 for param in sharded)
    for param in rounded:
        if type(param) is not ShardedTensor:
            if has_ranks:
                msg = (
                    f"a bf16 parameter of shape {tuple(param.shape)} is on every rank, and "
                    f"bf16_stochastic_round would round it otherwise on each. Shard it, keep it in "
                    f"fp32, or give it to another optimizer."
                )
                raise OptimizerError(msg)
            continue
        outer: Any = param.spec.tensor_parallel
        if outer is not None and any(a not in outer.axes and a.size > 1 for a in outer.mesh_axes):
            msg = (
                f"{param.spec.name!r} is not split over an axis of tensor parallelism, and "
                f"bf16_stochastic_round would round its copies otherwise on each rank of it. Use "
                f"LocalOptimizer(..., master_dtype=torch.float32) without bf16_stochastic_round."
            )
            raise OptimizerError(msg)


@contextlib.contextmanager
def same_random_numbers(params: Iterable[Any], number: int) -> Iterator[None]:
    """Draw by the number of the step inside, so that replicas of a shard draw the same."""
    kinds = {param.device.type for param in params} - {"cpu"}
    kind = next(iter(kinds), "cuda")
    devices = [torch.get_device_module(kind).current_device()] if kinds else []
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(number)
        if kinds:
            torch.get_device_module(kind).manual_seed(number)
        yield
