"""Comparisons between ranks: of models at first, then of used and written parameters and steps."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
import warnings
import weakref
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardkit import _events
from shardkit._compat import torch_autograd
from shardkit._errors import RankMismatchError, warn_user
from shardkit._pickling import Pickled
from shardkit._runtime.group import unwritten
from shardkit._settings import watch_settings
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import fingerprint, num_noted
from shardkit._text import counted, listed
from shardkit.backends.base import AxisComm, CheckHandle, CommStreams, first_of_all
from shardkit.backends.watch.watchdog import at_end, current_watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim.optimizer import Optimizer

    from shardkit._mesh import DeviceMesh
    from shardkit._params.bucket import Bucket
    from shardkit._params.gradients import BucketGradients
    from shardkit._params.sites import ParamEntry
    from shardkit._runtime.group import KnownValue, ParamGroup, Written
    from shardkit.backends.watch.runs import RunStore


# --- what each rank does by itself ----------------------------------------------------------------
#
# These actions do not communicate, so nothing hangs if one rank does something else. They are
# counted here, and compared in the exchange of a backward (`UsedParameters`), or at the end of the
# run.

_SETTINGS = ("lr", "weight_decay", "momentum", "betas", "eps", "nesterov", "amsgrad", "maximize")
_LOCAL = frozenset(
    {
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD", "LocalOptimizer"),
    }
)
"""Names of optimizers that update each element by itself, and so communicate in no step."""
_THEIR_PACKAGES = ("torch.optim", "shardkit.optim")
_NUM_FIRST, _INTERVAL = 4, 50
"""Settings are read in the first backwards, and then in every fiftieth; steps are always read."""

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

_num_stepped = 0
"""Number of optimizers that have stepped, also of those that do not exist any more."""


def note_step(optimizer: Optimizer, *_: Any) -> None:
    """Count a step of an optimizer; inside a backward steps come in different orders on ranks."""
    global _num_stepped  # noqa: PLW0603 - of the process
    if not torch_autograd.in_backward():
        number = _steps.get(optimizer, 0)
        _num_stepped += not number
        _steps[optimizer] = number + 1


class Steps(NamedTuple):
    """Steps and settings of an optimizer."""

    kind: str  # Name of its class.
    # Settings of its parameter groups, if they are compared: for each group the name of its first
    # sharded parameter, its settings in words, and a digest of all such names.
    settings: tuple[tuple[str, str, int], ...]
    num_taken: int  # Number of its steps since settings were compared.


class TakenActions(NamedTuple):
    """Actions of this rank, which are not compared yet."""

    steps: list[Steps]  # Steps of optimizers.
    pickled: str  # Name of a piece that was pickled, or "".
    # Whether all optimizers exist whose steps are not compared yet. Python collects those in a
    # cycle, as schedulers make one, at another time on each rank.
    is_complete: bool


class OwnActions:
    """Actions of this rank since the last `take`, on parameters that lie on one mesh."""

    def __init__(self, groups: Sequence[ParamGroup], mesh: ComparedMesh) -> None:
        self._groups = groups
        self._mesh = mesh
        self._known = weakref.WeakKeyDictionary(_steps)
        self._updates: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._num_pickled = Pickled.count
        self._num_ended = _num_stepped - len(_steps)
        self._num_asked = 0

    def take(self) -> TakenActions:
        """Return what is to be compared."""
        self._num_asked += 1
        pickled = "" if self._num_pickled == Pickled.count else Pickled.name
        self._num_pickled = Pickled.count
        reads_settings = self._num_asked <= _NUM_FIRST or not self._num_asked % _INTERVAL
        known, taken = self._known, []
        num_ended = _num_stepped - len(_steps)
        is_complete = num_ended == self._num_ended
        if reads_settings:
            self._known = weakref.WeakKeyDictionary(_steps)
            self._num_ended = num_ended
            self._updates.clear()  # Parameters may have been added.
        for optimizer, count in list(_steps.items()):
            number = count - known.get(optimizer, 0)
            if number and self._has_part_in(optimizer):
                settings = _settings_of(optimizer, self._entries()) if reads_settings else ()
                taken.append(Steps(type(optimizer).__name__, tuple(settings), number))
        # Ranks may step optimizers in different orders, as pyro does, which keeps them in a set.
        taken.sort()
        return TakenActions(taken, pickled, is_complete)

    def _has_part_in(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer updates parameters that lie on the mesh."""
        found = self._updates.get(optimizer)
        if found is None:
            found = self._updates[optimizer] = any(_settings_of(optimizer, self._entries()))
        return found

    def _entries(self) -> set[int]:
        return {id(entry) for entry in self._mesh.entries_of(self._groups)}


