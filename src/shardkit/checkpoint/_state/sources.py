"""Checkpoint directories as a source: tensors are filled, whole or sharded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._dcp.planners import LoadPlanner
from shardkit.checkpoint._dcp.reader import CheckpointReader
from shardkit.checkpoint._files.bytes_io import Source, TensorInfo

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

    from torch import Tensor


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
