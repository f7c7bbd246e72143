"""Sources beside files, such as state dicts or another rank; and entries that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit._errors import CheckpointError
from shardkit._params.memory import give_back
from shardkit._tensor.sharded import ShardedTensor
from shardkit._text import dtype_name, listed_lines
from shardkit.backends.base import AxisComm, first_of_all
from shardkit.backends.process_group import ProcessGroupAxis
from shardkit.checkpoint._agreement import FirstRank
from shardkit.checkpoint._files import disk
from shardkit.checkpoint._files.disk import (
    Source,
    TensorInfo,
    copy_from_scratch,
    kind_of,
)
from shardkit.checkpoint._state.names import fill_memory

# --- what does not fit ----------------------------------------------------------------------------


@dataclass
class Misfits:
    """Entries that do not fit."""

    # Entries of another shape or kind, each with the difference.
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # Entries that are wanted, but not there.
    unexpected: list[str] = field(default_factory=list)  # Entries that are there, but not wanted.
    # Those of `unexpected` that another stage of a pipeline has saved.
    of_others: set[str] = field(default_factory=set)

    def left_over(self, line: str, *, is_of_others: bool) -> None:
        """Note an entry that is not wanted; it is no error if another stage has saved it."""
        self.unexpected.append(line)
        if is_of_others:
            self.of_others.add(line)

    def compare(self, name: str, wanted: Any, found: TensorInfo | None) -> bool:
        """Note an entry whose shape or kind of dtype differs, or a tensor on one side only."""
        differing = []
        if not isinstance(wanted, Tensor) or found is None:
            if isinstance(wanted, Tensor) or found is not None:
                differing.append("another kind")
        else:
            if tuple(wanted.shape) != found.shape:
                differing.append("another shape")
            if kind_of(found.dtype) > kind_of(wanted.dtype):
                differing.append("another dtype")
        if differing:
            difference = f"{name}: expected {described(wanted)}, found {described(found)}"
            self.wrong.append(f"expected {' and '.join(differing)}: {difference}")
        return not differing

    def common(self, of_all_ranks: Sequence[Misfits]) -> Misfits:
        """Return these without the entries that another rank wants: stages of a pipeline differ."""
        of_nobody = set(self.unexpected).intersection(*(each.unexpected for each in of_all_ranks))
        unexpected = [line for line in self.unexpected if line in of_nobody - self.of_others]
        return Misfits(self.wrong, self.missing, unexpected)

    def report(self, head: str, remedy: str, *, strict: bool, where: str = "") -> str | None:
        """Return the text of an error; None if there is none to raise."""
        lines = listed_lines(self.wrong)
        for kind, found in (("missing", self.missing), ("unexpected", self.unexpected)):
            if strict:
                named = [f"{kind}{where}: {each}" for each in found]
                lines += listed_lines(named, f"{kind}{where}: {{}} more")
        return "\n".join([f"{head}:", *(f"  {line}" for line in lines), remedy]) if lines else None


def described(value: Any) -> str:
    """Describe a tensor, or a saved one."""
    if isinstance(value, Tensor | TensorInfo):
        return f"shape {tuple(value.shape)} of {dtype_name(value.dtype)}"
    return "something that is no tensor"


# --- sources --------------------------------------------------------------------------------------


class StateInMemory(Source):
    """A state dict of whole, plain tensors, on any device."""

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        if not isinstance(state, Mapping):
            msg = (
                f"expected a file or a state dict of whole tensors, got {state!r}. Ranks that have "
                f"none may pass None or {{}} with broadcast_from_rank0=True; the first rank must "
                f"have it."
            )
            raise CheckpointError(msg)
        self._tensors = {n: v for n, v in state.items() if isinstance(v, Tensor)}
        self.others: dict[str, Any] = {n: v for n, v in state.items() if not isinstance(v, Tensor)}
        self.infos, self.tied = {}, {}
        for name, tensor in self._tensors.items():
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
                kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__}"
                msg = (
                    f"{name!r} in the state dict is {kind}; expected whole, plain tensors. Pass a "
                    f"full state dict (full_state_dict=True of get_model_state_dict or "
                    f"get_optimizer_state_dict). A state dict of shards is set without "
                    f"broadcast_from_rank0."
                )
                raise CheckpointError(msg)
            self.infos[name] = TensorInfo.of(tensor)
        self._flat: tuple[str, Tensor] | None = None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: 1-D, not copied if possible."""
        if self._flat is None or self._flat[0] != name:  # Flattening may copy.
            self._flat = (name, self._tensors[name].detach().reshape(-1))
        return self._flat[1][start:stop]

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on."""
        out.copy_(self.read(name, start, start + out.numel()))


class FromFirstRank(Source):
    """Data that only the first of some ranks has; all ranks receive all of it, part by part.

    All ranks make this object, with the axes over them, and read the same tensors in the same
    order. If the first rank cannot open its source, all ranks raise.

    Cost: an exchange per axis, of descriptions and of values that are no tensors; then for every 16
    MiB of each tensor, a broadcast per axis. Memory: 16 MiB.
    """

    def __init__(
        self,
        open_source: Callable[[], Source],
        what: str,
        axes: Sequence[AxisComm],
        device: torch.device,
    ) -> None:
        self._axes = axes
        self._source: Source | None = None
        self.first = FirstRank(axes, f"could not read {what}")
        if self.first.is_this:
            with self.first.trying():
                self._source = open_source()
        self.first.raise_error()
        found: Any = self._source and (self._source.infos, self._source.others)
        self.infos, self.others = first_of_all(found, axes)
        self.tied = {}
        self._parts = torch.empty(disk.PART_NBYTES, dtype=torch.uint8, device=device)

    def copy_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on. Collective: all ranks get all parts of the tensor."""
        info, stop = self.infos[name], start + out.numel()
        numel, room = info.numel, self._parts.view(info.dtype)
        for begin in range(0, numel, room.numel()):
            part = room[: min(room.numel(), numel - begin)]
            if self._source is not None and self.first.error is None:
                with self.first.trying():
                    part.copy_(self._source.read(name, begin, begin + part.numel()))
            for axis in self._axes:
                axis.broadcast(part, src=0)
            low, high = max(begin, start), min(begin + part.numel(), stop)
            if low < high:
                copy_from_scratch(out[low - start : high - start], part[low - begin : high - begin])
        torch.autograd.graph.increment_version(out)  # Also of ranks that have no element.

    def receive(
        self, target_of: Callable[[Any, TensorInfo], Any] = lambda *_: None
    ) -> Iterator[tuple[Any, Any]]:
        """Yield key and value of every entry. Collective: exhaust the iterator.

        If an entry has a sharded target, the target is filled and is the value; other tensors come
        whole. Tensors without dims stay on the host, because optimizers want numbers of steps
        there.
        """
        for key, info in self.infos.items():
            target = target_of(key, info)
            if isinstance(target, ShardedTensor):
                fill_tensor(self, key, target, target.device)
                yield key, target
                continue
            tensor = self.whole(key, self._parts.device if info.shape else torch.device("cpu"))
            yield key, tensor
            if tensor.device.type == "cpu":
                give_back(tensor.nbytes)  # For the one before: this one is still in use.
        self.first.raise_error()
        others: Any = self.others
        yield from others.items()


