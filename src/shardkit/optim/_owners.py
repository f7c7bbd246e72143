"""An owner group: the ranks of one mesh, and the matrices that are assigned to them.

The owners are balanced by cost, without communication.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardkit._compat import torch_tensors
from shardkit._errors import OptimizerError
from shardkit._layout import Box, FlatLayout, Part
from shardkit._mesh import DeviceMesh
from shardkit._tensor.spec import ShardSpec
from shardkit.backends.base import AllToAll, PeerAxis, axes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from shardkit._tensor.sharded import ShardedTensor

    Cost = Callable[[tuple[int, ...]], float]


# --- who owns which matrix ------------------------------------------------------------------------
#
# Pure integer arithmetic, equal on every rank; no torch. Matrices are assigned by their cost, the
# most expensive first, each to the rank with the least work so far (Graham 1969: at most 4/3 of the
# optimum)::
#
#     cost        9  7  6  5  4  4        rank 0   9      4      = 13
#                                         rank 1   7  5          = 12
#                                         rank 2   6      4      = 10

_ELEMENTWISE = 64
"""Cost of reading and writing an element, in multiplications: all that a vector costs."""


def owned_layout(shape: Sequence[int], owner: int, world_size: int) -> FlatLayout:
    """Return the layout of one tensor of which `owner` holds all elements, and others hold none.

    It is a `FlatLayout` whose cuts lie before and behind the tensor, so all code for layouts works
    with it.
    """
    numel = math.prod(shape)
    return FlatLayout.of_one(shape, (owner * numel, numel, numel, world_size))


def matrix_cost(shape: Sequence[int]) -> int:
    """Return the default cost of updating a parameter, in multiplications.

    The cost of a matrix is that of its Gram matrix on the shorter side, which Muon, Shampoo and
    SOAP compute several times. The cost of a stack is the sum over its matrices. The cost of a
    parameter with fewer dims is proportional to its elements.
    """
    numel = math.prod(shape)
    shorter = min(shape[-2:]) if len(shape) > 1 else 0
    return numel * (shorter + _ELEMENTWISE)


def assign_owners(
    costs: Sequence[float], num_ranks: int, loads: Sequence[float] | None = None
) -> list[int]:
    """Return the rank to which each matrix belongs.

    Cost: O(M log(M N)) for M matrices on N ranks.
    """
    free = [(load, 0, rank) for rank, load in enumerate(loads or [0] * num_ranks)]
    heapq.heapify(free)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = free[0]
        owners[index] = rank
        # At equal loads, the rank with fewer matrices comes first: matrices of cost 0 are spread,
        # too.
        heapq.heapreplace(free, (load + costs[index], count + 1, rank))
    return owners


def loads_of(costs: Sequence[float], owners: Sequence[int], num_ranks: int) -> list[float]:
    """Return the work of each rank."""
    loads: list[float] = [0] * num_ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def plan_batches(
    costs: Sequence[float],
    nbytes: Sequence[int],
    owners: Sequence[int],
    batch_nbytes: int,
) -> list[list[int]]:
    """Return the matrices of each batch, with each rank's work spread evenly over the batches.

    In one batch, a rank owns about `batch_nbytes`; a larger matrix is sent alone. Indices are
    ascending in each batch, and no batch is empty.
    """
    by_owner: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        by_owner.setdefault(owner, []).append(index)
    number = 1
    for indices in by_owner.values():
        of_rank = -(-sum(nbytes[i] for i in indices) // batch_nbytes)
        number = max(number, min(len(indices), of_rank))
    batches: list[list[int]] = [[] for _ in range(number)]
    for indices in by_owner.values():
        weights = [max(costs[i], 1) for i in indices]
        ends = list(itertools.accumulate(weights))
        for index, weight, end in zip(indices, weights, ends, strict=True):
            # The middle of its interval in the rank's accumulated costs decides.
            place = int((end - weight / 2) * number / ends[-1])
            batches[min(place, number - 1)].append(index)
    return [sorted(batch) for batch in batches if batch]


# --- what is sent to owners, and back -------------------------------------------------------------
#
# Pure integer arithmetic; no torch. Members are the ranks of a mesh, of all its axes; a number is
# the place in this list. A member holds a range of each matrix, or of the part that tensor
# parallelism left on it. Members that together hold one matrix are a *replica* of it. The members
# of the owner's replica send gradients to the owner; the owner sends new values to all members::
#
#     2 replicas of 2 members, one matrix, owned by member 1
#
#     members        0          1    |     2          3
#     gradients    [0:8) ---> [8:16) |   [0:8)      [8:16)
#     values       [0:8) <--- whole ------> [0:8), [8:16)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A member's range of a matrix that tensor parallelism splits."""

    start: int  # First element of its range in its flattened part.
    stop: int  # End of its range.
    part: Part


