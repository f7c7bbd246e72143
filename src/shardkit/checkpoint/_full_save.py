"""Sharded models written as whole tensors, tensor by tensor."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError, listed
from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._agreement import FirstRank
from shardkit.checkpoint._files import bytes_io
from shardkit.checkpoint._files.bytes_io import TensorInfo, converted, info_nbytes
from shardkit.checkpoint._files.full import Format, FullWriter
from shardkit.checkpoint._state.model_tensors import by_identity, mesh_of, state_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from shardkit._progress import Progress


@torch.no_grad()
def save_full(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    format: Format = "torch",  # noqa: A002 - the word for it
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = None,
) -> Path:
    """Write a sharded model as whole tensors, as ``model.state_dict()`` of a plain one is saved.

    Call it on all ranks; the first rank of the mesh writes. What it writes appears under its name
    when it is complete and on the disk.

    Args:
        path: A file, which is replaced; or a directory for several files and for safetensors,
            see `FullWriter`.
        model: Module sharded by `fully_shard`.
        format: ``"torch"``: what torch.load reads, also with ``mmap=True``; ``"safetensors"``: what
            Hugging Face's libraries read. Of tied names it keeps the first, as they do.
        max_shard_size: Bytes of a file at most, e.g. ``"5GB"``; then `path` is a directory.
        dtype: Dtype of floating-point tensors in the file; None: their own.
        progress: Same as in `load_full`.

    Returns:
        `path`.

    Raises:
        CheckpointError: On all ranks: it cannot be written (with the reason), or the model is not
            sharded, or on several meshes.

    Cost: a broadcast per piece and 16 MiB within the writer's shard axis, in sum the file's bytes,
    and two small exchanges. Memory: 16 MiB; for tensor-parallel parameters one whole tensor.
    """
    bytes_io.check_saved_dtype(dtype)
    state = state_of(model)
    mesh = mesh_of(state, path)
    tied = {name: entry.names[0] for entry in by_identity(state) for name in entry.names[1:]}
    tensors = {name: v for name, v in state.items() if isinstance(v, Tensor)}
    for value in tensors.values():
        if isinstance(value, ShardedTensor):
            value.spec.check_saved()
    others = {name: v for name, v in state.items() if not isinstance(v, Tensor)}
    infos = {n: converted(TensorInfo(tuple(v.shape), v.dtype), dtype) for n, v in tensors.items()}
    if others and (format == "safetensors" or max_shard_size is not None):
        msg = (
            f"the model has state that is no tensor ({listed(others, str)}), which {path} cannot "
            f"hold: use format='torch' without max_shard_size."
        )
        raise CheckpointError(msg)

    def arrange(by_name: dict[str, Tensor]) -> Any:
        return {name: by_name.get(name, others.get(name)) for name in state}

    first = FirstRank(mesh, f"could not write {path}")
    writer: FullWriter | None = None
    with contextlib.ExitStack() as stack:
        if first.is_this:
            with first.trying():
                writer = stack.enter_context(
                    FullWriter(
                        path,
                        infos,
                        format=format,
                        max_shard_size=max_shard_size,
                        tied=tied,
                        arrange=arrange,
                    )
                )
        first.raise_error()
        meter = stack.enter_context(Meter(progress, f"saving {Path(path).name}", rank=mesh.rank))
        kept = [name for name in tensors if name not in tied]
        meter.expect(sum(info_nbytes(infos[name]) for name in kept))
        rooms: dict[torch.device, Tensor] = {}
        for name in kept:
            tensor = tensors[name].detach()
            for part in _parts(tensor, infos[name].dtype, mesh.ranks[0], rooms):
                if writer is not None and first.error is None:
                    with first.trying():
                        writer.append(name, part)
                meter.add(part.nbytes)
        if first.error is None:
            with first.trying():
                stack.close()  # Gives the file its name.
        first.raise_error()
    return Path(path)


def _parts(
    tensor: Tensor, dtype: torch.dtype, writer: int, rooms: dict[torch.device, Tensor]
) -> Iterator[Tensor]:
    """Yield a flattened tensor in order, each part good until the next. Collective.

    Ranks whose shard axis does not lead to the writer hold the same as others, and yield none.

    Args:
        tensor: Tensor of the model.
        dtype: Dtype to convert it to.
        writer: Global rank that needs all of it.
        rooms: Memory for parts by device, kept from one tensor to the next.
    """
    if not isinstance(tensor, ShardedTensor) or tensor.spec.tensor_parallel is not None:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        yield whole.reshape(-1).to(dtype)
        return
    spec = tensor.spec
    size = spec.axis.size
    first = spec.mesh.ranks.index(spec.mesh.rank) // size * size
    if writer not in spec.mesh.ranks[first : first + size]:
        return
    if spec.device not in rooms:
        rooms[spec.device] = torch.empty(
            bytes_io.PART_NBYTES, dtype=torch.uint8, device=spec.device
        )
    room = rooms[spec.device].view(dtype)
    for owner in spec.layout.owners(spec.index):
        start, stop = spec.layout.owned_range(spec.index, owner)
        for begin in range(0, stop - start, room.numel()):
            part = room[: min(room.numel(), stop - start - begin)]
            if owner == spec.axis.rank:
                part.copy_(tensor.to_local()[begin : begin + part.numel()])
            # As bytes: not every backend sends every dtype.
            spec.axis.broadcast(part.view(torch.uint8), src=owner)
            yield part
