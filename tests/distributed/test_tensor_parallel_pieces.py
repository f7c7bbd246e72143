"""Sharded tensors that are split over a tensor-parallel mesh as well, against the whole."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from reference import Differences, assert_within
from shardkit import FlatShard, ShardedTensor, ShardedTensorError, fully_shard, install
from workers import Spawn, in_each, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.helpers

RANKS = 4

# --- sharded tensors ----------------------------------------------------------------------------

# Chunks of unequal size, on some ranks none; by one axis, by two, by one of two.
SPREAD: dict[str, tuple[tuple[int, ...], tuple[Placement, ...] | None]] = {
    "rows": ((7, 13), (Replicate(), Shard(0))),
    "columns": ((7, 13), (Replicate(), Shard(1))),
    "few": ((3, 2), (Shard(0), Shard(0))),
    "both": ((6, 5), (Shard(0), Shard(1))),
    "twice": ((9, 2), (Shard(0), Shard(0))),
    "vector": ((11,), (Shard(0), Replicate())),
    "groups": ((3, 16, 5), (Replicate(), _StridedShard(1, split_factor=2))),
    "copy": ((5, 3), (Replicate(), Replicate())),
    "plain": ((4, 3), None),
}
if torch.__version__.startswith(("2.10.", "2.11.")):
    del SPREAD["groups"]  # There DTensors that are cut so have no backward.

# (mesh shape, how many of its last axes are those of the DTensors)
SPREADS = {
    f"a mesh of {mesh_shape}, its last {num_inner} split": (mesh_shape, num_inner)
    for mesh_shape, num_inner in (
        *(((2, 2), 1), ((1, 4), 1), ((4, 1), 1)),
        *(((2, 1, 2), 1), ((1, 2, 2), 2), ((2, 1, 2), 2)),
    )
}


class Spread(nn.Module):
    """Parameters of every placement; the gradient of each is what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        for name, (shape, _) in SPREAD.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, slopes: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for name, param in self.named_parameters():
            slope = slopes[name]
            if isinstance(param, DTensor):
                slope = distribute_tensor(slope, param.device_mesh, param.placements)
                total = total + (param * slope).sum().full_tensor()
            else:
                total = total + (param * slope).sum()
        return total


def spread(mesh_shape: tuple[int, ...], num_inner: int) -> tuple[Spread, Spread]:
    """Make the parameters, plain and on a mesh."""
    names = ("a", "b", "c")[: len(mesh_shape)]
    mesh = init_torch_mesh("cpu", mesh_shape, mesh_dim_names=names)
    plain = Spread()
    model = copy.deepcopy(plain)
    for name, (_, placements) in SPREAD.items():
        if placements is not None:
            whole = getattr(model, name).detach()
            inner = distribute_tensor(whole, mesh[names[-num_inner:]], placements[-num_inner:])
            setattr(model, name, nn.Parameter(inner))
    return plain, fully_shard(model, mesh[names[:-num_inner]])


def on_every_spread(check: Callable[[tuple[int, ...], int], None]) -> Callable[..., None]:
    """Make a test of a check, which runs on every spread in one call of the ranks."""

    @functools.wraps(check)
    def test() -> None:
        in_each(SPREADS, lambda spread: check(*spread))

    del test.__wrapped__  # Its arguments are none of the test's.
    return on_ranks(RANKS, timeout_s=180)(test)


