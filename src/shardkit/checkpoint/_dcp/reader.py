"""Reading directories of DCP straight into tensors, verified by the manifest."""

from __future__ import annotations

import contextlib
import io
import math
import os
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from shardkit._errors import CheckpointError
from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.manifest import (
    BLOCK_NBYTES,
    MANIFEST_FILE,
    STEP_NBYTES,
    Item,
    Manifest,
    read_manifest,
)
from shardkit.checkpoint._dcp.metadata import METADATA_FILE, parse_metadata
from shardkit.checkpoint._files.disk import (
    DAMAGED,
    Source,
    TensorInfo,
    asides_in,
    bytes_of,
    copy_from_scratch,
    not_reported,
    open_regular,
    raw_bytes,
    read_index,
    why_refused,
)
from shardkit.checkpoint._files.formats import storage_entries, tensor_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.distributed.checkpoint import planner as dcp


class CheckpointReader(FileSystemReader):
    """Storage for ``torch.distributed.checkpoint.load``: verified and direct; executes no code.

    It reads checkpoints with shardkit's manifest, and verifies by checksums all that it reads. It
    also reads other checkpoints of DCP, and verifies sizes. Elements go straight from the file to
    the target's memory if they are contiguous in both. Otherwise, or if dtype or device differ,
    they go through memory for one saved chunk.

    Args:
        path: The checkpoint's directory.
        report: Function that is called with the numbers of bytes that have been read.

    Attributes:
        manifest: Manifest; None if there is none, or if nothing has been read.
        identity: Checksum of `.metadata`, which contains a random number.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, report: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(directory.normalized(path))
        self._report = report or not_reported
        self.manifest: Manifest | None = None
        self.identity = 0
        self._items: dict[tuple[str, int], Item] = {}
        self._chunks: dict[MetadataIndex, TensorInfo] = {}
        self._file_nbytes: dict[str, int] = {}  # Without a manifest, the sizes at least.

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's description, verified.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete or damaged, or it is something
                else.
        """
        if args or kwargs.get("rank") is not None:
            msg = f"{self.path} has no metadata of single ranks."
            raise CheckpointError(msg)
        path = Path(self.path)
        check_is_checkpoint(path)
        try:
            self.manifest = read_manifest(path)
        except FileNotFoundError:  # A checkpoint of plain DCP.
            try:
                content = read_index(path / METADATA_FILE)
            except OSError as error:
                msg = (
                    f"{path / METADATA_FILE}: {error.strerror or error}. A checkpoint directory "
                    f"holds this file once it is complete: give the path of a complete one."
                )
                raise CheckpointError(msg) from error
        else:
            content = directory.check_metadata(path, self.manifest)
        metadata = parse_metadata(content, path / METADATA_FILE)
        self.identity = zlib.crc32(content)
        self.set_up_storage_reader(metadata, is_coordinator=False)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Note where everything is; raise if the manifest differs about an item."""
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._chunks = {
            MetadataIndex(name, chunk.offsets): TensorInfo(
                tuple(chunk.sizes), entry.properties.dtype
            )
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        files = {} if self.manifest is None else self.manifest.files
        self._file_nbytes = {name: stored.nbytes for name, stored in files.items()}
        self._items = {
            (name, item.offset): item for name, stored in files.items() for item in stored.items
        }
        for index, where in self.storage_data.items():
            name, place = where.relative_path, (where.relative_path, where.offset)
            if self.manifest is None:
                self._items[place] = Item(where.offset, where.length, None, ())
                known = self._file_nbytes.get(name, 0)
                self._file_nbytes[name] = max(known, where.offset + where.length)
                continue
            item, chunk = self._items.get(place), self._chunks.get(index)
            end = 0  # End of a tensor's elements in the item.
            if item is not None and chunk is not None and item.data_offset is not None:
                end = item.data_offset + chunk.nbytes
            if item is None or item.nbytes != where.length or end > item.nbytes:
                msg = (
                    f"{self.path}: {METADATA_FILE} and {MANIFEST_FILE} differ about "
                    f"{index.fqn!r}. {DAMAGED}"
                )
                raise CheckpointError(msg)

    def chunks_by_place(self) -> dict[tuple[str, int], tuple[TensorInfo, str]]:
        """Return each chunk and its tensor's name, by its file and its offset in the file."""
        places = {index: self.storage_data[index] for index in self._chunks}
        return {
            (where.relative_path, where.offset): (self._chunks[index], index.fqn)
            for index, where in places.items()
        }

    def check_files(self, names: Collection[str] | None = None) -> None:
        """Compare the sizes of files with the sizes that were written.

        Args:
            names: Names of the files; None: all files, which one rank should check.

        Raises:
            CheckpointError: A file is missing, or has another size.
        """
        for name in self._file_nbytes if names is None else names:
            path, nbytes = Path(self.path, name), self._file_nbytes[name]
            if self.manifest is None and path.exists():  # Only its least size is known.
                nbytes = max(nbytes, path.stat().st_size)
            directory.check_size(path, nbytes)

    def read_data(self, plan: LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Read the items of a plan.

        Raises:
            CheckpointError: A file is missing, truncated, or its content is not what was written.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for request in plan.items:
            where = self.storage_data.get(request.storage_index)
            if where is None:
                name = request.storage_index.fqn
                msg = f"{self.path}: {name!r} is listed but stored nowhere. {DAMAGED}"
                raise CheckpointError(msg)
            by_file[where.relative_path].append(request)
        self.check_files(by_file)
        block_nbytes = BLOCK_NBYTES if self.manifest is None else self.manifest.block_nbytes
        for name, requests in by_file.items():
            requests.sort(key=lambda request: self.storage_data[request.storage_index].offset)
            with ItemFile(Path(self.path, name), block_nbytes, self._report) as file:
                for request in requests:
                    self._read(file, request, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, file: ItemFile, request: ReadItem, planner: dcp.LoadPlanner) -> None:
        index = request.storage_index
        where = self.storage_data[index]
        item = self._items[where.relative_path, where.offset]
        if request.type is LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(file.read(item, index.fqn)))
            return
        target = planner.resolve_tensor(request).detach()
        chunk = self._chunks[index]
        if self.manifest is None:
            item = file.located(item, chunk)
        else:
            file.check_frame(item, chunk, index.fqn)
        if item.data_offset is None:
            saved = file.load(item, chunk, index.fqn)
            bounds = zip(request.storage_offsets, request.lengths, strict=True)
            for dim, (start, length) in enumerate(bounds):
                saved = saved.narrow(dim, start, length)
            target.copy_(saved)
        else:
            offsets, lengths = request.storage_offsets, request.lengths
            file.read_box(item, chunk, offsets, lengths, target, index.fqn)
        planner.commit_tensor(request, target)


