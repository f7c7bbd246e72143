"""Every optimizer of torch on sharded parameters, made before or after `fully_shard`."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from models import PARAMETER_SHAPES, Parameters
from reference import Differences, assert_within, full, make_mesh, own_parts
from shardkit import ShardedTensor, checkpoint, fully_shard
from workers import Spawn, on_ranks, spawn_each

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable


pytestmark = pytest.mark.helpers

Options = dict[str, typing.Any]

OPTIMIZERS: dict[str, Options] = {
    "ASGD": {"lr": 1e-2, "lambd": 0.01, "t0": 2, "weight_decay": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 1e-2},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "amsgrad": True, "maximize": True},
    "Adamax": {"lr": 1e-2},
    "LBFGS": {"lr": 0.1, "max_iter": 3, "line_search_fn": "strong_wolfe"},
    "Muon": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-2},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
NAMES = {name: name for name in OPTIMIZERS}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
HAVE_ONE_FORM = ("LBFGS", "Muon")

SHAPES = {**PARAMETER_SHAPES, "column": (6, 1), "row": (1, 6)}
"""Of some the last ranks have nothing. Adafactor keeps of a column what has its shape."""

MATRICES = {"matrix": (7, 13), "tall": (11, 2), "single": (1, 1)}  # What Muon takes.

# torch's fused CPU kernels round differently in their vector loop and in its remainder.
FUSED_TOLERANCE = 1e-6
# The norm of all elements is summed in another order: one unit in the last place of parameters
# between 2 and 4.
NORM_TOLERANCE = 2.4e-7

STEPS_BEFORE = 2
STEPS = 4
WAYS = ("after", "before", "before, stepped", "loaded")


def forms_of(name: str) -> dict[str, Options]:
    """Return the implementations that an optimizer has, and how to ask for each."""
    if name in HAVE_ONE_FORM:
        return {"only": {}}
    forms: dict[str, Options] = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
    if name in FUSED:
        forms["fused"] = {"fused": True}
    return forms


def tolerance_of(name: str, form: str) -> float:
    if form == "fused":
        return FUSED_TOLERANCE
    return NORM_TOLERANCE if name == "Adafactor" else 0.0


# --- steps --------------------------------------------------------------------------------------


Sharder = typing.Callable[[nn.Module], object]


def sharder_of(mesh_shape: tuple[int, ...] | None) -> Sharder:
    """Return what shards models over one mesh, for to make a mesh takes longer than some steps.

    With None it splits two parameters over two ranks each, before the rest is sharded over two.
    """
    if mesh_shape is not None:
        return functools.partial(fully_shard, mesh=make_mesh(mesh_shape))
    mesh = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return functools.partial(split_a_part, mesh=mesh)


def split_a_part(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, placement in (("matrix", Shard(0)), ("tall", Shard(1)), ("cube", Shard(1))):
        if hasattr(model, name):
            whole = getattr(model, name).detach()
            part = distribute_tensor(whole, mesh["tp"], [placement])
            setattr(model, name, nn.Parameter(part))
    fully_shard(model, mesh["dp"])


def set_gradients(model: nn.Module, slopes: dict[str, Tensor]) -> None:
    """Give parameters these gradients: without a forward, which DTensors would have to share."""
    for name, param in model.named_parameters():
        slope = slopes[name].clone()
        if isinstance(param, ShardedTensor):
            param.grad = ShardedTensor(param.spec.slice_full(slope).clone(), param.spec)
        else:
            param.grad = slope


class Trial:
    """A plain model and one that is sharded, each with its optimizer.

    Args:
        name: Of the optimizer.
        options: Its options.
        way: One of `WAYS`.
        shard: Shards a model.
        shapes: Of its parameters.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        way: str,
        shard: Sharder,
        shapes: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.has_closure = name == "LBFGS"
        self.plain = Parameters(shapes or (MATRICES if name == "Muon" else SHAPES))
        self.sharded = copy.deepcopy(self.plain)
        self._generator = torch.Generator()
        make = getattr(torch.optim, name)

        def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
            return make(model.parameters(), **options)

        self.optimizers = [optimizer_of(self.plain)]
        if way in ("after", "loaded"):
            if way == "loaded":
                self.step(STEPS_BEFORE)
                self.sharded.load_state_dict(self.plain.state_dict())
            shard(self.sharded)
            self.optimizers.append(optimizer_of(self.sharded))
            if way == "loaded":
                state = copy.deepcopy(self.optimizers[0].state_dict())
                self.optimizers[1].load_state_dict(state)
        else:
            self.optimizers.append(optimizer_of(self.sharded))
            if way == "before, stepped":
                self.step(STEPS_BEFORE)
            shard(self.sharded)

    def step(self, num_steps: int) -> None:
        """Step all optimizers that there are."""
        models = (self.plain, self.sharded)
        for _ in range(num_steps):
            slopes = self.plain.draw_slopes(self._generator)
            for model, optimizer in zip(models, self.optimizers, strict=False):
                if self.has_closure:
                    optimizer.step(lambda: self._loss(model, optimizer, slopes))  # noqa: B023
                else:
                    set_gradients(model, slopes)
                    optimizer.step()
                    optimizer.zero_grad()

    @staticmethod
    def _loss(
        model: nn.Module, optimizer: torch.optim.Optimizer, slopes: dict[str, Tensor]
    ) -> Tensor:
        """Compute a bowl around the slopes, and its gradients."""
        optimizer.zero_grad()
        params = dict(model.named_parameters())
        with torch.no_grad():
            away = {name: full(param) - slopes[name] for name, param in params.items()}
            weights = {name: torch.arange(1.0, s.numel() + 1) for name, s in slopes.items()}
            bent = {name: away[name] * weights[name].view(s.shape) for name, s in slopes.items()}
            loss = sum((away[name] * bent[name]).sum() for name in params) / 200
            set_gradients(model, {name: gradient / 100 for name, gradient in bent.items()})
        return typing.cast("Tensor", loss)

    def differences(self) -> Differences:
        """Compare what this rank has of the parameters."""
        found = Differences()
        wholes = {name: param.detach() for name, param in self.plain.named_parameters()}
        found.note_all("parameter", *own_parts(dict(self.sharded.named_parameters()), wholes))
        return found


