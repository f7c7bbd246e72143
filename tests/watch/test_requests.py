"""What the watch costs: a steady step sends nothing to the store."""

from __future__ import annotations

import typing

import pytest
import torch
from parting_cases import SMALL, Run
from torch import nn

from shardkit.backends.watch.watchdog import current_watchdog

if typing.TYPE_CHECKING:
    from workers import Spawn


def count_requests(mesh_shape: tuple[int, ...]) -> dict[str, int]:
    """Return how often ranks had to agree, in each part of a training."""
    run = Run(-1, mesh_shape, SMALL)
    run.shard()
    watchdog = current_watchdog()
    counts, before = {}, 0

    def note(name: str) -> None:
        nonlocal before
        counts[name] = watchdog.num_counted_in - before
        before = watchdog.num_counted_in

    def evaluate() -> None:
        with torch.no_grad():
            run.loss()

    run.step()
    note("first step")
    run.step()
    note("second step")
    run.step()
    note("third step")
    for _ in range(5):
        run.step()
    note("steady steps")
    evaluate()
    evaluate()
    run.step()
    note("first evaluation")
    evaluate()
    evaluate()
    run.step()
    note("later evaluation")
    for _ in range(4):
        run.loss().backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
    note("clipping begins")
    for _ in range(5):
        run.loss().backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()
    note("steady clipping")
    return counts


def test_a_steady_step_sends_nothing(spawn: Spawn) -> None:
    for counts in spawn(count_requests, 2, (2,)):
        assert counts["steady steps"] == 0
        assert counts["steady clipping"] == 0
        assert 0 < counts["first step"] <= 20
        assert counts["second step"] <= 6, "what is next is gathered ahead now"
        assert counts["third step"] <= 2, "how such a step goes over into the next one"
        assert counts["later evaluation"] <= 4, "where it begins and where it ends"


def test_nor_does_one_on_two_axes(spawn: Spawn) -> None:
    for counts in spawn(count_requests, 4, (2, 2)):
        assert counts["steady steps"] == counts["steady clipping"] == 0


def drop_layers(num_steps: int) -> tuple[int, list[int]]:
    """Train with blocks left out at random, the same on all ranks."""
    run = Run(-1, (2,), SMALL)
    run.shard()
    numbers = torch.Generator().manual_seed(7)
    for _ in range(num_steps):
        kept = torch.rand(4, generator=numbers) < 0.7
        run.model.order = [i for i in range(4) if kept[i]]
        run.step()
    return current_watchdog().num_counted_in, run.model.order


def test_layers_that_all_ranks_drop_alike_are_agreed_on(spawn: Spawn) -> None:
    (requests, order), other = spawn(drop_layers, 2, 12)
    assert requests > 0
    assert other[1] == order


def count_keys(num_steps: int) -> tuple[int, int]:
    """Return how many keys the store has after ten steps, and after many."""
    run = Run(-1, (2,), SMALL)
    run.shard()
    store = current_watchdog()._store  # noqa: SLF001
    before = 0
    for step in range(num_steps):
        run.step()
        if step == 10:
            before = store.connection.num_keys()
        if step % 100 == 99:
            with torch.no_grad():
                run.loss()
    return before, store.connection.num_keys()


@pytest.mark.parametrize("num_steps", [120, pytest.param(1000, marks=pytest.mark.parting)])
def test_keys_of_the_store_do_not_grow(spawn: Spawn, num_steps: int) -> None:
    for before, after in spawn(count_keys, 2, num_steps, timeout_s=120):
        assert after <= before + 4  # The other rank may be a collective ahead.


def accumulate(num_steps: int) -> tuple[int, int]:
    """Return how often ranks had to agree in the first steps, and in steady ones."""
    run = Run(-1, (2,), SMALL)
    run.shard()
    counts = []
    for step in range(num_steps):
        if step == num_steps // 2:
            counts.append(current_watchdog().num_counted_in)
        for micro in range(3):
            run.model.set_requires_gradient_sync(micro == 2)
            run.loss().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    counts.append(current_watchdog().num_counted_in - counts[0])
    return counts[0], counts[1]


def test_micro_batches_send_nothing(spawn: Spawn) -> None:
    for first, steady in spawn(accumulate, 2, 10):
        assert first > 0
        assert steady == 0
