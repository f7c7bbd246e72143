"""Which entry of a checkpoint is whose: found by names, whoever wrote it.

shardkit writes ``model.``, ``optim.`` and ``extra.``. Training scripts that use DCP themselves
often write other prefixes, or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._dcp.planners import LoadPlanner
from shardkit.checkpoint._dcp.reader import CheckpointReader
from shardkit.checkpoint._files.disk import Source, TensorInfo
from shardkit.checkpoint._state.names import split_at_name

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

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
    """An entry of an optimizer's state.

    Attributes:
        entry: Name in the checkpoint.
        parameter: The parameter's name.
        keys: Keys of the part of its state.
    """

    entry: str
    parameter: str
    keys: Path


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
    """Return entries that were saved by stages of a pipeline of which a model has none.

    Args:
        stages: Entries of each stage; some may be in several.
        wanted: Entries of the model, which may be one stage, some, or all.
    """
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


# --- directories as a source ----------------------------------------------------------------------


class DistributedCheckpoint(Source):
    """A checkpoint directory: shardkit's, or another one of DCP.

    What is read is verified by the checksums of the manifest, if there is one.

    Attributes:
        path: The directory.
        reader: Storage that knows the files.
        entries: Shape and dtype of every tensor; None for what is not a tensor.
        paths: Keys that led to each entry in the nested state; one key if that is not known.
        stages: Entries of each model, where the ranks that saved had different ones.
        identity: Number that tells the checkpoint from others.
    """

    def __init__(self, path: pathlib.Path, meter: Meter | None = None) -> None:
        """Read its description.

        Raises:
            CheckpointError: It is missing, incomplete, damaged, or no checkpoint.
        """
        self.path = path
        meter = meter or Meter(progress=False, what="", rank=0)
        self._expect = meter.expect
        self.reader = CheckpointReader(path, report=meter.add)
        self._metadata = self.reader.read_metadata()
        self.identity = self.reader.identity
        self.entries = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in self._metadata.state_dict_metadata.items()
        }
        self.infos = {name: info for name, info in self.entries.items() if info is not None}
        self.others = [name for name, info in self.entries.items() if info is None]
        self.tied = {}
        manifest = self.reader.manifest
        self.stages = [] if manifest is None else [frozenset(each) for each in manifest.stages]
        known = self._metadata.planner_data
        known = known if isinstance(known, dict) else {}
        self.paths = {name: tuple(known.get(name, (name,))) for name in self.entries}

    def fill(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Fill tensors, whole or sharded; return what is not a tensor. Communicates nothing.

        Args:
            targets: Tensor of the saved shape by name; None for what is not a tensor.

        Raises:
            CheckpointError: What is read is damaged.
        """
        planner = LoadPlanner(self.path, self._expect)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=False)
        plan = planner.finish_plan(planner.create_local_plan())
        self.reader.read_data(plan, planner).wait()
        for target in targets.values():
            if isinstance(target, ShardedTensor):
                target.spec.annotate_sharding(target.local_piece)
        return planner.loaded

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on; of a tensor's part the whole is read."""
        info = self.infos[name]
        if out.numel() < math.prod(info.shape):
            out.copy_(self.read(name, 0, math.prod(info.shape))[start : start + out.numel()])
        else:
            self.fill({name: out.view(info.shape)})

    def read_other(self, key: str) -> Any:
        """Return an entry that is no tensor: plain values only, nothing is executed."""
        return self.fill({key: None})[key]

    def chunks(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
        """Return offsets, sizes and file of each chunk that a tensor was saved in."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        stored = self.reader.storage_data
        return [
            (
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                stored[MetadataIndex(key, chunk.offsets)].relative_path,
            )
            for chunk in entry.chunks
        ]
