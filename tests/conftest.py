"""Fixtures of all tests: ``spawn``, ``spawn_errors`` and ``run``; profiles of hypothesis."""

from __future__ import annotations

import typing

import hypothesis
import pytest

import parity
import workers
from litter import pytest_sessionfinish, pytest_sessionstart  # noqa: F401 - hooks

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Examples that start or import things take long the first time only. The same ones are tried in
# every run, so that none is red by chance; `--hypothesis-profile fresh` tries others.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
# Where CI is set hypothesis would draw the same examples, whatever the seed.
hypothesis.settings.register_profile("fresh", deadline=None, database=None, derandomize=False)
hypothesis.settings.load_profile("fixed")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Say how to try the same examples again."""
    seed = config.getoption("--hypothesis-seed", default=None)
    if exitstatus and seed is not None:
        again = f"--hypothesis-profile fresh --hypothesis-seed {seed}"
        terminalreporter.write_line(f"the same examples again: pytest {again}", red=True)


@pytest.fixture(scope="session")
def pools() -> Iterator[workers.Pools]:
    """Worker processes of this session; none is left when it ends."""
    with workers.Pools() as opened:
        yield opened


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated",
        action="store_true",
        help="run what is spawned on a simulated accelerator (tests/streams)",
    )
    parser.addoption(
        "--large",
        action="store_true",
        help="treat all groups of CPU ranks as those of 1 MiB and more: see CONTRIBUTING.md",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--simulated"):
        from not_simulated import reason_to_skip

        for item in items:
            reason = reason_to_skip(item.nodeid)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def spawn(request: pytest.FixtureRequest, pools: workers.Pools) -> workers.Spawn:
    """``spawn(fn, world_size, *args, timeout_s=60)``: what ``fn(*args)`` returned, by rank."""
    return _as_asked(request, pools.spawn)


@pytest.fixture
def spawn_errors(request: pytest.FixtureRequest, pools: workers.Pools) -> workers.Spawn:
    """``spawn_errors(fn, world_size, *args, timeout_s=60)``: what ``fn(*args)`` raised, by rank."""
    return _as_asked(request, pools.spawn_errors)


def _as_asked(request: pytest.FixtureRequest, spawn: workers.Spawn) -> workers.Spawn:
    """Return what runs a function in every rank, in the way that an option has asked for."""
    way: Callable[..., typing.Any]
    if request.config.getoption("--simulated"):
        from simulation import simulated as way
    elif request.config.getoption("--large"):
        from allocated import with_large_groups as way
    else:
        return spawn

    def in_this_way(
        fn: typing.Any, world_size: int, *args: typing.Any, timeout_s: float = 60
    ) -> typing.Any:
        if fn is workers.in_each:  # Each case has a device of its own.
            choices, *args_of_case = args
            call: tuple[typing.Any, ...] = (fn, world_size, choices, way, *args_of_case)
        else:
            call = (way, world_size, fn, *args)
        return spawn(*call, timeout_s=timeout_s)

    return in_this_way


@pytest.fixture
def run(request: pytest.FixtureRequest, spawn: workers.Spawn) -> parity.Run:
    """Run a parity case on a backend and a mesh: see `parity`, whose `on_meshes` chooses them."""
    return parity.Run(*request.param, spawn)
