"""Writing directories of DCP: who writes what, files written aside, and the final name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import itertools
import math
import mmap
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import futures
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from shardkit._compat import torch_checkpoints
from shardkit._errors import CheckpointError
from shardkit._layout import align_up
from shardkit._params.state_dicts import map_leaves
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.manifest import (
    BLOCK_NBYTES,
    MANIFEST_FILE,
    STEP_NBYTES,
    Header,
    Item,
    Manifest,
    StoredFile,
)
from shardkit.checkpoint._dcp.metadata import METADATA_FILE
from shardkit.checkpoint._files import disk
from shardkit.checkpoint._files.disk import (
    Key,
    Keys,
    join_keys,
    not_reported,
    raw_bytes,
    saved_key,
    why_refused,
    write_synced,
)
from shardkit.checkpoint._files.formats import tensor_frame

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint import planner as dcp


# --- who writes what ------------------------------------------------------------------------------

_GROUPS = ("optim", "param_groups")
_BYTES, _SHARD = WriteItemType.BYTE_IO, WriteItemType.SHARD


class Whole:
    """A value that is written as one entry, with all of its content.

    DCP takes dicts and lists apart. When it puts them together again, their keys are strings, and
    empty ones and tuples are lost.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.content = _dumped(f"extra {name!r}", value)


def _dumped(what: str, value: Any) -> bytes:
    """Return a value as bytes of a file; refuse it if loading it would have to run its code."""
    content = io.BytesIO()
    try:
        torch.save(map_leaves(value, _alone), content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        msg = (
            f"{what} ({type(value).__name__}) cannot be saved: "
            f"{why_refused(error)}. Save numbers, strings, tensors, lists and dicts of these, or "
            f"an object with state_dict() and load_state_dict(), or declare its class by "
            f"torch.serialization.add_safe_globals."
        )
        raise CheckpointError(msg) from error
    return content.getvalue()


def _alone(leaf: Any) -> Any:
    """Return a leaf in the form in which it is saved.

    A view of a larger tensor becomes a copy, so that the file does not hold all of the larger one.
    A number of numpy, which schedules often put into optimizers, becomes Python's: the class of
    numpy is not safe to load.
    """
    if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_meta:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    if type(leaf).__module__ == "numpy" and getattr(leaf, "shape", None) == () and leaf.size == 1:
        return leaf.item()
    return leaf


class SavePlanner(DefaultSavePlanner):
    """Makes the state while the ranks agree about the plan; an error there is one of all ranks.

    The writer's manifest gets what is known then: the layout, the stages and the keys.
    """

    def __init__(
        self,
        collect: Callable[[], dict[str, Any]],
        expect: Callable[[int], None],
        writer: CheckpointWriter,
    ) -> None:
        super().__init__()
        self._collect = collect
        self._expect = expect
        self._writer = writer

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - DCP's signature
    ) -> None:
        """Make the state; the one that DCP passes is empty."""
        state = {**state_dict, **self._collect()}
        self._writer.layout = _layout_of(state.get("model", {}))
        super().set_up_planner(state, storage_meta, is_coordinator)
        # DCP has made strings of all keys.
        paths: Any = self.mappings
        self.mappings = {name: _saved_path(path, state) for name, path in paths.items()}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Spread what several ranks hold evenly over them, by bytes; called by the coordinator.

        DCP's own planner counts each box with the size of its whole tensor.
        """
        models = dict.fromkeys(map(_entries_of_model, all_plans))
        if len(models) > 1:
            self._writer.stages = [sorted(each) for each in models]
        renamed, own_names = _with_groups_of_all_stages(all_plans)
        plans, metadata = super().create_global_plan(_without_copies(renamed))
        # DCP keeps strings and positions only, so the manifest has the other keys.
        paths: dict[str, Any] = metadata.planner_data
        for name, path in paths.items():
            if others := [(n, key) for n, key in enumerate(path) if type(key) not in (str, int)]:
                self._writer.keys[name] = others
                paths[name] = tuple(k if type(k) in (str, int) else str(k) for k in path)
        return [
            replace(plan, planner_data=names) for plan, names in zip(plans, own_names, strict=True)
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take over new names of parts of the state, and count the bytes of this rank's part."""
        own_names: dict[str, str] = new_plan.planner_data
        self.state_dict |= {new: self.state_dict[own] for new, own in own_names.items()}
        plan = super().finish_plan(new_plan)
        for item in plan.items:
            if item.tensor_data is not None:
                self._expect(_nbytes(item))
        return plan

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP's
        """Return what is written to the file."""
        if isinstance(object, Whole):
            return io.BytesIO(object.content)
        if write_item.type is _BYTES:
            return io.BytesIO(_dumped(f"entry {write_item.index.fqn!r}", object))
        return super().transform_object(write_item, object)


