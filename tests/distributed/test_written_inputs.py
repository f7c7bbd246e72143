"""Forwards that write to containers among their inputs: the caller finds what they wrote."""

from __future__ import annotations

import collections
import copy
import dataclasses
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import full_grads
from shardkit import FSDPModule, MixedPrecisionPolicy, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn


@dataclasses.dataclass
class Shared:
    """What layers hand to later ones."""

    first: Tensor
    written: list[Tensor] = dataclasses.field(default_factory=list)
    last: Tensor | None = None


def write_to(shared: typing.Any, y: Tensor) -> None:
    if isinstance(shared, list):
        shared.append(y)
    elif isinstance(shared, Shared):
        shared.written.append(y)
        shared.last = y
    else:
        shared[f"layer {len(shared)}"] = y


def written_in(shared: typing.Any) -> list[Tensor]:
    if isinstance(shared, list):
        return shared[1:]
    if isinstance(shared, Shared):
        assert shared.last is (shared.written[-1] if shared.written else None)
        return shared.written
    return [value for key, value in shared.items() if key != "first"]


class Writer(nn.Module):
    """A layer that also reads what earlier layers wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, shared: typing.Any) -> Tensor:
        y = torch.tanh(self.linear(x))
        for earlier in written_in(shared):
            y = y + earlier.to(y.dtype)
        write_to(shared, y)
        return y


class Writers(nn.Module):
    """Layers that share a container, which the root gets, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writer() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, shared: typing.Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, shared=shared)
        return self.head(torch.stack([each.to(x.dtype) for each in written_in(shared)]).sum(0))


CONTAINERS: dict[str, Callable[[Tensor], typing.Any]] = {
    "list": lambda x: [x],
    "dict": lambda x: {"first": x},
    "UserDict": lambda x: collections.UserDict(first=x),
    "dataclass": Shared,
}


def sharded_writers(policy: MixedPrecisionPolicy) -> tuple[Writers, typing.Any]:
    torch.manual_seed(0)
    plain = Writers()
    model = copy.deepcopy(plain)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return plain, model


def first_in(shared: typing.Any) -> Tensor:
    if isinstance(shared, list):
        return shared[0]
    return shared.first if isinstance(shared, Shared) else shared["first"]


def writes_are_found(name: str, dtype: torch.dtype | None) -> bool:
    plain, model = sharded_writers(MixedPrecisionPolicy(param_dtype=dtype))
    batches = torch.randn(2, 3, 6)
    given = batches[dist.get_rank()].clone().requires_grad_()
    shared = CONTAINERS[name](given)
    model(given, shared).float().square().mean().backward()
    assert first_in(shared) is given  # And not what the layers computed with.
    assert len(written_in(shared)) == len(plain.layers)
    for batch in batches:
        plain(batch, CONTAINERS[name](batch)).square().mean().div(2).backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is None else {"rtol": 0.1, "atol": 0.02}
    for grad, expected in zip(full_grads(model).values(), full_grads(plain).values(), strict=True):
        torch.testing.assert_close(grad, expected, **tolerance)
    return True


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_a_forward_writes_to_its_inputs_is_found(
    spawn: Spawn, name: str, dtype: torch.dtype | None
) -> None:
    assert spawn(writes_are_found, 2, name, dtype) == [True, True]


def inputs_come_back(name: str) -> bool:
    """Also after an exception, without gradients, and where items moved in a list."""
    _, model = sharded_writers(MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = torch.ones(3, 6)
    shared = CONTAINERS[name](x)
    with torch.no_grad():
        model(x, shared)
    assert first_in(shared) is x
    assert len(written_in(shared)) == len(model.layers)

    def fail(*_: object) -> None:
        msg = "of the user"
        raise ValueError(msg)

    handle = model.head.register_forward_pre_hook(fail)
    shared = CONTAINERS[name](x)
    with pytest.raises(ValueError, match="of the user"):
        model(x, shared)
    handle.remove()
    assert first_in(shared) is x
    assert isinstance(model, FSDPModule)
    return True


@pytest.mark.parametrize("name", CONTAINERS)
def test_inputs_come_back_as_they_were(spawn: Spawn, name: str) -> None:
    assert spawn(inputs_come_back, 2, name) == [True, True]
