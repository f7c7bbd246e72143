"""Files that torch_xla's own FSDP wrote become whole tensors."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import typing

import pytest
import torch
from processes import run_python

from shardkit.checkpoint import consolidate

if typing.TYPE_CHECKING:
    from collections.abc import Callable

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What two ranks saved in each way."""
    path = tmp_path_factory.mktemp("xla_fsdp")
    done = run_python(
        [str(HERE / "xla_fsdp_writer.py"), str(path)],
        {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stderr
    return path


def by_function(prefix: pathlib.Path, out: pathlib.Path) -> None:
    consolidate(prefix, out)


def by_command(prefix: pathlib.Path, out: pathlib.Path) -> None:
    command = [sys.executable, "-m", "shardkit", "consolidate", "--ckpt_prefix", str(prefix)]
    options = ["--ckpt_suffix", "_rank-*.pth", str(out)]
    subprocess.run([*command, *options], check=True, capture_output=True)


@pytest.mark.parametrize("call", [by_function, by_command])
@pytest.mark.parametrize("way", ["flat", "each", "rows"])
def test_they_are_what_torch_xla_makes_of_them(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    way: str,
    call: Callable[[pathlib.Path, pathlib.Path], None],
) -> None:
    call(folder / way, tmp_path / "ours")
    ours = torch.load(tmp_path / "ours")
    theirs = torch.load(folder / f"{way}.theirs")["model"]
    plain = torch.load(folder / "plain")
    assert ours.keys() == theirs.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(ours[name], theirs[name]), name
        assert torch.equal(ours[name], value), name
