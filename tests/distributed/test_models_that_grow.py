"""Models that change while they train: new heads, grown embeddings, adapters."""

from __future__ import annotations

import copy
import gc
import math
import pathlib
import typing
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize

import shardkit.checkpoint
from reference import Differences, assert_within, make_mesh, step_all
from shardkit import ShardedTensor, fully_shard, init_device_mesh
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-12


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def ids_of(rank: int, step: int) -> Tensor:
    return torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def note_step(
    differences: Differences, model: nn.Module, plain: nn.Module, optimizers: typing.Any, step: int
) -> None:
    ranks = range(dist.get_world_size())
    model(ids_of(dist.get_rank(), step)).square().sum().backward()
    (sum(plain(ids_of(rank, step)).square().sum() for rank in ranks) / len(ranks)).backward()
    differences.note_grads(model, plain)
    step_all(optimizers)


def exchange(
    mesh_shape: tuple[int, ...], what: str, is_own_group: bool, way: str, folder: str
) -> Differences:
    """Train, put in a larger part, train on, save, load into a model made so from the start."""
    torch.manual_seed(0)
    plain, mesh = Classifier().double(), make_mesh(mesh_shape)
    model = copy.deepcopy(plain)
    if is_own_group:
        fully_shard(getattr(model, what), mesh)
    fully_shard(model.body[0], mesh)
    fully_shard(model, mesh)
    adam = torch.optim.Adam
    optimizers = [adam(each.parameters(), lr=0.1) for each in (model, plain)]
    differences = Differences()
    for step in range(2):
        note_step(differences, model, plain, optimizers, step)
    grown = nn.Linear(6, 5) if what == "head" else nn.Embedding(9, 6)
    grown = grown.double()
    with torch.no_grad():
        old = getattr(model, what).weight.full_tensor()
        grown.weight[: len(old)] = old
    setattr(plain, what, copy.deepcopy(grown))
    setattr(model, what, fully_shard(grown, mesh))
    if way == "new optimizer":
        optimizers = [adam(each.parameters(), lr=0.1) for each in (model, plain)]
    else:
        for optimizer, each in zip(optimizers, (model, plain), strict=True):
            optimizer.add_param_group({"params": list(getattr(each, what).parameters())})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2, 5):
            note_step(differences, model, plain, optimizers, step)
    differences.note_parameters(model, plain)
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    stats = model.memory_stats()
    assert stats["unsharded_nbytes"] == 0
    assert stats["unsynced_grad_nbytes"] == 0
    if way == "new optimizer":
        path = pathlib.Path(folder, "saved")
        shardkit.checkpoint.save(path, model, optimizers[0])
        again = copy.deepcopy(plain)
        with torch.no_grad():
            for param in again.parameters():
                param.zero_()
        fully_shard(again, mesh)
        optimizers[0] = adam(again.parameters(), lr=0.1)
        shardkit.checkpoint.load(path, again, optimizers[0])
        note_step(differences, again, plain, optimizers, 6)
        differences.note_parameters(again, plain)
    return differences


@pytest.mark.parametrize("way", ["new optimizer", "add_param_group"])
@pytest.mark.parametrize("is_own_group", [True, False], ids=["own group", "root's group"])
@pytest.mark.parametrize("what", ["head", "embed"])
def test_a_larger_part_is_taken_in(
    spawn: Spawn, tmp_path: pathlib.Path, what: str, way: str, *, is_own_group: bool
) -> None:
    by_rank = spawn(exchange, 2, (2,), what, is_own_group, way, str(tmp_path))
    assert_within(by_rank, grad=TOLERANCE, parameter=TOLERANCE)


