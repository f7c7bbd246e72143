"""Optimizers, offload, compression and copies of models with experts on a mesh of their own."""

from __future__ import annotations

import copy
import io
import pickle
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from experts import EXACT, NUM_EXPERTS, Block, Model, batches, loss_of
from models import Parameters
from one_by_one import Entries, OneByOne
from reference import make_mesh, step_all
from shardkit import (
    CPUOffloadPolicy,
    OptimizerError,
    Replicate,
    ShardedTensorError,
    auto_shard,
    fully_shard,
)
from shardkit.checkpoint import load, save
from shardkit.compression import PowerSGD, bf16_compress, compress_gradients
from shardkit.optim import LocalOptimizer, MatrixOptimizer
from workers import on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = pytest.mark.helpers

STEPS = 3


class StackedMuon(OneByOne):
    """Muon, which takes stacks: each matrix is made orthogonal by itself."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
        update = buffer / (buffer.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = update @ update.mT
            update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
        param.add_(update, alpha=-group["lr"])


def make(shape: tuple[int, ...] = (2, 2), **options: typing.Any) -> tuple[typing.Any, typing.Any]:
    """Return the plain model of one process, and the sharded one."""
    torch.manual_seed(3)
    plain = Model().double()
    model: typing.Any = copy.deepcopy(plain)
    names = ("replicate", "fsdp", "ep")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    auto_shard(model, mesh, Block, experts={"Experts": "ep"}, **options)
    for block in model.blocks:
        block.ep = mesh["ep"].get_group()
    return plain, model


def largest_difference(plain: nn.Module, model: nn.Module) -> float:
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return max((p.full_tensor() - q).abs().max().item() for q, p in pairs)  # type: ignore[operator]


def train(
    both: typing.Sequence[nn.Module], optimizers: typing.Sequence[typing.Any], steps: range
) -> None:
    for step in steps:
        own, whole = batches(step)
        for model, batch, of_model in zip(both, (whole, own), optimizers, strict=True):
            loss_of(model, batch).backward()
            step_all(of_model)


# --- kinds of optimizers --------------------------------------------------------------------------


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return matrices and stacks, and the rest."""
    params = list(model.parameters())
    return [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]


def by_matrix(model: nn.Module, *, is_sharded: bool) -> list[typing.Any]:
    matrices, rest = halves(model)
    first = MatrixOptimizer(matrices, StackedMuon) if is_sharded else StackedMuon(matrices)
    return [first, torch.optim.AdamW(rest, lr=0.01)]


def local(kind: typing.Any, **options: typing.Any) -> Callable[..., list[typing.Any]]:
    def make_one(model: nn.Module, *, is_sharded: bool) -> list[typing.Any]:
        if is_sharded:
            return [LocalOptimizer(model.parameters(), kind, **options)]
        return [kind(model.parameters(), **options)]

    return make_one


def direct(kind: typing.Any, **options: typing.Any) -> Callable[..., list[typing.Any]]:
    return lambda model, is_sharded: [kind(model.parameters(), **options)]  # noqa: ARG005


