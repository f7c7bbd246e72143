"""A wait, a fence, a kept reference or an order that is missing is found: none is there in vain."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import typing

import pytest
from mutations import MUTATIONS, TAG, Mutation, complaints_of, last_line, named_statements
from scenarios import NUM_RANKS, complaints

import shardkit

if typing.TYPE_CHECKING:
    from workers import Spawn

ORDERING = re.compile(
    r"\.wait\(|\.wait_fence\(|\.wait_event\(|\.record_event\(|\.fence\(|\.synchronize\(|\.keep\(|s\.join\(|follow_compute\(|follow_writes\(|_late_writes\("
    r"|settle_host_reads\(|\.passed\(|\.after_optimizer\(|_follow\(|wait_sent\(|_kept"
)
"""What lines that order things look like, in the modules below."""

WATCHED = (
    "backends.accelerator",
    "_params.memory",
    "_params.flat_store",
    "_params.gradients",
    "_runtime.traffic",
)

NEEDLESS = {
    "_params.flat_store": {
        "streams.wait_fence(self._receive.acquire(pool))": "receive buffers are the CPU's",
        "def ": "a definition",
        "_kept_part": "a definition; the wait for kept parts is taken away where they are gathered",
        "return self._kept_part": "a definition",
    },
    "backends.accelerator": {
        "def ": "a definition",
        "return self._device.current_stream().record_event()": "fences are taken away",
        "issued.wait([work])": "a wait of the host, that is no order of streams",
        "_kept: ": "a definition",
        "self._kept.clear()": "gives back; what holds is taken away in `keep`",
        "event = self._gather.record_event()": "an event; its waits are taken away",
        "start = self.fence()": "an event; its waits are taken away",
        "stream = self._follow(": "what it does is taken away",
        "self.fence().synchronize()": "for tensor subclasses: see the next test",
        "return DeviceCheckHandle(": "an event; its wait is taken away",
        "self._pinned": "a definition",
        "self._kept = ": "a definition, or memory of an exchange that has been waited for",
        "if self._kept:": "an exchange between owners that an error dropped",
        "self._device.current_stream().wait_event(self._event)": "of exchanges",
        "stream.wait_event(self.device.current_stream().record_event())": "of such exchanges",
        "event = stream.record_event()": "an event of such an exchange",
        "issued.started(": "an event that only the watch looks at",
        "self._stream.wait_event(before.record_event())": "of a step before it is captured",
        "before.wait_event(self._stream.record_event())": "of a step before it is captured",
        "event = self._device.current_stream().record_event()": "an event that only the watch asks",
    },
    "_params.memory": {
        "def ": "a definition",
        "return self._streams.fence()": "fences are taken away where they are used",
        "_kept": "a definition",
    },
    "_params.gradients": {
        "def ": "a definition",
        "fence = pool.fence()": "every gather after a reset comes after `follow_compute`",
        "started.handle.wait_sent()": "only frees: `join` has been called before",
        "pool.passed(started.handle.fence)": "only frees: `join` has been called before",
    },
    "_runtime.traffic": {
        "def ": "a definition",
        "handle.wait()": "its calls are taken away",
        "self._streams.follow_compute()": "its calls are taken away",
        "settle_host_reads(compute=": "its calls are taken away",
        "streams.follow_compute()": "its calls in gathers are taken away",
        "streams.start_all_reduce_max(": "a wait of the host, that is no order of streams",
        "reducing.gradients.wait_sent(self._slots)": "its waits are taken away",
        "self._streams.wait_fence(fence)": "of a gather that got no memory: see test_interruptions",
    },
}
"""Lines without a mutation, by how they begin or what they hold, and why."""


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(f"shardkit.{module}")
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.streams
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_missing_piece_is_found(spawn: Spawn, mutation: Mutation) -> None:
    """And with it, the same processes find nothing."""
    num_ranks = NUM_RANKS.get(mutation.scenario, 2)
    by_rank = spawn(complaints_of, num_ranks, mutation)
    assert any(by_rank), f"nobody misses it: {mutation}"
    assert not any(spawn(complaints, num_ranks, mutation.scenario, mutation.simulation_options))


@pytest.mark.parametrize("module", WATCHED)
def test_every_line_that_orders_has_a_name_or_a_reason(module: str) -> None:
    source = source_of(module)
    named = {
        number
        for statement in named_statements(source).values()
        for number in range(statement.lineno, last_line(statement) + 1)
    }
    codes = [line.partition("#")[0].strip() for line in source.splitlines()]
    missing = [
        code
        for number, code in enumerate(codes, start=1)
        if ORDERING.search(code)
        and number not in named
        and not any(reason in code for reason in NEEDLESS[module])
    ]
    assert not missing, "name them and add to tests/streams/mutations.py, or say why not"


def test_every_name_has_a_mutation() -> None:
    folder = pathlib.Path(shardkit.__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    named = {
        (".".join(path.relative_to(folder).with_suffix("").parts), name)
        for path, source in sources.items()
        if TAG.search(source)
        for name in named_statements(source)
    }
    assert named == {(mutation.module, mutation.name) for mutation in MUTATIONS}
