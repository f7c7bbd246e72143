"""One harness for all backends: a sharded model beside a plain one, wherever its ranks are.

A case is a function ``case(ranks, *args)`` at module level that compares a sharded model with a
plain one; all it knows of where it runs is `Ranks`, which says how a model gets there, what of a
batch is passed to it, and how losses and tensors come back. There is one class of them per backend:

- `Ranks`: a rank is a process of gloo; with ``--simulated`` its backend is the accelerator's, over
  the device of `tests/streams`.
- `xla_ranks.XlaRanks`: one process computes for four virtual devices of the CPU; there a case runs
  once, with the batches of all ranks.
- `replica_ranks.ReplicaRanks`: a rank is a thread of a process that `torch_xla.launch` started.

A test says on which meshes, and gets the fixture `run`, of gloo and XLA in turn:

    @on_meshes((2,), (2, 2))
    def test_something(run: Run) -> None:
        assert_within(run(case, "gpt"), grad=1e-6)

Replicas take long to start: what runs on them is in one file, `tests/xla/test_replicas.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import CASES, Batch, Case
from reference import (
    OPTIMIZERS,
    STEPS,
    Differences,
    assert_within,
    full_grads,
    full_parameters,
    make_mesh,
    mean_over_ranks,
    own_grads,
    rank_batch,
    shard,
    step_all,
    train,
)
from workers import Spawn, in_each

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shardkit import DeviceMesh

NUM_XLA_DEVICES = 4
XLA_MARKS = (
    pytest.mark.xla,
    # torch_xla's own, of Python's and of XLA's coming sharding propagation.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
)


# --- what a case knows of where it runs -----------------------------------------------------------


class Ranks:
    """The ranks of a mesh as a case sees them; here each is a process, this one of them.

    Args:
        mesh: Over all ranks; by default none is passed to `fully_shard`.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.mesh = mesh

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    def make(self, case: Case) -> nn.Module:
        """Make the case's plain model, the same on all ranks."""
        torch.manual_seed(0)
        return case.make()

    def put(self, plain: nn.Module) -> typing.Any:
        """Return a copy of a plain model, to be sharded."""
        return copy.deepcopy(plain)

    def shard(self, case: Case, plain: nn.Module, **options: typing.Any) -> typing.Any:
        """Return a copy of a plain model, sharded as the case wants; options of `fully_shard`."""
        return shard(case, self.put(plain), self.mesh, **options)

    def send(self, by_rank: Sequence[Tensor]) -> Tensor:
        """Return what this process passes to a model, given what each rank is to have."""
        return by_rank[dist.get_rank()]

    def batch(self, case: Case, step: int) -> Batch:
        """Draw what this process passes to a sharded model in a step."""
        xs, ys = zip(*self.rank_batches(case, step), strict=True)
        return self.send(xs), self.send(ys)

    def rank_batches(self, case: Case, step: int) -> list[Batch]:
        """Draw the batch of each rank."""
        return [rank_batch(case, rank, step) for rank in range(self.world_size)]

    def global_batch(self, case: Case, step: int) -> Batch:
        """Draw the batches of all ranks and concatenate them: what a plain model is given."""
        xs, ys = zip(*self.rank_batches(case, step), strict=True)
        return torch.cat(xs), torch.cat(ys)

    def mean(self, loss: Tensor) -> Tensor:
        """Return a loss of the sharded model as the mean over all ranks, in fp64, on the CPU."""
        return mean_over_ranks(loss)

    def send_loss(self, by_rank: Sequence[Tensor]) -> Tensor:
        """Return what a loss of this process is, given that of each rank."""
        return by_rank[dist.get_rank()]

    def end_step(self) -> None:
        """Called after an optimizer's step of a sharded model."""


# --- a sharded model and a plain one --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlainRun:
    """What a plain model's training gave: of each step, and in the end."""

    losses: list[Tensor]
    grads: list[dict[str, Tensor | None]]
    parameters: dict[str, Tensor]


