"""What people do with a parameter, a gradient or optimizer state between steps: one table.

Each use gets a tensor, sharded or plain, and a plain one of the same shape, equal on all ranks. It
returns what it computed, or the tensor that it wrote.
"""

# ruff: noqa: ARG005, PLW0108, SLF001 - all uses take two tensors; operators on lists are _foreach_*

from __future__ import annotations

import copy
import math
import typing

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if typing.TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 7, 5
Use = typing.Any


def row(like: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, like.shape[-1], dtype=like.dtype)


def column(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, like.shape[0], dtype=like.dtype).unsqueeze(1)


def raised(like: Tensor) -> Tensor:
    """Return a plain tensor of one dim more than `like`."""
    return torch.linspace(-1, 1, 2 * like.numel(), dtype=like.dtype).view(2, *like.shape)


def written(name: str, *args: typing.Any, **options: typing.Any) -> Callable[[Tensor], Tensor]:
    """Return a use that calls an in-place method and returns the tensor."""

    def use(t: Tensor, whole: Tensor) -> Tensor:
        given = [arg(whole) if callable(arg) else arg for arg in args]
        getattr(t, name)(*given, **options)
        return t

    return use


def set_item(*index: typing.Any, value: typing.Any = 0.5) -> Use:
    def use(t: Tensor, whole: Tensor) -> Tensor:
        place = tuple(each(t) if callable(each) else each for each in index)
        t[place] = value(whole) if callable(value) else value
        return t

    return use


def into_vector_and_back(t: Tensor, whole: Tensor) -> Tensor:
    vector = nn.utils.parameters_to_vector([t, t])
    nn.utils.vector_to_parameters(vector[whole.numel() :] * 2, [t])
    return t


def orthogonalized(t: Tensor, whole: Tensor) -> Tensor:
    """One iteration of what Muon does."""
    x = t / t.norm()
    gram = x @ x.mT
    return 1.5 * x - 0.5 * gram @ x + 0 * whole


def low_rank(t: Tensor, whole: Tensor) -> list[Tensor]:
    del whole
    u, s, v = torch.linalg.svd(t, full_matrices=False)
    return [s, u @ torch.diag(s) @ v]


