"""Models for policies: some that only differ in size, some that are hard to wrap."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models import GPT, VOCABULARY, Block


class Stack(nn.Module):
    """An embedding, blocks, a norm and a head of their own."""

    def __init__(self, dim: int = 32, num_blocks: int = 3, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedBlocks(nn.Module):
    """Layers of which the first and the last have one weight, beside the tie of the ends."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(4)))
        self.layers[3].weight = self.layers[0].weight
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers(self.tokens(x))))


class Attention(nn.Module):
    """Attention of torch, whose forward reads the weight of a child without calling it."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def untied_gpt() -> GPT:
    model = GPT()
    model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    return model
