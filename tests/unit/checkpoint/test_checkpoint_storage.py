"""Files of checkpoints in one process: formats, damage, failures, names."""

from __future__ import annotations

import errno
import io
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading
import time
import typing

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import shardkit
from shardkit import _progress, checkpoint
from shardkit._errors import CheckpointError
from shardkit._processes import start_of
from shardkit.checkpoint._consolidate import describe, verify
from shardkit.checkpoint._dcp import directory, writer
from shardkit.checkpoint._dcp.reader import DistributedCheckpoint
from shardkit.checkpoint._files import disk, formats
from shardkit.checkpoint._save import Staging

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    Call = typing.Callable[..., typing.Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:TypedStorage is deprecated",  # DCP of torch 2.9 uses it.
)


def state() -> dict[str, typing.Any]:
    """Tensors of every kind that is written in a way of its own, and of several blocks."""
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(1300, 1001, generator=generator),  # 5.2 MB: two blocks
        "bf16": torch.randn(5, generator=generator).to(torch.bfloat16),
        "float8": torch.randn(8, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0),
        "turned": torch.randn(40, 50, generator=generator).t(),
        "strided": torch.randn(10, 10, generator=generator)[::2, 1:],
        "conjugated": torch.randn(3, dtype=torch.complex64, generator=generator).conj(),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "view": torch.arange(100)[90:],
        "step": 7,
    }


def blank(like: dict[str, typing.Any]) -> dict[str, typing.Any]:
    return {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
        if isinstance(value, torch.Tensor)
        else None
        for name, value in like.items()
    }


def same(one: typing.Any, other: typing.Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.resolve_conj().contiguous().view(-1).view(torch.uint8),
            other.resolve_conj().contiguous().view(-1).view(torch.uint8),
        )
    return bool(one == other)


WRITERS = {"shardkit": checkpoint.CheckpointWriter, "dcp": dcp.FileSystemWriter}
READERS = {"shardkit": checkpoint.CheckpointReader, "dcp": dcp.FileSystemReader}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_both_ways_with_plain_dcp(writer: str, reader: str, tmp_path: pathlib.Path) -> None:
    saved = state()
    dcp.save({"a": saved}, storage_writer=WRITERS[writer](tmp_path / "x"), no_dist=True)
    loaded = {"a": blank(saved)}
    dcp.load(loaded, storage_reader=READERS[reader](tmp_path / "x"), no_dist=True)
    assert {name: same(value, loaded["a"][name]) for name, value in saved.items()} == dict.fromkeys(
        saved, True
    )