def test_a_larger_part_on_a_mesh_of_two_axes(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    by_rank = spawn(exchange, 4, (2, 2), "head", True, "new optimizer", str(tmp_path))
    assert_within(by_rank, grad=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize("is_own_group", [False, True])
@on_ranks(2)
def test_a_new_head_amid_a_step(is_own_group: bool) -> None:
    """Put in a new head between two micro-batches, and while an output waits for its backward."""
    torch.manual_seed(0)
    plain, mesh = Classifier().double(), make_mesh((2,))
    model = copy.deepcopy(plain)
    fully_shard(model.body, mesh)
    if is_own_group:
        fully_shard(model.head, mesh)
    fully_shard(model, mesh)
    old, plain_old = model.head, plain.head
    head = nn.Linear(6, 2).double()
    ranks = range(2)
    model.set_requires_gradient_sync(False)
    model(ids_of(dist.get_rank(), 0)).sum().backward()
    (sum(plain(ids_of(rank, 0)).sum() for rank in ranks) / 2).backward()
    waiting = model(ids_of(dist.get_rank(), 1)).sum()
    plain_waiting = sum(plain(ids_of(rank, 1)).sum() for rank in ranks) / 2
    plain.head, model.head = copy.deepcopy(head), fully_shard(head, mesh)
    model.set_requires_gradient_sync(True)
    if is_own_group:
        old.set_requires_gradient_sync(True)
    now = model(ids_of(dist.get_rank(), 2)).sum()
    plain_now = sum(plain(ids_of(rank, 2)).sum() for rank in ranks) / 2
    (waiting + now).backward()
    (plain_waiting + plain_now).backward()
    differences = Differences()
    differences.note_grads(model, plain)
    if is_own_group:
        differences.note_grads(old, plain_old)
    assert_within([differences], grad=TOLERANCE)


def take_out(mesh_shape: tuple[int, ...], place: str) -> tuple[Differences, list[bool]]:
    """Train, take a part out, train on; return also whether it was freed by then."""
    torch.manual_seed(0)
    plain, mesh = Classifier().double(), make_mesh(mesh_shape)
    model = copy.deepcopy(plain)
    for layer in model.body:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh)
    fully_shard(model.head, mesh)
    fully_shard(model, mesh)
    differences = Differences()
    note_step(differences, model, plain, (), 0)
    gone = model.head if place == "head" else model.body[2]
    before = model.memory_stats()["shard_nbytes"]
    part = sum(param.to_local().nbytes for param in gone.parameters())
    pieces = [weakref.ref(param) for param in [*gone.modules()]]
    for each in (model, plain):
        if place == "head":
            each.head = nn.Identity()
        else:
            del each.body[2]
    del gone, layer  # The last of them, perhaps.
    for step in range(1, 3):
        note_step(differences, model, plain, (), step)
    gc.collect()
    assert model.memory_stats()["shard_nbytes"] <= before - part
    return differences, [piece() is None for piece in pieces]


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("place", ["head", "layer"])
def test_what_is_taken_out_is_freed(spawn: Spawn, mesh_shape: tuple[int, ...], place: str) -> None:
    found = spawn(take_out, math.prod(mesh_shape), mesh_shape, place)
    assert_within([differences for differences, _ in found], grad=TOLERANCE)
    assert all(all(freed) for _, freed in found)


@on_ranks(2)
def test_what_is_taken_out_may_come_back() -> None:
    """As where features are wanted: the head goes, runs alone, and comes back."""
    torch.manual_seed(0)
    plain, mesh = Classifier().double(), make_mesh((2,))
    model = copy.deepcopy(plain)
    fully_shard(model.head, mesh)
    fully_shard(model, mesh)
    differences = Differences()
    for step in range(0, 6, 2):
        note_step(differences, model, plain, (), step)
        outputs = []
        for each in (model, plain):
            head, each.head = each.head, nn.Identity()
            features = each(torch.arange(7))
            outputs.append(head(features))
            outputs[-1].square().sum().backward()
            each.head = head
        differences.note("features", *outputs)
        differences.note_grads(model, plain)
        for each in (model, plain):
            each.zero_grad()
        note_step(differences, model, plain, (), step + 1)
        for each in (model, plain):
            each.zero_grad()
    assert_within([differences], grad=TOLERANCE, features=TOLERANCE)


@on_ranks(2)
def test_a_new_head_may_be_prefetched() -> None:
    mesh = make_mesh((2,))
    model = Classifier()
    fully_shard(model.body, mesh)
    fully_shard(model, mesh)
    model(ids_of(0, 0)).sum().backward()
    model.head = fully_shard(nn.Linear(6, 2), mesh)
    model.set_modules_to_forward_prefetch([model.body, model.head])
    model.set_modules_to_backward_prefetch([model.head])
    model(ids_of(0, 1)).sum().backward()
    assert model.head.weight.grad is not None
    model.head = fully_shard(nn.Linear(6, 3), mesh)  # What is taken out is prefetched no more.
    model(ids_of(0, 2)).sum().backward()
    assert model.head.weight.grad is not None


class Stack(nn.Module):
    """Layers, of which a forward may use the first few only, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, num: int = 3) -> Tensor:
        for layer in self.layers[:num]:
            x = layer(x)
        return self.head(x)


@on_ranks(2)
def test_a_part_that_ran_alone_belongs_to_a_model_that_has_grown_since() -> None:
    """A forward of the part alone must not make it a root again, amid what the model keeps."""
    mesh, x = make_mesh((2,)), torch.ones(1, 4)
    model = Stack()
    for module in (*model.layers, model.head, model):
        fully_shard(module, mesh, reshard_after_forward=False)
    alone = model.layers[0](x).detach()
    model.head = fully_shard(nn.Linear(4, 2), mesh, reshard_after_forward=False)
    waiting = model(x, num=2)
    assert torch.equal(model.layers[0](x), alone)
    assert torch.equal(model(x, num=2), waiting)
    assert model(x).shape == (1, 2)


# --- adapters -------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """As peft does it: a layer, and two small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def adapt(model: nn.Module) -> None:
    for param in model.parameters():
        param.requires_grad_(False)
    torch.manual_seed(1)
    model.body[2] = Adapted(model.body[2])
    model.body[2].double()


def train_adapters(world_size: int, holder: str, remedy: bool) -> tuple[Differences, list[str]]:
    torch.manual_seed(0)
    plain, mesh = Classifier().double(), make_mesh((world_size,))
    model = copy.deepcopy(plain)
    fully_shard(model.body[0], mesh)
    fully_shard(model, mesh)
    model(ids_of(0, 0)).sum().backward()
    model.zero_grad()
    for each in (model, plain):
        adapt(each)
    trained = Wrapper(model) if holder == "around" else model
    if remedy and holder == "around":
        fully_shard(trained, mesh)
    elif remedy:
        inside = [
            m
            for m in model.modules()
            if any(type(p) is torch.nn.Parameter for p in m.parameters(recurse=False))
        ]
        fully_shard(inside, mesh)
    optimizers = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for each in (trained, plain)
    ]
    differences = Differences()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if remedy:
                note_step(differences, model, plain, optimizers, step)
            else:
                trained(ids_of(dist.get_rank(), step)).sum().backward()
                optimizers[0].step()
    return differences, [str(each.message) for each in caught]