def _settings_of(optimizer: Optimizer, entries: set[int]) -> Iterator[tuple[str, str, int]]:
    kind = type(optimizer)
    may_communicate = not (kind.__name__ in _LOCAL and kind.__module__.startswith(_THEIR_PACKAGES))
    for group in optimizer.param_groups:
        names = [param.spec.name for param in group["params"] if _is_in(param, entries)]
        if names:
            if not may_communicate:
                names.sort()  # Each rank may have another order, as of a set.
            values = {key: _number(group[key]) for key in _SETTINGS if key in group}
            shown = ", ".join(f"{key}={value}" for key, value in values.items() if value != "")
            yield names[0], shown, zlib.crc32("\n".join(names).encode())


def _is_in(param: Any, entries: set[int]) -> bool:
    if not isinstance(param, ShardedTensor) or param.spec.entry is None:
        return False
    return id(param.spec.entry()) in entries


def _number(value: Any) -> str:
    """Return a setting as text; "" for settings that are on a device, or no numbers."""
    if isinstance(value, (tuple, list)):
        return str([_number(each) for each in value])
    if isinstance(value, Tensor):
        is_host = type(value) is Tensor and value.device.type == "cpu" and value.numel() == 1
        return repr(value.item()) if is_host else ""
    return repr(value) if isinstance(value, (bool, int, float)) else ""


def first_difference(of_ranks: Sequence[TakenActions]) -> str | None:
    """Name the first optimizer that did something else on another rank."""
    if not all(done.is_complete for done in of_ranks):
        return None
    mine = of_ranks[0].steps
    for rank, (other, *_) in enumerate(of_ranks):
        for index in range(max(len(mine), len(other))):
            here = mine[index] if index < len(mine) else None
            there = other[index] if index < len(other) else None
            if here == there:
                continue
            kind = (here or there).kind  # type: ignore[union-attr]
            counts = [0 if each is None else each.num_taken for each in (here, there)]
            if here is None or there is None or here.kind != there.kind or counts[0] != counts[1]:
                return (
                    f"optimizers differ between ranks: since ranks last compared its settings, "
                    f"{kind} took {counted(counts[0], 'steps')} on position 0 of the process "
                    f"group, and {counts[1]} on position {rank}. Each rank updates its own shards: "
                    f"take as many micro-batches, and call step() as often, on every rank."
                )
            for (name, a, _), (_, b, _) in zip(here.settings, there.settings, strict=False):
                if a != b:
                    return (
                        f"optimizers differ between ranks: {kind} updates {name!r} and those "
                        f"beside it with {a} on position 0 of the process group, and with {b} on "
                        f"position {rank}. Each rank updates its own shards: choose the same "
                        f"settings on every rank, also where a scheduler chooses them by a loss "
                        f"(average it over the ranks first)."
                    )
            return (
                f"optimizers differ between ranks: {kind} has other parameters, or another order "
                f"of them, on position 0 of the process group than on position {rank}. Some steps "
                f"communicate for one parameter after the other: list them on every rank as "
                f"model.named_parameters() does. A set has another order on each rank."
            )
    return None


def pickled_on_some(of_ranks: Sequence[str]) -> str | None:
    """Return text if some ranks have pickled pieces and others have not; None: all alike."""
    positions = [rank for rank, name in enumerate(of_ranks) if name]
    if len(positions) in (0, len(of_ranks)):
        return None
    Pickled.is_told = True
    of = f"position {listed(positions, str)} of the process group has"
    return f"{of} {_pickled(of_ranks[positions[0]])}"


def _pickled(name: str) -> str:
    return (
        f"pickled its shard of {name!r} (torch.save of a state dict), and others have not. The "
        f"file holds the shards of one rank only, so the model cannot be loaded from it. Call "
        f"shardkit.checkpoint.save_full(path, model) on all ranks, which writes one file of whole "
        f"tensors, or shardkit.checkpoint.save."
    )


def _compare_at_end(store: RunStore, world_size: int) -> None:
    """Warn on the last rank that ends if too few ranks have pickled pieces for whole tensors.

    Scripts save at their end, and no backward follows there.
    """
    if Pickled.count and not Pickled.is_told:
        store.set("pickled/piece", f"{Pickled.num_pieces} {Pickled.name}")
        store.add("pickled/on", 1)
    if store.add("pickled/asked", 1) == world_size:
        num_ranks = store.add("pickled/on", 0)
        if not num_ranks:
            return
        num_pieces, name = store.get("pickled/piece").decode().split(" ", 1)
        if num_ranks < int(num_pieces):
            ranks = "one rank has" if num_ranks == 1 else f"{num_ranks} ranks have"
            warnings.warn(f"{ranks} {_pickled(name)}", stacklevel=2)


at_end.append(_compare_at_end)


# --- copies of a model on other parts of the world ------------------------------------------------


def is_on_part(groups: Sequence[ParamGroup]) -> bool:
    """Whether ranks of the world are in no mesh of these groups."""
    ranks = {rank for group in groups for rank in group.mesh.ranks}
    return len(ranks) < groups[0].mesh.world_size


