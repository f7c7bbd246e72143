"""Parameters of one group on several meshes: experts on some ranks, small ones whole on all."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
import pathlib
import pickle
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from experts import EXACT, NUM_EXPERTS, WIDTH, Block, Model, batches, loss_of
from reference import step_all
from shardkit import (
    CheckpointError,
    MixedPrecisionPolicy,
    ShardedTensor,
    ShardedTensorError,
    auto_shard,
    fully_shard,
)
from shardkit._tensor.ops.reductions import part_sums
from shardkit.backends import gloo
from shardkit.checkpoint import get_model_state_dict, load, load_full, save, save_full
from step_traffic import counted, total
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Iterator


STEPS = 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks are used."""

    # Replicas, ranks that hold the same experts, ranks that hold different ones.
    shape: tuple[int, int, int]
    # "plain" parameters of each rank, a "dtensor" on the axis `ep`, or "both".
    experts: str = "plain"
    # What `shard_placement_fn` returns of experts: a "mesh" or FSDP2's "result".
    form: str = "mesh"
    small: bool = False  # Whether norms and routers are whole on each rank.
    # Whether all meshes are views of one of the world, as torchtitan makes them.
    unflattened: bool = False

    def is_plain(self, name: str) -> bool:
        """Whether experts with this name are plain parameters."""
        return self.experts == "plain" or (self.experts == "both" and name.endswith("down"))


