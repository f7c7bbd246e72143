"""Files of whole tensors: sharded models are saved to and loaded from them tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shardkit._compat import torch_modules
from shardkit._errors import CheckpointError
from shardkit._module.materialize import rebuild_buffers
from shardkit._params.state_dicts import holds_sharded
from shardkit._progress import Meter
from shardkit._settings import refuse_texts
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import note_written
from shardkit._text import listed
from shardkit.backends.base import axes_of, first_of_all
from shardkit.checkpoint._agreement import FirstRank, agreed, rank_of
from shardkit.checkpoint._files import disk
from shardkit.checkpoint._files.disk import (
    Source,
    TensorInfo,
    converted,
)
from shardkit.checkpoint._files.formats import Format, FullFile, FullWriter
from shardkit.checkpoint._state.model_and_optimizer import whole_state
from shardkit.checkpoint._state.names import (
    device_of,
    mesh_of,
    names_of_tensors,
    set_extra_state,
    state_of,
)
from shardkit.checkpoint._state.sources import (
    FromFirstRank,
    Misfits,
    StateInMemory,
    described,
    fill_tensor,
)

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh
    from shardkit._progress import Progress


# --- saving ---------------------------------------------------------------------------------------


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
    """Write a sharded model as whole tensors, in the form of a plain model's ``state_dict()``.

    Call it on all ranks; the first rank of the mesh writes. The file appears under its name when it
    is complete and on the disk.

    Args:
        path: A file, which is replaced; or a directory, for several files and for safetensors, see
            `FullWriter`.
        model: Module sharded by `fully_shard`.
        format: ``"torch"``: the format of torch.load, also with ``mmap=True``; ``"safetensors"``:
            the format of Hugging Face's libraries. Of tied names it keeps the first, as these
            libraries do.
        max_shard_size: Size of a file at most, e.g. ``"5GB"``; then `path` is a directory.
        dtype: Dtype of floating-point tensors in the file; None: their own.
        progress: Argument of `load_full`.

    Returns:
        `path`.

    Raises:
        CheckpointError: On all ranks: the file cannot be written (with the reason), or the model is
            not sharded, or is on several meshes.

    Cost: within the writer's shard axis, a broadcast of each shard in parts of 16 MiB, in sum the
    file's bytes; and two small exchanges. Memory: 16 MiB; for tensor-parallel parameters, and for
    sharded tensors in extra state, whole tensors.
    """
    disk.check_saved_dtype(dtype)
    state = state_of(model)
    mesh = mesh_of(state, path)
    tied = {name: names[0] for names in names_of_tensors(state).values() for name in names[1:]}
    tensors = {name: v for name, v in state.items() if isinstance(v, Tensor)}
    for name, value in tensors.items():
        if isinstance(value, ShardedTensor):
            value.spec.check_saved()
        elif disk.is_sparse(value):
            msg = (
                f"{name!r} is sparse ({value.layout}), and a file of whole tensors holds dense "
                f"ones. Keep it dense, or save a checkpoint by shardkit.checkpoint.save."
            )
            raise CheckpointError(msg)
    infos = {name: converted(TensorInfo.of(v), dtype) for name, v in tensors.items()}
    first = FirstRank(axes_of(mesh), f"could not write {path}")
    others = {name: v for name, v in state.items() if not isinstance(v, Tensor)}
    sharded = {name: v for name, v in others.items() if holds_sharded(v)}
    others |= whole_state(sharded, keep=first.is_this, to_cpu=True)
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
                        others=others,
                        arrange=lambda found: {name: found[name] for name in state},
                    )
                )
        first.raise_error()
        meter = stack.enter_context(Meter(progress, f"saving {Path(path).name}", rank=mesh.rank))
        kept = [n for n, v in tensors.items() if n not in tied and _is_needed(v, mesh)]
        meter.expect(sum(infos[name].nbytes for name in kept))
        rooms: dict[torch.device, Tensor] = {}
        for name in kept:
            tensor = tensors[name].detach()
            for part in _parts(tensor, infos[name].dtype, rooms):
                if writer is not None and first.error is None:
                    with first.trying():
                        writer.append(name, part)
                meter.add(part.nbytes)
        if first.error is None:
            with first.trying():
                stack.close()  # This gives the file its name.
        first.raise_error()
    return Path(path)


def _is_needed(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether the first rank of the mesh, which writes, needs this rank for a tensor.

    Ranks outside its shard axis hold replicas of the same pieces, and all ranks hold plain tensors.
    """
    if isinstance(tensor, ShardedTensor) and tensor.spec.tensor_parallel is None:
        ranks, size = tensor.spec.mesh.ranks, tensor.spec.axis.size
        first = ranks.index(tensor.spec.mesh.rank) // size * size
        return mesh.ranks[0] in ranks[first : first + size]
    return hasattr(tensor, "full_tensor") or mesh.rank == mesh.ranks[0]