def rank_of_copy(groups: Sequence[ParamGroup]) -> int | None:
    """Return a rank that trains a copy of the same model on another part of the world, or None.

    The first rank of the largest mesh asks for all, at the first step. Of two copies the later one
    learns of the other. Copies that are cut in another way are not found. Nor are later stages of
    pipelines, which may look like copies.

    Cost: one or two requests to the store on one rank of a mesh that is a part of the world;
    nothing on other ranks.
    """
    mesh = max((group.mesh for group in groups), key=lambda mesh: mesh.size())
    if not is_on_part(groups) or not mesh.is_first_rank or groups[0].is_fed:
        return None
    pieces = [
        (entry.name, tuple(entry.param.shape), int(fingerprint(entry.param.to_local())))  # type: ignore[attr-defined]
        for group in groups
        if group.mesh == mesh
        for bucket in group.buckets
        for entry in bucket.entries
    ]
    key = f"copies/{_digest(repr((mesh.shape, pieces)).encode())}"
    found = current_watchdog().claim(key, str(mesh.rank))
    return int(found) if found.isdecimal() and int(found) != mesh.rank else None


def hold_equal_values(groups: Sequence[ParamGroup], mesh: DeviceMesh) -> bool:
    """Whether all ranks of a mesh had the same values when they sharded groups, as copies have.

    Cost: an all-reduce of 16 bytes on each axis of several ranks.
    """
    numbers = [
        (tuple(bucket.store.layout.shapes), [value and value.number for value in known.values()])
        for group in groups
        for known in [group.known_values()]
        for bucket in group.buckets
    ]
    digest = _digest(repr(numbers).encode())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=mesh.backend.device)
    for index in range(mesh.ndim):
        if mesh.shape[index] > 1:
            mesh.backend.axis(index).all_reduce(extremes, "max")
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


# --- what ranks tell each other -------------------------------------------------------------------
#
# Ranks compare what must be equal. Buckets of one root may lie on several meshes. Along an axis
# that a bucket's mesh lacks, other ranks hold other parameters, such as different experts. So each
# bucket is compared over the axes of its own mesh.


@dataclass(frozen=True)
class ComparedMesh:
    """A mesh on which parameters of a root lie, and over which ranks compare them."""

    axes: Sequence[AxisComm]  # Axes of several ranks.
    # Axes of the buckets on this mesh (`BucketPlan.axes`); None: all buckets of the root.
    is_of: tuple[AxisComm, ...] | None = None

    def has(self, bucket: Bucket) -> bool:
        """Whether a bucket lies on this mesh."""
        return self.is_of is None or bucket.plan.axes == self.is_of

    def buckets_of(self, groups: Sequence[ParamGroup]) -> list[Bucket]:
        """Return the buckets of groups that lie on this mesh."""
        return [bucket for group in groups for bucket in group.buckets if self.has(bucket)]

    def entries_of(self, groups: Sequence[ParamGroup]) -> list[ParamEntry]:
        """Return the parameters of groups that lie on this mesh."""
        return [entry for bucket in self.buckets_of(groups) for entry in bucket.entries]

    def gradients_of(self, groups: Sequence[ParamGroup]) -> list[BucketGradients]:
        """Return the gradients of groups that lie on this mesh."""
        every = (each for group in groups for each in group.gradients.buckets)
        return [each for each in every if self.has(each.bucket)]


def compared_meshes(groups: Sequence[ParamGroup]) -> list[ComparedMesh]:
    """Return the meshes on which the parameters of a root lie."""
    by_mesh = dict.fromkeys(bucket.plan.axes for group in groups for bucket in group.buckets)
    several = [[axis for axis in axes if axis.size > 1] for axes in by_mesh]
    if len(by_mesh) == 1:
        return [ComparedMesh(several[0])]
    return [ComparedMesh(*each) for each in zip(several, by_mesh, strict=True)]


