"""`DeviceMesh`: axis names, sizes and coordinates.

A mesh is pure arithmetic plus one opaque object, the backend that can communicate along the axes.
`shardkit.init_device_mesh` makes meshes; the backends make them from torch's meshes.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from shardkit._errors import MeshError
from shardkit._text import listed

SHARD_AXIS = "shard"

_made: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def known_meshes() -> list[DeviceMesh]:
    """Return the meshes that are in use in this process, newest first."""
    # A mesh may be collected at any time, so hold all of them before sorting.
    return [mesh for _, mesh in sorted(_made.items(), reverse=True, key=lambda item: item[0])]


@dataclass(frozen=True)
class DeviceMesh:
    """An n-dimensional arrangement of ranks, of which this process is one.

    Two meshes are equal if device type, shape, ranks and axis names are equal.

    Attributes:
        device_type: Type of the devices: ``"cpu"``, ``"cuda"``, ...
        shape: Size of each axis.
        ranks: Global ranks, row-major. Along each axis they are in the order of the axis' process
            groups, which number ranks from the lowest one, whatever order was given.
        mesh_dim_names: Names of the axes, or None.
        rank: Global rank of this process.
        backend: Backend that communicates along the axes (`shardkit.backends.Backend`).
        left_out: Names of the axes that a submesh lacks of its parent mesh, for axes of several
            ranks.
        world_size: Number of ranks of the world; 0: the size of this mesh.
    """

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    rank: int
    backend: Any = field(default=None, compare=False, repr=False)
    left_out: tuple[str, ...] = field(default=(), compare=False, repr=False)
    world_size: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check that shape, ranks and names fit together, and put ranks into order."""
        if math.prod(self.shape) != len(self.ranks):
            msg = (
                f"a mesh of shape {self.shape} needs {math.prod(self.shape)} ranks, got "
                f"{len(self.ranks)}."
            )
            raise MeshError(msg)
        names = self.mesh_dim_names
        if names is not None and (len(names) != len(self.shape) or len(set(names)) != len(names)):
            msg = (
                f"mesh_dim_names must be {len(self.shape)} different names, one per axis of shape "
                f"{self.shape}, got {names}."
            )
            raise MeshError(msg)
        object.__setattr__(self, "ranks", _in_group_order(self.shape, self.ranks))
        if self.backend is not None:
            _made[next(_numbers)] = self

    def __getattr__(self, name: str) -> Any:
        """Raise with a remedy if torch needs a mesh of its own, which has more attributes."""
        msg = (
            f"a DeviceMesh of shardkit has no attribute {name!r}. Where torch wants a mesh of its "
            f"own, as parallelize_module does, make it by torch's init_device_mesh (of "
            f"torch.distributed.device_mesh); fully_shard takes that as well."
        )
        raise AttributeError(msg)

    def __deepcopy__(self, memo: object) -> DeviceMesh:
        """Return itself: it never changes, and process groups cannot be copied."""
        del memo
        return self

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the size of one axis, or of the whole mesh."""
        return len(self.ranks) if mesh_dim is None else self.shape[self.axis_index(mesh_dim)]

    def axis_index(self, axis: int | str | None) -> int:
        """Return the position of an axis given by name or number; None: of the only one.

        Raises:
            MeshError: If there is no such axis, or none is named and there are several.
        """
        if axis is None:
            if self.ndim != 1:
                msg = f"name an axis: the mesh has {self.ndim} ({self.mesh_dim_names})."
                raise MeshError(msg)
            return 0
        if isinstance(axis, str):
            if self.mesh_dim_names is None:
                msg = f"this mesh has no axis {axis!r}: make it with names, by mesh_dim_names=."
                raise MeshError(msg)
            if axis not in self.mesh_dim_names:
                msg = f"this mesh has no axis {axis!r}; its axes are {self.mesh_dim_names}."
                raise MeshError(msg)
            return self.mesh_dim_names.index(axis)
        if not -self.ndim <= axis < self.ndim:
            msg = f"this mesh has {self.ndim} axes, got axis {axis}."
            raise MeshError(msg)
        return axis % self.ndim

    def get_rank(self) -> int:
        """Return the global rank of this process."""
        return self.rank

    @property
    def mesh(self) -> Any:
        """The global ranks as an integer tensor on the CPU, with a dim for each axis; read only."""
        return self.backend.ranks_tensor(self.ranks, self.shape)

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that logs and warns for the whole mesh."""
        return self.rank == self.ranks[0]

    def coordinates(self) -> dict[int, tuple[int, ...]]:
        """Return the position of each rank on every axis."""
        return dict(zip(self.ranks, itertools.product(*map(range, self.shape)), strict=True))

    def get_coordinate(self) -> list[int] | None:
        """Return this rank's position on every axis; None if it is not in the mesh."""
        coordinate = self.coordinates().get(self.rank)
        return None if coordinate is None else [*coordinate]

    def _own_coordinate(self) -> list[int]:
        coordinate = self.get_coordinate()
        if coordinate is None:
            msg = f"rank {self.rank} is not in the mesh of ranks {self.describe_ranks()}."
            raise MeshError(msg)
        return coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's position on one axis.

        Raises:
            MeshError: If this rank is not in the mesh, or no axis is named and there are several.
        """
        return self._own_coordinate()[self.axis_index(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the torch process group of one axis, through this rank."""
        return self.backend.process_group(self.axis_index(mesh_dim))

    def get_all_groups(self) -> list[Any]:
        """Return the torch process groups of all axes, through this rank."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the submesh of the named axes through this rank."""
        names = (names,) if isinstance(names, str) else tuple(names)
        return self.submesh([self.axis_index(name) for name in names])

    def last_axis(self) -> DeviceMesh:
        """Return the submesh of the last axis through this rank; a 1-D mesh returns itself."""
        return self if self.ndim == 1 else self.submesh([self.ndim - 1])

    def submesh(self, keep: list[int]) -> DeviceMesh:
        """Return the submesh of axes, given by their positions, through this rank."""
        own = self._own_coordinate()
        others = [axis for axis in range(self.ndim) if axis not in keep]
        by_place = {
            tuple(place[axis] for axis in keep): rank
            for rank, place in self.coordinates().items()
            if all(place[axis] == own[axis] for axis in others)
        }
        names = self.mesh_dim_names
        left_out = [names[axis] for axis in others if names and self.shape[axis] > 1]
        return DeviceMesh(
            self.device_type,
            tuple(self.shape[axis] for axis in keep),
            tuple(by_place[place] for place in sorted(by_place)),
            None if names is None else tuple(names[axis] for axis in keep),
            self.rank,
            self.backend.for_axes(keep),
            (*self.left_out, *left_out),
            self.world_size,
        )

    def describe_ranks(self) -> str:
        """Return the ranks as shortened text for an error message."""
        return f"[{listed(self.ranks, str)}]"


def _in_group_order(shape: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of a mesh in the order in which process groups number them.

    Raises:
        MeshError: No order of the coordinates is that of all groups. Along the first axis the
            groups may differ, because replicas may have any order.
    """
    if all(a < b for a, b in itertools.pairwise(ranks)):
        return ranks
    at = dict(zip(itertools.product(*map(range, shape)), ranks, strict=True))
    for axis in reversed(range(len(shape))):
        by_line: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, rank in at.items():
            by_line[*place[:axis], *place[axis + 1 :]].append(rank)
        lines = [*by_line.values()]
        orders = [sorted(range(shape[axis]), key=line.__getitem__) for line in lines]
        wrong = next((i for i, order in enumerate(orders) if order != orders[0]), None)
        if wrong is not None and axis > 0:
            msg = (
                f"a mesh of shape {shape} lists ranks {lines[0]} along axis {axis}, and at "
                f"another place {lines[wrong]}. Process groups number their ranks from the "
                f"lowest one, so ranks at one coordinate would hold different shards. List the "
                f"ranks along each axis in ascending order."
            )
            raise MeshError(msg)
        at = {place: at[*place[:axis], orders[0][place[axis]], *place[axis + 1 :]] for place in at}
    return tuple(at.values())
