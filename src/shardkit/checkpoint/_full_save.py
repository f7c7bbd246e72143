"""Sharded models written as whole tensors, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError, listed
from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._agreement import raise_on_all
from shardkit.checkpoint._files import bytes_io
from shardkit.checkpoint._files.bytes_io import TensorInfo, info_nbytes
from shardkit.checkpoint._files.full import Format, FullWriter
from shardkit.checkpoint._state.model_tensors import by_identity, mesh_of, state_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from shardkit._mesh import DeviceMesh
    from shardkit._progress import Progress


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
        model: Sharded by `fully_shard`.
        format: ``"torch"``: what torch.load reads, also with ``mmap=True``; ``"safetensors"``: what
            Hugging Face's libraries read. Of tied names it keeps the first, as they do.
        max_shard_size: Bytes of a file at most, e.g. ``"5GB"``; then `path` is a directory.
        dtype: Of floating-point tensors in the file; None: their own.
        progress: As in `load_full`.

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
    infos = {n: TensorInfo(tuple(v.shape), _saved_dtype(v, dtype)) for n, v in tensors.items()}
    if others and (format == "safetensors" or max_shard_size is not None):
        msg = (
            f"the model has state that is no tensor ({listed(others, str)}), which {path} cannot "
            f"hold: use format='torch' without max_shard_size."
        )
        raise CheckpointError(msg)

    def arrange(by_name: dict[str, Tensor]) -> Any:
        return {name: by_name.get(name, others.get(name)) for name in state}

    target = _Target(is_writer=mesh.rank == mesh.ranks[0])
    target.open(
        lambda: FullWriter(
            path, infos, format=format, max_shard_size=max_shard_size, tied=tied, arrange=arrange
        )
    )
    _finish(mesh, target, path)
    sender = _Sender(mesh.ranks[0])
    with torch.no_grad(), Meter(progress, f"saving {Path(path).name}", rank=mesh.rank) as meter:
        kept = [name for name in tensors if name not in tied]
        meter.expect(sum(info_nbytes(infos[name]) for name in kept))
        for name in kept:
            for part in sender.parts(tensors[name].detach(), infos[name].dtype):
                target.append(name, part)
                meter.add(part.nbytes)
    target.close()
    _finish(mesh, target, path)
    return Path(path)


class _Target:
    """The writer, on the rank that has it. Its first error is kept: other ranks must not wait."""

    def __init__(self, *, is_writer: bool) -> None:
        self.is_writer = is_writer
        self.error: Exception | None = None
        self._writer: FullWriter | None = None

    def open(self, make: Callable[[], FullWriter]) -> None:
        """Open the file where this rank writes."""
        if self.is_writer:
            try:
                self._writer = make().__enter__()
            except Exception as error:  # noqa: BLE001 - raised on all ranks by `_agree`
                self.error = error

    def append(self, name: str, flat: Tensor) -> None:
        """Write, unless that has failed before."""
        if self._writer is not None:
            try:
                self._writer.append(name, flat)
            except Exception as error:  # noqa: BLE001
                self.error = error
                self.close()

    def close(self) -> None:
        """Commit what was written, or remove it after an error."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        kind = None if self.error is None else type(self.error)
        try:
            writer.__exit__(kind, self.error, None)
        except Exception as error:  # noqa: BLE001
            self.error = error


def _finish(mesh: DeviceMesh, target: _Target, path: object) -> None:
    """Raise on all ranks of the mesh if the writer failed, and remove what it wrote."""
    try:
        raise_on_all(mesh, target.error, f"could not write {path}")
    except CheckpointError:
        target.close()
        raise


class _Sender:
    """Brings tensors of the model, part after part, to the rank that writes.

    Args:
        writer: Its global rank.
    """

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._buffers: dict[torch.device, Tensor] = {}

    def parts(self, tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield the flattened tensor in order, each part good until the next. Collective.

        Ranks whose shard axis does not lead to the writer hold the same as others, and yield none.
        """
        if not isinstance(tensor, ShardedTensor):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield whole.reshape(-1).to(dtype)
            return
        spec = tensor.spec
        if spec.tensor_parallel is not None:
            yield tensor.full_tensor().reshape(-1).to(dtype)
            return
        size = spec.axis.size
        first = spec.mesh.ranks.index(spec.mesh.rank) // size * size
        if self._writer not in spec.mesh.ranks[first : first + size]:
            return
        room = self._buffer(spec.device).view(dtype)
        for owner in spec.layout.owners(spec.index):
            start, stop = spec.layout.owned_range(spec.index, owner)
            for begin in range(0, stop - start, room.numel()):
                part = room[: min(room.numel(), stop - start - begin)]
                if owner == spec.axis.rank:
                    part.copy_(tensor.to_local()[begin : begin + part.numel()])
                # As bytes: not every backend sends every dtype.
                spec.axis.broadcast(part.view(torch.uint8), src=owner)
                yield part

    def _buffer(self, device: torch.device) -> Tensor:
        if device not in self._buffers:
            self._buffers[device] = torch.empty(
                bytes_io.PART_NBYTES, dtype=torch.uint8, device=device
            )
        return self._buffers[device]


def _saved_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
