"""Several modules in one group, several roots, other methods than forward, passes cut short."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import CASES, Case
from parity import Ranks, Run, compare_training, on_meshes
from reference import (
    STEPS,
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
    global_batch,
    make_mesh,
    my_batch,
    shard,
    step_all,
)
from shardkit import (
    FSDPModule,
    ShardedTensor,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    summon_full_params,
)
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


TOLERANCE = 1e-6


def check(by_rank: Sequence[Differences]) -> None:
    assert_within(by_rank, **TRAINED)


# --- lists of modules ---------------------------------------------------------------------------


def train_lists(ranks: Ranks, choice: tuple[list[list[int]], bool]) -> Differences:
    together, reshard = choice
    reference = CASES["mlp"].make()
    model, mesh = ranks.put(reference), ranks.mesh
    for indices in together:
        modules = [model.layers[i] for i in indices]
        assert fully_shard(modules, mesh, reshard_after_forward=reshard) is modules
    fully_shard(model, mesh)
    differences = compare_training(CASES["mlp"], model, reference, ranks=ranks)
    stats = model.memory_stats()
    assert stats["unsharded_nbytes"] == 0
    return differences


@on_meshes((2,))
def test_a_list_of_modules_is_one_group(run: Run) -> None:
    lists = ([[0, 1, 2]], [[0, 2], [1]], [[2, 0]])
    choices = {f"{each}, {mode}": (each, mode) for each in lists for mode in (True, False)}
    assert_each_within(run.each(choices, train_lists), **TRAINED)


def train_without_a_root(ranks: Ranks, choice: tuple[list[list[int]], bool | None]) -> Differences:
    """Shard lists of modules, and nothing around them."""
    together, reshard = choice
    reference = CASES["mlp"].make()
    model, mesh = ranks.put(reference), ranks.mesh
    for indices in together:
        fully_shard([model.layers[i] for i in indices], mesh, reshard_after_forward=reshard)
    assert not isinstance(model, FSDPModule)
    return compare_training(CASES["mlp"], model, reference, ranks=ranks)


@on_meshes((2,), (3,), (2, 2))
def test_a_list_needs_no_root(run: Run) -> None:
    lists = ([[0, 1, 2]], [[2, 0], [1]])
    choices = {f"{each}, {mode}": (each, mode) for each in lists for mode in (None, True)}
    assert_each_within(run.each(choices, train_without_a_root), **TRAINED)


def train_list_with_a_frozen_layer(ranks: Ranks) -> Differences:
    reference = CASES["mlp"].make()
    model, mesh = ranks.put(reference), ranks.mesh
    for each in (model, reference):
        each.layers[0].requires_grad_(requires_grad=False)
    fully_shard([model.layers[0], model.layers[1]], mesh)
    fully_shard(model, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compare_training(CASES["mlp"], model, reference, ranks=ranks)


@on_meshes((2,), xla=())
def test_a_list_whose_first_layer_is_frozen(run: Run) -> None:
    check(run(train_list_with_a_frozen_layer))


@on_ranks(2)
def test_a_list_may_lie_half_in_a_root() -> None:
    """One module of a list is in a root, the other is called after it, by itself."""
    case = CASES["mlp"]
    reference = case.make()
    model = copy.deepcopy(reference)
    first, second, third = model.layers
    mesh = make_mesh((dist.get_world_size(),))
    fully_shard([first, third], mesh)
    body = fully_shard(nn.Sequential(first, nn.Tanh(), second, nn.Tanh()), mesh)
    model.forward = lambda x: third(body(x))
    check([compare_training(case, model, reference)])


# --- unsharded by hand before anything ran ------------------------------------------------------


def train_after_unshard(names: list[str], how: str) -> Differences:
    case = CASES["mlp"]
    reference = case.make()
    model = copy.deepcopy(reference)
    mesh = make_mesh((dist.get_world_size(),))
    fully_shard([model.layers[0], model.layers[2]], mesh)
    fully_shard(model.layers[1], mesh)
    fully_shard(model, mesh)
    model.layers[1].set_modules_to_forward_prefetch([model.layers[2]])
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1]])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    found = [model.get_submodule(name).unshard(async_op=how != "at once") for name in names]
    handles = [handle for handle in found if handle is not None]
    differences = Differences()
    if how != "not waited for":
        for handle in handles:
            handle.wait()
        shown = dict(model.named_parameters())
        for name in filter(None, names):  # The root has no parameters of its own.
            for key, whole in reference.get_submodule(name).named_parameters(name):
                differences.note("shown", shown[key].detach(), whole.detach())
    for step in range(3):
        case.loss(model, my_batch(case, step)).backward()
        case.loss(reference, global_batch(case, step)).backward()
        differences.note_grads(model, reference)
        step_all(optimizers)
    for handle in handles:
        handle.wait()  # Too late, and harmless.
    assert model.memory_stats()["unsharded_nbytes"] == 0
    differences.note_parameters(model, reference)
    return differences


@pytest.mark.parametrize(
    "names",
    [["layers.1"], ["layers.2"], ["layers.2", "layers.0", "layers.1"], ["", "layers.0"]],
    ids=str,
)
def test_modules_are_unsharded_before_the_first_forward(spawn: Spawn, names: list[str]) -> None:
    ways = {how: how for how in ("at once", "waited for", "not waited for")}
    for how, found in spawn_each(spawn, ways, train_after_unshard, 3, names).items():
        shown = {} if how == "not waited for" else {"shown": 0.0}
        assert_within(found, how, grad=TOLERANCE, parameter=TOLERANCE, **shown)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@on_ranks(2)
def test_backward_gives_back_what_was_unsharded_since_forward(
    reshard_after_forward: bool | None,
) -> None:
    """Also of the root, which backward enters but does not leave before its end."""
    case = CASES["gpt"]
    reference = case.make()
    options = {"reshard_after_forward": reshard_after_forward}
    model: typing.Any = shard(case, copy.deepcopy(reference), make_mesh((2,)), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference)]
    differences = Differences()
    for step in range(2):
        loss = case.loss(model, my_batch(case, step))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        loss.backward()
        case.loss(reference, global_batch(case, step)).backward()
        assert model.memory_stats()["unsharded_nbytes"] == 0
        differences.note_grads(model, reference)
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.step()
            each.zero_grad()  # It finds the sharded parameters.
    differences.note_parameters(model, reference)
    assert_within([differences], grad=TOLERANCE, parameter=TOLERANCE)


class Chunked(nn.Module):
    """The loss calls the head on its own, chunk by chunk, after the forward of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.body(x)))

    def loss(self, x: Tensor) -> Tensor:
        hidden = self(x)
        return sum(self.head(chunk).square().sum() for chunk in hidden.chunk(2)) / len(x)


