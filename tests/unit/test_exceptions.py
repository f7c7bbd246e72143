"""The tree of exceptions, and what can be caught by built-in names."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re

import pytest

import shardkit
from shardkit import ShardkitError, _errors

CLASSES = [
    item
    for _, item in inspect.getmembers(_errors, inspect.isclass)
    if item.__module__ == _errors.__name__
]
CLASS = pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
BUILTINS = {
    "MeshError": ValueError,
    "LayoutError": ValueError,
    "WrapError": ValueError,
    "ShardedTensorError": RuntimeError,
    "FreedParameterError": RuntimeError,
    "RankMismatchError": RuntimeError,
    "NonFiniteGradientError": FloatingPointError,
    "OptimizerError": ValueError,
    "StateError": RuntimeError,
    "ConfigError": ValueError,
    "LaunchError": RuntimeError,
    "IntegrationError": RuntimeError,
    "CheckpointError": RuntimeError,
}


@CLASS
def test_all_derive_from_one_class(error: type[Exception]) -> None:
    assert issubclass(error, ShardkitError)
    assert issubclass(error, Exception)


@CLASS
def test_all_are_public_documented_and_in_the_tree(error: type[Exception]) -> None:
    assert getattr(shardkit, error.__name__) is error
    assert error.__name__ in shardkit.__all__
    assert error.__doc__
    drawn = re.findall(r"^ +(?:[├└]── )?(\w+Error)\b", _errors.__doc__ or "", re.MULTILINE)
    assert drawn.count(error.__name__) == 1


def test_each_is_also_what_torch_would_raise() -> None:
    """All of them and no others, by the names under which users catch them."""
    bases = {error.__name__: error.__bases__ for error in CLASSES if error is not ShardkitError}
    assert bases == {name: (ShardkitError, builtin) for name, builtin in BUILTINS.items()}


def test_all_public_exceptions_are_in_the_tree() -> None:
    public = [getattr(shardkit, name) for name in shardkit.__all__]
    errors = {item for item in public if inspect.isclass(item) and issubclass(item, BaseException)}
    assert errors == set(CLASSES)


def classes_of_exceptions(source: str) -> set[str]:
    """Return the names of classes that source defines and that look like exceptions."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(re.search(r"(Error|Exception)$", ast.unparse(base)) for base in node.bases)
    }


def test_no_other_module_defines_exceptions_that_users_see() -> None:
    folder = pathlib.Path(shardkit.__file__).parent
    own = pathlib.Path(_errors.__file__)
    found = set[str]()
    for path in folder.rglob("*.py"):
        if path != own:
            found |= classes_of_exceptions(path.read_text(encoding="utf-8"))
    # What a metadata file that names other classes leads to; it becomes a CheckpointError. A value
    # that a field of a config does not take; it becomes a ConfigError. What ends a rank's checkup.
    # A checkpoint that another job replaced while it was read: it is read again. And what another
    # thread raises in the main one, which is that of users.
    internal = {
        "ForeignPickleError",
        "NotOfKindError",
        "NoStoreError",
        "_RefusedError",
        "_ReplacedError",
    }
    assert found == {*internal, "_RankMismatchError"}
    assert classes_of_exceptions(own.read_text(encoding="utf-8")) == {*BUILTINS, "ShardkitError"}


def test_no_class_catches_another() -> None:
    """Siblings: whoever catches one does not catch the others."""
    leaves = [error for error in CLASSES if error is not ShardkitError]
    for one in leaves:
        assert [other for other in leaves if issubclass(other, one)] == [one]
