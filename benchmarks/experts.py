"""A mixture of experts: attention, then experts, some of which are on other ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy, gelu

from models import Attention


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of a mixture of experts and of the batch that one rank feeds it."""

    dim: int  # Width of the residual stream.
    hidden: int  # Width inside an expert.
    num_experts: int  # Number of experts of each block; a token goes to one of them.
    num_layers: int  # Transformer blocks.
    num_heads: int  # Attention heads; divides ``dim``.
    batch: int  # Sequences per rank and step.
    sequence: int  # Tokens per sequence.
    ep: int  # Number of ranks that hold different experts.
    vocab: int = 256  # Entries of the byte vocabulary.

    def build(self) -> "MixtureOfExperts":
        """Make the model on the current default device, with all experts."""
        return MixtureOfExperts(self)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        result = grads[0].new_empty(sum(ctx.sent), grads[0].shape[1])
        dist.all_to_all_single(
            result, grads[0].contiguous(), ctx.sent, ctx.received, group=ctx.group
        )
        return result, None, None, None


def _inverse(order: Tensor) -> Tensor:
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order), device=order.device)
    return result


class Experts(nn.Module):
    """Stacked feed-forward layers; the local parts of DTensors are this rank's experts."""

    def __init__(self, shape: ExpertsShape) -> None:
        """Make all experts."""
        super().__init__()
        self.up = nn.Parameter(
            torch.randn(shape.num_experts, shape.dim, shape.hidden) / shape.dim**0.5
        )
        self.down = nn.Parameter(
            torch.randn(shape.num_experts, shape.hidden, shape.dim) / shape.hidden**0.5
        )

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Map rows, ordered by expert, to the same number of rows of the same width."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = enumerate(rows.split(counts))
        return torch.cat([gelu(part @ up[i]) @ down[i] for i, part in parts])


class ExpertsBlock(nn.Module):
    """Pre-norm attention and one expert for each token, both residual."""

    def __init__(self, shape: ExpertsShape) -> None:
        """Make a block with all experts."""
        super().__init__()
        self.attention = Attention(shape.dim, shape.num_heads)
        self.norm = nn.LayerNorm(shape.dim)
        self.router = nn.Linear(shape.dim, shape.num_experts, bias=False)
        self.experts = Experts(shape)
        self.ep: dist.ProcessGroup | None = None

    def split(self, ep: DeviceMesh) -> None:
        """Keep this rank's part of the experts, as DTensors over `ep`."""
        self.ep = ep.get_group()
        for name, param in list(self.experts.named_parameters()):
            part = distribute_tensor(param.detach(), ep, [Shard(0)])
            self.experts.register_parameter(name, nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, sequence, dim)`` to the same shape."""
        x = x + self.attention(x)
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        computed = self._compute(rows[order], counts)
        return x + (weights[:, None] * computed[_inverse(order)]).view_as(x)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows to the ranks of their experts, and the results back."""
        assert self.ep is not None
        ranks = self.ep.size()
        counts_here = torch.empty_like(counts)  # By sender and expert.
        dist.all_to_all_single(counts_here, counts, group=self.ep)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = counts_here.view(ranks, -1).sum(1).tolist()
        came = _SendRows.apply(rows, sent, received, self.ep)
        own = torch.arange(len(counts) // ranks, device=rows.device).repeat(ranks)
        order = own.repeat_interleave(counts_here).argsort(stable=True)
        made = self.experts(came[order], counts_here.view(ranks, -1).sum(0).tolist())
        back: Tensor = _SendRows.apply(made[_inverse(order)], received, sent, self.ep)
        return back


class MixtureOfExperts(nn.Module):
    """Decoder-only language model that returns its own loss."""

    def __init__(self, shape: ExpertsShape) -> None:
        """Make the model on the current default device."""
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(ExpertsBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``targets``."""
        x = self.tokens(inputs)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
