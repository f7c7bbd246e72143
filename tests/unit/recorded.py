"""A small MLP on a mesh that only records, and its log in words.

Groups differ in size, so that the log's element counts say which group is meant. The model notes
its own computation in the log as well: what overlaps with what can be read off.
"""

from __future__ import annotations

import itertools
import typing

import torch
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Log = list[tuple[str, typing.Any]]

WIDTHS = (8, 8, 16, 24)
NUM_ROOT = 4
ALIGN = 4  # elements of fp32 in 16 bytes

WORDS = {
    "start all_gather": "gather",
    "wait all_gather": "wait",
    "start reduce_scatter": "reduce",
    "wait reduce_scatter": "reduced",
    "start all_reduce": "all-reduce",
}


class _MarkBackward(torch.autograd.Function):
    """Identity that notes when its backward runs."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.log.append(("backward", ctx.layer.name))
        return grad, None


class Layer(nn.Module):
    """A linear layer that notes its forward and its backward."""

    def __init__(self, name: str, in_features: int, out_features: int, log: Log) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.name = name
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(("forward", self.name))
        return _MarkBackward.apply(self.linear(x), self)


class MLP(nn.Module):
    """Layers, and one parameter of the root's own."""

    def __init__(self, widths: Sequence[int], log: Log) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(str(i), widths[i], widths[i + 1], log) for i in range(len(widths) - 1)
        )
        self.scale = nn.Parameter(torch.ones(NUM_ROOT))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale.sum()


class Recorded:
    """A sharded MLP and what it communicates.

    Args:
        mesh_shape: Of the recording mesh.
        rank: Which rank this process plays.
        widths: Of the layers.
        prepare: Called on the model before it is sharded.
        options: Of every `fully_shard` call.
    """

    def __init__(
        self,
        mesh_shape: Sequence[int] = (4,),
        *,
        rank: int = 0,
        widths: Sequence[int] = WIDTHS,
        prepare: Callable[[MLP], object] = lambda model: None,  # noqa: ARG005
        **options: typing.Any,
    ) -> None:
        self.mesh, self.log = recording_mesh(mesh_shape, rank=rank)
        torch.manual_seed(0)
        self.model = MLP(widths, self.log)
        prepare(self.model)
        for layer in self.model.layers:
            fully_shard(layer, self.mesh, **options)
        fully_shard(self.model, self.mesh, **options)
        self._width = widths[0]

    def run(self, *, seed: int = 0) -> Tensor:
        """Run a forward; return its loss."""
        x = torch.randn(2, self._width, generator=torch.Generator().manual_seed(seed))
        return self.model(x).square().mean()

    def step(self, *, seed: int = 0) -> list[str]:
        """Run forward and backward; return the log of both in words."""
        self.log.clear()
        self.run(seed=seed).backward()
        return self.read()

    def read(self) -> list[str]:
        """Return the log in words, and clear it; groups that travel together are joined by +."""
        whole, per_rank = self._names(self.mesh.shape[-1]), self._names(1)
        words = []
        for what, count in self.log:
            if what in WORDS:
                names = per_rank if what == "start all_reduce" else whole
                words.append(f"{WORDS[what]} {names[count]}")
            elif what in ("forward", "backward"):
                words.append(f"{what} {count}")
            else:
                words.append(what)
        self.log.clear()
        return words

    def _names(self, num_ranges: int) -> dict[int, str]:
        """Return names of groups, and of several together, by the elements of so many ranges."""
        sizes = {"root": NUM_ROOT}
        for layer in self.model.layers:
            linear = layer.linear
            sizes[layer.name] = (linear.in_features + 1) * linear.out_features
        ranks = self.mesh.shape[-1]
        padded = {name: -(-n // (ranks * ALIGN)) * ALIGN * num_ranges for name, n in sizes.items()}
        return {
            sum(padded[name] for name in together): "+".join(together)
            for count in range(len(padded), 0, -1)
            for together in itertools.combinations(padded, count)
        }

    def grads(self) -> list[Tensor | None]:
        """Return this rank's pieces of the gradients."""
        grads = (param.grad for param in self.model.parameters())
        return [None if grad is None else grad.to_local().clone() for grad in grads]


def listed(text: str) -> list[str]:
    """Return the entries of a list written with commas, over several lines."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def fail(*_: object) -> None:
    """Raise, as a hook."""
    msg = "from a hook"
    raise ValueError(msg)
