"""`auto_shard(experts=...)`: stacks that are cut over an axis train as in one process."""

from __future__ import annotations

import copy
import dataclasses
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkit
from experts import EXACT, NUM_EXPERTS, Block, Experts, Model, batches, loss_of
from reference import step_all
from shardkit import (
    MixedPrecisionPolicy,
    ShardedTensor,
    StateError,
    WrapError,
    auto_shard,
    checkpoint_module,
)
from shardkit.checkpoint import load, save
from step_traffic import counted, total
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks are used, and how modules are named."""

    # Sizes of the axes; the last one is `ep`, where `names` say nothing else.
    shape: tuple[int, ...]
    experts: str = "Experts"  # What holds experts.
    names: tuple[str, ...] = ()  # Names of the axes.
    options: tuple[str, ...] = ()  # More arguments of `auto_shard`, by name.


class Around(nn.Module):
    """A module around another one, as wrappers make it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Call the inner module."""
        result: torch.Tensor = self.inner(*args)
        return result


def sharded_inside(module: nn.Module, **options: typing.Any) -> nn.Module:
    """Shard a module, and return another one around experts."""
    sharded: nn.Module = shardkit.fully_shard(module, **options)
    return Around(sharded) if isinstance(module, Experts) else sharded


OPTIONS: dict[str, typing.Any] = {
    "balanced": {"policy": None},
    "list": {"policy": {("blocks.0", "blocks.1"): {}}},
    "checkpointed": {"before": checkpoint_module},
    "by the caller": {"auto_wrapper_callable": shardkit.fully_shard},
    "inside of others": {"auto_wrapper_callable": sharded_inside},
    "whole norms": {"shard_placement_fn": lambda p: Replicate() if p.ndim == 1 else None},
    "fp32": {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64)},
    "zero2": {"strategy": "zero2"},
    "hybrid": {"strategy": "hybrid"},
}


def mesh_of(layout: Layout) -> DeviceMesh:
    names = layout.names or ("replicate", "fsdp", "ep")[-len(layout.shape) :]
    return init_device_mesh("cpu", layout.shape, mesh_dim_names=names)


def make(layout: Layout) -> tuple[Model, typing.Any, shardkit.ShardPlan]:
    """Return the plain model of one process, the sharded one, and its plan."""
    torch.manual_seed(3)
    plain = Model().double()
    model: typing.Any = copy.deepcopy(plain)
    mesh = mesh_of(layout)
    for block in model.blocks:
        block.ep = mesh["ep"].get_group()
    arguments: dict[str, typing.Any] = {"policy": {"blocks.*": {}}}
    for name in layout.options:
        arguments |= OPTIONS[name]
    plan = auto_shard(model, mesh, experts={layout.experts: "ep"}, **arguments)
    return plain, model, plan


def largest_difference(plain: nn.Module, model: nn.Module, *, grads: bool) -> float:
    worst = 0.0
    for (name, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert isinstance(param, ShardedTensor), name
        assert param.shape == whole.shape, name
        wanted, found = (whole.grad, param.grad) if grads else (whole, param)
        assert wanted is not None
        assert found is not None, name
        difference = typing.cast("typing.Any", found).full_tensor() - wanted
        worst = max(worst, difference.abs().max().item())
    return worst


def compare_training(layout: Layout) -> None:
    plain, model, plan = make(layout)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(STEPS):
        own, whole = batches(step)
        with counted(model) as found:
            losses = [loss_of(plain, whole), loss_of(model, own)]
            for loss in losses:
                loss.backward()
        if step > 0 and not layout.options:  # The order is known.
            assert total(found) == plan.traffic()
        mean = losses[1].detach().clone()
        dist.all_reduce(mean)
        assert abs(mean / dist.get_world_size() - losses[0].detach()) < EXACT
        assert largest_difference(plain, model, grads=True) < EXACT
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
        assert abs(norms[1].item() - norms[0].item()) < EXACT
        step_all(optimizers)
    assert largest_difference(plain, model, grads=False) < EXACT
    assert model.memory_stats()["shard_nbytes"] == plan.memory.shard_nbytes
    of_experts = sum(p.to_local().numel() for p in model.blocks[0].experts.parameters())
    every = torch.tensor(of_experts)
    dist.all_reduce(every)
    replicas = layout.shape[0] if len(layout.shape) > 2 else 1
    assert every == replicas * sum(p.numel() for p in plain.blocks[0].experts.parameters())
    model.check_replicas()


LAYOUTS = [
    Layout((2, 2)),
    Layout((1, 4), experts="blocks.*.experts", options=("whole norms",)),
    Layout((2, 1, 2), options=("hybrid", "checkpointed")),
    Layout((2, 2), names=("ep", "fsdp"), options=("list", "zero2")),
    Layout((4, 1), options=("balanced",)),
    Layout((2, 2), options=("by the caller",)),
    Layout((2, 2), options=("inside of others",)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_equals_one_process(spawn: Spawn, layout: Layout) -> None:
    spawn(compare_training, 4, layout)


def test_two_ranks(spawn: Spawn) -> None:
    spawn(compare_training, 2, Layout((1, 2)))


# --- what is there already, and mistakes ---------------------------------------------------------


@on_ranks(4)
def test_dtensors_are_taken_as_they_are() -> None:
    layout = Layout((2, 2))
    torch.manual_seed(3)
    plain = Model().double()
    model: typing.Any = copy.deepcopy(plain)
    mesh = mesh_of(layout)
    for block in model.blocks:
        block.ep = mesh["ep"].get_group()
        for name, param in [*block.experts.named_parameters()]:
            part = distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])
            block.experts.register_parameter(name, nn.Parameter(part))
    plan = auto_shard(model, mesh, Block, experts={Experts: "ep"})
    own, whole = batches(0)
    loss_of(plain, whole).backward()
    loss_of(model, own).backward()
    assert largest_difference(plain, model, grads=True) < EXACT
    assert sum(group.numel for group in plan.groups) == sum(p.numel() for p in plain.parameters())
    assert "<experts over ep=2>" in str(plan)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
@on_ranks(4)
def test_a_model_on_meta_is_filled_as_in_one_process(
    shape: tuple[int, int], tmp_path: typing.Any
) -> None:
    path = str(tmp_path / "checkpoint")
    layout = Layout(shape)
    _, trained, _ = make(layout)
    save(path, trained)
    with torch.device("meta"):
        model: typing.Any = Model().double()
    mesh = mesh_of(layout)
    for block in model.blocks:
        block.ep = mesh["ep"].get_group()

    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param)

    torch.manual_seed(7)
    auto_shard(model, mesh, Block, experts={Experts: "ep"}, param_init_fn=fill)
    plain = Model().double()
    torch.manual_seed(7)
    for module in plain.modules():
        fill(module)
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), wanted)
    load(path, model)
    for loaded, wanted in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(loaded.full_tensor(), wanted.full_tensor())


@on_ranks(4)
def test_mixed_precision() -> None:
    plain, model, _ = make(Layout((2, 2), options=("fp32",)))
    seen = []
    model.blocks[0].experts.register_forward_pre_hook(
        lambda m, _: seen.append((m.up.dtype, m.up.to_local().dtype))
    )
    own, whole = batches(0)
    loss_of(plain, whole).backward()
    loss_of(model, own).backward()
    assert seen == [(torch.float32, torch.float32)]
    assert 1e-12 < largest_difference(plain, model, grads=True) < 1e-5


def tie(model: typing.Any) -> None:
    """Share a stack between two blocks, and have one of them hold it under another name, too."""
    first, second = (block.experts for block in model.blocks)
    second.up = first.up
    first.register_parameter("also_up", first.up)


@on_ranks(4)
def test_tied_experts_stay_tied() -> None:
    torch.manual_seed(3)
    plain: typing.Any = Model().double()
    tie(plain)
    model = copy.deepcopy(plain)
    mesh = mesh_of(Layout((2, 2)))
    for block in model.blocks:
        block.ep = mesh["ep"].get_group()
    auto_shard(model, mesh, Block, experts={"blocks.0.experts": "ep", "blocks.1.experts": "ep"})
    first, second = (block.experts for block in model.blocks)
    assert first.up is second.up
    assert first.also_up is first.up
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(STEPS):
        own, whole = batches(step)
        for m, batch, optimizer in zip((plain, model), (whole, own), optimizers, strict=True):
            loss_of(m, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(plain, model, grads=False) < EXACT


@on_ranks(4)
def test_a_module_that_is_not_named_stays_tied_to_experts() -> None:
    model: typing.Any = Model()
    tie(model)
    auto_shard(model, mesh_of(Layout((2, 2))), Block, experts={"blocks.0.experts": "ep"})
    assert model.blocks[1].experts.up is model.blocks[0].experts.up
    assert model.blocks[0].experts.also_up is model.blocks[0].experts.up
    assert len(model.blocks[1].experts.up.to_local()) < model.blocks[1].experts.up.numel() / 2


@on_ranks(4)
def test_gradients_hooks_and_attributes_go_along() -> None:
    model: typing.Any = Model()
    up: typing.Any = model.blocks[0].experts.up
    called = []
    whole = torch.arange(float(up.numel())).view_as(up)
    up.grad = whole.clone()
    up.is_decayed = False
    up.register_post_accumulate_grad_hook(called.append)
    mesh = mesh_of(Layout((2, 2)))
    for block in model.blocks:
        block.ep = mesh["ep"].get_group()
    auto_shard(model, mesh, Block, experts={Experts: "ep"})
    up = model.blocks[0].experts.up
    assert up.is_decayed is False
    assert torch.equal(up.grad.full_tensor(), whole)
    own, _ = batches(0)
    loss_of(model.double(), own).backward()
    assert [each is up for each in called] == [True]


class Half(torch.Tensor):
    """A tensor that torch.chunk may not cut as it cuts others."""


def mistaken(kind: str) -> None:
    mesh: typing.Any = mesh_of(Layout((2, 2)))
    model: typing.Any = Model()
    options: dict[str, typing.Any] = {"policy": Block, "experts": {"Experts": "ep"}}
    if kind == "no such axis":
        options["experts"] = {"Experts": "tp"}
    if kind == "own mesh":
        mesh = shardkit.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    if kind == "one axis":
        mesh = mesh["ep"]
    if kind == "group's mesh":
        options["policy"] = {"blocks.0": {"mesh": mesh["fsdp"]}}
    if kind == "strategy":
        options["strategy"] = "hybrid"
    if kind == "uneven":
        model.blocks[1].experts.down = nn.Parameter(torch.zeros(NUM_EXPERTS - 1, 2, 2))
    if kind == "a subclass":
        experts = model.blocks[0].experts
        experts.up = nn.Parameter(Half(experts.up.detach()))
    if kind == "another axis":
        experts = model.blocks[0].experts
        experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh["fsdp"], [Shard(0)]))
    if kind == "another dim":
        experts = model.blocks[0].experts
        experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh["ep"], [Shard(1)]))
    before = dict(model.named_parameters())
    try:
        auto_shard(model, mesh, **options)
    finally:
        assert dict(model.named_parameters()) == before
        assert not any(isinstance(p, ShardedTensor) for p in before.values())
        num_split = sum(isinstance(param, DTensor) for param in before.values())
        assert num_split == kind.startswith("another")


MISTAKES = {
    "no such axis": ("MeshError", "an axis 'tp', which the mesh with axes ('fsdp', 'ep') has not"),
    "own mesh": ("MeshError", "with experts= the mesh is torch's"),
    "one axis": ("MeshError", "and one more (shard) or two more"),
    "group's mesh": ("MeshError", "(blocks.0) a mesh of its own"),
    "strategy": ("MeshError", "the strategy 'hybrid' wants a mesh"),
    "uneven": ("WrapError", "stacks of equally many experts"),
    "a subclass": ("WrapError", "blocks.0.experts.up is a Half, which experts= does not cut"),
    "another axis": ("WrapError", "Leave it whole, or make it a DTensor with Shard(0)"),
    "another dim": ("WrapError", "blocks.0.experts.up is a DTensor"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_told_before_anything_is_changed(spawn_errors: Spawn, kind: str) -> None:
    type_name, text = MISTAKES[kind]
    for error in spawn_errors(mistaken, 4, kind):
        assert error.type_name == type_name, error
        assert text in error.message, error.message


@on_ranks(4)
def test_hooks_that_expect_whole_gradients_are_refused() -> None:
    model: typing.Any = Model()
    handle = model.blocks[1].experts.down.register_hook(lambda grad: grad / 2)
    before = dict(model.named_parameters())
    mesh = mesh_of(Layout((2, 2)))
    with pytest.raises(WrapError, match=r"blocks\.1\.experts\.down has a hook on its gradient"):
        auto_shard(model, mesh, Block, experts={Experts: "ep"})
    assert all(param is before[name] for name, param in model.named_parameters())
    assert not any(isinstance(param, (DTensor, ShardedTensor)) for param in before.values())
    handle.remove()
    auto_shard(model, mesh, Block, experts={Experts: "ep"})


@on_ranks(2)
def test_an_optimizer_made_before_is_told_that_experts_were_replaced() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "ep"))
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    auto_shard(model, mesh, Block, experts={"Experts": "ep"})
    with pytest.raises(StateError, match="Make the optimizer after auto_shard"):
        optimizer.zero_grad()