def meshes_of(layout: Layout) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Return the mesh of all parameters but experts, that of experts, and the axis `ep`."""
    replicas, efsdp, ep = layout.shape
    whole = init_device_mesh(
        "cpu", (replicas, efsdp, ep), mesh_dim_names=("replicate", "efsdp", "ep")
    )
    if layout.unflattened:
        size = (replicas * efsdp * ep,)
        world: typing.Any = init_device_mesh("cpu", size, mesh_dim_names=("world",))
        whole = world._unflatten(0, layout.shape, ("replicate", "efsdp", "ep"))  # noqa: SLF001
        if replicas == 1:  # Shards and parts of sequences, taken as one axis.
            dense = world._unflatten(0, (efsdp, ep), ("dp_shard", "cp"))  # noqa: SLF001
            return dense._flatten("fsdp"), whole["efsdp"], whole["ep"]  # noqa: SLF001
        dense = world._unflatten(0, (replicas, efsdp * ep), ("replicate", "fsdp"))  # noqa: SLF001
        return dense, whole["replicate", "efsdp"], whole["ep"]
    if replicas == 1:
        return init_device_mesh("cpu", (efsdp * ep,)), whole["efsdp"], whole["ep"]
    dense = init_device_mesh("cpu", (replicas, efsdp * ep), mesh_dim_names=("replicate", "fsdp"))
    return dense, whole["replicate", "efsdp"], whole["ep"]


def keep_own_experts(block: Block, layout: Layout, ep: DeviceMesh) -> None:
    """Leave on this rank its part of the experts."""
    block.ep = ep.get_group()
    for name, param in list(block.experts.named_parameters()):
        whole = param.detach()
        part: Tensor = distribute_tensor(whole, ep, [Shard(0)])
        if layout.is_plain(name):
            part = typing.cast("DTensor", part).to_local().clone()
        setattr(block.experts, name, nn.Parameter(part))


def place(layout: Layout, model: nn.Module, experts: DeviceMesh) -> typing.Any:
    """Return a `shard_placement_fn`."""
    of_experts = {id(p) for n, p in model.named_parameters() if ".experts." in n}
    small = {id(p) for n, p in model.named_parameters() if "norm" in n or "router" in n}
    chosen: typing.Any = experts
    if layout.form == "result":
        fsdp = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
        info = (
            fsdp.FSDPMeshInfo(experts, shard_mesh_dim=0)
            if experts.ndim == 1
            else fsdp.HSDPMeshInfo(experts, shard_mesh_dim=1, replicate_mesh_dim=0)
        )
        chosen = fsdp.ShardPlacementResult(Shard(0), info)

    def fn(param: nn.Parameter) -> typing.Any:
        if id(param) in of_experts:
            return chosen
        return Replicate() if layout.small and id(param) in small else None

    return fn


def make(layout: Layout, **options: typing.Any) -> tuple[Model, typing.Any]:
    """Return the plain model of one process, and the sharded one."""
    torch.manual_seed(3)
    plain = Model().double()
    model = copy.deepcopy(plain)
    dense, experts, ep = meshes_of(layout)
    for block in model.blocks:
        keep_own_experts(block, layout, ep)
    fn = place(layout, model, experts)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=dense, shard_placement_fn=fn, **options)
        # A mean over the tokens of all ranks: also of experts that few ranks hold.
        module.set_gradient_divide_factor(dist.get_world_size())
    return plain, model


def pairs(
    plain: nn.Module, model: nn.Module, layout: Layout
) -> Iterator[tuple[str, nn.Parameter, typing.Any, slice]]:
    """Yield name, plain and sharded parameter, and the part that the sharded one is of."""
    ep = layout.shape[-1]
    here = NUM_EXPERTS // ep
    first = dist.get_rank() % ep * here
    sharded = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        is_part = ".experts." in name and layout.is_plain(name)
        yield name, param, sharded[name], slice(first, first + here) if is_part else slice(None)


def largest_difference(plain: nn.Module, model: nn.Module, layout: Layout, *, grads: bool) -> float:
    worst = 0.0
    for name, whole, param, part in pairs(plain, model, layout):
        assert isinstance(param, ShardedTensor), name
        wanted, found = (whole.grad, param.grad) if grads else (whole, param)
        assert wanted is not None
        assert found is not None, name
        difference = typing.cast("typing.Any", found).full_tensor() - wanted[part]
        worst = max(worst, difference.abs().max().item())
    return worst


def compare_training(layout: Layout, **options: typing.Any) -> None:
    plain, model = make(layout, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(STEPS):
        own, whole = batches(step)
        losses = [loss_of(plain, whole), loss_of(model, own)]
        for loss in losses:
            loss.backward()
        total = losses[1].detach().clone()
        dist.all_reduce(total)
        assert abs(total / dist.get_world_size() - losses[0].detach()) < EXACT
        assert largest_difference(plain, model, layout, grads=True) < EXACT
        for order in (1.0, 2.0, float("inf")):
            norms = [
                nn.utils.get_total_norm([p.grad for p in m.parameters()], order)
                for m in (plain, model)
            ]
            assert abs(norms[1].item() - norms[0].item()) < EXACT * max(1, norms[0].item())
        for foreach in (True, False):
            norms = [
                nn.utils.clip_grad_norm_(m.parameters(), 0.1 / (1 + foreach), foreach=foreach)
                for m in (plain, model)
            ]
            assert abs(norms[1].item() - norms[0].item()) < EXACT
        assert abs(model.clip_grad_norm_(1e9).item() - 0.05) < 1e-6  # torch adds 1e-6 to it.
        step_all(optimizers)
    assert largest_difference(plain, model, layout, grads=False) < EXACT
    model.check_replicas()


def as_result(layout: Layout) -> typing.Any:
    """Return a test's parameter: a layout whose meshes the function gives as torch's results."""
    fsdp = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    missing = pytest.mark.skipif(
        not hasattr(fsdp, "ShardPlacementResult"),
        reason="Torch before 2.12 has no ShardPlacementResult.",
    )
    return pytest.param(dataclasses.replace(layout, form="result"), marks=missing)


LAYOUTS = [
    Layout((1, 2, 2)),
    Layout((1, 1, 4), small=True),
    as_result(Layout((1, 2, 2), experts="dtensor")),
    Layout((2, 1, 2), small=True),
    as_result(Layout((2, 1, 2), experts="dtensor", small=True)),
    as_result(Layout((1, 2, 2), experts="dtensor", unflattened=True)),
    as_result(Layout((2, 1, 2), unflattened=True)),
    Layout((1, 2, 2), experts="both"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_on_several_meshes_equals_one_process(spawn: Spawn, layout: Layout) -> None:
    spawn(compare_training, 4, layout)


@pytest.mark.parametrize("layout", [Layout((1, 1, 2)), Layout((1, 2, 1), small=True)], ids=str)
def test_two_ranks(spawn: Spawn, layout: Layout) -> None:
    spawn(compare_training, 2, layout)


@on_ranks(4)
def test_a_norm_has_the_same_bits_on_all_ranks() -> None:
    """Clipping would part replicas else: here the experts lie across the axis of replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(8))).double()
    torch.manual_seed(mesh["shard"].get_local_rank())
    experts = {id(p) for layer in model[1::2] for p in layer.parameters()}
    for param in model[1::2].parameters():
        nn.init.normal_(param)
    fully_shard(
        model,
        mesh=mesh,
        shard_placement_fn=lambda p: mesh["replicate"] if id(p) in experts else None,
    )
    torch.manual_seed(dist.get_rank())
    for _ in range(20):
        model(torch.randn(2, 5).double()).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        model.zero_grad()
        found = [torch.zeros_like(norm) for _ in range(4)]
        dist.all_gather(found, norm)
        assert len(set(map(float, found))) == 1, found