CHUNKED = Case(
    Chunked,
    lambda model: [model.body],
    lambda generator: (torch.randn(4, 7, generator=generator), torch.empty(4)),
    lambda model, batch: model.loss(batch[0]),
)


@on_ranks(2)
def test_a_head_that_runs_alone_in_chunks() -> None:
    torch.manual_seed(3)
    reference = Chunked()
    model = copy.deepcopy(reference)
    mesh = make_mesh((dist.get_world_size(),))
    fully_shard(model.body, mesh)
    fully_shard([model.norm, model.head], mesh)
    fully_shard(model, mesh)
    check([compare_training(CHUNKED, model, reference)])


# --- containers with a forward of their own -----------------------------------------------------


class Chain(nn.ModuleDict):
    """As torchvision's `IntermediateLayerGetter`, timm's and SpeechBrain's containers."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.values():
            x = torch.tanh(module(x))
        return x


class Experts(nn.ModuleList):
    """It has a parameter of its own, and slices itself."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        self.scale = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * sum(expert(x) for expert in self[1:]) + self[0](x)


def nested(root: type[nn.Module]) -> nn.Module:
    """Return a root of a class, with a container of the other class in it."""
    if root is Chain:
        return Chain(
            {"first": nn.Linear(7, 6), "last": Experts([nn.Linear(6, 5) for _ in range(3)])}
        )
    inner = (Chain({"up": nn.Linear(7, 6), "down": nn.Linear(6, 5)}) for _ in range(3))
    return Experts([*inner])


