"""Whole-model files read into sharded models and written from them, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError
from shardkit._sharded import ShardedTensor
from shardkit.checkpoint._full_files import Format, FullFile, FullWriter
from shardkit.checkpoint._names import plain_name
from shardkit.checkpoint._raw import copy_from_scratch, dtype_name
from shardkit.checkpoint._state import TensorInfo

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from shardkit._mesh import DeviceMesh

_BUFFER_NBYTES = 2**24
_EXTRA_STATE = "_extra_state"
_MAX_LISTED = 50


class LoadedNames(NamedTuple):
    """What `load_full` could not match.

    Attributes:
        missing_keys: Names of the model that the file lacks; with ``strict=True`` none.
        unexpected_keys: Names of the file that the model lacks; with ``strict=True`` none.
        meta_keys: Tensors of the model that are still on the meta device: missing ones and
            buffers that state dicts leave out (``persistent=False``), which only the code that made
            the model can compute.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    meta_keys: list[str]


@dataclass(slots=True)
class _Entry:
    """A tensor of the model with all its names."""

    names: list[str]
    tensor: Tensor


@torch.no_grad()
def load_full(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True
) -> LoadedNames:
    """Load a file of whole tensors into a model, sharded or not, on any device or on meta.

    Each rank reads the ranges that it owns, straight into its pieces, and converts to the dtype of
    the model's tensors. Parameters stay the objects that they are. Names are those of
    ``model.state_dict()``; of tied ones the file needs one. Hooks that rename what is loaded, as
    some modules have for old files, are not called.

    Args:
        path: What `FullFile` reads: a file of torch.save, of safetensors, or a Hugging Face
            directory. All ranks must see it.
        model: Where to. Parameters on meta get memory for this rank's pieces only.
        strict: Refuse missing and unexpected names.

    Raises:
        CheckpointError: Before anything is loaded, on all ranks alike: for all names that are
            missing, unexpected, or of another shape or kind of dtype.

    Cost: no collectives. Reads this rank's share of the file straight into the pieces; where dtype
    or device differ, through a buffer of 16 MiB. A tensor-parallel parameter is read whole.
    """
    file = FullFile(path)
    state = _state_of(model)
    entries = _by_identity(state)
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    missing = [e.names[0] for e in entries if not any(name in file.infos for name in e.names)]
    missing += [name for name in extra if name not in file.others]
    unexpected = [name for name in (*file.infos, *file.others) if name not in state]
    complaints = list(_misfits(entries, file))
    if strict:
        complaints += [f"missing in the file: {_described(n, state[n])}" for n in missing]
        complaints += [f"unexpected in the file: {_described(n, file)}" for n in unexpected]
    if complaints:
        raise _refused(path, complaints)
    loader = _Loader(file, _device_of(entries))
    for entry in entries:
        names = [name for name in entry.names if name in file.infos]
        if names:
            # The last name is what torch's load_state_dict would leave in a tied tensor.
            loader.fill(entry.tensor, names[-1])
    for name, module in model.named_modules():
        key = f"{plain_name(model, name)}.{_EXTRA_STATE}".removeprefix(".")
        if key in extra and key in file.others:
            module.set_extra_state(file.others[key])
    return LoadedNames(missing, unexpected, _on_meta(model))


