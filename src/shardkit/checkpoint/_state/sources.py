"""Where a state is read from: what it holds, and how that comes into tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._dcp.planners import LoadPlanner
from shardkit.checkpoint._dcp.reader import CheckpointReader
from shardkit.checkpoint._files.bytes_io import TensorInfo

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    from shardkit._progress import Meter
    from shardkit.checkpoint._state.sections import Path


class Source(Protocol):
    """A saved state.

    Attributes:
        infos: What there is by name; None for what is not a tensor.
        paths: Where each entry was in the nested state; one key if that is not known.
        stages: Entries of each model, where the ranks that saved had different ones.
    """

    @property
    def infos(self) -> Mapping[str, TensorInfo | None]: ...

    @property
    def paths(self) -> Mapping[str, Path]: ...

    @property
    def stages(self) -> Sequence[frozenset[str]]: ...

    def read(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Fill tensors, whole or sharded; return what is not a tensor.

        Args:
            targets: By name: a tensor of the saved shape, or None for what is not a tensor.

        Raises:
            CheckpointError: What is read is damaged.
        """
        ...


class DistributedCheckpoint:
    """A checkpoint directory: shardkit's, or another one of DCP.

    Attributes:
        identity: Tells the checkpoint from others.
    """

    def __init__(self, path: pathlib.Path, meter: Meter) -> None:
        """Read its description.

        Raises:
            CheckpointError: It is missing, incomplete, damaged, or no checkpoint.
        """
        self._reader = CheckpointReader(path, report=meter.add)
        self._expect = meter.expect
        self._metadata = self._reader.read_metadata()
        self.identity = self._reader.identity
        self.infos: dict[str, TensorInfo | None] = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for name, entry in self._metadata.state_dict_metadata.items()
        }
        manifest = self._reader.manifest
        self.stages = [] if manifest is None else [frozenset(each) for each in manifest.stages]
        known = self._metadata.planner_data
        known = known if isinstance(known, dict) else {}
        self.paths: dict[str, Path] = {name: tuple(known.get(name, (name,))) for name in self.infos}

    def check_files(self) -> None:
        """Compare the sizes of all files with what was written; called on one rank.

        Raises:
            CheckpointError: One is missing, or of another size.
        """
        self._reader.check_files()

    def read(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Fill tensors, whole or sharded; return what is not a tensor. Communicates nothing."""
        planner = LoadPlanner(self._expect)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=False)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()
        for target in targets.values():
            if isinstance(target, ShardedTensor):
                target.spec.annotate_sharding(target.local_piece)
        return planner.loaded