# --- what a group does ---------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [False, 2])
@on_ranks(4)
def test_resharding_makes_no_difference(reshard: bool | int) -> None:
    compare_training(Layout((1, 2, 2), small=True), reshard_after_forward=reshard)


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[3], LAYOUTS[4]], ids=str)
@on_ranks(4)
def test_gradients_accumulate(layout: Layout) -> None:
    plain, model = make(layout)
    for step in range(3):
        own, whole = batches(step)
        is_last = step == 2
        model.set_requires_all_reduce(is_last)
        model.set_requires_gradient_sync(step != 0)
        loss_of(plain, whole).backward()
        loss_of(model, own).backward()
    assert largest_difference(plain, model, layout, grads=True) < EXACT


@on_ranks(4)
def test_mixed_precision() -> None:
    layout = Layout((1, 2, 2), small=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    plain, model = make(layout, mp_policy=policy)
    seen = []
    model.blocks[0].experts.register_forward_pre_hook(lambda m, _: seen.append(m.up.dtype))
    own, whole = batches(0)
    loss_of(plain, whole).backward()
    loss_of(model, own).backward()
    assert seen == [torch.float32]
    assert 1e-12 < largest_difference(plain, model, layout, grads=True) < 1e-5


@on_ranks(4)
def test_each_bucket_is_one_collective_and_nothing_stays() -> None:
    layout = Layout((1, 2, 2), small=True)
    _, model = make(layout)
    for step in range(2):
        with counted(model) as found:
            loss_of(model, batches(step)[0]).backward()
        traffic = total(found)
        # Forward: each block's experts and the root's other parameters; backward: experts of the
        # first block, since the last one's are kept. What is whole is all-reduced once.
        counts = (traffic.all_gathers, traffic.reduce_scatters, traffic.all_reduces)
        assert counts == (1 + 2 + 1, 2 + 1, 2), counts
        stats = model.memory_stats()
        assert stats["unsharded_nbytes"] == 0
        assert stats["unsynced_grad_nbytes"] == 0
    assert all(param.grad is not None for param in model.parameters())
    # The norm and the router of each block are whole here.
    whole = sum(p.numel() for b in model.blocks for m in (b.norm, b.router) for p in m.parameters())
    own = sum(p.to_local().numel() for b in model.blocks for p in (b.norm.weight, b.norm.bias))
    assert own == 2 * 2 * WIDTH
    assert whole == 2 * (2 * WIDTH + WIDTH * NUM_EXPERTS)


@on_ranks(4)
def test_small_buckets_on_a_mesh_travel_together() -> None:
    plain, model = make(Layout((1, 2, 2)))
    own, whole = batches(0)
    loss_of(model, own).backward()
    model.zero_grad()
    with mock.patch.object(gloo, "SharedExchange", wraps=gloo.SharedExchange) as started:
        loss_of(model, own).backward()
    # Both blocks' experts, both blocks' other parameters, the root's.
    sizes = [call.args[0][0].shard_axis.size for call in started.call_args_list]
    assert sizes == [4, 2, 4], sizes
    loss_of(plain, whole).backward()
    assert largest_difference(plain, model, Layout((1, 2, 2)), grads=True) < EXACT


def train_where_one_expert_differs() -> None:
    layout = Layout((1, 2, 2))
    torch.manual_seed(3)
    model = Model().double()
    dense, experts, ep = meshes_of(layout)
    for block in model.blocks:
        keep_own_experts(block, layout, ep)
    if dist.get_rank() == 3:  # Rank 1 holds the same experts, the others other ones.
        model.blocks[0].experts.up.data[0, 0, 0] += 1
    for module in (*model.blocks, model):
        fully_shard(module, mesh=dense, shard_placement_fn=place(layout, model, experts))
    loss_of(model, batches(0)[0])


def test_ranks_of_other_meshes_learn_what_differs(spawn_errors: Spawn) -> None:
    for error in spawn_errors(train_where_one_expert_differs, 4):
        assert error.type_name == "RankMismatchError"
        assert "parameter 'blocks.0.experts.up' was not the same" in error.message


@on_ranks(4)
def test_a_plan_knows_the_meshes() -> None:
    layout = Layout((1, 2, 2), small=True)
    torch.manual_seed(3)
    model = Model().double()
    dense, experts, ep = meshes_of(layout)
    for block in model.blocks:
        keep_own_experts(block, layout, ep)
    plan = auto_shard(
        model,
        dense,
        units=["blocks.0", "blocks.1"],
        shard_placement_fn=place(layout, model, experts),
    )
    loss_of(model, batches(0)[0]).backward()  # From the second step on the order is known.
    with counted(model) as found:
        loss_of(model, batches(1)[0]).backward()
    assert total(found) == plan.traffic()
    memory = typing.cast("typing.Any", model).memory_stats()
    assert memory["shard_nbytes"] == plan.memory.shard_nbytes


@on_ranks(4)
def test_unshard_and_deep_copies() -> None:
    layout = Layout((1, 2, 2), small=True)
    plain, model = make(layout)
    block, wanted = model.blocks[0], plain.blocks[0]
    block.unshard()
    first = dist.get_rank() % 2 * 2
    assert torch.equal(block.experts.up, wanted.experts.up[first : first + 2])
    assert torch.equal(block.router.weight, wanted.router.weight)
    block.reshard()
    for block in model.blocks:
        ep, block.ep = block.ep, None  # A process group has no copies.
    copied = copy.deepcopy(model)
    for block in copied.blocks:
        block.ep = ep
    own, whole = batches(0)
    loss_of(plain, whole).backward()
    loss_of(copied, own).backward()
    assert largest_difference(plain, copied, layout, grads=True) < EXACT
    assert all(param.grad is None for param in model.parameters())
    norms = [nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in (plain, copied)]
    assert abs(norms[0].item() - norms[1].item()) < EXACT


# --- experts without a token ----------------------------------------------------------------------


class Choices(nn.Module):
    """Experts of which a forward uses those that are named; all ranks of `ep` hold others."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(num_experts))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        outputs = [self.experts[i](inputs).sum() for i in used]
        return self.scale * sum(outputs, inputs.sum())


def check_norms(model: typing.Any, place: int) -> None:
    """Compare norms with those of all gradients of both places, which are not equally many."""
    mine = [p.grad.full_tensor() for p in model.experts.parameters() if p.grad is not None]
    of_places: list[typing.Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_places, (place, mine))
    by_place = dict(of_places)
    wholes = [model.scale.grad.full_tensor(), *by_place[0], *by_place[1]]
    for order in (2.0, 1.0, 3.0, math.inf, -math.inf):
        wanted = nn.utils.get_total_norm(wholes, order)
        for params in (list(model.parameters()), list(model.parameters())[::-1]):
            grads = [param.grad for param in params if param.grad is not None]
            found = nn.utils.get_total_norm(grads, order)
            assert abs(found.item() - wanted.item()) < EXACT, order
    before = model.scale.grad.full_tensor()
    norm = model.clip_grad_norm_(0.5)
    assert abs(norm.item() - nn.utils.get_total_norm(wholes).item()) < EXACT
    assert torch.allclose(model.scale.grad.full_tensor(), before * 0.5 / (norm.item() + 1e-6))


@on_ranks(4)
def test_an_expert_without_a_token_keeps_its_gradient() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(rank % 2)  # Other experts on the other rank of `ep`.
    model: typing.Any = Choices(3).double()
    inside = {id(param) for param in model.experts.parameters()}
    efsdp = mesh["efsdp"]
    fully_shard(model, shard_placement_fn=lambda param: efsdp if id(param) in inside else None)
    # Expert 0: by both ranks of one expert-parallel place; 1: by one of them; 2: by none there, and
    # by a rank of the other place.
    used = {0: [0], 1: [2], 2: [0, 1], 3: []}[rank]
    model(torch.ones(2, WIDTH, dtype=torch.float64), used).backward()
    place = rank % 2
    has_grad = [expert.weight.grad is not None for expert in model.experts]
    assert has_grad == [[True, True, False], [False, False, True]][place]
    grads = [
        e.weight.grad.full_tensor().mean().item()
        for e in model.experts
        if e.weight.grad is not None
    ]
    assert grads == [[2.0, 1.0], [1.0]][place]  # Two rows, the mean over two ranks.
    check_norms(model, place)


@on_ranks(4)
def test_a_norm_counts_experts_also_where_none_was_used() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model: typing.Any = Choices(3).double()
    inside = {id(param) for param in model.experts.parameters()}
    efsdp = mesh["efsdp"]
    fully_shard(model, shard_placement_fn=lambda param: efsdp if id(param) in inside else None)
    model(torch.ones(2, WIDTH, dtype=torch.float64), [] if rank % 2 else [0, 2]).backward()
    check_norms(model, rank % 2)


@on_ranks(4)
def test_what_is_frozen_on_a_part_of_the_ranks_is_saved_once(tmp_path: typing.Any) -> None:
    """Shard what is not trained over two ranks only, so that its gathers stay on a host."""
    path = str(tmp_path / "checkpoint")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "rank"))
    torch.manual_seed(0)
    plain: typing.Any = Choices(3)
    plain.experts.requires_grad_(requires_grad=False)
    model = copy.deepcopy(plain)
    fully_shard([*model.experts], mesh=mesh["rank"])
    fully_shard(model)
    model(torch.ones(2, WIDTH), [0, 1, 2]).backward()
    assert torch.isfinite(model.clip_grad_norm_(1.0))
    save(path, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load(path, model)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted)


@pytest.mark.parametrize("kind", ["norms", "copies", "save", "save_full"])
@on_ranks(4)
def test_experts_with_a_call_of_their_own_are_parts(kind: str, tmp_path: typing.Any) -> None:
    """Shard experts by a call of their own, and then the model around them."""
    path = str(tmp_path / "checkpoint")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(rank % 2)
    model: typing.Any = Choices(3).double()
    fully_shard([*model.experts], mesh=mesh["efsdp"])
    fully_shard(model)
    if kind == "save":
        with pytest.raises(CheckpointError, match="the other ranks hold others in its place"):
            save(path, model)
    elif kind == "save_full":
        with pytest.raises(ShardedTensorError, match="the other ranks hold others in its place"):
            save_full(path, model)
    else:
        model(torch.ones(2, WIDTH, dtype=torch.float64), [0, rank % 2]).backward()
        if kind == "copies":
            copied = copy.deepcopy(model)
            for param, other in zip(copied.parameters(), model.parameters(), strict=True):
                param.grad = None if other.grad is None else other.grad.clone()
            model = copied
        check_norms(model, rank % 2)


class Nested(nn.Module):
    """Experts in a block in a model: each on more ranks than what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Choices(2)
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        outputs: Tensor = self.block(inputs, used)
        return self.bias.sum() * outputs


NESTED_USES = [{rank: [0, 1] for rank in range(4)}, {0: [0], 1: [0, 1], 2: [1], 3: []}]


@pytest.mark.parametrize("used", NESTED_USES, ids=str)
@on_ranks(4)
def test_parts_of_parts_count_on_all_ranks(used: dict[int, list[int]]) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("all", "block", "experts"))
    torch.manual_seed(rank)
    model: typing.Any = Nested().double()
    fully_shard([*model.block.experts], mesh=mesh["experts"], reshard_after_forward=False)
    fully_shard(model.block, mesh=mesh["block"], reshard_after_forward=False)
    fully_shard(model)
    model(torch.full((2, WIDTH), 1.0 + rank, dtype=torch.float64), used[rank]).backward()
    mine = [p.grad.full_tensor() for p in model.block.experts.parameters() if p.grad is not None]
    scale: Tensor = model.block.scale.grad.full_tensor()
    bias: Tensor = model.bias.grad.full_tensor()
    of_ranks: list[typing.Any] = [None] * 4
    dist.all_gather_object(of_ranks, (mine, scale))
    assert not torch.equal(of_ranks[0][1], of_ranks[2][1])
    wholes = [bias, of_ranks[0][1], of_ranks[2][1], *(g for each, _ in of_ranks for g in each)]
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert len(part_sums(grads)) == 1
    for order in (2.0, 1.0, 3.0, math.inf, -math.inf):
        wanted = nn.utils.get_total_norm(wholes, order)
        for each in (grads, grads[::-1]):
            found = nn.utils.get_total_norm(each, order)
            assert abs(found.item() - wanted.item()) < EXACT * wanted.item(), order
    torch.manual_seed(0)
    other = fully_shard(nn.Linear(WIDTH, 1), mesh=mesh["block"])
    other(torch.ones(2, WIDTH)).sum().backward()
    assert not part_sums([typing.cast("Tensor", p.grad) for p in other.parameters()])
    norm = model.clip_grad_norm_(0.5)
    factor = 0.5 / (norm.item() + 1e-6)
    for param, before in ((model.block.scale, scale), (model.bias, bias)):
        assert torch.allclose(param.grad.full_tensor(), before * factor, rtol=EXACT)