def from_rank0(
    entries: Callable[[], Mapping[Any, Any] | None], device: torch.device
) -> FromFirstRank:
    """Return what rank 0 of the default process group has, whole and plain; see `FromFirstRank`.

    Only rank 0 calls `entries`. If that raises, all ranks raise.
    """
    world = dist.group.WORLD
    axes = [ProcessGroupAxis(world)] if world is not None else []
    return FromFirstRank(lambda: StateInMemory(entries()), "the state dict", axes, device)


def fill_tensor(source: Source, name: str, target: Tensor, device: torch.device) -> None:
    """Fill a tensor of the model, or this rank's piece of it; plain ones on meta go to `device`."""
    start = 0
    if isinstance(target, ShardedTensor):
        spec, start = target.spec, target.spec.start
        if spec.tensor_parallel is not None:
            cut = spec.slice_full(source.whole(name))
            target.copy_values(ShardedTensor(cut.to(target.dtype), spec))
            return
        if spec.is_traced:
            target.copy_values(source.whole(name).to(target.dtype))
            return

    def fill(memory: Tensor) -> None:
        if memory.is_contiguous() and not (memory.is_conj() or memory.is_neg()):
            source.copy_into(name, start, memory.view(-1))
        else:
            memory.copy_(source.whole(name))

    fill_memory(target, device, fill)
