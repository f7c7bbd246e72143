"""What `MatrixOptimizer` sends, what it notices, and what it leaves to the class it runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allocated import past_shared_memory
from matrix_cases import (
    CLASSES,
    compute_gradients,
    is_matrix,
    optimizers_of,
    step_both,
    train_both,
    whole,
    worst_difference,
)
from models import CASES, Parameters
from reference import make_mesh, my_batch, shard
from shardkit import FSDPModule, fully_shard
from shardkit.optim import MatrixOptimizer

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers import Spawn

pytestmark = pytest.mark.helpers


@pytest.fixture
def spawn(spawn: Spawn) -> Spawn:
    """Leave more time: the first optimizer of a process imports torch's compiler."""
    return functools.partial(spawn, timeout_s=180)


CASE = CASES["gpt"]


class Sent(typing.NamedTuple):
    """What one rank sends."""

    kinds: list[str]  # Of collectives, in order.
    nbytes: int  # Of all of it, without what it keeps.


@contextlib.contextmanager
def counted(into: list[Sent]) -> Iterator[None]:
    """Count what this rank sends in the block."""
    kinds, total = [], 0
    exchange, reduce = dist.all_to_all_single, dist.all_reduce

    def all_to_all(receive: typing.Any, send: typing.Any, *rest: typing.Any, **more: typing.Any):  # noqa: ANN202
        nonlocal total
        kinds.append("all-to-all")
        total += send.nbytes
        return exchange(receive, send, *rest, **more)

    def all_reduce(tensor: typing.Any, *rest: typing.Any, **more: typing.Any):  # noqa: ANN202
        kinds.append(f"all-reduce of {tensor.nbytes}")
        return reduce(tensor, *rest, **more)

    with (
        past_shared_memory(),
        mock.patch.object(dist, "all_to_all_single", all_to_all),
        mock.patch.object(dist, "all_reduce", all_reduce),
    ):
        yield
    into.append(Sent(kinds, total))


# --- traffic --------------------------------------------------------------------------------------


