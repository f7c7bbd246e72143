"""Views of sharded tensors and in-place fills: every rank writes what it owns, nothing is sent."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import ShardedTensorError, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable

WORLD_SIZES = (1, 2, 3, 5)


class Holder(nn.Module):
    """A parameter behind a small one, so that its cuts fall inside rows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))

    def forward(self) -> None: ...


def values(weight: Tensor) -> Tensor:
    """Return a plain tensor of the shape, all different."""
    return torch.arange(float(weight.numel())).view(weight.shape) + 100


def trained(weight: Tensor) -> Tensor:
    """Return a plain tensor that requires a gradient."""
    return values(weight).requires_grad_()


@torch.no_grad()
def write_a_view_twice(weight: Tensor) -> None:
    """Write through views of the same shape that were made without gradients."""
    for view in (
        weight.view(weight.shape),
        weight.reshape(weight.size(0), -1),
        weight.view_as(weight),
    ):
        view[0].mul_(2)
        view[1].add_(3)
        weight.add_(1)
        view.t()[0].fill_(4)
        view.mul_(2)


@torch.no_grad()
def exchange_with_a_copy(weight: Tensor) -> None:
    """Exchange values without other memory, as schedulefree's wrapper of optimizers does."""
    other = weight.detach() * 2
    for a, b in ((weight, other), (other, weight), (weight, other)):
        a.view(torch.uint8).bitwise_xor_(b.view(torch.uint8))
    weight.view(-1).sub_(other.view(-1), alpha=3)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "a row": lambda w: w.data[2].fill_(7),
    "a column drawn": lambda w: w.data[:, 1].normal_(),
    "rows drawn": lambda w: w.data[1:4].normal_(),
    "columns drawn": lambda w: w.data[:, 1:6].normal_(),
    "chunks drawn": lambda w: [chunk.uniform_() for chunk in w.data.chunk(3)],
    "row by row": lambda w: [row.fill_(i) for i, row in enumerate(w.data)],
    "a tensor index": lambda w: w.data.__setitem__(torch.tensor([1, 3]), 0.0),
    "index_fill_": lambda w: w.data.index_fill_(0, torch.tensor([1, 3]), 9.0),
    "an ellipsis": lambda w: w.data.__setitem__((..., 0), 1.0),
    "a step": lambda w: w.data.view(-1)[::3].fill_(2),
    "changed in place": lambda w: w.data[0].add_(1).mul_(3),
    "a transpose divided": lambda w: w.data.t().div_(torch.tensor(3.0)).add_(1),
    "a transpose and another": lambda w: w.data.t().sub_((w.detach() * 2).t(), alpha=3),
    "a transpose and a whole": lambda w: w.data.t().mul_(values(w).t().contiguous()),
    "a transpose drawn": lambda w: w.data.t().bernoulli_(0.5),
    "transposed copy": lambda w: w.data.t().copy_(values(w).t()),
    "a copied row": lambda w: w.data[4].copy_(values(w)[4]),
    "diagonal": lambda w: w.data.fill_diagonal_(7),
    "in another dtype": lambda w: w.data.view(torch.int32)[1:3].add_(1),
    "bits of bytes": lambda w: w.data.view(torch.uint8).bitwise_xor_(values(w).view(torch.uint8)),
    "some bytes": lambda w: w.data.view(torch.uint8)[:, 2:7].copy_(
        values(w).view(torch.uint8)[:, 2:7]
    ),
    "bytes exchanged": exchange_with_a_copy,
    "halves of elements": lambda w: w.data.view(torch.int16)[..., 1::2].zero_(),
    "masked": lambda w: w.data.masked_fill_(w.data > 11, 0.0),
    "from a vector": lambda w: nn.utils.vector_to_parameters(values(w).view(-1), [w]),
    "an update that is trained": lambda w: w.data.add_(trained(w)),
    "two that are trained": lambda w: w.data.add_(trained(w)).mul_(trained(w)),
    "a copy that is trained": lambda w: w.data.copy_(trained(w)),
    "a view without gradients, twice": write_a_view_twice,
    "eye_": nn.init.eye_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
    "orthogonal_": nn.init.orthogonal_,
    "uniform_": nn.init.uniform_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
}
CONV_WRITES: dict[str, Callable[[Tensor], object]] = {
    "dirac_": nn.init.dirac_,
    "grouped dirac_": lambda w: nn.init.dirac_(w, groups=2),
    "orthogonal_": nn.init.orthogonal_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "inner slice": lambda w: w.data[:, 1:, 1].normal_(),
}
SHAPES = ((6, 20), (20, 6))
CONV_SHAPES = ((6, 4, 3), (4, 6, 2, 3), (4, 2, 3, 2, 2))


def assert_written_as_whole(shape: tuple[int, ...], write: Callable[[Tensor], object]) -> None:
    """Compare pieces, numbers drawn and collectives with those of a plain tensor."""
    for world_size in WORLD_SIZES:
        for rank in range(world_size):
            mesh, log = recording_mesh((world_size,), rank=rank)
            plain = Holder(shape)
            sharded = fully_shard(copy.deepcopy(plain), mesh)
            after = []
            for holder in (plain, sharded):
                torch.manual_seed(5)
                write(holder.weight)
                after.append(torch.get_rng_state())
            expected = sharded.weight.spec.slice_full(plain.weight.detach())
            assert torch.equal(sharded.weight.to_local(), expected), (world_size, rank)
            assert torch.equal(*after), "the next numbers would differ between ranks"
            assert log == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_those_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    assert_written_as_whole(shape, WRITES[name])


