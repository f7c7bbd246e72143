"""Files of whole tensors read into sharded models, tensor by tensor."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError, listed_lines
from shardkit._module.rebuilt import rebuild_buffers
from shardkit._progress import Meter
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import note_written
from shardkit.checkpoint._agreement import FirstRank, rank_of
from shardkit.checkpoint._files import bytes_io
from shardkit.checkpoint._files.bytes_io import Source, copy_from_scratch, dtype_name, kind_of
from shardkit.checkpoint._files.full import FullFile
from shardkit.checkpoint._files.in_memory import StateInMemory
from shardkit.checkpoint._state.model_tensors import (
    by_identity,
    device_of,
    give_memory,
    mesh_of,
    set_extra_state,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardkit._mesh import DeviceMesh
    from shardkit._progress import Progress
    from shardkit.checkpoint._files.bytes_io import TensorInfo
    from shardkit.checkpoint._state.model_tensors import NamedTensor

_NUM_COMPARED = 256


class LoadedNames(NamedTuple):
    """What `load_full` could not match.

    Attributes:
        missing_keys: Names of the model that the file lacks; with ``strict=True`` none.
        unexpected_keys: Names of the file that the model lacks; with ``strict=True`` none.
        meta_keys: Tensors of the model that are still on the meta device: missing ones, and those
            buffers that state dicts leave out (``persistent=False``) and no module can compute.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    meta_keys: list[str]


@torch.no_grad()
def load_full(
    path: str | os.PathLike[str] | Mapping[str, Any] | None,
    model: nn.Module,
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
    progress: Progress = None,
) -> LoadedNames:
    """Load whole tensors, from a file or memory, into a model, sharded or not, or on meta.

    Each rank reads the ranges that it owns, straight into its pieces, and converts to the dtype of
    the model's tensors. Parameters stay the objects that they are. Names are those of
    ``model.state_dict()``; of tied ones the file needs one. Hooks that rename what is loaded, as
    some modules have for old files, are not called, nor what transformers does for models that it
    saves under other names (``save_pretrained(..., save_original_format=False)`` saves theirs).

    Buffers on meta that state dicts leave out (``persistent=False``: tables of positions) are
    computed by their modules, as `materialize` has it done; what was loaded stays as it is.

    Args:
        path: File or directory that `FullFile` reads: a file of torch.save, of safetensors, or a
            Hugging Face directory; or a state dict of plain tensors, on any device. All ranks must
            see or have it, unless `broadcast_from_rank0`: then the others may pass None, {} or
            anything.
        model: Module to load into. Parameters on meta get memory for this rank's pieces only.
        strict: Error if names are missing or unexpected.
        broadcast_from_rank0: Mode in which only the first rank of the mesh reads, and sends to the
            others part after part. These take memory for their pieces and one part.
        progress: Way to show progress: by default a bar on rank 0's terminal, if it takes longer
            than a second and rich is installed; False: none; or a function of the bytes that this
            rank has done and will.

    Raises:
        CheckpointError: Before anything is loaded, on all ranks alike: for all names that are
            missing, unexpected, or of another shape or kind of dtype.

    Cost: no collectives. Reads this rank's share of the file straight into the pieces; where dtype
    or device differ, through a buffer of 16 MiB. A tensor-parallel parameter is read whole. With
    `broadcast_from_rank0` a broadcast of every 16 MiB of each tensor over each axis of the mesh.
    """
    state = state_of(model)
    entries = by_identity(state)
    what = str(path) if isinstance(path, (str, os.PathLike)) else "the state dict"
    mesh = mesh_of(state, what, allow_meta=True) if broadcast_from_rank0 else None
    file = _open(path) if mesh is None else _FirstRanksFile(path, what, mesh)
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    missing = [e.names[0] for e in entries if not any(name in file.infos for name in e.names)]
    missing += [name for name in extra if name not in file.others]
    unexpected = [name for name in (*file.infos, *file.others) if name not in state]
    complaints = list(_misfits(entries, file.infos))
    if strict:
        complaints += [f"missing in the file: {_described(n, state[n])}" for n in missing]
        complaints += [
            f"unexpected in the file: {_described(n, file.infos.get(n))}" for n in unexpected
        ]
    if complaints:
        raise _refused(what, complaints)
    with Meter(progress, f"loading {Path(what).name}", rank=rank_of(None)) as meter:
        _fill_all(file, entries, meter)
    if isinstance(file, _FirstRanksFile):
        file.first.raise_error()
    set_extra_state(model, {name: file.read_other(name) for name in extra if name in file.others})
    saved = {id(tensor) for tensor in state.values()}
    rebuild_buffers(model, [buffer for buffer in model.buffers() if id(buffer) not in saved])
    named = [*model.named_parameters(), *model.named_buffers()]
    return LoadedNames(missing, unexpected, [name for name, tensor in named if tensor.is_meta])


def _open(path: str | os.PathLike[str] | Mapping[str, Any] | None) -> Source:
    return FullFile(path) if isinstance(path, (str, os.PathLike)) else StateInMemory(path)


