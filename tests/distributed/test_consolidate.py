"""Checkpoint directories made into whole files, described and verified, in one process."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import typing
import zipfile

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import typer.testing
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict as torch_get_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import parallel_models
import shardkit
from launching import free_port
from models import CASES
from reference import OPTIMIZERS, full, make_mesh, my_batch, shard, train
from shardkit import fully_shard
from shardkit._cli import app
from shardkit._errors import CheckpointError
from shardkit.checkpoint import (
    StateDictOptions,
    consolidate,
    get_optimizer_state_dict,
    load_full,
    save,
    set_optimizer_state_dict,
)
from shardkit.checkpoint._consolidate import Verification, describe, verify

if typing.TYPE_CHECKING:
    from workers import Spawn

StateDict = dict[str, Tensor]


pytestmark = pytest.mark.helpers


def save_trained(name: str, mesh_shape: tuple[int, ...], folder: str) -> dict[str, typing.Any]:
    """Return the whole state that was saved."""
    case = CASES[name]
    model = shard(case, case.make(), make_mesh(mesh_shape))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for _ in train(case, model, optimizer, [my_batch(case, 0)]):
        pass
    for key, buffer in model.named_buffers():
        if "running" in key:
            buffer.fill_(0.25)  # Each rank has its own, of which one is saved.
    save(pathlib.Path(folder) / "step-7", model, optimizer, step=7, note="hello")
    options = StateDictOptions(full_state_dict=True)
    return {
        "model": {k: full(v).detach().clone() for k, v in model.state_dict().items()},
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }


def assert_same(actual: typing.Any, expected: typing.Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, list):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


@pytest.mark.parametrize(
    ("name", "mesh_shape"), [("gpt", (3,)), ("conv", (2, 2)), ("tiny", (2,))], ids=str
)
def test_shardkits_checkpoints(
    spawn: Spawn, tmp_path: pathlib.Path, name: str, mesh_shape: tuple[int, ...]
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    whole = spawn(save_trained, world_size, name, mesh_shape, str(tmp_path))[0]
    source = tmp_path / "step-7"
    done: list[tuple[int, int]] = []
    out = consolidate(source, tmp_path / "model.pt", progress=lambda *now: done.append(now))
    assert_same(torch.load(out, weights_only=True, mmap=True), whole["model"])
    assert done[-1][0] == done[-1][1] == sum(v.nbytes for v in whole["model"].values())
    both = consolidate(source, tmp_path / "both.pt", optimizer=True)
    assert_same(torch.load(both, weights_only=True), whole)
    single = consolidate(source, tmp_path / "x.safetensors", format="safetensors")
    assert_same(safetensors.torch.load_file(single), whole["model"])
    half = consolidate(source, tmp_path / "half.pt", dtype=torch.bfloat16)
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in whole["model"].items()}
    assert_same(torch.load(half), halves)
    half = consolidate(source, tmp_path / "half.pt", dtype=torch.bfloat16, optimizer=True)
    assert_same(torch.load(half, weights_only=True), {**whole, "model": halves})
    parts = consolidate(source, tmp_path / "hf", format="safetensors", max_shard_size=5000)
    again = consolidate(parts, tmp_path / "again.pt")
    assert_same(torch.load(again), whole["model"])


# --- what others wrote ----------------------------------------------------------------------------


class AppState:
    """As the tutorial of torch.distributed.checkpoint has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, typing.Any]:
        model, optim = torch_get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, typing.Any]) -> None:
        raise NotImplementedError