OPTIMIZERS: dict[str, Callable[..., list[typing.Any]]] = {
    "AdamW foreach": direct(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": direct(torch.optim.AdamW, lr=0.01, fused=True, amsgrad=True),
    "AdamW for": direct(torch.optim.AdamW, lr=0.01, foreach=False),
    "SGD": direct(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": direct(torch.optim.Adagrad, lr=0.05),
    "Adafactor": direct(torch.optim.Adafactor, lr=0.05),
    "local AdamW": local(torch.optim.AdamW, lr=0.01),
    "local SGD": local(torch.optim.SGD, lr=0.05, momentum=0.9),
    "matrices": by_matrix,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(4)
def test_each_optimizer_steps_as_in_one_process(kind: str, tmp_path: typing.Any) -> None:
    path = str(tmp_path / "checkpoint")
    plain, model = make()
    optimizers = [
        OPTIMIZERS[kind](plain, is_sharded=False),
        OPTIMIZERS[kind](model, is_sharded=True),
    ]
    train((plain, model), optimizers, range(STEPS))
    assert largest_difference(plain, model) < EXACT
    save(path, model, optimizers[1])
    # Another `ep`, and replicas.
    _, resumed = make((2, 2, 1))
    optimizers[1] = OPTIMIZERS[kind](resumed, is_sharded=True)
    load(path, resumed, optimizers[1])
    train((plain, resumed), optimizers, range(STEPS, STEPS + 2))
    assert largest_difference(plain, resumed) < 10 * EXACT


@on_ranks(4)
def test_stacks_belong_to_several_ranks() -> None:
    _, model = make()
    matrices, _ = halves(model)
    optimizer = MatrixOptimizer(matrices, StackedMuon)
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()
    assert len({optimizer.owner_of(p) for b in model.blocks for p in b.experts.parameters()}) > 1


@on_ranks(4)
def test_a_class_for_matrices_alone_refuses_stacks() -> None:
    _, model = make()
    before = [param.full_tensor() for param in model.parameters()]
    matrices, _ = halves(model)
    with pytest.raises(ValueError, match="only supports 2D") as raised:
        MatrixOptimizer(matrices, torch.optim.Muon)
    assert "stacks=True" in raised.value.__notes__[0]
    assert "not weights of convolutions" in raised.value.__notes__[0]
    plain = nn.Parameter(torch.zeros(2, 4, 4))
    optimizer = MatrixOptimizer([*matrices, plain], torch.optim.Muon, stacks=True)
    with pytest.raises(OptimizerError, match=r"shape \(2, 4, 4\) that is not sharded"):
        optimizer.step()
    assert all(
        torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True)
    )


class MuonOfMatrices:
    """torch's Muon in one process, of each matrix by itself."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.parts = [[nn.Parameter(each) for each in self._split(p.detach())] for p in params]
        self.inner = torch.optim.Muon([each for parts in self.parts for each in parts], lr=0.02)

    @staticmethod
    def _split(stack: Tensor) -> typing.Sequence[Tensor]:
        return stack.view(-1, *stack.shape[-2:]).unbind()

    def step(self) -> None:
        for param, parts in zip(self.params, self.parts, strict=True):
            assert param.grad is not None
            for part, grad in zip(parts, self._split(param.grad), strict=True):
                part.grad = grad.clone()
        self.inner.step()


@pytest.mark.parametrize(
    ("ranks", "shapes"), [(2, [(1, 2), (2, 1)]), (4, [(2, 2), (2, 2, 1)])], ids=["2", "2x2"]
)
@on_ranks("ranks")
def test_muon_steps_each_matrix_of_a_stack(
    ranks: int,  # noqa: ARG001 - for `on_ranks`
    shapes: list[tuple[int, ...]],
    tmp_path: typing.Any,
) -> None:
    plain, model = make(shapes[0])
    wanted = MuonOfMatrices(halves(plain)[0])
    optimizer = MatrixOptimizer(halves(model)[0], torch.optim.Muon, stacks=True, lr=0.02)
    for step in range(2 * STEPS):
        if step == STEPS:  # Another object, on another mesh, goes on.
            save(str(tmp_path / "checkpoint"), model, optimizer)
            _, model = make(shapes[1])
            optimizer = MatrixOptimizer(halves(model)[0], torch.optim.Muon, stacks=True, lr=0.02)
            load(str(tmp_path / "checkpoint"), model, optimizer)
        loss_of(model, batches(step)[0]).backward()
        # Muon computes in bf16: only equal gradients have equal updates.
        for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            param.grad = sharded.grad.full_tensor()
        optimizer.step()
        wanted.step()
        model.zero_grad()
        for param, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(sharded.full_tensor(), param)
    stack = plain.blocks[0].experts.up
    shown = optimizer.state[model.blocks[0].experts.up]["momentum_buffer"].full_tensor()
    assert shown.shape == stack.shape
    parts = next(each for p, each in zip(wanted.params, wanted.parts, strict=True) if p is stack)
    for found, part in zip(shown, parts, strict=True):
        assert torch.equal(found, wanted.inner.state[part]["momentum_buffer"])


# --- stacks that are stepped by matrix ------------------------------------------------------------


class Rule(torch.optim.Optimizer):
    """A class for single matrices, whose rule is ``act(number, param, state)``."""

    def __init__(self, params: typing.Any, act: typing.Any = None) -> None:
        super().__init__(params, {})
        self.act = act

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(each for each in params if each.grad is not None):
            assert param.ndim <= 2
            self.act(number, param, self.state)


def make_stacks(act: typing.Any, shapes: dict[str, tuple[int, ...]]) -> tuple[typing.Any, ...]:
    """Return a model of ones on all ranks, and its optimizer, which steps by a rule."""
    model: typing.Any = Parameters(shapes)
    for param in model.parameters():
        nn.init.ones_(param)
    fully_shard(model, make_mesh((dist.get_world_size(),)))
    return model, MatrixOptimizer(model.parameters(), Rule, stacks=True, act=act)


def step_by_ones(model: typing.Any, optimizer: MatrixOptimizer) -> None:
    """Step with gradients that are one everywhere."""
    optimizer.zero_grad()
    model({name: torch.ones(param.shape) for name, param in model.named_parameters()}).backward()
    optimizer.step()


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_class_may_assign_the_data_of_a_matrix(ranks: int) -> None:
    del ranks

    def assign(number: int, param: typing.Any, state: typing.Any) -> None:
        del state
        if number != 1:
            param.data = param.data - 0.25 * param.grad
        else:
            param.sub_(param.grad, alpha=0.25)

    model, optimizer = make_stacks(assign, {"a": (3, 2, 2), "b": (2, 2)})
    for step in range(1, 4):
        step_by_ones(model, optimizer)
        for param in model.parameters():
            assert torch.equal(param.full_tensor(), torch.full(param.shape, 1 - 0.25 * step))


@on_ranks(2)
def test_a_step_that_failed_between_matrices_leaves_no_state() -> None:
    fails = True

    def count(number: int, param: typing.Any, state: typing.Any) -> None:
        if fails and number == 1:
            msg = "no eigenvalues"
            raise ArithmeticError(msg)
        state[param]["sum"] = torch.ones_like(param)
        param.data = param.data - 0.25 * param.grad

    # One for each rank: both fail before they send values.
    model, optimizer = make_stacks(count, {"a": (3, 2, 2), "b": (3, 2, 2)})
    with pytest.raises(ArithmeticError):
        step_by_ones(model, optimizer)
    for _ in range(2):
        assert optimizer.state_dict()["state"] == {}
    assert len(optimizer.inner.state) == 1, "of the first matrix; looks at it add nothing"
    fails = False
    step_by_ones(model, optimizer)
    for param, entries in zip(
        model.parameters(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(entries["sum"].full_tensor(), torch.ones(3, 2, 2))
        assert torch.equal(param.full_tensor(), torch.full((3, 2, 2), 0.75))


Kept = dict[str, typing.Any]

DIFFERENT: dict[str, Callable[[int, Kept], object]] = {
    "numbers": lambda number, kept: kept.update(x=number),
    "shapes": lambda number, kept: kept.update(x=torch.zeros(number)),
    "kinds": lambda number, kept: kept.update(x=torch.zeros(2) if number else 5),
    "lengths": lambda number, kept: kept.update(x=[5] * number),
    "names": lambda number, kept: kept.update({"x" if number else "y": 5}),
    "nothing": lambda number, kept: kept.clear() if number else kept.update(x=5),
}


def keep(how: str | None) -> typing.Any:
    """Return a rule that keeps a number for each matrix, or what differs between them."""

    def act(number: int, param: typing.Any, state: typing.Any) -> None:
        state[param].clear()
        state[param].update(x=5)
        if how is not None:
            DIFFERENT[how](number, state[param])

    return act


@pytest.mark.parametrize("how", DIFFERENT)
@on_ranks(2)
def test_state_that_differs_between_matrices_raises_on_all_ranks(how: str) -> None:
    message = r"state '[xy]' of 'a' must be .* for all matrices of the stack, got "
    # A difference in the first step is told by the step.
    with pytest.raises(OptimizerError, match=message):
        step_by_ones(*make_stacks(keep(how), {"a": (3, 2, 2)}))
    model, optimizer = make_stacks(keep(None), {"a": (3, 2, 2)})
    step_by_ones(model, optimizer)
    assert optimizer.state_dict()["state"] == {0: {"x": 5}}
    optimizer.inner.act = keep(how)  # type: ignore[union-attr]
    step_by_ones(model, optimizer)
    for _ in range(2):
        with pytest.raises(OptimizerError, match=message):
            optimizer.state_dict()
    optimizer.inner.act = keep(None)  # type: ignore[union-attr]
    step_by_ones(model, optimizer)
    assert optimizer.state_dict()["state"] == {0: {"x": 5}}


@on_ranks(4)
def test_ranks_of_other_groups_hear_of_state_that_differs() -> None:
    """Two ranks have a stack; the others have nothing but a matrix together with them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: typing.Any = Parameters({"a": (3, 2, 2), "b": (2, 2)})
    for param in model.parameters():
        nn.init.ones_(param)
    if dist.get_rank() % 2:
        del model.a
    of_some = getattr(model, "a", None)
    fully_shard(
        model, mesh, shard_placement_fn=lambda p: mesh["replicate"] if p is of_some else None
    )
    optimizer = MatrixOptimizer(model.parameters(), Rule, stacks=True, act=keep("numbers"))
    with pytest.raises(OptimizerError, match="state 'x' of 'a'"):
        step_by_ones(model, optimizer)
    with pytest.raises(OptimizerError, match="state 'x' of 'a'"):
        optimizer.state_dict()


@on_ranks(2)
def test_empty_stacks_are_not_stepped() -> None:
    shapes = {"a": (3, 2, 2), "b": (0, 2, 2), "c": (2, 0, 2), "d": (2, 2, 0)}
    model: typing.Any = fully_shard(Parameters(shapes), make_mesh((2,)))
    for _ in range(2):
        optimizer = MatrixOptimizer(model.parameters(), torch.optim.Muon, stacks=True)
        for _ in range(2):
            step_by_ones(model, optimizer)
        saved = optimizer.state_dict()
        assert list(saved["state"]) == [0]
        optimizer.load_state_dict(saved)
        step_by_ones(model, optimizer)


@on_ranks(2)
def test_state_is_stacked_where_it_is_shown_alone() -> None:
    def act(_: int, param: typing.Any, state: typing.Any) -> None:
        state[param]["sum"] = torch.ones_like(param)
        state[param]["step"] = torch.tensor(5.0)

    model, optimizer = make_stacks(act, {"a": (3, 2, 4)})
    model({"a": torch.ones(3, 2, 4)}).backward()
    with mock.patch.object(torch, "stack", wraps=torch.stack) as stack:
        optimizer.step()
        assert stack.call_count == 0
        shown = optimizer.state_dict()["state"][0]
        assert stack.call_count == (2 if dist.get_rank() == 0 else 0)
    assert shown["sum"].shape == (3, 2, 4)
    assert torch.equal(shown["step"].full_tensor(), torch.full((3,), 5.0))


# --- offload, compression, copies -----------------------------------------------------------------


@on_ranks(4)
def test_offload() -> None:
    plain, model = make(offload_policy=CPUOffloadPolicy())
    optimizers = [[torch.optim.AdamW(m.parameters(), lr=0.01)] for m in (plain, model)]
    train((plain, model), optimizers, range(STEPS))
    assert largest_difference(plain, model) < EXACT


@pytest.mark.parametrize("kind", ["bf16", "PowerSGD"])
@on_ranks(4)
def test_compression(kind: str) -> None:
    plain, model = make((2, 1, 2))
    hook: typing.Any = PowerSGD(64, start_after=1) if kind == "PowerSGD" else bf16_compress
    compress_gradients(model, hook)
    worst = 0.0
    for step in range(STEPS):
        own, whole = batches(step)
        loss_of(plain, whole).backward()
        loss_of(model, own).backward()
        for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert wanted.grad is not None
            assert found.grad is not None
            difference = found.grad.full_tensor() - wanted.grad
            worst = max(worst, difference.abs().max().item() / wanted.grad.abs().max().item())
        for each in (plain, model):
            each.zero_grad()
    # Of full rank nothing is left out; 8 bits of mantissa.
    assert 0 < worst < (1e-5 if kind == "PowerSGD" else 2e-2), worst


@on_ranks(4)
def test_deep_copies_train_and_pickles_are_refused() -> None:
    plain, model = make()
    groups = [block.ep for block in model.blocks]
    for block in model.blocks:  # A process group has no copies.
        block.ep = None
    copied: typing.Any = copy.deepcopy(model)
    for written in (model, model.state_dict()):
        with pytest.raises(ShardedTensorError, match=r"'experts.up' is split over .* as well"):
            pickle.dumps(written)
    for block, group in zip(copied.blocks, groups, strict=True):
        block.ep = group
    optimizers = [[torch.optim.AdamW(m.parameters(), lr=0.01)] for m in (plain, copied)]
    train((plain, copied), optimizers, range(STEPS))
    assert largest_difference(plain, copied) < EXACT
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("kind", ["model", "state dict"])
@on_ranks(2)
def test_groups_of_two_meshes_are_pickled(kind: str) -> None:
    """Without experts a group of two meshes is pickled, since no DTensor is in it."""
    torch.manual_seed(3)
    plain = Model().double()
    model: typing.Any = copy.deepcopy(plain)
    fully_shard(model, shard_placement_fn=lambda p: Replicate() if p.ndim == 1 else None)
    if kind == "model":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for param in copied.parameters():
                param.zero_()
        copied.load_state_dict(torch.load(file))
    optimizers = [[torch.optim.AdamW(m.parameters(), lr=0.01)] for m in (plain, copied)]
    train((plain, copied), optimizers, range(STEPS))
    assert largest_difference(plain, copied) < EXACT


# --- experts that are plain parameters ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW foreach", "local SGD", "Adagrad", "matrices"])
@on_ranks(4)
def test_optimizers_step_plain_experts(kind: str) -> None:
    torch.manual_seed(3)
    plain = Model().double()
    model: typing.Any = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    first = mesh["ep"].get_local_rank() * NUM_EXPERTS // 2
    own = slice(first, first + NUM_EXPERTS // 2)
    of_experts = set()
    for block in model.blocks:
        block.ep = mesh["ep"].get_group()
        for name, param in [*block.experts.named_parameters()]:
            part = nn.Parameter(param.detach()[own].clone())
            block.experts.register_parameter(name, part)
            of_experts.add(part)
    for module in (*model.blocks, model):
        fully_shard(module, shard_placement_fn=lambda p: mesh["fsdp"] if p in of_experts else None)
        module.set_gradient_divide_factor(dist.get_world_size())
    optimizers = [
        OPTIMIZERS[kind](plain, is_sharded=False),
        OPTIMIZERS[kind](model, is_sharded=True),
    ]
    train((plain, model), optimizers, range(STEPS))
    for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        part = wanted[own] if ".experts." in name else wanted
        assert (found.full_tensor() - part).abs().max() < EXACT, name
