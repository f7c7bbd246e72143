"""Any bytes in any file of any format: it is read right, or there is one `CheckpointError`."""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
import tempfile
import typing
import zlib

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from fuzzing import REFUSED, changes, fuzzed, junk, outcomes, replacements, tried
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from shardkit import checkpoint
from shardkit.checkpoint import FullFile
from shardkit.checkpoint._consolidate import describe, verify

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:TypedStorage is deprecated",  # DCP of torch 2.9 uses it.
)

Change = typing.Callable[[bytes], bytes]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 2)


def local_file() -> dict[str, typing.Any]:
    described = {"shape": [3], "dtype": "float32", "range": [0, 3], "cut": [3]}
    about = {
        "format": "shardkit local",
        "version": 1,
        "save": 1,
        "rank": 0,
        "world_size": 1,
        "tied": {"again": "weight"},
        "model": {"weight": described, "again": described},
        "optimizer": {"weight": {"step": None, "exp_avg": described}},
    }
    weight = torch.ones(3)
    return {
        "model": {"weight": weight, "again": weight},
        "optimizer": {"weight.step": 1, "weight.exp_avg": torch.zeros(3)},
        "shard_metadata": about,
        "param_groups": [{"lr": 0.1, "params": ["weight"]}],
    }


def xla_file() -> dict[str, typing.Any]:
    shard = {"_orig_name": "weight", "_orig_size": [2, 3]}
    about = {
        "rank": 0,
        "world_size": 1,
        "shard_info": {"": {"_fsdp_shard.weight": shard}},
        "buffer_info": {},
        "flatten_info": {},
    }
    return {"model": {"_fsdp_shard.weight": torch.ones(8)}, "shard_metadata": about}


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Return a folder of each format: a directory of one checkpoint, undamaged."""
    folder = tmp_path_factory.mktemp("formats")
    checkpoint.save(folder / "shardkit" / "x", model(), step=3, note={"a": [1, "b"]})
    dcp.save(
        {"model": model().state_dict(), "step": 3}, checkpoint_id=folder / "dcp" / "x", no_dist=True
    )
    for name in ("torch", "safetensors", "index", "local", "xla"):
        (folder / name).mkdir()
    torch.save(model().state_dict(), folder / "torch" / "x.pt")
    safetensors.torch.save_file(model().state_dict(), folder / "safetensors" / "x.safetensors")
    safetensors.torch.save_file(model().state_dict(), folder / "index" / "a.safetensors")
    weight_map = dict.fromkeys(model().state_dict(), "a.safetensors")
    (folder / "index" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    torch.save(local_file(), folder / "local" / "x_rank-0-of-1.pth")
    torch.save(xla_file(), folder / "xla" / "x_rank-0-of-1.pth")
    return {entry.name: entry for entry in folder.iterdir()}


SOURCES = {"torch": "x.pt", "safetensors": "x.safetensors", "index": ""}
"""What is read in the folder of a format, if not ``x``."""


def read_in_all_ways(folder: pathlib.Path, name: str, *, has_checksums: bool) -> None:
    source = folder / SOURCES.get(name, "x")
    found = tried(lambda: verify(source).problems)
    tried(lambda: describe(source))
    tried(lambda: checkpoint.consolidate(source, folder / "out.pt"))
    loaded = nn.Linear(3, 2)
    if name in {"local", "xla"}:
        return
    before = [param.clone() for param in loaded.parameters()]
    if name in {"shardkit", "dcp"}:
        result = tried(lambda: checkpoint.load(source, loaded))
        tried(lambda: checkpoint.latest(folder))
        tried(lambda: checkpoint.save(folder / "beside", step=1))
    else:
        result = tried(lambda: FullFile(source))
    if not has_checksums or result is REFUSED:
        return
    is_right = all(map(torch.equal, loaded.parameters(), model().parameters()))
    if not is_right or found:
        outcomes["silent"] += 1
    assert is_right, [before, list(loaded.parameters())]
    assert result == {"step": 3, "note": {"a": [1, "b"]}}


def copied(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as scratch:
        yield pathlib.Path(shutil.copytree(folder, pathlib.Path(scratch, "c")))


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "name", ["shardkit", "dcp", "torch", "safetensors", "index", "local", "xla"]
)
@fuzzed
@given(which=st.integers(0, 3), several=st.lists(changes(), min_size=1, max_size=3))
def test_any_bytes(
    formats: dict[str, pathlib.Path], name: str, which: int, several: list[Change]
) -> None:
    for folder in copied(formats[name]):
        files = files_of(folder)
        file = files[which % len(files)]
        content = file.read_bytes()
        for change in several:
            content = change(content)
        file.write_bytes(content)
        read_in_all_ways(folder, name, has_checksums=name == "shardkit")


# --- what somebody wrote on purpose: all checksums are right --------------------------------------


def seal(path: pathlib.Path, change_header: typing.Any, change_body: typing.Any) -> None:
    first, second = (path / "shardkit.json").read_bytes().split(b"\n", 1)
    content = (path / ".metadata").read_bytes()
    lines = []
    for line, begin, change in (
        (first, b'{"header":', change_header),
        (second, b'"body":', change_body),
    ):
        found = json.loads(line.removeprefix(begin).rpartition(b',"crc32"')[0])
        if "metadata" in found:
            found["metadata"] = {"nbytes": len(content), "crc32": zlib.crc32(content)}
        change(found)
        text = json.dumps(found).encode()
        lines.append(begin + text + b',"crc32":%d' % zlib.crc32(text))
    (path / "shardkit.json").write_bytes(lines[0] + b",\n" + lines[1] + b"}\n")


def nothing(_: object) -> None:
    pass


@fuzzed
@given(header=st.one_of(st.just(nothing), replacements()), body=replacements())
def test_forged_manifests(
    formats: dict[str, pathlib.Path], header: typing.Any, body: typing.Any
) -> None:
    for folder in copied(formats["shardkit"]):
        seal(folder / "x", header, body)
        read_in_all_ways(folder, "shardkit", has_checksums=False)


@pytest.mark.parametrize("name", ["shardkit", "dcp"])
@fuzzed
@given(
    which=st.integers(0, 20),
    field=st.sampled_from(
        ["size", "chunks", "properties", "offset", "length", "relative_path", "key"]
    ),
    value=st.one_of(junk, st.lists(st.integers(-1, 2**40), max_size=3).map(tuple)),
)
@example(which=0, field="size", value=(2**31, 2**31))
@example(which=0, field="offset", value=2**62)
def test_forged_metadata(
    formats: dict[str, pathlib.Path], name: str, which: int, field: str, value: typing.Any
) -> None:
    for folder in copied(formats[name]):
        file = folder / "x" / ".metadata"
        found = pickle.loads(file.read_bytes())
        entries, stored = list(found.state_dict_metadata.items()), list(found.storage_data.values())
        name_of, entry = entries[which % len(entries)]
        if field == "key":
            found.state_dict_metadata[value if isinstance(value, (str, int)) else "x"] = entry
        elif field in {"size", "chunks", "properties"}:
            object.__setattr__(entry, field, value)
        else:
            object.__setattr__(stored[which % len(stored)], field, value)
        del name_of
        try:
            file.write_bytes(pickle.dumps(found))
        except (pickle.PicklingError, ValueError, UnicodeError):
            return
        if name == "shardkit":
            seal(folder / "x", nothing, nothing)
        read_in_all_ways(folder, name, has_checksums=False)


@pytest.mark.parametrize(("name", "make"), [("local", local_file), ("xla", xla_file)])
@fuzzed
@given(change=replacements())
def test_forged_files_of_ranks(
    formats: dict[str, pathlib.Path], name: str, make: Callable[[], typing.Any], change: typing.Any
) -> None:
    for folder in copied(formats[name]):
        content = make()
        change(content["shard_metadata"])
        try:
            torch.save(content, folder / "x_rank-0-of-1.pth")
        except (UnicodeError, ValueError):
            return
        read_in_all_ways(folder, name, has_checksums=False)
