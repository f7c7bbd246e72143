"""FSDP2's names, taken over and given back."""

from __future__ import annotations

import importlib
import inspect
import logging
import pathlib
import subprocess
import sys
import types
import typing

import pytest
import torch.distributed.fsdp as torch_fsdp

import shardkit
from shardkit import _install
from shardkit._install import Installed

pytestmark = pytest.mark.helpers

NAMES = [
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
]


@pytest.mark.parametrize("name", NAMES)
def test_torch_gives_ours_until_the_end(name: str) -> None:
    before = getattr(torch_fsdp, name)
    with shardkit.install():
        assert getattr(torch_fsdp, name) is getattr(shardkit, name)
    assert getattr(torch_fsdp, name) is before is not getattr(shardkit, name)


def test_what_torch_imported_itself_is_replaced() -> None:
    from torch.distributed._composable import fsdp as composable

    before = composable.fully_shard
    installed = shardkit.install()
    assert composable.fully_shard is shardkit.fully_shard
    installed.undo()
    assert composable.fully_shard is before


def test_where_fsdp2_is_made_nothing_changes() -> None:
    original = torch_fsdp.fully_shard
    own_names = inspect.unwrap(original).__globals__
    with shardkit.install():
        assert own_names["fully_shard"] is original


def test_torchs_pipelines_keep_fsdp2() -> None:
    """They use more of FSDP2 than its public methods."""
    code = """
import shardkit
shardkit.install()
from torch.distributed.pipelining import schedules, stage
print(stage.FSDPModule.__module__, schedules.FSDPModule is shardkit.FSDPModule)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    module, is_ours = result.stdout.split()
    assert module.startswith("torch.")
    assert is_ours == "False"


def test_a_second_call_changes_nothing() -> None:
    before = torch_fsdp.fully_shard
    first = shardkit.install()
    with shardkit.install():
        pass
    assert torch_fsdp.fully_shard is shardkit.fully_shard
    first.undo()
    first.undo()
    assert torch_fsdp.fully_shard is before
    with shardkit.install():
        assert torch_fsdp.fully_shard is shardkit.fully_shard


def test_a_call_that_raises_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that refuses its new name is one that nobody expects; the next call does it all."""

    class Guarded(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "fully_shard":
                raise RuntimeError(name)
            super().__setattr__(name, value)

    module = Guarded("guarded")
    vars(module)["fully_shard"] = before = torch_fsdp.fully_shard
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "guarded", module)
        with pytest.raises(RuntimeError, match="fully_shard"):
            shardkit.install()
    assert torch_fsdp.fully_shard is before
    with shardkit.install():
        assert torch_fsdp.fully_shard is shardkit.fully_shard
    assert torch_fsdp.fully_shard is before


def test_rank_0_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, "shardkit"):
        with shardkit.install():
            shardkit.install()
        said = caplog.messages
        text = "shardkit is in the place of FSDP2: torch.distributed.fsdp gives"
        assert [each.startswith(text) for each in said].count(True) == 1
        monkeypatch.setenv("RANK", "1")
        with shardkit.install():
            assert caplog.messages == said


def test_modules_that_were_faster_get_them_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = types.ModuleType("their_script")
    original = script.shard = torch_fsdp.fully_shard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_script", script)
    with caplog.at_level(logging.WARNING, "shardkit"), shardkit.install():
        assert script.shard is shardkit.fully_shard  # type: ignore[attr-defined]
    assert script.shard is original  # type: ignore[attr-defined]
    [_, before] = caplog.messages
    assert before.startswith("imported before, and shardkit's now: ")
    assert "their_script.shard" in before  # Other tests' modules may have imported some, too.


PLACES = [
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
]


def test_every_place_that_scripts_import_from() -> None:
    """Each in a process of its own, which imports it for the first time."""
    code = f"""
import os
import shardkit
for place in {PLACES}:
    if os.fork() == 0:
        with shardkit.install():
            found = __import__(place, fromlist=["*"])
            for name in ("FSDPModule", "fully_shard", "register_fsdp_forward_method"):
                assert getattr(found, name) is getattr(shardkit, name), (place, name)
        assert found.fully_shard is not shardkit.fully_shard, place
        break
else:
    assert [os.wait()[1] for _ in {PLACES}] == [0] * {len(PLACES)}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_script_that_goes_on_in_main() -> None:
    """Names that the script itself has imported are replaced, and given back."""
    code = """
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard as shard
import shardkit
before = shard
with shardkit.install():
    assert (FSDPModule, shard) == (shardkit.FSDPModule, shardkit.fully_shard)
    assert MixedPrecisionPolicy is shardkit.MixedPrecisionPolicy
