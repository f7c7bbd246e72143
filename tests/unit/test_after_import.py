"""A function that is called when somebody imports a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import typing

import pytest

from shardkit._compat.torch_checkpoints import AfterImport

if typing.TYPE_CHECKING:
    import types
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[types.ModuleType]]:
    """Wait for a module that is there; what the function was called with."""
    (tmp_path / "late_module.py").write_text("value = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    found: list[types.ModuleType] = []
    finder = AfterImport("late_module", found.append)
    sys.meta_path.insert(0, finder)
    yield found
    sys.modules.pop("late_module", None)
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


def test_it_is_called_once_after_the_module_ran(calls: list[types.ModuleType]) -> None:
    assert calls == []
    module = importlib.import_module("late_module")
    importlib.import_module("late_module")
    assert calls == [module]
    assert module.value == 3


def test_to_ask_for_a_module_is_not_to_import_it(calls: list[types.ModuleType]) -> None:
    """Packages ask so which others are installed, long before they import them."""
    assert importlib.util.find_spec("late_module") is not None
    assert calls == []
    module = importlib.import_module("late_module")
    assert calls == [module]


def test_other_imports_do_not_call_it(calls: list[types.ModuleType]) -> None:
    importlib.import_module("json")
    assert calls == []


def test_a_module_that_is_not_there_is_an_import_error() -> None:
    finder = AfterImport("no_such_module", lambda _: None)
    sys.meta_path.insert(0, finder)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
    assert finder not in sys.meta_path
