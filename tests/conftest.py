"""Fixtures of all tests: ``spawn``, ``spawn_errors`` and ``run``; the hypothesis profile."""

from __future__ import annotations

import os
import typing

import hypothesis
import pytest

import backends
import workers

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Examples that start or import things take long the first time only.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def pools() -> Iterator[workers.Pools]:
    """Worker processes of this session; none is left when it ends."""
    with workers.Pools() as opened:
        yield opened


@pytest.fixture
def spawn(pools: workers.Pools) -> Callable[..., list[typing.Any]]:
    """``spawn(fn, world_size, *args, timeout_s=60)``: what ``fn(*args)`` returned, by rank."""
    return pools.spawn


@pytest.fixture
def spawn_errors(pools: workers.Pools) -> Callable[..., list[workers.Raised | None]]:
    """``spawn_errors(fn, world_size, *args, timeout_s=60)``: what ``fn(*args)`` raised, by rank."""
    return pools.spawn_errors


@pytest.fixture
def run(request: pytest.FixtureRequest, spawn: Callable[..., list[typing.Any]]) -> backends.Run:
    """Run a parity case on a backend and a mesh: see `backends`, whose `on_meshes` chooses them."""
    return backends.Run(*request.param, spawn)
