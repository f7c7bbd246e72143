"""State of optimizers that are older than the cut, copied, loaded, saved; what cannot be."""

from __future__ import annotations

import copy
import typing
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from models import CASES, Parameters
from one_by_one import Entries, OneByOne
from reference import Differences, assert_within, full_parameters, make_mesh, step_all
from shardkit import ShardedTensor, checkpoint, fully_shard, materialize
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    import pathlib


pytestmark = pytest.mark.helpers

# Two or four equal gradients are averaged without rounding.
EXACT = 0.0


def start(
    make: typing.Callable[[typing.Any], torch.optim.Optimizer],
) -> tuple[list[Parameters], list[torch.optim.Optimizer]]:
    """Return two equal models, both plain, and an optimizer of each."""
    models = [Parameters()]
    models.append(copy.deepcopy(models[0]))
    return models, [make(model.parameters()) for model in models]


def backward(models: list[Parameters], generator: torch.Generator) -> None:
    slopes = models[0].draw_slopes(generator)
    for model in models:
        model(slopes).backward()


def step(
    models: list[Parameters],
    optimizers: list[torch.optim.Optimizer],
    generator: torch.Generator,
    num_steps: int = 2,
) -> None:
    for _ in range(num_steps):
        backward(models, generator)
        step_all(optimizers)


def compared(models: list[Parameters]) -> Differences:
    differences = Differences()
    differences.note_parameters(models[1], models[0])
    return differences


# --- when it is cut -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_ranks("world_size")
def test_a_step_right_after_fully_shard_finds_its_state(world_size: int) -> None:
    models, optimizers = start(lambda params: torch.optim.AdamW(params, lr=1e-2))
    generator = torch.Generator()
    step(models, optimizers, generator)
    backward(models, generator)
    fully_shard(models[1], make_mesh((world_size,)))
    for optimizer in optimizers:
        optimizer.step()  # Before any forward of the sharded model.
        optimizer.zero_grad()
    kinds = {type(state["exp_avg"]) for state in optimizers[1].state.values()}
    assert kinds == {ShardedTensor}
    step(models, optimizers, generator)
    assert_within([compared(models)], parameter=EXACT)