def traffic(mesh_shape: tuple[int, ...], steps: int) -> dict[str, typing.Any]:
    """Train by Muon and AdamW, whose parameters share buckets; count what Muon's steps send."""
    torch.manual_seed(0)
    model = shard(CASE, CASE.make(), make_mesh(mesh_shape))
    muon, adamw = optimizers_of(model, "muon", matrix=True, batch_bytes=16_000)
    sent: list[Sent] = []
    for step in range(steps):
        compute_gradients(CASE, model, [my_batch(CASE, step)])
        with counted(sent):
            muon.step()
        adamw.step()
    matrices = [param for param in model.parameters() if is_matrix(param)]
    rank = dist.get_rank()
    mine = [param for param in matrices if muon.owner_of(param) == rank]
    return {
        "sent": sent,
        "matrices": len(matrices),
        "all": sum(param.numel() for param in matrices) * 4,
        "own": sum(param.numel() for param in mine) * 4,
        # What does not travel: pieces of a rank's own matrices.
        "kept": sum(param.to_local().numel() for param in mine) * 4,
        "batches": len(sent[-1].kinds) // 2 - 1,
    }


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_each_step_sends_gradients_once_and_values_once(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    num_ranks = math.prod(mesh_shape)
    copies = mesh_shape[0] if len(mesh_shape) > 1 else 1
    found = spawn(traffic, num_ranks, mesh_shape, 4)
    for each in found:
        first, *others = each["sent"]
        assert others == [others[0]] * 3, "later steps send the same"
        if num_ranks == 1:
            assert first.kinds == others[0].kinds == []
            continue
        written, flags = "all-reduce of 1", f"all-reduce of {3 * each['matrices']}"
        num_batches = (len(others[0].kinds) - 2) / 2
        assert num_batches > 1
        assert others[0].kinds == [written, flags] + ["all-to-all"] * int(2 * num_batches)
        # Values to owners, then as in the others, but there is no state that others could write.
        later = others[0].kinds[1:]
        assert first.kinds[-len(later) :] == later
        assert {*first.kinds[: -len(later)]} == {"all-to-all"}
    # In each replica the matrices that its ranks own; back to all ranks of all replicas.
    gradients = sum(each["own"] - each["kept"] for each in found)
    values = sum(copies * each["own"] - each["kept"] for each in found)
    assert sum(each["sent"][1].nbytes for each in found) == gradients + values
    assert sum(each["own"] for each in found) == found[0]["all"]
    assert sum(each["sent"][0].nbytes for each in found) == 2 * gradients + values


# --- writes of others -----------------------------------------------------------------------------


def write_by_view(ours: typing.Any, values: torch.Tensor) -> None:
    ours.view(-1).copy_(values.view(-1))


def write_by_transpose(ours: typing.Any, values: torch.Tensor) -> None:
    ours.t().copy_(values.t())


def write_by_rows(ours: typing.Any, values: torch.Tensor) -> None:
    for row in range(len(values)):
        ours[row] = values[row]


def write_by_data(ours: typing.Any, values: torch.Tensor) -> None:
    ours.data = values


def write_by_list(ours: typing.Any, values: torch.Tensor) -> None:
    torch._foreach_copy_([ours], [torch.zeros_like(ours).copy_(values)])


def write_by_piece(ours: typing.Any, values: torch.Tensor) -> None:
    ours.to_local().copy_(values.view(-1)[ours.spec.start : ours.spec.stop])


WRITES: dict[str, Callable[[typing.Any, torch.Tensor], object] | None] = {
    "load_state_dict": None,
    "copy_": lambda ours, values: ours.copy_(values),
    "data": write_by_data,
    "view": write_by_view,
    "transpose": write_by_transpose,
    "rows": write_by_rows,
    "list": write_by_list,
    "to_local": write_by_piece,
    "unshard": lambda ours, values: ours.copy_(values),
}


def write_between(how: str) -> float:
    """Write parameters between two steps, to both models."""
    plain, model, plain_by, by = train_both("muon", (2,), steps=2)
    generator = torch.Generator().manual_seed(3)
    values = {
        name: torch.randn(param.shape, generator=generator)
        for name, param in plain.named_parameters()
    }
    write = WRITES[how]
    if write is None:
        for each in (plain, model):
            each.load_state_dict({**each.state_dict(), **values})
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units if how == "unshard" else ():
        unit.unshard()
    for name in ["blocks.1.fc1.weight", "tokens.weight"] if write is not None else ():
        with torch.no_grad():
            plain.get_parameter(name).copy_(values[name])
            write(model.get_parameter(name), values[name])
    for unit in units:
        unit.reshard()
    for step in range(5, 7):
        compute_gradients(CASE, model, [my_batch(CASE, step)])
        step_both(plain, model, plain_by, by)
    return worst_difference(plain, model)


@pytest.mark.parametrize("how", WRITES)
def test_owners_notice_that_others_wrote(spawn: Spawn, how: str) -> None:
    assert spawn(write_between, 2, how) == [0.0] * 2


def after_conversion(how: str) -> float:
    """Convert the model between two steps: the pieces get other memory."""
    plain, model, plain_by, by = train_both("adafactor", (2,), steps=2)
    if how == "dtype":
        plain.double()
        model.double()
        for each in (*plain_by, *by):
            each.state.clear()  # A state in fp32 would be refused by torch.
    else:
        for each in (plain, model):
            for param in each.parameters():
                param.data = param.data.clone()
    for step in range(5, 7):
        compute_gradients(CASE, model, [my_batch(CASE, step)])
        step_both(plain, model, plain_by, by)
    return worst_difference(plain, model)


@pytest.mark.parametrize("how", ["dtype", "data"])
def test_pieces_may_get_other_memory(spawn: Spawn, how: str) -> None:
    assert spawn(after_conversion, 2, how) == [0.0] * 2


def two_in_one_bucket() -> tuple[float, list[list[str]]]:
    """Step half of the matrices by Muon, half by Adafactor, the rest by AdamW."""
    torch.manual_seed(0)
    plain = CASE.make()
    model = shard(CASE, copy.deepcopy(plain), make_mesh((2,)))
    both: list[list[torch.optim.Optimizer]] = []
    for each in (plain, model):
        matrices = [param for param in each.parameters() if is_matrix(param)]
        rest = [param for param in each.parameters() if not is_matrix(param)]
        made = []
        for half, name in ((matrices[::2], "muon"), (matrices[1::2], "adafactor")):
            optimizer_class, options = CLASSES[name]
            if each is model:
                made.append(MatrixOptimizer(half, optimizer_class, **options))
            else:
                made.append(optimizer_class(half, **options))
        both.append([*made, torch.optim.AdamW(rest, lr=1e-3)])
    sent: list[Sent] = []
    for step in range(3):
        compute_gradients(CASE, model, [my_batch(CASE, step)])
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = whole(ours.grad)
        with counted(sent):
            for optimizer in both[1]:
                optimizer.step()
        for optimizer in both[0]:
            optimizer.step()
        for each in (plain, model):
            each.zero_grad()
    return worst_difference(plain, model), [each.kinds for each in sent]


def test_optimizers_that_share_a_bucket_do_not_disturb_each_other(spawn: Spawn) -> None:
    for difference, kinds in spawn(two_in_one_bucket, 2):
        assert difference == 0.0
        assert len(kinds[1]) == len(kinds[2]) == 8, "one batch each: no values to owners"


# --- scripts as people write them -----------------------------------------------------------------


def uneven_use(how: str) -> float:
    """Train with frozen, unused and ignored parameters, an early optimizer, a schedule."""
    torch.manual_seed(0)
    plain = CASE.make()
    if how == "frozen":
        plain.blocks[0].requires_grad_(requires_grad=False)
    model = copy.deepcopy(plain)
    pair = [optimizers_of(model, "muon", matrix=True)] if how == "early" else []
    mesh = make_mesh((3,))
    ignored = {model.blocks[1].fc1.weight, model.positions} if how == "ignored" else set()
    for block in model.blocks:
        fully_shard(block, mesh, ignored_params=ignored)
    fully_shard(model, mesh, ignored_params=ignored)
    by = pair[0] if pair else optimizers_of(model, "muon", matrix=True)
    plain_by = optimizers_of(plain, "muon", matrix=False)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=8)
        for each in (by[0], plain_by[0])
    ]
    for step in range(4):
        compute_gradients(CASE, model, [my_batch(CASE, step)])
        for param in ignored:  # Nobody else averages them.
            dist.all_reduce(param.grad)
        if how == "unused" and step % 2 == 0:
            model.blocks[1].fc1.weight.grad = None
        if how == "none":
            model.zero_grad()
        step_both(plain, model, plain_by, by)
        if how == "schedule":
            for schedule in schedules:
                schedule.step()
    assert by[0].param_groups[0]["lr"] == plain_by[0].param_groups[0]["lr"]
    return worst_difference(plain, model)