def test_one_writer_saves_under_several_names(tmp_path: pathlib.Path) -> None:
    """`dcp.save` gives the name to the storage."""
    storage = checkpoint.CheckpointWriter(tmp_path / "x", overwrite=True)
    for number, name in enumerate((tmp_path / "a", tmp_path / "b", None)):
        state = {"a": torch.tensor(number)}
        dcp.save(state, storage_writer=storage, checkpoint_id=name, no_dist=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert [int(checkpoint.load(tmp_path / name)["a"]) for name in ("a", "b")] == [0, 2]


@pytest.mark.parametrize("describer", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_metadata_that_another_reader_has_read(
    writer: str, describer: str, tmp_path: pathlib.Path
) -> None:
    saved = torch.arange(4.0)
    dcp.save({"a": saved}, storage_writer=WRITERS[writer](tmp_path / "x"), no_dist=True)
    metadata = READERS[describer](tmp_path / "x").read_metadata()
    reader, planner = checkpoint.CheckpointReader(tmp_path / "x"), DefaultLoadPlanner()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(loaded := {"a": torch.zeros(4)}, metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    reader.read_data(plan, planner).wait()
    assert torch.equal(loaded["a"], saved)
    metadata.storage_data.clear()
    with pytest.raises(CheckpointError, match="'a' is listed but stored nowhere"):
        reader.read_data(plan, planner)


class Counted(dict[typing.Any, typing.Any]):
    """Counts how often somebody goes through all of it."""

    num_times = 0

    def __iter__(self) -> typing.Any:
        self.num_times += 1
        return super().__iter__()

    def keys(self) -> typing.Any:
        self.num_times += 1
        return super().keys()

    def values(self) -> typing.Any:
        self.num_times += 1
        return super().values()

    def items(self) -> typing.Any:
        self.num_times += 1
        return super().items()


@pytest.mark.parametrize("writer", WRITERS)
def test_one_tensor_is_read_without_a_look_at_all_others(
    writer: str, tmp_path: pathlib.Path
) -> None:
    saved = {"a": torch.arange(4.0), "b": torch.ones(4)}
    dcp.save(saved, storage_writer=WRITERS[writer](tmp_path / "x"), no_dist=True)
    source = DistributedCheckpoint(tmp_path / "x")
    source.reader.storage_data = stored = Counted(source.reader.storage_data)
    for name, value in saved.items():
        source.read_into(name, 0, read := torch.zeros(4))
        assert torch.equal(read, value)
    assert stored.num_times == 0


@pytest.mark.parametrize("cls", [checkpoint.CheckpointWriter, checkpoint.CheckpointReader])
def test_storage_goes_to_other_processes(cls: Call, tmp_path: pathlib.Path) -> None:
    copied = pickle.loads(pickle.dumps(cls(tmp_path / "x")))
    assert type(copied) is cls
    assert copied.path == tmp_path / "x"


def test_only_what_is_viewed_is_written(tmp_path: pathlib.Path) -> None:
    base = torch.zeros(1 << 20)
    path = checkpoint.save(tmp_path / "x", view=base[:10])
    assert sum(file.stat().st_size for file in path.iterdir()) < 10_000


def test_bytes_written_are_those_of_the_state(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(1000, 1000)
    path = checkpoint.save(tmp_path / "x", model)
    written = sum(file.stat().st_size for file in path.iterdir())
    assert written < 1.01 * sum(p.nbytes for p in model.parameters())


def test_values_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    values = {
        "number": 3,
        "nested": {1: (2, "x"), "empty": {}, "list": [torch.arange(3), {"a": None}]},
        "tensor": torch.arange(4),
    }
    checkpoint.save(tmp_path / "x", **values)
    loaded = checkpoint.load(tmp_path / "x")
    assert torch.equal(loaded["nested"]["list"].pop(0), torch.arange(3))
    assert torch.equal(loaded.pop("tensor"), values.pop("tensor"))
    values["nested"]["list"].pop(0)
    assert loaded == values


def test_one_element_of_any_stride_comes_back(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    one = torch.arange(2.0)[1::3].clone()
    assert one.stride() == (3,)
    optimizer.state[model.bias]["momentum_buffer"] = one
    path = checkpoint.save(tmp_path / "x", model, optimizer)
    one.zero_()
    checkpoint.load(path, model, optimizer)
    assert optimizer.state[model.bias]["momentum_buffer"].tolist() == [1.0]


def test_what_could_not_be_loaded_is_not_saved(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra 'data' \(PosixPath\) cannot be saved"):
        checkpoint.save(tmp_path / "x", data=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Settings:
    pass


def test_an_optimizer_that_could_not_be_loaded_is_not_saved(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["settings"] = Settings()
    with pytest.raises(CheckpointError, match=r"entry 'optim\.[^']*settings' \(Settings\) cannot"):
        checkpoint.save(tmp_path / "x", model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_become_python_s(tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["lr"] = numpy.float64(0.1)
    path = checkpoint.save(tmp_path / "x", model, optimizer, step=numpy.int64(3))
    optimizer.param_groups[0]["lr"] = 1.0
    assert checkpoint.load(path, model, optimizer) == {"step": 3}
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert '"step":3,' in (path / "shardkit.json").read_text()


def test_a_folder_that_is_deleted_during_a_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = writer.FileStream.__exit__

    def and_delete(self: typing.Any, *args: object) -> None:
        close(self, *args)
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)

    monkeypatch.setattr(writer.FileStream, "__exit__", and_delete)
    with pytest.raises(CheckpointError, match="that nobody deletes") as found:
        checkpoint.save(tmp_path / "x", nn.Linear(2, 2))
    assert "load another" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


def test_what_changes_during_a_save_in_the_background_is_not_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    seen = optimizer.param_groups[0]["seen"] = {1}
    go_on, prepare = threading.Event(), directory.prepare

    def slow(*args: typing.Any, **options: typing.Any) -> pathlib.Path:
        go_on.wait(30)
        return prepare(*args, **options)

    monkeypatch.setattr(directory, "prepare", slow)
    handle = checkpoint.async_save(tmp_path / "x", model, optimizer)
    seen.add(2)
    go_on.set()
    handle.result()
    checkpoint.load(tmp_path / "x", model, optimizer)
    assert optimizer.param_groups[0]["seen"] == {1}


def test_floats_are_not_cut_to_integers(tmp_path: pathlib.Path) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.tensor([1.5]))
    checkpoint.save(tmp_path / "x", model)
    model.x = torch.tensor([1])
    with pytest.raises(CheckpointError, match=r"of int64, found shape \(1,\) of float32"):
        checkpoint.load(tmp_path / "x", model)


def test_links_are_other_names(tmp_path: pathlib.Path) -> None:
    for step in range(3):
        checkpoint.save(tmp_path / f"{step}", step=step, keep_last=2)
        (tmp_path / "newest").unlink(missing_ok=True)
        (tmp_path / "newest").symlink_to(f"{step}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "newest"]
    for _ in range(2):
        checkpoint.save(tmp_path / "newest", step=7, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "newest"]
    assert checkpoint.load(tmp_path / "2") == {"step": 2}


def test_what_a_link_leads_to_is_kept(tmp_path: pathlib.Path) -> None:
    """A link beside the checkpoints names the one that is not to be lost."""
    for step in range(4):
        checkpoint.save(tmp_path / f"{step}", step=step, keep_last=2)
        if step == 0:
            (tmp_path / "best").symlink_to("0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3", "best"]
    assert checkpoint.load(tmp_path / "best") == {"step": 0}


def test_an_empty_directory_is_nothing_to_lose(tmp_path: pathlib.Path) -> None:
    """Scripts make the directory first, as other libraries want it."""
    (tmp_path / "x").mkdir()
    checkpoint.save(tmp_path / "x", step=1)
    assert checkpoint.load(tmp_path / "x") == {"step": 1}
    with pytest.raises(CheckpointError, match=r"exists\. Give each checkpoint a name of its own"):
        checkpoint.save(tmp_path / "x", step=2)
    (tmp_path / "y").mkdir()
    checkpoint.async_save(tmp_path / "y", step=3).result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_what_latest_is_not_for(tmp_path: pathlib.Path) -> None:
    path = checkpoint.save(tmp_path / "x", step=1)
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        checkpoint.latest(path)
    with pytest.raises(CheckpointError, match=r"not None, which latest\(\) returns"):
        checkpoint.load(checkpoint.latest(tmp_path / "y"))  # type: ignore[arg-type]


@pytest.mark.parametrize("act", [checkpoint.save, checkpoint.load])
def test_states_are_not_models(act: typing.Any, tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoint.save(tmp_path / "x", model, [optimizer])
    with pytest.raises(CheckpointError, match="model: expected a module, not OrderedDict"):
        act(tmp_path / "x", model.state_dict())
    with pytest.raises(CheckpointError, match="optimizer: expected an optimizer or a list"):
        act(tmp_path / "x", model, optimizer.state_dict())
    with pytest.raises(CheckpointError, match="optimizer: expected an optimizer or a list"):
        act(tmp_path / "x", model, iter([optimizer]))


@pytest.mark.parametrize("act", [checkpoint.save_full, checkpoint.load_full])
def test_the_path_comes_before_the_model(act: typing.Any) -> None:
    with pytest.raises(CheckpointError, match=r"model: expected a module, not str\. .* path comes"):
        act(nn.Linear(2, 2), "model.pt")


@pytest.mark.parametrize(
    "act",
    [
        lambda wrong, _: checkpoint.get_model_state_dict(wrong),
        lambda wrong, _: checkpoint.set_model_state_dict(wrong, {}),
        checkpoint.get_optimizer_state_dict,
        checkpoint.gather_optimizer_state,
    ],
)
def test_a_state_dict_is_no_model(act: typing.Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="model: expected a module, not OrderedDict"):
        act(model.state_dict(), torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("wrong", [None, 3, "adam", [None], {"state": {}}])
def test_what_is_no_optimizer(wrong: typing.Any) -> None:
    model = nn.Linear(2, 2)
    message = "optimizers: expected an optimizer or a list of them"
    for act in (checkpoint.get_state_dict, checkpoint.gather_optimizer_state):
        with pytest.raises(CheckpointError, match=message):
            act(model, wrong)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.set_optimizer_state_dict(model, wrong, {"state": {}, "param_groups": []})


def test_submodules_may_come_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = checkpoint.get_model_state_dict(model, submodules=iter([model[1]]))  # type: ignore[arg-type]
    assert [*state] == ["1.weight", "1.bias"]


def test_flags_are_no_texts(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    path = checkpoint.save(tmp_path / "x", model)
    wrong: typing.Any = "no"
    calls: dict[str, typing.Any] = {
        "strict": lambda: checkpoint.load(path, model, strict=wrong),
        "broadcast_from_rank0": lambda: checkpoint.load_full(
            model.state_dict(), model, broadcast_from_rank0=wrong
        ),
        "optimizer": lambda: checkpoint.consolidate(path, tmp_path / "y.pt", optimizer=wrong),
        "rank0_only": lambda: checkpoint.gather_optimizer_state(model, optimizer, rank0_only=wrong),
        "from_rank0": lambda: checkpoint.scatter_optimizer_state(
            {}, model, optimizer, from_rank0=wrong
        ),
    }
    for name, call in calls.items():
        with pytest.raises(CheckpointError, match=f"{name} must be True or False, got 'no'"):
            call()


def test_progress_of_whole_files_is_told(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    told: list[tuple[int, int]] = []
    checkpoint.load(tmp_path / "x.pt", model, progress=lambda *done: told.append(done))
    assert told[-1] == (24, 24)


def test_names_that_are_taken(tmp_path: pathlib.Path) -> None:
    path = checkpoint.save(tmp_path / "x", step=1)
    with pytest.raises(CheckpointError, match=r"x exists.*overwrite=True"):
        checkpoint.save(path, step=2)
    with pytest.raises(CheckpointError, match="overwrite must be True or False, got 'no'"):
        checkpoint.save(path, step=2, overwrite="no")
    checkpoint.save(path, step=3, overwrite=True)
    assert checkpoint.load(path) == {"step": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is no checkpoint: it is not replaced"):
        checkpoint.save(foreign, step=1, overwrite=True)
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(foreign / "holiday.jpg" / "x")


@pytest.mark.parametrize("url", ["s3://bucket/run/x", "file:///run/x", pathlib.Path("gs://b/x")])
def test_urls_are_no_paths(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, url: str | pathlib.Path
) -> None:
    """The disk of a machine that may be taken away would have the only copy."""
    monkeypatch.chdir(tmp_path)
    plain = checkpoint.save(tmp_path / "x", nn.Linear(2, 2))
    for act in (
        lambda: checkpoint.save(url, step=1),
        lambda: checkpoint.async_save(url, step=1),
        lambda: checkpoint.load(url),
        lambda: checkpoint.latest(url),
        lambda: checkpoint.consolidate(plain, url),
        lambda: checkpoint.consolidate(url, plain),
        lambda: describe(url),
    ):
        with pytest.raises(CheckpointError, match=r"is a URL, .* Mount the storage"):
            act()
    assert "is a URL" in verify(url).problems[0]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert checkpoint.latest("a:b/c") is None


def test_arguments_that_cannot_be_meant(tmp_path: pathlib.Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(CheckpointError, match="pass the model as well"):
        checkpoint.save(tmp_path / "x", optimizer=optimizer)
    with pytest.raises(CheckpointError, match="nothing to save"):
        checkpoint.save(tmp_path / "x")
    with pytest.raises(CheckpointError, match="keep_last must be at least 1"):
        checkpoint.save(tmp_path / "x", keep_last=0, step=1)
    with pytest.raises(CheckpointError, match=r"keep_last must be .* not 'all'"):
        checkpoint.save(tmp_path / "x", keep_last="all", step=1)
    for path in (3, "a\0b", "a\ud800"):
        with pytest.raises(CheckpointError, match="path: expected that of a checkpoint"):
            checkpoint.save(path, step=1)
    with pytest.raises(CheckpointError, match="checkpoint's name"):
        checkpoint.save(tmp_path / ".x.incomplete", step=1)
    checkpoint.save(tmp_path / "x", step=1)
    with pytest.raises(CheckpointError, match=r"'step' \(int\) has no load_state_dict"):
        checkpoint.load(tmp_path / "x", step=0)
    with pytest.raises(CheckpointError, match="pass the model as well"):
        checkpoint.load(tmp_path / "x", optimizer=optimizer)


def test_latest_goes_by_sequence_and_skips_what_is_damaged(tmp_path: pathlib.Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.latest(tmp_path) is None
    for name in ("b", "a", "c"):
        checkpoint.save(tmp_path / name, step=1)
    for age, name in enumerate(("c", "a", "b")):
        os.utime(tmp_path / name, (age, age))
    assert checkpoint.latest(tmp_path) == tmp_path / "c"
    (tmp_path / ".d.incomplete").mkdir()
    (tmp_path / "e").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "c"
    (tmp_path / "c" / "__0_0.distcp").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"c is passed over.*truncated"):
        assert checkpoint.latest(tmp_path) == tmp_path / "a"


def test_latest_waits_for_the_save_under_way(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may delete the one before; and ranks would find different ones."""
    real = checkpoint.CheckpointWriter.write_data

    def write_slowly(*args: typing.Any) -> typing.Any:
        time.sleep(0.3)
        return real(*args)

    checkpoint.save(tmp_path / "a", step=1)
    monkeypatch.setattr(checkpoint.CheckpointWriter, "write_data", write_slowly)
    saving = checkpoint.async_save(tmp_path / "b", step=2, keep_last=1)
    newest = checkpoint.latest(tmp_path)
    assert newest == saving.result()


def test_keep_last_leaves_the_newest_and_nothing_half(tmp_path: pathlib.Path) -> None:
    for leftover in (".old.incomplete", ".old.deleted", ".old.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "file").write_bytes(b"x")
    foreign = tmp_path / "plain"
    dcp.save({"x": torch.ones(1)}, checkpoint_id=foreign, no_dist=True)
    for step in range(5):
        checkpoint.save(tmp_path / f"step-{step}", step=step, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plain", "step-3", "step-4"]


def test_a_directory_that_cannot_be_searched_costs_no_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> typing.NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(directory, "_recover_all", refuse)
    with pytest.warns(UserWarning, match="could not be searched for older .*Stale file handle"):
        checkpoint.save(tmp_path / "step-1", step=1, keep_last=2)
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "step-1") == {"step": 1}


def test_keep_last_saves_the_only_copy_that_a_killed_run_left(tmp_path: pathlib.Path) -> None:
    only = checkpoint.save(tmp_path / "best", step=1)
    only.rename(tmp_path / ".best.replaced")
    checkpoint.save(tmp_path / "last", step=2, keep_last=2)
    assert checkpoint.load(only) == {"step": 1}


def test_latest_says_that_it_cannot_order_checkpoints_of_others(tmp_path: pathlib.Path) -> None:
    dcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.warns(UserWarning, match=r"no checkpoint .* has a manifest.*step-1"):
        assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("damaged", ["shardkit.json", "__0_0.distcp"])
def test_latest_does_not_call_damaged_checkpoints_those_of_others(
    tmp_path: pathlib.Path, damaged: str
) -> None:
    path = checkpoint.save(tmp_path / "step-1", step=1)
    (path / damaged).write_bytes(b"")
    with pytest.warns(UserWarning, match="step-1 is passed over") as caught:
        assert checkpoint.latest(tmp_path) is None
    assert len(caught) == 1


# --- several jobs ---------------------------------------------------------------------------------


@pytest.fixture(params=["exchanges", "renames"])
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> typing.Any:
    """Return a function that has something done just before the first call of another."""

    def refuse(*_: object) -> typing.NoReturn:
        raise OSError(errno.EINVAL, "Invalid argument")

    if request.param == "renames":  # As on NFS.
        monkeypatch.setattr(directory, "exchange", refuse)

    def beside(where: typing.Any, name: str, act: typing.Callable[[], object]) -> None:
        real = getattr(where, name)

        def first(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
            monkeypatch.setattr(where, name, real)
            act()
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, first)

    return beside


def test_a_job_is_told_of_another_that_it_replaces(tmp_path: pathlib.Path, beside: Call) -> None:
    path = checkpoint.save(tmp_path / "x", step=1)
    beside(directory, "commit", lambda: checkpoint.save(path, step=2, overwrite=True))
    with pytest.warns(UserWarning, match=rf"process {os.getpid()} on .* has saved under this name"):
        checkpoint.save(path, step=3, overwrite=True)
    assert checkpoint.load(path) == {"step": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_job_is_told_of_another_that_replaces_it(tmp_path: pathlib.Path, beside: Call) -> None:
    path = checkpoint.save(tmp_path / "x", step=1)
    beside(directory, "_warning", lambda: checkpoint.save(path, step=2, overwrite=True))
    with pytest.warns(UserWarning, match="has replaced the checkpoint that was just saved"):
        checkpoint.save(path, step=3, overwrite=True)
    assert checkpoint.load(path) == {"step": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_the_second_job_to_take_a_free_name_is_refused(
    tmp_path: pathlib.Path, beside: Call
) -> None:
    beside(directory, "commit", lambda: checkpoint.save(tmp_path / "x", step=1))
    with pytest.raises(CheckpointError, match=r"process .* has saved under this name"):
        checkpoint.save(tmp_path / "x", step=2)
    assert checkpoint.load(tmp_path / "x") == {"step": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_what_is_replaced_while_it_is_read_is_read_again(
    tmp_path: pathlib.Path, beside: Call
) -> None:
    model = nn.Linear(3, 3)
    path = checkpoint.save(tmp_path / "x", model, step=1)
    with torch.no_grad():
        model.weight.zero_()
    beside(
        checkpoint.CheckpointReader,
        "read_data",
        lambda: checkpoint.save(path, model, step=2, overwrite=True),
    )
    loaded = nn.Linear(3, 3)
    assert checkpoint.load(path, loaded) == {"step": 2}
    assert torch.equal(loaded.weight, model.weight)


def other_job(path: pathlib.Path, pid: int, place: str, start: str) -> pathlib.Path:
    """Make what another job is writing."""
    own = disk.own()
    name = disk.new_aside(path, disk.INCOMPLETE).name
    mine = f"-{own.pid}-{own.place}-{own.start}-"
    aside = path.with_name(name.replace(mine, f"-{pid}-{place}-{start}-"))
    aside.mkdir()
    return aside


def test_keep_last_deletes_what_dead_jobs_left_and_names_those_that_live(
    tmp_path: pathlib.Path,
) -> None:
    own = disk.own()
    with subprocess.Popen(["sleep", "60"]) as living:
        start = start_of(living.pid)
        alive = other_job(tmp_path / "a", living.pid, own.place, start)
        reused = other_job(tmp_path / "a", living.pid, own.place, "1")
        elsewhere = other_job(tmp_path / "a.b", 7, "00c0ffee", "8")
        forgotten = other_job(tmp_path / "a.b", 7, "00c0ffee", "9")
        os.utime(forgotten, (1, 1))
        with pytest.warns(UserWarning, match="keep_last=2: process") as warned:
            checkpoint.save(tmp_path / "x", step=1, keep_last=2)
        living.kill()
    texts = sorted(str(warning.message).partition(" saves ")[2] for warning in warned)
    assert [text.split(" in ")[0] for text in texts] == ["'a'", "'a.b'"]
    said = " ".join(str(warning.message) for warning in warned)
    assert f"process {living.pid} " in said
    assert "process 7 " in said
    assert alive.exists()
    assert elsewhere.exists()
    assert not reused.exists()
    assert not forgotten.exists()
    checkpoint.save(tmp_path / "a", step=1)  # Nobody is asked that does not live.
    assert not alive.exists()


def test_names_of_any_length(tmp_path: pathlib.Path) -> None:
    path = checkpoint.save(tmp_path / ("x" * 190), step=1)
    checkpoint.save(path, step=2, overwrite=True)
    assert checkpoint.load(path) == {"step": 2}


# --- small things ---------------------------------------------------------------------------------


def test_frames_are_what_torch_writes() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    before, after = formats.tensor_frame(tensor.dtype, (3, 4))
    content = before + bytes(disk.raw_bytes(tensor)) + after
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), tensor)


class Pair(typing.NamedTuple):
    x: torch.Tensor


def test_a_staged_state_is_a_copy() -> None:
    pair, weight = Pair(torch.ones(3)), torch.ones(3)
    copied = Staging().copy({"pair": pair, "both": (weight, [weight])})
    pair.x.zero_()
    weight.zero_()
    assert type(copied["pair"]) is Pair
    assert copied["pair"].x.tolist() == [1, 1, 1]
    assert copied["both"][0].tolist() == [1, 1, 1]
    assert copied["both"][1][0] is copied["both"][0]


def test_staging_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would keep page-locked memory, which takes the place of a larger one."""
    emptied: list[int | None] = []
    staging = Staging()

    def note() -> None:
        emptied.append(None if staging._buffer is None else staging._buffer.numel())  # noqa: SLF001

    staging.copy({"small": torch.ones(3)})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", note, raising=False)
    staging.copy({"large": torch.ones(300)})
    assert emptied == [None]
    staging.release()
    assert emptied == [None, None]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(call: Callable[..., object], *args: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal := Terminal())
            call(*args)
        return terminal.getvalue()

    model = nn.Linear(50, 50)
    with torch.device("meta"):
        on_meta = nn.Linear(50, 50)
    calls = [
        ("saving x", checkpoint.save, tmp_path / "x", model),
        ("loading x", checkpoint.load, tmp_path / "x", model),
        ("verifying x", verify, tmp_path / "x"),
        ("consolidating x", checkpoint.consolidate, tmp_path / "x", tmp_path / "x.pt"),
        ("loading x.pt", checkpoint.load_full, tmp_path / "x.pt", model),
        ("initializing Linear", shardkit.materialize, on_meta),
    ]
    checkpoint.save(tmp_path / "quick", model)
    assert shown(checkpoint.load, tmp_path / "quick", model) == ""
    monkeypatch.setattr(_progress, "_SHOWN_AFTER_S", 0.0)
    for text, *call in calls:
        assert text in shown(*call)


def test_progress_is_told(tmp_path: pathlib.Path) -> None:
    told: list[tuple[int, int]] = []
    model = nn.Linear(2000, 2000)
    nbytes = sum(p.nbytes for p in model.parameters())
    path = checkpoint.save(tmp_path / "x", model, progress=lambda *now: told.append(now))
    assert told[-1] == (nbytes, nbytes)
    assert len(told) > 1
    told.clear()
    checkpoint.load(path, model, progress=lambda *now: told.append(now))
    assert told[-1] == (nbytes, nbytes)