@pytest.mark.parametrize("shape", CONV_SHAPES, ids=str)
@pytest.mark.parametrize("name", CONV_WRITES)
def test_writes_to_kernels_are_those_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    assert_written_as_whole(shape, CONV_WRITES[name])


def test_a_write_through_a_view_makes_gathered_copies_stale() -> None:
    mesh, _ = recording_mesh((2,))
    holder = fully_shard(Holder((4, 4)), mesh)
    before = holder.weight.flat._version  # noqa: SLF001
    holder.weight.data[1].zero_()
    assert holder.weight.flat._version > before  # noqa: SLF001


def test_a_view_made_without_gradients_is_used_as_torch_lets_it() -> None:
    """Once the tensor was written, autograd records nothing on it."""
    mesh, _ = recording_mesh((1,))
    plain = Holder((6, 20))
    for weight in (plain.weight, fully_shard(copy.deepcopy(plain), mesh).weight):
        with torch.no_grad():
            view = weight.view(6, -1)
            weight.add_(1)
            row, products = view[0], view @ view.T
        assert torch.equal(products, (plain.weight @ plain.weight.T).detach())
        assert torch.equal((row * 2).detach(), plain.weight[0].detach() * 2)
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            view * 2


def test_an_embedding_keeps_its_padding() -> None:
    """`reset_parameters` writes a row."""
    pieces = []
    for rank in range(2):
        mesh, _ = recording_mesh((2,), rank=rank)
        embedding = fully_shard(nn.Embedding(6, 5, padding_idx=2), mesh)
        torch.manual_seed(1)
        embedding.reset_parameters()
        pieces.append(embedding.weight.to_local())
    torch.manual_seed(1)
    plain = nn.Embedding(6, 5, padding_idx=2)
    assert torch.equal(torch.cat(pieces)[: plain.weight.numel()], plain.weight.view(-1))


REFUSED: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "other shape": (r"the result has shape \(5, 5\)", lambda w: torch.eye(5, out=w.data)),
    "resize_": ("copy_", lambda w: w.data.resize_(3)),
    "set_": ("its memory belong", lambda w: w.data.set_(torch.ones(3))),
    "trained whole": ("torch.no_grad", lambda w: (w * 1).add_(trained(w))),
    "trained source": ("torch.no_grad", lambda w: (w * 1).copy_(trained(w))),
    "trained rows": ("torch.no_grad", lambda w: w.data[:2].add_(trained(w)[:2])),
    "a view that autograd follows": ("torch.where", lambda w: (w * 1)[0].zero_()),
    "larger elements": ("lie on two ranks", lambda w: w.data.view(torch.float64)[0].zero_()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_would_be_wrong_are_refused_by_name(name: str) -> None:
    mesh, log = recording_mesh((2,))
    holder = fully_shard(Holder((6, 20)), mesh)
    why, write = REFUSED[name]
    with pytest.raises(ShardedTensorError, match=rf"(?s)'weight' of shape \(6, 20\): .*{why}"):
        write(holder.weight)
    assert log == []


@torch.no_grad()
def test_writes_to_conjugates_are_refused() -> None:
    mesh, log = recording_mesh((2,))
    holder = Holder((6, 20))
    holder.weight = nn.Parameter(torch.ones(6, 20, dtype=torch.complex64))
    fully_shard(holder, mesh)
    with pytest.raises(ShardedTensorError, match=r"a view of conjugates is written"):
        holder.weight.conj()[0].zero_()
    assert log == []


USES: dict[str, Callable[[typing.Any], Tensor]] = {
    "an operator": lambda w: w * 2,
    "its sum": torch.sum,
    "its whole": lambda w: w.full_tensor(),
    "its piece": lambda w: w.to_local(),
    "a row": lambda w: w[0],
    "a matrix product": lambda w: w @ torch.ones(20, 3),
    "what it is written into": lambda w: torch.zeros_like(w).copy_(w),
    "what is written into it once more": lambda w: w.mul_(trained(w)) * 2,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_gradient_arrives_at_what_a_trained_tensor_was_written_into(
    use: Callable[[typing.Any], Tensor],
) -> None:
    mesh, _ = recording_mesh((1,))
    written = fully_shard(Holder((6, 20)), mesh).weight.data
    source = trained(written)
    written += source
    loss = use(written).sum()
    with pytest.raises(ShardedTensorError, match=r"(?s)'weight' of shape.*torch.no_grad"):
        loss.backward()
    assert source.grad is None


def test_a_view_that_is_not_read_costs_nothing() -> None:
    mesh, log = recording_mesh((2,))
    weight = fully_shard(Holder((6, 20)), mesh).weight
    shown = weight[1:, ::2].t()
    assert shown.shape == (10, 5)
    assert "of=ShardedTensor('weight'" in repr(shown)
    assert torch.zeros_like(shown).shape == shown.shape
    assert log == []
    shown.sum()
    assert log == [("all_gather", 120)]
