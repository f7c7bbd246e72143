"""Files of whole tensors read into sharded models, tensor by tensor."""

from __future__ import annotations

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
from shardkit.checkpoint._agreement import raise_on_all, rank_of
from shardkit.checkpoint._files import bytes_io
from shardkit.checkpoint._files.bytes_io import copy_from_scratch, dtype_name, kind_of
from shardkit.checkpoint._files.full import FullFile
from shardkit.checkpoint._files.in_memory import StateInMemory
from shardkit.checkpoint._state.model_tensors import by_identity, mesh_of, state_of
from shardkit.checkpoint._state.names import EXTRA_STATE, plain_name

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
        path: What `FullFile` reads: a file of torch.save, of safetensors, or a Hugging Face
            directory; or a state dict of plain tensors, on any device. All ranks must see or have
            it, unless `broadcast_from_rank0`: then the others may pass None, {} or anything.
        model: Where to. Parameters on meta get memory for this rank's pieces only.
        strict: Refuse missing and unexpected names.
        broadcast_from_rank0: Only the first rank of the mesh reads, and sends to the others part
            after part. These take memory for their pieces and one part.
        progress: By default a bar on rank 0's terminal, if it takes longer than a second and rich
            is installed; False: none; or a function of the bytes that this rank has done and will.

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
        loader = _Loader(file, _device_of(entries), meter)
        loader.fill_all(entries)
    if isinstance(file, _FirstRanksFile):
        file.raise_errors()
    for name, module in model.named_modules():
        key = f"{plain_name(model, name)}.{EXTRA_STATE}".removeprefix(".")
        if key in extra and key in file.others:
            module.set_extra_state(file.others[key])
    saved = {id(tensor) for tensor in state.values()}
    rebuild_buffers(model, [buffer for buffer in model.buffers() if id(buffer) not in saved])
    return LoadedNames(missing, unexpected, _on_meta(model))


def _open(path: str | os.PathLike[str] | Mapping[str, Any] | None) -> FullFile | StateInMemory:
    return FullFile(path) if isinstance(path, (str, os.PathLike)) else StateInMemory(path)