def run_plain(
    case: Case, plain: nn.Module, optimizer: str, ranks: Ranks, steps: int = STEPS
) -> PlainRun:
    """Train a plain model on the batches of all ranks."""
    batches = (ranks.global_batch(case, i) for i in range(steps))
    losses, grads = [], []
    for loss in train(case, plain, OPTIMIZERS[optimizer](plain.parameters()), batches):
        losses.append(loss.double())
        grads.append({n: None if g is None else g.clone() for n, g in full_grads(plain).items()})
    return PlainRun(losses, grads, full_parameters(plain))


def compare_with(
    case: Case, model: nn.Module, expected: PlainRun, optimizer: str, ranks: Ranks
) -> Differences:
    """Train a sharded model on this process's batches, beside what a plain one gave. Collective."""
    differences = Differences()
    batches = (ranks.batch(case, i) for i in range(len(expected.losses)))
    losses = train(case, model, OPTIMIZERS[optimizer](model.parameters()), batches, ranks.end_step)
    for loss, wanted, grads in zip(losses, expected.losses, expected.grads, strict=True):
        differences.note_all("grad", *own_grads(model, grads))
        differences.note("loss", ranks.mean(loss), wanted)
    differences.note_all("parameter", full_parameters(model), expected.parameters)
    return differences


def compare_training(
    case: Case,
    model: nn.Module,
    reference: nn.Module,
    optimizer: str = "sgd",
    steps: int = STEPS,
    ranks: Ranks | None = None,
) -> Differences:
    """Train both, the sharded model on this rank's batches and the plain one on all. Collective."""
    ranks = ranks or Ranks()
    expected = run_plain(case, reference, optimizer, ranks, steps)
    return compare_with(case, model, expected, optimizer, ranks)


ROWS = 8  # Of a batch that a `Pair` draws: 1, 2 and 4 ranks have equal parts of it.


class Pair:
    """A case's model, sharded, beside the same one, plain, on the CPU: both take the same steps.

    Args:
        ranks: Where.
        case: What is trained, or its name.
        optimizer: Makes the optimizer of each; by default the one named "sgd".
        prepare: Changes each model before the one is sharded.
        options: Of `fully_shard`.
    """

    def __init__(
        self,
        ranks: Ranks,
        case: Case | str,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = OPTIMIZERS["sgd"],
        prepare: Callable[[nn.Module], object] = lambda _: None,
        **options: typing.Any,
    ) -> None:
        self.ranks = ranks
        self.case = CASES[case] if isinstance(case, str) else case
        self.plain = ranks.make(self.case)
        self.sharded: typing.Any = ranks.put(self.plain)
        for model in (self.plain, self.sharded):
            prepare(model)
        shard(self.case, self.sharded, ranks.mesh, **options)
        self.optimizers = [optimizer(each.parameters()) for each in (self.plain, self.sharded)]
        self.generator = torch.Generator().manual_seed(1)

    def draw(self) -> Batch:
        """Draw the batches of all ranks, concatenated."""
        return self.case.batch(self.generator, ROWS)

    def send(self, batch: Batch) -> Batch:
        """Return what this process passes to the sharded model."""
        x, y = (self.ranks.send(part.chunk(self.ranks.world_size)) for part in batch)
        return x, y

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of the plain model and that of the sharded one, with their graphs."""
        return self.case.loss(self.plain, batch), self.case.loss(self.sharded, self.send(batch))

    def backward(self, batch: Batch, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Add gradients of both; return their losses."""
        plain, sharded = self.losses(batch)
        (plain * scale).backward()
        (sharded * scale).backward()
        return plain.detach(), sharded.detach()

    def update(self) -> None:
        """Let both optimizers step."""
        step_all(self.optimizers)
        self.ranks.end_step()

    def step(self) -> None:
        """Take a step of both; their losses are equal."""
        plain, sharded = self.backward(self.draw())
        self.update()
        torch.testing.assert_close(self.ranks.mean(sharded), plain.double(), rtol=0, atol=2e-6)

    def assert_equal(self, atol: float = 1e-6) -> None:
        """Compare parameters. Collective."""
        differences = Differences()
        differences.note_parameters(self.sharded, self.plain)
        assert_within([differences], parameter=atol)

    def assert_equal_gradients(self, atol: float = 1e-6) -> None:
        """Compare gradients. Collective."""
        differences = Differences()
        differences.note_grads(self.sharded, self.plain)
        assert_within([differences], grad=atol)


