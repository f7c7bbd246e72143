"""Where an error of shardkit ends a script: the user's own lines, then what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import typing

import pytest
from torch import nn

import shardkit
from shardkit._errors import shorten

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


def build() -> None:
    shardkit.auto_shard(nn.Sequential(nn.Linear(2, 2)), mesh=2, policy="Nothing", apply=False)


def unknown_device() -> None:
    shardkit.init_device_mesh("gpu", (1,))


def caused_by_torch() -> None:
    try:
        nn.Linear(2, 2)(None)
    except TypeError as error:
        msg = "what torch said"
        raise shardkit.MeshError(msg) from error


def own_cause() -> None:
    try:
        build()
    except shardkit.WrapError as error:
        msg = "a user's own"
        raise shardkit.StateError(msg) from error


def lines_of(call: Callable[[], None]) -> list[str]:
    try:
        call()
    except shardkit.ShardkitError as error:
        shorten(error)
        return "".join(traceback.format_exception(error)).splitlines()
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("call", [build, unknown_device])
def test_frames_of_shardkit_and_torch_are_left_out(call: Callable[[], None]) -> None:
    lines = lines_of(call)
    assert [line for line in lines if line.startswith("  File") and __file__ not in line] == []
    assert sum(call.__name__ in line for line in lines) == 1
    assert lines[-1].startswith("shardkit._errors.")


def test_causes_are_kept_where_users_have_lines_in_them() -> None:
    assert lines_of(own_cause)[-1].endswith("a user's own")
    assert sum("direct cause" in line for line in lines_of(own_cause)) == 1
    assert sum("direct cause" in line for line in lines_of(caused_by_torch)) == 1


def test_the_switch_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_TRACEBACK", "full")
    assert any("auto_shard.py" in line for line in lines_of(build))


def test_errors_of_others_stay_as_they_are() -> None:
    with pytest.raises(TypeError) as found:
        nn.Linear(2, 2)(None)
    assert shorten(found.value) == 0
    assert any("linear.py" in str(entry.path) for entry in found.traceback)


SCRIPT = """
import {before}
import torch.distributed as dist
import shardkit
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
shardkit.init_device_mesh("gpu", (1,))
"""


@pytest.mark.helpers
@pytest.mark.parametrize("before", ["sys", "own_hook"])
def test_a_script_ends_with_its_own_line_and_the_error(tmp_path: pathlib.Path, before: str) -> None:
    hook = "import sys; sys.excepthook = lambda *of: print(len(of), 'seen', file=sys.stderr)"
    (tmp_path / "own_hook.py").write_text(hook)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(before=before))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    if before == "own_hook":  # Who shows errors himself gets all of them.
        assert "3 seen" in found.stderr
        return
    assert found.stderr.count("File ") == 1
    assert "3 frames of shardkit and torch are left out" in found.stderr
    assert "MeshError: unknown device type 'gpu'. Write " in found.stderr.splitlines()[-1]