class Names(nn.Module):
    """A model of which the parameters' names look like a checkpoint's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


def save_by_torch(folder: str, how: str) -> None:
    model = Names()
    for layer in (model.model, model.head, model):
        torch_fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {
        "flat": model.state_dict,
        "nested": lambda: {"model": model.state_dict(), "epoch": 3},
        "app": lambda: {"app": AppState(model, optimizer)},
        "other": lambda: {"net": model.state_dict(), "epoch": 3},
    }[how]()
    dcp.save(state, checkpoint_id=pathlib.Path(folder) / how)


@pytest.mark.parametrize(
    ("how", "key"), [("flat", ()), ("nested", ("model",)), ("app", ("app", "model"))]
)
def test_checkpoints_of_fsdp2(
    spawn: Spawn, tmp_path: pathlib.Path, how: str, key: tuple[str, ...]
) -> None:
    """Beside torch's own conversion, which has everything in memory."""
    spawn(save_by_torch, 2, str(tmp_path), how)
    source = tmp_path / how
    dcp_to_torch_save(source, tmp_path / "expected.pt")
    everything = torch.load(tmp_path / "expected.pt", weights_only=True)
    expected = everything
    for part in key:
        expected = expected[part]
    assert_same(torch.load(consolidate(source, tmp_path / "model.pt")), dict(expected))
    Names().load_state_dict(torch.load(tmp_path / "model.pt"))
    if how == "app":
        both = torch.load(consolidate(source, tmp_path / "both.pt", optimizer=True))
        assert_same(both["optim"], everything["app"]["optim"])
        load_full(tmp_path / "both.pt", Names())
    else:
        with pytest.raises(CheckpointError, match="has no optimizer's state"):
            consolidate(source, tmp_path / "both.pt", optimizer=True)
        assert verify(source).problems == []