@pytest.mark.parametrize("how", ["frozen", "ignored", "early", "unused", "none", "schedule"])
def test_scripts(spawn: Spawn, how: str) -> None:
    assert spawn(uneven_use, 3, how) == [0.0] * 3


def scaled() -> tuple[float, float]:
    """Step by a gradient scaler, of which the second step overflows on one rank."""
    torch.manual_seed(0)
    shapes = {"a": (6, 5), "b": (4, 4), "c": (3, 7)}
    plain = Parameters(shapes)
    model = fully_shard(copy.deepcopy(plain), make_mesh((2,)))
    pairs = [
        (plain, torch.optim.Muon(plain.parameters(), lr=0.1)),
        (model, MatrixOptimizer(model.parameters(), torch.optim.Muon, lr=0.1)),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in pairs]
    generator = torch.Generator()
    for step in range(3):
        slopes = plain.draw_slopes(generator)
        if step == 1:
            slopes["c"][-1, -1] = math.inf
        for (each, optimizer), scaler in zip(pairs, scalers, strict=True):
            scaler.scale(each(slopes)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return worst_difference(plain, model), scalers[1].get_scale() / scalers[0].get_scale()


def test_a_gradient_scaler_skips_a_step(spawn: Spawn) -> None:
    assert spawn(scaled, 2) == [(0.0, 1.0)] * 2


def few_matrices() -> list[int]:
    """Step fewer matrices than ranks, one of them empty, and a stack of matrices."""
    torch.manual_seed(0)
    plain = Parameters({"a": (5, 3), "empty": (0, 4), "stack": (2, 3, 4)})
    model = fully_shard(copy.deepcopy(plain), make_mesh((4,)))
    by = MatrixOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.1, batch_bytes=1)
    plain_by = torch.optim.Adafactor(plain.parameters(), lr=0.1)
    generator = torch.Generator()
    for _ in range(2):
        slopes = plain.draw_slopes(generator)
        model(slopes).backward()
        model.empty.grad = plain.empty.grad = None
        plain.a.grad, plain.stack.grad = slopes["a"].clone(), slopes["stack"].clone()
        by.step()
        plain_by.step()
        model.zero_grad()
    assert worst_difference_of([plain.a, plain.stack], [model.a, model.stack]) == 0.0
    assert by.loads[by.owner_of(model.stack)] == max(by.loads.values())
    return [by.owner_of(param) for param in model.parameters()]


def worst_difference_of(plain: list[nn.Parameter], sharded: list[nn.Parameter]) -> float:
    return max((a - whole(b)).abs().max().item() for a, b in zip(plain, sharded, strict=True))


def test_fewer_matrices_than_ranks(spawn: Spawn) -> None:
    owners = spawn(few_matrices, 4)
    assert owners == [owners[0]] * 4
    assert len(set(owners[0])) == 3
