"""A steady step on gloo takes the calls, collectives, copies and allocations of the golden file."""

from __future__ import annotations

import functools
import typing
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from reference import make_mesh
from shardkit import FSDPModule, fully_shard
from shardkit._compat import torch_tensors
from shardkit._module.hooks import groups_in
from shardkit.backends import shared_memory
from step_counts import Counts, check, counts_of, python_instructions

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn


pytestmark = pytest.mark.skipif(
    not torch_tensors.HAS_STORAGE_SWAP,
    reason="older torch allocates anew what newer torch hands on",
)


class Block(nn.Module):
    """A residual layer of ten parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return x + y


class Wide(Block):
    """The same with a parameter of another size."""

    def __init__(self, width: int, numel: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.mean()


def warm_steps(
    num_layers: int,
    width: int,
    options: dict[str, typing.Any],
    kind: str = "groups",
) -> tuple[nn.Module, dict[str, Callable[[], object]]]:
    """Return a model that has taken four steps, and the parts of the next one.

    Its layers are "groups", "groups of different sizes", or those of "one list".
    """
    mesh = make_mesh((torch.distributed.get_world_size(),))
    blocks = [
        Wide(width, 32 * (i + 1)) if kind == "groups of different sizes" else Block(width)
        for i in range(num_layers)
    ]
    model = nn.Sequential(nn.Linear(width, width), *blocks)
    layers = [*model[1:]]
    for module in (*([layers] if kind == "one list" else layers), model):
        fully_shard(module, mesh=mesh, **options)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    losses: list[Tensor] = []
    x = torch.ones(2, width)
    steps = {
        "forward": lambda: losses.append(model(x).square().mean()),
        "backward": lambda: losses.pop().backward(),
        "optimizer": optimizer.step,
        "zero_grad": functools.partial(model.zero_grad, set_to_none=True),
    }
    for _ in range(4):
        for run in steps.values():
            run()
    return model, steps


def counted(num_layers: int, width: int, options: dict[str, typing.Any]) -> Counts:
    """Return what a fifth step takes."""
    model, steps = warm_steps(num_layers, width, options)
    sizes = {
        "groups": len([*groups_in(model, recurse=True)]),
        "parameters": len([*model.parameters()]),
    }
    return {**sizes, **counts_of(steps)}


CASES: dict[str, tuple[int, int, int, dict[str, typing.Any]]] = {
    "small layers, two gloo ranks": (2, 24, 64, {}),
    "small layers, not resharded after forward": (2, 24, 64, {"reshard_after_forward": False}),
    "large layers, two gloo ranks": (2, 4, 384, {}),
    "small layers, one rank": (1, 24, 64, {}),
}


MORE_AMONG_MANY = 1.05


@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_takes_what_it_took(spawn: Spawn, case: str) -> None:
    num_ranks, num_layers, width, options = CASES[case]
    by_rank = spawn(counted, num_ranks, num_layers, width, options)
    # A rank that holds one parameter of a bucket only makes a view of that one's gradient.
    key = "calls of Python, optimizer"
    most = max(of[key] for of in by_rank)
    for found in by_rank:
        assert most - found[key] in (0, 4)
        check(case, {**found, key: most})


def instructions_of_each(
    num_layers: int, options: dict[str, typing.Any], kind: str
) -> dict[str, float]:
    """Return how many instructions a fifth step takes for each group, or each module of a list."""
    model, steps = warm_steps(num_layers, 8, options, kind)
    number = num_layers if kind == "one list" else len([*groups_in(model, recurse=True)])
    with mock.patch.object(shared_memory.Shared, "is_there", return_value=True):
        return {name: python_instructions(run) / number for name, run in steps.items()}


ZERO2 = {"reshard_after_forward": False}
KEPT_PARTS = {"reshard_after_forward": 1}


@pytest.mark.parametrize(
    ("kind", "num_ranks", "options", "numbers"),
    [
        pytest.param("groups", 1, {}, (24, 96), id="groups, one rank"),
        pytest.param("groups", 2, {}, (24, 96), id="groups, zero3"),
        pytest.param("groups of different sizes", 2, {}, (24, 96), id="groups of different sizes"),
        pytest.param("groups", 2, ZERO2, (24, 96), id="groups, zero2"),
        pytest.param("groups", 2, KEPT_PARTS, (24, 96), id="groups, kept parts"),
        pytest.param("one list", 1, {}, (12, 48), id="one list, one rank"),
        pytest.param("one list", 2, {}, (12, 48), id="one list, zero3"),
        pytest.param("one list", 2, ZERO2, (12, 48), id="one list, zero2"),
    ],
)
def test_a_layer_takes_no_more_among_many(
    spawn: Spawn,
    kind: str,
    num_ranks: int,
    options: dict[str, typing.Any],
    numbers: tuple[int, int],
) -> None:
    few, many = (spawn(instructions_of_each, num_ranks, n, options, kind)[0] for n in numbers)
    for name, of_few in few.items():
        assert many[name] <= MORE_AMONG_MANY * of_few, (name, of_few, many[name])