def test_where_the_model_is_can_be_said(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(save_by_torch, 2, str(tmp_path), "other")
    with pytest.raises(
        CheckpointError, match=r"no state dict under a key 'model', but \(top\), net"
    ):
        consolidate(tmp_path / "other", tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no state dict under 'web'"):
        consolidate(tmp_path / "other", tmp_path / "x.pt", model_key="web")
    out = consolidate(tmp_path / "other", tmp_path / "x.pt", model_key="net")
    Names().load_state_dict(torch.load(out))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
def test_the_key_of_the_model_may_have_a_dot(tmp_path: pathlib.Path) -> None:
    state = Names().state_dict()
    dcp.save({"net.v2": state, "epoch": 3}, checkpoint_id=tmp_path / "x", no_dist=True)
    out = consolidate(tmp_path / "x", tmp_path / "x.pt", model_key="net.v2")
    assert_same(torch.load(out), dict(state))


def save_tensor_parallel(folder: str) -> StateDict:
    plain, model = parallel_models.make("gpt", (2, 2))
    save(pathlib.Path(folder) / "tp", model)
    return dict(plain.state_dict())


class Noted(nn.Linear):
    """A layer with state of its own."""

    notes: typing.Any = None

    def get_extra_state(self) -> typing.Any:
        return {"notes": self.notes}

    def set_extra_state(self, state: typing.Any) -> None:
        self.notes = state["notes"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
@pytest.mark.parametrize("by_torch", [False, True])
def test_what_dcp_takes_apart_or_leaves_out_is_there(
    tmp_path: pathlib.Path, *, by_torch: bool
) -> None:
    """State of a module in dicts and lists; and that of SGD, which has none of its parameters."""
    model = nn.Sequential(Noted(2, 3))
    model[0].notes = notes = [1, {"two": torch.arange(2), "three": 0.5}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if by_torch:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    else:
        save(tmp_path / "x", model, optimizer)
    both = torch.load(consolidate(tmp_path / "x", tmp_path / "both.pt", optimizer=True))
    alone = torch.load(consolidate(tmp_path / "x", tmp_path / "model.pt"))
    for loaded in (both["model"], alone):
        model[0].notes = None
        model.load_state_dict(loaded)
        assert_same(model[0].notes, notes)
    optimizer.param_groups[0]["lr"] = 1
    set_optimizer_state_dict(model, optimizer, both["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
def test_a_parameter_may_have_the_name_of_the_models_key(tmp_path: pathlib.Path) -> None:
    model = nn.ParameterDict({"model": torch.ones(2)})
    optimizer = torch.optim.Adam(model.parameters())
    model["model"].sum().backward()
    optimizer.step()
    save(tmp_path / "x", model, optimizer, notes={"table": torch.ones(3)})
    out = consolidate(tmp_path / "x", tmp_path / "x.pt")
    assert_same(torch.load(out), {"model": model["model"].detach()})
    notes = consolidate(tmp_path / "x", tmp_path / "notes.pt", model_key="extra")
    assert_same(torch.load(notes), {"notes": {"table": torch.ones(3)}})
    with zipfile.ZipFile(notes) as archive:
        assert archive.testzip() is None, "its checksums are right"


def test_tensor_parallel_checkpoints(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    expected = spawn(save_tensor_parallel, 4, str(tmp_path))[0]
    out = consolidate(tmp_path / "tp", tmp_path / "model.pt")
    assert_same(torch.load(out), expected)


# --- damage ---------------------------------------------------------------------------------------


def flip(path: pathlib.Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_damage_is_found_and_nothing_is_written(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(save_trained, 2, "mlp", (2,), str(tmp_path))
    source, out = tmp_path / "step-7", tmp_path / "out.pt"
    assert verify(source) == Verification()
    file = source / "__1_0.distcp"
    kept = file.read_bytes()
    data = kept.index(b"/data/0") + 64  # Behind the first piece's header, in its elements.
    flip(file, data)
    (problem,) = verify(source).problems
    assert re.search("__1_0.distcp.*not what was written", problem)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp.*not what was written"):
        consolidate(source, out, optimizer=True)
    os.truncate(file, len(kept) - 10)
    assert "__1_0.distcp" in verify(source).problems[0]
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp"):
        consolidate(source, out)
    file.unlink()
    assert "__1_0.distcp" in verify(source).problems[0]
    file.write_bytes(kept)
    flip(source / ".metadata", 100)
    assert ".metadata" in verify(source).problems[0]
    (source / ".metadata").unlink()
    assert "incomplete" in verify(source).problems[0]
    assert list(tmp_path.iterdir()) == [source]


def test_damage_of_a_whole_file_is_found(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    assert verify(path) == Verification()
    flip(path, path.stat().st_size // 2)
    assert re.search(r"model.pt.*data/0 is not what was written", verify(path).problems[0])
    safetensors.torch.save_file({"a": torch.zeros(1000)}, tmp_path / "x.safetensors")
    found = verify(tmp_path / "x.safetensors")
    assert found.problems == []
    assert "has no checksums, as the format has none" in found.unverified[0]
    os.truncate(tmp_path / "x.safetensors", 1000)
    assert "was damaged" in verify(tmp_path / "x.safetensors").problems[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_cannot_be_verified_is_said(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(100, 100)
    plain, ours = tmp_path / "plain", save(tmp_path / "ours", model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=plain, no_dist=True)
    (ours / "shardkit.json").unlink()
    for path, unverified in ((plain, "Names and shapes in .metadata"), (ours, "values of 2 ten")):
        found = verify(path)
        assert found.problems == []
        assert unverified in found.unverified[0]
        result = run("verify", path)
        assert (result.exit_code, "could be verified" in result.stdout) == (3, True)
        assert "has no shardkit.json" in result.stderr
    flip(plain / "__0_0.distcp", 5000)
    result = run("verify", plain)
    assert (result.exit_code, "data/0 is not what was written" in result.stderr) == (1, True)


def test_what_is_no_path_is_an_error_of_checkpoints(tmp_path: pathlib.Path) -> None:
    nothing: typing.Any = None
    with pytest.raises(CheckpointError, match="None cannot be read: TypeError"):
        consolidate(nothing, tmp_path / "out.pt")


def test_hostile_metadata_is_not_executed(tmp_path: pathlib.Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[typing.Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError, match="mkdir"):
        consolidate(tmp_path / "evil", tmp_path / "out.pt")
    assert not (tmp_path / "executed").exists()


# --- commands -------------------------------------------------------------------------------------


def run(*args: object) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, [str(arg) for arg in args])


def test_commands(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    whole = spawn(save_trained, 2, "mlp", (2,), str(tmp_path))[0]
    source, out = tmp_path / "step-7", tmp_path / "out"
    result = run("consolidate", source, out, "--format", "safetensors", "--max-shard-size", "1KB")
    assert result.exit_code == 0, result.output
    assert "out: " in result.stdout
    assert (out / "model.safetensors.index.json").exists()
    result = run("consolidate", source, tmp_path / "both.pt", "--optimizer")
    assert_same(torch.load(tmp_path / "both.pt"), whole)

    result = run("inspect", source)
    assert "checkpoint directory, step 7, 2 ranks" in result.stdout
    line = next(li for li in result.stdout.splitlines() if li.startswith("model.layers.1.weight "))
    for text in ("[24, 13]", "float32", "1.2 KiB", "__0_0.distcp, __1_0.distcp"):
        assert text in line
    described = json.loads(run("inspect", source, "--json").stdout)
    assert (described["step"], described["world_size"], described["has_checksums"]) == (7, 2, True)
    entry = next(e for e in described["entries"] if e["name"] == "model.layers.1.weight")
    assert entry["shape"] == [24, 13]
    names = [each["name"] for each in described["entries"]]
    assert names == sorted(names)
    numels = [torch.Size(chunk["sizes"]).numel() for chunk in entry["chunks"]]
    assert sum(numels) == 24 * 13
    assert describe(out).kind == "whole tensors"

    result = run("inspect", tmp_path)
    assert (result.exit_code, "the directory of 1, the newest first: step-7." in result.stderr) == (
        *(1, True),
    )

    result = run("verify", source)
    assert (result.exit_code, "nothing is wrong" in result.stdout) == (0, True)
    flip(source / "__0_0.distcp", 3000)
    result = run("verify", source)
    assert (result.exit_code, "__0_0.distcp" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("consolidate", "nowhere", "out.pt"), 1, "there is nothing at nowhere"),
        (("consolidate", "nowhere"), 2, "give CKPT and OUT"),
        (("consolidate", "--ckpt_prefix", "a/b", "out.pt"), 1, "no per-rank files a/b_rank-"),
        (("consolidate", "a", "b", "--dtype", "float33"), 2, "got 'float33'"),
        (("consolidate", "a", "b", "--dtype", "int8"), 1, "must be a floating-point dtype"),
        (("inspect", "nowhere"), 1, "there is nothing at nowhere"),
        (("verify", "nowhere"), 1, "there is nothing at nowhere"),
        (("launch", "nothere.py"), 1, "there is no script 'nothere.py' in"),
        (("launch", "/dev"), 1, "'/dev' is a directory. Give the script that each rank runs."),
        (("inspect", "/dev/null"), 1, "/dev/null is neither a file nor a directory."),
        (("launch", "--module", "not_there.x"), 1, "there is no module 'not_there'"),
        (("launch",), 2, "the following arguments are required: script.py"),
        (("why", "--no-no-stacks"), 2, "No such option"),
    ],
)
def test_errors_of_commands(args: tuple[str, ...], code: int, message: str) -> None:
    result = run(*args)
    assert result.exit_code == code
    assert message in " ".join(re.sub(r"[│╭╰─╮╯]", " ", result.stderr).split())


def test_the_version_is_shown() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (
        *(0, f"shardkit {shardkit.__version__}, torch {torch.__version__}\n"),
    )


@pytest.mark.parametrize(("package", "word"), [("typer", "--help"), ("psutil", "doctor")])
def test_without_its_packages_the_command_says_what_to_install(
    tmp_path: pathlib.Path, package: str, word: str
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no', name='{package}')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment |= {"RANK": "0", "WORLD_SIZE": "1"}  # For the doctor, which starts none then.
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "shardkit", word]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "pip install 'shardkit[cli]'" in result.stderr


# --- memory ---------------------------------------------------------------------------------------

MEASURED = """
import pathlib, sys
from shardkit.checkpoint import consolidate
read = lambda: int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
consolidate(sys.argv[1], sys.argv[2] + "-warm.pt", model_key="warm")
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = read()
consolidate(sys.argv[1], sys.argv[2], format=sys.argv[3])
print((read() - before) / 1024)
"""
SLACK_MIB = 8  # The allocator's, and buffers of files.


def save_big(folder: str) -> None:
    """Write 200 MiB, of which the largest tensor has 20, cut by two ranks anywhere."""
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(45)]
    model = nn.Sequential(*layers, nn.Linear(1024, 5 * 1024, bias=False))
    for layer in model:
        fully_shard(layer, make_mesh((2,)))
    model = fully_shard(model, make_mesh((2,)))
    state = {"model": model.state_dict(), "warm": {"up": torch.ones(3)}}
    dcp.save(state, checkpoint_id=pathlib.Path(folder) / "big")


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_consolidation_takes_the_memory_of_a_tensor(
    spawn: Spawn,
    tmp_path: pathlib.Path,
    format: str,  # noqa: A002
) -> None:
    """By the kernel's high-water mark of the resident size."""
    spawn(save_big, 2, str(tmp_path))
    out = tmp_path / ("out.pt" if format == "torch" else "out.safetensors")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "big"), str(out), format]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert out.stat().st_size > 200 * 2**20
    assert float(result.stdout) <= 20 + SLACK_MIB
