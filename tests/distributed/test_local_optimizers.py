"""`LocalOptimizer` against the same optimizers on whole parameters."""

from __future__ import annotations

import math
import typing

import pytest
import torch
from torch import Tensor

from reference import Differences, assert_each_within, assert_within, whole_and_sharded
from shardkit import ShardedTensor
from shardkit.optim import LocalOptimizer
from workers import spawn_each

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers

STEPS = 6
ELEMENTWISE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, typing.Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD plain": (torch.optim.SGD, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}

# torch's fused CPU kernels round differently in their vector loop and in its remainder.
FUSED_TOLERANCE = 1e-6


def take_steps(
    mesh_shape: tuple[int, ...],
    extra: dict[str, typing.Any],
    kind: tuple[type[torch.optim.Optimizer], dict[str, typing.Any]],
) -> Differences:
    """Step whole and sharded parameters, given the same gradients; compare state as well."""
    optimizer_class, options = kind[0], {**kind[1], **extra}
    plain, sharded = whole_and_sharded(mesh_shape)
    expected = optimizer_class(plain.parameters(), **options)
    actual = LocalOptimizer(sharded.parameters(), optimizer_class, **options)
    generator = torch.Generator()
    differences = Differences()
    for _ in range(STEPS):
        slopes = plain.draw_slopes(generator)
        for model, optimizer in ((plain, expected), (sharded, actual)):
            model(slopes).backward()
            optimizer.step()
            optimizer.zero_grad()
    differences.note_parameters(sharded, plain)
    note_state(differences, actual, expected)
    return differences


def note_state(
    differences: Differences, actual: torch.optim.Optimizer, expected: torch.optim.Optimizer
) -> None:
    """Compare state dicts. Collective."""
    found, wanted = actual.state_dict(), expected.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        assert found["state"][number].keys() == entries.keys()
        for name, value in entries.items():
            have = found["state"][number][name]
            if isinstance(have, ShardedTensor):
                differences.note("state", have.full_tensor(), value, name)
            else:
                assert value.ndim == 0 if isinstance(value, Tensor) else True
                assert have == value, name


@pytest.mark.parametrize("form", FORMS)
def test_elementwise_classes_are_exact(spawn: Spawn, form: str) -> None:
    for name, found in spawn_each(spawn, ELEMENTWISE, take_steps, 4, (4,), FORMS[form]).items():
        has_state = name != "SGD plain"
        assert_within(found, name, **({"state": 0.0} if has_state else {}), parameter=0.0)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_every_mesh(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    kinds = {name: ELEMENTWISE[name] for name in ("SGD", "AdamW", "NAdam")}
    found = spawn_each(spawn, kinds, take_steps, math.prod(mesh_shape), mesh_shape, {})
    # A third of the sum of three equal gradients is not always that gradient.
    tolerance = 1e-6 if mesh_shape == (3,) else 0.0
    assert_each_within(found, state=tolerance, parameter=tolerance)


def test_fused_kernels(spawn: Spawn) -> None:
    kinds = {name: ELEMENTWISE[name] for name in FUSED}
    found = spawn_each(spawn, kinds, take_steps, 4, (4,), {"fused": True})
    assert_each_within(found, state=FUSED_TOLERANCE, parameter=FUSED_TOLERANCE)
