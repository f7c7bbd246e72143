"""A steady step on gloo takes the calls, collectives, copies and allocations of the golden file."""

from __future__ import annotations

import functools
import typing

import pytest
import torch
from torch import Tensor, nn

from reference import make_mesh
from shardkit import FSDPModule, fully_shard
from shardkit._compat import torch_tensors
from shardkit._module.hooks import groups_in
from step_counts import Counts, check, counts_of

if typing.TYPE_CHECKING:
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


def counted(num_layers: int, width: int, options: dict[str, typing.Any]) -> Counts:
    """Return what a fifth step takes."""
    mesh = make_mesh((torch.distributed.get_world_size(),))
    model = nn.Sequential(nn.Linear(width, width), *[Block(width) for _ in range(num_layers)])
    for module in (*model[1:], model):
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