@dataclass(frozen=True, slots=True)
class Spread:
    """The members that hold one matrix, with the range of each."""

    shape: tuple[int, ...]  # Shape of the whole matrix.
    replicas: tuple[int, ...]  # The number of each member's replica.
    layout: FlatLayout  # The cut of each replica; not used where there are `parts`.
    index: int  # Position of the matrix in the layout.
    places: tuple[int, ...]  # Number of each member's shard in the layout.
    # The part that each member holds; None: nothing but the layout cuts the matrix.
    parts: tuple[HeldPart, ...] | None = None

    def range_of(self, member: int) -> tuple[int, int]:
        """Return [start, stop) of a member's elements, in the flattened whole or in its part."""
        if self.parts is not None:
            return self.parts[member].start, self.parts[member].stop
        return self.layout.owned_range(self.index, self.places[member])

    def numel_of(self, member: int) -> int:
        """Return the number of elements that a member holds."""
        start, stop = self.range_of(member)
        return stop - start

    def boxes_of(self, member: int) -> tuple[tuple[int, ...], list[Box]]:
        """Return (shape, boxes): a member's boxes of the whole, viewed in that shape."""
        start, stop = self.range_of(member)
        if self.parts is None:
            numel = self.layout.numels[self.index]
            return (numel,), [Box((start,), (stop - start,), 0)] if stop > start else []
        return self.shape, self.parts[member].part.boxes(start, stop)


class Traffic(NamedTuple):
    """The matrices that a member sends to each other one and gets from each, in one order."""

    sends: tuple[tuple[int, ...], ...]
    gets: tuple[tuple[int, ...], ...]


def plan_traffic(
    spreads: Sequence[Spread],
    owners: Sequence[int],
    indices: Sequence[int],
    me: int,
    *,
    of_values: bool,
) -> Traffic:
    """Return the exchange of `me` that gives owners whole gradients, or all members new values.

    A member's own part of the matrices that it owns is not sent.

    Args:
        spreads: The spread of every matrix.
        owners: The owner of every matrix.
        indices: The matrices of this exchange, in the same order on all members.
        me: This member.
        of_values: Whether owners send values to all members. Otherwise the members of the owner's
            replica send gradients to the owner.
    """
    num_members = len(spreads[0].replicas) if spreads else 0
    mine: list[list[int]] = [[] for _ in range(num_members)]
    others: list[list[int]] = [[] for _ in range(num_members)]
    for index in indices:
        spread, owner = spreads[index], owners[index]
        for member in range(num_members) if owner == me else (me,):
            takes_part = of_values or spread.replicas[member] == spread.replicas[owner]
            if member != owner and spread.numel_of(member) and takes_part:
                (mine[member] if owner == me else others[owner]).append(index)
    owned, held = tuple(map(tuple, mine)), tuple(map(tuple, others))
    return Traffic(owned, held) if of_values else Traffic(held, owned)


