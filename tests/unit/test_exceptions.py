"""The tree of exceptions, and what can be caught by built-in names."""

from __future__ import annotations

import inspect
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


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("MeshError", ValueError),
        ("LayoutError", ValueError),
        ("WrapError", ValueError),
        ("ShardedTensorError", RuntimeError),
        ("FreedParameterError", RuntimeError),
        ("RankMismatchError", RuntimeError),
        ("StateError", RuntimeError),
    ],
)
def test_each_is_also_what_torch_would_raise(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(_errors, name), builtin)
    assert getattr(_errors, name).__bases__ == (ShardkitError, builtin)


def test_there_are_no_others() -> None:
    assert len(CLASSES) == 9


def test_no_class_catches_another() -> None:
    """Siblings: whoever catches one does not catch the others."""
    leaves = [error for error in CLASSES if error is not ShardkitError]
    for one in leaves:
        assert [other for other in leaves if issubclass(other, one)] == [one]
