"""Steps of `MatrixOptimizer` after something unusual: an error, new owners, looks at the state."""

from __future__ import annotations

import copy
import functools
import typing

import pytest
import torch
import torch.distributed as dist

from matrix_cases import whole, worst_difference
from models import Parameters
from one_by_one import Entries, OneByOne
from reference import make_mesh
from shardkit import fully_shard
from shardkit.optim import MatrixOptimizer

if typing.TYPE_CHECKING:
    from torch import Tensor, nn

    from workers import Spawn

pytestmark = pytest.mark.helpers

SHAPES = {"a": (6, 5), "b": (4, 4), "c": (9, 8)}


@pytest.fixture
def spawn(spawn: Spawn) -> Spawn:
    """Leave more time: the first optimizer of a process imports torch's compiler."""
    return functools.partial(spawn, timeout_s=180)


class Columns(OneByOne):
    """Momentum whose buffer is not contiguous: as what comes of ``torch.linalg`` is."""

    fails = False

    def __init__(self, params: typing.Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        """Step; or write the first parameter and raise, where that is asked for."""
        if Columns.fails:
            param.add_(1000.0)
            message = "no eigenvalues"
            raise ArithmeticError(message)
        if not state:
            state["sum"] = torch.zeros_like(param.T.contiguous()).T
        state["sum"].mul_(0.5).add_(grad)
        param.add_(state["sum"], alpha=-group["lr"])


def make_pair(
    optimizer_class: typing.Any,
    names: typing.Sequence[str] = tuple(SHAPES),
    batch_bytes: int = 1,
) -> tuple[typing.Any, typing.Any, torch.optim.Optimizer, MatrixOptimizer]:
    """Return a plain and a sharded model, and optimizers of some of their parameters."""
    torch.manual_seed(0)
    plain = Parameters(SHAPES)
    model = fully_shard(copy.deepcopy(plain), make_mesh((2,)))
    plain_by = optimizer_class([getattr(plain, name) for name in names], lr=0.1)
    by = MatrixOptimizer(
        [getattr(model, name) for name in names], optimizer_class, lr=0.1, batch_bytes=batch_bytes
    )
    return plain, model, plain_by, by


def compute(plain: typing.Any, model: nn.Module, generator: torch.Generator) -> None:
    """Give both models the same new gradients."""
    slopes = plain.draw_slopes(generator)
    for each in (plain, model):
        each.zero_grad()
        each(slopes).backward()


def add_a_group() -> float:
    """Add the dearest matrix later, which gives the others new owners."""
    plain, model, plain_by, by = make_pair(torch.optim.Adafactor, ("a", "b"))
    generator = torch.Generator()
    owners = []
    for step in range(8):
        if step == 5:
            plain_by.add_param_group({"params": [plain.c]})
            by.add_param_group({"params": [model.c]})
        compute(plain, model, generator)
        plain_by.step()
        by.step()
        owners.append([by.owner_of(model.a), by.owner_of(model.b)])
    assert owners[0] != owners[-1], "else nothing is tested"
    return worst_difference(plain, model)


def test_new_owners_know_the_latest_numbers(spawn: Spawn) -> None:
    assert spawn(add_a_group, 2) == [0.0, 0.0]


def go_on_after_an_error() -> float:
    """Step; fail in the middle of a step on all ranks; step again."""
    # One batch, of which both ranks own something: both raise at the same place.
    plain, model, plain_by, by = make_pair(Columns, batch_bytes=10_000)
    generator = torch.Generator()
    compute(plain, model, generator)
    plain_by.step()
    by.step()
    before = [whole(param).clone() for param in model.parameters()]
    compute(plain, model, generator)
    Columns.fails = True
    try:
        by.step()
    except ArithmeticError:
        pass
    finally:
        Columns.fails = False
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(param), value)
    dist.barrier()
    plain_by.step()
    by.step()
    return worst_difference(plain, model)


def test_a_step_that_raised_leaves_nothing_in_the_owners_copies(spawn: Spawn) -> None:
    assert spawn(go_on_after_an_error, 2) == [0.0, 0.0]


def look_at_state(how: str) -> float:
    """Look at the state between steps, on one rank, or write it on all."""
    plain, model, plain_by, by = make_pair(Columns, ("a", "b"))
    generator = torch.Generator()
    for step in range(4):
        compute(plain, model, generator)
        plain_by.step()
        by.step()
        if step == 1 and how == "one rank" and dist.get_rank() == 0:
            assert not by.state[model.c]
        if step == 1 and how != "one rank":
            for param in (plain.a, plain.b):
                plain_by.state[param]["sum"].zero_()
            for param in (model.a, model.b):
                by.state[param]["sum"].zero_()
            if how == "state_dict":
                by.state_dict()
    return worst_difference(plain, model)


@pytest.mark.parametrize("how", ["one rank", "written", "state_dict"])
def test_ranks_agree_on_who_wrote_the_state(spawn: Spawn, how: str) -> None:
    assert spawn(look_at_state, 2, how) == [0.0, 0.0]
