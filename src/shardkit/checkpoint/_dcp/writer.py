"""`CheckpointWriter`: DCP's files, written aside and renamed when all of them are on the disk."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import mmap
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardkit._compat import torch_checkpoints
from shardkit._errors import CheckpointError
from shardkit._params.state_dicts import map_leaves
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.item_file import FileStream, is_plain, raw_bytes, tensor_frame
from shardkit.checkpoint._dcp.manifest import MANIFEST_FILE, Header, Item, Manifest, StoredFile
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._files import disk
from shardkit.checkpoint._files.disk import write_synced

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem


# --- copies that are written in the background ----------------------------------------------------

_ALIGNMENT = 64


class Staging:
    """Memory on the host for copies of a state's tensors.

    It is kept from one copy to the next: memory fresh from the system takes several times as long
    to be written as the copy itself. Training goes on while a copy is being written to the disk, so
    the peak is the same as if it were given back in between.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def release(self) -> None:
        """Give the memory back to the system, once no copy is in it any more."""
        self._buffer = None

    @torch.no_grad()
    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state like this one whose tensors nobody else writes to.

        Values that are not tensors are those of the state. What the last copy holds is overwritten.

        Cost: one copy of what this rank holds.
        """
        tensors: dict[int, Tensor] = {}

        def note(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                tensors[id(leaf)] = memory_of(leaf)
            return leaf

        map_leaves(state, note)
        copies = self._copy_all(tensors)
        result: dict[str, Any] = map_leaves(
            state, lambda leaf: _like(leaf, copies[id(leaf)]) if id(leaf) in copies else leaf
        )
        return result

    def _copy_all(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        starts, total = {}, 0
        for key, tensor in tensors.items():
            if is_plain(tensor) and not tensor.is_quantized:
                starts[key] = total
                total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_accelerator = {t.device for t in tensors.values()} - {torch.device("cpu")}
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = None  # First: there is not room for both.
            self._buffer = _allocate(total, pinned=bool(on_accelerator))
        copies = {}
        for key, tensor in tensors.items():
            if key not in starts:
                copies[key] = tensor.detach().cpu().clone()
                continue
            memory = self._buffer[starts[key] : starts[key] + tensor.nbytes]
            copies[key] = memory.view(tensor.dtype).view(tensor.shape)
            copies[key].copy_(tensor, non_blocking=True)
        for device in on_accelerator:
            if device.type not in {"meta", "xla"}:  # XLA's copies are done when they return.
                torch.accelerator.synchronize(device)
        return copies


def _allocate(nbytes: int, *, pinned: bool) -> Tensor:
    if pinned and torch.accelerator.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # So the first copy takes fewer page faults.
    return torch.frombuffer(memory, dtype=torch.uint8)


def memory_of(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local_piece.detach()
    if hasattr(tensor, "to_local"):
        local: Tensor = tensor.detach().to_local()
        return local
    detached: Tensor = tensor.detach()
    return detached


def _like(tensor: Any, memory: Tensor) -> Any:
    """Return a tensor like another, of which this rank holds `memory`."""
    if isinstance(tensor, ShardedTensor):
        return ShardedTensor(memory, tensor.spec)
    if hasattr(tensor, "to_local"):
        return type(tensor).from_local(
            memory,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return memory


# --- the writer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator about one item."""

    file: str
    item: Item
    file_nbytes: int


@dataclass(frozen=True)
class _WrittenPlace:
    """What the coordinator tells a rank."""

    prefix: str  # Begins the name of its file.
    folder: str  # Name of the directory in which it is written.