def pairs_of(plain: nn.Module, model: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Return (name, plain parameter, sharded parameter)."""
    sharded = dict(model.named_parameters())
    return [(name, p.detach(), sharded[name].detach()) for name, p in plain.named_parameters()]


@on_every_spread
def test_pieces_and_full_tensors(mesh_shape: tuple[int, ...], num_inner: int) -> None:
    plain, model = spread(mesh_shape, num_inner)
    num_outer = len(mesh_shape) - num_inner
    coordinate = []
    rest = dist.get_rank()
    for size in reversed(mesh_shape):
        rest, at = divmod(rest, size)
        coordinate.insert(0, at)
    for name, whole, sharded in pairs_of(plain, model):
        assert type(sharded) is ShardedTensor
        assert sharded.shape == whole.shape
        assert torch.equal(sharded.full_tensor(), whole), name
        assert sharded.to_local().ndim == 1
        assert isinstance(sharded.placements[num_outer - 1], FlatShard)
        mesh = sharded.device_mesh
        placements = SPREAD[name][1]
        if placements is None:
            assert tuple(mesh.shape) == mesh_shape[:num_outer]
            assert len(sharded.placements) == num_outer
            continue
        assert sharded.placements[num_outer:] == placements[-num_inner:]
        assert tuple(mesh.shape) == mesh_shape
        assert mesh.ranks == tuple(range(RANKS))
        assert mesh.mesh_dim_names == ("a", "b", "c")[: len(mesh_shape)]
        assert mesh.get_coordinate() == coordinate
        assert dist.get_process_group_ranks(mesh["a"].get_group()) == list(mesh["a"].ranks)
    local_numel = sum(p.to_local().numel() for p in model.parameters())
    total = torch.tensor(local_numel)
    dist.all_reduce(total)
    replicas = mesh_shape[0] if num_outer == 2 else 1
    inner = mesh_shape[-num_inner:]
    expected = 0
    for shape, placements in SPREAD.values():
        copies = [
            size
            for i, size in enumerate(inner)
            if placements is None or placements[-num_inner:][i] == Replicate()
        ]
        expected += replicas * math.prod(copies) * math.prod(shape)
    assert total == expected


def joint_mesh_of_any_order() -> tuple[tuple[int, ...], list[int]]:
    mesh = TorchDeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh["dp"])
    joint = module.weight.device_mesh
    return joint.ranks, joint.get_coordinate()


def test_the_joint_mesh_has_the_order_of_the_mesh_that_both_are_of(spawn: Spawn) -> None:
    ranks = (0, 3, 1, 2)
    places = ([0, 0], [1, 0], [1, 1], [0, 1])
    assert spawn(joint_mesh_of_any_order, RANKS) == [(ranks, place) for place in places]


REDUCTIONS: dict[str, Callable[[Tensor], typing.Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "amin": torch.amin,
    "any": lambda x: (x > 2.0).any(),
    "all": lambda x: (x < 2.0).all(),
    "count": torch.count_nonzero,
    **{
        f"norm {order}": lambda x, order=order: torch.linalg.vector_norm(x, order)
        for order in (0.0, 1.0, 2.0, 3.0, math.inf, -math.inf)
    },
}


@on_every_spread
def test_reductions_are_those_of_the_whole(mesh_shape: tuple[int, ...], num_inner: int) -> None:
    wrong = []
    for name, whole, sharded in pairs_of(*spread(mesh_shape, num_inner)):
        for kind, reduce in REDUCTIONS.items():
            value, expected = reduce(sharded), reduce(whole)
            # Units in the last place of sums of at most 91 numbers.
            if isinstance(value, ShardedTensor) or not torch.allclose(
                value.double(), expected.double(), rtol=1e-6, atol=1e-6
            ):
                wrong.append(f"{kind} of {name}: {value}, expected {expected}")
        if not torch.equal(sharded, sharded.clone()):
            wrong.append(f"{name} is not equal to itself")
        other = whole.clone()
        other.view(-1)[-1] += 1
        if torch.equal(sharded, other):
            wrong.append(f"{name} is equal to another tensor")
    assert not wrong, "\n".join(wrong)


@on_every_spread
def test_clipping_counts_every_element_once(mesh_shape: tuple[int, ...], num_inner: int) -> None:
    plain, model = spread(mesh_shape, num_inner)
    generator = torch.Generator().manual_seed(3)
    slopes = {name: torch.randn(shape, generator=generator) for name, (shape, _) in SPREAD.items()}
    differences = Differences()
    for norm_type, foreach in itertools.product((2.0, 1.0, math.inf), (True, False)):
        norms = []
        for m in (model, plain):
            m.zero_grad()
            m(slopes).backward()
            norms.append(
                nn.utils.clip_grad_norm_(m.parameters(), 0.7, norm_type=norm_type, foreach=foreach)
            )
        assert isinstance(norms[0], Tensor)
        differences.note("norm", *norms)
        differences.note_grads(model, plain)
    # A unit in the last place of a norm of up to 256, and of gradients below 2.
    assert_within([differences], norm=2e-5, grad=2e-7)


def count_all_reduces() -> int:
    _, model = spread((2, 2), 1)
    grads = [param.detach() for param in model.parameters()]
    calls: list[None] = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(None), original(*args, **kwargs))[1]
    try:
        torch._foreach_norm(grads, 2.0)  # noqa: SLF001 - what clip_grad_norm_ calls
    finally:
        dist.all_reduce = original
    return len(calls)


def test_norms_of_a_list_cost_one_all_reduce_per_axis(spawn: Spawn) -> None:
    assert spawn(count_all_reduces, RANKS) == [2] * RANKS


def unscale_with_one_overflow() -> tuple[float, float]:
    plain, model = spread((2, 2), 1)
    slopes = {name: torch.ones(shape) for name, (shape, _) in SPREAD.items()}
    slopes["rows"][-1, -1] = math.inf  # On one rank only.
    found = []
    for m in (model, plain):
        m(slopes).backward()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found[0], found[1]


def test_an_overflow_on_one_rank_is_one_on_all(spawn: Spawn) -> None:
    assert spawn(unscale_with_one_overflow, RANKS) == [(2.0, 2.0)] * RANKS


INITS: tuple[Callable[[Tensor], object], ...] = (
    nn.init.normal_,
    lambda x: nn.init.uniform_(x, -1.0, 2.0),
    lambda x: nn.init.xavier_normal_(x) if x.ndim > 1 else nn.init.zeros_(x),
    lambda x: nn.init.trunc_normal_(x, std=0.5),
    lambda x: nn.init.orthogonal_(x) if x.ndim > 1 else nn.init.zeros_(x),
)


@on_every_spread
def test_initialization_draws_the_numbers_of_a_plain_model(
    mesh_shape: tuple[int, ...], num_inner: int
) -> None:
    plain, model = spread(mesh_shape, num_inner)
    differences = Differences()
    for init in INITS:
        for m in (plain, model):
            torch.manual_seed(5)
            for _, param in sorted(m.named_parameters()):
                init(param)
        differences.note_parameters(model, plain)
    assert_within([differences], parameter=0.0)


@on_every_spread
@torch.no_grad()
def test_views_are_written_where_they_are(mesh_shape: tuple[int, ...], num_inner: int) -> None:
    plain, model = spread(mesh_shape, num_inner)
    for m in (plain, model):
        for param in m.parameters():
            param[1].fill_(7.0)
            last = param[..., -1]
            last.copy_(torch.arange(last.numel()).view(last.shape))
            param.view(-1)[::3].mul_(2.0)
            param.view(-1)[4] = 0.5
    differences = Differences()
    differences.note_parameters(model, plain)
    assert_within([differences], parameter=0.0)


@on_every_spread
def test_full_tensor_is_differentiable(mesh_shape: tuple[int, ...], num_inner: int) -> None:
    plain, model = spread(mesh_shape, num_inner)
    differences = Differences()
    for p in plain.parameters():
        p.square().sum().backward()
    for p in model.parameters():
        p.full_tensor().square().sum().backward()
    differences.note_grads(model, plain)
    assert_within([differences], grad=0.0)


@on_every_spread
def test_state_dicts_of_whole_tensors_can_be_loaded(
    mesh_shape: tuple[int, ...], num_inner: int
) -> None:
    _, model = spread(mesh_shape, num_inner)
    other = Spread()
    state = model.state_dict()
    assert list(state) == list(other.state_dict())
    assert all(type(value) is ShardedTensor for value in state.values())
    model.load_state_dict(other.state_dict())
    differences = Differences()
    differences.note_parameters(model, other)
    for name, param in model.named_parameters():  # Also from DTensors.
        placements = SPREAD[name][1]
        if placements is not None:
            mesh = init_torch_mesh("cpu", (RANKS,))
            with torch.no_grad():
                param.copy_(distribute_tensor(2 * getattr(other, name).detach(), mesh, [Shard(0)]))
            differences.note(
                "copy", param.detach().full_tensor(), 2 * getattr(other, name).detach()
            )
    assert_within([differences], parameter=0.0, copy=0.0)


@on_every_spread
def test_distribute_tensor_spreads_the_values_of_the_first_rank(
    mesh_shape: tuple[int, ...], num_inner: int
) -> None:
    """Have each rank offer values of its own."""
    _, model = spread(mesh_shape, num_inner)
    shifted = TorchDeviceMesh("cpu", [(rank + 1) % RANKS for rank in range(RANKS)])
    with install():
        from torch.distributed.tensor import distribute_tensor as cut

        for name, param in model.named_parameters():
            sharded: typing.Any = param
            own = sharded.device_mesh
            offered = torch.full(param.shape, float(dist.get_rank()), dtype=torch.float64)
            made: typing.Any = cut(offered, own, sharded.placements)
            assert type(made) is ShardedTensor
            assert torch.equal(made.full_tensor(), torch.full_like(offered, own.ranks[0])), name
            kept: typing.Any = cut(offered, own, sharded.placements, src_data_rank=None)
            assert set(kept.to_local().tolist()) <= {float(dist.get_rank())}
            assert cut(offered.to("meta"), own, sharded.placements).is_meta
            if own.size() == RANKS:
                same = init_torch_mesh("cpu", own.shape)
                assert cut(offered, same, sharded.placements).shape == param.shape
            with pytest.raises(ShardedTensorError, match="distribute_tensor got device_mesh="):
                cut(offered, shifted, sharded.placements)
