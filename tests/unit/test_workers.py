"""The infrastructure of the distributed tests: pools of ranks, their failures, their clean-up."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
import typing

import pytest
import torch
import torch.distributed as dist

import workers
from workers import Spawn

if typing.TYPE_CHECKING:
    from collections.abc import Callable


def sum_of_ranks(factor: int) -> float:
    total = torch.tensor(float(dist.get_rank() * factor))
    dist.all_reduce(total)
    return total.item()


def rank_and_world_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def pid() -> int:
    return os.getpid()


def raise_on(failing_rank: int) -> int:
    print("before the failure")
    if dist.get_rank() == failing_rank:
        msg = "the shape is wrong"
        raise ValueError(msg)
    return dist.get_rank()


def raise_while_others_wait(failing_rank: int) -> None:
    raise_on(failing_rank)
    dist.barrier()


def raise_everywhere() -> None:
    msg = f"seen on rank {dist.get_rank()}"
    raise KeyError(msg)


def wait_in_a_collective() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def die_on(dying_rank: int) -> None:
    if dist.get_rank() == dying_rank:
        # To this thread: another one might die of it only after this function has returned.
        signal.raise_signal(signal.SIGSEGV)


def unpicklable() -> Callable[[], None]:
    return lambda: None


def change_state() -> None:
    dist.new_group([0])
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.rand(())
    os.environ["SHARDKIT_LEFT_BEHIND"] = "1"


def state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.rand(()).item(),
        "SHARDKIT_LEFT_BEHIND" in os.environ,
        dist.distributed_c10d.get_pg_count(),
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(spawn: Spawn, world_size: int) -> None:
    assert spawn(rank_and_world_size, world_size) == [
        (rank, world_size) for rank in range(world_size)
    ]


def test_ranks_communicate_and_get_arguments(spawn: Spawn) -> None:
    assert spawn(sum_of_ranks, 4, 10) == [60.0] * 4


def test_the_pool_is_kept_between_calls() -> None:
    with workers.Pools() as pools:
        assert pools.spawn(pid, 2) == pools.spawn(pid, 2)


def test_a_pool_with_many_threads_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers.Pools() as pools:
        before = pools.spawn(pid, 2)
        monkeypatch.setattr(workers, "_MAX_THREADS", 0)
        pools.spawn(state, 2)
        assert pools.pids(2) == []
        assert not set(before) & set(pools.spawn(pid, 2))


def test_every_call_starts_from_the_same_state(spawn: Spawn) -> None:
    before = spawn(state, 2)
    spawn(change_state, 2)
    assert spawn(state, 2) == before
    assert before[0] == before[1]


def draw_or_fail(last: str, choice: str) -> float:
    if choice == last:
        msg = "the shape is wrong"
        raise ValueError(msg)
    return torch.rand(()).item()


def test_cases_of_one_call_begin_alike_and_the_one_that_fails_is_named(spawn: Spawn) -> None:
    choices = {"first": "a", "second": "b", "third": "c"}
    for found in spawn(workers.in_each, 2, choices, draw_or_fail, ""):
        assert found == dict.fromkeys(choices, found["first"])
    by_name = workers.spawn_each(spawn, choices, draw_or_fail, 2, "")
    assert by_name == dict.fromkeys(choices, [found["first"]] * 2)
    with pytest.raises(workers.WorkerError) as caught:
        spawn(workers.in_each, 2, choices, draw_or_fail, "b")
    report = str(caught.value)
    assert report.count("ValueError: the shape is wrong\nin the case 'second'") == 2
    assert "case 'first'\ncase 'second'\n" in report
    assert "third" not in report


def test_a_failing_rank_is_named_with_its_traceback_and_output(spawn: Spawn) -> None:
    with pytest.raises(
        workers.WorkerError, match=re.escape("raise_on: failed on ranks [1] of 2")
    ) as caught:
        spawn(raise_on, 2, 1)
    report = str(caught.value)
    assert "rank 0 returned" in report
    assert "rank 1 raised ValueError" in report
    assert "raise ValueError(msg)\nValueError: the shape is wrong" in report
    # Gloo of torch 2.9 says on standard output that it is connected.
    assert re.search(r"output of rank 1\n(\[Gloo\].*\n)*before the failure", report)


def test_an_error_is_reported_although_other_ranks_hang(spawn: Spawn) -> None:
    begin = time.monotonic()
    with pytest.raises(workers.WorkerError, match="rank 1 raised ValueError") as caught:
        spawn(raise_while_others_wait, 2, 1)
    assert time.monotonic() - begin < 30, "waited for the timeout although a rank had failed"
    assert re.search(
        r"rank 0 was still running(.|\n)*in barrier(.|\n)*in raise_while_others_wait",
        str(caught.value),
    )


def test_a_hang_shows_the_stacks_of_every_rank_that_hangs(
    spawn: Spawn, pools: workers.Pools
) -> None:
    spawn(pid, 2)
    hung = pools.pids(2)
    with pytest.raises(workers.WorkerError, match=re.escape("failed on ranks [0] of 2")) as caught:
        spawn(wait_in_a_collective, 2, timeout_s=1)
    assert re.search(
        r"rank 0 was still running after 1(.|\n)*in wait_in_a_collective", str(caught.value)
    )
    assert_gone(hung)


def test_a_rank_that_dies_is_named_with_its_signal(spawn: Spawn) -> None:
    with pytest.raises(workers.WorkerError, match="rank 1 died of SIGSEGV") as caught:
        spawn(die_on, 2, 1)
    assert "in die_on" in str(caught.value)


def test_a_pool_killed_between_calls_is_reported_and_replaced(
    spawn: Spawn, pools: workers.Pools
) -> None:
    spawn(pid, 2)
    os.kill(pools.pids(2)[0], signal.SIGKILL)
    with pytest.raises(workers.WorkerError, match="rank 0 died of SIGKILL"):
        spawn(wait_in_a_collective, 2)
    assert spawn(sum_of_ranks, 2, 1) == [1.0, 1.0]


def test_a_result_that_cannot_be_sent_is_an_error(spawn: Spawn) -> None:
    with pytest.raises(workers.WorkerError, match=r"Can't (pickle|get) local object"):
        spawn(unpicklable, 2)


def test_a_function_that_ranks_cannot_import_is_refused_here(spawn: Spawn) -> None:
    errors = (AttributeError, TypeError, pickle.PicklingError)  # The last one from Python 3.14 on.
    with pytest.raises(errors, match=r"Can't (pickle|get) local object"):
        spawn(lambda: None, 2)


def test_expected_errors_come_by_rank_and_keep_the_pool(spawn: Spawn, spawn_errors: Spawn) -> None:
    before = spawn(pid, 2)
    for rank, error in enumerate(spawn_errors(raise_everywhere, 2)):
        assert (error.type_name, error.message) == ("KeyError", f"'seen on rank {rank}'")
        assert "LookupError" in error.bases
    assert spawn(pid, 2) == before


def test_a_rank_without_the_expected_error_is_none(spawn_errors: Spawn) -> None:
    first, second = spawn_errors(raise_on, 2, 1)
    assert first is None
    assert second.type_name == "ValueError"


def test_an_error_on_one_rank_that_hangs_the_others_is_no_expected_error(
    spawn_errors: Spawn,
) -> None:
    with pytest.raises(workers.WorkerError, match="rank 0 was still running"):
        spawn_errors(raise_while_others_wait, 2, 1)


def test_closing_leaves_no_process() -> None:
    with workers.Pools() as pools:
        pids = pools.spawn(pid, 2)
    assert_gone(pids)


def assert_gone(pids: list[int]) -> None:
    for process_id in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
