"""Where fields of a config stand: a file with lines, or a dict."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

_OF_DICT = "config"
_MAX_NBYTES = 2**18
_MAX_VALUES = 10_000  # With what aliases repeat.


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands.

    Attributes:
        source: The file, or a word for a dict.
        line: From 1; None: there are no lines.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A field as it was written.

    Attributes:
        value: A scalar, a list, or a `Section`.
        place: Where.
    """

    value: Any
    place: Place


@dataclass(frozen=True, slots=True)
class Section:
    """Fields by their names, as they were written.

    Attributes:
        name: Empty for the whole.
        entries: In the order of the file.
        place: Where it begins.
    """

    name: str
    entries: dict[str, Entry]
    place: Place

    def plain(self) -> dict[str, Any]:
        """Return it as a dict without places."""
        return {
            key: entry.value.plain() if isinstance(entry.value, Section) else entry.value
            for key, entry in self.entries.items()
        }


def import_yaml() -> ModuleType:
    """Return PyYAML.

    Raises:
        ConfigError: It is not installed.
    """
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
    """Read a file of YAML or JSON, or take a dict.

    Raises:
        ConfigError: There is no such file, or it does not hold fields; with its line.
    """
    is_file = isinstance(source, (str, os.PathLike))
    try:
        return _read_file(Path(source)) if is_file else _of_mapping("", source, Place(_OF_DICT))  # type: ignore[arg-type]
    except RecursionError:
        msg = f"{source if is_file else _OF_DICT}: values are nested too deep for a config."
        raise ConfigError(msg) from None


def _of_mapping(name: str, values: Mapping[str, Any], place: Place) -> Section:
    entries = {}
    for key, value in values.items():
        is_section = hasattr(value, "items")
        entries[str(key)] = Entry(
            _of_mapping(str(key), value, place) if is_section else value, place
        )
    return Section(name, entries, place)


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
            # JSON is YAML, but for tabs between its tokens, which YAML refuses.
            text = text.replace("\t", "    ")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            msg = f"{path}:1: this is not a config file: it has no fields (name: value)."
            raise ConfigError(msg)
        _check_size(node, path)
        return _of_node(yaml, "", node, str(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = Place(str(path), None if mark is None else mark.line + 1)
        msg = f"{place}: this is not YAML: {error.problem or error.context}."
        raise ConfigError(msg) from error
    except yaml.YAMLError as error:  # Characters that no text has.
        msg = f"{path}: this is not YAML: {error}"
        raise ConfigError(msg) from error


def _text_of(path: Path) -> str:
    """Return what a file holds; raise if it is none of a size that a config may have."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            msg = "it is no regular file"  # From a FIFO nothing may ever come.
            raise ValueError(msg)
        content = file.read(_MAX_NBYTES + 1)
    if len(content) > _MAX_NBYTES:
        msg = f"it has more than {_MAX_NBYTES} bytes"
        raise ValueError(msg)
    return content.decode("utf-8").replace("\r\n", "\n")


def _check_size(node: Any, path: Path) -> None:
    """Refuse aliases that stand for more than anybody writes."""
    left, waiting = _MAX_VALUES, [node]
    while waiting:
        left -= 1
        if left < 0:
            msg = f"{path}: with its aliases it has more than {_MAX_VALUES} values."
            raise ConfigError(msg)
        for value in waiting.pop().value:
            waiting += value if isinstance(value, tuple) else ()
            if not isinstance(value, (tuple, str)):
                waiting.append(value)


def _of_node(yaml: Any, name: str, node: Any, source: str) -> Section:
    entries: dict[str, Entry] = {}
    for key, value, place in _pairs(yaml, node, source):
        if key in entries:
            msg = f"{place}: {key} stands here and at {entries[key].place}. Keep one of them."
            raise ConfigError(msg)
        if isinstance(value, yaml.MappingNode):
            entries[key] = Entry(_of_node(yaml, key, value, source), place)
        else:
            entries[key] = Entry(_value_of(yaml, value), place)
    return Section(name, entries, Place(source, node.start_mark.line + 1))


def _pairs(yaml: Any, node: Any, source: str) -> Iterator[tuple[str, Any, Place]]:
    for key, value in node.value:
        yield str(_value_of(yaml, key)), value, Place(source, key.start_mark.line + 1)


def _value_of(yaml: Any, node: Any) -> Any:
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node, deep=True)
    except ValueError:  # It looks like a date, and is none.
        return node.value
    finally:
        constructor.dispose()
