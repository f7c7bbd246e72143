"""Models of benchmarks, whose sizes are the only settings: a GPT, which most train, and layers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a GPT and of the batch that one rank feeds it."""

    dim: int  # Width of the residual stream.
    num_layers: int  # Number of transformer blocks; each is one group.
    num_heads: int  # Attention heads; divides ``dim``.
    batch: int  # Sequences per rank and step.
    sequence: int  # Tokens per sequence.
    vocab: int = 256  # Entries of the byte vocabulary.

    def build(self) -> "GPT":
        """Make the model on the current default device."""
        return GPT(self)


class Attention(nn.Module):
    """Causal attention behind a norm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        """Make ``4 * dim**2`` weights, plus biases and the norm."""
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, sequence, dim)`` to the same shape."""
        qkv = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in qkv)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and a four times wider MLP behind a norm, both residual."""

    def __init__(self, shape: GPTShape) -> None:
        """Make a block of ``12 * dim**2`` weights, plus biases and norms."""
        super().__init__()
        self.attention = Attention(shape.dim, shape.num_heads)
        self.mlp_norm = nn.LayerNorm(shape.dim)
        self.up = nn.Linear(shape.dim, 4 * shape.dim)
        self.down = nn.Linear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, sequence, dim)`` to the same shape."""
        x = x + self.attention(x)
        mlp: Tensor = self.down(gelu(self.up(self.mlp_norm(x))))
        return x + mlp


class GPT(nn.Module):
    """Decoder-only language model that returns its own loss."""

    def __init__(self, shape: GPTShape) -> None:
        """Make the model on the current default device."""
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.positions = nn.Embedding(shape.sequence, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``targets``, summed in fp32 in every precision."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class ManyShape:
    """Sizes of a model of many small layers and of the batch that one rank feeds it."""

    num_layers: int  # Number of layers, each with one parameter.
    most: int  # Largest number of a parameter's elements; the smallest is 1.
    batch: int  # Sequences per rank and step.
    sequence: int  # Tokens per sequence.
    vocab: int = 256  # Number of different tokens.

    def build(self) -> "Many":
        """Make the model on the current default device."""
        return Many(self)


class Shift(nn.Module):
    """A layer that adds the mean of its only parameter."""

    def __init__(self, numel: int) -> None:
        """Make the parameter, 1-D."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numel))

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to the same shape."""
        return x + self.weight.mean()


class Many(nn.Module):
    """Small layers one after the other, which return a loss."""

    def __init__(self, shape: ManyShape) -> None:
        """Make the layers, of sizes that are drawn from a fixed seed."""
        super().__init__()
        seeded = torch.Generator().manual_seed(0)
        sizes = torch.randint(
            1, shape.most + 1, (shape.num_layers,), generator=seeded, device="cpu"
        )
        self.blocks = nn.ModuleList(Shift(numel) for numel in sizes.tolist())

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared distance to the targets."""
        x = inputs.float()
        for block in self.blocks:
            x = block(x)
        return (x - targets).square().mean()


class Adapted(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        """Freeze `base`; the product of the new matrices is zero at first."""
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze a model, and put an adapter beside each linear layer of its blocks."""
    model.requires_grad_(requires_grad=False)
    blocks: Any = model.blocks
    for module in list(blocks.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, rank))