# --- packing --------------------------------------------------------------------------------------
#
# [Note: buffers of an exchange]
# - pieces: 1-D, one per parameter and rank; views of shards or of sharded gradients.
# - send buffer: bytes for each member, in order of members; packed when the exchange starts.
# - receive buffer: bytes from each member; unpacked when the exchange ends.
# - whole: the parameter's shape, at its owner.
# Both buffers live from start to end of an exchange. Their elements have one dtype.


class Gathering:
    """Pieces of parameters (values, gradients, state) that are joined to whole ones at the owners.

    Cost: one all-to-all; this rank sends its pieces once, to the owners in its replica.
    """

    def __init__(
        self, group: OwnerGroup, indices: Sequence[int], pieces: Mapping[int, Tensor], of: str
    ) -> None:
        self._group = group
        self._pieces = pieces
        self._indices = indices
        traffic = group.traffic(indices, of_values=False)
        send = [[pieces[index] for index in to_one] for to_one in traffic.sends]
        gets = [
            [(index, group.spreads[index].numel_of(member)) for index in from_one]
            for member, from_one in enumerate(traffic.gets)
        ]
        self._exchange = _Exchange(group, pieces[indices[0]], indices, send, gets, of)

    def finish(self) -> dict[int, Tensor]:
        """Return this rank's matrices as whole tensors.

        If the piece is the whole, it is a view of the piece; otherwise it has memory of its own.
        """
        group, wholes = self._group, {}
        segments: list[tuple[int, int, Tensor]] = []
        for index in self._indices:
            if group.owners[index] != group.me:
                continue
            piece, shape = self._pieces[index], tuple(group.params[index].shape)
            if group.is_whole_here(index):
                wholes[index] = piece.view(shape)
            else:
                wholes[index] = piece.new_empty(shape)
                segments.append((group.me, index, piece))
        segments += self._exchange.received()
        _copy_all(
            [
                (view, segment[part].view(view.shape))
                for member, index, segment in segments
                for view, part in boxes_in(group, index, member, wholes[index])
            ]
        )
        return wholes


class Scattering:
    """Whole parameters at their owners, of which every member receives its piece.

    Cost: one all-to-all; each rank receives its pieces once.
    """

    def __init__(
        self, group: OwnerGroup, indices: Sequence[int], wholes: Mapping[int, Tensor]
    ) -> None:
        self._group = group
        self._wholes = wholes
        traffic = group.traffic(indices, of_values=True)
        send = [
            [
                view.reshape(-1)
                for index in to_one
                for view, _ in boxes_in(group, index, member, wholes[index])
            ]
            for member, to_one in enumerate(traffic.sends)
        ]
        gets = [
            [(index, group.spreads[index].numel_of(group.me)) for index in from_one]
            for from_one in traffic.gets
        ]
        like = group.params[indices[0]].local_piece
        self._exchange = _Exchange(group, like, indices, send, gets, "values")

    def finish(self, pieces: Mapping[int, Tensor]) -> None:
        """Write this rank's pieces."""
        group = self._group
        own = [
            (pieces[index][part].view(view.shape), view)
            for index in self._wholes
            for view, part in boxes_in(group, index, group.me, self._wholes[index])
        ]
        # If the addresses are equal, the whole is the piece.
        copies = [(target, view) for target, view in own if target.data_ptr() != view.data_ptr()]
        copies += [(pieces[index], segment) for _, index, segment in self._exchange.received()]
        _copy_all(copies)