@on_ranks(2)
def test_what_is_sharded_later_is_cut_later() -> None:
    """Shard one layer, train, then the rest: the optimizer is looked at again."""
    # Equal gradients of two ranks are summed and halved, which is exact.
    case = CASES["mlp"]
    plain = case.make()
    sharded = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, sharded)]
    batch = case.batch(torch.Generator())  # The same on both ranks: what is plain stays equal.

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            for model, optimizer in zip((plain, sharded), optimizers, strict=True):
                case.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    train(2)
    mesh = make_mesh((2,))
    fully_shard(sharded.layers[0], mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no group of fully_shard holds")
        train(2)
    fully_shard(sharded.layers[1], mesh)
    fully_shard(sharded, mesh)
    train(2)
    differences = Differences()
    differences.note_parameters(sharded, plain)
    assert_within([differences], parameter=EXACT)


class Slots(OneByOne):
    """Keeps momentum in a list, and a number and a table beside it."""

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        del group
        if not state:
            state["slots"] = [torch.zeros_like(param), {"second": torch.zeros_like(param)}]
            state["opaque"] = OrderedDict(kept={torch.zeros_like(param)})
            state["count"] = torch.zeros(())
            state["table"] = torch.ones(3)
        first, second = state["slots"][0], state["slots"][1]["second"]
        state["count"] += 1
        first.lerp_(grad, 0.1)
        second.lerp_(first, 0.5)
        param.sub_(second * (state["table"].sum() / state["count"]))


@on_ranks(2)
def test_state_in_lists_is_cut_and_numbers_stay() -> None:
    models, optimizers = start(Slots)
    generator = torch.Generator()
    step(models, optimizers, generator)
    fully_shard(models[1], make_mesh((2,)))
    step(models, optimizers, generator)
    for param, state in optimizers[1].state.items():
        assert isinstance(state["slots"][0], ShardedTensor)
        assert isinstance(state["slots"][1]["second"], ShardedTensor)
        assert type(state["opaque"]) is OrderedDict, "nothing in it is cut"
        # That of the parameter without dimensions, too: the others tell that it is a number.
        assert type(state["count"]) is type(state["table"]) is Tensor, param
    assert_within([compared(models)], parameter=EXACT)


class Around(torch.optim.Optimizer):
    """Wraps an optimizer, as Lookahead of timm: without the constructor of the base class."""

    def __init__(self, params: typing.Any) -> None:
        self.inner = torch.optim.AdamW(params, lr=1e-2)
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks: typing.Any = OrderedDict()
        self._optimizer_step_post_hooks: typing.Any = OrderedDict()

    @property
    def param_groups(self) -> typing.Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> typing.Any:  # type: ignore[override]
        return self.inner.state

    def load_state_dict(self, state_dict: typing.Any) -> None:
        # Around the hooks of the inner optimizer.
        for param, state in zip(self.inner.state, state_dict["state"].values(), strict=True):
            self.inner.state[param] = copy.deepcopy(state)

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


@on_ranks(2)
def test_a_wrapper_without_hooks_of_loads_is_checked_in_each_step() -> None:
    models, optimizers = start(Around)
    generator = torch.Generator()
    fully_shard(models[1], make_mesh((2,)))
    step(models, optimizers, generator)
    optimizers[1].load_state_dict(optimizers[0].inner.state_dict())  # type: ignore[attr-defined]
    step(models, optimizers, generator)
    assert all(isinstance(s["exp_avg"], ShardedTensor) for s in optimizers[1].state.values())
    assert_within([compared(models)], parameter=EXACT)


# --- copies, settings ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "uncut", "after"])
@on_ranks(2)
def test_a_deep_copy_of_model_and_optimizer_goes_on(when: str) -> None:
    """Go on with deep copies of the model and its optimizer."""
    models, optimizers = start(lambda params: torch.optim.AdamW(params, lr=1e-2))
    generator = torch.Generator()
    step(models, optimizers, generator)
    if when == "before":
        models[1], optimizers[1] = copy.deepcopy((models[1], optimizers[1]))
    fully_shard(models[1], make_mesh((2,)))
    if when == "uncut":
        models[1], optimizers[1] = copy.deepcopy((models[1], optimizers[1]))
    step(models, optimizers, generator)
    if when == "after":
        kept = full_parameters(models[1])
        original = models[1]
        models[1], optimizers[1] = copy.deepcopy((models[1], optimizers[1]))
    step(models, optimizers, generator)
    if when == "after":
        differences = Differences()
        differences.note_all("original", full_parameters(original), kept)
        assert differences == {"original": 0.0}
    assert_within([compared(models)], parameter=EXACT)


SETTINGS: dict[str, tuple[str, dict[str, typing.Any]]] = {
    "lr is a tensor": ("Adam", {"lr": torch.tensor(1e-2), "foreach": False}),
    "lr is a tensor, fused": ("AdamW", {"lr": torch.tensor(1e-2), "fused": True}),
    "lr is a tensor, SGD": ("SGD", {"lr": torch.tensor(0.1), "momentum": 0.9}),
    "betas are tensors": (
        "Adam",
        {"lr": 1e-2, "betas": (torch.tensor(0.8), torch.tensor(0.9)), "foreach": False},
    ),
    "maximize": ("RAdam", {"lr": 1e-2, "maximize": True}),
    "dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
}


def step_with(steps_before: int, setting: tuple[str, dict[str, typing.Any]]) -> Differences:
    name, options = setting
    models, optimizers = start(
        lambda params: getattr(torch.optim, name)(params, **copy.deepcopy(options))
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    generator = torch.Generator()
    step(models, optimizers, generator, steps_before)
    fully_shard(models[1], make_mesh((2,)))
    for _ in range(2):
        step(models, optimizers, generator, 1)
        for scheduler in schedulers:
            scheduler.step()
    return compared(models)


@pytest.mark.parametrize("steps_before", [1, 2])
def test_settings_do_what_they_do_on_whole_parameters(spawn: Spawn, steps_before: int) -> None:
    for setting, found in spawn_each(spawn, SETTINGS, step_with, 2, steps_before).items():
        # Of fused steps see test_optimizers.
        assert_within(found, setting, parameter=1e-6 if "fused" in setting else EXACT)


@on_ranks(2)
def test_a_fused_optimizer_of_a_gradient_scaler() -> None:
    """A fused optimizer unscales by itself, and skips a step: here the second one."""
    models, optimizers = start(lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))
    generator = torch.Generator()
    step(models, optimizers, generator)
    fully_shard(models[1], make_mesh((2,)))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in models]
    for number in range(3):
        slopes = models[0].draw_slopes(generator)
        if number == 1:
            slopes["cube"][-1, -1, -1] = torch.inf
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaler.scale(model(slopes)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_within([compared(models)], parameter=1e-6)


# --- sparse gradients ---------------------------------------------------------------------------


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


@on_ranks(2)
def test_sparse_adam_trains_ignored_parameters() -> None:
    """SparseAdam trains what is ignored, beside an optimizer of what is sharded."""
    plain = Embedded()
    sharded = copy.deepcopy(plain)
    models = (plain, sharded)
    optimizers = [torch.optim.SparseAdam(model.table.parameters()) for model in models]
    optimizers += [torch.optim.AdamW(model.head.parameters()) for model in models]
    x = torch.tensor([1, 5, 5, 8])  # The same on both ranks: nobody averages what is ignored.
    for number in range(4):
        if number == 2:
            fully_shard(sharded, make_mesh((2,)), ignored_params={sharded.table.weight})
        for model in models:
            model(x).square().sum().backward()
        step_all(optimizers)
    differences = Differences()
    differences.note_parameters(sharded, plain)
    assert_within([differences], parameter=EXACT)


# --- checkpoints --------------------------------------------------------------------------------


def save_uncut(path: str, world_size: int) -> None:
    """Save state that is whole still: of an optimizer that has not stepped since."""
    models, optimizers = start(lambda params: torch.optim.AdamW(params, lr=1e-2))
    generator = torch.Generator()
    step(models, optimizers, generator)
    fully_shard(models[1], make_mesh((world_size,)))
    checkpoint.save(path, models[1], optimizers[1])


def load_uncut(path: str, world_size: int) -> Differences:
    models, optimizers = start(lambda params: torch.optim.AdamW(params, lr=1e-2))
    generator = torch.Generator()
    step(models, optimizers, generator)
    other = fully_shard(Parameters(), make_mesh((world_size,)))
    optimizers[1] = torch.optim.AdamW(other.parameters(), lr=1e-2)
    models[1] = other
    checkpoint.load(path, other, optimizers[1])
    step(models, optimizers, generator)
    return compared(models)


def test_state_that_is_not_cut_yet_is_saved(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "saved")
    spawn(save_uncut, 2, path, 2)
    assert_within(spawn(load_uncut, 4, path, 4), parameter=EXACT)


# --- what cannot be -----------------------------------------------------------------------------


def made_on_meta(is_first: bool) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 5)
    mesh = make_mesh((2,))
    if is_first:
        optimizer = torch.optim.Adagrad(model.parameters())
    fully_shard(model, mesh)
    if not is_first:
        optimizer = torch.optim.Adagrad(model.parameters())
    materialize(model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("is_first", [True, False])
def test_state_made_on_meta_is_refused(spawn_errors: Spawn, is_first: bool) -> None:
    for error in spawn_errors(made_on_meta, 2, is_first):
        assert error is not None
        assert error.type_name == "StateError"
        assert "state 'sum' of parameter 'weight' is on the meta device" in error.message
        assert "Make the Adagrad after materialize()" in error.message


def of_unsharded_parameters() -> None:
    model = fully_shard(nn.Linear(3, 5), make_mesh((2,)))
    model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_an_optimizer_of_unsharded_parameters_is_refused(spawn_errors: Spawn) -> None:
    for error in spawn_errors(of_unsharded_parameters, 2):
        assert error is not None
        assert error.type_name == "StateError"
        assert "holds the unsharded parameter 'weight'" in error.message
        assert "call reshard() first" in error.message
