"""What people do with a model's parameters while they train it: convert, freeze, count, measure."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
import typing

import pytest
import torch
from torch import Tensor, nn

from models import CASES, Batch, Case
from reference import (
    OPTIMIZERS,
    Differences,
    assert_within,
    global_batch,
    make_mesh,
    my_batch,
    shard,
    step_batches,
)
from shardkit import ShardedTensor, StateError, fully_shard
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable


# Rounding of means over ranks, fp32, a few steps.
TOLERANCE = 2e-6


def in_double(case: Case) -> Case:
    def loss(model: nn.Module, given: Batch) -> Tensor:
        return case.loss(model, tuple(t.double() if t.is_floating_point() else t for t in given))

    return dataclasses.replace(case, loss=loss)


def to_double(model: nn.Module, case: Case) -> Case:
    model.double()
    return in_double(case)


def to_double_and_back(model: nn.Module, case: Case) -> Case:
    model.to(torch.float64).float()
    return case


def freeze_half(model: nn.Module, case: Case) -> Case:
    for i, param in enumerate(model.parameters()):
        param.requires_grad_(i % 2 == 0)
    return case


def freeze_a_group(model: nn.Module, case: Case) -> Case:
    case.groups(model)[0].requires_grad_(False)
    return case


def no_change(model: nn.Module, case: Case) -> Case:
    del model
    return case


def flip(model: nn.Module, case: Case) -> Case:
    for param in model.parameters():
        param.requires_grad_(not param.requires_grad)
    return case


CHANGES: dict[str, list[Callable[[nn.Module, Case], Case]]] = {
    "double": [no_change, to_double],
    "there and back": [no_change, to_double_and_back, no_change],
    "freeze half": [no_change, freeze_half, no_change],
    "freeze and flip": [freeze_half, flip, flip],
    "freeze a group": [no_change, freeze_a_group, flip],
}


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@on_ranks(2)
def test_training_goes_on_as_that_of_the_plain_model(name: str, changes: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), make_mesh((2,)))
    names = [key for key, _ in plain.named_parameters()]
    objects = list(model.parameters())
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (model, plain)]
    differences = Differences()
    for round_number, change in enumerate(CHANGES[changes]):
        changed = change(plain, case)
        change(model, case)
        case = changed
        steps = range(2 * round_number, 2 * round_number + 2)
        differences.note_training(case, (model, plain), optimizers, step_batches(case, steps))
        assert [key for key, _ in model.named_parameters()] == names
        assert list(map(id, model.parameters())) == list(map(id, objects))
    differences.note_parameters(model, plain)
    assert_within([differences], loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


def numbers(mesh_shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return (of the sharded model, of the plain one)."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), make_mesh(mesh_shape))
    case.loss(plain, global_batch(case, 0)).backward()
    case.loss(model, my_batch(case, 0)).backward()
    found = []
    for each in (model, plain):
        params = list(each.parameters())
        grads = [param.grad for param in params]
        found.append(
            [
                sum(param.numel() for param in params),
                sum(param.nelement() * param.element_size() for param in params),
                float(nn.utils.get_total_norm(grads)),
                float(nn.utils.get_total_norm(grads, norm_type=float("inf"))),
                float(nn.utils.clip_grad_norm_(params, 0.1)),
                float(nn.utils.get_total_norm(grads)),
            ]
        )
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_counts_and_norms_are_global(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    for by_rank in spawn(numbers, torch.Size(mesh_shape).numel(), mesh_shape):
        for sharded, plain in by_rank:
            assert sharded == pytest.approx(plain, rel=1e-5)


def to_vector() -> bool:
    plain = CASES["mlp"].make()
    model = shard(CASES["mlp"], copy.deepcopy(plain), make_mesh((2,)))
    vectors = [nn.utils.parameters_to_vector(each.parameters()) for each in (model, plain)]
    nn.utils.vector_to_parameters(vectors[0] * 2, model.parameters())
    nn.utils.vector_to_parameters(vectors[1] * 2, plain.parameters())
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return torch.equal(*vectors) and all(torch.equal(p.full_tensor(), q) for p, q in pairs)


def test_all_parameters_are_a_vector_and_come_of_one(spawn: Spawn) -> None:
    assert spawn(to_vector, 2) == [True, True]


def attributes_and_hooks() -> tuple[list[object], int]:
    """Return marks of the parameters, and how often a hook saw a gradient of the last step."""
    case = CASES["mlp"]
    model = shard(case, case.make(), make_mesh((2,)))
    seen = []
    for i, param in enumerate(model.parameters()):
        param.mark = i
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.mark))
    case.loss(model, my_batch(case, 0)).backward()
    model.to(torch.float32)  # Nothing to do, and torch exchanges all parameters nevertheless.
    model.double()
    seen.clear()
    in_double(case).loss(model, my_batch(case, 0)).backward()
    return [param.mark for param in model.parameters()], sorted(seen)


def test_attributes_and_hooks_of_parameters_outlive_conversions(spawn: Spawn) -> None:
    for marks, seen in spawn(attributes_and_hooks, 2):
        assert marks == seen == list(range(6))


def convert_with_unsynced_gradients() -> None:
    case = CASES["mlp"]
    model = shard(case, case.make(), make_mesh((2,)))
    model.set_requires_gradient_sync(False)
    case.loss(model, my_batch(case, 0)).backward()
    model.double()


def test_a_conversion_that_would_lose_gradients_is_refused(spawn_errors: Spawn) -> None:
    for error in spawn_errors(convert_with_unsynced_gradients, 2):
        assert error.type_name == "StateError"
        assert "gradients wait to be synced" in error.message


def go_on_after_a_refused_conversion() -> None:
    """Nothing was converted: the step ends as without the conversion."""
    case = CASES["mlp"]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), make_mesh((2,)))
    model.set_requires_gradient_sync(False)
    case.loss(model, my_batch(case, 0)).backward()
    with pytest.raises(StateError, match="cannot be converted while gradients wait"):
        model.double()
    model.float()
    model.set_requires_gradient_sync(True)
    case.loss(model, my_batch(case, 1)).backward()
    twin = shard(case, plain, make_mesh((2,)))
    for step in range(2):
        case.loss(twin, my_batch(case, step)).backward()
    for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert param.dtype == torch.float32
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad.full_tensor())


def test_a_refused_conversion_changes_nothing(spawn: Spawn) -> None:
    spawn(go_on_after_a_refused_conversion, 2)


# --- between a forward and its backward -----------------------------------------------------------


def clipped_between(mesh_shape: tuple[int, ...]) -> tuple[Differences, bool]:
    """A kept root shows unsharded parameters, which have no ``.grad``."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    model = copy.deepcopy(plain)
    mesh = make_mesh(mesh_shape)
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    x = torch.ones(2, 3, dtype=torch.double)
    objects = list(model.parameters())
    for each in (model, plain):
        each(x).sum().backward()
    left = model(x).sum()  # Logged, say.
    differences = Differences()
    differences.note(
        "norm",
        nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1),
    )
    differences.note_grads(model, plain)
    is_same = list(map(id, model.parameters())) == list(map(id, objects))
    model.zero_grad()
    is_zeroed = all(param.grad is None for param in objects)
    left.backward()
    assert all(param.grad is not None for param in objects)
    return differences, is_same and is_zeroed


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_parameters_after_a_forward_are_those_with_gradients(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    results = spawn(clipped_between, math.prod(mesh_shape), mesh_shape)
    assert all(is_same for _, is_same in results)
    assert_within([differences for differences, _ in results], norm=1e-12, grad=1e-12)


@pytest.mark.parametrize("by", ["kept", "asked", "shown"])
@on_ranks(2)
def test_parameters_are_frozen_after_a_forward(by: str) -> None:
    """A forward without a backward, perhaps for a log; then the root's layer is frozen."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model)
    params = list(model.parameters())
    x = torch.ones(2, 3, dtype=torch.double)
    model(x)
    for param in {"kept": params[2:], "asked": list(model.parameters())[2:]}.get(
        by, [model[1].weight, model[1].bias]
    ):
        param.requires_grad_(requires_grad=False)
    plain[1].requires_grad_(requires_grad=False)
    for each in (model, plain):
        each(x).sum().backward()
    differences = Differences()
    differences.note_grads(model, plain)
    assert [param.requires_grad for param in params] == [True, True, False, False]
    assert_within([differences], grad=1e-12)


@pytest.mark.parametrize("when", ["forward", "backward"])
@on_ranks(2)
def test_another_thread_lists_the_parameters_in_a_step(when: str) -> None:
    """A thread that logs or saves. The step is not over, so it frees nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 3)).double()
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    params, seen = list(model.parameters()), []

    def look(*_: object) -> None:
        thread = threading.Thread(target=lambda: seen.append(list(model.parameters())))
        thread.start()
        thread.join()

    if when == "forward":
        model[1].register_forward_pre_hook(look)
    else:
        model[1].register_full_backward_pre_hook(look)
    x = torch.ones(2, 3, dtype=torch.double)
    differences = Differences()
    for step in range(3):
        for each in (model, plain):
            each(x + step).square().sum().backward()
        differences.note_grads(model, plain)
    assert len(seen) == 3
    assert all(isinstance(param, ShardedTensor) for found in seen for param in found)
    assert all(list(map(id, found)) == list(map(id, params)) for found in seen)
    assert_within([differences], grad=1e-12)
