"""Checkpoints that are damaged, that want to run code, or that a failing disk cut."""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
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
from shardkit.checkpoint import _load
from shardkit.checkpoint._consolidate import verify
from shardkit.checkpoint._dcp import directory, manifest, metadata, writer
from shardkit.checkpoint._files import disk

if typing.TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:TypedStorage is deprecated",  # DCP of torch 2.9 uses it.
)


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


def test_a_step_that_is_too_large_for_the_manifest(tmp_path: pathlib.Path) -> None:
    path = checkpoint.save(tmp_path / "x", nn.Linear(1100, 1000), step=-(2**62))
    assert load(path) == {"step": -(2**62)}
    assert manifest.read_header(path).step is None


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


def test_a_restart_goes_on_from_the_newest_good_one(saved: pathlib.Path) -> None:
    newest = checkpoint.save(saved.parent / "y", nn.Linear(1100, 1000), step=6)
    flip(newest / "__0_0.distcp", 100_000)
    assert checkpoint.latest(saved.parent) == newest
    with pytest.raises(CheckpointError, match=r"another one\. latest\(\) passes over"):
        load(newest)
    with pytest.warns(UserWarning, match=r"y is passed over: .* are not what was written"):
        assert checkpoint.latest(saved.parent) == saved
    assert load(saved) == {"step": 5}
    with pytest.raises(CheckpointError, match="x exists"):
        checkpoint.save(saved, nn.Linear(1100, 1000), step=5)
    checkpoint.save(newest, nn.Linear(1100, 1000), step=6)  # It comes by the damaged one again.
    assert checkpoint.latest(saved.parent) == newest
    assert load(newest) == {"step": 6}


def test_keep_last_keeps_good_ones_beside_damaged_ones(saved: pathlib.Path) -> None:
    parent = saved.parent
    noticed = checkpoint.save(parent / "noticed", nn.Linear(1100, 1000), step=6)
    flip(noticed / "__0_0.distcp", 100_000)
    with pytest.raises(CheckpointError, match=r"latest\(\) passes over"):
        load(noticed)
    cut = checkpoint.save(parent / "cut", step=7)
    os.truncate(cut / "__0_0.distcp", 1)
    newest = checkpoint.save(parent / "y", step=8, keep_last=2)
    assert {*parent.iterdir()} == {saved, noticed, cut, newest}
    last = checkpoint.save(parent / "z", step=9, keep_last=2)
    assert {*parent.iterdir()} == {newest, last}


