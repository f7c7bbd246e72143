"""`ShardPlan`: the groups of a model before anything is changed, with their numbers."""

from __future__ import annotations

import functools
import graphlib
import itertools
import math
import operator
import re
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from shardkit._errors import MeshError, WrapError
from shardkit._mesh import DeviceMesh
from shardkit._module import checks
from shardkit._module.fully_shard import fully_shard
from shardkit._module.hooks import get_state
from shardkit._module.materialize import materialize
from shardkit._module.placements import place_params
from shardkit._params.make import PlannedBucket, plan_buckets
from shardkit._schedule import Action, Op, UnshardSchedule
from shardkit._settings import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardkit._text import counted, shown_nbytes
from shardkit.backends.base import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardkit._params.sites import ParamEntry
    from shardkit._wrapping.experts import Experts
    from shardkit._wrapping.policies import Choice, ModuleTree
    from shardkit._wrapping.strategies import Strategy


# --- meshes without ranks -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """The size of an axis, seen from its first rank."""

    size: int
    rank: int = 0

    def __getattr__(self, name: str) -> NoReturn:
        msg = f"a mesh that is only a shape has no ranks to communicate with ({name})."
        raise MeshError(msg)


class ShapeOnly(Backend):
    """A backend for plans: it is like an accelerator, whose memory is not the host's."""

    has_own_memory = True

    def __init__(self, shape: Sequence[int]) -> None:
        self.device = torch.device("meta")
        self._shape = tuple(shape)

    def process_group(self, axis: int) -> NoReturn:
        """Raise: there is no process group."""
        msg = f"axis {axis} of a mesh that is only a shape has no process group."
        raise MeshError(msg)

    def axis(self, axis: int) -> Any:
        """Return the size of an axis."""
        return _Axis(self._shape[axis])

    def split_axis(self, axis: int, size: int) -> Any:
        """Return the size of a part of an axis."""
        del axis
        return _Axis(size)

    def joint_axis(self, ranks: Sequence[int]) -> Any:
        """Return the size of all axes joined to one."""
        return _Axis(len(ranks))

    def with_axes(self, axes: Sequence[Any]) -> ShapeOnly:
        """Return the backend of a mesh of other axes."""
        return ShapeOnly([axis.size for axis in axes])

    def for_axes(self, axes: Sequence[int]) -> ShapeOnly:
        """Return the backend of a submesh."""
        return ShapeOnly([self._shape[axis] for axis in axes])

    def make_streams(self, axes: Any, share: Any = None) -> NoReturn:
        """Raise: nothing runs."""
        del axes, share
        msg = "a mesh that is only a shape has no streams."
        raise MeshError(msg)


