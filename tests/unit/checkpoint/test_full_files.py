"""Files of whole tensors: read in parts and written tensor after tensor, beside torch's own."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import pathlib
import resource
import types
import typing
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError
from shardkit._text import byte_size
from shardkit.checkpoint import FullFile, consolidate, load_full
from shardkit.checkpoint._files import formats
from shardkit.checkpoint._files.disk import TensorInfo
from shardkit.checkpoint._files.formats import Format, FullWriter

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
SHAPES = [(), (5,), (0, 4), (7, 13), (3, 2, 5)]


def every_tensor() -> dict[str, Tensor]:
    """Return a tensor of each dtype and shape, of random bytes."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            values = torch.randn(shape, generator=generator) * 3
            tensors[f"{dtype}{shape}"] = (values > 0) if dtype == torch.bool else values.to(dtype)
    return tensors


def infos_of(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def write_full(
    path: pathlib.Path,
    infos: Mapping[str, TensorInfo],
    tensors: Iterable[tuple[str, Tensor]],
    format: Format,  # noqa: A002
    max_shard_size: int | str | None = None,
) -> None:
    """Write whole tensors, each at once."""
    with FullWriter(path, infos, format=format, max_shard_size=max_shard_size) as writer:
        for name, tensor in tensors:
            writer.append(name, tensor.reshape(-1))


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal to the bit."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected)))


def assert_all_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert same(actual[name], value), name


def assert_parts(file: FullFile, expected: dict[str, Tensor]) -> None:
    """Check some parts of every tensor."""
    assert file.infos == infos_of(expected)
    for name, value in expected.items():
        numel = value.numel()
        for start, stop in ((0, numel), (numel // 3, numel), (numel // 3, numel // 2), (0, 0)):
            part = file.read(name, start, stop)
            assert same(part, value.reshape(-1)[start:stop]), (name, start, stop)


def save_torch(tensors: dict[str, Tensor], folder: pathlib.Path) -> pathlib.Path:
    torch.save(tensors, folder / "model.pt")
    return folder / "model.pt"


def save_nested(tensors: dict[str, Tensor], folder: pathlib.Path) -> pathlib.Path:
    beside = {"epoch": 3, "optimizer": {}, "random": torch.get_rng_state()}
    torch.save({**beside, "state_dict": tensors}, folder / "all.pth")
    return folder / "all.pth"


def save_safetensors(tensors: dict[str, Tensor], folder: pathlib.Path) -> pathlib.Path:
    safetensors.torch.save_file(tensors, folder / "any.safetensors")
    return folder / "any.safetensors"


def save_directory(tensors: dict[str, Tensor], folder: pathlib.Path) -> pathlib.Path:
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def save_sharded(tensors: dict[str, Tensor], folder: pathlib.Path) -> pathlib.Path:
    files = {"model-1.safetensors": list(tensors)[::2], "model-2.safetensors": list(tensors)[1::2]}
    for file, names in files.items():
        safetensors.torch.save_file({name: tensors[name] for name in names}, folder / file)
    places = {name: file for file, names in files.items() for name in names}
    index = {"weight_map": {name: places[name] for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_sharded_torch(tensors: dict[str, Tensor], folder: pathlib.Path) -> pathlib.Path:
    torch.save(tensors, folder / "pytorch_model-1.bin")
    index = {"weight_map": dict.fromkeys(tensors, "pytorch_model-1.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "save",
    [
        *(save_torch, save_nested, save_safetensors),
        *(save_directory, save_sharded, save_sharded_torch),
    ],
)
def test_parts_of_files_that_others_wrote(
    save: Callable[..., pathlib.Path], tmp_path: pathlib.Path
) -> None:
    tensors = every_tensor()
    assert_parts(FullFile(save(tensors, tmp_path)), tensors)


def test_views_shared_storages_and_any_strides(tmp_path: pathlib.Path) -> None:
    base = torch.randn(6, 8, 4)
    tensors = {
        "base": base,
        "again": base,
        "slice": base[2:4, 1:3],
        "transposed": base.transpose(0, 2),
        "expanded": torch.randn(1, 5).expand(7, 5),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(base[0].t()),
    }
    file = FullFile(save_torch(tensors, tmp_path))
    assert_parts(file, {name: t.detach().resolve_conj() for name, t in tensors.items()})
    assert file.tied == {"again": "base"}


def test_every_range_of_strided_rows(tmp_path: pathlib.Path) -> None:
    wide = torch.arange(6 * 10).view(6, 10)[1:, ::2]
    file = FullFile(save_torch({"wide": wide, "t": wide.t()}, tmp_path))
    for start in range(26):
        for stop in range(start, 26):
            assert torch.equal(file.read("wide", start, stop), wide.flatten()[start:stop])
            assert torch.equal(file.read("t", start, stop), wide.t().flatten()[start:stop])


def test_a_file_that_is_replaced_stays_readable(tmp_path: pathlib.Path) -> None:
    """As it was when it was opened."""
    tensors = every_tensor()
    file = FullFile(save_torch(tensors, tmp_path))
    torch.save({"other": torch.ones(1)}, tmp_path / "new")
    (tmp_path / "new").replace(tmp_path / "model.pt")
    assert_parts(file, tensors)


def test_a_file_that_is_replaced_while_it_is_opened(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its places would be those of the old file, and its names those of the new one."""
    path = save_torch(tensors := every_tensor(), tmp_path)
    real = torch.load

    def load_another(*args: typing.Any, **options: typing.Any) -> typing.Any:
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)
        return real(*args, **options)

    monkeypatch.setattr(torch, "load", load_another)
    with pytest.raises(CheckpointError, match="was replaced while it was opened"):
        FullFile(path)
    monkeypatch.undo()
    assert_parts(FullFile(path), tensors)


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_file_with_entries_that_torch_does_not_write(tmp_path: pathlib.Path, begins: str) -> None:
    """Where its tensors lie is not known, so none is read from a wrong place."""
    path = save_torch({"x": torch.arange(4.0)}, tmp_path)
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    entries.insert(0 if begins == "before" else len(entries), ("model/data/1", bytes(16)))
    with zipfile.ZipFile(path, "w") as new:
        for name, content in entries:
            new.writestr(name, content)
    with pytest.raises(CheckpointError, match=r"or torch\.save did not write it"):
        FullFile(path)


# --- writing --------------------------------------------------------------------------------------


def parts_of(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in two parts, the last tensor first."""
    for name, tensor in reversed(tensors.items()):
        flat = tensor.reshape(-1)
        yield name, flat[: flat.numel() // 3]
        yield name, flat[flat.numel() // 3 :]


@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_reads_what_was_written_tensor_after_tensor(
    tmp_path: pathlib.Path, *, deterministic: bool
) -> None:
    tensors = every_tensor()
    path = tmp_path / "new" / "model.pt"
    torch.use_deterministic_algorithms(deterministic)
    try:
        with FullWriter(path, infos_of(tensors), format="torch") as writer:
            for name, part in parts_of(tensors):
                writer.append(name, part)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    for mmap in (False, True):
        assert_all_same(torch.load(path, weights_only=True, mmap=mmap), tensors)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "its checksums are right"
    assert_parts(FullFile(path), tensors)
    assert [p.name for p in path.parent.iterdir()] == ["model.pt"]


def test_the_safetensors_package_reads_what_was_written(tmp_path: pathlib.Path) -> None:
    tensors = every_tensor()
    path = tmp_path / "model.safetensors"
    write_full(path, infos_of(tensors), parts_of(tensors), "safetensors")
    assert_all_same(safetensors.torch.load_file(path), tensors)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_parts(FullFile(path), tensors)


@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("size", [300, "1KiB", 10**9])
def test_sharded_directories(tmp_path: pathlib.Path, format: str, size: int | str) -> None:  # noqa: A002
    tensors = every_tensor()
    write_full(tmp_path / "out", infos_of(tensors), parts_of(tensors), format, size)
    assert_parts(FullFile(tmp_path / "out"), tensors)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    stem, suffix = ("pytorch_model", "bin") if format == "torch" else ("model", "safetensors")
    if size == 10**9:
        assert names == [f"{stem}.{suffix}"]
        return
    count = len(names) - 1
    assert count > 1
    numbers = range(1, count + 1)
    expected = [f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in numbers]
    assert names == sorted([*expected, f"{stem}.{suffix}.index.json"])
    load = safetensors.torch.load_file if format == "safetensors" else torch.load
    for name in expected:
        part = load(tmp_path / "out" / name)
        nbytes = sum(tensor.nbytes for tensor in part.values())
        assert nbytes <= byte_size(size) or len([t for t in part.values() if t.numel()]) == 1
    index = json.loads((tmp_path / "out" / f"{stem}.{suffix}.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_tied_names(tmp_path: pathlib.Path) -> None:
    whole, other = torch.randn(5, 3), torch.randn(2)
    tensors = {"a": whole, "b": whole, "c": other}
    for name in ("model.pt", "model.safetensors"):
        format = "torch" if name.endswith("pt") else "safetensors"  # noqa: A001
        with FullWriter(
            tmp_path / name, infos_of(tensors), format=format, tied={"b": "a"}
        ) as writer:
            writer.append("a", whole.view(-1))
            writer.append("c", other)
    loaded = torch.load(tmp_path / "model.pt")
    assert list(loaded) == ["a", "b", "c"]
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["b"], whole)
    assert list(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["a", "c"]


def test_tensors_in_what_is_no_tensor(tmp_path: pathlib.Path) -> None:
    array, empty = np.ones(5), torch.empty(0)
    tables = [torch.from_numpy(array), torch.from_numpy(array), empty, empty.view(0, 2)]
    path = tmp_path / "x.pt"
    with FullWriter(path, {}, format="torch", others={"tables": tables}):
        pass
    assert all(map(torch.equal, torch.load(path)["tables"], tables))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "its checksums are right"
    held = types.SimpleNamespace(table=torch.ones(1))
    with (
        pytest.raises(CheckpointError, match="an object with tensors in it"),
        FullWriter(path, {}, format="torch", others={"held": held}),
    ):
        pass


def test_a_state_dict_beside_other_tensors_in_memory() -> None:
    saved, model = nn.Linear(2, 3), nn.Linear(2, 3)
    load_full({"random": torch.get_rng_state(), "model": saved.state_dict()}, model)
    assert_all_same(model.state_dict(), saved.state_dict())


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_nothing_is_left_of_a_write_that_failed(tmp_path: pathlib.Path, format: str) -> None:  # noqa: A002
    path = tmp_path / ("model.pt" if format == "torch" else "model.safetensors")
    path.write_text("before")

    def fail() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_full(path, {"a": TensorInfo((4,), torch.float32)}, fail(), format)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    write_full(path, {"a": TensorInfo((3,), torch.float32)}, [("a", torch.ones(3))], format)
    loaded = torch.load(path) if format == "torch" else safetensors.torch.load_file(path)
    assert torch.equal(loaded["a"], torch.ones(3))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_two_jobs_that_write_one_file(tmp_path: pathlib.Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    format: typing.Any = "torch" if suffix == ".pt" else "safetensors"  # noqa: A001
    infos = {"a": TensorInfo((3,), torch.float32)}
    with FullWriter(path, infos, format=format) as first:
        first.append("a", torch.ones(2))
        with FullWriter(path, infos, format=format) as second:
            second.append("a", torch.zeros(3))
        assert torch.equal(FullFile(path).read("a", 0, 3), torch.zeros(3))
        first.append("a", torch.ones(1))
    assert torch.equal(FullFile(path).read("a", 0, 3), torch.ones(3))
    assert list(tmp_path.iterdir()) == [path]


def test_two_jobs_that_write_into_one_directory(tmp_path: pathlib.Path) -> None:
    infos = {name: TensorInfo((3,), torch.float32) for name in "ab"}

    def write(value: float, meanwhile: typing.Callable[[], None]) -> None:
        with FullWriter(tmp_path / "x", infos, format="torch", max_shard_size=12) as writer:
            meanwhile()
            for name in infos:
                writer.append(name, torch.full((3,), value))

    with pytest.raises(CheckpointError, match=r"another job has written .*-00001-of-00002\.bin"):
        write(1.0, lambda: write(2.0, lambda: None))
    file = FullFile(tmp_path / "x")
    assert [file.read(name, 0, 3).tolist() for name in infos] == [[2.0] * 3] * 2
    assert len(list((tmp_path / "x").iterdir())) == 3


def test_a_file_has_its_name_once_it_is_on_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    infos = {"a": TensorInfo((3,), torch.float32)}
    for name, format in (("x.pt", "torch"), ("x.safetensors", "safetensors")):  # noqa: A001
        (tmp_path / name).write_text("before")
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            write_full(tmp_path / name, infos, [("a", torch.ones(3))], format)
        assert (tmp_path / name).read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("limit_nbytes", [100, 500, 1000])
def test_a_full_disk_is_named(tmp_path: pathlib.Path, limit_nbytes: int) -> None:
    """A limit for the size of files raises where a full disk would."""
    infos = {each: TensorInfo((3,), torch.float32) for each in "ab"}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_nbytes, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_full(tmp_path / "x.pt", infos, [], "torch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["write_synced", "_is_linked"])
def test_a_directory_gets_all_files_or_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The disk is full when the index is written, or breaks when files get their names."""
    original = getattr(formats, name)

    def fail(path: pathlib.Path, *rest: typing.Any) -> bool:
        if "index" in path.name:
            raise OSError(28, "No space left on device")
        return original(path, *rest)

    infos = {each: TensorInfo((3,), torch.float32) for each in "ab"}
    values = [(each, torch.ones(3)) for each in infos]
    with monkeypatch.context() as broken:
        broken.setattr(formats, name, fail)
        with pytest.raises(OSError, match="No space"):
            write_full(tmp_path / "x", infos, values, "torch", 12)
    assert list((tmp_path / "x").iterdir()) == []
    write_full(tmp_path / "x", infos, values, "torch", 12)
    assert torch.equal(FullFile(tmp_path / "x").whole("b"), torch.ones(3))


# --- errors ---------------------------------------------------------------------------------------


def bad_files(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, str]]:
    """Yield what is wrong, where, and what is said of it."""
    good = every_tensor()
    yield "absent", folder / "absent.pt", "does not exist"
    empty = folder / "empty"
    empty.mkdir()
    yield "no weights", empty, "neither model.safetensors nor"
    cut = save_safetensors(good, folder)
    os.truncate(cut, cut.stat().st_size - 1)
    yield "cut", cut, "ends at byte"
    text = folder / "text.safetensors"
    text.write_text("this is no tensor file at all")
    yield "text", text, "no safetensors file"
    lying = folder / "lying.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'
    lying.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    yield "lying", lying, r"'a' of shape \(2,\) .* takes 8 bytes, but the header gives it 4"
    strange = folder / "strange.safetensors"
    header = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    strange.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    yield "strange", strange, "'F4'"
    cut_torch = folder / "cut.pt"
    torch.save(good, cut_torch)
    os.truncate(cut_torch, cut_torch.stat().st_size // 2)
    yield "cut torch", cut_torch, "cannot be read as a file of torch.save"
    torch.save([torch.ones(2)], folder / "list.pt")
    yield "list", folder / "list.pt", "holds a list, not a state dict"
    torch.save({"weights": good, "epoch": 1}, folder / "other.pt")
    yield "other key", folder / "other.pt", r"'weights' \(dict\), 'epoch' \(int\)"
    torch.save({"model": good, "state_dict": good}, folder / "two.pt")
    yield "two", folder / "two.pt", r"\['model', 'state_dict'\] may all be meant"
    torch.save({"a": torch.eye(3).to_sparse()}, folder / "sparse.pt")
    yield "sparse", folder / "sparse.pt", "'a' is a sparse"
    torch.save({"a": print}, folder / "code.pt")
    yield "code", folder / "code.pt", "could execute"
    torch.save(good, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    yield "legacy", folder / "legacy.pt", "before 1.6"
    index = folder / "lacking"
    index.mkdir()
    for name, file in (("a", "part.safetensors"), ("b", "../x"), ("c", "gone.safetensors")):
        (index / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {name: file}})
        )
        safetensors.torch.save_file({"b": torch.ones(1)}, index / "part.safetensors")
        said = {"a": "lacks a", "b": "outside of its directory", "c": "not there: gone"}[name]
        yield f"index {name}", index, said


# Torch 2.12.0 warns of every sparse tensor that it reads, before it is refused here.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_errors_name_the_file_and_what_is_wrong(tmp_path: pathlib.Path) -> None:
    for what, path, message in bad_files(tmp_path):
        with pytest.raises(CheckpointError, match=f"(?s){path.name}.*{message}|{message}"):
            print(what, FullFile(path).infos)


def test_malicious_pickles_are_not_executed(tmp_path: pathlib.Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[typing.Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"a": torch.ones(1), "b": Malicious()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="could execute"):
        FullFile(tmp_path / "bad.pt")
    assert not (tmp_path / "executed").exists()


def test_what_a_format_cannot_hold_is_refused(tmp_path: pathlib.Path) -> None:
    infos = {"a": TensorInfo((2,), torch.complex128)}
    with pytest.raises(CheckpointError, match=r"'a' has dtype torch.complex128"):
        write_full(tmp_path / "x.safetensors", infos, [], "safetensors")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="'torch' or 'safetensors', got 'zip'"):
        write_full(tmp_path / "x", infos, [], "zip")
    for name, format in (("x.safetensors", "torch"), ("x.bin", "safetensors")):  # noqa: A001
        with pytest.raises(CheckpointError, match=f"does not fit format='{format}'"):
            write_full(tmp_path / name, infos, [], format)
    save_directory({"a": torch.ones(1)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"has weights already \(model.safetensors\)"):
        write_full(tmp_path, infos, [], "torch", 100)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (7, 7),
        ("12", 12),
        ("5GB", 5 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("2kb", 2000),
        ("1e9", 10**9),
        (1e20, 10**20),
        ("1_000", 1000),
        (".5GB", 5 * 10**8),
        ("5.GB", 5 * 10**9),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert byte_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "5 bananas", 0, "-3", "1e400GB", "1_", "1-2", ".", "e9"]
)
def test_sizes_that_are_none(text: int | str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        CheckpointError, match="max_shard_size must be a number of bytes such as 50000"
    ):
        FullWriter(tmp_path / "out", {}, format="torch", max_shard_size=text)


def test_memory_for_tensors_that_come_is_not_touched(tmp_path: pathlib.Path) -> None:
    """A file of 400 MB is begun in a fraction of that."""
    infos = {f"t{i}": TensorInfo((10_000, 1_000), torch.float32) for i in range(10)}
    assert sum(math.prod(info.shape) * 4 for info in infos.values()) == 4 * 10**8
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # The high-water mark begins anew.
    before = peak_nbytes()
    with (
        contextlib.suppress(ZeroDivisionError),
        FullWriter(tmp_path / "x.pt", infos, format="torch"),
    ):
        grown = peak_nbytes() - before
        raise ZeroDivisionError
    assert grown < 10**7
    assert list(tmp_path.iterdir()) == []


def peak_nbytes() -> int:
    """Return this process's largest resident size."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_an_optimizer_in_a_file_is_not_read(tmp_path: pathlib.Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "optim": {"state": {}}}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="is a file, of which the model is read only"):
        consolidate(tmp_path / "x", tmp_path / "y", optimizer=True)
