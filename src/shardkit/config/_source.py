"""Sources of config fields, with their places: a file with lines, or a dict."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

_OF_DICT = "config"
_MAX_NBYTES = 2**18
_MAX_VALUES = 10_000  # Repetitions by aliases count.
_MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The place of a field."""

    source: str  # Path of the file, or a word for a dict.
    line: int | None = None  # Line number, from 1 on; None: there are no lines.

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Setting:
    """A field as it was written: a scalar, a list, or a `Section`."""

    value: Any
    place: SourceLine


@dataclass(frozen=True, slots=True)
class Section:
    """Fields by their names, as they were written; the outermost section has an empty name."""

    name: str
    entries: dict[str, Setting]
    place: SourceLine


def plain(value: Any) -> Any:
    """Return a value without places: a section as a dict."""
    if not isinstance(value, Section):
        return value
    return {key: plain(entry.value) for key, entry in value.entries.items()}


def import_yaml() -> ModuleType:
    """Return the module of PyYAML."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        msg = (
            "config files need the package 'pyyaml', which is not installed: "
            "pip install 'shardkit[config]'"
        )
        raise ConfigError(msg) from error
    module: ModuleType = yaml
    return module


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Section:
    """Read a file of YAML or JSON, or use a dict."""
    if isinstance(source, (str, os.PathLike)):
        return _read_file(Path(source))
    if not isinstance(source, Mapping):
        kind = type(source).__name__
        msg = (
            f"a config must be the path of a file, or a dict of its fields, got one of type {kind}."
        )
        raise ConfigError(msg)
    return _of_mapping([""], source, SourceLine(_OF_DICT))


def _of_mapping(path: Sequence[str], values: Mapping[str, Any], place: SourceLine) -> Section:
    """Convert a dict; `path` has the names of the sections around it, the outermost first."""
    if len(path) > _MAX_DEPTH:
        raise ConfigError(_too_deep(place, path[1]))
    entries = {}
    for key, value in values.items():
        is_section = hasattr(value, "items")
        entries[str(key)] = Setting(
            _of_mapping([*path, str(key)], value, place) if is_section else value, place
        )
    return Section(path[-1], entries, place)


def _read_file(path: Path) -> Section:
    yaml = import_yaml()
    try:
        text = _text_of(path)
    except (OSError, ValueError) as error:
        msg = (
            f"the config file {path} cannot be read: {error}. Write one by python -m shardkit "
            f"config, or by accelerate config."
        )
        raise ConfigError(msg) from error
    try:
        if text.lstrip().startswith("{"):
            # JSON is YAML, except that YAML refuses tabs between tokens.
            text = text.replace("\t", "    ")
        _check_depth(yaml, text, path)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            msg = f"{path}:1: this is not a config file: it has no fields (name: value)."
            raise ConfigError(msg)
        _check_size(node, path)
        return _of_node(yaml, "", node, str(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = SourceLine(str(path), None if mark is None else mark.line + 1)
        msg = f"{place}: this is not YAML: {error.problem or error.context}."
        raise ConfigError(msg) from error
    except yaml.YAMLError as error:  # Characters that no text may have.
        msg = f"{path}: this is not YAML: {error}"
        raise ConfigError(msg) from error


def _text_of(path: Path) -> str:
    """Return the content of a file; raise unless it is a regular file of a config's size."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            msg = "it is no regular file"  # A FIFO might never deliver anything.
            raise ValueError(msg)
        content = file.read(_MAX_NBYTES + 1)
    if len(content) > _MAX_NBYTES:
        msg = f"it has more than {_MAX_NBYTES} bytes"
        raise ValueError(msg)
    return content.decode("utf-8").replace("\r\n", "\n")


def _check_depth(yaml: Any, text: str, path: Path) -> None:
    """Refuse deeper nesting than in any config, before any function recurses into it."""
    depth, field, is_key = 0, "the whole", True
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if depth == 1 and isinstance(event, yaml.NodeEvent):  # The outermost fields' names, values.
            field = getattr(event, "value", field) if is_key else field
            is_key = not is_key
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            place = SourceLine(str(path), event.start_mark.line + 1)
            raise ConfigError(_too_deep(place, field))


def _too_deep(place: SourceLine, field: str) -> str:
    return f"{place}: {field} is nested too deep: no field has more than {_MAX_DEPTH} levels."


def _check_size(node: Any, path: Path) -> None:
    """Refuse aliases that expand to more values than any config has."""
    left = _MAX_VALUES
    for key, value in node.value:
        waiting = [key, value]
        while waiting:
            left -= 1
            if left < 0:
                place = SourceLine(str(path), key.start_mark.line + 1)
                msg = (
                    f"{place}: with its aliases {key.value} has more values than the "
                    f"{_MAX_VALUES} that a config may have."
                )
                raise ConfigError(msg)
            for each in waiting.pop().value:
                waiting += each if isinstance(each, tuple) else ()
                if not isinstance(each, (tuple, str)):
                    waiting.append(each)


def _of_node(yaml: Any, name: str, node: Any, source: str) -> Section:
    entries: dict[str, Setting] = {}
    for key_node, value in node.value:
        place = SourceLine(source, key_node.start_mark.line + 1)
        if key_node.value == "<<":
            msg = f"{place}: << (a merge key of YAML) is not supported. Write its fields here."
            raise ConfigError(msg)
        key = str(_value_of(yaml, key_node))
        if key in entries:
            msg = f"{place}: {key} stands here and at {entries[key].place}. Keep one of them."
            raise ConfigError(msg)
        is_section = isinstance(value, yaml.MappingNode)
        content = _of_node(yaml, key, value, source) if is_section else _value_of(yaml, value)
        entries[key] = Setting(content, place)
    return Section(name, entries, SourceLine(source, node.start_mark.line + 1))


def _value_of(yaml: Any, node: Any) -> Any:
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node, deep=True)
    except ValueError:  # It looks like a date but is none.
        return node.value
    finally:
        constructor.dispose()