class _FirstRanksFile(Source):
    """What only the first rank of a mesh has; all get all of it, part after part.

    Args:
        path: File, or state dict, on the first rank. Not looked at on others.
        what: Name in errors.
        mesh: Mesh whose ranks all make this object, and read the same tensors in the same order.

    Raises:
        CheckpointError: On all ranks, if the first one cannot open it.
    """

    def __init__(self, path: Any, what: str, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._file: Source | None = None
        self.first = FirstRank(mesh, f"could not read {what}")
        if self.first.is_this:
            with self.first.trying():
                self._file = _open(path)
        self.first.raise_error()
        found: Any = self._file and (self._file.infos, self._file.others)
        for axis in range(mesh.ndim):
            found = mesh.backend.axis(axis).exchange(found)[0]
        self.infos, self.others = found
        self._parts = torch.empty(
            bytes_io.PART_NBYTES, dtype=torch.uint8, device=mesh.backend.device
        )

    def copy_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on. Collective: all ranks get all parts of the tensor."""
        info, stop = self.infos[name], start + out.numel()
        numel, room = math.prod(info.shape), self._parts.view(info.dtype)
        for begin in range(0, numel, room.numel()):
            part = room[: min(room.numel(), numel - begin)]
            if self._file is not None and self.first.error is None:
                with self.first.trying():
                    part.copy_(self._file.read(name, begin, begin + part.numel()))
            for axis in range(self._mesh.ndim):
                self._mesh.backend.axis(axis).broadcast(part.view(torch.uint8), src=0)
            low, high = max(begin, start), min(begin + part.numel(), stop)
            if low < high:
                copy_from_scratch(out[low - start : high - start], part[low - begin : high - begin])


def _fill_all(source: Source, entries: list[NamedTensor], meter: Meter) -> None:
    """Fill those tensors of the model that the source has under one of their names."""
    infos, device = source.infos, device_of(entry.tensor for entry in entries)
    wanted = [(e.tensor, [name for name in e.names if name in infos]) for e in entries]
    # The last name is what torch's load_state_dict would leave in a tied tensor.
    jobs = [
        (tensor, names[-1], _nbytes_read(tensor, infos[names[-1]]))
        for tensor, names in wanted
        if names
    ]
    meter.expect(sum(nbytes for *_, nbytes in jobs))
    for tensor, name, nbytes in jobs:
        _fill(source, name, tensor, device)
        meter.add(nbytes)
    for tensor, name, _ in jobs:  # Pieces share memory, and so the version that a note is for.
        if isinstance(tensor, ShardedTensor):
            note_written(tensor, functools.partial(_first_elements, source, name))


def _first_elements(source: Source, name: str) -> list[Tensor]:
    """Return what ranks compare of a tensor that they have loaded."""
    if isinstance(source, _FirstRanksFile):
        return [torch.zeros(1)]  # All have got the same.
    return [source.read(name, 0, min(math.prod(source.infos[name].shape), _NUM_COMPARED))]


def _nbytes_read(target: Tensor, info: TensorInfo) -> int:
    numel = target.numel()
    if isinstance(target, ShardedTensor) and target.spec.tensor_parallel is None:
        numel = target.spec.stop - target.spec.start
    return numel * info.dtype.itemsize


def _fill(source: Source, name: str, target: Tensor, device: torch.device) -> None:
    """Fill a tensor of the model, or this rank's piece of it.

    Args:
        source: Source to read.
        name: Name of the tensor in it.
        target: Tensor of the model.
        device: Device of tensors on meta that are not sharded.
    """
    if not isinstance(target, ShardedTensor):
        if target.is_meta:
            new = torch.empty(target.shape, dtype=target.dtype, device=device)
            source.copy_into(name, 0, new.view(-1))
            give_memory(target, new)
        elif target.is_contiguous():
            source.copy_into(name, 0, target.detach().view(-1))
        else:
            target.copy_(_whole(source, name))
        return
    spec = target.spec
    if spec.tensor_parallel is not None:
        cut = spec.slice_full(_whole(source, name))
        target.copy_values(ShardedTensor(cut.to(target.dtype), spec))
    elif spec.is_traced:
        target.copy_values(_whole(source, name).to(target.dtype))
    elif target.is_meta:
        piece = torch.empty(spec.stop - spec.start, dtype=target.dtype, device=spec.device)
        source.copy_into(name, spec.start, piece)
        target.replace_piece(piece)
    else:
        # The piece is a view of the shard, whose version tells who has gathered it before.
        source.copy_into(name, spec.start, target.to_local())


def _whole(source: Source, name: str) -> Tensor:
    info = source.infos[name]
    whole = torch.empty(info.shape, dtype=info.dtype)
    source.copy_into(name, 0, whole.view(-1))
    return whole


def _misfits(entries: list[NamedTensor], infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield what the file has under the model's names but cannot be loaded."""
    for entry in entries:
        for name in entry.names:
            info = infos.get(name)
            if info is None:
                continue
            mine, found = _described(name, entry.tensor), f"{info.shape}, {dtype_name(info.dtype)}"
            is_sharded = isinstance(entry.tensor, ShardedTensor)
            if hasattr(entry.tensor, "redistribute") and not is_sharded:
                yield f"{mine} is a DTensor that fully_shard did not take: shard it first"
            elif tuple(entry.tensor.shape) != info.shape:
                yield f"of another shape: {mine} in the model; in the file {found}"
            elif kind_of(info.dtype) > kind_of(entry.tensor.dtype):
                yield f"of another kind of dtype: {mine} in the model; in the file {found}"


def _described(name: str, value: Any) -> str:
    if not hasattr(value, "dtype"):
        return f"{name!r}, not a tensor"
    return f"{name!r} of shape {tuple(value.shape)}, {dtype_name(value.dtype)}"


def _refused(path: object, complaints: list[str]) -> CheckpointError:
    lines = "\n  ".join(listed_lines(complaints))
    return CheckpointError(
        f"{path} does not fit the model, nothing was loaded:\n  {lines}\n"
        f"Give the file of this model; strict=False leaves out what is missing or unexpected."
    )
