"""The versions that integrations name are those that are tested, and docs name them."""

from __future__ import annotations

import ast
import importlib.metadata
import pathlib
import tomllib

import pytest

import shardkit
from shardkit.integrations import _versions

ROOT = pathlib.Path(__file__).parents[2]


def test_each_of_them_is_tested() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (found,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FRAMEWORKS"
    )
    assert found == _versions.TRIED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(
        each.split("==") for each in project["optional-dependencies"]["frameworks"] if "==" in each
    )
    assert {name: pinned[name].rpartition(".")[0] for name in found} == {
        name: versions[-1] for name, versions in found.items()
    }


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_pages_name_them(name: str) -> None:
    page = (ROOT / "docs" / "howto" / f"{name}.md").read_text()
    versions = _versions.TRIED[name]
    assert f"{versions[0]} to {versions[-1]}" in page


def test_older_ones_are_refused_and_newer_ones_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {}
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    monkeypatch.setattr(_versions, "_warned", set())
    for version in ("1.12.0", "1.13.0rc1", "1.15.9"):
        installed["accelerate"] = version
        _versions.check_version("accelerate")
    installed["accelerate"] = "1.11.0"
    with pytest.raises(shardkit.IntegrationError, match=r"tried with 1\.12 to 1\.15: older ones"):
        _versions.check_version("accelerate")
    for version in ("1.16.0", "2.0"):
        installed["accelerate"] = version
        _versions._warned.clear()  # noqa: SLF001 - a new process
        with pytest.warns(UserWarning, match="newer than what shardkit was tried with"):
            _versions.check_version("accelerate")
        _versions.check_version("accelerate")