def _parts(
    tensor: Tensor, dtype: torch.dtype, rooms: dict[torch.device, Tensor]
) -> Iterator[Tensor]:
    """Yield a flattened tensor in order; the next part may overwrite the last one. Collective.

    `rooms` holds memory for parts, by device, and keeps it from one tensor to the next.
    """
    if not isinstance(tensor, ShardedTensor) or tensor.spec.tensor_parallel is not None:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        yield whole.resolve_conj().resolve_neg().reshape(-1).to(dtype)
        return
    spec = tensor.spec
    if spec.axis.size == 1:  # Nothing is sent. If operators are traced, room is a large graph.
        piece = tensor.to_local()[: tensor.numel()]  # There it has padding.
        for part in piece.split(disk.PART_NBYTES // dtype.itemsize):
            yield part.to(dtype)
        return
    if spec.device not in rooms:
        rooms[spec.device] = torch.empty(disk.PART_NBYTES, dtype=torch.uint8, device=spec.device)
    room = rooms[spec.device].view(dtype)
    for owner in spec.layout.owners(spec.index):
        start, stop = spec.layout.owned_range(spec.index, owner)
        for begin in range(0, stop - start, room.numel()):
            part = room[: min(room.numel(), stop - start - begin)]
            if owner == spec.axis.rank:
                part.copy_(tensor.to_local()[begin : begin + part.numel()])
            spec.axis.broadcast(part, src=owner)
            yield part


# --- loading --------------------------------------------------------------------------------------

_NUM_COMPARED = 256


class LoadedNames(NamedTuple):
    """What `load_full` could not match.

    Attributes:
        missing_keys: Names of the model that the file lacks; empty with ``strict=True``.
        unexpected_keys: Names of the file that the model lacks; empty with ``strict=True``.
        meta_keys: Tensors of the model that are still on the meta device: missing ones, and buffers
            that state dicts leave out (``persistent=False``) and that no module can compute.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    meta_keys: list[str]


@torch.no_grad()
@torch.inference_mode(mode=False)
def load_full(
    path: str | os.PathLike[str] | Mapping[str, Any] | None,
    model: nn.Module,
    *,
    strict: bool = True,
    broadcast_from_rank0: bool = False,
    progress: Progress = None,
) -> LoadedNames:
    """Load whole tensors from a file or memory into a model, which may be sharded or on meta.

    Each rank reads the ranges that it owns, straight into its shards, and converts them to the
    dtype of the model's tensors. Parameters stay the same objects. Names are those of
    ``model.state_dict()``; of tied names the file needs only one. Hooks that rename what is loaded,
    which some modules have for old files, are not called. Neither is the conversion of transformers
    for models that it saves under other names (``save_pretrained(..., save_original_format=False)``
    saves the model's own names).

    Buffers on meta that state dicts leave out (``persistent=False``: tables of positions) are
    computed by their modules, in the way of `materialize`. This changes nothing that was loaded.

    Args:
        path: File or directory that `FullFile` reads: a file of torch.save, of safetensors, or a
            Hugging Face directory; or a state dict of plain tensors, on any device. All ranks must
            see the file or have the state dict. With `broadcast_from_rank0` only the first rank
            needs it, and the others may pass None, {} or anything.
        model: Module to load into. Parameters on meta get memory for this rank's shards only.
        strict: Whether missing or unexpected names are an error.
        broadcast_from_rank0: Mode in which only the first rank of the mesh reads, and sends part
            after part to the others. These need memory for their shards and one part.
        progress: Way to show progress: by default a bar on rank 0's terminal, if the load takes
            longer than a second and rich is installed; False: none; or a function of two numbers,
            the bytes that this rank has read and all that it will read.

    Raises:
        CheckpointError: Before anything is loaded, on all ranks alike: it lists all names that are
            missing, unexpected, or of another shape or kind of dtype. With `broadcast_from_rank0`,
            also if ranks have models with other names.

    Cost: no collectives. Each rank reads its share of the file straight into its shards; where
    dtype or device differ, through a buffer of 16 MiB. A tensor-parallel parameter is read whole.
    With `broadcast_from_rank0`, five exchanges, one of them of all names, and a broadcast of every
    16 MiB of each tensor, over each axis of the mesh.
    """
    refuse_texts(CheckpointError, strict=strict, broadcast_from_rank0=broadcast_from_rank0)
    state = state_of(model)
    names_of = names_of_tensors(state)
    what = str(path) if isinstance(path, (str, os.PathLike)) else "the state dict"
    if broadcast_from_rank0:
        mesh = mesh_of(state, what, allow_meta=True)
        axes, device, own = axes_of(mesh), mesh.backend.device, [*names_of.values()]
        file: Source = FromFirstRank(lambda: _open(path), what, axes, device)
        of_first = first_of_all(own, axes)
        agreed(mesh, f"{what} was not loaded", lambda: _check_names(own, of_first))
    else:
        file = _open(path)
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    missing = [names[0] for names in names_of.values() if file.infos.keys().isdisjoint(names)]
    missing += [name for name in extra if name not in file.others]
    unexpected = [name for name in (*file.infos, *file.others) if name not in state]
    misfits = Misfits(
        missing=[f"{name!r}: expected {described(state[name])}" for name in missing],
        unexpected=[f"{name!r}: found {described(file.infos.get(name))}" for name in unexpected],
    )
    for tensor, names in names_of.items():
        is_foreign = hasattr(tensor, "redistribute") and not isinstance(tensor, ShardedTensor)
        for name in filter(file.infos.__contains__, names):
            if is_foreign:
                reason = "is a DTensor that fully_shard did not take: shard it first"
                misfits.wrong.append(f"{name!r} {reason}")
            else:
                misfits.compare(repr(name), tensor, file.infos[name])
    head = f"{what} does not fit the model, nothing was loaded"
    remedy = _remedy(missing, unexpected)
    report = misfits.report(head, remedy, strict=strict, where=" in the file")
    if report is not None:
        raise CheckpointError(report)
    with (
        Meter(progress, f"loading {Path(what).name}", rank=rank_of(None)) as meter,
        torch_modules.without_weight_refs(model.modules()),
    ):
        _fill_all(file, names_of, meter)
    if isinstance(file, FromFirstRank):
        file.first.raise_error()
    set_extra_state(model, {name: file.read_other(name) for name in extra if name in file.others})
    rebuild_buffers(model, state.values())
    named = [*model.named_parameters(), *model.named_buffers()]
    return LoadedNames(missing, unexpected, [name for name, tensor in named if tensor.is_meta])


def _remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Say what to do about names; wrappers of modules put a prefix in front of each."""
    prefixes = [name.removesuffix(each) for each in missing[:1] for name in unexpected]
    for prefix in prefixes:
        if prefix.endswith(".") and {prefix + name for name in missing} <= {*unexpected}:
            return (
                f"The file has these names with {prefix!r} in front, as DistributedDataParallel "
                f"('module.') and torch.compile ('_orig_mod.') save them. Leave it out: "
                f"load_full({{name.removeprefix({prefix!r}): value for name, value in "
                f"state.items()}}, model), where state is torch.load(path, mmap=True)."
            )
    return "Give the file of this model; strict=False leaves out what is missing or unexpected."


def _check_names(names: Sequence[Sequence[str]], of_first: Sequence[Sequence[str]]) -> None:
    """Refuse a model whose tensors have other names than those of the first rank's model."""
    for mine, first in itertools.zip_longest(names, of_first, fillvalue=()):
        if mine != first:
            msg = (
                f"its model has a tensor named {listed(mine) or 'nothing'} where that of rank 0 "
                f"has one named {listed(first) or 'nothing'}. Build the same model on all ranks. "
                f"module.to('meta') unties parameters: build it under torch.device('meta')."
            )
            raise CheckpointError(msg)


def _open(path: str | os.PathLike[str] | Mapping[str, Any] | None) -> Source:
    if isinstance(path, (str, os.PathLike)):
        return FullFile(path)
    inner = path.get("model") if isinstance(path, Mapping) else None
    return StateInMemory(inner if isinstance(inner, Mapping) else path)


def _fill_all(source: Source, names_of: Mapping[Tensor, list[str]], meter: Meter) -> None:
    """Fill those tensors of the model that the source has under one of their names."""
    infos, device = source.infos, device_of(names_of)
    jobs: list[tuple[Tensor, str, int]] = []
    for tensor, names in names_of.items():
        # torch's load_state_dict loads a tied tensor under each name, so the last one remains.
        for name in [name for name in names if name in infos][-1:]:
            numel = tensor.numel()
            if isinstance(tensor, ShardedTensor) and tensor.spec.tensor_parallel is None:
                numel = tensor.spec.stop - tensor.spec.start
            jobs.append((tensor, name, numel * infos[name].dtype.itemsize))
    meter.expect(sum(nbytes for *_, nbytes in jobs))
    for tensor, name, nbytes in jobs:
        fill_tensor(source, name, tensor, device)
        meter.add(nbytes)
    for tensor, name, _ in jobs:  # Only now: pieces share memory, and its version.
        if isinstance(tensor, ShardedTensor):
            note_written(tensor, functools.partial(_first_elements, source, name))


def _first_elements(source: Source, name: str) -> list[Tensor]:
    """Return the values of a loaded tensor that ranks compare."""
    if isinstance(source, FromFirstRank):
        return [torch.zeros(1, device="cpu")]  # All ranks have received the same values.
    return [source.read(name, 0, min(source.infos[name].numel, _NUM_COMPARED))]
