"""Where fields of a config stand: a file with lines, or a dict."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

_OF_DICT = "config"


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
    if isinstance(source, (str, os.PathLike)):
        return _read_file(Path(source))
    return _of_mapping("", source, Place(_OF_DICT))


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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
        return _of_node(yaml, "", node, str(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = Place(str(path), None if mark is None else mark.line + 1)
        msg = f"{place}: this is not YAML: {error.problem or error.context}."
        raise ConfigError(msg) from error
    except yaml.YAMLError as error:  # Characters that no text has.
        msg = f"{path}: this is not YAML: {error}"
        raise ConfigError(msg) from error


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