def _digest(content: bytes) -> int:
    """Return a digest of 62 bits: the value and its negative both fit an int64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 2


@functools.cache
def _software() -> str:
    """Return the versions that ranks should have in common, in words."""
    root = Path(__file__).parents[1]
    source = 0
    with contextlib.suppress(OSError):  # The source may lie in an archive.
        for path in sorted(root.rglob("*.py")):
            source = zlib.crc32(path.read_bytes(), source)
    return (
        f"shardkit {sys.modules['shardkit'].__version__} (checksum of its source {source:08x}) and "
        f"torch {torch.__version__}"
    )


def check_same_model(groups: Sequence[ParamGroup], meshes: Sequence[ComparedMesh]) -> None:
    """Compare groups, names, shapes, dtypes and trainability over every axis in use.

    Ranks with different versions of shardkit or torch are warned of, or named in the error.

    Raises:
        RankMismatchError: Something differs. Every rank raises, and names the first difference.

    Cost: one all-reduce of 16 bytes per axis, and with several axes one exchange on each; details
    travel only on a mismatch.
    """
    backend = groups[0].mesh.backend
    # Tensors that are read here are not part of a graph, and have values.
    is_host = backend.is_traced or backend.is_dry
    device = torch.device("cpu") if is_host else backend.device
    text: str | None = None
    for mesh in meshes:
        description = _describe_all(groups, mesh)
        order = [entry.order for entry in mesh.entries_of(groups)]
        facts = [_software(), *map(_without_owners, description)]
        digest = _digest(repr(facts).encode())
        for axis in mesh.axes:
            extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
            axis.all_reduce(extremes, "max")
            highest, lowest = extremes.tolist()
            if highest == -lowest:
                continue
            mine = (_software(), _describe_all(groups, mesh, with_pieces=True))
            found = _difference_over(axis, mine, order)  # Communicates, so also with a text.
            text = text or found
    axes = [*dict.fromkeys(axis for mesh in meshes for axis in mesh.axes)]
    if len(axes) > 1 or text is not None:  # Ranks on more axes may wait for all to agree.
        text = first_of_all(text, axes)
    if text is not None:
        raise RankMismatchError(text)
    for group in groups:
        group.take_written()


def _describe_all(
    groups: Sequence[ParamGroup], mesh: ComparedMesh, *, with_pieces: bool = False
) -> list[tuple[Any, ...]]:
    """Return the name of each group, followed by the facts about its parameters on a mesh."""
    described = [(group.name, *_describe(group, mesh, with_pieces=with_pieces)) for group in groups]
    # A group without parameters on the mesh may have another name on other ranks.
    return [each for each in described if mesh.is_of is None or len(each) > 1]


def _describe(
    group: ParamGroup, mesh: ComparedMesh, *, with_pieces: bool = False
) -> list[tuple[Any, ...]]:
    """Return the facts on which ranks must agree, for each parameter that lies on a mesh.

    The last fact is a number of the parameter's whole value, see `ParamGroup.known_values`.
    """
    values = group.known_values()
    if with_pieces:
        entries = (entry for bucket in group.buckets for entry in bucket.entries)
        values = {id(each): _with_piece(each, values.get(id(each))) for each in entries}
    return [
        (
            entry.name,
            tuple(bucket.store.layout.shapes[i]),
            str(bucket.plan.orig_dtype),
            str(bucket.plan.param_dtype),
            str(bucket.plan.reduce_dtype),
            str(bucket.plan.grad_dtype),
            entry.param.requires_grad,
            entry.param.device.type,
            values.get(id(entry)),
        )
        for bucket in group.buckets
        if mesh.has(bucket)
        for i, entry in enumerate(bucket.entries)
    ]


def _with_piece(entry: Any, value: KnownValue | None) -> KnownValue | None:
    """Return what is known of a parameter, together with this rank's piece as it is now.

    Users may write pieces by collectives of torch, such as a broadcast from one replica to the
    others. These raise no version counter, so what is known of the whole may be out of date.
    """
    if value is None or entry.param.is_meta:
        return value
    return replace(value, piece=_piece_of(entry))


def _piece_of(entry: Any) -> tuple[int, int, int]:
    """Return the first element, the end and a fingerprint of this rank's piece."""
    spec, values = entry.param.spec, fingerprint(entry.param.to_local(), 0)
    return spec.start, spec.stop, int(values)


def _without_owners(described: Sequence[Any]) -> list[Any]:
    """Return the facts that must be equal on all ranks, without those about each rank's piece."""
    name, *params = described
    return [name, *((*param[:-1], param[-1] and param[-1].number) for param in params)]


def _difference_over(
    axis: AxisComm, mine: tuple[str, Sequence[Any]], order: Sequence[int]
) -> str | None:
    """Name the first difference of models or values; warn of software that differs."""
    of_ranks = axis.exchange(mine)
    software = [each for each, _ in of_ranks]
    descriptions = [described for _, described in of_ranks]
    rank = next((i for i, each in enumerate(software) if each != software[0]), None)
    if rank is None:
        return _first_model_difference(descriptions) or _first_value_difference(descriptions, order)
    hint = (
        f"ranks run different software: position 0 of the process group has {software[0]}, and "
        f"position {rank} has {software[rank]}. Install the same versions on all hosts."
    )
    try:
        found = _first_model_difference(descriptions)
        found = found or _first_value_difference(descriptions, order)
    except (IndexError, TypeError, ValueError):  # Other versions describe models otherwise.
        return hint
    if found is not None:
        return f"{found} And {hint}"
    warn_user(hint, is_first_rank=axis.rank == 0)
    return None


