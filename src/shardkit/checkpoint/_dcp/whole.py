"""Checkpoint directories as whole tensors, without processes."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp.reader import CheckpointReader
from shardkit.checkpoint._files.bytes_io import TensorInfo, read_new

if TYPE_CHECKING:
    import os

    from torch import Tensor


class DcpFiles:
    """A checkpoint directory, shardkit's or another of torch.distributed.checkpoint's.

    A `TensorSource`. What is read is verified by the checksums of the manifest, if there is one.

    Args:
        path: The directory.

    Attributes:
        infos: Shape and dtype of every tensor, by its key in the checkpoint.
        paths: Where each entry stood in the state dict that was saved, e.g. ``("model", "weight")``
            for ``"model.weight"``.
        others: Keys of entries that are no tensors.
        reader: Knows the files.

    Raises:
        CheckpointError: It is incomplete, damaged or no checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.reader = CheckpointReader(path)
        metadata = self.reader.read_metadata()
        self._entries = metadata.state_dict_metadata
        self.tied: dict[str, str] = {}
        self.infos = {
            key: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for key, entry in self._entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.others = [k for k, e in self._entries.items() if isinstance(e, BytesStorageMetadata)]
        written = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        self.paths: dict[str, tuple[str | int, ...]] = {
            key: tuple(written.get(key, (key,))) for key in self._entries
        }

    def chunks(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
        """Return offsets, sizes and file of each chunk that a tensor was saved in."""
        entry = self._entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        found = []
        for chunk in entry.chunks:
            where = self.reader.storage_data.get(MetadataIndex(key, chunk.offsets))
            file = where.relative_path if where is not None else "?"
            found.append((tuple(chunk.offsets), tuple(chunk.sizes), file))
        return found

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `TensorSource.read`; of a tensor's part the whole is read."""
        return read_new(self, name, start, stop)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorSource.read_into`; of a tensor's part the whole is read.

        Raises:
            CheckpointError: It is damaged, or not all of it was saved.
        """
        info, entry = self.infos[name], self._entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        if out.numel() < math.prod(info.shape):
            out.copy_(read_new(self, name, 0, math.prod(info.shape))[start : start + out.numel()])
            return
        items = []
        for chunk in entry.chunks:
            index = MetadataIndex(name, chunk.offsets)
            zeros = torch.Size([0] * len(chunk.sizes))
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=index,
                    dest_offsets=chunk.offsets,
                    storage_index=index,
                    storage_offsets=zeros,
                    lengths=chunk.sizes,
                )
            )
        self.reader.read_data(LoadPlan(items), _IntoOne(out.view(info.shape)))

    def read_other(self, key: str) -> Any:
        """Return an entry that is no tensor: plain values only, nothing is executed.

        Raises:
            CheckpointError: It holds more than that.
        """
        nothing = torch.Size([])
        index = MetadataIndex(key)
        item = ReadItem(
            type=LoadItemType.BYTE_IO,
            dest_index=index,
            dest_offsets=nothing,
            storage_index=index,
            storage_offsets=nothing,
            lengths=nothing,
        )
        planner = _IntoOne(torch.empty(0))
        self.reader.read_data(LoadPlan([item]), planner)
        try:
            return torch.load(planner.content, weights_only=True, map_location="cpu")
        except Exception as error:
            msg = f"{self.path}: {key!r} holds more than plain values, and is not read: {error}"
            raise CheckpointError(msg) from error


class _IntoOne(DefaultLoadPlanner):
    """Puts every chunk that is read into one tensor of the global shape."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self._whole = whole
        self.content = io.BytesIO()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an entry that is no tensor."""
        del read_item
        self.content = value

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return where a chunk belongs."""
        part = self._whole
        bounds = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(bounds):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is where it belongs."""