def _layout_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Describe how a model's parameters are spread over ranks, for people who read the manifest."""
    meshes: list[dict[str, Any]] = []
    params: dict[str, int] = {}
    for name, param in model.items():
        if isinstance(param, ShardedTensor):
            mesh = param.spec.mesh
            described = {
                "device_type": mesh.device_type,
                "shape": list(mesh.shape),
                "axes": list(mesh.mesh_dim_names or ()),
                "ranks": list(mesh.ranks),
            }
            if described not in meshes:
                meshes.append(described)
            params[name] = meshes.index(described)
    return {"meshes": meshes, "mesh_of": params}


def _saved_path(path: Keys, state: Any) -> Any:
    """Return the path of an entry of DCP in a state with the keys that the state has."""
    result: list[Key] = []
    for part in path:
        key: Any = part
        if isinstance(state, Mapping) and part not in state:
            key = next(each for each in state if str(each) == part)
            result.append(saved_key(key))
        else:
            result.append(part)
        state = state[key]
    return tuple(result)


def _entries_of_model(plan: SavePlan) -> frozenset[str]:
    return frozenset(name for name, path in plan.planner_data.items() if path[0] == "model")


def _with_groups_of_all_stages(
    plans: list[SavePlan],
) -> tuple[list[SavePlan], list[dict[str, str]]]:
    """Number the parameter groups of optimizers consecutively over different models.

    Pipeline stages have different names of parameters, but each stage numbers its groups from 0.
    """
    firsts: dict[frozenset[str], int] = {}
    num_groups = 0
    renamed: list[SavePlan] = []
    own_names: list[dict[str, str]] = []
    for plan in plans:
        paths: dict[str, Any] = plan.planner_data
        of_model = _entries_of_model(plan)
        # An empty list of groups is one entry, without a number.
        numbers = [int(path[2]) for path in paths.values() if path[:2] == _GROUPS and path[2:]]
        if of_model not in firsts:
            firsts[of_model] = num_groups
            num_groups += max(numbers, default=-1) + 1
        first = firsts[of_model]
        # The groups of the first model keep their names.
        moved = {
            name: (*_GROUPS, int(path[2]) + first, *path[3:])
            for name, path in paths.items()
            if first and path[:2] == _GROUPS and path[2:]
        }
        new_names = {name: join_keys(path) for name, path in moved.items()}
        items = [
            replace(item, index=replace(item.index, fqn=new_names[item.index.fqn]))
            if item.index.fqn in moved
            else item
            for item in plan.items
        ]
        paths = {new_names.get(name, name): moved.get(name, path) for name, path in paths.items()}
        renamed.append(replace(plan, items=items, planner_data=paths))
        own_names.append({new: name for name, new in new_names.items()})
    return renamed, own_names


