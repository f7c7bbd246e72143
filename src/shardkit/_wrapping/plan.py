"""`ShardPlan`: the groups of a model before anything is changed, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit._errors import WrapError
from shardkit._module import checks
from shardkit._module.materialize import materialize
from shardkit._params.planned import plan_buckets
from shardkit._policy import CPUOffloadPolicy
from shardkit._wrapping.apply import shard_units
from shardkit._wrapping.records import (
    GroupPlan,
    PlannedMemory,
    PlannedTraffic,
    shared_arguments,
    shown_nbytes,
    table,
)
from shardkit._wrapping.shape_only import is_shape_only
from shardkit._wrapping.traffic import plan_gathers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from shardkit._mesh import DeviceMesh
    from shardkit._params.planned import PlannedBucket
    from shardkit._wrapping.strategies import Strategy
    from shardkit._wrapping.units import Unit

_STATES = 4
"""Tensors of a parameter's size that AdamW keeps: the parameter, its gradient, two moments."""


@dataclass(slots=True, eq=False)
class PlannedUnit:
    """A unit with all that decides how it is sharded.

    Attributes:
        unit: The modules and parameters.
        mesh: The mesh over which they are sharded.
        arguments: The arguments of `fully_shard`.
        buckets: The buckets that its group will consist of.
    """

    unit: Unit
    mesh: DeviceMesh
    arguments: dict[str, Any]
    buckets: list[PlannedBucket]

    @classmethod
    def of(cls, unit: Unit, mesh: DeviceMesh, arguments: dict[str, Any]) -> PlannedUnit:
        """Plan the group of a unit, and check what `fully_shard` would check.

        Raises:
            WrapError: As `fully_shard` raises it.
            MeshError: The same.
        """
        for module in unit.modules:
            checks.check_module(module)
        checks.check_mesh(mesh)
        checks.checked_reshard(arguments["reshard_after_forward"], mesh)
        if not is_shape_only(mesh):
            checks.check_params(unit.entries, mesh, arguments["offload_policy"])
        checks.check_reparametrized(unit.entries)
        if arguments["shard_placement_fn"] is not None:
            checks.check_placements(unit.entries, arguments["shard_placement_fn"])
        result = cls(unit, mesh, arguments, [])
        result.plan()
        return result

    def plan(self) -> None:
        """Plan its buckets for its arguments."""
        self.buckets = plan_buckets(
            self.unit.entries,
            mesh=self.mesh,
            policy=self.arguments["mp_policy"],
            offload=self.arguments["offload_policy"],
        )

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is on the host, and the device has memory of its own."""
        wants = isinstance(self.arguments["offload_policy"], CPUOffloadPolicy)
        return wants and self.mesh.backend.has_own_memory

    @property
    def is_resharded(self) -> bool:
        """Whether the unsharded parameters are freed between forward and backward."""
        value = self.arguments["reshard_after_forward"]
        return not self.unit.is_root if value is None else bool(value)

    @property
    def state_nbytes(self) -> int:
        """Bytes that AdamW keeps of the group on this rank."""
        return sum(b.shard_nbytes * (_STATES if b.is_trainable else 1) for b in self.buckets)

    def record(self) -> GroupPlan:
        """Return what is shown of the group."""
        unit, buckets = self.unit, self.buckets
        return GroupPlan(
            names=unit.names,
            kinds=tuple(type(module).__name__ for module in unit.modules),
            num_params=len(unit.entries),
            numel=sum(sum(bucket.layout.numels) for bucket in buckets),
            nbytes=sum(bucket.nbytes for bucket in buckets),
            padding_nbytes=sum(bucket.padding_nbytes for bucket in buckets),
            shard_nbytes=sum(bucket.shard_nbytes for bucket in buckets),
            unsharded_nbytes=sum(bucket.unsharded_nbytes for bucket in buckets),
            send_nbytes=sum(bucket.send_nbytes for bucket in buckets),
            state_nbytes=self.state_nbytes,
            is_resharded=self.is_resharded,
            is_offloaded=self.is_offloaded,
            tied=tuple(entry.name for entry in unit.entries if len(set(entry.sites)) > 1),
            shared=unit.shared,
            arguments=dict(self.arguments),
        )

    def traffic(self, gathers: int, passes: int, reductions: int) -> PlannedTraffic:
        """Return what the group communicates in a step.

        Args:
            gathers: The number of its gathers.
            passes: The number of those that go over all ranks, where others go over neighbours.
            reductions: The number of its reductions.
        """
        copies, ranks = (1, *self.mesh.shape)[-2:]
        gathered = [bucket for bucket in self.buckets if bucket.unsharded_nbytes]
        trained = [bucket for bucket in self.buckets if bucket.is_trainable]
        unsharded = sum(bucket.unsharded_nbytes for bucket in gathered)
        sent = sum(bucket.send_nbytes for bucket in trained)
        whole = gathers
        near, value = ranks, self.arguments["reshard_after_forward"]
        if isinstance(value, int) and not isinstance(value, bool):
            whole, near = min(gathers, passes), value
        received = whole * unsharded * (ranks - 1) // ranks
        received += (gathers - whole) * unsharded * (near - 1) // near
        own = sum(bucket.sum_nbytes for bucket in trained)
        return PlannedTraffic(
            all_gathers=gathers * len(gathered) * (ranks > 1),
            reduce_scatters=reductions * len(trained) * (ranks > 1),
            all_reduces=reductions * len(trained) * (copies > 1),
            gathered_nbytes=received,
            reduced_nbytes=reductions * sent * (ranks - 1) // ranks,
            all_reduced_nbytes=reductions * 2 * own * (copies - 1) // copies,
        )


class ShardPlan:
    """What `auto_shard` is about to do, or has done: groups, bytes, collectives.

    ``print(plan)`` shows a table. Nothing is changed before `apply`.

    Attributes:
        model: The root; what `apply` shards.
        mesh_shape: (shard,) or (replicate, shard).
        groups: Every group that has parameters, in the order of sharding; the root's is last.
        without_group: Names of units that have no group, for all their parameters are tied or
            shared, and belong to a unit around them.
        strategy: The strategy of the call, or None.
        is_applied: The model is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        units: Sequence[PlannedUnit],
        *,
        strategy: Strategy | None,
        prepare: Callable[[nn.Module, dict[str, Any]], Any] | None,
        init_fn: Callable[[nn.Module], object] | None,
    ) -> None:
        self.model = model
        self.mesh_shape = mesh.shape
        self.strategy = strategy
        self.is_applied = False
        self._mesh = mesh
        self._units = list(units)
        self._held = [unit for unit in units if unit.unit.entries]
        self._prepare = prepare
        self._init_fn = init_fn
        self._params = {id(param) for param in model.parameters()}
        self.groups: tuple[GroupPlan, ...] = tuple(unit.record() for unit in self._held)
        self.without_group: tuple[str, ...] = tuple(
            ", ".join(unit.unit.names)
            for unit in units
            if not unit.unit.entries and not unit.unit.is_root
        )
        self._steps: dict[int, tuple[list[PlannedTraffic], int]] = {1: self._step(1)}

    def apply(self) -> nn.Module:
        """Shard the model as planned; return it.

        If a callable that prepares modules raises, the groups before it are sharded already.

        Raises:
            WrapError: It was applied before, was made for a mesh shape without ranks, or the
                model's parameters have been replaced since.
            MeshError: As of `fully_shard`.
            StateError: As of `materialize`.
        """
        if is_shape_only(self._mesh):
            msg = (
                f"this plan was made for a mesh shape, {self.mesh_shape}, and there are no ranks "
                f"to shard over. Call auto_shard with a mesh, or with None, on all ranks."
            )
            raise WrapError(msg)
        if self.is_applied:
            msg = "this plan was applied before. A model is sharded once."
            raise WrapError(msg)
        if {id(param) for param in self.model.parameters()} != self._params:
            msg = (
                "the model has other parameters than when it was planned. Call auto_shard after "
                "all changes of the model (adapters, conversions, ties)."
            )
            raise WrapError(msg)
        units = [planned.unit for planned in self._units]
        arguments = [planned.arguments for planned in self._units]
        shard_units(self.model, units, arguments, self._prepare)
        if self.strategy is not None:
            self.strategy.prepare(self.model)
        if self._init_fn is not None:
            materialize(self.model, self._init_fn)
        self.is_applied = True
        return self.model

    # --- numbers ---

    def traffic(self, micro_batches: int = 1) -> PlannedTraffic:
        """Return what a step communicates on each rank.

        It is exact if modules run once in each forward, in the order in which they are defined, and
        if no gradient clipping, logging or checkpoint comes in between. Ranks compare, besides, who
        used which parameter: 8 bytes for each, once for each reduced backward.

        Args:
            micro_batches: Forwards and backwards between two steps of the optimizer. A strategy
                says which of them reduce; without one all do.
        """
        return sum(self.traffic_of_groups(micro_batches), PlannedTraffic())

    def traffic_of_groups(self, micro_batches: int = 1) -> list[PlannedTraffic]:
        """Return what a step communicates, for each of `groups`."""
        if micro_batches not in self._steps:
            self._steps[micro_batches] = self._step(micro_batches)
        return self._steps[micro_batches][0]

    @property
    def memory(self) -> PlannedMemory:
        """Bytes on one rank."""
        groups = self.groups
        kept = sum(group.unsharded_nbytes for group in groups if not group.is_resharded)
        return PlannedMemory(
            shard_nbytes=sum(group.shard_nbytes for group in groups),
            host_nbytes=sum(group.shard_nbytes for group in groups if group.is_offloaded),
            largest_nbytes=max((group.unsharded_nbytes for group in groups), default=0),
            kept_nbytes=kept,
            peak_unsharded_nbytes=self._steps[1][1],
            state_nbytes=sum(g.state_nbytes for g in groups if not g.is_offloaded),
        )

    def _step(self, micro_batches: int) -> tuple[list[PlannedTraffic], int]:
        """Return what each group communicates, and the most unsharded bytes at once."""
        strategy = self.strategy
        stays = strategy is not None and not strategy.reshard_after_backward
        sums_whole = strategy is not None and not strategy.reduces_each_micro_batch
        counts, peak_nbytes = plan_gathers(
            self.model,
            [(g, held.unit.modules) for g, held in zip(self.groups, self._held, strict=True)],
            stays=stays,
            micro_batches=micro_batches,
            batches_small=self._mesh.backend.batches_small_groups,
        )
        passes = 1 if stays else micro_batches
        reductions = 1 if sums_whole else micro_batches
        costs = [
            unit.traffic(count, passes, reductions)
            for unit, count in zip(self._held, counts, strict=True)
        ]
        return costs, peak_nbytes

    # --- shown ---

    def __repr__(self) -> str:
        """Return one line."""
        state = "applied" if self.is_applied else "not applied"
        return f"<ShardPlan of {len(self.groups)} groups on {self.mesh_shape} ranks, {state}>"

    def __str__(self) -> str:
        """Return the table of groups, the memory, and the collectives of a step."""
        memory, step = self.memory, self.traffic()
        ranks = " x ".join(map(str, self.mesh_shape))
        name = f", strategy {self.strategy.name}" if self.strategy is not None else ""
        lines = [f"{len(self.groups)} groups on {ranks} ranks{name}"]
        lines += [*shared_arguments(self.groups), ""]
        lines += table(self.groups, self.traffic_of_groups())
        if self.without_group:
            lines += [
                "",
                f"no groups of their own (tied or shared): {'; '.join(self.without_group)}",
            ]
        padding = sum(group.padding_nbytes for group in self.groups)
        total = sum(group.nbytes for group in self.groups)
        lines += [
            "",
            f"model: {shown_nbytes(total)}, padding {shown_nbytes(padding)}",
            f"memory of a rank, activations not counted: shards {shown_nbytes(memory.shard_nbytes)}"
            + (f" ({shown_nbytes(memory.host_nbytes)} on the host)" if memory.host_nbytes else "")
            + f", largest group unsharded {shown_nbytes(memory.largest_nbytes)}"
            + f", kept from forward to backward {shown_nbytes(memory.kept_nbytes)}"
            + f", peak of unsharded {shown_nbytes(memory.peak_unsharded_nbytes)}",
            f"between steps on the device, with AdamW: {shown_nbytes(memory.state_nbytes)}",
            f"a step of a rank: {step}",
        ]
        return "\n".join(lines)
