"""Which entry of a checkpoint is whose: found by names, whoever wrote it.

shardkit writes ``model.``, ``optim.`` and ``extra.``. Training scripts that use DCP themselves
often write other prefixes, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit.checkpoint._state.names import split_at_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MODEL_PREFIXES = ("model.", "app.model.", "state.model.", "")
OPTIMIZER_PREFIXES = (
    "optim.",
    "optimizer.",
    "app.optim.",
    "app.optimizer.",
    "state.optim.",
    "state.optimizer.",
    "",
)
_OUTER = ("app", "state", "extra")

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class OptimizerEntry:
    """An entry of an optimizer's state."""

    entry: str  # Name in the checkpoint.
    parameter: str  # The parameter's name.
    keys: Path  # Keys of the part of its state.


def model_prefix(entries: Collection[str], names: Collection[str]) -> str:
    """Return the prefix under which most of a model's names are found."""
    return max(MODEL_PREFIXES, key=lambda prefix: sum(prefix + name in entries for name in names))


def entries_of_models(entries: Collection[str]) -> set[str]:
    """Return entries that look like a model's, where no model is there to compare."""
    prefixes = tuple(prefix for prefix in MODEL_PREFIXES if prefix)
    return {entry for entry in entries if entry.startswith(prefixes)}


def entries_of_other_stages(
    stages: Sequence[frozenset[str]], wanted: Collection[str]
) -> frozenset[str]:
    """Return entries that were saved by stages of a pipeline of which a model has none."""
    everything = frozenset().union(*stages)
    own, rest = frozenset[str](), everything.intersection(wanted)
    while rest:
        stage = max(stages, key=lambda each: (len(each & rest), each <= rest))
        own, rest = own | stage, rest - stage
    return everything - own


def optimizer_prefix(entries: Collection[str]) -> str | None:
    """Return the prefix under which there is an optimizer's state; None if there is none."""
    for prefix in OPTIMIZER_PREFIXES:
        # Not its state: it may have none, and modules are called so.
        if any(entry.startswith(f"{prefix}param_groups") for entry in entries):
            return prefix
    return None


def entries_of_optimizers(entries: Collection[str]) -> set[str]:
    """Return the entries that are an optimizer's."""
    prefix = optimizer_prefix(entries)
    if prefix is None:
        return set()
    heads = (f"{prefix}state.", f"{prefix}param_groups")
    return {entry for entry in entries if entry.startswith(heads)}


def optimizer_entries(
    paths: Mapping[str, Path], prefix: str, known: Collection[str]
) -> list[OptimizerEntry]:
    """Return what there is of parameters' state.

    Args:
        paths: Keys that led to each entry in the nested state.
        prefix: Prefix that `optimizer_prefix` returned.
        known: Names of parameters, which have dots in them as what is behind them may have.
    """
    head = f"{prefix}state."
    depth = head.count(".")  # How many keys the head is, if it was nested.
    found = []
    for entry, path in paths.items():
        if not entry.startswith(head):
            continue
        if len(path) > depth + 1 and ".".join(map(str, path[:depth])) == head[:-1]:
            found.append(OptimizerEntry(entry, str(path[depth]), path[depth + 1 :]))
        else:
            text = entry.removeprefix(head)
            *parts, last = text.split(".")
            name, keys = split_at_name(text, known) or (".".join(parts), (last,))
            found.append(OptimizerEntry(entry, name, keys))
    return found


def extra_path(path: Path) -> Path:
    """Return where an entry is among the extras: without what all of them are in."""
    return path[1:] if len(path) > 1 and path[0] in _OUTER else path


def paths_below(paths: Mapping[str, Path], entry: str) -> dict[str, Path]:
    """Return the entries that are in a nested value called so, and where in it."""
    found: dict[str, Path] = {}
    for name, path in paths.items():
        if not name.startswith(f"{entry}."):
            continue
        for depth in range(1, len(path)):
            if ".".join(map(str, path[:depth])) == entry:
                found[name] = path[depth:]
                break
        else:
            found[name] = tuple(name.removeprefix(f"{entry}.").split("."))
    return found


def nested(values: Mapping[Path, Any]) -> Any:
    """Return values put back where they were: in dicts, and in lists where keys are numbers."""
    if () in values:
        return values[()]
    inner: dict[str | int, dict[Path, Any]] = {}
    for path, value in values.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in inner):
        return [nested(inner[key]) for key in sorted(inner)]
    return {key: nested(rest) for key, rest in inner.items()}


def element(values: Any, path: Path) -> Any:
    """Return what is at a path in nested dicts and lists; None if there is nothing."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values