class _FirstRanksFile:
    """What only the first rank of a mesh has; all get all of it, part after part.

    Args:
        path: On the first rank: a file, or a state dict. Not looked at on others.
        what: Its name in errors.
        mesh: All of its ranks make this object, and read the same tensors in the same order.

    Raises:
        CheckpointError: On all ranks, if the first one cannot open it.
    """

    def __init__(self, path: Any, what: str, mesh: DeviceMesh) -> None:
        self._what = what
        self._mesh = mesh
        self._file: FullFile | StateInMemory | None = None
        self._error: Exception | None = None
        if mesh.rank == mesh.ranks[0]:
            try:
                self._file = _open(path)
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                self._error = error
        self.raise_errors()
        found: Any = self._file and (self._file.infos, self._file.others)
        for axis in range(mesh.ndim):
            found = mesh.backend.axis(axis).exchange(found)[0]
        self.infos: dict[str, TensorInfo] = found[0]
        self.others: dict[str, Any] = found[1]
        self._room = torch.empty(
            bytes_io.PART_NBYTES, dtype=torch.uint8, device=mesh.backend.device
        )

    def parts(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a flattened tensor's parts with where they begin. Collective."""
        info = self.infos[name]
        numel, room = math.prod(info.shape), self._room.view(info.dtype)
        for start in range(0, numel, room.numel()):
            part = room[: min(room.numel(), numel - start)]
            if self._file is not None and self._error is None:
                try:
                    part.copy_(self._file.read(name, start, start + part.numel()))
                except Exception as error:  # noqa: BLE001 - others wait for what comes
                    self._error = error
            for axis in range(self._mesh.ndim):
                self._mesh.backend.axis(axis).broadcast(part.view(torch.uint8), src=0)
            yield start, part

    def raise_errors(self) -> None:
        """Raise on all ranks what the first one met. Collective."""
        raise_on_all(self._mesh, self._error, f"could not read {self._what}")


class _Loader:
    """Reads a file into tensors of a model.

    Straight into their memory; where dtype or device differ, through one buffer of 16 MiB. Memory
    taken and freed between pieces that stay would leave holes in the heap as large as the shard.

    Args:
        file: What is read.
        device: Where tensors on meta belong that are not sharded.
    """

    def __init__(
        self, file: FullFile | StateInMemory | _FirstRanksFile, device: torch.device, meter: Meter
    ) -> None:
        self._file = file
        self._device = device
        self._meter = meter
        self._buffer: Tensor | None = None

    def fill_all(self, entries: list[NamedTensor]) -> None:
        """Fill those tensors of the model that the file has under one of their names."""
        infos = self._file.infos
        wanted = [(e.tensor, [name for name in e.names if name in infos]) for e in entries]
        # The last name is what torch's load_state_dict would leave in a tied tensor.
        jobs = [(tensor, names[-1]) for tensor, names in wanted if names]
        for tensor, name in jobs:
            numel = tensor.numel()
            if isinstance(tensor, ShardedTensor) and tensor.spec.tensor_parallel is None:
                numel = tensor.spec.stop - tensor.spec.start
            self._meter.expect(numel * infos[name].dtype.itemsize)
        for tensor, name in jobs:
            self.fill(tensor, name)
        for tensor, name in jobs:  # Pieces share memory, and so the version that a note is for.
            if isinstance(tensor, ShardedTensor):
                self._note(tensor, name)

    def _note(self, target: ShardedTensor, name: str) -> None:
        """Have ranks compare what they loaded, by the first elements of the whole."""
        if isinstance(self._file, _FirstRanksFile):
            sample = torch.zeros(1)  # All have the same.
        else:
            numel = math.prod(self._file.infos[name].shape)
            sample = self._file.read(name, 0, min(numel, _NUM_COMPARED))
        note_written(target, lambda: [sample])

    def fill(self, target: Tensor, name: str) -> None:
        """Fill a tensor of the model, or this rank's piece of it."""
        if not isinstance(target, ShardedTensor):
            self._fill_whole(target, name)
            return
        spec = target.spec
        if spec.tensor_parallel is not None:
            whole = self._read_whole(name)
            target.copy_values(ShardedTensor(spec.slice_full(whole).to(target.dtype), spec))
        elif spec.is_traced:
            target.copy_values(self._read_whole(name).to(target.dtype))
        elif target.is_meta:
            piece = torch.empty(spec.stop - spec.start, dtype=target.dtype, device=spec.device)
            self._fill_flat(piece, name, spec.start)
            target.replace_piece(piece)
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
            target.copy_(self._read_whole(name))

    def _read_whole(self, name: str) -> Tensor:
        info = self._file.infos[name]
        whole = torch.empty(info.shape, dtype=info.dtype)
        self._fill_flat(whole.view(-1), name, 0)
        return whole

    def _fill_flat(self, flat: Tensor, name: str, start: int) -> None:
        dtype = self._file.infos[name].dtype
        if isinstance(self._file, _FirstRanksFile):
            stop = start + flat.numel()
            for begin, part in self._file.parts(name):
                low, high = max(begin, start), min(begin + part.numel(), stop)
                if low < high:
                    copy_from_scratch(
                        flat[low - start : high - start], part[low - begin : high - begin]
                    )
        elif flat.dtype == dtype and flat.device.type == "cpu":
            self._file.read_into(name, start, flat)
            # Reading wrote past torch's back.
            torch.autograd.graph.increment_version(flat)
        else:
            self._convert(flat, self._file, name, start)
        self._meter.add(flat.numel() * dtype.itemsize)

    def _convert(self, flat: Tensor, file: FullFile | StateInMemory, name: str, start: int) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(bytes_io.PART_NBYTES, dtype=torch.uint8)
        typed = self._buffer.view(file.infos[name].dtype)
        for first in range(0, flat.numel(), typed.numel()):
            part = flat[first : first + typed.numel()]
            file.read_into(name, start + first, typed[: part.numel()])
            copy_from_scratch(part, typed[: part.numel()])


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


def _device_of(entries: list[NamedTensor]) -> torch.device:
    """Return where tensors on meta belong that are not sharded."""
    for entry in entries:
        if isinstance(entry.tensor, ShardedTensor):
            return entry.tensor.spec.device
    return torch.device("cpu")


def _on_meta(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta]