def train_containers(ranks: Ranks, root: type[nn.Module], reshard: bool) -> Differences:
    case = dataclasses.replace(
        CASES["mlp"],
        make=functools.partial(nested, root),
        groups=lambda model: [m for m in model.children() if not isinstance(m, nn.Linear)],
    )
    reference = ranks.make(case)
    model = ranks.shard(case, reference, reshard_after_forward=reshard)
    assert all(isinstance(each, FSDPModule) for each in (model, *case.groups(model)))
    differences = compare_training(case, model, reference, ranks=ranks)
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return differences


@pytest.mark.parametrize("root", [Chain, Experts])
@on_meshes((2,))
def test_containers_with_a_forward_are_sharded_as_other_modules(
    run: Run, root: type[nn.Module]
) -> None:
    choices = {f"{mode}": mode for mode in (True, False)}
    assert_each_within(run.each(choices, train_containers, root), **TRAINED)


# --- methods other than forward -----------------------------------------------------------------


class Encoder(nn.Module):
    """A model that is also used by a method that is not its forward, and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        return self.second(torch.tanh(self.first(x))) * self.scale

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.scale

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self(x) + self.encode(x)
        return x


@pytest.mark.parametrize("how", ["made", "copied"])
@pytest.mark.parametrize("method", ["encode", "generate"])
@on_ranks(2)
def test_registered_methods_gather_as_forward_does(method: str, how: str) -> None:
    torch.manual_seed(5)
    reference = Encoder()
    model = copy.deepcopy(reference)
    mesh = make_mesh((dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    for name in ("encode", "generate"):
        register_fsdp_forward_method(model, name)
        register_fsdp_forward_method(reference, name)  # Not sharded: nothing happens.
    if how == "copied":
        model = copy.deepcopy(model)
    differences = Differences()
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, 6)
        out, expected = (getattr(m, method)(x) for m in (model, reference))
        differences.note("loss", out.detach(), expected.detach())
        out.square().mean().backward()
        expected.square().mean().backward()
        differences.note_grads(model, reference)
    assert model.memory_stats()["unsharded_nbytes"] == 0
    assert_within([differences], loss=TOLERANCE, grad=5e-6)


@on_ranks(2)
def test_a_root_may_call_itself() -> None:
    torch.manual_seed(5)
    reference = Encoder()
    model = fully_shard(copy.deepcopy(reference), make_mesh((dist.get_world_size(),)))
    differences = Differences()
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2, 6)
        for m in (model, reference):
            m(x, depth=2).square().mean().backward()
        differences.note_grads(model, reference)
    assert_within([differences], grad=5e-6)


# --- several roots ------------------------------------------------------------------------------


def two_roots() -> list[Differences]:
    case = CASES["mlp"]
    mesh = make_mesh((dist.get_world_size(),))
    references = [case.make(), case.make()]
    models = [shard(case, copy.deepcopy(reference), mesh) for reference in references]
    share_comm_ctx(models)
    differences = [Differences(), Differences()]
    for step in range(STEPS):
        # Interleaved, as stages of a pipeline are.
        losses = [case.loss(model, my_batch(case, step)) for model in models]
        for loss in losses:
            loss.backward()
        for model, reference, found in zip(models, references, differences, strict=True):
            case.loss(reference, global_batch(case, step)).backward()
            found.note_grads(model, reference)
    return differences


def test_two_roots_share_streams_and_memory(spawn: Spawn) -> None:
    for found in spawn(two_roots, 2):
        assert_within(found, grad=2e-6)


@on_ranks(2)
def test_a_layer_runs_alone_before_its_root_and_after() -> None:
    """It was a root itself, then one in another; what was sharded since has it look anew."""
    mesh, x = make_mesh((2,)), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = copy.deepcopy(plain)
    for module in (*model[:3], model):  # Which has the last layer's parameters.
        fully_shard(module, mesh)
    differences = Differences()
    for each in (model, plain):
        each[0](x).sum().backward()
        each(x).sum().backward()
        fully_shard(nn.Linear(2, 2), mesh)
        each[0](x).sum().backward()
        each.zero_grad()
        (each[1](x) + each[0](x) + each[2](x)).square().sum().backward()
    differences.note_grads(model, plain)
    assert_within([differences], grad=TOLERANCE)


# --- after exceptions ---------------------------------------------------------------------------


class BoomError(Exception):
    """Raised in the middle of a step."""


@pytest.mark.parametrize("first", [0, 1])
def test_a_forward_of_a_layer_may_wait_while_its_root_begins(spawn: Spawn, first: int) -> None:
    spawn(train_layer_then_root, 2, first)


def train_layer_then_root(first: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model = copy.deepcopy(plain)
    for module in (*model, model):
        fully_shard(module, make_mesh((2,)))
    for each in (model, plain):
        losses = [each[1](x).sum(), each(x).square().sum()]
        losses[first].backward()
        losses[1 - first].backward()
    differences = Differences()
    differences.note_grads(model, plain)
    assert_within([differences], grad=TOLERANCE)


class Casting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


@on_ranks(2)
@torch.no_grad()
def test_neighbouring_layers_of_other_dtypes_are_gathered_together() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Casting(4, 4).double(), Casting(4, 4), Casting(4, 4).double())
    model, x = copy.deepcopy(plain), torch.ones(1, 4)
    for module in (*model, model):
        fully_shard(module, make_mesh((2,)))
    for _ in range(3):  # After the first forward the order is known.
        assert torch.equal(model(x), plain(x))


@on_ranks(2)
def test_an_optimizer_made_after_a_layer_ran_alone_has_sharded_parameters() -> None:
    """The layer ran as a root, which keeps its parameters for a backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, make_mesh((2,)))
    model[0](torch.ones(1, 4))
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())