def _first_model_difference(descriptions: Sequence[Sequence[Any]]) -> str | None:
    """Name the first difference other than values."""
    mine = descriptions[0]
    for rank, other in enumerate(descriptions):
        if other == mine:
            continue
        hint = "Build the same model and call fully_shard in the same way on every rank."
        if len(other) != len(mine):
            return (
                f"ranks have different models: position 0 of the process group has {len(mine)} "
                f"groups, position {rank} has {len(other)}. {hint}"
            )
        for group_a, group_b in zip(mine, other, strict=True):
            if group_a == group_b:
                continue
            if len(group_a) != len(group_b) or group_a[0] != group_b[0]:
                return (
                    f"ranks have different models: group {group_a[0]!r} has {len(group_a) - 1} "
                    f"parameters on position 0 of the process group; on position {rank} there is "
                    f"{group_b[0]!r} with {len(group_b) - 1} (module.to('meta') unties some). "
                    f"{hint}"
                )
            for param_a, param_b in zip(group_a[1:], group_b[1:], strict=True):
                if param_a[:-1] != param_b[:-1]:
                    return (
                        f"ranks have different models: parameter {param_a[0]!r} is "
                        f"{_show_param(param_a)} on position 0 of the process group, but "
                        f"{param_b[0]!r} is {_show_param(param_b)} on position {rank}. {hint}"
                    )
    return None


def _first_value_difference(
    descriptions: Sequence[Sequence[Any]], order: Sequence[int]
) -> str | None:
    """Name the first parameter whose values differ; an unknown value does not differ."""
    params = [[param for group in groups for param in group[1:]] for groups in descriptions]
    by_param = list(zip(*params, strict=True))
    for _, of_ranks in sorted(zip(order, by_param, strict=True), key=lambda each: each[0]):
        found = _two_that_differ([param[-1] for param in of_ranks])
        if found is not None:
            return (
                f"ranks hold different values: parameter {of_ranks[0][0]!r} was not the same on "
                f"position {found[0]} and on position {found[1]} of the process group when it was "
                f"sharded, or was filled or loaded since, {_PATCHWORK}"
            )
    return None


_PATCHWORK = (
    "so the whole would be patched together from both. Set the same seed on every rank before the "
    "model is built or initialized (torch.manual_seed(0)), and load the same weights on every "
    "rank: load_state_dict() fills the shards of those ranks that call it. If that is what you "
    "want: shardkit.set_watch(compare_values=False)."
)


def _two_that_differ(values: Sequence[KnownValue | None]) -> tuple[int, int] | None:
    """Return two positions with different values; None equals any value.

    A rank that has no piece, and has written nothing, may differ from ranks that have written.
    Replicas may have written different values, if their pieces are equal now.
    """
    known = [(rank, value) for rank, value in enumerate(values) if value is not None]
    for alike in (
        [each for each in known if not each[1].is_empty],
        [each for each in known if not each[1].is_written],
    ):
        for rank, value in alike:
            first_rank, first = alike[0]
            has_same_piece = value.piece is not None and value.piece == first.piece
            if value.number != first.number and not has_same_piece:
                return first_rank, rank
    return None


def _first_written_difference(
    written: Sequence[Sequence[tuple[str, KnownValue | None]]],
) -> str | None:
    """Name the first parameter that ranks have written differently since the last comparison."""
    for of_ranks in zip(*written, strict=True):
        values = [value for _, value in of_ranks]
        found = _two_that_differ(values)
        if found is not None:
            a, b = found
            has_written = [(value is not None and value.is_written) for value in values]
            how = f"not with the same values on position {a} and on position {b}"
            if not (has_written[a] and has_written[b]):
                a, b = (a, b) if has_written[a] else (b, a)
                how = f"on position {a}, and not on position {b}"
            return (
                f"ranks hold different values: parameter {of_ranks[0][0]!r} was written before "
                f"this step {how} of the process group, {_PATCHWORK}"
            )
    return None


def _show_param(param: Sequence[Any]) -> str:
    _, shape, orig_dtype, param_dtype, reduce_dtype, grad_dtype, trainable, device_type, _ = param
    return (
        f"{shape} {orig_dtype} on {device_type} (computed in {param_dtype}, "
        f"reduced in {reduce_dtype}, gradients in {grad_dtype}, "
        f"{'trainable' if trainable else 'frozen'})"
    )