def assert_close(t: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(t, whole)
    torch.testing.assert_close(whole, t)
    torch.testing.assert_close([t], [t * 1])


def assert_not_close(t: Tensor, whole: Tensor) -> bool:
    try:
        torch.testing.assert_close(t, whole + 1)
    except AssertionError:
        return True
    return False


def zeroed_by_view(t: Tensor, whole: Tensor) -> Tensor:
    del whole
    t.view(-1)[3:9].zero_()
    t.t()[1].fill_(2.0)
    return t


def row_by_row(t: Tensor, whole: Tensor) -> Tensor:
    for i, each in enumerate(t):
        each.copy_(whole[i].flip(0) + i)
    return t


def out_of(fn: Callable[..., object], *args: Callable[[Tensor], typing.Any]) -> Use:
    def use(t: Tensor, whole: Tensor) -> Tensor:
        fn(*(arg(whole) for arg in args), out=t)
        return t

    return use


def into_plain(t: Tensor, whole: Tensor) -> list[Tensor]:
    plain = torch.ones_like(whole)
    other = plain.clone().copy_(t)
    plain.add_(t, alpha=2).mul_(t[0])
    return [plain, other, torch.add(t, 1, out=torch.empty_like(whole))]


def listed(name: str, *args: typing.Any, is_written: bool = False) -> Use:
    """Return a use of an operator on lists, of sharded and of plain entries."""

    def use(t: Tensor, whole: Tensor) -> typing.Any:
        given = [arg(t, whole) if callable(arg) else arg for arg in args]
        first = [t, t.clone()]
        result = getattr(torch, name)(first, *given)
        return first if is_written else list(result)

    return use


def written_by_list(t: Tensor, whole: Tensor) -> list[Tensor]:
    wholes = [whole.clone(), whole + 1]
    torch._foreach_mul_(wholes, [t, t[0]])
    return wholes


def averaged(t: Tensor, whole: Tensor) -> list[Tensor]:
    """Keep an exponential average, as EMA scripts do."""
    shadow, other = t.detach().clone(), copy.deepcopy(whole)
    shadow.mul_(0.9).add_(t, alpha=0.1)
    other.lerp_(t.data, 0.5)
    return [shadow, other]


def seeded(fn: Callable[[Tensor, Tensor], typing.Any]) -> Use:
    def use(t: Tensor, whole: Tensor) -> typing.Any:
        torch.manual_seed(3)
        return fn(t, whole)

    return use


EVERYDAY: dict[str, Use] = {
    # Elementwise, with whole operands.
    "add a whole": lambda t, w: t + w,
    "whole minus it": lambda t, w: w - t,
    "times a row": lambda t, w: t * row(w),
    "times a column": lambda t, w: column(w) * t,
    "times a number": lambda t, w: t * 2.5 - 1 + 0 * w,
    "times a 0-d tensor": lambda t, w: t * torch.tensor(3.0, dtype=torch.float64) + 0 * w,
    "divided by one element": lambda t, w: t / w[:1, :1],
    "a larger result": lambda t, w: t + raised(w),
    "where": lambda t, w: torch.where(w > 0, t, 0.0),
    "clamp to wholes": lambda t, w: t.clamp(w - 0.1, w * 0.5),
    "compare with a whole": lambda t, w: (t > w * 0.9, w.eq(t), t != 0),
    "masked fill": lambda t, w: t.masked_fill(w > 0, -1.0),
    "its sign times a whole": lambda t, w: torch.sign(t) * w.abs().sqrt(),
    "integers of it": lambda t, w: (t * 10).long() + (w > 0),
    "transposed operand": lambda t, w: t * w.t().contiguous().t(),
    # Written in place, by wholes.
    "copy_ of a whole": written("copy_", lambda w: w * 3),
    "copy_ of a row": written("copy_", row),
    "add_ of a whole": written("add_", lambda w: w * 3, alpha=0.5),
    "mul_ by a column": written("mul_", column),
    "sub_ of a slice of a vector": written("sub_", lambda w: w.view(-1)[-1:]),
    "lerp_ to a whole": written("lerp_", lambda w: w + 1, 0.25),
    "addcmul_ of wholes": written("addcmul_", lambda w: w, lambda w: row(w), value=0.3),
    "clamp_ by numbers": written("clamp_", -0.2, 0.2),
    "masked_fill_": written("masked_fill_", lambda w: w > 0, 7.0),
    "bernoulli_ of a whole": seeded(written("bernoulli_", lambda w: w.clamp(0, 1))),
    "cumsum_": written("cumsum_", 0),
    "addmm_": written("addmm_", lambda w: w, lambda w: w.t() @ w),
    "index_add_": written("index_add_", 0, lambda w: torch.tensor([1, 3]), lambda w: w[:2]),
    "scatter_": written("scatter_", 1, lambda w: torch.zeros(2, 1).long(), 4.0),
    "out= of a matrix product": out_of(torch.mm, lambda w: w, lambda w: w.t() @ w),
    "out= of a sum": out_of(torch.add, lambda w: w, lambda w: row(w)),
    "data = whole": lambda t, w: (setattr(t, "data", w * 2), t)[1],
    "into plain tensors": into_plain,
    # Reductions.
    "sum": lambda t, w: [t.sum(), t.mean(), w.sum()],
    "sum over rows": lambda t, _: [t.sum(0), t.sum(dim=1, keepdim=True), t.sum((0, 1), True)],
    "mean over columns": lambda t, _: [t.mean(-1), t.amax(1), t.amin(0, keepdim=True)],
    "std and var": lambda t, _: [t.std(), t.var(unbiased=False), t.std(0), *torch.std_mean(t)],
    "max with indices": lambda t, _: [*t.max(dim=1), t.argmax(), t.argmin(0), t.max()],
    "median and quantile": lambda t, _: [t.median(), *t.median(0), t.quantile(0.3)],
    "norms": lambda t, _: [t.norm(), t.norm(1), t.norm(dim=1), torch.linalg.vector_norm(t, 3, 0)],
    "matrix norms": lambda t, _: [torch.linalg.matrix_norm(t), torch.linalg.norm(t, 2)],
    "any and all": lambda t, _: [(t > 9).any(), (t > -9).all(), (t > 0).any(dim=0)],
    "finite": lambda t, _: [t.isfinite().all(), t.isnan().sum(), torch.count_nonzero(t, dim=0)],
    "logsumexp": lambda t, _: [t.logsumexp(0), t.softmax(-1), t.log_softmax(0)],
    "histc": lambda t, _: [torch.histc(t, 5, -1, 1), torch.histogram(t.flatten(), 4).hist],
    "sort and topk": lambda t, _: [*t.sort(0), *t.flatten().topk(3), *t.kthvalue(2)],
    "unique": lambda t, _: t.round().unique(),
    "cumulative": lambda t, _: [t.cumsum(0), t.cumprod(1), *t.cummax(0), t.diff()],
    # Comparison.
    "equal": lambda t, w: [torch.equal(t, w), torch.equal(w, t), torch.equal(t, w + 1)],
    "allclose": lambda t, w: [torch.allclose(t, w), torch.allclose(w, t * 2), t.allclose(w + 1e-9)],
    "isclose to a row": lambda t, w: torch.isclose(t, w[0]),
    "assert_close": assert_close,
    "assert_close says no": assert_not_close,
    # Indexing and views, read.
    "a row": lambda t, _: t[0],
    "a number": lambda t, _: t[1, 2].item(),
    "a slice": lambda t, _: t[1:4, ::2] * 2,
    "rows by a list": lambda t, _: t[[0, 3, 3]],
    "a mask": lambda t, w: [t[w > 0], t.masked_select(w < 0), t[t > 0]],
    "nonzero": lambda t, _: t.round().nonzero(),
    "gather and take": lambda t, w: [t.gather(1, w.argsort(1)), t.take(torch.tensor([0, 9]))],
    "index_select": lambda t, _: t.index_select(1, torch.tensor([2, 0])),
    "transpose": lambda t, _: [t.t(), t.mT, t.permute(1, 0), t.transpose(0, 1).contiguous()],
    "flatten": lambda t, _: [t.flatten(), t.view(-1), t.reshape(COLUMNS, ROWS), t.ravel()[3]],
    "squeeze": lambda t, _: [t.unsqueeze(0), t[None, 0].squeeze(), t.expand(2, -1, -1)],
    "chunk and split": lambda t, _: [*t.chunk(3), *t.split([2, 5]), *t.unbind(1)],
    "diagonal": lambda t, _: [t.diag(), t.diagonal(1), t.tril(), t[:5].trace()],
    "iterate": lambda t, _: [each.sum() for each in t],
    "flip and roll": lambda t, _: [t.flip(0), t.roll(2, 1), t.rot90()],
    "cat and stack": lambda t, w: [torch.cat([t, w]), torch.stack([w, t]), torch.vstack([t, t])],
    "repeat and pad": lambda t, _: [t.repeat(2, 1), t.tile(2), F.pad(t, (1, 0))],
    # Written through views.
    "zero some rows": lambda t, _: (t[2:4].zero_(), t)[1],
    "views of views": zeroed_by_view,
    "row by row": row_by_row,
    "set an element": set_item(1, 2),
    "set a row": set_item(slice(1, 3), value=row),
    "set by a mask": set_item(lambda t: t > 0, value=-1.0),
    "set by an index": set_item([0, 2], value=lambda w: w[[1, 3]]),
    "a row from another": lambda t, _: (t[0].copy_(t[1]), t[2].add_(t[3]), t)[2],
    "fill_diagonal_": written("fill_diagonal_", 3.0),
    "cumsum_ of a row": lambda t, _: (t[2].cumsum_(0), t)[1],
    # Linear algebra.
    "p @ x": lambda t, w: [t @ w.t(), w.t() @ t, t @ row(w), F.linear(w, t)],
    "mm and bmm": lambda t, w: [torch.mm(t, w.t()), torch.bmm(t[None], w.t()[None])],
    "einsum": lambda t, w: [torch.einsum("ij,kj->ik", t, w), torch.outer(t[0], w[0])],
    "svd": low_rank,
    "qr": lambda t, _: torch.linalg.qr(t).R.abs(),
    "pinv and solve": lambda t, w: [torch.linalg.pinv(t), torch.linalg.lstsq(t, w).solution],
    "rank and condition": lambda t, _: [torch.linalg.matrix_rank(t), torch.linalg.cond(t)],
    "orthogonalize": orthogonalized,
    "cosine": lambda t, w: [F.cosine_similarity(t, w), F.cosine_similarity(t, w, dim=0)],
    "distances": lambda t, w: [torch.cdist(t, w), torch.dist(t, w), F.mse_loss(t, w)],
    "layer norm": lambda t, w: F.layer_norm(w, (COLUMNS,), t[0], t[1]),
    "embedding": lambda t, _: F.embedding(torch.tensor([[0, 3], [3, 1]]), t),
    "dot": lambda t, w: torch.dot(t.flatten(), w.flatten()),
    # To the host, and to other kinds.
    "tolist": lambda t, _: [t.tolist(), t[0].tolist()],
    "numpy": lambda t, _: [t.numpy().tolist(), t[0].numpy().tolist()],
    "dlpack": lambda t, _: [torch.from_dlpack(each) for each in (t.data, t.data[0], t.data.t())],
    "apply_": lambda t, _: [t.data[1].apply_(lambda a: -a), t.data.apply_(lambda a: a * a + 1), t],
    "map_": lambda t, w: [t.data.map_(w, lambda a, b: a + 2 * b), t.data.map_(t.data * 3, max), t],
    "map2_": lambda t, w: [t.data.map2_(w, t.data * 3, lambda a, b, c: a + b * c), t],
    "cpu": lambda t, _: t.cpu() * 2,
    "to another dtype": lambda t, w: [t.double() + w, t.bfloat16(), t.to(w), t.type_as(w.long())],
    "len and shape": lambda t, _: [len(t), list(t.shape), t.numel(), t.size(1), t.dim()],
    "float of a number": lambda t, _: [float(t.sum()), float(f"{t[0, 0]:.3f}"), bool(t[0, 1] > 0)],
    "contains": lambda t, _: 99.0 in t,
    "clone and deepcopy": lambda t, _: [t.clone() + 1, copy.deepcopy(t), copy.deepcopy(t[0])],
    "new tensors": lambda t, _: [t.new_zeros(3), t.new_ones(t.shape), torch.full_like(t, 2.0)],
    "made like a view": lambda t, _: [torch.zeros_like(t[0]), t.t().new_ones(2)],
    "parameters to a vector": into_vector_and_back,
    "average of weights": averaged,
    "noise": seeded(lambda t, w: [t + torch.randn_like(t), t + torch.randn(w.shape)]),
    "dropout": seeded(lambda t, _: F.dropout(t, 0.5)),
    "multinomial": seeded(lambda t, _: torch.multinomial(t.abs() + 0.1, 2)),
    # Lists.
    "list plus wholes": listed("_foreach_add", lambda _, w: [w, w * 2]),
    "list plus a row": listed("_foreach_mul", lambda _, w: [row(w), w]),
    "list, larger results": listed("_foreach_add", lambda _, w: [raised(w), raised(w)]),
    "list plus views": listed("_foreach_add", lambda t, _: [t[0], t[1]]),
    "list, written by wholes": listed("_foreach_add_", lambda _, w: [w, row(w)], is_written=True),
    "list, lerp_": listed("_foreach_lerp_", lambda _, w: [w, w], 0.25, is_written=True),
    "list, copy_": listed("_foreach_copy_", lambda _, w: [w * 2, w], is_written=True),
    "list norms and maxima": lambda t, w: [
        *torch._foreach_norm([t, w, t * 2], math.inf),
        *torch._foreach_max([t, w, -t]),
    ],
    "wholes written by a list": written_by_list,
}

# Losses of a parameter, made outside of a module's forward; `x` is data, equal on all ranks here.
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "square": lambda p, w, x: p.square().sum(),
    "absolute mean": lambda p, w, x: p.abs().mean() * 3,
    "norm": lambda p, w, x: p.norm() + p.norm(1),
    "std": lambda p, w, x: p.std() + p.var(0).sum(),
    "times a whole": lambda p, w, x: (p * w).sum(),
    "distance to a whole": lambda p, w, x: F.mse_loss(p, w * 0.5),
    "times a row": lambda p, w, x: (p * row(w)).square().sum(),
    "product": lambda p, w, x: (p @ x).square().sum(),
    "linear": lambda p, w, x: F.linear(x.t(), p).tanh().sum(),
    "tied head": lambda p, w, x: ((x.t() @ p.t()) ** 2).mean(),
    "embedding": lambda p, w, x: (F.embedding(torch.tensor([1, 1, 4]), p).exp() @ x).sum(),
    "sort": lambda p, w, x: (p.sort(dim=0).values * w).sum(),
    "row": lambda p, w, x: p[2].exp().sum() + p[:, 1].sum(),
    "view": lambda p, w, x: p.view(-1)[3:20].square().sum(),
    "extremes": lambda p, w, x: p.max() - p.amin(dim=1).sum(),
    "singular values": lambda p, w, x: torch.linalg.svdvals(p).sum(),
    "orthogonality": lambda p, w, x: (p.t() @ p - torch.eye(p.shape[1])).square().sum(),
    "softmax": lambda p, w, x: (p.softmax(0) * w).sum(),
    "vector of parameters": lambda p, w, x: nn.utils.parameters_to_vector([p]).norm(),
    "whole and piece": lambda p, w, x: p.square().sum() + (p * w).sum() + (p @ x).sum(),
    "full_tensor": lambda p, w, x: (
        (p.full_tensor() if hasattr(p, "full_tensor") else p) @ x
    ).sum(),
    "list": lambda p, w, x: torch.stack(torch._foreach_norm([p, p * 2])).sum(),
    "in double": lambda p, w, x: (p.double() * w.double()).sum(),
}