def boom(*_: typing.Any) -> None:
    raise BoomError


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_reset_iter_state_gives_the_memory_back_at_once(where: str) -> None:
    case = CASES["mlp"]
    reference = case.make()
    model = shard(case, copy.deepcopy(reference), make_mesh((dist.get_world_size(),)))
    case.loss(model, my_batch(case, 0)).backward()
    model.zero_grad()
    layer = model.layers[1]
    if where == "forward":
        handle = layer.register_forward_hook(boom)
    else:
        handle = layer.register_full_backward_hook(boom)
    with pytest.raises(BoomError):
        case.loss(model, my_batch(case, 0)).backward()
    handle.remove()
    assert model.memory_stats()["unsharded_nbytes"] > 0
    model.reset_iter_state()
    assert model.memory_stats()["unsharded_nbytes"] == 0
    model.zero_grad()
    check([compare_training(CASES["mlp"], model, reference)])


# --- weights that are tied in a group -------------------------------------------------------------


class Words(nn.Module):
    """An embedding whose weight may be that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.mid = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(torch.tanh(self.mid(self.words(x)))))
        return y

    def tie(self) -> None:
        self.words.weight = self.head.weight


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
@pytest.mark.parametrize("is_on_meta", [False, True])
def test_weights_of_one_group_may_be_tied_after_it_was_sharded(
    spawn: Spawn, mesh_shape: tuple[int, ...], is_on_meta: bool
) -> None:
    """As torchtitan does, whose default makes two parameters of one before it shards them."""
    found = spawn(train_tied_late, math.prod(mesh_shape), mesh_shape, is_on_meta)
    assert_within(found, grad=TOLERANCE, parameter=TOLERANCE)


def train_tied_late(mesh_shape: tuple[int, ...], is_on_meta: bool) -> Differences:
    torch.manual_seed(0)
    plain = Words().double()
    plain.tie()
    torch.manual_seed(dist.get_rank())  # Values that nobody uses may differ.
    model = Words().double()
    if is_on_meta:
        model.to("meta")
    else:
        model.load_state_dict(plain.state_dict())
    mesh = make_mesh(mesh_shape)
    fully_shard(model.mid, mesh)
    fully_shard([model.words, model.norm, model.head], mesh)
    fully_shard(model, mesh)
    if is_on_meta:
        model.to_empty(device="cpu")
    model.tie()
    with torch.no_grad():
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            param.copy_(value)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model)]
    differences = Differences()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randint(0, 11, (dist.get_world_size(), 5), generator=generator)
        plain(x).square().mean().backward()
        model(x[dist.get_rank()]).square().mean().backward()
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    assert model.words.weight is model.head.weight
    typing.cast("FSDPModule", model).check_replicas()
    with summon_full_params(model):
        assert model.words.weight is model.head.weight
    return differences
