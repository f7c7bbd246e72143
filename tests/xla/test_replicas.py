"""Replica mode (`torch_xla.launch`): one and two replicas train, the graph of four is as it should.

XLA's CPU client runs replicas as threads of a process; see `replicas` for what they do.
"""

from __future__ import annotations

import functools
import json
import pathlib
import tempfile
import typing

import pytest
from processes import run_python

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "PJRT_CPU_ASYNC_CLIENT": "0",  # With it collectives between threads hang.
    "NPROC": "16",
    "XLA_THREAD_POOL_SIZE": "16",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
TRAINED = (
    "mlp",
    "gpt",
    "tiny_clipped_by_the_largest",
    "frozen_kept_from_forward_to_backward",
    "unused",
    "tied_in_micro_batches",
    "replicas_of_shards",
    "checkpointed",
)
CASES = (*TRAINED, "half_precision", "reductions_leave_padding_out", "masks", "statistics", "files")


@functools.cache
def found(num_replicas: int, names: tuple[str, ...]) -> list[dict[str, typing.Any]]:
    """Return what each replica found; all cases run in one process, which is slow to start."""
    environment = {**ENVIRONMENT, "CPU_NUM_DEVICES": str(num_replicas)}
    with tempfile.TemporaryDirectory() as folder:
        done = run_python([str(HERE / "replicas.py"), folder, *names], environment)
        assert done.returncode == 0, done.stderr[-6000:]
        files = [pathlib.Path(folder, f"{index}.json") for index in range(num_replicas)]
        return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_training_is_that_of_the_plain_model(num_replicas: int, case: str) -> None:
    for replica in found(num_replicas, CASES):
        differences = replica[case]
        assert differences["gradient"] <= 1e-6
        assert differences["parameter"] <= 2e-6
        assert differences["norm"] <= 1e-6
        assert differences["compiled"] == 0, "the third step compiled something"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_half_precision_gathers_in_16_bits_and_reduces_in_32(num_replicas: int) -> None:
    for replica in found(num_replicas, CASES):
        case = replica["half_precision"]
        assert case["gathered"] == (["bf16"] if num_replicas > 1 else [])
        assert case["reduced"] == (["f32"] if num_replicas > 1 else [])
        assert case["dtypes"] == ["torch.float32"]
        assert case["relative"] < 2e-2  # Of numbers with eight bits.


def test_reductions_leave_padding_out() -> None:
    for replica in found(2, CASES):
        assert max(replica["reductions_leave_padding_out"].values()) <= 1e-5


def test_replicas_drop_other_elements_and_the_same_ones_again() -> None:
    first, second = (replica["masks"] for replica in found(2, CASES))
    assert first["first"] == first["second"]
    assert second["first"] == second["second"]
    assert first["first"] != second["first"]


def test_batch_statistics_are_those_of_a_replica() -> None:
    first, second = (replica["statistics"]["sum"] for replica in found(2, CASES))
    assert first != second


def test_whole_tensors_are_saved_and_loaded_and_pieces_refused() -> None:
    for replica in found(2, CASES):
        assert replica["files"]["off"] == 0
        *files, view = replica["files"]["refused"]
        assert len(files) == 3
        assert all("Call full_tensor() on all replicas" in reason for reason in files)
        assert "can write whole tensors only" in view


def test_replicas_of_other_models_are_told() -> None:
    for replica in found(2, ("other_models",)):
        assert "'weight' is (4, 3)" in replica["other_models"]
        assert "(5, 3)" in replica["other_models"]


@pytest.fixture(scope="module")
def traced() -> list[dict[str, typing.Any]]:
    return [replica["graphs"] for replica in found(4, ("graphs",))]


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