def check_same_replicas(groups: Sequence[ParamGroup]) -> None:
    """Compare the shards of replicas, bit by bit.

    Raises:
        RankMismatchError: Replicas differ. All ranks raise, and name the first such parameter.

    Cost: one all-reduce of 16 bytes per parameter on the replicate axis, and an exchange, for each
    group and mesh.
    """
    replicated = (
        ([group], mesh)
        for group in groups
        for mesh in dict.fromkeys(bucket.plan.axes for bucket in group.buckets)
    )
    for group, axes in replicated:
        shard_axis, axis = axes if len(axes) > 1 else (axes[0], None)
        if axis is None or axis.size == 1:
            continue
        used = {
            id(entry)
            for each in group
            for bucket in each.buckets
            for index, entry in enumerate(bucket.entries)
            if bucket.sites.held(index)
        }
        entries = [e for e in ComparedMesh((), axes).entries_of(group) if id(e) in used]
        if not entries:
            continue
        pieces: list[Any] = [entry.param for entry in entries]
        values = torch.stack([fingerprint(piece.to_local(), 0) >> 1 for piece in pieces])
        extremes = torch.cat([values, -values])
        axis.all_reduce(extremes, "max")
        highest, lowest = extremes.view(2, -1)
        differs = (highest != -lowest).tolist()
        mine = None
        if any(differs):
            index = differs.index(True)
            by_replica = axis.exchange(int(values[index]))
            other = next(i for i, value in enumerate(by_replica) if value != by_replica[0])
            mine = (
                f"replicas have drifted apart: {entries[index].name!r} is not the same on replica "
                f"0 and on replica {other}. Update all of them alike: the same optimizer settings, "
                f"no write on some ranks only, and set_requires_all_reduce(True) before the last "
                f"backward of a step. Load a checkpoint to make them equal again."
            )
        text = first_of_all(mine, [shard_axis])
        if text is not None:
            raise RankMismatchError(text)
    _check_parallel_copies(groups)


def _check_parallel_copies(groups: Sequence[ParamGroup]) -> None:
    """Compare what ranks of tensor parallelism hold of parameters that they do not split.

    Raises:
        RankMismatchError: Copies differ. All ranks raise, and name the first such parameter.

    Cost: an exchange of 100 bytes per parameter, for each axis of the meshes of DTensors.
    """
    buckets = [bucket for group in groups for bucket in group.buckets]
    entries: list[Any] = [entry for bucket in buckets for entry in bucket.entries]
    splits = [entry.param.spec.tensor_parallel for entry in entries]
    meshes = [split for split in splits if split is not None]
    axes = {axis.members: axis for each in meshes for axis in each.mesh_axes if axis.size > 1}
    pieces = [
        (entry.name, None if split is None else split.part, *_piece_of(entry))
        for entry, split in zip(entries, splits, strict=True)
        if axes and entry.param.spec.around is None  # Else other ranks hold other parameters.
    ]
    mine = None
    for members, axis in axes.items():
        for of_ranks in zip(*axis.exchange(pieces), strict=True):
            (name, *place, _), *_ = of_ranks  # Ranks may have other parts, or cut them elsewhere.
            alike = ((i, each) for i, each in enumerate(of_ranks) if [*each[1:-1]] == place)
            other = next((rank for rank, each in alike if each != of_ranks[0]), None)
            if mine is None and other is not None:
                mine = (
                    f"copies have drifted apart: {name!r} is not the same on rank {members[0]} and "
                    f"on rank {members[other]}, which compute it together. Gradients of a "
                    f"parameter that is no DTensor are not summed over these ranks. Name its "
                    f"module in the plan of parallelize_module, for example as SequenceParallel(). "
                    f"Checkpoints have the values of rank {members[0]}."
                )
    of_meshes = dict.fromkeys(axis for bucket in buckets for axis in bucket.plan.axes)
    text = first_of_all(mine, [*axes.values(), *of_meshes]) if axes else None
    if text is not None:
        raise RankMismatchError(text)