def mesh_of_shape(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh for a plan, seen from its first rank."""
    if not shape or min(shape) < 1:
        msg = f"a mesh shape is one or two positive numbers of ranks, got {tuple(shape)}."
        raise MeshError(msg)
    sizes = tuple(shape)
    return DeviceMesh("meta", sizes, tuple(range(math.prod(sizes))), None, 0, ShapeOnly(sizes))


def is_shape_only(mesh: DeviceMesh) -> bool:
    """Whether a mesh has no ranks."""
    return isinstance(mesh.backend, ShapeOnly)


# --- records --------------------------------------------------------------------------------------

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class GroupPlan:
    """A group of a `ShardPlan`.

    Attributes:
        names: Names of its modules; ``("",)`` is the root.
        kinds: Classes of its modules.
        num_params: Number of parameters.
        numel: Number of their elements.
        nbytes: Bytes in the dtype in which they are stored, over all ranks.
        padding_nbytes: Bytes of all shards in addition to that.
        shard_nbytes: Bytes of this rank's shard.
        unsharded_nbytes: Bytes of the unsharded parameters; 0: the shard itself is used.
        send_nbytes: Bytes of the buffer that a reduction sends; 0: nothing is trainable.
        state_nbytes: Bytes that the rank keeps of the group between steps with AdamW: the shard,
            gradients and two tensors of state.
        is_resharded: Whether unsharded parameters are freed between forward and backward.
        is_offloaded: Whether the shard, gradients and optimizer state are on the host.
        tied: Names of parameters that several modules hold.
        shared: Names of modules that several inner units share; this group takes their parameters.
        arguments: Arguments of its `fully_shard` call, except the module.
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
    """Collectives and bytes of one step on one rank, for a group or a model.

    Counts are collectives of buckets; small groups may share one. Bytes are those that a rank
    receives in gathers and sends in reductions, in a ring: (N-1)/N of a gathered or reduced buffer,
    and 2 (R-1)/R of an all-reduced one.

    Attributes:
        all_gathers: Number of all-gathers over the shard axis.
        reduce_scatters: Number of reduce-scatters over the shard axis.
        all_reduces: Number of all-reduces over the replicate axis.
        gathered_nbytes: Bytes in all-gathers.
        reduced_nbytes: Bytes in reduce-scatters.
        all_reduced_nbytes: Bytes in all-reduces.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    gathered_nbytes: int = 0
    reduced_nbytes: int = 0
    all_reduced_nbytes: int = 0

    def __add__(self, other: PlannedTraffic) -> PlannedTraffic:
        """Return the sum."""
        return PlannedTraffic(*map(operator.add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        """Return the traffic in words."""
        return (
            f"{counted(self.all_gathers, 'all-gathers')}, {shown_nbytes(self.gathered_nbytes)}; "
            f"{counted(self.reduce_scatters, 'reduce-scatters')}, "
            f"{shown_nbytes(self.reduced_nbytes)}; "
            f"{counted(self.all_reduces, 'all-reduces')}, {shown_nbytes(self.all_reduced_nbytes)}"
        )


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes on one rank, in the sense of `memory_stats()`.

    Attributes:
        shard_nbytes: Bytes of shards, on the device or the host.
        host_nbytes: Bytes of shards on the host.
        largest_nbytes: Bytes of the unsharded parameters of the largest group.
        kept_nbytes: Bytes of unsharded parameters that exist from forward to backward.
        peak_unsharded_nbytes: The most bytes of unsharded parameters at one time, if modules run
            once each, in the order of their definition.
        state_nbytes: Bytes that stay on the device between steps with AdamW: shards, gradients and
            two tensors of optimizer state.
    """

    shard_nbytes: int
    host_nbytes: int
    largest_nbytes: int
    kept_nbytes: int
    peak_unsharded_nbytes: int
    state_nbytes: int


def table(groups: Sequence[GroupPlan], traffic: Sequence[PlannedTraffic]) -> list[str]:
    """Return the lines of a table of groups; adjacent groups that differ in a number share one."""
    rows = [("group", "parameters", "bytes", "padding", "gathered", "reduced", "arguments")]
    common = shared_arguments(groups)
    for _, run in itertools.groupby(zip(groups, traffic, strict=True), _kind_of):
        same = [*run]
        first, cost = same[0]
        name = first.name
        if len(same) > 1:
            name = f"{len(same)} x {name} ... {same[-1][0].name}"
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
    width, *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    line = "  ".join([f"{{:<{width}}}", *(f"{{:>{each}}}" for each in widths), "{}"])
    return [line.format(*row).rstrip() for row in rows]


def _kind_of(pair: tuple[GroupPlan, PlannedTraffic]) -> tuple[Any, ...]:
    """Return what adjacent groups in one line share: all but a number in their names."""
    group, cost = pair
    return (
        tuple(_NUMBER.sub("#", name) for name in group.names),
        (group.kinds, group.numel, group.nbytes, group.padding_nbytes, group.is_offloaded),
        (cost, tuple(_shown_arguments(group))),
    )


def shared_arguments(groups: Sequence[GroupPlan]) -> list[str]:
    """Return the arguments that all groups share; nothing if there is only one group."""
    shown = [_shown_arguments(group) for group in groups]
    if len(shown) <= 1:
        return []
    return [text for text in shown[0] if all(text in other for other in shown)]


_DEFAULTS = (None, MixedPrecisionPolicy(), OffloadPolicy())


def _shown_arguments(group: GroupPlan) -> list[str]:
    """Return the arguments of a group; defaults are left out."""
    shown = [
        f"{name}={_shown_value(value)}"
        for name, value in group.arguments.items()
        if name not in ("mesh", "ignored_params") and value not in _DEFAULTS
    ]
    shown += [f"tied: {name}" for name in group.tied]
    return shown + [f"shared: {name}" for name in group.shared]


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


# --- units ----------------------------------------------------------------------------------------

_STATES = 4
"""Tensors of a parameter's size that AdamW keeps: the parameter, its gradient, two moments."""


@dataclass(slots=True, eq=False)
class Unit:
    """The modules and arguments of one call of `fully_shard`."""

    names: tuple[str, ...]  # Names of its modules; an empty name is the root's.
    modules: list[nn.Module]  # One module, or the modules of a list.
    arguments: dict[str, Any]  # Arguments of the call.
    # Parameters that it takes, by their names in the root.
    entries: list[ParamEntry] = field(default_factory=list)
    # Parameters in it that belong to a unit around it, because they are tied or shared.
    left_out: set[nn.Parameter] = field(default_factory=set)
    # Names of modules in it that inner units share, so that it takes their parameters.
    shared: tuple[str, ...] = ()
    experts: Experts | None = None  # The experts of the model, if the unit holds some.
    # Buckets of which its group will consist.
    buckets: list[PlannedBucket] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        """Whether it is the unit of the root."""
        return self.names == ("",)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over which it is sharded."""
        mesh: DeviceMesh = self.arguments["mesh"]
        return mesh

    @property
    def state_nbytes(self) -> int:
        """Bytes that AdamW keeps of the group on this rank."""
        return sum(b.shard_nbytes * (_STATES if b.is_trainable else 1) for b in self.buckets)

    def check(self) -> None:
        """Make the checks of `fully_shard`."""
        for module in self.modules:
            checks.check_module(module)
        checks.check_mesh(self.mesh)
        others = place_params(self.entries, self.arguments["shard_placement_fn"], self.mesh)
        checks.checked_reshard(self.arguments["reshard_after_forward"], self.mesh, others)
        if not is_shape_only(self.mesh):
            checks.check_params(self.entries, self.mesh, self.arguments["offload_policy"])

    def plan(self) -> None:
        """Plan its buckets from its arguments."""
        self.buckets = plan_buckets(
            self.entries,
            mesh=self.mesh,
            policy=self.arguments["mp_policy"],
            offload=self.arguments["offload_policy"],
        )

    def prepare(
        self, model: nn.Module, prepare: Callable[[nn.Module, dict[str, Any]], Any]
    ) -> None:
        """Call `prepare` on the modules; go on with those that it returns, unless it shards."""
        prepared = [_prepared(model, module, prepare, self.arguments) for module in self.modules]
        if all(get_state(module) is None for module in self.modules):
            self.modules = prepared  # Else these may be around the sharded ones.

    def shard(self) -> None:
        """Call `fully_shard`, unless a callable that prepares modules has done so."""
        modules: Any = self.modules
        is_done = any(get_state(module) is not None for module in modules)
        if (self.entries or self.is_root) and not is_done:
            fully_shard(modules if len(modules) > 1 else modules[0], **self.arguments)
        for module in modules if self.experts is not None else ():
            module.set_gradient_divide_factor(self.mesh.size())  # They get tokens of all ranks.

    def record(self) -> GroupPlan:
        """Return the record of the group in the plan."""
        reshards, buckets = self.arguments["reshard_after_forward"], self.buckets
        wants_host = isinstance(self.arguments["offload_policy"], CPUOffloadPolicy)
        of_rank = ("shard_nbytes", "unsharded_nbytes", "send_nbytes")
        experts = None if self.experts is None else self.experts.meshes
        counted = [  # With the number of parts in which an axis of experts holds the parameters.
            (experts.num_parts if experts and bucket.plan.mesh is experts.own else 1, bucket)
            for bucket in buckets
        ]
        return GroupPlan(
            names=self.names,
            kinds=tuple(type(module).__name__ for module in self.modules),
            num_params=len(self.entries),
            numel=sum(n * sum(bucket.layout.numels) for n, bucket in counted),
            nbytes=sum(n * bucket.nbytes for n, bucket in counted),
            padding_nbytes=sum(n * bucket.padding_nbytes for n, bucket in counted),
            state_nbytes=self.state_nbytes,
            is_resharded=not self.is_root if reshards is None else bool(reshards),
            is_offloaded=wants_host and self.mesh.backend.has_own_memory,
            tied=tuple(entry.name for entry in self.entries if len(set(entry.sites)) > 1),
            shared=self.shared,
            arguments=dict(self.arguments),
            **{name: sum(getattr(bucket, name) for bucket in buckets) for name in of_rank},
        )

    def traffic(self, gathers: int, passes: int, reductions: int) -> PlannedTraffic:
        """Return the group's communication in a step.

        Args:
            gathers: Number of its gathers.
            passes: Number of those over all ranks, if other gathers go over adjacent ranks only.
            reductions: Number of its reductions.
        """
        value = self.arguments["reshard_after_forward"]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        whole = min(gathers, passes) if is_number else gathers
        total = PlannedTraffic()
        for bucket in self.buckets:
            copies, ranks = (1, *bucket.plan.mesh.shape)[-2:]
            unsharded, own = bucket.unsharded_nbytes, bucket.sum_nbytes
            near = min(value, ranks) if is_number else ranks
            sent = bucket.send_nbytes * (ranks - 1) // ranks
            received = whole * unsharded * (ranks - 1) // ranks
            received += (gathers - whole) * unsharded * (near - 1) // near
            num_sent = reductions * bucket.is_trainable
            total += PlannedTraffic(
                all_gathers=gathers * (unsharded > 0) * (ranks > 1),
                reduce_scatters=num_sent * (ranks > 1),
                all_reduces=num_sent * (copies > 1),
                gathered_nbytes=received,
                reduced_nbytes=num_sent * sent,
                all_reduced_nbytes=num_sent * 2 * own * (copies - 1) // copies,
            )
        return total


def units_in_order(tree: ModuleTree, choice: Choice) -> list[Unit]:
    """Return the units of a choice, inner ones before outer ones, the root's last."""
    _check_overlaps(tree, choice)
    # Children come before parents, and siblings in their order.
    positions = {name: i for i, name in enumerate(tree.modules)}
    units = [
        Unit(names, [tree.modules[name] for name in names], arguments)
        for names, arguments in sorted(choice.items(), key=lambda item: positions[item[0][0]])
    ]
    numbers = {id(m): number for number, unit in enumerate(units) for m in unit.modules}
    inside: dict[Unit, list[Unit]] = {}
    for unit in units:
        inner = {id(m) for outer in unit.modules for m in outer.modules() if m is not outer}
        inside[unit] = [units[n] for n in sorted(numbers[key] for key in inner & numbers.keys())]
    try:
        order = [*graphlib.TopologicalSorter(inside).static_order()]
    except graphlib.CycleError as error:
        first, second = (", ".join(unit.names) for unit in error.args[1][:2])
        msg = (
            f"the groups ({first}) and ({second}) overlap: each has a module inside a module of "
            f"the other. Let one of them hold all of these modules, or take one of them away."
        )
        raise WrapError(msg) from None
    return [*order, Unit(("",), [tree.model], {})]


def _check_overlaps(tree: ModuleTree, choice: Choice) -> None:
    """Raise if a module is in two groups, or inside of another module of its group."""
    seen: dict[str, tuple[str, ...]] = {}
    for names in choice:
        for name in names:
            if name in seen:
                msg = (
                    f"{name!r} is in two groups, ({', '.join(seen[name])}) and "
                    f"({', '.join(names)}). Name it once."
                )
                raise WrapError(msg)
            seen[name] = names
        for name in names if len(names) > 1 else ():
            inner = {id(module) for module in tree.modules[name].modules()}
            for other in names:
                if other != name and id(tree.modules[other]) in inner:
                    msg = (
                        f"the group ({', '.join(names)}) overlaps itself: {other!r} is inside "
                        f"{name!r}, which holds its parameters. Name one of them."
                    )
                    raise WrapError(msg)


def assign_params(tree: ModuleTree, units: Sequence[Unit], ignored: set[nn.Parameter]) -> None:
    """Give each unit its parameters: those in it that no inner unit has.

    There may be several paths to a parameter: modules share a weight (tied), or parents share a
    module. The parameter belongs to the innermost unit that is on every path, so that it is
    gathered wherever it is used.
    """
    numbers = {id(m): number for number, unit in enumerate(units) for m in unit.modules}
    # Inner units come before outer ones.
    owner = {key: min(around) for key, around in tree.around_params(numbers).items()}
    left_out: set[nn.Parameter] = set()
    taken = set(ignored)
    names = {id(param): name for name, param in tree.model.named_parameters()}
    for number, unit in enumerate(units):
        held = {param for module in unit.modules for param in module.parameters()}
        unit.left_out = {
            param for param in held if param not in taken and owner[id(param)] > number
        }
        unit.entries = [*checks.find_params(unit.modules, taken | unit.left_out)]
        for entry in unit.entries:
            entry.name = names[id(entry.param)]
        left = [entry.name for entry in unit.entries if entry.param in left_out]
        unit.shared = tuple(filter(None, dict.fromkeys(map(tree.shared_module, left))))
        left_out |= unit.left_out
        taken.update(entry.param for entry in unit.entries)


# --- traffic --------------------------------------------------------------------------------------


class _Rehearsal:
    """Steps of the schedule alone; modules run once each, in the order of their definition."""

    def __init__(
        self,
        root: nn.Module,
        groups: Sequence[tuple[GroupPlan, Sequence[nn.Module]]],
        *,
        stays: bool,
        batches_small: bool,
    ) -> None:
        self._root = root
        self._groups = groups
        nbytes = [group.unsharded_nbytes for group, _ in groups]
        self._schedule = UnshardSchedule(
            nbytes=nbytes if batches_small else (), is_idle=not any(nbytes)
        )
        options = self._schedule.options
        options.several_modules = {i for i, (_, modules) in enumerate(groups) if len(modules) > 1}
        options.no_reshard_after_forward = {
            i for i, (group, _) in enumerate(groups) if not group.is_resharded
        }
        options.no_reshard_after_backward = set(range(len(groups))) if stays else set()
        self._group_of = {id(m): i for i, (_, modules) in enumerate(groups) for m in modules}
        self._nbytes = 0
        self.peak_nbytes = 0  # The most unsharded bytes at one time, from the first step on.

    def count_gathers(self, micro_batches: int) -> list[int]:
        """Return the number of gathers of each group, in a step of some micro-batches."""
        for _ in range(3):  # Learn the order in one step, make a second one, count in a third.
            self._counts = [0] * len(self._groups)
            for micro in range(micro_batches):
                self._run_pass(is_first=micro == 0)
        return self._counts

    def _do(self, actions: Sequence[Action]) -> None:
        for op, index in actions:
            nbytes = self._groups[index][0].unsharded_nbytes
            if op in (Op.GATHER, Op.PREFETCH):
                self._counts[index] += bool(nbytes)
                self._nbytes += nbytes
                self.peak_nbytes = max(self.peak_nbytes, self._nbytes)
            elif op is Op.FREE:
                self._nbytes -= nbytes

    def _run_pass(self, *, is_first: bool) -> None:
        """Run one forward and backward; before the first one of a step, shards have changed."""
        schedule = self._schedule
        self._stale = set(schedule.live) if is_first else set()
        self._left: list[Callable[[], Sequence[Action]]] = []  # What backward goes through.
        self._run: dict[int, int] = {}
        self._has_trainable = False
        schedule.begin_pass(has_changed=is_first)
        self._forward(self._root, set())
        self._do(schedule.end_pass(needs_backward=self._has_trainable))
        for step in reversed(self._left):
            self._do(step())
        self._do(schedule.end_backward())

    def _forward(self, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        index = self._group_of.get(id(module))
        if index is not None:
            if index in self._stale:
                self._stale.discard(index)
                self._do(self._schedule.refresh(index))
            self._do(self._schedule.enter_forward(index))
            is_last = index not in self._run
            self._left.append(
                functools.partial(self._schedule.exit_backward, index, is_last=is_last)
            )
            entered = len(self._left)
            self._run[index] = self._run.get(index, 0) + 1
        for child in module.children():
            self._forward(child, seen)
        if index is None:
            return
        group, _ = self._groups[index]
        self._has_trainable |= bool(group.send_nbytes)
        if self._has_trainable:
            self._left.append(functools.partial(self._schedule.enter_backward, index))
        else:
            del self._left[entered - 1]  # No backward reaches this group.
        self._do(self._schedule.exit_forward(index, needs_backward=self._has_trainable))


# --- the plan -------------------------------------------------------------------------------------


class ShardPlan:
    """The plan of `auto_shard`, applied or not: groups, bytes, collectives.

    ``print(plan)`` shows a table. Nothing is changed before `apply`.

    Attributes:
        model: The root, which `apply` shards.
        mesh_shape: Shape (shard,) or (replicate, shard).
        groups: Every group that has parameters, in the order of sharding; the root's is last.
        without_group: Names of units without a group, because all their parameters are tied or
            shared and belong to a unit around them.
        strategy: Strategy of the call, or None.
        is_applied: Whether the model has been sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        units: Sequence[Unit],
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
        self._held = [unit for unit in units if unit.entries]
        self._prepare = prepare
        self._init_fn = init_fn
        self._params = {id(param) for param in model.parameters()}
        self.groups: tuple[GroupPlan, ...] = tuple(unit.record() for unit in self._held)
        self.without_group: tuple[str, ...] = tuple(
            ", ".join(unit.names) for unit in units if not unit.entries and not unit.is_root
        )
        self._steps: dict[int, tuple[list[PlannedTraffic], int]] = {1: self._step(1)}

    def apply(self) -> nn.Module:
        """Shard the model as planned; return it.

        If a callable that prepares modules raises, the groups before that one are already sharded.

        Raises:
            WrapError: The plan was applied before, was made for a mesh shape without ranks, or the
                model's parameters have been replaced since.
            MeshError: An error of `fully_shard`.
            StateError: An error of `materialize`.
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
        for experts in {u.experts for u in self._units if u.experts is not None}:
            made = experts.cut()
            for unit in self._units:  # Tied experts belong to an outer unit.
                ignored = unit.arguments["ignored_params"]
                unit.arguments["ignored_params"] = {made.get(param, param) for param in ignored}
        for unit in self._units:
            if self._prepare is not None and not unit.is_root:
                unit.prepare(self.model, self._prepare)
            unit.shard()
        if self.strategy is not None:
            self.strategy.prepare(self.model)
        if self._init_fn is not None:
            materialize(self.model, self._init_fn)
        self.is_applied = True
        return self.model

    # --- numbers ---

    def traffic(self, micro_batches: int = 1) -> PlannedTraffic:
        """Return the communication of a step on each rank.

        The numbers are exact if modules run once in each forward, in the order of their definition,
        and if no gradient clipping, logging or checkpoint comes in between. In addition, ranks
        compare which rank used which parameter: 8 bytes for each, once for each reduced backward.

        Args:
            micro_batches: Number of forwards and backwards between two steps of the optimizer. A
                strategy determines which of them reduce; without one all do.
        """
        return sum(self.traffic_of_groups(micro_batches), PlannedTraffic())

    def traffic_of_groups(self, micro_batches: int = 1) -> list[PlannedTraffic]:
        """Return the communication of a step, for each of `groups`."""
        if micro_batches not in self._steps:
            self._steps[micro_batches] = self._step(micro_batches)
        return self._steps[micro_batches][0]

    @property
    def memory(self) -> PlannedMemory:
        """Return the bytes on one rank."""
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
        """Return the communication of each group, and the most unsharded bytes at one time."""
        strategy = self.strategy
        stays = strategy is not None and not strategy.reshard_after_backward
        sums_whole = strategy is not None and not strategy.reduces_each_micro_batch
        rehearsal = _Rehearsal(
            self.model,
            [(g, unit.modules) for g, unit in zip(self.groups, self._held, strict=True)],
            stays=stays,
            batches_small=self._mesh.backend.batches_small_groups,
        )
        passes = 1 if stays else micro_batches
        reductions = 1 if sums_whole else micro_batches
        costs = [
            unit.traffic(count, passes, reductions)
            for unit, count in zip(self._held, rehearsal.count_gathers(micro_batches), strict=True)
        ]
        return costs, rehearsal.peak_nbytes

    # --- text ---

    def __repr__(self) -> str:
        """Return one line of text."""
        state = "applied" if self.is_applied else "not applied"
        groups = counted(len(self.groups), "groups")
        return f"<ShardPlan of {groups} on {self.mesh_shape} ranks, {state}>"

    def __str__(self) -> str:
        """Return the table of groups, the memory, and the collectives of a step."""
        memory, step = self.memory, self.traffic()
        ranks = " x ".join(map(str, self.mesh_shape))
        name = f", strategy {self.strategy.name}" if self.strategy is not None else ""
        lines = [f"{counted(len(self.groups), 'groups')} on {counted(ranks, 'ranks')}{name}"]
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


def _prepared(
    model: nn.Module,
    module: nn.Module,
    prepare: Callable[[nn.Module, dict[str, Any]], Any],
    arguments: dict[str, Any],
) -> nn.Module:
    """Call `prepare`; put the module that it returns in its place."""
    result = prepare(module, arguments)
    if result is None or result is module:
        return module
    if not isinstance(result, nn.Module):
        msg = (
            f"what was to be called before sharding returned {result!r} for a "
            f"{type(module).__name__}. Return the module, another one for its place, or None."
        )
        raise WrapError(msg)
    for parent in [*model.modules()]:
        for name, child in [*parent._modules.items()]:  # noqa: SLF001 - with all places of a shared one
            if child is module:
                setattr(parent, name, result)
    return result
