"""``python -m shardkit plan``: what it reads, and what it prints."""

from __future__ import annotations

import json
import typing

import pytest
import torch
from typer.testing import CliRunner

from shardkit import ConfigError
from shardkit._cli import app
from shardkit.planning import _calibrate
from shardkit.planning._command import read_batch, read_shape
from shardkit.planning._profile import read_profile

if typing.TYPE_CHECKING:
    import pathlib


def test_shapes_are_read() -> None:
    assert read_shape("512x8", "--mesh") == (512, 8)
    with pytest.raises(ConfigError, match="--mesh must be positive numbers"):
        read_shape("512x0", "--mesh")


def test_batches_are_read() -> None:
    (tokens, mask) = read_batch(["2x16", "2x16x16:bool"])
    assert (tokens.shape, tokens.dtype) == ((2, 16), torch.int64)
    assert (mask.dtype, mask.device.type) == (torch.bool, "meta")
    named = read_batch(["input_ids=1x4", "labels=1x4"])
    assert list(named) == ["input_ids", "labels"]
    for texts in (["1x4", "labels=1x4"], ["labels=1x4", "labels=1x8"]):
        with pytest.raises(ConfigError, match="for each input or for none"):
            read_batch(texts)
    with pytest.raises(ConfigError, match="a dtype must be one of"):
        read_batch(["1x4:float99"])


_MODULE = """
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

def with_batch():
    return model(), torch.empty(8, 64)

made = nn.Linear(2, 2)

def without_its_file():
    return torch.load("no-such-weights.pt")

def of_size(size):
    return nn.Linear(size, size)

def returns_none():
    pass

def three():
    return model(), torch.empty(8, 64), torch.empty(8)

def fused(params):
    return torch.optim.AdamW(params, fused=True)

def forgets(params):
    torch.optim.AdamW(params)
"""


def _run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> typing.Any:
    (tmp_path / "planned_module.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return CliRunner().invoke(app, ["plan", *args])


def test_the_command_prints_a_plan(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _run(
        tmp_path, monkeypatch, "planned_module:model", "--mesh", "2x4", "--batch",
        "8x64:float32", "--wrap", "Linear", "--budget", "1KiB",
    )  # fmt: skip
    assert result.exit_code == 3, result.output
    assert "16,640 parameters (float32) on a mesh of 2x4" in result.output
    for part in ("peak", "instants", "does NOT fit"):
        assert part in result.output


def test_the_optimizer_may_be_a_function(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(optimizer: str) -> typing.Any:
        args = ("--mesh", "1", "--device", "cuda", "--optimizer", optimizer)
        return _run(tmp_path, monkeypatch, "planned_module:with_batch", *args)

    fused, by_lists = planned("planned_module:fused"), planned("adamw")
    assert (fused.exit_code, by_lists.exit_code) == (0, 0)
    assert fused.stdout != by_lists.stdout
    for name, message in (
        ("planned_module:fusd", "of parameters that returns an optimizer, got 'planned_module:fu"),
        ("planned_module:forgets", "it returned an object of type NoneType"),
        ("lion", "optimizer must be one of adamw, adam, sgd, none, or a function, got 'lion'"),
    ):
        refused = planned(name)
        assert refused.exit_code == 1
        assert message in refused.stderr


def test_for_programs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    result = _run(
        tmp_path, monkeypatch, "planned_module:with_batch", "--mesh", "4", "--json",
        "--config", str(config), "--budget", "1GiB",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["fits"]
    assert found["peak"]["nbytes"] + found["margin_nbytes"] == 2**30


_SIZES = """parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 3
"""
_COPIES = "fsdp_config: {fsdp_version: 1, fsdp_sharding_strategy: HYBRID_SHARD}\n"
_SHARDED = "fsdp_config: {fsdp_version: 2}\n"


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        (f"num_processes: 4\n{_SHARDED}", [4]),
        (f"num_processes: 8\nnum_machines: 2\n{_COPIES}", [2, 4]),
        (_SIZES + _SHARDED, [2, 3]),
    ],
)
def test_a_config_says_the_mesh_and_the_device(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fields: str, mesh: list[int]
) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text(f"distributed_type: FSDP\nuse_cpu: true\n{fields}")
    given = ["planned_module:with_batch", "--json", "--config", str(config)]
    result = _run(tmp_path, monkeypatch, *given)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["mesh"], found["device"]) == (mesh, "cpu")
    result = _run(tmp_path, monkeypatch, *given, "--mesh", "2x2", "--device", "cuda")
    if len(mesh) == 2:  # The command line comes first.
        found = json.loads(result.output)
        assert (found["mesh"], found["device"]) == ([2, 2], "cuda")
    else:
        assert result.exit_code == 1


def test_a_config_without_ranks_needs_a_mesh(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    for args in ([], ["--config", str(config)]):
        result = _run(tmp_path, monkeypatch, "planned_module:with_batch", *args)
        assert result.exit_code == 1
        assert "--mesh must be given, such as 512x8, or a --config" in result.stderr


def test_options_that_a_config_replaces_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    given = ["planned_module:with_batch", "--mesh", "2", "--config", str(config)]
    result = _run(tmp_path, monkeypatch, *given, "--dtype", "bfloat16", "--choose")
    assert result.exit_code == 1
    assert "--config takes the place of --dtype, --choose. Give one or the other" in result.stderr


def test_a_profile_is_written_where_it_can_be_read() -> None:
    result = CliRunner().invoke(app, ["plan", "--calibrate", "here"])
    assert result.exit_code == 1
    assert "must be the path of a .toml file" in result.stderr


def test_what_was_measured_is_written_into_a_new_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, file = read_profile("cpu"), tmp_path / "new" / "here.toml"
    devices: list[str] = []
    monkeypatch.setattr(_calibrate, "calibrate", lambda device: devices.append(device) or profile)
    assert CliRunner().invoke(app, ["plan", "--calibrate", str(file)]).exit_code == 0
    assert read_profile(str(file)).name == profile.name
    has_card = torch.accelerator.is_available()
    assert devices == [torch.accelerator.current_accelerator().type if has_card else "cpu"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("planned_module:nothing", "must be module:function"),
        ("planned_module:modle", "The nearest ones are 'model'"),
        ("planned_module:made", "must name a function that returns a model"),
        ("no_such_module:model", "must be module:function"),
        ("planned_module", "is no file and names no function"),
        ("planned_module:model", "--batch must be given"),
        ("planned_module:without_its_file", "failed at line 14 of"),
        ("planned_module:of_size", "needs no arguments; 'planned_module:of_size': missing a req"),
        ("planned_module:returns_none", "returned an object of type NoneType"),
        ("planned_module:three", "returned an object of type tuple"),
    ],
)
def test_what_cannot_be_planned_exits_with_1(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    result = _run(tmp_path, monkeypatch, model, "--mesh", "4")
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_script_is_no_model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(tmp_path / "planned_module.py")
    result = _run(tmp_path, monkeypatch, script, "--mesh", "4")
    assert result.exit_code == 1
    assert "which is a script. Name its function: planned_module:make_model" in result.stderr
