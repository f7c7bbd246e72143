"""`MatrixOptimizer` against the same optimizers of an unsharded model."""

from __future__ import annotations

import functools
import math
import typing

import pytest
import torch

from matrix_cases import (
    CLASSES,
    compute_gradients,
    optimizers_of,
    step_both,
    train_both,
    worst_difference,
)
from parallel_models import CASES as PARALLEL_CASES
from parallel_models import batches_of, make
from shardkit import MixedPrecisionPolicy
from workers import Spawn, in_each

pytestmark = pytest.mark.helpers


@pytest.fixture
def spawn(spawn: Spawn) -> Spawn:
    """Leave more time: the first optimizer of a process imports torch's compiler."""
    return functools.partial(spawn, timeout_s=180)


MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


def difference_after(
    mesh_shape: tuple[int, ...], choice: tuple[str, dict[str, typing.Any]]
) -> float:
    name, options = choice
    plain, model, _, _ = train_both(name, mesh_shape, **options)
    return worst_difference(plain, model)


def assert_no_difference(
    spawn: Spawn,
    mesh_shape: tuple[int, ...],
    choices: dict[str, tuple[str, dict[str, typing.Any]]],
) -> None:
    found = spawn(in_each, math.prod(mesh_shape), choices, difference_after, mesh_shape)
    assert found == [dict.fromkeys(choices, 0.0)] * len(found)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_the_result_is_that_of_whole_matrices(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    assert_no_difference(spawn, mesh_shape, {name: (name, {}) for name in CLASSES})


OPTIONS: list[dict[str, typing.Any]] = [
    {"accumulate": 3, "max_norm": 0.1},
    {"batch_bytes": 1},  # A batch for each matrix.
    {"batch_bytes": 20_000, "max_norm": 0.1},
    {"cost": math.prod},
    {"dtype": torch.float64},
]


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_with_accumulation_clipping_and_many_batches(spawn: Spawn, name: str) -> None:
    assert_no_difference(spawn, (3,), {f"{options}": (name, options) for options in OPTIONS})


IN_BF16: dict[str, dict[str, typing.Any]] = {
    "bf16 parameters": {"dtype": torch.bfloat16},
    "mixed precision": {
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_in_bf16(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    choices = {what: ("muon", options) for what, options in IN_BF16.items()}
    assert_no_difference(spawn, mesh_shape, choices)


# --- tensor parallelism ---------------------------------------------------------------------------


def train_tensor_parallel(case: str, mesh_shape: tuple[int, ...], name: str) -> float:
    torch.manual_seed(0)
    plain, model = make(case, mesh_shape)
    plain_by = optimizers_of(plain, name, matrix=False)
    by = optimizers_of(model, name, matrix=True, batch_bytes=4000)
    batches, _ = batches_of(case, mesh_shape, 3)
    for batch in batches:
        compute_gradients(PARALLEL_CASES[case].case, model, [batch])
        step_both(plain, model, plain_by, by)
    return worst_difference(plain, model)


@pytest.mark.parametrize(
    ("case", "mesh_shape"),
    [
        ("mlp", (2, 2)),
        ("mlp", (1, 3)),
        ("mlp", (1, 2, 2)),
        ("gated", (2, 2)),
        ("gpt", (2, 2)),
        ("gpt", (1, 2, 2)),
    ],
    ids=str,
)
def test_with_tensor_parallelism(spawn: Spawn, case: str, mesh_shape: tuple[int, ...]) -> None:
    names = {name: name for name in ("muon", "shampoo")}
    call = (train_tensor_parallel, case, mesh_shape)
    found = spawn(in_each, math.prod(mesh_shape), names, *call)
    assert found == [dict.fromkeys(names, 0.0)] * len(found)