@pytest.mark.parametrize("holder", ["around", "inside"])
def test_adapters_that_no_group_holds_are_told_once(spawn: Spawn, holder: str) -> None:
    for _, said in spawn(train_adapters, 2, 2, holder, False):
        assert len(said) == 1
        assert "no group of fully_shard holds 'model.body.2.down.weight'" in said[0] or (
            "no group of fully_shard holds 'body.2.down.weight'" in said[0]
        )
        line = {"around": "fully_shard on the Wrapper", "inside": "call fully_shard([m for m in"}
        assert line[holder] in said[0]


def train_a_plain_head() -> list[str]:
    """Give a model of which the root holds no parameters itself a head that is not sharded."""
    mesh = make_mesh((2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if step == 1:
                model[1] = nn.Linear(4, 7)
                optimizer.add_param_group({"params": model[1].parameters()})
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught]


def test_a_head_that_is_not_sharded_is_told_with_its_line(spawn: Spawn) -> None:
    for [said] in spawn(train_a_plain_head, 2):
        assert "no group of fully_shard holds '1.weight', '1.bias'" in said
        assert "after it was sharded: call fully_shard([m for m in" in said


@pytest.mark.parametrize("holder", ["around", "inside"])
def test_the_remedy_averages_them(spawn: Spawn, holder: str) -> None:
    results = spawn(train_adapters, 2, 2, holder, True)
    assert [said for _, said in results] == [[], []]
    assert_within([differences for differences, _ in results], grad=TOLERANCE)


def test_on_one_rank_nothing_is_told(spawn: Spawn) -> None:
    assert spawn(train_adapters, 1, 1, "inside", False)[0][1] == []


def beside_a_sharded_model() -> list[str]:
    """A model of its own, which nobody sharded, and parameters that are ignored."""
    first, beside = fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)
    first(torch.ones(1, 4)).sum().backward()
    ignored = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(ignored, ignored_params=set(ignored[1].parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module, params in ((beside, beside.parameters()), (ignored, ignored[1].parameters())):
            optimizer = torch.optim.SGD(params, lr=0.1)
            module(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    return [str(each.message) for each in caught]


def test_what_is_beside_or_ignored_is_not_told(spawn: Spawn) -> None:
    assert spawn(beside_a_sharded_model, 2) == [[], []]


# --- what cannot be done to a sharded model -------------------------------------------------------


def resize_in_place() -> None:
    model = fully_shard(nn.Embedding(4, 2))
    model.weight.data = torch.zeros(6, 2)


def ask_for_the_storage() -> None:
    fully_shard(nn.Embedding(4, 2)).weight.storage()


def remove_a_parametrization() -> None:
    layer = fully_shard(parametrizations.weight_norm(nn.Linear(4, 4)))
    parametrize.remove_parametrizations(layer, "weight")


def sequence_parallel_on_a_mesh_of_shardkit() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(nn.Sequential(nn.LayerNorm(8)), mesh["tp"], {"0": SequenceParallel()})


@pytest.mark.parametrize(
    ("wrong", "said", "line"),
    [
        (resize_in_place, "shape (4, 2) cannot take values of shape (6, 2)", "before fully_shard"),
        (ask_for_the_storage, "no storage of the whole tensor", "save_full(path, model"),
        (remove_a_parametrization, "the parametrization of 'weight'", "before fully_shard"),
        pytest.param(
            sequence_parallel_on_a_mesh_of_shardkit,
            "no attribute '_",
            "torch's init_device_mesh",
            marks=pytest.mark.skipif(
                torch.__version__.startswith(("2.9.", "2.10.")),
                reason="takes a mesh of shardkit: it asks for public attributes alone",
            ),
        ),
    ],
)
def test_the_error_shows_what_to_do(
    spawn_errors: Spawn, wrong: typing.Any, said: str, line: str
) -> None:
    for error in spawn_errors(wrong, 2):
        assert said in error.message
        assert line in error.message


class ShardedTooEarly(nn.Module):
    """Is sharded before its layers are made."""

    def __init__(self) -> None:
        super().__init__()
        fully_shard(self)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return self.layer(x)


@on_ranks(2)
def test_a_module_that_was_sharded_before_it_had_layers_is_named() -> None:
    model = ShardedTooEarly()
    model(torch.ones(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="They came into the FSDPShardedTooEarly after it was"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