def save_full(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    format: Format = "torch",  # noqa: A002 - the word for it
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
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

    Returns:
        `path`.

    Raises:
        CheckpointError: On all ranks: it cannot be written (with the reason), or the model is not
            sharded, or on several meshes.

    Cost: a broadcast per piece and 16 MiB within the writer's shard axis, in sum the file's bytes,
    and two small exchanges. Memory: 16 MiB; for tensor-parallel parameters one whole tensor.
    """
    state = _state_of(model)
    mesh = _mesh_of(state, path)
    tied = {name: entry.names[0] for entry in _by_identity(state) for name in entry.names[1:]}
    tensors = {name: v for name, v in state.items() if isinstance(v, Tensor)}
    others = {name: v for name, v in state.items() if not isinstance(v, Tensor)}
    infos = {n: TensorInfo(tuple(v.shape), _saved_dtype(v, dtype)) for n, v in tensors.items()}
    if others and (format == "safetensors" or max_shard_size is not None):
        msg = (
            f"the model has state that is no tensor ({', '.join(others)}), which {path} cannot "
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
    _agree(mesh, target, path)
    sender = _Sender(mesh.ranks[0])
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in tied:
                for part in sender.parts(tensor.detach(), infos[name].dtype):
                    target.append(name, part)
    target.close()
    _agree(mesh, target, path)
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


def _agree(mesh: DeviceMesh, target: _Target, path: object) -> None:
    """Raise on all ranks of the mesh if the writer failed. Cost: a small exchange per axis."""
    reason = None if target.error is None else f"{type(target.error).__name__}: {target.error}"
    for axis in range(mesh.ndim):
        reasons = mesh.backend.axis(axis).exchange(reason)
        reason = next((r for r in reasons if r is not None), None)
    if reason is not None:
        target.close()
        msg = f"rank {mesh.ranks[0]} could not write {path}: {reason}"
        raise CheckpointError(msg) from target.error


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
            self._buffers[device] = torch.empty(_BUFFER_NBYTES, dtype=torch.uint8, device=device)
        return self._buffers[device]


class _Loader:
    """Reads a file into tensors of a model.

    Straight into their memory; where dtype or device differ, through one buffer of 16 MiB. Memory
    taken and freed between pieces that stay would leave holes in the heap as large as the shard.

    Args:
        file: What is read.
        device: Where tensors on meta belong that are not sharded.
    """

    def __init__(self, file: FullFile, device: torch.device) -> None:
        self._file = file
        self._device = device
        self._buffer: Tensor | None = None

    def fill(self, target: Tensor, name: str) -> None:
        """Fill a tensor of the model, or this rank's piece of it."""
        if not isinstance(target, ShardedTensor):
            self._fill_whole(target, name)
            return
        spec = target.spec
        if spec.tensor_parallel is not None:
            whole = self._file.read(name, 0, target.numel()).view(target.shape)
            target.take_over(ShardedTensor(spec.slice_full(whole).to(target.dtype), spec))
        elif spec.holds_whole:
            whole = self._file.read(name, 0, target.numel()).view(target.shape)
            target.take_over(whole.to(target.dtype))
        elif target.is_meta:
            piece = torch.empty(spec.stop - spec.start, dtype=target.dtype, device=spec.device)
            self._fill_flat(piece, name, spec.start)
            target.adopt(piece)
        else:
            # The piece is a view of the shard, whose version tells who has gathered it before.
            self._fill_flat(target.to_local(), name, spec.start)

    def _fill_whole(self, target: Tensor, name: str) -> None:
        if target.is_meta:
            new = torch.empty(target.shape, dtype=target.dtype, device=self._device)
            self._fill_flat(new.view(-1), name, 0)
            if isinstance(target, nn.Parameter):
                new = nn.Parameter(new, requires_grad=target.requires_grad)
            torch.utils.swap_tensors(target, new)
        elif target.is_contiguous():
            self._fill_flat(target.detach().view(-1), name, 0)
        else:
            target.copy_(self._file.read(name, 0, target.numel()).view(target.shape))

    def _fill_flat(self, flat: Tensor, name: str, start: int) -> None:
        dtype = self._file.infos[name].dtype
        if flat.dtype == dtype and flat.device.type == "cpu":
            self._file.read_into(name, start, flat)
            # Reading wrote past torch's back.
            torch.autograd.graph.increment_version(flat)
            return
        if self._buffer is None:
            self._buffer = torch.empty(_BUFFER_NBYTES, dtype=torch.uint8)
        typed = self._buffer.view(dtype)
        for first in range(0, flat.numel(), typed.numel()):
            part = flat[first : first + typed.numel()]
            self._file.read_into(name, start + first, typed[: part.numel()])
            copy_from_scratch(part, typed[: part.numel()])


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict: the objects themselves, also sharded ones not shown now."""
    state = model.state_dict(keep_vars=True)
    return {plain_name(model, name): value for name, value in state.items()}


def _by_identity(state: dict[str, Any]) -> list[_Entry]:
    """Return the model's tensors, each once."""
    entries: dict[int, _Entry] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            entries.setdefault(id(value), _Entry([], value)).names.append(name)
    return list(entries.values())


def _misfits(entries: list[_Entry], file: FullFile) -> Iterator[str]:
    """Yield what the file has under the model's names but cannot be loaded."""
    for entry in entries:
        for name in entry.names:
            info = file.infos.get(name)
            if info is None:
                continue
            mine, found = _described(name, entry.tensor), f"{info.shape}, {dtype_name(info.dtype)}"
            if hasattr(entry.tensor, "redistribute"):
                yield f"{mine} is a DTensor that fully_shard did not take: shard it first"
            elif tuple(entry.tensor.shape) != info.shape:
                yield f"of another shape: {mine} in the model; in the file {found}"
            elif _kind(info.dtype) > _kind(entry.tensor.dtype):
                yield f"of another kind of dtype: {mine} in the model; in the file {found}"


def _kind(dtype: torch.dtype) -> int:
    """Order kinds of dtypes so that converting to a higher one loses nothing but precision."""
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


def _described(name: str, value: Any) -> str:
    info = value.infos.get(name) if isinstance(value, FullFile) else value
    if info is None or not hasattr(info, "dtype"):
        return f"{name!r}, not a tensor"
    return f"{name!r} of shape {tuple(info.shape)}, {dtype_name(info.dtype)}"


def _refused(path: object, complaints: list[str]) -> CheckpointError:
    shown = complaints[:_MAX_LISTED]
    if len(complaints) > len(shown):
        shown.append(f"and {len(complaints) - len(shown)} more")
    lines = "\n  ".join(shown)
    return CheckpointError(
        f"{path} does not fit the model, nothing was loaded:\n  {lines}\n"
        f"Give the file of this model; strict=False leaves out what is missing or unexpected."
    )


def _device_of(entries: list[_Entry]) -> torch.device:
    """Return where tensors on meta belong that are not sharded."""
    for entry in entries:
        if isinstance(entry.tensor, ShardedTensor):
            return entry.tensor.spec.device
    return torch.device("cpu")


def _on_meta(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]


def _saved_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _mesh_of(state: dict[str, Any], path: object) -> DeviceMesh:
    """Return the mesh of all ranks that hold the model.

    Raises:
        CheckpointError: There is none, several, or the model is on meta.
    """
    on_meta = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if on_meta:
        msg = f"{on_meta[0]!r} is on the meta device and has no values to write to {path}."
        raise CheckpointError(msg)
    meshes = [v.spec.mesh for v in state.values() if isinstance(v, ShardedTensor)]
    if not meshes:
        msg = (
            f"the model for {path} has no sharded parameters. Save a plain one by torch.save or "
            f"safetensors; a sharded one after fully_shard."
        )
        raise CheckpointError(msg)
    # Tensor-parallel parameters are on more ranks than those beside them.
    largest: DeviceMesh = max(meshes, key=lambda mesh: len(mesh.ranks))
    other = next((m for m in meshes if not set(m.ranks) <= set(largest.ranks)), None)
    if other is not None:
        msg = (
            f"the model for {path} lies on several meshes, of ranks {largest.describe_ranks()} and "
            f"{other.describe_ranks()}. Save its parts one by one."
        )
        raise CheckpointError(msg)
    return largest
