"""What a plan says of a group and of a step, and how it is printed."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KIB = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class GroupPlan:
    """A group of a `ShardPlan`.

    Attributes:
        names: The names of its modules; ``("",)`` is the root.
        kinds: Classes of its modules.
        num_params: Parameters.
        numel: The number of their elements.
        nbytes: The bytes in the dtype they are stored in, all ranks together.
        padding_nbytes: Bytes of all shards beyond that.
        shard_nbytes: Bytes of this rank's shard.
        unsharded_nbytes: Bytes of the unsharded parameters; 0: the shard is used itself.
        send_nbytes: Bytes of the buffer that a reduction sends; 0: nothing is trained.
        state_nbytes: Bytes that the rank keeps of the group between steps with AdamW: shard,
            gradients and two tensors of state.
        is_resharded: Whether unsharded parameters are freed between forward and backward.
        is_offloaded: Whether shard, gradients and optimizer state are on the host.
        tied: Names of parameters that several modules hold.
        shared: Names of modules that units inside have in common, and whose parameters it takes.
        arguments: The arguments of its call of `fully_shard`, beside the module.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    num_params: int
    numel: int
    nbytes: int
    padding_nbytes: int
    shard_nbytes: int
    unsharded_nbytes: int
    send_nbytes: int
    state_nbytes: int
    is_resharded: bool
    is_offloaded: bool
    tied: tuple[str, ...]
    shared: tuple[str, ...]
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Names of its modules, or ``the root``."""
        return ", ".join(self.names) or "the root"


@dataclass(frozen=True)
class PlannedTraffic:
    """Collectives and bytes of one step on one rank, of a group or of a model.

    Counts are collectives of buckets; small groups may share them. Bytes are what a rank receives
    by gathers and sends by reductions, as a ring does: (N-1)/N of a gathered or reduced buffer, and
    2 (R-1)/R of an all-reduced one.

    Attributes:
        all_gathers: The number of all-gathers over the shard axis.
        reduce_scatters: The number of reduce-scatters over the shard axis.
        all_reduces: The number of all-reduces over the replicate axis.
        gathered_nbytes: Bytes by all-gathers.
        reduced_nbytes: Bytes by reduce-scatters.
        all_reduced_nbytes: Bytes by all-reduces.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    gathered_nbytes: int = 0
    reduced_nbytes: int = 0
    all_reduced_nbytes: int = 0

    def __add__(self, other: PlannedTraffic) -> PlannedTraffic:
        """Return the sum."""
        names = [field.name for field in fields(self)]
        return PlannedTraffic(
            **{name: getattr(self, name) + getattr(other, name) for name in names}
        )

    def __str__(self) -> str:
        """Return it in words."""
        return (
            f"{self.all_gathers} all-gathers, {shown_nbytes(self.gathered_nbytes)}; "
            f"{self.reduce_scatters} reduce-scatters, {shown_nbytes(self.reduced_nbytes)}; "
            f"{self.all_reduces} all-reduces, {shown_nbytes(self.all_reduced_nbytes)}"
        )


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes on one rank, as `memory_stats()` counts them.

    Attributes:
        shard_nbytes: Shards, on the device or the host.
        host_nbytes: The bytes of these that are on the host.
        largest_nbytes: Unsharded parameters of the largest group.
        kept_nbytes: Unsharded parameters that exist from forward to backward.
        peak_unsharded_nbytes: The most unsharded parameters at once, if modules run once each, in
            the order in which they are defined.
        state_nbytes: What stays on the device between steps with AdamW: shards, gradients and two
            tensors of optimizer state.
    """

    shard_nbytes: int
    host_nbytes: int
    largest_nbytes: int
    kept_nbytes: int
    peak_unsharded_nbytes: int
    state_nbytes: int


def shown_nbytes(nbytes: int) -> str:
    """Return bytes in the unit that suits them."""
    value, unit = float(nbytes), 0
    while value >= _KIB and unit < len(_UNITS) - 1:
        value, unit = value / _KIB, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def table(groups: Sequence[GroupPlan], traffic: Sequence[PlannedTraffic]) -> list[str]:
    """Return the lines of a table of groups; neighbours that differ in a number are one line."""
    rows = [("group", "parameters", "bytes", "padding", "gathered", "reduced", "arguments")]
    common = shared_arguments(groups)
    for same in _runs(groups, traffic):
        (first, cost), count = same[0], len(same)
        name = first.name
        if count > 1:
            name = f"{count} x {name} ... {same[-1][0].name}"
        gathers, reduced = cost.all_gathers, cost.reduced_nbytes + cost.all_reduced_nbytes
        rows.append(
            (
                name,
                f"{first.numel:,}",
                shown_nbytes(first.nbytes),
                shown_nbytes(first.padding_nbytes),
                f"{gathers} x {shown_nbytes(cost.gathered_nbytes // max(gathers, 1))}",
                shown_nbytes(reduced),
                ", ".join(text for text in _shown_arguments(first) if text not in common),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers, last = row
    cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=False)]
    return "  ".join([first.ljust(widths[0]), *cells, last]).rstrip()


def _runs(
    groups: Sequence[GroupPlan], traffic: Sequence[PlannedTraffic]
) -> list[list[tuple[GroupPlan, PlannedTraffic]]]:
    """Return neighbours together whose names are equal but for a number, and all else as well."""
    runs: list[list[tuple[GroupPlan, PlannedTraffic]]] = []
    before = None
    for pair in zip(groups, traffic, strict=True):
        group, cost = pair
        key = (
            tuple(_NUMBER.sub("#", name) for name in group.names),
            (group.kinds, group.numel, group.nbytes, group.padding_nbytes, group.is_offloaded),
            (cost, tuple(_shown_arguments(group))),
        )
        if key == before:
            runs[-1].append(pair)
        else:
            runs.append([pair])
        before = key
    return runs


def shared_arguments(groups: Sequence[GroupPlan]) -> list[str]:
    """Return what was chosen for all groups; nothing where there is one group only."""
    shown = [_shown_arguments(group) for group in groups]
    if len(shown) <= 1:
        return []
    return [text for text in shown[0] if all(text in other for other in shown)]


def _shown_arguments(group: GroupPlan) -> list[str]:
    """Return what was chosen for a group; defaults are left out."""
    shown = [
        f"{name}={_shown_value(value)}"
        for name, value in group.arguments.items()
        if name not in ("mesh", "ignored_params") and not _is_default(name, value)
    ]
    shown += [f"tied: {name}" for name in group.tied]
    return shown + [f"shared: {name}" for name in group.shared]


def _is_default(name: str, value: Any) -> bool:
    if value is None:
        return True
    cls = type(value)
    return (
        name in ("mp_policy", "offload_policy")
        and value == cls()
        and cls.__name__
        in (
            "MixedPrecisionPolicy",
            "OffloadPolicy",
        )
    )


def _shown_value(value: Any) -> str:
    cls = type(value)
    parts = getattr(cls, "__dataclass_fields__", None)
    if parts is None:
        return getattr(value, "__name__", None) or repr(value)
    default = cls()
    changed = [
        f"{name}={getattr(value, name)}"
        for name in parts
        if getattr(value, name) != getattr(default, name)
    ]
    return f"{cls.__name__}({', '.join(changed)})".replace("torch.", "")