@on_ranks(4)
def test_experts_that_are_unfrozen_become_parts(tmp_path: typing.Any) -> None:
    """Train experts that were frozen when the model around them was sharded."""
    path = str(tmp_path / "checkpoint")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(rank % 2)
    model: typing.Any = Choices(3).double()
    model.experts.requires_grad_(requires_grad=False)
    fully_shard([*model.experts], mesh=mesh["efsdp"])
    fully_shard(model)
    inputs = torch.ones(2, WIDTH, dtype=torch.float64)
    model(inputs, [0, 1]).backward()
    model.zero_grad()
    model.double().experts.requires_grad_(requires_grad=True)
    model(inputs, [0, rank % 2]).backward()
    check_norms(model, rank % 2)
    with pytest.raises(CheckpointError, match="the other ranks hold others in its place"):
        save(path, model)


def copied(names: tuple[str, str], seed: int, *, frozen: bool = False) -> typing.Any:
    """Shard experts over the second axis, and the model around them over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    torch.manual_seed(seed)
    model: typing.Any = Choices(2).double()
    model.experts.requires_grad_(not frozen)
    fully_shard([*model.experts], mesh=mesh[names[1]])
    fully_shard(model, mesh=mesh)
    model.experts.requires_grad_(requires_grad=True)
    return model


@pytest.mark.parametrize(("frozen", "full"), [(False, False), (False, True), (True, False)])
@on_ranks(4)
def test_copies_count_once_and_files_have_the_first(
    frozen: bool, full: bool, tmp_path: typing.Any
) -> None:
    """Train copies by data of their own, as where averages over copies come once in many steps."""
    path = str(tmp_path / "file")
    replica = dist.get_rank() // 2
    model = copied(("replicate", "shard"), 0, frozen=frozen)
    plain = Choices(2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in (1.0, 1.0 + replica):
        inputs = torch.full((2, WIDTH), scale, dtype=torch.float64)
        model(inputs, [0, 1]).backward()
        own = [expert.weight.grad.full_tensor() for expert in model.experts]
        own += [expert.bias.grad.full_tensor() for expert in model.experts]
        of_ranks: list[typing.Any] = [None] * 4
        dist.all_gather_object(of_ranks, own)
        root = model.scale.grad.full_tensor()
        squares = [sum(g.square().sum().item() for g in of_ranks[rank]) for rank in (0, 2)]
        wanted = math.sqrt(root.square().sum().item() + sum(squares) / 2)
        norm = model.clip_grad_norm_(0.5)
        assert abs(norm.item() - wanted) < EXACT * wanted
        clipped = root * 0.5 / (wanted + 1e-6)
        assert torch.allclose(model.scale.grad.full_tensor(), clipped, rtol=EXACT)
        optimizer.step()
        optimizer.zero_grad()
    of_ranks = [None] * 4
    dist.all_gather_object(of_ranks, [p.detach().full_tensor() for p in model.parameters()])
    assert torch.equal(of_ranks[0][0], of_ranks[2][0])  # That of the root, which is averaged.
    assert not torch.equal(of_ranks[0][1], of_ranks[2][1])
    if full:
        save_full(path, model)
        load_full(path, plain)
        found = list(plain.parameters())
    else:
        save(path, model)
        load(path, model)
        found = [param.detach().full_tensor() for param in model.parameters()]
    for param, first in zip(found, of_ranks[0], strict=True):
        assert torch.equal(param, first)


@pytest.mark.parametrize(("names", "seeds"), [(("replicate", "shard"), 2), (("dp", "shard"), 1)])
@on_ranks(4)
def test_copies_have_equal_values_and_an_axis_of_replicas(
    names: tuple[str, str], seeds: int, tmp_path: typing.Any
) -> None:
    path = str(tmp_path / "checkpoint")
    model = copied(names, dist.get_rank() // 2 if seeds > 1 else 0)
    with pytest.raises(CheckpointError, match="the other ranks hold others in its place"):
        save(path, model)


@on_ranks(4)
def test_experts_with_names_of_their_own_are_not_saved(tmp_path: typing.Any) -> None:
    """Give experts names of their own on each rank of `ep`."""
    path = str(tmp_path / "checkpoint")
    place = dist.get_rank() % 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model: typing.Any = Choices(1)
    model.experts = nn.ModuleDict({f"{2 * place + i}": nn.Linear(WIDTH, 1) for i in range(2)})
    fully_shard([*model.experts.values()], mesh=mesh["efsdp"])
    fully_shard(model)
    for write, error in ((save, CheckpointError), (save_full, ShardedTensorError)):
        with pytest.raises(error, match=r"of the mesh of ranks \[0, 1, 2, 3\]: the other"):
            write(path, model)
    assert not pathlib.Path(path).exists()


def pickle_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = nn.Linear(WIDTH, WIDTH)
    fully_shard(model, shard_placement_fn=lambda _: mesh["efsdp"])
    copy.deepcopy(model)
    pickle.dumps(model)


def test_plain_experts_are_not_pickled(spawn_errors: Spawn) -> None:
    for error in spawn_errors(pickle_experts, 4):
        assert error.type_name == "ShardedTensorError", error.traceback
        assert "'weight' is a plain parameter on ranks" in error.message


# --- ranks that differ ---------------------------------------------------------------------------


def differ_inside_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(dist.get_rank())
    experts = nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), experts)
    of_experts = {id(param) for param in experts.parameters()}
    fully_shard(model, shard_placement_fn=lambda p: mesh["efsdp"] if id(p) in of_experts else None)
    model(torch.ones(2, WIDTH))


def test_experts_of_one_place_are_compared(spawn_errors: Spawn) -> None:
    for error in spawn_errors(differ_inside_of_a_mesh, 4):
        assert error.type_name == "RankMismatchError"
        assert "'1.weight' was not the same" in error.message


# --- mistakes ------------------------------------------------------------------------------------


def answer_wrongly(kind: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    options: dict[str, typing.Any] = {}
    model = nn.Linear(4, 4)
    answer: typing.Any = {
        "a word": lambda: "experts",
        "no such dim": lambda: Shard(5),
        "too many axes": lambda: init_device_mesh("cpu", (1, 2, 2)),
        "larger": lambda: mesh,
        "number": lambda: mesh["efsdp"],
        "same axis": lambda: mesh["ep"],
    }.get(kind, lambda: None)()
    if kind == "elsewhere":
        from torch.distributed.device_mesh import DeviceMesh

        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        answer = meshes[1 - rank // 2]
    if kind == "larger":
        options["mesh"] = mesh["efsdp"]
    if kind == "number":
        options["reshard_after_forward"] = 4
        answer = mesh["efsdp"]
    if kind == "same axis":
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["ep"], [Shard(0)]))
    before = dict(model.named_parameters())
    classes = type(model)
    try:
        fully_shard(model, shard_placement_fn=lambda _: answer, **options)
    finally:
        assert dict(model.named_parameters()) == before
        assert type(model) is classes


MISTAKES = {
    "a word": ("WrapError", "'experts' for 'weight'; it may return None, Shard"),
    "no such dim": ("WrapError", "which has no dim 5"),
    "too many axes": ("MeshError", "got 3 axes"),
    "larger": ("MeshError", "which does not hold"),
    "elsewhere": ("MeshError", "is not in it"),
    "number": ("WrapError", "shard axes of [4, 2] ranks"),
    "same axis": ("MeshError", "the meshes must have this rank only in common"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_told_before_anything_is_changed(spawn_errors: Spawn, kind: str) -> None:
    type_name, text = MISTAKES[kind]
    for error in spawn_errors(answer_wrongly, 4, kind):
        assert error.type_name == type_name, error
        assert text in error.message, error.message


# --- checkpoints ---------------------------------------------------------------------------------


def step_of(layout: Layout) -> tuple[Model, typing.Any, torch.optim.Optimizer]:
    plain, model = make(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return plain, model, optimizer


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 4, 1), (2, 1, 2)], ids=str)
@on_ranks(4)
def test_checkpoints_of_experts_are_elastic(
    shape: tuple[int, int, int], tmp_path: typing.Any
) -> None:
    path = str(tmp_path / "checkpoint")
    plain, model, optimizer = step_of(Layout((1, 1, 4), experts="dtensor", small=True))
    own, whole = batches(0)
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for each, batch, stepped in ((plain, whole, other), (model, own, optimizer)):
        loss_of(each, batch).backward()
        stepped.step()
        stepped.zero_grad()
    save(path, model, optimizer)
    layout = Layout(shape, experts="dtensor")
    _, loaded, resumed = step_of(layout)
    with torch.no_grad():
        for param in loaded.parameters():
            param.zero_()
    load(path, loaded, resumed)
    assert largest_difference(plain, loaded, layout, grads=False) < EXACT
    own, whole = batches(1)
    for each, batch, stepped in ((plain, whole, other), (loaded, own, resumed)):
        loss_of(each, batch).backward()
        stepped.step()
    assert largest_difference(plain, loaded, layout, grads=False) < EXACT


def save_plain_experts(path: str, kind: str) -> None:
    _, model, _ = step_of(Layout((1, 2, 2)))
    if kind == "save":
        save(path, model)
    elif kind == "save_full":
        save_full(path, model)
    else:
        options = StateDictOptions(full_state_dict=True)
        get_model_state_dict(model, options=options)


@pytest.mark.parametrize("kind", ["save", "save_full", "full state dict"])
def test_plain_experts_under_one_name_are_not_saved(
    spawn_errors: Spawn, kind: str, tmp_path: typing.Any
) -> None:
    for error in spawn_errors(save_plain_experts, 4, str(tmp_path / "checkpoint"), kind):
        assert "the other ranks hold others in its place" in error.message


def search_along_lines() -> None:
    _, model = make(Layout((1, 2, 2)))
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: loss_of(model, batches(0)[0]).detach())


def test_lbfgs_refuses_plain_experts(spawn_errors: Spawn) -> None:
    for error in spawn_errors(search_along_lines, 4):
        assert error.type_name == "OptimizerError"
        assert "experts.up'" in error.message
