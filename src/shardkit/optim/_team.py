"""A team: the ranks of one mesh, and the parameters that they give out among themselves."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit._errors import OptimizerError
from shardkit._layout.exchange import HeldPart, Spread, Traffic
from shardkit._layout.owned import assign_owners, loads_of, owned_layout, plan_batches
from shardkit._mesh import DeviceMesh
from shardkit._tensor.spec import Replicate, ShardSpec
from shardkit.backends.process_group import JoinedBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from shardkit._tensor.sharded import ShardedTensor
    from shardkit.backends.base import PeerAxis

    Cost = Callable[[tuple[int, ...]], float]


@dataclass(eq=False)
class Team:
    """Members, and which of the parameters belongs to which of them.

    Attributes:
        axis: Communicator of all members.
        params: The users' parameters, in the order of their groups.
        spreads: The holders of each parameter's elements.
        costs: Cost of each parameter.
        owners: Member to which each parameter belongs.
        mesh: One axis of all members: what belongs to members is a `ShardedTensor` over it.
    """

    axis: PeerAxis
    params: list[nn.Parameter]
    spreads: list[Spread]
    costs: list[float]
    owners: list[int]
    mesh: DeviceMesh
    _traffic: dict[Any, Traffic] = field(default_factory=dict)

    @property
    def me(self) -> int:
        """This rank's place among the members."""
        return self.axis.rank

    def spec_of(self, index: int) -> ShardSpec:
        """Return how a parameter is cut."""
        param: Any = self.params[index]
        spec: ShardSpec = param.spec
        return spec

    def piece_of(self, index: int) -> torch.Tensor:
        """Return this rank's piece of a parameter."""
        param: Any = self.params[index]
        piece: torch.Tensor = param.local_piece
        return piece

    def is_whole_here(self, index: int) -> bool:
        """Whether this rank's piece is all of a parameter."""
        return self.spreads[index].numel_of(self.me) == self.params[index].numel()

    def batches(self, indices: Sequence[int], batch_nbytes: int) -> list[list[int]]:
        """Return parameters in batches; those of one have one dtype."""
        result = []
        for dtype in dict.fromkeys(self.params[index].dtype for index in indices):
            alike = [index for index in indices if self.params[index].dtype == dtype]
            nbytes = [self.params[i].numel() * dtype.itemsize for i in alike]
            planned = plan_batches(
                [self.costs[i] for i in alike],
                nbytes,
                [self.owners[i] for i in alike],
                batch_nbytes,
            )
            result += [[alike[place] for place in batch] for batch in planned]
        return result

    def traffic(self, plan: Callable[..., Traffic], indices: Sequence[int]) -> Traffic:
        """Return what this rank sends and gets, by `gradient_traffic` or `value_traffic`."""
        key = plan, tuple(indices)
        if key not in self._traffic:
            self._traffic[key] = plan(self.spreads, self.owners, indices, self.me)
        return self._traffic[key]

    def owned_spec(self, index: int, shape: Sequence[int]) -> ShardSpec:
        """Return the spec of state that belongs to the owner of a parameter, of any shape."""
        layout = owned_layout(shape, self.owners[index], self.axis.size)
        of_param = self.spec_of(index)
        return ShardSpec(
            layout,
            0,
            mesh=self.mesh,
            axis=self.axis,
            name=of_param.name,
            shard_device=of_param.shard_device,
        )


def make_teams(
    params: Sequence[ShardedTensor], cost: Cost, about: str
) -> tuple[list[Team], list[float]]:
    """Give out parameters among the ranks of their meshes.

    Parameters on the same ranks make a team. Teams that lie inside of others come after them, and
    go on with the loads that those left.

    Args:
        params: Parameters in one order on all ranks.
        cost: Function that returns the cost of a parameter of a shape.
        about: Text that the ranks must agree on besides.

    Returns:
        The teams, in one order on all ranks, and what each rank of the largest one has to do.

    Raises:
        OptimizerError: Operators are traced, or ranks have different parameters or settings.

    Cost: one exchange for each team.
    """
    by_ranks: dict[tuple[int, ...], list[Any]] = {}
    for param in params:
        if param.spec.is_traced:
            msg = (
                f"MatrixOptimizer does not run on XLA devices, where {param.spec.name!r} is: the "
                f"compiler has no exchange of parts of different sizes. Use an optimizer that "
                f"works on pieces (torch.optim.AdamW), or train on another device."
            )
            raise OptimizerError(msg)
        by_ranks.setdefault(tuple(sorted(param.spec.mesh.ranks)), []).append(param)
    teams: list[Team] = []
    loads: dict[tuple[int, ...], dict[int, float]] = {}
    largest: list[float] = []
    for ranks in sorted(by_ranks, key=lambda ranks: (-len(ranks), ranks)):
        around = [known for outer, known in loads.items() if set(ranks) < set(outer)]
        start = [sum(known[rank] for known in around) for rank in ranks]
        team = _make_team(by_ranks[ranks], cost, start, about)
        teams.append(team)
        done = loads_of(team.costs, team.owners, len(ranks))
        loads[ranks] = dict(zip(ranks, done, strict=True))
        largest = largest or done
    return teams, largest


