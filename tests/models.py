"""Small models that between them have every kind of parameter, each with its batches and its loss.

A ``Case`` says how to make a model, which of its modules get a group of their own, and how to draw
a batch and compute its loss. Losses are means over the batch, so that the mean over ranks of equal
batches is the loss of the concatenated batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Batch = tuple[Tensor, Tensor]

VOCABULARY = 61
SEQUENCE = 12
WIDTHS = (7, 13, 24, 5)


class MLP(nn.Module):
    """Linear layers with biases; odd widths, so that no cut falls on a row."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(
            nn.Linear(in_features, out_features) for in_features, out_features in pairs
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Block(nn.Module):
    """A pre-norm transformer block.

    Queries, keys and values have no bias: attention does not depend on that of the keys, so its
    gradient is rounding noise, which Adam would blow up to the size of the learning rate.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, sequence, dim))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """A causal language model whose head is its token embedding."""

    def __init__(self, dim: int = 32, num_blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.randn(SEQUENCE, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions with batch normalization: buffers, one of them an integer."""

    def __init__(self, channels: int = 6, num_classes: int = 5) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(in_channels, channels, kernel_size=3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            )
            for in_channels in (3, channels)
        )
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)))


class Tiny(nn.Module):
    """An MLP scaled and shifted by parameters of zero dimensions and of two elements."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.scale = nn.Parameter(torch.full((), 1.5))  # No number that Python had.
        self.shift = nn.Parameter(torch.tensor([0.25, -0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale + self.shift.sum()


class Partial(MLP):
    """An MLP with a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 11)


class TiedMLP(nn.Module):
    """An autoencoder of which both halves, modules of their own, hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTHS[0], 9, bias=False)
        self.middle = nn.Linear(9, 9)
        self.decoder = nn.Linear(WIDTHS[0], 9, bias=False)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(9, WIDTHS[-1])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.encoder(x))))
        return self.head(hidden + self.decoder(x))


# Cut inside rows; on the last ranks nothing is left of the small ones; no dimension.
PARAMETER_SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (7, 13),
    "vector": (5,),
    "scalar": (),
    "single": (1, 1),
    "cube": (3, 2, 5),
}


class Parent(nn.Module):
    """Holds nothing itself; writes, scales and reads what modules inside hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            view = self.first.weight.data[1:]  # Lives on while others are touched.
            self.second.weight.mul_(self.first.weight.norm())
            nn.init.constant_(self.second.bias, 7)
            view.fill_(2)
            self.second.weight += self.first.weight
            nn.init.orthogonal_(self.first.weight[:3])
            if not self.first.bias.is_meta:
                array = self.first.bias.detach().numpy()
                self.second.weight.T[0] = 5
                array[:] = 3
            self.norm.running_mean.fill_(3)
            self.norm.weight = nn.Parameter(torch.full((4,), 5.0))
            self.norm.bias.data = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x) + self.second(x))


class Parameters(nn.Module):
    """Parameters of any shapes, by name, whose gradients are whatever is asked for."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]] = PARAMETER_SHAPES,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))

    def forward(self, slopes: dict[str, Tensor]) -> Tensor:
        """Return the sum of all elements, each times its slope, which is its gradient exactly."""
        return torch.stack(
            [(parameter * slopes[name]).sum() for name, parameter in self.named_parameters()]
        ).sum()

    def draw_slopes(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw a gradient of every parameter."""
        return {
            name: torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            for name, parameter in self.named_parameters()
        }


def frozen_mlp() -> MLP:
    """Make an MLP of which the first layer and one bias are frozen."""
    model = MLP()
    model.layers[0].requires_grad_(requires_grad=False)
    model.layers[1].bias.requires_grad_(requires_grad=False)
    return model


def regression_batch(generator: torch.Generator, size: int = 6) -> Batch:
    """Draw inputs and targets for the MLPs."""
    return torch.randn(size, WIDTHS[0], generator=generator), torch.randn(
        size, WIDTHS[-1], generator=generator
    )


def token_batch(generator: torch.Generator, size: int = 3) -> Batch:
    """Draw sequences; each token's target is the next one."""
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def image_batch(generator: torch.Generator, size: int = 6) -> Batch:
    """Draw images and classes."""
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(
        5, (size,), generator=generator
    )


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over batch and outputs, in the dtype of the targets."""
    x, y = batch
    return F.mse_loss(model(x).to(y.dtype), y)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over batch and positions, in fp32 or above."""
    x, y = batch
    logits = model(x)
    logits = logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how to train it."""

    make: Callable[..., nn.Module]  # Makes the model from the global random state.
    # The modules that get a group of their own, in the order to shard them; the root is none of
    # them.
    groups: Callable[[nn.Module], list[nn.Module]]
    batch: Callable[[torch.Generator], Batch]  # Draws a batch.
    loss: Callable[[nn.Module, Batch], Tensor]  # Scalar loss of a model on a batch.


CASES = {
    "mlp": Case(MLP, lambda model: list(model.layers), regression_batch, squared_error),
    "gpt": Case(GPT, lambda model: list(model.blocks), token_batch, cross_entropy),
    "conv": Case(ConvNet, lambda model: list(model.stages), image_batch, cross_entropy),
    "tiny": Case(Tiny, lambda model: list(model.mlp.layers), regression_batch, squared_error),
    "frozen": Case(frozen_mlp, lambda model: list(model.layers), regression_batch, squared_error),
    "unused": Case(
        Partial, lambda model: [*model.layers, model.unused], regression_batch, squared_error
    ),
    # The tied weight belongs to the root: it is used by two of its modules.
    "tied": Case(TiedMLP, lambda model: [model.middle], regression_batch, squared_error),
}