class UsedParameters:
    """Record of the parameters that any rank used, exchanged in each synced backward."""

    def __init__(self, groups: Sequence[ParamGroup], meshes: Sequence[ComparedMesh]) -> None:
        self._groups = groups
        self._on_meshes = [_UsedOnMesh(groups, mesh) for mesh in meshes if mesh.axes]
        self._num_noted = num_noted()
        self._num_inferences = 0

    def start(self, streams: CommStreams) -> None:
        """Send which parameters had gradients here, and numbers of this rank's own actions.

        Cost: one all-reduce of 8 bytes per parameter and 32 more, on every axis.
        """
        if not self._on_meshes:
            return
        self.finish()  # Finish the last one: another backward may follow it at once.
        self.check_alike()
        all_fired = [
            [int(f) for each in on_mesh.mesh.gradients_of(self._groups) for f in each.fired]
            for on_mesh in self._on_meshes
        ]
        if not any(all_fired):
            return
        self._num_inferences = 0
        written = self._take_written()
        for on_mesh, fired in zip(self._on_meshes, all_fired, strict=True):
            if fired:
                on_mesh.send(streams, fired, on_mesh.describe(), written)

    def compare_in_inference(self, streams: CommStreams) -> None:
        """Raise if ranks acted differently in ways that no other check sees, without a backward.

        It is called on all ranks, in each pass without gradients that gathers anything.

        Raises:
            RankMismatchError: For the reasons of `check_alike`.

        Cost: one all-reduce of 32 bytes, and 16 for each bucket, on every axis, in the first,
        second, fourth, eighth ... of these passes after a backward. The host waits for it. Nothing
        in the other passes.
        """
        self._num_inferences += 1
        if not self._on_meshes or self._num_inferences & (self._num_inferences - 1):
            return
        self.finish()
        self.check_alike()
        written = self._take_written()
        for on_mesh in self._on_meshes:
            text = "what was written before a forward without gradients"
            on_mesh.send(streams, on_mesh.take_updated(), text, written)
        self.finish()
        self.check_alike()
        for on_mesh in self._on_meshes:
            on_mesh.warn_of_updates()

    def _take_written(self) -> list[Written]:
        """Return what was written since the last call, usually nothing."""
        before, self._num_noted = self._num_noted, num_noted()
        if before == self._num_noted:
            return []
        return [each for group in self._groups for each in group.take_written()]

    def check_alike(self) -> None:
        """Raise if ranks acted differently before their last exchange, unseen by other checks.

        It is called on all ranks, when the exchanged numbers have come.

        Raises:
            RankMismatchError: Ranks of a mesh wrote different values to its parameters, or took
                different steps of an optimizer. Every rank of the mesh raises.

        Cost: nothing; if something differs, an exchange on each axis of that mesh.
        """
        for on_mesh in self._on_meshes:
            on_mesh.check_alike()

    def by_group(self) -> list[list[list[int]]]:
        """Wait; return per group and bucket which parameters had gradients on any rank."""
        self.finish()
        flags = [iter(on_mesh.flags.tolist()) for on_mesh in self._on_meshes]
        result = []
        for group in self._groups:
            of_group = []
            for each in group.gradients.buckets:
                pairs = zip(self._on_meshes, flags, strict=True)
                known = next((found for m, found in pairs if m.mesh.has(each.bucket)), None)
                of_group.append(
                    list(each.fired) if known is None else [next(known) for _ in each.fired]
                )
            result.append(of_group)
        return result

    def finish_on_host(self) -> None:
        """Wait for the exchange, if that needs no wait for a device."""
        for on_mesh in self._on_meshes:
            if on_mesh.handle is not None and on_mesh.handle.is_of_host:
                on_mesh.finish()

    def finish(self) -> None:
        """Wait, if it is under way."""
        for on_mesh in self._on_meshes:
            on_mesh.finish()

    def reset(self) -> None:
        """Forget the step, after an exception."""
        for on_mesh in self._on_meshes:
            on_mesh.reset()


_COMPARED = "numbers that ranks compare"  # Name of the collective in records of a step.