# --- how ranks are started ------------------------------------------------------------------------


def on_meshes(
    *gloo: tuple[int, ...], xla: Sequence[tuple[int, ...]] | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test's `run` over meshes, (shard,) or (replicate, shard), of every backend.

    Args:
        gloo: Meshes on gloo.
        xla: Those on XLA. By default the same, and the line of all devices for one that has
            another number of them.
    """
    if xla is None:
        has_all = (shape if math.prod(shape) == NUM_XLA_DEVICES else (4,) for shape in gloo)
        xla = tuple(dict.fromkeys(has_all))
    params = [pytest.param(("gloo", shape), id=f"gloo-{shape}") for shape in gloo]
    if importlib.util.find_spec("torch_xla"):
        params += [pytest.param(("xla", s), id=f"xla-{s}", marks=XLA_MARKS) for s in xla]
    return pytest.mark.parametrize("run", params, indirect=True)


def in_turns(
    first: Iterable[object], second: Iterable[object], third: Sequence[object]
) -> list[tuple[object, ...]]:
    """Return each pair of the first two, with one of the third in turns: a parametrization.

    Each of the third meets each of the first and of the second, where these are not fewer than it.
    """
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [(a, b, third[(i + j) % len(third)]) for (i, a), (j, b) in pairs]


@dataclasses.dataclass(frozen=True)
class Run:
    """``run(case, *args)``: what ``case(ranks, *args)`` returned in each process of a backend."""

    backend: str  # A key of `STARTS`.
    mesh_shape: tuple[int, ...]  # (shard,) or (replicate, shard).
    spawn: Spawn  # Runs a function in each of some processes, or of some replicas.

    def __call__(self, case: Callable[..., typing.Any], *args: typing.Any) -> list[typing.Any]:
        return self._start(case, *args)

    def each(
        self, choices: Mapping[str, object], case: Callable[..., typing.Any], *args: typing.Any
    ) -> dict[str, list[typing.Any]]:
        """Run several cases in one call: ``case(ranks, *args, choice)``, each with a mesh anew.

        Args:
            choices: The last argument of the case by a name for it, which errors tell.
            case: The case.
            args: Its first arguments.

        Returns:
            By name, what ``run(case, *args, choice)`` would return.
        """
        found = self._start(case, *args, choices=choices)
        return {name: [of_rank[name] for of_rank in found] for name in choices}

    def _start(
        self, *call: typing.Any, choices: Mapping[str, object] | None = None
    ) -> list[typing.Any]:
        spawn, in_rank = STARTS[self.backend](self.spawn)
        world_size = math.prod(self.mesh_shape)
        if choices is None:
            return spawn(in_rank, world_size, self.mesh_shape, *call)
        call = (choices, in_rank, self.mesh_shape, *call)
        return spawn(in_each, world_size, *call, timeout_s=60 + 20 * len(choices))


def run_in_process(
    mesh_shape: tuple[int, ...], case: Callable[..., typing.Any], *args: typing.Any
) -> typing.Any:
    """Run a case in a process that is one rank."""
    return case(Ranks(make_mesh(mesh_shape)), *args)


def _start_processes(spawn: Spawn) -> tuple[Spawn, Callable[..., typing.Any]]:
    return spawn, run_in_process


def _start_here(spawn: Spawn) -> tuple[Spawn, Callable[..., typing.Any]]:
    from xla_ranks import run_on_xla

    del spawn
    return _call_here, run_on_xla


def _call_here(
    fn: Callable[..., typing.Any], world_size: int, *args: typing.Any, timeout_s: float = 60
) -> list[typing.Any]:
    del world_size, timeout_s
    return [fn(*args)]


def _start_replicas(spawn: Spawn) -> tuple[Spawn, Callable[..., typing.Any]]:
    from replica_ranks import run_on_replica

    return spawn, run_on_replica


STARTS: dict[str, Callable[[Spawn], tuple[Spawn, Callable[..., typing.Any]]]] = {
    "gloo": _start_processes,
    "xla": _start_here,
    "replicas": _start_replicas,
}
"""By backend: what calls a function in ranks, and the function that runs a case in one."""
