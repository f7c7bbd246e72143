"""How a parity case runs on each backend.

A case is a function ``case(ranks, *args)`` at module level that compares a sharded model with a
plain one; all it knows of where it runs is `reference.Ranks`. A test says on which meshes, and gets
the fixture `run`, of every backend in turn:

    @on_meshes((2,), (2, 2))
    def test_something(run: Run) -> None:
        assert_within(run(case, "gpt"), grad=1e-6)

On gloo, ``run`` calls the case in as many processes as there are ranks. XLA has one process, which
computes for four virtual devices of the CPU: there a case runs once, with the batches of all ranks.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import typing

import pytest

from reference import Ranks, make_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers import Spawn

NUM_XLA_DEVICES = 4
XLA_MARKS = (
    pytest.mark.xla,
    # torch_xla's own, of Python's and of XLA's coming sharding propagation.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
)


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


@dataclasses.dataclass(frozen=True)
class Run:
    """``run(case, *args)``: what ``case(ranks, *args)`` returned in each process of a backend."""

    backend: str
    mesh_shape: tuple[int, ...]
    spawn: Spawn

    def __call__(self, case: Callable[..., typing.Any], *args: typing.Any) -> list[typing.Any]:
        if self.backend == "gloo":
            world_size = math.prod(self.mesh_shape)
            return self.spawn(run_on_gloo, world_size, self.mesh_shape, case, *args)
        from xla_ranks import run_on_xla

        return [run_on_xla(self.mesh_shape, case, *args)]


def run_on_gloo(
    mesh_shape: tuple[int, ...], case: Callable[..., typing.Any], *args: typing.Any
) -> typing.Any:
    """Run a case in a process that is one rank."""
    return case(Ranks(make_mesh(mesh_shape)), *args)
