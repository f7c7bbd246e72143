"""Gradients that travel compressed over the replicate axis: `shardkit.compression`."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import shardkit.checkpoint
from models import CASES
from parity import compare_training
from reference import (
    LOSS_TOLERANCE,
    Differences,
    assert_within,
    full_parameters,
    global_batch,
    make_mesh,
    my_batch,
    rank_batch,
    shard,
)
from shardkit import (
    CheckpointError,
    CPUOffloadPolicy,
    GradientPiece,
    MixedPrecisionPolicy,
    StateError,
    compression,
)
from shardkit.compression import PowerSGD, bf16_compress, compress_gradients, fp16_compress
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence


pytestmark = pytest.mark.helpers

MESHES = ((2, 1), (4, 1), (2, 2))  # (n, 1) is what others call NO_SHARD.
on_all_meshes = pytest.mark.parametrize("mesh", MESHES, ids=str)
CASE = CASES["gpt"]


def ranks_of(mesh: tuple[int, ...]) -> int:
    return torch.Size(mesh).numel()


def plain_and_sharded(mesh: tuple[int, ...], **options: typing.Any) -> tuple[nn.Module, typing.Any]:
    torch.manual_seed(0)
    plain = CASE.make()
    return plain, shard(CASE, copy.deepcopy(plain), make_mesh(mesh), **options)


def full_rank(**options: typing.Any) -> PowerSGD:
    """Compress everything that has rows, but leave nothing out."""
    return PowerSGD(10_000, start_after=0, min_compression_rate=0.0, **options)


def test_the_rest_of_a_range_whatever_the_order() -> None:
    places = {"late": (6, 1, 3), "early": (1, 2, 2)}
    matrices = [compression.Matrix(name, *place, rank=1) for name, place in places.items()]
    rest = compression.rest_of(matrices, torch.arange(10))
    assert [part.tolist() for part in rest] == [[0], [5], [9]]


# --- nothing is lost where nothing need be --------------------------------------------------------


def train_at_full_rank(mesh: tuple[int, ...], options: dict[str, typing.Any]) -> Differences:
    plain, model = plain_and_sharded(mesh, **options)
    compress_gradients(model, full_rank())
    return compare_training(CASE, model, plain)


@on_all_meshes
def test_at_full_rank_training_is_as_without(spawn: Spawn, mesh: tuple[int, ...]) -> None:
    by_rank = spawn(train_at_full_rank, ranks_of(mesh), mesh, {})
    # Two products of matrices more.
    assert_within(by_rank, loss=5 * LOSS_TOLERANCE, grad=1e-5, parameter=1e-5)


def test_at_full_rank_with_offloaded_shards(spawn: Spawn) -> None:
    by_rank = spawn(train_at_full_rank, 4, (2, 2), {"offload_policy": CPUOffloadPolicy()})
    assert_within(by_rank, loss=5 * LOSS_TOLERANCE, grad=1e-5, parameter=1e-5)


@on_all_meshes
@on_ranks("mesh")
def test_the_first_reductions_are_not_compressed(mesh: tuple[int, ...]) -> None:
    plain, model = plain_and_sharded(mesh)
    compress_gradients(model, PowerSGD(1, start_after=1_000))
    assert_within(
        [compare_training(CASE, model, plain)], loss=LOSS_TOLERANCE, grad=1e-6, parameter=1e-6
    )


# --- as the algorithm says ------------------------------------------------------------------------


class Matrix(nn.Module):
    """One matrix whose gradient is what is passed."""

    def __init__(self, rows: int = 12, columns: int = 10) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight * slope).sum()


def slopes(step: int, rank: int, *, low: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if low:
        return torch.randn(12, 1, generator=generator) @ torch.ones(1, 10)
    return torch.randn(12, 10, generator=generator)


def reference(steps: int, rank: int, *, warm_start: bool) -> list[Tensor]:
    """Return what Vogels et al. send with two workers, all in fp64, in one process."""
    errors = [torch.zeros(12, 10, dtype=torch.float64) for _ in range(2)]
    second: Tensor | None = None
    result = []
    for step in range(steps):
        values = [slopes(step, w).double() + errors[w] for w in range(2)]
        if second is None or not warm_start:
            from shardkit.compression import Matrix as Described
            from shardkit.compression import random_factor

            described = Described("weight", 0, 12, 10, rank)
            iteration = 0 if warm_start else step + 1
            second = random_factor(described, 0, iteration, torch.zeros(1, dtype=torch.float64))
        first = torch.linalg.qr(sum(v @ torch.linalg.qr(second)[0] for v in values))[0]
        second = sum(v.T @ first for v in values)
        approximation = first @ second.T / 2
        errors = [value - approximation for value in values]
        result.append(approximation)
    return result


def train_matrix(rank: int, options: dict[str, typing.Any]) -> list[Tensor]:
    model: typing.Any = shardkit.fully_shard(Matrix(), make_mesh((2, 1)))
    compress_gradients(model, PowerSGD(rank, start_after=0, min_compression_rate=1.0, **options))
    result = []
    for step in range(4):
        model(slopes(step, dist.get_rank())).backward()
        result.append(model.weight.grad.full_tensor().clone())
        model.zero_grad()
    return result


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("warm_start", [True, False])
def test_gradients_are_those_of_the_algorithm(spawn: Spawn, rank: int, *, warm_start: bool) -> None:
    expected = reference(4, rank, warm_start=warm_start)
    for grads in spawn(train_matrix, 2, rank, {"warm_start": warm_start}):
        for grad, wanted in zip(grads, expected, strict=True):
            assert torch.allclose(grad, wanted.float(), atol=1e-5)


def sums_of_gradients(use_error_feedback: bool) -> float:
    """Return how far the sum of 60 gradients is from the sum of what they should be."""
    model: typing.Any = shardkit.fully_shard(Matrix(), make_mesh((2, 1)))
    hook = PowerSGD(
        1, start_after=0, min_compression_rate=1.0, use_error_feedback=use_error_feedback
    )
    compress_gradients(model, hook)
    for _ in range(60):
        model(slopes(0, dist.get_rank())).backward()  # Accumulated.
    expected = 30 * (slopes(0, 0) + slopes(0, 1))
    return ((model.weight.grad.full_tensor() - expected).norm() / expected.norm()).item()


def test_what_is_left_out_comes_later(spawn: Spawn) -> None:
    with_feedback = spawn(sums_of_gradients, 2, True)
    without = spawn(sums_of_gradients, 2, False)
    assert all(value < 0.1 for value in with_feedback)
    assert all(value > 0.4 for value in without)


def quadratic(hook: str) -> float:
    """Return the loss of a least-squares problem after 150 steps."""
    torch.manual_seed(0)
    target = torch.randn(24, 16)
    model: typing.Any = shardkit.fully_shard(nn.Linear(16, 24, bias=False), make_mesh((2, 2)))
    hooks: dict[str, typing.Any] = {
        "none": None,
        "powersgd": PowerSGD(2, start_after=5, min_compression_rate=1.0),
        "bf16": bf16_compress,
        "fp16": fp16_compress,
    }
    compress_gradients(model, hooks[hook])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(150):
        x = torch.randn(32, 16, generator=generator)
        loss = (model(x) - x @ target.T).square().mean(0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("hook", ["none", "powersgd", "bf16", "fp16"])
def test_training_converges(spawn: Spawn, hook: str) -> None:
    assert all(loss < 1e-3 for loss in spawn(quadratic, 4, hook))


# --- what travels ---------------------------------------------------------------------------------


class Counting:
    """An axis that notes what goes over it."""

    def __init__(self, axis: typing.Any, log: list[tuple[torch.dtype, int]]) -> None:
        self.size, self.rank = axis.size, axis.rank
        self._axis, self._log = axis, log

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        self._log.append((tensor.dtype, tensor.numel()))
        self._axis.all_reduce(tensor, op)


def count(hook: typing.Any, mesh: tuple[int, ...]) -> list[tuple[torch.dtype, int]]:
    model: typing.Any = nn.Linear(64, 32)
    shardkit.fully_shard(model, make_mesh(mesh))
    log: list[tuple[torch.dtype, int]] = []

    def counting(
        tensor: Tensor, pieces: Sequence[GradientPiece], axis: typing.Any, unit: float
    ) -> None:
        assert sum(piece.stop - piece.start for piece in pieces) <= tensor.numel()
        assert unit == 1.0 / dist.get_world_size()
        hook(tensor, pieces, Counting(axis, log), unit)

    compress_gradients(model, counting)
    model(torch.ones(2, 64)).sum().backward()
    return log


def test_bytes_on_the_wire(spawn: Spawn) -> None:
    """32 rows of 64 and a bias of 32: 2080 numbers."""
    assert spawn(count, 2, bf16_compress, (2, 1)) == [[(torch.bfloat16, 2080)]] * 2
    assert spawn(count, 2, fp16_compress, (2, 1)) == [[(torch.float16, 2080)]] * 2
    low_rank = PowerSGD(2, start_after=0)
    # The bias, 2 x 32 and 2 x 64 numbers: 896 bytes instead of 8320.
    expected = [(torch.float32, 32), (torch.float32, 64), (torch.float32, 128)]
    assert spawn(count, 2, low_rank, (2, 1)) == [expected] * 2
    for sent in spawn(count, 4, low_rank, (2, 2)):
        # Shards of 1040 numbers: 16 rows and 16 numbers of the next, or 15 rows, 48 and the bias.
        assert sum(numel for _, numel in sent) in (16 + 32 + 128, 48 + 32 + 30 + 128)


def biased(name: str, size: tuple[int, int]) -> int:
    del size
    return 0 if "fc1" in name else 3


def replicas_agree(mesh: tuple[int, ...], policy: MixedPrecisionPolicy) -> None:
    _, model = plain_and_sharded(mesh, mp_policy=policy)
    compress_gradients(model, PowerSGD(biased, start_after=1, min_compression_rate=1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        CASE.loss(model, my_batch(CASE, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.check_replicas()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_replicas_stay_equal(spawn: Spawn, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    spawn(replicas_agree, 4, (2, 2), policy)
    spawn(replicas_agree, 2, (2, 1), policy)


def cast_gradients(mesh: tuple[int, ...]) -> Differences:
    plain, model = plain_and_sharded(mesh)
    differences = Differences()
    for hook in (bf16_compress, fp16_compress):
        compress_gradients(model, hook)
        CASE.loss(model, my_batch(CASE, 0)).backward()
        CASE.loss(plain, global_batch(CASE, 0)).backward()
        differences.note_grads(model, plain)
        model.zero_grad()
        plain.zero_grad()
    return differences


@on_all_meshes
def test_gradients_in_16_bits(spawn: Spawn, mesh: tuple[int, ...]) -> None:
    # bf16 has 8 bits, gradients are below 1.
    by_rank = spawn(cast_gradients, ranks_of(mesh), mesh)
    assert_within(by_rank, grad=8e-3)
    assert all(differences["grad"] > 0 for differences in by_rank)


@on_ranks(2)
def test_gradients_that_are_not_finite() -> None:
    """A gradient that is not finite stays so, and leaves nothing behind."""
    model: typing.Any = shardkit.fully_shard(Matrix(), make_mesh((2, 1)))
    compress_gradients(model, full_rank())
    model(slopes(0, dist.get_rank())).backward()
    model.zero_grad()
    bad = slopes(1, 0)
    if dist.get_rank() == 1:
        bad[3, 4] = float("inf")
    model(bad).backward()
    assert not model.weight.grad.full_tensor().isfinite().all()
    model.zero_grad()
    model(slopes(2, dist.get_rank())).backward()
    expected = (slopes(2, 0) + slopes(2, 1)) / 2
    assert torch.allclose(model.weight.grad.full_tensor(), expected, atol=1e-5)


# --- state ----------------------------------------------------------------------------------------


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, which: Sequence[int]
) -> dict[str, Tensor | None]:
    for step in which:
        CASE.loss(model, rank_batch(CASE, 0, step)).backward()  # The same on all ranks.
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def make_run(mesh: tuple[int, ...]) -> tuple[typing.Any, torch.optim.Optimizer, PowerSGD]:
    _, model = plain_and_sharded(mesh)
    hook = PowerSGD(1, start_after=2, min_compression_rate=1.0)
    compress_gradients(model, hook)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), hook


def save_run(path: pathlib.Path, mesh: tuple[int, ...]) -> dict[str, Tensor | None]:
    model, optimizer, hook = make_run(mesh)
    steps(model, optimizer, range(4))
    shardkit.checkpoint.save(path, model, optimizer, powersgd=hook)
    return steps(model, optimizer, range(4, 7))


def load_run(path: pathlib.Path, mesh: tuple[int, ...]) -> dict[str, Tensor | None]:
    model, optimizer, hook = make_run(mesh)
    shardkit.checkpoint.load(path, model, optimizer, powersgd=hook)
    return steps(model, optimizer, range(4, 7))


def load_without(path: pathlib.Path, mesh: tuple[int, ...]) -> dict[str, Tensor | None]:
    model, optimizer, _ = make_run(mesh)
    shardkit.checkpoint.load(path, model, optimizer)
    return steps(model, optimizer, range(4, 7))


def largest(found: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> float:
    return max(
        (value - expected[0][name]).abs().max().item()
        for values in found
        for name, value in values.items()
    )


def test_training_goes_on_from_a_checkpoint(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "step"
    expected = spawn(save_run, 4, path, (2, 2))
    # The mean of two errors instead of each: rounding.
    assert largest(spawn(load_run, 4, path, (2, 2)), expected) < 2e-6
    assert largest(spawn(load_without, 4, path, (2, 2)), expected) > 1e-4


def test_training_goes_on_with_another_number_of_replicas(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    """All ranks have the same batch, so the numbers do not depend on how many there are."""
    path = tmp_path / "step"
    expected = spawn(save_run, 2, path, (2, 1))
    assert largest(spawn(load_run, 4, path, (4, 1)), expected) < 2e-6
    assert largest(spawn(load_without, 4, path, (4, 1)), expected) > 1e-4


def errors_on(path: pathlib.Path, mesh: tuple[int, ...], *, loads: bool) -> dict[str, Tensor]:
    model, optimizer, hook = make_run(mesh)
    if loads:
        shardkit.checkpoint.load(path, model, optimizer, powersgd=hook)
    else:
        steps(model, optimizer, range(4))
        shardkit.checkpoint.save(path, model, optimizer, powersgd=hook)
    state = hook.state_dict()
    assert state["iteration"] == 4
    return {name: value.full_tensor() for name, value in state["error"].items()}


def save_errors(path: pathlib.Path, mesh: tuple[int, ...]) -> dict[str, Tensor]:
    return errors_on(path, mesh, loads=False)


def load_errors(path: pathlib.Path, mesh: tuple[int, ...]) -> dict[str, Tensor]:
    return errors_on(path, mesh, loads=True)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (2, 1)], ids=str)
def test_errors_are_loaded_on_any_mesh(
    spawn: Spawn, tmp_path: pathlib.Path, mesh: tuple[int, ...]
) -> None:
    path = tmp_path / "step"
    expected = spawn(save_errors, 4, path, (2, 2))
    assert any(value.abs().max() > 1e-4 for value in expected[0].values())
    assert largest(spawn(load_errors, ranks_of(mesh), path, mesh), expected) < 1e-7


# --- errors ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_refused() -> None:
    for options, text in (
        ({"rank": 0}, "rank must be an int above 0, or a function, got 0"),
        ({"rank": 2.0}, r"rank must be an int above 0, or a function, got 2\.0"),
        ({"warm_start": "no"}, "warm_start must be True or False, got 'no'"),
        ({"use_error_feedback": "no"}, "use_error_feedback must be True or False, got 'no'"),
        ({"start_after": -1}, "start_after must be a number of at least 0, got -1"),
        ({"start_after": "10"}, "start_after must be a number of at least 0, got '10'"),
        ({"min_compression_rate": "2"}, "min_compression_rate must be a number .* got '2'"),
    ):
        with pytest.raises(StateError, match=text):
            PowerSGD(**options)
    piece = GradientPiece("weight", (8, 8), 0, 64, 0)
    with pytest.raises(StateError, match=r"rank of 'weight' must be an int.*returned 2\.0 for 8 "):
        compression.find_matrices([piece], lambda _, shape: shape[0] / 4, 1.0)
    hook = PowerSGD()
    for call in (hook.state_dict, lambda: hook.load_state_dict({})):
        with pytest.raises(StateError, match="this PowerSGD belongs to no model"):
            call()
    with pytest.raises(StateError, match="takes a sharded module, got Linear"):
        compress_gradients(nn.Linear(2, 2), hook)
    _, on_one_axis = plain_and_sharded((2,))
    with pytest.raises(StateError, match=r"no group of this FSDPGPT has a replicate axis.*\(n, 1"):
        compress_gradients(on_one_axis, hook)
    with pytest.raises(StateError, match="is on a mesh of one axis, which has no all-reduce"):
        on_one_axis.set_custom_all_reduce(bf16_compress)
    compress_gradients(on_one_axis, None)
    _, model = plain_and_sharded((2, 1))
    compress_gradients(model, hook)
    compress_gradients(model, hook)
    _, other = plain_and_sharded((2, 1))
    with pytest.raises(StateError, match="this PowerSGD has the errors of another model's"):
        compress_gradients(other, hook)
    state = hook.state_dict()
    missing = {**state, "error": {k: v for k, v in state["error"].items() if k != "head.weight"}}
    missing["error"].pop("tokens.weight", None)
    with pytest.raises(CheckpointError, match=r"of PowerSGD has nothing of 'tokens\.weig"):
        hook.load_state_dict(missing)
    more = {**state, "error": {**state["error"], "x": torch.zeros(2, 2)}}
    with pytest.raises(CheckpointError, match="the state of PowerSGD is of a model with 'x'"):
        hook.load_state_dict(more)
    shape = {**state, "error": {**state["error"], "positions": torch.zeros(2, 2)}}
    with pytest.raises(CheckpointError, match=r"has 'positions' of shape \(2, 2\), here it has"):
        hook.load_state_dict(shape)
    model(my_batch(CASE, 0)[0])
    with pytest.raises(StateError, match="is inside of another sharded module"):
        compress_gradients(model.blocks[0], PowerSGD())


@on_ranks(2)
def test_copies_of_a_model_do_not_share_it() -> None:
    _, model = plain_and_sharded((2, 1))
    calls: list[int] = []

    def hook(
        tensor: Tensor, pieces: Sequence[GradientPiece], axis: typing.Any, unit: float
    ) -> None:
        del pieces, unit
        calls.append(tensor.numel())
        axis.all_reduce(tensor, "sum")

    compress_gradients(model, hook)
    copied = copy.deepcopy(model)
    CASE.loss(copied, my_batch(CASE, 0)).backward()
    assert not calls
    CASE.loss(model, my_batch(CASE, 0)).backward()
    assert len(calls) == 3
    for mine, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


@on_ranks(2)
def test_a_hook_of_ddp_is_refused() -> None:
    model = shardkit.fully_shard(Matrix(), make_mesh((2, 1)))
    with pytest.raises(StateError, match=r"takes \(tensor, .*'bf16_compress_hook' does not"):
        compress_gradients(model, default_hooks.bf16_compress_hook)
    without_signature: typing.Any = type
    compress_gradients(model, without_signature)
