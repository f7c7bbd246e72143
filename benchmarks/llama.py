"""A Llama: the layers of today's language models, for benchmarks on one card."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama and of the batch that one rank feeds it."""

    dim: int  # Width of the residual stream.
    hidden: int  # Width inside the MLP.
    num_layers: int  # Number of transformer blocks; each is one group.
    num_heads: int  # Attention heads; divides ``dim`` into even parts.
    batch: int  # Sequences per rank and step.
    sequence: int  # Tokens per sequence.
    vocab: int  # Entries of the vocabulary.

    @property
    def block_numel(self) -> int:
        """Number of elements in one block's parameters."""
        return 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim

    def build(self) -> "Llama":
        """Make the model on the current default device."""
        return Llama(self)


class Block(nn.Module):
    """Pre-norm attention with rotary positions and a gated MLP, both residual, without biases."""

    def __init__(self, shape: LlamaShape) -> None:
        """Make the seven matrices and the two norms."""
        super().__init__()
        self.num_heads = shape.num_heads
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``(batch, sequence, dim)`` to the same shape."""
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        mlp: Tensor = self.down(silu(self.gate(normed)) * self.up(normed))
        return x + mlp


class Llama(nn.Module):
    """Decoder-only language model that returns its own loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        """Make the model on the current default device."""
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        half = shape.dim // shape.num_heads // 2
        angles = torch.outer(
            torch.arange(shape.sequence, dtype=torch.float32),
            _ROTARY_BASE ** -(torch.arange(half, dtype=torch.float32) / half),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``targets``, summed in fp32 in every precision."""
        x = self.tokens(inputs)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of ``(..., sequence, head)``, one of each half, by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