def _without_copies(plans: list[SavePlan]) -> list[SavePlan]:
    """Keep each item in one plan: shards, the largest first, in the plan with least so far."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            ranks = holders.setdefault(item.index, [])
            # What is no shard may differ from rank to rank, as values and statistics of batches do.
            # So all of it comes from the first rank.
            if not ranks or item.type is _SHARD:
                ranks.append(rank)
            items[item.index] = item
    load = [0] * len(plans)
    chosen: dict[MetadataIndex, int] = {}
    # An item that only one rank may write leaves no choice, so it comes first.
    order = sorted(items, key=lambda index: (len(holders[index]) > 1, -_nbytes(items[index])))
    for index in order:
        chosen[index] = min(holders[index], key=lambda rank: load[rank])
        load[chosen[index]] += _nbytes(items[index])
    return [
        replace(plan, items=[i for i in plan.items if chosen[i.index] == rank])
        for rank, plan in enumerate(plans)
    ]


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


# --- one file -------------------------------------------------------------------------------------
#
# Bytes are copied into two buffers in turn. While one is filled and its checksums are computed, the
# other is written to the disk, past the page cache where the file system allows that. Copying data
# that is in the CPU's cache costs little. Writing through the page cache takes twice as long on a
# local disk, and longer still when the kernel must make room by taking pages from the model.

_BUFFER_NBYTES = 8 << 20
_DISK_BLOCK_NBYTES = 4096  # Writes past the page cache are multiples of it.


class FileStream:
    """A new file that items are appended to; it is on the disk when the context ends.

    Cost: two buffers of 8 MiB, one thread.
    """

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        self._report = report
        self._fd = _create(path)
        self._buffers = [mmap.mmap(-1, _BUFFER_NBYTES) for _ in range(2)]
        self._writing: Future[None] | None = None  # The last write that was started.
        self._current = 0
        self._filled = 0
        self._flushed = 0
        self._thread = ThreadPoolExecutor(1, "shardkit-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Write the rest, flush the disk's cache, and close; after an error only close."""
        try:
            if kind is None:
                nbytes = self.nbytes
                self._flush().result()
                os.ftruncate(self._fd, nbytes)  # The last write was padded.
                os.fsync(self._fd)
        finally:
            self._thread.shutdown()
            os.close(self._fd)
            for buffer in self._buffers:
                with contextlib.suppress(BufferError):  # An error's traceback refers to it.
                    buffer.close()

    @property
    def nbytes(self) -> int:
        """Number of bytes that have been appended."""
        return self._flushed + self._filled

    def append(self, *parts: bytes | memoryview, data_offset: int | None = None) -> Item:
        """Append one item; return its place and its checksums."""
        offset, crc32s, in_block = self.nbytes, [], 0
        crc32 = 0
        for part in parts:
            start = 0
            while start < len(part):
                stop = min(
                    start + STEP_NBYTES,
                    len(part),
                    start + BLOCK_NBYTES - in_block,
                    start + _BUFFER_NBYTES - self._filled,
                )
                step, end = part[start:stop], self._filled + stop - start
                self._buffers[self._current][self._filled : end] = step
                crc32 = zlib.crc32(step, crc32)
                self._filled = end
                if end == _BUFFER_NBYTES:
                    self._flush()
                in_block += stop - start
                start = stop
                if in_block == BLOCK_NBYTES:
                    crc32s.append(crc32)
                    crc32 = in_block = 0
        if in_block:
            crc32s.append(crc32)
        return Item(offset, self.nbytes - offset, data_offset, tuple(crc32s))

    def _flush(self) -> Future[None]:
        """Start to write the current buffer, then wait until the other one is free."""
        nbytes, self._filled = self._filled, 0
        before, buffer = self._writing, self._buffers[self._current]
        self._writing = self._thread.submit(self._write, buffer, nbytes, self._flushed)
        self._flushed += nbytes
        self._current = 1 - self._current
        if before is not None:
            before.result()
        return self._writing

    def _write(self, buffer: mmap.mmap, nbytes: int, offset: int) -> None:
        padded = align_up(nbytes, _DISK_BLOCK_NBYTES)
        with memoryview(buffer) as view:
            done = 0
            while done < padded:
                try:
                    done += os.pwrite(self._fd, view[done:padded], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not _use_cache(self._fd):
                        raise
        self._report(nbytes)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # The file system needs the cache.
            raise
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # Some file systems made it nevertheless.
    return os.open(path, flags, 0o666)


def _use_cache(fd: int) -> bool:
    """Write through the page cache from now on; False if the file did so already."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)
    if not flags & direct:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return True


# --- the writer -----------------------------------------------------------------------------------


class CheckpointWriter(FileSystemWriter):
    """Storage for ``torch.distributed.checkpoint.save``: crash-safe, with a manifest.

    Each rank writes one file, past the page cache where possible, and flushes it to the disk. Then
    the coordinator writes `.metadata` and the manifest, flushes the directory and renames it to its
    final name. A run that dies at any moment leaves what had the name before.

    Args:
        path: The checkpoint's directory, which all ranks must see. The ``checkpoint_id`` of
            ``dcp.save`` takes its place.
        overwrite: Permission to replace a checkpoint that has this name.
        step: Training step, for the manifest.
        report: Function that is called on each rank with the numbers of bytes that it has written.

    Attributes:
        target: Path that the checkpoint gets.
        layout: Part of the manifest: how parameters are spread, for people to read.
        stages: Part of the manifest: entries of each model, if ranks have different models.
        keys: Part of the manifest: keys of dicts that are no strings.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        step: int | None = None,
        report: Callable[[int], None] | None = None,
    ) -> None:
        self.target = directory.normalized(path)
        super().__init__(self.target, overwrite=overwrite)
        self._step = step
        self.layout: Mapping[str, Any] = {}
        self.stages: Sequence[Sequence[str]] = ()
        self.keys: dict[str, list[tuple[int, Key]]] = {}
        self._report = report or not_reported
        self._before: directory.Stamp = None
        self._new: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, under the name that `dcp.save` got, if it got one."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.target = directory.normalized(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        """Refuse to save without a coordinator: no rank would know when the save is complete."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not kwargs.get("use_collectives", True):
            msg = "CheckpointWriter needs a coordinator: call dcp.save with use_collectives=True."
            raise CheckpointError(msg)

    def storage_meta(self) -> StorageMeta:
        """Describe the checkpoint by its final name."""
        return StorageMeta(checkpoint_id=self.target, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add the name; the coordinator makes the directory after all have planned."""
        return replace(plan, storage_data=self.target.name)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the directory; called by the coordinator before any rank writes.

        Raises:
            CheckpointError: The name is taken, or ranks have different names.
            OSError: The directory cannot be made.
        """
        names = [plan.storage_data for plan in plans]
        if len(set(names)) > 1:
            other = next(rank for rank, name in enumerate(names) if name != names[0])
            msg = (
                f"ranks save to different names, {names[0]!r} on rank 0 and {names[other]!r} on "
                f"rank {other}. Pass the same path on all ranks: each writes its own file there."
            )
            raise CheckpointError(msg)
        self._new = directory.prepare(self.target, overwrite=self.overwrite)
        self._before = directory.stamp(self.target)
        return [
            replace(plan, storage_data=(self._new.name, f"__{rank}_0.distcp"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(
        self, plan: SavePlan, planner: dcp.SavePlanner
    ) -> futures.Future[list[WriteResult]]:
        """Write this rank's file and flush it to the disk.

        Cost: 16 MiB of buffers; tensors on the host are not copied as a whole.
        """
        folder_name, name = plan.storage_data
        folder = self.target.with_name(folder_name)
        results: list[WriteResult] = []
        if plan.items:
            if not folder.is_dir():
                msg = (
                    f"{folder}: the directory that the first rank has made is not there. Give "
                    f"the same path on all ranks, of a directory that all of them share."
                )
                raise CheckpointError(msg)
            with FileStream(folder / name, self._report) as stream:
                # Bytes first, as DCP does: a reader of bytes then reads only the start of the file.
                for item in sorted(plan.items, key=lambda item: item.type is not _BYTES):
                    stored = _write_item(stream, planner.resolve_data(item))
                    results.append(WriteResult(item.index, stored.nbytes, (name, stored)))
        future: futures.Future[list[WriteResult]] = futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` and the manifest, and give the checkpoint its name.

        Raises:
            CheckpointError: A file that a rank has written is missing.
            OSError: The disk is full, or the directory cannot be renamed.
        """
        folder = self._new
        assert folder is not None
        files = _files_of(results)
        for name, stored in files.items():
            try:
                directory.check_size(folder / name, stored.nbytes)
            except CheckpointError as error:
                found = str(error).removesuffix(disk.DAMAGED)
                msg = f"{found}Save to a directory that all ranks share, and that nobody deletes."
                raise CheckpointError(msg) from error
        self.path = folder
        super().finish(metadata, [[_as_dcp(result) for result in rank] for rank in results])
        content = (folder / METADATA_FILE).read_bytes()
        header = Header(
            directory.next_sequence(folder.parent),
            self._step,
            len(results),
            sys.modules["shardkit"].__version__,
        )
        manifest = Manifest(
            header,
            files,
            len(content),
            zlib.crc32(content),
            self.layout,
            saved_by=str(disk.own()),
            stages=self.stages,
            keys=self.keys,
        )
        mine = directory.stamp(folder)
        write_synced(folder / MANIFEST_FILE, manifest.dump())
        self._new = None  # From now on, `commit` deletes it.
        directory.commit(
            folder, self.target, overwrite=self.overwrite, before=self._before, mine=mine
        )

    def discard(self) -> None:
        """Delete what has been written, unless it has its final name already."""
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
    if elements is None:  # Quantized, sparse, or of a class that torch.save can write.
        saved = io.BytesIO()
        torch.save(tensor, saved)
        return stream.append(saved.getbuffer())
    before, after = tensor_frame(tensor.dtype, tuple(tensor.shape))
    return stream.append(before, elements, after, data_offset=len(before))


def _files_of(results: list[list[WriteResult]]) -> dict[str, StoredFile]:
    items: dict[str, list[Item]] = {}
    for result in itertools.chain(*results):
        file, item = result.storage_data
        items.setdefault(file, []).append(item)
    return {  # Items are in the order of their bytes, which are contiguous.
        file: StoredFile(of_file[-1].offset + of_file[-1].nbytes, tuple(of_file))
        for file, of_file in sorted(items.items())
    }


def _as_dcp(result: WriteResult) -> WriteResult:
    file, item = result.storage_data
    info = torch_checkpoints.dcp_storage_info()(file, item.offset, item.nbytes)
    return replace(result, storage_data=info)
