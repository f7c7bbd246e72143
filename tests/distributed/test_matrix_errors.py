"""What `MatrixOptimizer` refuses, and what all ranks are told if one of them differs."""

from __future__ import annotations

import pathlib
import re
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launching import ASK_SOON, start_ranks
from models import Parameters
from reference import make_mesh
from shardkit import OptimizerError, fully_shard
from shardkit.optim import MatrixOptimizer

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers

PROGRAM = pathlib.Path(__file__).parent / "failing_owner.py"


def test_vectors_are_refused_as_torch_refuses_them() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="Muon only supports 2D parameters") as theirs:
        torch.optim.Muon(model.parameters())
    with pytest.raises(ValueError, match=re.escape(str(theirs.value))):
        MatrixOptimizer(model.parameters(), torch.optim.Muon)
    optimizer = MatrixOptimizer([model.weight], torch.optim.Muon)
    with pytest.raises(ValueError, match=re.escape(str(theirs.value))):
        optimizer.add_param_group({"params": [model.bias]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (torch.optim.Muon, {"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        (torch.optim.Muon, {"batch_bytes": 0}, r"batch_bytes must be a number of bytes .*, got 0"),
        (torch.optim.Muon, {"batch_bytes": "16 moons"}, "got '16 moons'. The default is 16777216"),
        (torch.optim.Muon, {"cost": 3}, "cost must be a function of a shape, .* got 3"),
        (torch.optim.Muon, {"stacks": "yes"}, "stacks must be True or False, got 'yes'"),
        (torch.nn.Linear, {}, "optimizer_class must be a class of optimizers"),
    ],
)
def test_bad_options_raise_at_once(
    given: typing.Any, options: dict[str, typing.Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixOptimizer([nn.Parameter(torch.zeros(2, 2))], given, **options)


def test_an_error_of_swapped_arguments_does_not_print_parameters() -> None:
    params: typing.Any = list(nn.Linear(100, 100).parameters())
    cls: typing.Any = torch.optim.Muon
    with pytest.raises(OptimizerError, match="must be a class of optimizers") as found:
        MatrixOptimizer(cls, params)
    assert len(str(found.value)) < 300


def test_owners_are_known_after_a_step() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    optimizer = MatrixOptimizer([param], torch.optim.Muon)
    with pytest.raises(OptimizerError, match="from its first step on"):
        optimizer.owner_of(param)
    param.grad = torch.ones(2, 2)
    optimizer.step()
    assert optimizer.owner_of(param) is None, "it is not sharded"
    assert optimizer.loads == {}


def step_what_differs(how: str) -> None:
    model = Parameters({"a": (4, 4), "b": (6, 2), "c": (2, 3)})
    model = fully_shard(model, make_mesh((2,)))
    params = list(model.parameters())
    is_odd = dist.get_rank() == 1
    if how == "order" and is_odd:
        params.reverse()
    if how == "number" and is_odd:
        params = params[:2]
    size = 100 if how == "settings" and is_odd else 1000
    wrong: typing.Any = "much"
    cost = None if how != "cost" else lambda shape: wrong if shape == (6, 2) else 1.0
    optimizer = MatrixOptimizer(params, torch.optim.Adafactor, batch_bytes=size, cost=cost)
    model(model.draw_slopes(torch.Generator())).backward()
    if how == "gradient" and is_odd:
        model.b.grad = None
    if how == "plain gradient":
        del model.b.grad
        model.b.grad = torch.ones(6, 2)
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("order", "OptimizerError", r"Number 1 is\n  rank 0: \('a', \(4, 4\).*\n  rank 1: \('c'"),
        ("number", "OptimizerError", r"Number 3 is\n  rank 0: \('c'.*\n  rank 1: \('owners'"),
        ("settings", "OptimizerError", r"batch_bytes=1000, .*\n  rank 1: .*batch_bytes=100, "),
        ("gradient", "RankMismatchError", r"'b' has no gradient on ranks \[1\], and one on the"),
        ("cost", "OptimizerError", r"cost returned 'much' for the shape \(6, 2\)\. It must return"),
        ("plain gradient", "OptimizerError", "the gradient of 'b', shape .* is a Tensor that is"),
    ],
)
def test_all_ranks_are_told_what_differs(
    spawn_errors: Spawn, how: str, kind: str, message: str
) -> None:
    for error in spawn_errors(step_what_differs, 2, how):
        assert error is not None
        assert error.type_name == kind, error
        assert re.search(message, error.message), error.message


def test_an_error_of_one_rank_is_named_on_the_others() -> None:
    ranks = start_ranks([str(PROGRAM)], 2, limit_s=60, **ASK_SOON)
    assert all(rank.code not in (0, None) for rank in ranks), ranks
    assert "no eigenvalues" in ranks[1].output
    assert "RankMismatchError" in ranks[0].output, ranks[0].output
    assert "ArithmeticError: no eigenvalues" in ranks[0].output, ranks[0].output
    assert "all-to-all of values" in ranks[0].output, ranks[0].output