def _copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy from source to target, for each pair (target, source)."""
    if copies:
        targets, sources = zip(*copies, strict=True)
        torch_tensors.foreach_copy(targets, sources)


class _Exchange:
    """One all-to-all; none if this rank is the only member."""

    def __init__(
        self,
        group: OwnerGroup,
        like: Tensor,
        indices: Sequence[int],
        send: Sequence[Sequence[Tensor]],
        gets: Sequence[Sequence[tuple[int, int]]],
        of: str,
    ) -> None:
        self._gets = gets if group.axis.size > 1 else ()
        if not self._gets:
            return
        itemsize = like.dtype.itemsize
        parts = [part.view(torch.uint8) for to_one in send for part in to_one]
        buffer = torch.cat(parts) if parts else like.new_empty(0, dtype=torch.uint8)
        send_nbytes = [sum(part.nbytes for part in to_one) for to_one in send]
        receive_nbytes = [sum(numel for _, numel in from_one) * itemsize for from_one in gets]
        total_nbytes = itemsize * sum(group.params[index].numel() for index in indices)
        self._dtype = like.dtype
        self._send = buffer  # Engines hold it until then, too; those of a plan do not.
        self._receive = like.new_empty(sum(receive_nbytes), dtype=torch.uint8)
        self._handle = group.axis.start_all_to_all(
            AllToAll(buffer, self._receive, send_nbytes, receive_nbytes, total_nbytes, of)
        )

    def received(self) -> Iterator[tuple[int, int, Tensor]]:
        """Wait; yield the member, the parameter and the elements of all that was received."""
        if not self._gets:
            return
        self._handle.wait()
        del self._send
        flat, at = self._receive.view(self._dtype), 0
        for member, from_one in enumerate(self._gets):
            for index, numel in from_one:
                yield member, index, flat[at : at + numel]
                at += numel


def boxes_in(
    group: OwnerGroup, index: int, member: int, whole: Tensor
) -> Iterator[tuple[Tensor, slice]]:
    """Yield the views of a whole that form a member's piece, each with its range in the piece."""
    shape, boxes = group.spreads[index].boxes_of(member)
    if not boxes:
        return
    viewed = whole.view(shape)
    for box in boxes:
        view = viewed
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if size != shape[dim]:
                view = view.narrow(dim, offset, size)
        yield view, slice(box.start, box.stop)


# --- owner groups ---------------------------------------------------------------------------------


@dataclass(eq=False)
class OwnerGroup:
    """Members, and the member to which each parameter belongs."""

    axis: PeerAxis  # Communicator of all members.
    params: list[Any]  # The users' sharded parameters, in the order of their groups.
    spreads: list[Spread]  # The holders of each parameter's elements.
    costs: list[float]  # Cost of each parameter.
    owners: list[int]  # Member to which each parameter belongs.
    # One axis of all members; state that belongs to a member is a `ShardedTensor` over it.
    mesh: DeviceMesh
    _traffic: dict[Any, Traffic] = field(default_factory=dict)

    @property
    def me(self) -> int:
        """This rank's place among the members."""
        return self.axis.rank

    def is_whole_here(self, index: int) -> bool:
        """Whether this rank's piece is all of a parameter."""
        spread = self.spreads[index]
        return spread.numel_of(self.me) == math.prod(spread.shape)

    def batches(self, indices: Sequence[int], batch_nbytes: int) -> list[list[int]]:
        """Return batches of parameters, each of one dtype."""
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

    def traffic(self, indices: Sequence[int], *, of_values: bool) -> Traffic:
        """Return what this rank sends and gets; see `plan_traffic`."""
        key = of_values, tuple(indices)
        if key not in self._traffic:
            self._traffic[key] = plan_traffic(
                self.spreads, self.owners, indices, self.me, of_values=of_values
            )
        return self._traffic[key]

    def owned_spec(self, index: int, shape: Sequence[int]) -> ShardSpec:
        """Return the spec of state of any shape that belongs to the owner of a parameter."""
        layout = owned_layout(shape, self.owners[index], self.axis.size)
        of_param = self.params[index].spec
        return ShardSpec(
            layout,
            0,
            mesh=self.mesh,
            axis=self.axis,
            name=of_param.name,
            shard_device=of_param.shard_device,
        )


