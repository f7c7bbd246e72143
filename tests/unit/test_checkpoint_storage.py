"""Files of checkpoints in one process: formats, damage, failures, names."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
import typing
import warnings
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardkit import checkpoint
from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp import directory, manifest, metadata, stream

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

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
    checkpoint.save(path, step=3, overwrite=True)
    assert checkpoint.load(path) == {"step": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is no checkpoint: it is not replaced"):
        checkpoint.save(foreign, step=1, overwrite=True)


def test_arguments_that_cannot_be_meant(tmp_path: pathlib.Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(CheckpointError, match="pass the model as well"):
        checkpoint.save(tmp_path / "x", optimizer=optimizer)
    with pytest.raises(CheckpointError, match="nothing to save"):
        checkpoint.save(tmp_path / "x")
    with pytest.raises(CheckpointError, match="keep_last must be at least 1"):
        checkpoint.save(tmp_path / "x", keep_last=0, step=1)
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


def test_keep_last_leaves_the_newest_and_nothing_half(tmp_path: pathlib.Path) -> None:
    for leftover in (".old.incomplete", ".old.deleted", ".old.replaced"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "file").write_bytes(b"x")
    foreign = tmp_path / "plain"
    dcp.save({"x": torch.ones(1)}, checkpoint_id=foreign, no_dist=True)
    for step in range(5):
        checkpoint.save(tmp_path / f"step-{step}", step=step, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plain", "step-3", "step-4"]


def test_keep_last_saves_the_only_copy_that_a_killed_run_left(tmp_path: pathlib.Path) -> None:
    only = checkpoint.save(tmp_path / "best", step=1)
    only.rename(directory.replaced(only))
    checkpoint.save(tmp_path / "last", step=2, keep_last=2)
    assert checkpoint.load(only) == {"step": 1}


def test_latest_says_that_it_cannot_order_checkpoints_of_others(tmp_path: pathlib.Path) -> None:
    dcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.warns(UserWarning, match=r"no checkpoint .* has a manifest.*step-1"):
        assert checkpoint.latest(tmp_path) is None


# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    torch.manual_seed(0)
    return checkpoint.save(tmp_path / "x", nn.Linear(1100, 1000), step=5)


def load(path: pathlib.Path) -> dict[str, typing.Any]:
    return checkpoint.load(path, nn.Linear(1100, 1000))


def flip(path: pathlib.Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_every_flipped_bit_that_is_read_is_found(saved: pathlib.Path) -> None:
    load(saved)
    for name in ("__0_0.distcp", "shardkit.json", ".metadata"):
        size = (saved / name).stat().st_size
        for offset in sorted({*range(0, size, size // 11), size - 1, size - 3}):
            flip(saved / name, offset)
            with pytest.raises(CheckpointError, match=name):
                load(saved)
            flip(saved / name, offset)
    load(saved)


def test_a_flipped_bit_is_located(saved: pathlib.Path) -> None:
    read = manifest.read_manifest(saved)
    item = max(read.files["__0_0.distcp"].items, key=lambda item: item.nbytes)
    assert len(item.crc32s) == 2
    flip(saved / "__0_0.distcp", item.offset + manifest.BLOCK_NBYTES + 5)
    begin = item.offset + manifest.BLOCK_NBYTES
    with pytest.raises(CheckpointError, match=rf"'model.weight': bytes {begin} to "):
        load(saved)


@pytest.mark.parametrize("name", ["__0_0.distcp", "shardkit.json", ".metadata"])
def test_truncated(saved: pathlib.Path, name: str) -> None:
    os.truncate(saved / name, (saved / name).stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{name}: (truncated|its checksum)"):
        load(saved)


@pytest.mark.parametrize(
    ("gone", "message"),
    [("__0_0.distcp", "__0_0.distcp: No such file"), (".metadata", "is incomplete: it has no")],
)
def test_a_file_is_gone(saved: pathlib.Path, gone: str, message: str) -> None:
    (saved / gone).unlink()
    with pytest.raises(CheckpointError, match=message):
        load(saved)


def test_not_there_and_foreign(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"none does not exist\. shardkit.checkpoint.latest"):
        checkpoint.load(tmp_path / "none")
    (tmp_path / ".none.incomplete").mkdir()
    with pytest.raises(CheckpointError, match="was being written, and is not complete"):
        checkpoint.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.load(tmp_path / "empty")


def test_another_format(saved: pathlib.Path) -> None:
    content = (saved / "shardkit.json").read_bytes()
    first, second = content.split(b"\n", 1)
    header = json.loads(first.removeprefix(b'{"header":').rpartition(b',"crc32"')[0])
    header["version"] = 2
    text = json.dumps(header).encode()
    line = b'{"header":%b,"crc32":%d,\n' % (text, zlib.crc32(text))
    (saved / "shardkit.json").write_bytes(line + second)
    with pytest.raises(CheckpointError, match=r"version 1, found .* version 2\. Load it with the"):
        load(saved)


# --- files that want to run code ------------------------------------------------------------------


class Evil:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return os.mkdir, (str(self.path),)


def test_metadata_runs_nothing(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (saved / "shardkit.json").unlink()
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir"):
        load(saved)
    assert not (tmp_path / "ran").exists()


def test_metadata_changes_no_class(tmp_path: pathlib.Path) -> None:
    # GLOBAL Metadata; BUILD with (None, {"version": 1}), which sets an attribute of the class.
    pickled = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}X\x07\x00\x00\x00versionK\x01s\x86b."
    )
    from torch.distributed.checkpoint.metadata import Metadata

    with pytest.raises(CheckpointError, match="it sets attributes of Metadata"):
        metadata.parse_metadata(pickled, tmp_path)
    assert Metadata.version is None


def test_paths_in_metadata_stay_in_the_directory(tmp_path: pathlib.Path) -> None:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    file = tmp_path / "x" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"stored in '../secret', expected a file of this"):
        checkpoint.load(tmp_path / "x")


@pytest.mark.parametrize("entry", ["value", "tensor"])
def test_entries_run_nothing(entry: str, tmp_path: pathlib.Path) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: typing.Any, object: typing.Any) -> typing.Any:  # noqa: A002
            if write_item.index.fqn == "value":
                content = io.BytesIO()
                torch.save(Evil(tmp_path / "ran"), content)
                return content
            return super().transform_object(write_item, object)

    path = tmp_path / "x"
    dcp.save(
        {"value": 1, "tensor": torch.ones(2)},
        checkpoint_id=path,
        planner=Planner(),
        no_dist=True,
    )
    if entry == "tensor":  # The description says tensor, the file holds the pickle.
        metadata = pickle.loads((path / ".metadata").read_bytes())
        stored = {index.fqn: info for index, info in metadata.storage_data.items()}
        for index in metadata.storage_data:
            metadata.storage_data[index] = stored["value"]
        del metadata.state_dict_metadata["value"]
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="mkdir"):
        checkpoint.load(path)
    assert not (tmp_path / "ran").exists()


# --- disks that fail ------------------------------------------------------------------------------


def fail(monkeypatch: pytest.MonkeyPatch, name: str, error: OSError, after: int) -> None:
    """Let a function of `os` fail from a call on."""
    real: Callable[..., typing.Any] = getattr(os, name)
    calls = 0

    def failing(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, failing)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("name", "error", "after"),
    [
        ("pwrite", FULL, 0),
        ("fsync", OSError(errno.EIO, "Input/output error"), 0),
        ("fsync", OSError(errno.EIO, "Input/output error"), 1),
        ("fsync", OSError(errno.EIO, "Input/output error"), 2),
        ("mkdir", OSError(errno.EROFS, "Read-only file system"), 0),
        ("rename", OSError(errno.EACCES, "Permission denied"), 1),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failing_disk_leaves_what_was_there(
    name: str,
    error: OSError,
    after: int,
    overwrite: bool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = checkpoint.save(tmp_path / "x", step=1)
    target = path if overwrite else tmp_path / "y"
    with monkeypatch.context() as patch:
        fail(patch, name, error, after)
        with pytest.raises(CheckpointError, match=rf"was not saved: .*{error.strerror}"):
            checkpoint.save(target, nn.Linear(2000, 2000), step=2, overwrite=overwrite)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert checkpoint.load(path) == {"step": 1}


def test_a_limit_on_files(tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            checkpoint.save(tmp_path / "x", nn.Linear(1000, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_file_systems_without_direct_writes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    refused = []

    def open_(path: typing.Any, flags: int, *args: typing.Any, **kwargs: typing.Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    checkpoint.save(tmp_path / "x", nn.Linear(1100, 1000), step=1)
    assert len(refused) == 1
    assert load(tmp_path / "x") == {"step": 1}


def test_file_systems_that_refuse_a_direct_write(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real = os.pwrite
    refused = []

    def pwrite(fd: int, *args: typing.Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    checkpoint.save(tmp_path / "x", nn.Linear(1100, 1000), step=1)
    assert len(refused) <= 1  # None where there are no direct writes.
    assert load(tmp_path / "x") == {"step": 1}


# --- small things ---------------------------------------------------------------------------------


def test_frames_are_what_torch_writes() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    before, after = stream.tensor_frame(tensor.dtype, (3, 4))
    content = before + bytes(stream.raw_bytes(tensor)) + after
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), tensor)


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


def test_a_replacement_that_a_crash_cut_is_finished_or_undone(tmp_path: pathlib.Path) -> None:
    path = checkpoint.save(tmp_path / "x", step=1)
    new = checkpoint.save(tmp_path / "y", step=2)
    path.rename(directory.replaced(path))
    half = directory.incomplete(path)
    half.mkdir()
    assert checkpoint.load(path) == {"step": 1}  # Undone: the new one was not complete.
    path.rename(directory.replaced(path))
    directory.remove(half)
    new.rename(half)
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.load(path) == {"step": 2}  # Finished.
    with warnings.catch_warnings():
        checkpoint.save(path, step=3, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