def check_is_checkpoint(path: Path) -> None:
    """Raise if there is no complete checkpoint under a path."""
    if (path / METADATA_FILE).is_file():
        return
    if not path.exists():
        found = "does not exist"
        if any(aside.name == path.name for aside in asides_in(path.parent)):
            found += "; a checkpoint of this name was being written, and is not complete"
    elif not path.is_dir():
        found = "is not a directory"
    elif any(path.glob("*.distcp")) or (path / MANIFEST_FILE).exists():
        found = f"is incomplete: it has no {METADATA_FILE} file"
    else:
        found = f"is not a checkpoint: it has no {METADATA_FILE} file"
    msg = f"{path} {found}. shardkit.checkpoint.latest(directory) returns the newest complete one."
    raise CheckpointError(msg)


class LoadPlanner(DefaultLoadPlanner):
    """Loads by flat names; runs no code from the file."""

    def __init__(self, path: object, targets: dict[str, Any], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # set_up_planner is not called: it would look through the targets for those without memory.
        self.state_dict, self.metadata = targets, metadata
        self._path = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep a value that is not a tensor; refuse classes that torch does not consider safe."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True, map_location="cpu")
        except Exception as error:
            msg = (
                f"{self._path}: entry {name!r} is not loaded: {why_refused(error)}. If you trust "
                f"the file, declare what is in it by torch.serialization.add_safe_globals."
            )
            raise CheckpointError(msg) from error


class DistributedCheckpoint(Source):
    """A checkpoint directory of shardkit or another of DCP; verified if it has a manifest."""

    kind = "checkpoint directory"

    def __init__(self, path: Path, meter: Meter | None = None) -> None:
        self.path = path
        meter = meter or Meter(progress=False, what="", rank=0)
        self._expect = meter.expect
        self.reader = CheckpointReader(path, report=meter.add)
        self._metadata = self.reader.read_metadata()
        described = self._metadata.state_dict_metadata
        known = self._metadata.planner_data
        known = known if isinstance(known, dict) else {}
        # The order of the saved state. DCP describes entries in the order of the ranks' files.
        names = [name for name in {**known, **described} if name in described]
        # Shape and dtype of every tensor; None for other entries.
        self.entries = {
            name: TensorInfo(tuple(entry.size), entry.properties.dtype)
            if isinstance(entry := described[name], TensorStorageMetadata)
            else None
            for name in names
        }
        self.infos = {name: info for name, info in self.entries.items() if info is not None}
        self.others = [name for name, info in self.entries.items() if info is None]
        self.tied = {}
        manifest = self.reader.manifest
        self.world_size = None if manifest is None else manifest.header.world_size
        # Entries of each model, if the ranks that saved had different ones.
        self.stages = [] if manifest is None else [frozenset(each) for each in manifest.stages]
        # Keys that led to each entry in the nested state; one key if they are not known.
        self.paths = {name: tuple(known.get(name, (name,))) for name in self.entries}
        if manifest is not None and manifest.keys:
            self.paths = {name: manifest.path_of(name, path) for name, path in self.paths.items()}

    @property
    def files(self) -> list[Path]:
        """All files in the directory."""
        return [path for path in sorted(self.path.iterdir()) if path.is_file()]

    def fill(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        """Fill tensors of the saved shapes, whole or sharded; return them and all other values.

        Targets of values that are no tensors are None. Communicates nothing.
        """
        planner = LoadPlanner(self.path, dict(targets), self._metadata)
        plan = planner.create_local_plan()
        for item in plan.items:
            target = targets[item.dest_index.fqn]
            if isinstance(target, Tensor):
                self._expect(math.prod(item.lengths) * target.dtype.itemsize)
        self.reader.read_data(plan, planner).wait()
        for target in targets.values():
            if isinstance(target, ShardedTensor):
                target.spec.annotate_sharding(target.local_piece)
        return planner.state_dict

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on; the whole tensor is read, even for a part of it."""
        info = self.infos[name]
        if out.numel() < info.numel:
            out.copy_(self.read(name, 0, info.numel)[start : start + out.numel()])
        else:
            self.fill({name: out.view(info.shape)})

    def read_other(self, key: str) -> Any:
        """Return an entry that is no tensor: only plain values, and nothing is executed."""
        return self.fill({key: None})[key]

    def chunks(self, key: str) -> list[dict[str, Any]]:
        """Return offsets, sizes and file of each chunk of a saved tensor."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return [
            {
                "file": self.reader.storage_data[MetadataIndex(key, chunk.offsets)].relative_path,
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
            }
            for chunk in entry.chunks
        ]


# --- one file -------------------------------------------------------------------------------------


class ItemFile:
    """An open file of a checkpoint."""

    def __init__(self, path: Path, block_nbytes: int, report: Callable[[int], None]) -> None:
        self.path = path
        self._block_nbytes = block_nbytes
        self._report = report
        self._fd = open_regular(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # Read further ahead.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, item: Item, name: str) -> bytearray:
        """Return all bytes of an item; raise if they are not the bytes that were written."""
        content = bytearray(item.nbytes)
        self.read_into(item, 0, memoryview(content), name)
        return content

    def read_into(self, item: Item, start: int, target: memoryview, name: str) -> None:
        """Read bytes of an item from `start` on; the whole blocks around them are verified."""
        stop = start + len(target)
        if not item.crc32s:
            self._read_run(item.offset + start, [target], name)
            return
        for begin, end, crc32 in item.blocks(self._block_nbytes):
            if begin >= stop or end <= start:
                continue
            low, high = max(begin, start), min(end, stop)
            before, after = bytearray(low - begin), bytearray(end - high)
            parts = [memoryview(before), target[low - start : high - start], memoryview(after)]
            found = self._read_run(item.offset + begin, parts, name)
            if found != crc32:
                msg = (
                    f"{self.path}: {name!r}: bytes {item.offset + begin} to {item.offset + end} "
                    f"are not what was written (checksum {found:08x}, expected {crc32:08x}). "
                    f"{DAMAGED}"
                )
                raise CheckpointError(msg)

    def _read_run(self, offset: int, parts: list[memoryview], name: str) -> int:
        """Fill the parts from one run of bytes; return their checksum."""
        crc32 = 0
        for part in parts:
            done = 0
            while done < len(part):
                step = part[done : done + STEP_NBYTES]
                got = os.preadv(self._fd, [step], offset)
                if got == 0:
                    msg = (
                        f"{self.path}: truncated: {name!r} should go on at byte {offset}. {DAMAGED}"
                    )
                    raise CheckpointError(msg)
                crc32 = zlib.crc32(step[:got], crc32)
                offset += got
                done += got
            if done:
                self._report(done)
        return crc32

    # --- tensors --------------------------------------------------------------------------------

    def located(self, item: Item, chunk: TensorInfo) -> Item:
        """Return an item of DCP with the offset of its elements, which DCP does not record."""
        try:
            archive: Any = Slice(self._fd, item.offset, item.nbytes)
            with torch.serialization.skip_data():
                described = torch.load(archive, weights_only=True, map_location="cpu")
            (elements,) = storage_entries(archive)
        except Exception:  # noqa: BLE001 - torch.load raises a better error later
            return item
        is_plain_tensor = (
            raw_bytes(described) is not None
            and TensorInfo.of(described) == chunk
            and described.storage_offset() == 0
            and elements.nbytes == chunk.nbytes
        )
        return replace(item, data_offset=elements.begin) if is_plain_tensor else item

    def check_frame(self, item: Item, chunk: TensorInfo, name: str) -> None:
        """Raise unless an item with a `data_offset` is such a tensor; reads a few hundred bytes."""
        if item.data_offset is None:
            return
        with contextlib.suppress(Exception):  # Not every dtype has such a frame.
            before, _ = tensor_frame(chunk.dtype, chunk.shape)
            found = os.pread(self._fd, len(before), item.offset)
            if item.data_offset == len(before) and found == before:
                return
        # Another release of torch may write another frame.
        if self.located(replace(item, data_offset=None), chunk) != item:
            msg = (
                f"{self.path}: {name!r} is no tensor of {chunk.dtype} and shape {chunk.shape}. "
                f"{DAMAGED}"
            )
            raise CheckpointError(msg)

    def check(self, item: Item, chunk: TensorInfo, name: str) -> None:
        """Raise unless an item is such a tensor; reads as much as that takes."""
        self.check_frame(item, chunk, name)
        if item.data_offset is None:
            self.load(item, chunk, name)

    def load(self, item: Item, chunk: TensorInfo, name: str) -> Tensor:
        """Return the tensor that torch.save wrote; execute nothing if it is something else."""
        content: Any = io.BytesIO(self.read(item, name))
        try:
            loaded = torch.load(content, weights_only=True, map_location="cpu")
        except Exception as error:
            msg = f"{self.path}: {name!r} cannot be read: {error}"
            raise CheckpointError(msg) from error
        if not isinstance(loaded, torch.Tensor):
            msg = f"{self.path}: {name!r}: expected a tensor, found {type(loaded).__name__}."
            raise CheckpointError(msg)
        if TensorInfo.of(loaded) != chunk:
            msg = (
                f"{self.path}: {name!r} has shape {tuple(loaded.shape)} and {loaded.dtype}, "
                f"expected {chunk.shape} and {chunk.dtype}. {DAMAGED}"
            )
            raise CheckpointError(msg)
        return loaded

    def read_box(
        self,
        item: Item,
        chunk: TensorInfo,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: Tensor,
        name: str,
    ) -> None:
        """Read a box of a saved chunk into a tensor of its shape; any dtype, device and strides.

        Cost: memory for the box's range of the chunk, unless elements can be read to their final
        place.
        """
        assert item.data_offset is not None
        strides = chunk.strides
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        numel = 0  # Elements from the box's first to its last.
        if 0 not in lengths:
            numel = 1 + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        begin = item.data_offset + start * chunk.dtype.itemsize
        memory = raw_bytes(target) if target.dtype == chunk.dtype else None
        if memory is not None and numel == target.numel():
            self.read_into(item, begin, memory, name)
            torch.autograd.graph.increment_version(target)
            return
        run = torch.empty(numel, dtype=chunk.dtype, device="cpu")
        self.read_into(item, begin, bytes_of(run), name)
        copy_from_scratch(target, run.as_strided(tuple(lengths), strides))


class Slice(io.RawIOBase):
    """A range of an open file, as a read-only file of its own."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        super().__init__()
        self._fd, self._offset, self._nbytes, self._position = fd, offset, nbytes, 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a place in the range."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits or is left."""
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        got = os.preadv(self._fd, [view], self._offset + self._position) if view else 0
        self._position += got
        return got