def _make_team(params: list[Any], cost: Cost, loads: Sequence[float], about: str) -> Team:
    spec = params[0].spec
    axis = _joint_axis(spec.mesh)
    costs = [cost(tuple(param.shape)) for param in params]
    owners = assign_owners(costs, axis.size, loads)
    facts = [(p.spec.name, tuple(p.shape), str(p.dtype)) for p in params]
    parts: list[Any] = [_part_of(p.spec) for p in params]
    _agree(axis, [*facts, ("owners", tuple(owners)), ("settings", about)])
    all_parts = axis.exchange(parts) if any(part is not None for part in parts) else [parts]
    spreads = [
        _spread_of(p.spec, axis.members, None if parts[i] is None else [o[i] for o in all_parts])
        for i, p in enumerate(params)
    ]
    mesh: DeviceMesh = spec.mesh
    if mesh.ndim > 1:
        backend = JoinedBackend([axis], mesh.backend)
        mesh = DeviceMesh(
            mesh.device_type, (axis.size,), tuple(axis.members), None, mesh.rank, backend
        )
    return Team(axis, params, spreads, costs, owners, mesh)


def _joint_axis(mesh: DeviceMesh) -> PeerAxis:
    """Return the communicator of all ranks of a mesh: that of its one axis, if it has one."""
    axes = [mesh.backend.axis(index) for index in range(mesh.ndim)]
    wide = [axis for axis in axes if axis.size > 1]
    axis: PeerAxis = mesh.backend.joint_axis(mesh.ranks) if len(wide) > 1 else (wide or axes)[0]
    return axis


def _part_of(spec: ShardSpec) -> HeldPart | None:
    """Return what this rank holds of a parameter that tensor parallelism splits; else None."""
    outer = spec.tensor_parallel
    if outer is None:
        return None
    return HeldPart(spec.start, spec.stop, spec.layout.shapes[spec.index], outer.offsets)


def _agree(axis: PeerAxis, facts: list[tuple[Any, ...]]) -> None:
    """Raise on all members if they would give out different parameters."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    if len(set(axis.exchange(digest))) == 1:
        return
    of_all = axis.exchange(facts)
    longest = max(map(len, of_all))
    for place in range(longest):
        found = [facts[place] if place < len(facts) else "nothing" for facts in of_all]
        if len(set(map(repr, found))) > 1:
            lines = "\n".join(
                f"  rank {rank}: {what}" for rank, what in zip(axis.members, found, strict=True)
            )
            msg = (
                f"ranks gave MatrixOptimizer different parameters or settings. Number {place + 1} "
                f"is\n{lines}\nMake it of the same parameters, in the same order, on all ranks."
            )
            raise OptimizerError(msg)


def _spread_of(spec: ShardSpec, members: Sequence[int], parts: Sequence[HeldPart] | None) -> Spread:
    """Return who of the members holds what of a parameter."""
    mesh, placements = spec.mesh, spec.placements
    inner = 0 if spec.tensor_parallel is None else len(spec.tensor_parallel.placements)
    shard_dim = mesh.ndim - inner - 1
    on_mesh = dict(zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True))
    coordinates = [on_mesh[rank] for rank in members]
    copied = [dim for dim, placement in enumerate(placements) if _is_replicated(placement)]
    numbers: dict[tuple[int, ...], int] = {}
    replicas = [
        numbers.setdefault(tuple(place[dim] for dim in copied), len(numbers))
        for place in coordinates
    ]
    return Spread(
        shape=tuple(spec.shape),
        replicas=tuple(replicas),
        layout=spec.layout,
        index=spec.index,
        places=tuple(_places_on_axis(members, coordinates, shard_dim)),
        parts=None if parts is None else tuple(parts),
    )


def _is_replicated(placement: Any) -> bool:
    is_theirs = getattr(placement, "is_replicate", None)  # A DTensor's.
    return isinstance(placement, Replicate) or (is_theirs is not None and bool(is_theirs()))


def _places_on_axis(
    members: Sequence[int], coordinates: Sequence[tuple[int, ...]], dim: int
) -> list[int]:
    """Return each member's place in its process group along an axis: those are in rank order."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank, place in zip(members, coordinates, strict=True):
        lines.setdefault((*place[:dim], *place[dim + 1 :]), []).append(rank)
    return [
        sorted(lines[*place[:dim], *place[dim + 1 :]]).index(rank)
        for rank, place in zip(members, coordinates, strict=True)
    ]
