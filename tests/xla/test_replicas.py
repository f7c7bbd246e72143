"""Replica mode (`torch_xla.launch`): one and two replicas train, the graph of four is as it should.

XLA's CPU client runs replicas as threads of a process (`replica_pool`). They train by the cases of
other backends; `replicas` has what is about them alone.
"""

from __future__ import annotations

import typing

import pytest
import replicas
from replica_pool import ReplicaPools

from parity import Run
from parity_cases import (
    ACCUMULATED,
    CLIPPED,
    TRAINING,
    accumulate,
    train_checkpointed,
    train_clipped,
    train_sharded,
)
from reference import assert_within

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from workers import Spawn

SYNC = "set_requires_gradient_sync"
BY = "its method"  # torch_xla's function reads the largest on the host, of which replicas hang.

ALL = "all replicas are shards"
NO_SHARDS = "all replicas are copies"
ADAMW = TRAINING["adamw"] | {"grad": 1e-6, "parameter": 2e-6}
TRAINED: dict[str, tuple[tuple[typing.Any, ...], str, dict[str, float]]] = {
    "mlp, clipped": ((train_clipped, "mlp", 2.0, BY), ALL, CLIPPED),
    "mlp by adamw": ((train_sharded, "mlp", None, "adamw"), ALL, ADAMW),
    "gpt": ((train_sharded, "gpt", None, "sgd"), ALL, TRAINING["sgd"]),
    "gpt, checkpointed": ((train_checkpointed,), ALL, TRAINING["sgd"]),
    "tiny, clipped by the largest": ((train_clipped, "tiny", float("inf"), BY), ALL, CLIPPED),
    "frozen, kept": ((train_sharded, "frozen", False, "adamw"), ALL, ADAMW),
    "unused": ((train_sharded, "unused", None, "adamw"), ALL, ADAMW),
    "tied, in micro-batches": ((accumulate, "tied", SYNC), ALL, ACCUMULATED),
    "replicas of shards": ((accumulate, "mlp", SYNC), NO_SHARDS, ACCUMULATED),
}


@pytest.fixture(scope="module")
def spawn_replicas() -> Iterator[Spawn]:
    with ReplicaPools() as pools:
        yield pools.spawn


@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_training_is_that_of_the_plain_model(
    spawn_replicas: Spawn, num_replicas: int, case: str
) -> None:
    call, kind, tolerances = TRAINED[case]
    shape = (num_replicas,) if kind == ALL else (num_replicas, 1)
    assert_within(Run("replicas", shape, spawn_replicas)(*call), **tolerances)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_half_precision_gathers_in_16_bits_and_reduces_in_32(
    spawn_replicas: Spawn, num_replicas: int
) -> None:
    for case in spawn_replicas(replicas.half_precision, num_replicas):
        assert case["gathered"] == (["bf16"] if num_replicas > 1 else [])
        assert case["reduced"] == (["f32"] if num_replicas > 1 else [])
        assert case["dtypes"] == ["torch.float32"]
        assert case["relative"] < 2e-2  # Of numbers with eight bits.


def test_reductions_leave_padding_out(spawn_replicas: Spawn) -> None:
    for differences in spawn_replicas(replicas.reductions_leave_padding_out, 2):
        assert len(differences) == 11
        assert max(differences.values()) <= 1e-5


def test_gradients_are_asked_for(spawn_replicas: Spawn) -> None:
    for differences in spawn_replicas(replicas.asked_gradients, 2):
        assert max(differences.values()) <= 1e-6


@pytest.mark.parametrize("of", [replicas.asked_gradients, replicas.gradients_of_inputs])
def test_gradients_that_are_asked_for_are_no_outputs_of_one_replica_s_graph(
    of: Callable[[], replicas.Differences],
) -> None:
    with ReplicaPools() as pools:  # Of its own: a thread stays slow.
        for differences in pools.spawn(replicas.with_a_slow_engine, 2, of):
            assert max(differences.values()) <= 1e-6


def test_replicas_drop_other_elements_and_the_same_ones_again(spawn_replicas: Spawn) -> None:
    first, second = spawn_replicas(replicas.masks, 2)
    assert first["first"] == first["second"]
    assert second["first"] == second["second"]
    assert first["first"] != second["first"]


def test_batch_statistics_are_those_of_a_replica_s_part(spawn_replicas: Spawn) -> None:
    for off in spawn_replicas(replicas.statistics, 2):
        assert off["of its part"] <= 1e-6
        assert off["of all"] > 1e-3, "parts too alike to tell"


def test_whole_tensors_are_saved_and_loaded_and_pieces_refused(
    spawn_replicas: Spawn, tmp_path: pathlib.Path
) -> None:
    for replica in spawn_replicas(replicas.files, 2, tmp_path):
        assert replica["off"] == 0
        *files, view = replica["refused"]
        assert len(files) == 3
        assert all("Call full_tensor() on all replicas" in reason for reason in files)
        assert "can write whole tensors only" in view


def test_replicas_of_other_models_are_told(spawn_replicas: Spawn) -> None:
    for message in spawn_replicas(replicas.other_models, 2):
        assert "'weight' is (4, 3)" in message
        assert "(5, 3)" in message


@pytest.fixture(scope="module")
def traced(spawn_replicas: Spawn) -> list[dict[str, typing.Any]]:
    """Of four replicas, which run nothing else: they cannot run what they trace."""
    return spawn_replicas(replicas.graphs, 4)


@pytest.mark.parametrize("name", ["resharded", "kept", "hybrid"])
def test_four_replicas_trace_one_graph(traced: list[dict[str, typing.Any]], name: str) -> None:
    assert len({replica[name]["text"] for replica in traced}) == 1


@pytest.mark.parametrize(("name", "gathers"), [("resharded", 9), ("kept", 5), ("hybrid", 9)])
def test_four_replicas_gather_and_reduce_once_per_group_and_pass(
    traced: list[dict[str, typing.Any]], name: str, gathers: int
) -> None:
    graph = traced[0][name]
    count = graph["count"]
    assert count["all-gather"] == gathers
    assert count["reduce-scatter"] == 5
    assert count.get("all-reduce", 0) == (5 if name == "hybrid" else 0)
    whole, rows, columns = "{{0,1,2,3}}", "{{0,1},{2,3}}", "{{0,2},{1,3}}"
    shard = rows if name == "hybrid" else whole
    assert graph["groups"]["all-gather"] == graph["groups"]["reduce-scatter"] == [shard]
    assert graph["groups"]["all-reduce"] == ([columns] if name == "hybrid" else [])
    assert graph["channels"] == [-1], "channels are for programs of several devices"
    # On the rank's own axis only: all ranks of a column hold the same.
    assert graph["of the norm"] - count.get("all-reduce", 0) == 1


def test_gathers_of_replicas_run_beside_the_compute_before_them(
    traced: list[dict[str, typing.Any]],
) -> None:
    assert traced[0]["resharded"]["waits"][:5] == [0, 0, 1, 2, 3]