def try_all(mesh_shape: tuple[int, ...] | None, ways: Iterable[str], name: str) -> dict[str, float]:
    """Return how far the parameters of each form are, made in each way."""
    found, shard = {}, sharder_of(mesh_shape)
    for form, options in forms_of(name).items():
        for way in ways:
            trial = Trial(name, {**OPTIMIZERS[name], **options}, way, shard)
            trial.step(STEPS)
            found[f"{form}, {way}"] = trial.differences()["parameter"]
            check_state(trial.optimizers[1])
    return found


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """State of a parameter's shape must be cut as the parameter is."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape:
                assert isinstance(value, ShardedTensor), key
                assert value.to_local().shape == parameter.to_local().shape, key


def check(by_name: dict[str, list[dict[str, float]]]) -> None:
    for name, by_rank in by_name.items():
        for what, difference in itertools.chain(*(found.items() for found in by_rank)):
            form = what.split(",")[0]
            assert difference <= tolerance_of(name, form), f"{name}, {what}: {difference}"


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_each_trains_as_on_whole_parameters(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    check(spawn_each(spawn, NAMES, try_all, math.prod(mesh_shape), mesh_shape, WAYS))


def test_each_trains_a_model_of_which_a_part_is_tensor_parallel(spawn: Spawn) -> None:
    check(spawn_each(spawn, NAMES, try_all, 4, None, ("after", "loaded")))


# --- one vector ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@on_ranks(3)
def test_lbfgs_on_one_vector(way: str) -> None:
    """What LBFGS keeps has the shape of its only parameter, and is no state of that."""
    trial = Trial("LBFGS", OPTIMIZERS["LBFGS"], way, sharder_of((3,)), {"vector": (7,)})
    trial.step(STEPS)
    assert_within([trial.differences()], parameter=0.0)


# --- checkpoints --------------------------------------------------------------------------------

WHOLE_STATE = ("Adafactor", "LBFGS", "Muon")
"""State of other shapes than the parameter's, in lists, of whole matrices."""


def trial_on(name: str, world_size: int, num_steps: int) -> Trial:
    trial = Trial(name, OPTIMIZERS[name], "after", sharder_of((world_size,)))
    trial.step(num_steps)
    return trial


def save(world_size: int, folder: str, case: tuple[str, int]) -> None:
    name, num_steps = case
    trial = trial_on(name, world_size, num_steps)
    checkpoint.save(f"{folder}/{name}-{num_steps}", trial.sharded, trial.optimizers[1])


def load(world_size: int, folder: str, case: tuple[str, int]) -> Differences:
    """Load into a new model and optimizer, on other ranks, and go on."""
    name, num_steps = case
    trial = trial_on(name, world_size, num_steps)
    new = Parameters({key: tuple(p.shape) for key, p in trial.plain.named_parameters()})
    fully_shard(new, make_mesh((world_size,)))
    optimizer = getattr(torch.optim, name)(new.parameters(), **OPTIMIZERS[name])
    checkpoint.load(f"{folder}/{name}-{num_steps}", new, optimizer)
    trial.sharded, trial.optimizers[1] = new, optimizer
    trial.step(STEPS)
    return trial.differences()


def test_state_is_saved_and_loaded_on_another_number_of_ranks(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    cases = {f"{name}, {steps} steps": (name, steps) for name in WHOLE_STATE for steps in (1, 3)}
    spawn_each(spawn, cases, save, 2, 2, str(tmp_path))
    for what, found in spawn_each(spawn, cases, load, 3, 3, str(tmp_path)).items():
        assert_within(found, what, parameter=tolerance_of(cases[what][0], "only"))