assert shard is before
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def replaced_names(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the owner and the name of what `install` replaces in torch."""
    found = []
    replace = Installed.replace

    def note(self: Installed, owner: object, name: str, value: object) -> None:
        found.append((getattr(owner, "__name__", repr(owner)), name))
        replace(self, owner, name, value)

    monkeypatch.setattr(Installed, "replace", note)
    importlib.import_module("torch.distributed.checkpoint")
    with shardkit.install():
        pass
    return [(owner, name) for owner, name in found if owner.startswith("torch.")]


def test_every_name_that_is_replaced_stands_in_the_documentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = pathlib.Path(__file__).parents[2] / "docs/howto/torchtitan.md"
    lines = [line for line in page.read_text().splitlines() if line.startswith("- in ")]
    found = replaced_names(monkeypatch)
    assert ("torch.utils", "swap_tensors") in found
    for owner, name in found:
        assert any(
            f"`{owner}.{name}`" in line or (f"`{owner}`" in line and f"`{name}`" in line)
            for line in lines
        ), f"{owner}.{name}"


# --- packages that are imported before or after ---------------------------------------------------

INTEGRATION = """
import their_framework
from shardkit import IntegrationError
from shardkit._install import Installed, catch_up

def use():
    if their_framework.VERSION < 2:
        raise IntegrationError("their_framework 1 is too old. Install 2.")
    used = Installed()
    if their_framework.VERSION > 2:  # It is in use already.
        return used
    used.replace(their_framework, "shard", lambda: "by shardkit")
    return used

catch_up("their_framework")
"""


@pytest.fixture
def their_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where a package and what integrates it lie; neither is imported yet."""
    (tmp_path / "their_framework.py").write_text("VERSION = 2\nshard = lambda: 'by FSDP2'\n")
    (tmp_path / "their_integration.py").write_text(INTEGRATION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_install, "_COMPANIONS", {"their_framework": "their_integration"})
    for name in ("their_framework", "their_integration"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("before", ["", "their_framework", "their_integration"])
@pytest.mark.parametrize("after", ["their_framework", "their_integration"])
@pytest.mark.usefixtures("their_folder")
def test_packages_come_along(before: str, after: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the integration is imported, which imports the package."""
    if before:
        importlib.import_module(before)
    with caplog.at_level(logging.WARNING, "shardkit"), shardkit.install():
        importlib.import_module(after)
        their: typing.Any = importlib.import_module("their_framework")
        assert their.shard() == "by shardkit"
        with shardkit.install():
            pass
        assert their.shard() == "by shardkit"
    assert their.shard() == "by FSDP2"
    text = "shardkit is in the place of FSDP2 in their_framework, too."
    assert caplog.messages.count(text) == 1


@pytest.mark.usefixtures("their_folder")
def test_a_package_that_is_imported_after_the_end_stays() -> None:
    finders = list(sys.meta_path)
    with shardkit.install():
        assert sys.meta_path != finders
    assert sys.meta_path == finders
    assert importlib.import_module("their_framework").shard() == "by FSDP2"
    assert "their_integration" not in sys.modules


def test_of_a_package_that_is_too_old_a_warning_tells(their_folder: pathlib.Path) -> None:
    (their_folder / "their_framework.py").write_text("VERSION = 1\nshard = lambda: 'by FSDP2'\n")
    match = r"install\(\) does not reach into their_framework: .* is too old\. Install 2\."
    with shardkit.install():
        with pytest.warns(UserWarning, match=match):
            their: typing.Any = importlib.import_module("their_framework")
        assert their.shard() == "by FSDP2"


def test_what_somebody_uses_already_is_not_told_again(
    their_folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (their_folder / "their_framework.py").write_text("VERSION = 3\n")
    with caplog.at_level(logging.WARNING, "shardkit"), shardkit.install() as installed:
        importlib.import_module("their_framework")
        assert not installed.brought_along
    assert "in their_framework, too" not in caplog.text