def test_a_note_that_cannot_be_written_is_not_promised(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(saved / "__0_0.distcp", 100_000)
    real = os.open

    def read_only(path: typing.Any, *args: typing.Any, **kwargs: typing.Any) -> int:
        if path == directory.DAMAGED_FILE:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(CheckpointError, match="load another one") as caught:
        load(saved)
    assert "latest()" not in str(caught.value)


def test_an_error_of_the_disk_is_no_damage(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may pass, as on a network; a note would stay."""
    real = pathlib.Path.stat

    def fail(path: pathlib.Path, **options: typing.Any) -> os.stat_result:
        if path.suffix == ".distcp" and path.parent == saved:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "stat", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            load(saved)
        with pytest.raises(CheckpointError, match="was not saved: OSError"):
            checkpoint.save(saved, step=1)  # Something damaged would be replaced.
    assert checkpoint.latest(saved.parent) == saved


@pytest.fixture
def unreadable(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[pathlib.Path]:
    """Return checkpoints whose manifest cannot be read, for now none; the parameter is why."""
    found: list[pathlib.Path] = []
    open_regular = disk.open_regular

    def refuse(path: pathlib.Path) -> int:
        if path.parent in found:
            raise OSError(request.param, os.strerror(request.param), str(path))
        return open_regular(path)

    monkeypatch.setattr(manifest, "open_regular", refuse)
    return found


@pytest.mark.parametrize("unreadable", [errno.ESTALE], indirect=True)
def test_a_failing_disk_begins_no_run_anew(
    saved: pathlib.Path, unreadable: list[pathlib.Path]
) -> None:
    newest = checkpoint.save(saved.parent / "y", nn.Linear(1100, 1000), step=6)
    unreadable.append(newest)
    with pytest.warns(UserWarning, match="y is passed over: .*Stale file handle"):
        assert checkpoint.latest(saved.parent) == saved
    unreadable.append(saved)
    with (
        pytest.warns(UserWarning, match="x is passed over: .*Stale file handle"),
        pytest.warns(UserWarning, match="y is passed over"),
        pytest.raises(CheckpointError, match=r"Stale file handle.*begin anew\. Try again"),
    ):
        checkpoint.latest(saved.parent)


@pytest.mark.parametrize("unreadable", [errno.EACCES], indirect=True)
def test_what_may_not_be_read_is_named(saved: pathlib.Path, unreadable: list[pathlib.Path]) -> None:
    """A new run may write beside what others own, such as lost+found."""
    unreadable.append(saved)
    with pytest.warns(UserWarning, match="x is passed over: .*Permission denied"):
        assert checkpoint.latest(saved.parent) is None


def test_a_note_of_damage_that_is_gone(saved: pathlib.Path) -> None:
    flip(saved / "__0_0.distcp", 100_000)
    with pytest.raises(CheckpointError):
        load(saved)
    flip(saved / "__0_0.distcp", 100_000)
    (problem,) = verify(saved).problems
    assert "Delete this file, and latest() returns the checkpoint again" in problem
    (saved / "shardkit.damaged").unlink()
    assert checkpoint.latest(saved.parent) == saved


def test_not_there_and_foreign(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"none does not exist\. shardkit.checkpoint.latest"):
        checkpoint.load(tmp_path / "none")
    (tmp_path / ".none.incomplete").mkdir()
    with pytest.raises(CheckpointError, match="was being written, and is not complete"):
        checkpoint.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.load(tmp_path / "empty")


def test_metadata_that_may_not_be_read(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: pathlib.Path) -> int:
        if path.name == ".metadata":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_regular(path)

    open_regular = disk.open_regular
    (saved / "shardkit.json").unlink()
    monkeypatch.setattr(disk, "open_regular", refuse)
    message = r"\.metadata: Permission denied\..* give the path of a complete one\."
    with pytest.raises(CheckpointError, match=message):
        load(saved)


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
    with pytest.raises(CheckpointError, match="asks for 'mkdir' of 'posix'"):
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
        if name == "rename":
            patch.setattr(directory, "exchange", os.rename)
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


def test_a_replacement_that_a_crash_cut_is_finished_or_undone(tmp_path: pathlib.Path) -> None:
    path = checkpoint.save(tmp_path / "x", step=1)
    new = checkpoint.save(tmp_path / "y", step=2)
    path.rename(tmp_path / ".x.replaced")  # As it was called when names had no owner.
    half = tmp_path / ".x.incomplete"
    half.mkdir()
    assert checkpoint.load(path) == {"step": 1}  # Undone: the new one was not complete.
    path.rename(tmp_path / ".x.replaced")
    directory.remove(half)
    new.rename(half)
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.load(path) == {"step": 2}  # Finished.
    with warnings.catch_warnings():
        checkpoint.save(path, step=3, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_checkpoint_that_another_job_gave_its_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without exchanges: one job was killed between two renames, another recovers the name."""
    path = checkpoint.save(tmp_path / "x", step=1)
    write = writer.write_synced

    def write_and_recover(manifest: pathlib.Path, content: bytes) -> None:
        write(manifest, content)
        path.rename(tmp_path / ".x.replaced")
        directory.recover(path)

    monkeypatch.setattr(writer, "write_synced", write_and_recover)
    assert checkpoint.save(path, step=2, overwrite=True) == path
    assert checkpoint.load(path) == {"step": 2}


def test_a_name_that_is_lost_again_and_again_while_it_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without exchanges: other jobs replace the checkpoint when the load begins, and after that."""
    path = checkpoint.save(tmp_path / "x", step=1)
    path.rename(tmp_path / ".x.replaced")
    look, times = _load._look, iter(range(3))  # noqa: SLF001

    def look_and_lose(target: pathlib.Path) -> None:
        look(target)
        if next(times, None) is not None:
            path.rename(tmp_path / ".x.replaced")

    monkeypatch.setattr(_load, "_look", look_and_lose)
    assert checkpoint.load(path) == {"step": 1}
