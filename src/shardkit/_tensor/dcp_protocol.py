"""The protocol of torch's distributed checkpoints (DCP) for sharded tensors.

``dcp.save`` and ``dcp.load`` take any tensor that says which boxes of the whole this process
writes or needs (``__create_write_items__``, ``__create_chunk_list__``) and where they lie in its
memory (``__get_tensor_shard__``). In a file a sharded tensor looks like one of FSDP2: chunks of a
tensor of the global shape. So checkpoints can be exchanged, and loaded by any number of ranks.

``torch.distributed.checkpoint`` takes long to import, so it is imported when it calls this code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shardkit._compat import torch_checkpoints
from shardkit._errors import ShardedTensorError
from shardkit._layout import Box, boxes_of_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardkit._tensor.spec import ShardSpec


def boxes_of_piece(spec: ShardSpec) -> list[Box]:
    """Return the boxes of the whole tensor that make up this rank's piece, maybe none."""
    spec.check_saved()
    if spec.tensor_parallel is not None:
        boxes: list[Box] = spec.tensor_parallel.part.boxes(spec.start, spec.stop)
        return boxes
    return boxes_of_range(spec.layout.shapes[spec.index], spec.start, spec.stop)


def boxes_to_write(spec: ShardSpec) -> list[Box]:
    """Return the boxes that this rank offers to write; ranks with equal pieces offer the same.

    A tensor without elements also has one box, or the checkpoint would lack it.
    """
    if math.prod(spec.shape) == 0:
        return [Box((0,) * len(spec.shape), tuple(spec.shape), 0)]
    return boxes_of_piece(spec) if spec.is_written_here else []


def create_write_items(
    fqn: str, piece: Tensor, shape: Sequence[int], boxes: Sequence[Box], name: str
) -> list[WriteItem]:
    """Return the items that this rank has to write of a tensor, one per box.

    If several ranks offer the same item (the replicate axis), DCP keeps one of them.

    Raises:
        ShardedTensorError: The tensor is on the meta device, so there is nothing to write.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if piece.is_meta:
        msg = (
            f"cannot save sharded {name!r} as {fqn!r}: it is on the meta device and has no values. "
            f"Call to_empty() on the model and give it values, or load some."
        )
        raise ShardedTensorError(msg)
    whole = piece.detach().new_empty(tuple(shape), device="meta")  # Strides are those of the whole.
    properties = TensorProperties.create_from_tensor(whole)
    return [
        WriteItem(
            index=MetadataIndex(fqn, box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk_of(box), properties=properties, size=torch.Size(shape)
            ),
        )
        for box in boxes
    ]


def create_chunk_list(spec: ShardSpec, piece: Tensor) -> list[ChunkStorageMetadata]:
    """Return the boxes that this rank needs to load; only a load calls this.

    So it raises the version counter of the shard: parameters gathered from it will be stale. Writes
    to the result of `get_tensor_shard` do not raise the counter.
    """
    torch.autograd.graph.increment_version(piece)
    return [_chunk_of(box) for box in boxes_of_piece(spec)]


def get_tensor_shard(
    index: MetadataIndex, piece: Tensor, shape: Sequence[int], boxes: Sequence[Box], name: str
) -> Tensor:
    """Return the memory of one box, found by its offsets, in its shape.

    On the host the result has its own storage over the same memory: DCP copies a tensor that does
    not fill its storage, into new pages.

    Raises:
        ShardedTensorError: This rank has no box at these offsets.
    """
    piece = piece.detach()
    if piece.numel() == 0 and math.prod(shape) == 0:
        return piece.view(tuple(shape))
    wanted = None if index.offset is None else tuple(index.offset)
    for box in boxes:
        if box.offsets == wanted:
            view = piece[box.start : box.stop].view(box.sizes)
            # From other devices DCP copies to the host anyway.
            return torch.utils.dlpack.from_dlpack(view) if view.is_cpu else view
    msg = (
        f"{index.fqn!r} is asked for at offsets {wanted}, but this rank's shard of sharded "
        f"{name!r}, shape {tuple(shape)}, has boxes at {[box.offsets for box in boxes]} only. Plan "
        f"and carry out a save or load with the same state dict, sharded in the same way."
    )
    raise ShardedTensorError(msg)


def _chunk_of(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


torch_checkpoints.write_boxes_apart()
torch_checkpoints.refuse_broadcasting_reader()