class _UsedOnMesh:
    """The `UsedParameters` of one mesh."""

    def __init__(self, groups: Sequence[ParamGroup], mesh: ComparedMesh) -> None:
        self.mesh = mesh
        self._groups = groups
        self.handle: CheckHandle | None = None
        self.flags = torch.empty(0, dtype=torch.int64, device="cpu")
        self._written: dict[int, KnownValue | None] = {}
        self._compares_written = True
        self._is_checked = True
        self._versions = self._shard_versions()
        self._actions = OwnActions(groups, mesh)
        self._done = TakenActions([], "", is_complete=True)
        self._updated: Sequence[int] = ()

    def _shard_versions(self) -> list[int]:
        return [bucket.store.shard_version for bucket in self.mesh.buckets_of(self._groups)]

    def take_updated(self) -> Sequence[int]:
        """Return for each bucket two numbers that say if its shard was written: 1, -1 or 0, 0.

        The comparison is with the last forward of this kind. A rank without a piece has the least
        numbers: 0, -1.
        """
        self._updated = ()
        if not watch_settings.compare_values:
            return ()
        before, self._versions = self._versions, self._shard_versions()
        result: list[int] = []
        buckets = self.mesh.buckets_of(self._groups)
        for bucket, was, is_now in zip(buckets, before, self._versions, strict=True):
            has_piece = not all(unwritten(entry).is_empty for entry in bucket.entries)
            is_updated = int(was != is_now)
            result += [is_updated, -is_updated] if has_piece else [0, -1]
        self._updated = result
        return result

    def warn_of_updates(self) -> None:
        """Warn of the first bucket that some ranks have written and others have not."""
        extremes = self.flags[: len(self._updated)].view(-1, 2).tolist()
        for index, (bucket, (most, least)) in enumerate(
            zip(self.mesh.buckets_of(self._groups) if extremes else (), extremes, strict=True)
        ):
            if most == -least or (most, least) == (0, -1):
                continue
            if not self._differs(bucket, tuple(self._updated[2 * index : 2 * index + 2])):
                continue
            msg = (
                f"{bucket.entries[0].name!r} and those beside it were updated on some ranks, and "
                f"not on others, since the last forward without gradients. Each rank updates its "
                f"own shards: do it on every rank. An average of weights (EMA) that is updated on "
                f"rank 0 only is a patchwork."
            )
            warn_user(msg, is_first_rank=self._groups[0].mesh.is_first_rank)
            return

    def _differs(self, bucket: Bucket, updated: tuple[int, ...]) -> bool:
        """Whether ranks that updated a bucket have other pieces than those that did not.

        Replicas have the same pieces if one has sent them to the others. All ranks call it.

        Cost: two exchanges on each axis.
        """
        mine = (updated, [_piece_of(entry) for entry in bucket.entries])
        found = None
        for axis in self.mesh.axes:
            known = [each for each in axis.exchange(mine) if each[0] != (0, -1)]
            if any(u != known[0][0] and pieces != known[0][1] for u, pieces in known):
                found = True
        return first_of_all(found, self.mesh.axes) is not None

    def send(
        self,
        streams: CommStreams,
        fired: Sequence[int],
        description: str,
        written: Sequence[Written],
    ) -> None:
        """Send flags, and numbers of this rank's own actions."""
        number = self._number_of(written)
        steps, pickled, _ = self._done = self._actions.take()
        done = _digest(repr((steps, bool(pickled))).encode()) if steps or pickled else 0
        numbers = [*fired, number, -number, done, -done]
        self.flags = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._is_checked = False
        if _events.observer is not None:
            _events.observer.begin(
                "all_reduce",
                _COMPARED,
                nbytes=self.flags.nbytes,
                across=("", math.prod(axis.size for axis in self.mesh.axes)),
            )
            _events.observer.begin("wait", _COMPARED)  # The host waits between several axes.
        self.handle = streams.start_all_reduce_max(self.flags, self.mesh.axes, description)
        if _events.observer is not None:
            _events.observer.end("wait")

    def describe(self) -> str:
        """Return the name of the exchange, which differs on a rank that froze a parameter.

        That is a parameter that was frozen after it was sharded, in a bucket with trained ones.
        """
        buckets = [each.bucket.entries for each in self.mesh.gradients_of(self._groups)]
        trained = [[entry.param.requires_grad for entry in entries] for entries in buckets]
        frozen = [
            entry.name
            for entries, flags in zip(buckets, trained, strict=True)
            for entry, is_trained in zip(entries, flags, strict=True)
            if not is_trained and any(flags)
        ]
        without = f", without the frozen {listed(frozen, str)}" if frozen else ""
        return f"which of {sum(map(sum, trained))} trained parameters were used{without}"

    def _number_of(self, written: Sequence[Written]) -> int:
        """Return a number of what was written since the last step, and keep the writes."""
        self._written = {}
        if not written:
            return 0
        own = {id(entry) for entry in self.mesh.entries_of(self._groups)}
        taken = [each for each in written if id(each[0]) in own]
        self._written = {id(entry): value for entry, _, value in taken}
        if not taken or not self._compares_written:
            return 0
        # Take all writes, even if any value may be right here: other ranks may not know that.
        return _digest(repr([(entry.name, each.number) for entry, each, _ in taken]).encode())

    def check_alike(self) -> None:
        """See `UsedParameters.check_alike`."""
        if self._is_checked:
            return
        self._is_checked = True
        most_written, least_written, most_done, least_done = self.flags.tolist()[-4:]
        if most_done != -least_done:
            text = self._first_of(first_difference, self._done)
            if text is not None:
                raise RankMismatchError(text)
            # One replica may save for all replicas.
            on_shards = {id(b.plan.axis) for b in self.mesh.buckets_of(self._groups)}
            axes = [axis for axis in self.mesh.axes if id(axis) in on_shards]
            text = self._first_of(pickled_on_some, self._done.pickled, axes)
            if text is not None:
                warnings.warn(text, stacklevel=2)
        if most_written != -least_written:
            entries = self.mesh.entries_of(self._groups)
            mine = [
                (entry.name, _with_piece(entry, self._written.get(id(entry), unwritten(entry))))
                for entry in sorted(entries, key=lambda entry: entry.order)
            ]
            text = self._first_of(_first_written_difference, mine)
            if text is not None:
                raise RankMismatchError(text)
            # The difference is overwritten, or in no rank's piece. Do not ask again in each step.
            self._compares_written = False

    def _first_of(
        self,
        compare: Callable[[list[Any]], str | None],
        mine: object,
        axes: Sequence[AxisComm] | None = None,
    ) -> str | None:
        """Return what is found over any axis, or over given axes, on all ranks of the mesh."""
        found = [compare(axis.exchange(mine)) for axis in axes or self.mesh.axes]
        text: str | None = first_of_all(next(filter(None, found), None), self.mesh.axes)
        return text

    def finish(self) -> None:
        """Wait, if it is under way."""
        handle, self.handle = self.handle, None
        if handle is not None:
            if _events.observer is not None:
                _events.observer.begin("wait", _COMPARED)
            handle.wait()
            if _events.observer is not None:
                _events.observer.end("wait")
                _events.observer.end("all_reduce")

    def reset(self) -> None:
        """Forget the step, after an exception."""
        self.handle = None
        self._is_checked = True
