"""A small mixture of experts whose tokens travel to the ranks that hold the experts."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WIDTH, HIDDEN, NUM_EXPERTS, NUM_TOKENS = 6, 10, 4, 12

EXACT = 1e-12
"""Of one process and of several: sums over tokens and ranks are taken in another order, in fp64."""


class Exchange(torch.autograd.Function):
    """An all-to-all of rows; backward sends gradients the way back."""

    @staticmethod
    def forward(
        ctx: typing.Any, rows: Tensor, send: list[int], receive: list[int], group: typing.Any
    ) -> Tensor:
        ctx.splits, ctx.group = (send, receive), group
        result = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), receive, send, group=group)
        return result

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> typing.Any:
        send, receive = ctx.splits
        result = grads[0].new_empty(sum(send), *grads[0].shape[1:])
        dist.all_to_all_single(result, grads[0].contiguous(), send, receive, group=ctx.group)
        return result, None, None, None


class Experts(nn.Module):
    """Stacked experts of two layers."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH) / 3)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = [torch.tanh(part @ up[i]) @ down[i] for i, part in enumerate(rows.split(counts))]
        return torch.cat(parts)


class Block(nn.Module):
    """A norm, a router and experts; the experts are those of one rank of an axis `ep`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts(NUM_EXPERTS)
        self.ep: typing.Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.norm(inputs)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=NUM_EXPERTS)
        outputs = self._computed(rows[order], sent)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return inputs + weights.unsqueeze(-1) * outputs[back]

    def _computed(self, rows: Tensor, sent: Tensor) -> Tensor:
        if self.ep is None:
            return typing.cast("Tensor", self.experts(rows, sent.tolist()))
        size = self.ep.size()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep)
        send = sent.view(size, -1).sum(1).tolist()
        receive = received.view(size, -1).sum(1).tolist()
        there = Exchange.apply(rows, send, receive, self.ep)
        # By rank and expert; the experts want them by expert.
        of_expert = torch.arange(NUM_EXPERTS // size).repeat(size).repeat_interleave(received)
        order = of_expert.argsort(stable=True)
        counts = received.view(size, -1).sum(0).tolist()
        computed = self.experts(there[order], counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return typing.cast("Tensor", Exchange.apply(computed[back], receive, send, self.ep))


class Model(nn.Module):
    """An input layer, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return typing.cast("Tensor", self.head(hidden))


# --- data --------------------------------------------------------------------------------------


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens of a rank, and targets. Each rank's come to other experts, and one has none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64) + rank / 2
    return tokens, torch.randn(NUM_TOKENS, 3, generator=generator, dtype=torch.float64)


def batches(step: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return this rank's batch, and those of all ranks in one."""
    each = [batch_of(rank, step) for rank in range(dist.get_world_size())]
    xs, ys = zip(*each, strict=True)
    return each[dist.get_rank()], (torch.cat(xs), torch.cat(ys))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error, in the dtype of the target: older torch mixes none."""
    return nn.functional.mse_loss(model(batch[0]).to(batch[1].dtype), batch[1])
