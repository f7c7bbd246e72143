"""`record` in one process: what is in the file, its ends, what it refuses."""

from __future__ import annotations

import typing
from types import SimpleNamespace

import pytest
import torch
from synthetic_runs import kinds_of
from torch import nn

from recording import recording_mesh
from shardkit import StateError, _events, fully_shard, record
from shardkit.tracing.recorder import axes_of
from shardkit.tracing.records import read_record

if typing.TYPE_CHECKING:
    import pathlib


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of two groups on a mesh of two ranks that only records, and its optimizer."""
    torch.manual_seed(0)
    mesh, _ = recording_mesh((2,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_is_recorded_and_nothing_after_it(tmp_path: pathlib.Path) -> None:
    model, optimizer = trained()
    step(model, optimizer)
    with record(model, tmp_path) as run:
        step(model, optimizer)
        step(model, optimizer)
    step(model, optimizer)
    assert _events.observer is None
    found = read_record(tmp_path / "rank-0.jsonl.gz")
    assert found.is_whole
    assert len(found.events) == run.num_events
    kinds = kinds_of(found)
    assert kinds["pass"] == 4
    # Forward and backward of two groups, and the optimizer, in each of two steps.
    assert kinds["compute"] == 2 * 5
    assert kinds["reduce_scatter"] == 2 * 2
    assert [e.phase for e in found.events if e.name == "optimizer"] == ["optimizer"] * 2


def test_an_exception_ends_the_record_and_goes_on(tmp_path: pathlib.Path) -> None:
    model, optimizer = trained()

    def fail() -> None:
        with record(model, tmp_path):
            step(model, optimizer)
            msg = "of the user"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="of the user"):
        fail()
    assert _events.observer is None
    assert kinds_of(read_record(tmp_path / "rank-0.jsonl.gz"))["pass"] == 2
    with record(model, tmp_path):  # And another one may begin.
        step(model, optimizer)


def test_two_records_at_once_are_refused(tmp_path: pathlib.Path) -> None:
    again = record(None, tmp_path / "b")
    with record(None, tmp_path / "a"), pytest.raises(StateError, match="observed already"):
        again.__enter__()
    assert not (tmp_path / "b").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(StateError, match=r"folder must be a directory.*file is a file"):
        record(None, tmp_path / "file").__enter__()
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_rank_without_a_process_group_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks would be rank 0 of one rank, and write into one file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StateError, match=r"one of 2 ranks, and has no process group yet\. Call"):
        record(None, tmp_path / "steps").__enter__()
    assert not (tmp_path / "steps").exists()


def test_a_folder_in_the_place_of_the_model_is_refused(tmp_path: pathlib.Path) -> None:
    for folder in ("steps", tmp_path):
        wrong: typing.Any = folder
        with pytest.raises(StateError, match=r"takes a model first\. Write record\(folder='"):
            record(wrong).__enter__()


def test_a_model_is_a_module() -> None:
    wrong: typing.Any = 3
    with pytest.raises(StateError, match=r"model must be a module, got 3\. Leave it out"):
        record(wrong).__enter__()


def test_a_folder_is_a_path() -> None:
    wrong: typing.Any = None
    with pytest.raises(StateError, match=r"folder must be a path, got None"):
        record(folder=wrong).__enter__()


def test_axes_of_one_name_are_left_out_also_if_one_came_later() -> None:
    alone = SimpleNamespace(members=(0,))

    def group(*ranks: int) -> typing.Any:
        plan = SimpleNamespace(axis=SimpleNamespace(members=ranks), replicate_axis=alone)
        bucket, mesh = SimpleNamespace(plan=plan), SimpleNamespace(ranks=ranks)
        return SimpleNamespace(kept_axes={}, buckets=[bucket], mesh=mesh)

    first = axes_of([group(0, 1)])
    both = {"shard 2": [0, 1], " 2": [0, 1]}
    assert first == axes_of([group(0, 1)], first) == {"replicate 1": [0], **both}
    found = axes_of([group(0, 2)], first)
    assert found == axes_of([group(0, 1), group(0, 2)]) == {"replicate 1": [0]}
    assert axes_of([group(0, 1, 2)], first).keys() == {*first, "shard 3", " 3"}


def test_many_events_are_written_in_parts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.tracing.recorder._MAX_CALLS", 7)
    model, optimizer = trained()
    with record(model, tmp_path) as run:
        step(model, optimizer)
        step(model, optimizer)
        num_before = run.num_events
    found = read_record(tmp_path / "rank-0.jsonl.gz")
    assert 0 < num_before < len(found.events) == run.num_events
    begins = [event.begin for event in found.events]
    assert begins == sorted(begins)
    assert kinds_of(found)["pass"] == 4