class CheckpointWriter(FileSystemWriter):
    """Storage for ``torch.distributed.checkpoint.save``: crash-safe, with a manifest.

    Each rank writes one file, past the page cache where it can, and has it on the disk before the
    coordinator writes `.metadata` and the manifest, flushes the directory and gives it its name. A
    run that dies at any moment leaves what was under the name before.

    The directory must be one that all ranks see.

    Attributes:
        target: Name that the checkpoint gets.
        layout: Text for the manifest: how parameters are spread, for people to read.
        stages: List for the manifest: entries of each model, where ranks have different ones.
    """

    def __init__(  # noqa: D417 - `path` needs no more
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        step: int | None = None,
        report: Callable[[int], None] | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            overwrite: Permission to replace a checkpoint that has this name.
            step: Training step, for the manifest.
            report: Function that is called on each rank with the numbers of bytes that it has
                written.
        """
        self.target = directory.normalized(path)
        super().__init__(self.target, overwrite=overwrite)
        self._step = step
        self.layout: Mapping[str, Any] = {}
        self.stages: Sequence[Sequence[str]] = ()
        self._report = report
        self._before: directory.Stamp = None
        self._new: Path | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        """Refuse to save without a coordinator: nobody could say when all is there."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not kwargs.get("use_collectives", True):
            msg = "CheckpointWriter needs a coordinator: call dcp.save with use_collectives=True."
            raise CheckpointError(msg)

    def storage_meta(self) -> StorageMeta:
        """Describe the checkpoint by the name that it will have."""
        return StorageMeta(checkpoint_id=self.target, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is: the coordinator makes the directory, after all have planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory; called by the coordinator before any rank writes.

        Raises:
            CheckpointError: The name is taken.
            OSError: The directory cannot be made.
        """
        self._new = directory.prepare(self.target, overwrite=self.overwrite)
        self._before = directory.stamp(self.target)
        return [
            dataclasses.replace(plan, storage_data=_WrittenPlace(f"__{rank}_", self._new.name))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and have it on the disk.

        Cost: 16 MiB of buffers; tensors on the host are not copied as a whole.
        """
        place: _WrittenPlace = plan.storage_data
        name = f"{place.prefix}0.distcp"
        folder = self.target.with_name(place.folder)
        written: list[tuple[WriteItem, Item]] = []
        if plan.items:
            if not folder.is_dir():
                msg = (
                    f"{folder}: the directory that the first rank has made is not there. Give "
                    f"the same path on all ranks, of a directory that all of them share."
                )
                raise CheckpointError(msg)
            with FileStream(folder / name, self._report) as stream:
                # Bytes first, as DCP does: whoever looks for them reads the file's begin only.
                for wanted in (True, False):
                    written += [
                        (item, _write_item(stream, planner.resolve_data(item)))
                        for item in plan.items
                        if (item.type is WriteItemType.BYTE_IO) is wanted
                    ]
                nbytes = stream.nbytes
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=stored.nbytes,
                    storage_data=_Written(name, stored, nbytes),
                )
                for item, stored in written
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and the manifest, and give the checkpoint its name.

        Raises:
            CheckpointError: A file that a rank has written is not there.
            OSError: The disk is full, or the directory cannot be renamed.
        """
        folder = self._new
        assert folder is not None
        files = _files_of(results)
        for name, stored in files.items():
            try:
                directory.check_size(folder / name, stored.nbytes)
            except CheckpointError as error:
                msg = f"{error} Save to a directory that all ranks share."
                raise CheckpointError(msg) from error
        self.path = folder
        super().finish(metadata, [[_as_dcp(result) for result in rank] for rank in results])
        content = (folder / METADATA_FILE).read_bytes()
        header = Header(
            directory.next_sequence(folder.parent), self._step, len(results), _own_version()
        )
        manifest = Manifest(
            header,
            files,
            len(content),
            zlib.crc32(content),
            self.layout,
            saved_by=str(disk.own()),
            stages=self.stages,
        )
        mine = directory.stamp(folder)
        write_synced(folder / MANIFEST_FILE, manifest.dump())
        self._new = None  # From now on it is for `commit` to delete it.
        directory.commit(
            folder, self.target, overwrite=self.overwrite, before=self._before, mine=mine
        )

    def discard(self) -> None:
        """Delete what has been written, if it has not been given its name."""
        if self._new is not None:
            directory.delete(self._new, self.target)


def _write_item(stream: FileStream, content: torch.Tensor | io.BytesIO) -> Item:
    """Append one tensor or bytes."""
    if not isinstance(content, torch.Tensor):
        return stream.append(content.getbuffer())
    tensor = content.detach().cpu()
    elements = raw_bytes(tensor)
    if elements is None and type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        elements = raw_bytes(tensor := tensor.contiguous().resolve_conj().resolve_neg())
    if elements is None:  # Quantized, sparse, or of a class that torch.save knows how to write.
        saved = io.BytesIO()
        torch.save(tensor, saved)
        return stream.append(saved.getbuffer())
    before, after = tensor_frame(tensor.dtype, tuple(tensor.shape))
    return stream.append(before, elements, after, data_offset=len(before))


def _files_of(results: list[list[WriteResult]]) -> dict[str, StoredFile]:
    items: dict[str, list[_Written]] = {}
    for rank in results:
        for result in rank:
            items.setdefault(result.storage_data.file, []).append(result.storage_data)
    return {
        name: StoredFile(
            written[0].file_nbytes,
            tuple(sorted((w.item for w in written), key=lambda item: item.offset)),
        )
        for name, written in sorted(items.items())
    }


def _as_dcp(result: WriteResult) -> WriteResult:
    stored: _Written = result.storage_data
    info = torch_checkpoints.dcp_storage_info()(stored.file, stored.item.offset, stored.item.nbytes)
    return dataclasses.replace(result, storage_data=info)


def _own_version() -> str:
    try:
        return importlib.metadata.version("shardkit")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"