def make_owner_groups(
    params: Sequence[ShardedTensor], cost: Cost, about: str
) -> tuple[list[OwnerGroup], list[float]]:
    """Assign parameters to the ranks of their meshes.

    Parameters on the same ranks form a group. A group whose ranks lie inside of another group comes
    after it, and starts with the loads from that group.

    Args:
        params: Parameters, in the same order on all ranks.
        cost: Function that returns the cost of a parameter by its shape.
        about: Text on which the ranks must also agree.

    Returns:
        The groups, in the same order on all ranks, and the work of each rank of the largest group.

    Raises:
        OptimizerError: Parameters are on XLA devices, or ranks have different parameters or
            settings.

    Cost: one exchange for each group.
    """
    by_ranks: dict[tuple[int, ...], list[Any]] = {}
    for param in params:
        if param.spec.is_traced:
            msg = (
                f"MatrixOptimizer does not run on XLA devices, where {param.spec.name!r} is: the "
                f"compiler has no exchange of parts of different sizes. Use an optimizer that "
                f"works on shards (torch.optim.AdamW), or train on another device."
            )
            raise OptimizerError(msg)
        by_ranks.setdefault(tuple(sorted(param.spec.mesh.ranks)), []).append(param)
    groups: list[OwnerGroup] = []
    loads: dict[tuple[int, ...], dict[int, float]] = {}
    largest: list[float] = []
    for ranks in sorted(by_ranks, key=lambda ranks: (-len(ranks), ranks)):
        around = [known for outer, known in loads.items() if set(ranks) < set(outer)]
        start = [sum(known[rank] for known in around) for rank in ranks]
        group = _make_owner_group(by_ranks[ranks], cost, start, about)
        groups.append(group)
        done = loads_of(group.costs, group.owners, len(ranks))
        loads[ranks] = dict(zip(ranks, done, strict=True))
        largest = largest or done
    return groups, largest


def _make_owner_group(
    params: list[Any], cost: Cost, loads: Sequence[float], about: str
) -> OwnerGroup:
    spec = params[0].spec
    axis = _joint_axis(spec.mesh)
    costs = [cost(tuple(param.shape)) for param in params]
    owners = assign_owners(costs, axis.size, loads)
    facts = [(p.spec.name, tuple(p.shape), str(p.dtype)) for p in params]
    parts: list[Any] = [
        HeldPart(s.start, s.stop, s.tensor_parallel.part) if s.tensor_parallel is not None else None
        for s in (param.spec for param in params)
    ]
    _agree(axis, [*facts, ("owners", tuple(owners)), ("settings", about)])
    all_parts = axis.exchange(parts) if any(part is not None for part in parts) else [parts]
    spreads = [
        _spread_of(p.spec, axis.members, None if parts[i] is None else [o[i] for o in all_parts])
        for i, p in enumerate(params)
    ]
    mesh: DeviceMesh = spec.mesh
    if mesh.ndim > 1:
        backend = mesh.backend.with_axes([axis])
        mesh = DeviceMesh(
            mesh.device_type, (axis.size,), tuple(axis.members), None, mesh.rank, backend
        )
    return OwnerGroup(axis, params, spreads, costs, owners, mesh)


def _joint_axis(mesh: DeviceMesh) -> PeerAxis:
    """Return the communicator of all ranks of a mesh: that of its only axis, or a joint one."""
    axes = axes_of(mesh)
    wide = [axis for axis in axes if axis.size > 1]
    axis: PeerAxis = mesh.backend.joint_axis(mesh.ranks) if len(wide) > 1 else (wide or axes)[0]
    return axis


def _agree(axis: PeerAxis, facts: list[tuple[Any, ...]]) -> None:
    """Raise on all members if their parameters or settings differ."""
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
    """Return the members' ranges of a parameter."""
    on_mesh = spec.mesh.coordinates()
    coordinates = [on_mesh[rank] for rank in members]
    # The placements of tensor parallelism are torch's.
    copied = [dim for dim, placement in enumerate(spec.placements) if placement.is_replicate()]
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
        places=tuple(place[-1] for place in coordinates),  # On the shard axis, if it has no parts.
        parts=None if parts is None else tuple(parts),
    )
