"""Operators on sharded tensors where they are traced: as on the plain tensor."""

# ruff: noqa: ARG005 - all uses take two tensors

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import Tensor, nn

from shardkit import DeviceMesh, ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable


# 21 elements on four ranks: there is padding behind the last piece.
ROWS, COLUMNS = 3, 7

USES: dict[str, Callable[[Tensor, Tensor], typing.Any]] = {
    "whole operands": lambda t, w: [t + w, w * t, t - w[0], t * w[:, :1], t + w[None]],
    "writes": lambda t, w: (t.add_(w, alpha=2).mul_(w[0]), t)[1],
    "copies": lambda t, w: (t.copy_(w * 2), t)[1],
    "into plain tensors": lambda t, w: [w.clone().copy_(t), w.clone().add_(t)],
    "products": lambda t, w: [t @ w.t(), w.t() @ t, torch.cat([w, t])],
    "views": lambda t, w: [t[1], t.t() * 2, t.view(-1)[3:9], t[:, 2].sum()],
    "reductions": lambda t, w: [t.sum(), t.sum(0), t.std(), t.amax(1), t.norm(), t.mean((0, 1))],
    "comparison": lambda t, w: [torch.equal(t, w), torch.allclose(t, w + 1)],
    "sort": lambda t, w: [*t.sort(1), t.cumsum(0), t.argmax()],
    "written views": lambda t, w: (t[1].fill_(3.0), t[:, 2].add_(w[:, 0]), t)[2],
    "written by wholes": lambda t, w: (t.cumsum_(0), t)[1],
    "filled": lambda t, w: [torch.add(t, t, alpha=3, out=t), torch.maximum(t, w, out=t), t],
    "filled plain tensors": lambda t, w: [torch.sub(t, w, out=torch.empty_like(w)), t],
    "filled by wholes": lambda t, w: [torch.cumsum(t, 0, out=t), t],
    "filled by products": lambda t, w: torch.mm(t, w.t(), out=torch.empty_like(w @ w.t())),
    "filled by several": lambda t, w: [*torch.sort(w, 0, out=(t, torch.empty_like(w).long())), t],
    "to the host": lambda t, w: [t.tolist(), t.cpu().sum()],
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda p, w: p.square().sum(),
    "product": lambda p, w: (p @ w.t()).square().sum(),
    "times a whole": lambda p, w: (p * w).sum() + p.std(),
    "sort": lambda p, w: (p.sort(0).values * w).sum() + p[1].exp().sum(),
}


MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros_like": lambda t, w: torch.zeros_like(t),
    "clone": lambda t, w: t.clone(),
    "elementwise": lambda t, w: t + 1,
    "whole operand": lambda t, w: t * w,
    "product": lambda t, w: t @ t.t(),
    "product with a whole": lambda t, w: t @ w.t(),
    "list": lambda t, w: torch._foreach_add([t], 1)[0],  # noqa: SLF001 - what optimizers call
    "joined": lambda t, w: torch.cat([t, t]),
    "view": lambda t, w: t[1].clone(),
    "like a view": lambda t, w: torch.zeros_like(t[1]),
    "sum": lambda t, w: t.sum(0),
}


def as_plain(result: typing.Any) -> typing.Any:
    if isinstance(result, (list, tuple)):
        return [as_plain(item) for item in result]
    if isinstance(result, Tensor):
        return (result.full_tensor() if hasattr(result, "full_tensor") else result).detach().cpu()
    return result


@pytest.mark.parametrize("name", USES)
def test_a_use_is_that_of_the_whole(name: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(COLUMNS, ROWS)
    weight = fully_shard(copy.deepcopy(plain).to("xla"), mesh).weight.data
    whole = plain.weight.data.clone() + 0.5
    result, expected = USES[name](weight, whole.to("xla")), USES[name](plain.weight.data, whole)
    torch.testing.assert_close(as_plain(result), as_plain(expected))
    torch.testing.assert_close(as_plain(weight), plain.weight.data)


def test_plain_tensors_are_not_filled_by_sharded_ones_alone(mesh: DeviceMesh) -> None:
    """Torch asserts it, where this package sees no more than the operator without ``out=``."""
    weight = fully_shard(nn.Linear(COLUMNS, ROWS).to("xla"), mesh).weight.data
    out = torch.zeros(COLUMNS, device="xla")
    with pytest.raises(RuntimeError, match="isFunctionalTensor"):
        torch.sum(weight, 0, out=out)
    torch.testing.assert_close(out.copy_(weight.sum(0)).cpu(), weight.full_tensor().sum(0).cpu())


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_is_that_of_the_whole(name: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(COLUMNS, ROWS)
    weight = fully_shard(copy.deepcopy(plain).to("xla"), mesh).weight
    whole = plain.weight.data.clone() + 0.5
    for param, other in ((weight, whole.to("xla")), (plain.weight, whole)):
        for _ in range(2):
            LOSSES[name](param, other).backward()
    assert isinstance(weight.grad, ShardedTensor)
    torch.testing.assert_close(as_plain(weight.grad), plain.weight.grad)


@pytest.mark.parametrize("name", MADE)
def test_views_of_what_was_made_follow_writes(name: str, mesh: DeviceMesh) -> None:
    weight = fully_shard(nn.Linear(COLUMNS, ROWS).to("xla"), mesh).weight.data
    made = MADE[name](weight, torch.ones(ROWS, COLUMNS, device="xla"))
    memory = made.local_piece if isinstance(made, ShardedTensor) else made
    first = memory.view(-1)[:2]
    first.copy_(torch.full((2,), 7.0))  # As what reads a checkpoint does.
    assert memory.view(-1)[:2].tolist() == [7.0, 7.0]
    memory.add_(1.0)
    assert first.tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
        lambda params: torch.optim.Adamax(params, lr=0.1),
    ],
    ids=["amsgrad", "Adamax"],
)
def test_optimizers_that_fill_tensors(make: typing.Any, mesh: DeviceMesh) -> None:
    plain = nn.Linear(COLUMNS, ROWS)
    model = fully_shard(copy.deepcopy(plain).to("xla"), mesh)
    x = torch.randn(4, COLUMNS)
    for net, batch in ((plain, x), (model, x.to("xla"))):
        optimizer = make(net.parameters())
        for factor in (2.0, 1.0, 0.5):
            (net(batch).square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(as_plain(ours), theirs.detach())
