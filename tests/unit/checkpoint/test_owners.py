"""Who is at work on a directory that a save has put aside."""

from __future__ import annotations

import typing

from shardkit import _processes
from shardkit.checkpoint._files import disk

if typing.TYPE_CHECKING:
    import pathlib

    import pytest


def test_where_the_boot_is_not_known_nobody_is_judged_by_a_process_id(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers may have one host name, and process ids of their own."""
    monkeypatch.setattr(_processes, "_PROCESSES", tmp_path / "missing")
    aside = disk.new_aside(tmp_path / "checkpoint", ".incomplete")
    found = disk.parse_aside(aside)
    assert found is not None
    assert found.owner is not None
    assert not found.owner.place.strip("0")
    assert found.owner.is_alive is None


def test_a_process_that_has_ended_is_not_alive(tmp_path: pathlib.Path) -> None:
    found = disk.parse_aside(disk.new_aside(tmp_path / "checkpoint", ".incomplete"))
    assert found is not None
    assert found.owner is not None
    assert found.owner.is_alive
    later = disk.Owner(found.owner.host, found.owner.pid, found.owner.place, "1")
    assert later.is_alive is False
