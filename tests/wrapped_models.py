"""Models for policies: some that only differ in size, some that are hard to wrap."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models import VOCABULARY, Block


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


class FeedForward(nn.Module):
    """Two layers."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class SharingBlock(nn.Module):
    """A layer of its own, and a module that all blocks share."""

    def __init__(self, shared: nn.Module, dim: int = 32) -> None:
        super().__init__()
        self.own = nn.Linear(dim, dim)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


class SharedLayers(nn.Module):
    """Blocks that share a module, as Zamba2's do."""

    def __init__(self, dim: int = 32, num_blocks: int = 8) -> None:
        super().__init__()
        shared = FeedForward(dim)
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(SharingBlock(shared, dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class MixtureBlock(nn.Module):
    """Experts, of which each sample takes one; those that no sample takes do not run."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))
        self.taken: set[int] = set()

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        normed, result = self.norm(x), x.clone()
        self.taken = set(choices.tolist())
        for number in sorted(self.taken):
            rows = (choices == number).nonzero().flatten()
            result = result.index_add(0, rows, torch.tanh(self.experts[number](normed[rows])))
        return result


class Mixture(nn.Module):
    """Blocks of experts; the first token of a sample chooses."""

    def __init__(self, dim: int = 512, num_blocks: int = 2, num_experts: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(MixtureBlock(dim, num_experts) for _ in range(num_blocks))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        choices = x[:, 0]
        x = self.tokens(x)
        for number, block in enumerate(self.blocks):
            x = block(x, (choices + number) % len(block.experts))
        return self.head(x)
