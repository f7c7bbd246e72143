"""Parameters that are DTensors: split over axes of another mesh before they are sharded here.

``parallelize_module`` makes parameters DTensors on a ``tp`` mesh. `fully_shard` cuts the local
tensor of a DTensor flat over its own mesh. While a group is gathered, modules see a DTensor over
the unsharded memory, with its former placements. `TensorParallel` handles all of this; other
modules ask it for the local part and the whole.

This module is imported when the first such parameter is found
(`shardkit.backends.tensor_parallel_of`), because ``torch.distributed.tensor`` takes long to import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardkit._compat import torch_autograd, torch_groups
from shardkit._errors import MeshError, StateError, WrapError
from shardkit._layout import Part
from shardkit._mesh import DeviceMesh
from shardkit.backends.base import axes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

    from shardkit.backends.base import PeerAxis


@dataclass(frozen=True, slots=True)
class Split:
    """One dim cut over one axis, as ``torch.chunk`` does: the last chunks may be short.

    With several groups each of them is cut so, and a rank holds a chunk of each.
    """

    axis: PeerAxis
    dim: int
    size: int  # Size of the dim before the cut; of each group.
    num_groups: int = 1

    @property
    def chunk(self) -> int:
        """Number of elements of every chunk except the last ones."""
        return -(-self.size // self.axis.size)

    @property
    def owned_range(self) -> tuple[int, int]:
        """This rank's [start, stop) of the dim, or of each group; maybe empty."""
        start = min(self.axis.rank * self.chunk, self.size)
        return start, min(start + self.chunk, self.size)

    def by_groups(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with a dim for the groups before their own."""
        before, size, behind = shape[: self.dim], shape[self.dim], shape[self.dim + 1 :]
        return (*before, self.num_groups, size // self.num_groups, *behind)

    def _in_each_group(self, tensor: Tensor, act: Callable[[Split, Tensor], Tensor]) -> Tensor:
        """Act on a tensor along the dim of its groups."""
        within = replace(self, dim=self.dim + 1, num_groups=1)
        grouped = tensor.unflatten(self.dim, (self.num_groups, -1))
        return act(within, grouped).flatten(self.dim, self.dim + 1)

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's chunk, a view unless there are several groups."""
        if self.num_groups > 1:
            return self._in_each_group(tensor, Split.cut)
        start, stop = self.owned_range
        return tensor.narrow(self.dim, start, stop - start)

    def gather(self, chunk: Tensor) -> Tensor:
        """Return the tensor that was cut. Cost: one all-gather of the result's bytes, padded."""
        if self.axis.size == 1:
            return chunk
        if self.num_groups > 1:
            return self._in_each_group(chunk, Split.gather)
        first = chunk.movedim(self.dim, 0)
        chunks = first.new_zeros(self.axis.size, self.chunk, *first.shape[1:])
        own = chunks[self.axis.rank]
        own[: len(first)] = first
        if chunks.numel() > 0:
            self.axis.all_gather(chunks.view(-1), own.view(-1))
        return chunks.flatten(0, 1)[: self.size].movedim(0, self.dim).contiguous()


@dataclass(frozen=True)
class TensorParallel:
    """How a parameter is spread over the mesh of its DTensor; make it by `TensorParallel.of`."""

    shape: tuple[int, ...]  # Shape of the whole, over all meshes.
    mesh: DeviceMesh  # The DTensor's mesh.
    placements: tuple[Any, ...]  # The DTensor's, one per axis of `mesh`.
    torch_mesh: TorchDeviceMesh = field(compare=False, repr=False)  # As torch's object.
    # The cuts, in the order in which they are made; none over axes of replicas.
    splits: tuple[Split, ...] = field(compare=False, repr=False)
    # Shape of this rank's part, which is cut flat and gathered.
    local_shape: tuple[int, ...] = field(compare=False, repr=False)
    # The DTensor's placements on all axes of `torch_mesh`. `mesh` and `placements` lack those that
    # `outside` has taken away: `data_dims`, along which ranks compute with data of their own.
    shown: tuple[Any, ...] = field(compare=False, repr=False)
    data_dims: tuple[int, ...] = field(default=(), compare=False, repr=False)
    # Of a plain parameter that `annotated` has read: the placements of its gradients on all axes of
    # `torch_mesh`. None: it is a DTensor.
    of_gradients: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, param: DTensor, mesh: DeviceMesh) -> TensorParallel:
        """Read a DTensor; `mesh` is its mesh as one of shardkit's.

        Raises:
            MeshError: This rank is not in the mesh, or the DTensor has no mesh of torch.
        """
        if isinstance(param.device_mesh, DeviceMesh):
            msg = (
                f"a parameter of shape {tuple(param.shape)} is a DTensor on a mesh of shardkit, "
                f"which torch cannot use. Make the mesh by torch's init_device_mesh (of "
                f"torch.distributed.device_mesh), and give one axis of it to parallelize_module, "
                f"another to fully_shard."
            )
            raise MeshError(msg)
        if mesh.get_coordinate() is None:
            msg = (
                f"a parameter of shape {tuple(param.shape)} is a DTensor on the mesh of ranks "
                f"{mesh.describe_ranks()}, in which rank {mesh.rank} is not. Call fully_shard on "
                f"ranks of the DTensors' mesh only."
            )
            raise MeshError(msg)
        sizes, splits = list(param.shape), []
        placement: Any
        for index, placement in enumerate(param.placements):
            num_groups = _num_groups(placement)
            if num_groups:
                dim = placement.dim % param.ndim
                axis = mesh.backend.axis(index)
                split = Split(axis, dim, sizes[dim] // num_groups, num_groups)
                start, stop = split.owned_range
                sizes[dim] = (stop - start) * num_groups
                splits.append(split)
        return cls(
            shape=tuple(param.shape),
            mesh=mesh,
            placements=tuple(param.placements),
            torch_mesh=param.device_mesh,
            splits=tuple(splits),
            local_shape=tuple(sizes),
            shown=tuple(param.placements),
        )

    def outside(self, mesh: DeviceMesh) -> TensorParallel:
        """Return the same without the axes of the DTensor's mesh that lie in `mesh`.

        The DTensor is replicated over these axes, and shardkit shards over them (``dp_mesh_dims``).
        """
        mesh_names = mesh.mesh_dim_names or ()
        names = self.mesh.mesh_dim_names or [None] * self.mesh.ndim
        taken = [
            i
            for i, (axis, name) in enumerate(zip(self.mesh_axes, names, strict=True))
            # Axes of one rank are compared by name: the joint mesh would have them twice.
            if (set(axis.members) <= {*mesh.ranks} if axis.size > 1 else name in mesh_names)
        ]
        if not taken:
            return self
        kept = [i for i in range(self.mesh.ndim) if i not in taken]
        placements = tuple(self.placements[i] for i in kept)
        inner = self.mesh.submesh(kept)
        return replace(self, mesh=inner, placements=placements, data_dims=tuple(taken))

    @property
    def axes(self) -> tuple[PeerAxis, ...]:
        """The axes over which ranks hold different elements."""
        return tuple(split.axis for split in self.splits)

    @property
    def is_plain(self) -> bool:
        """Whether modules see this rank's part as a plain tensor, and not as a DTensor."""
        return self.of_gradients is not None

    @property
    def mesh_axes(self) -> tuple[PeerAxis, ...]:
        """All axes of the DTensor's mesh."""
        return tuple(axes_of(self.mesh))

    @property
    def part(self) -> Part:
        """The local part of the whole."""
        offsets = [0] * len(self.shape)
        for split in self.splits:
            offsets[split.dim] += split.owned_range[0]
        cut = self.grouped
        if cut is None:
            return Part(self.local_shape, tuple(offsets))
        offsets.insert(cut.dim, 0)
        return Part(cut.by_groups(self.local_shape), tuple(offsets), cut.dim, cut.size)

    @property
    def grouped(self) -> Split | None:
        """The cut of several groups, of which there is at most one."""
        return next((split for split in self.splits if split.num_groups > 1), None)

    def check(self, name: str, param: Any, mesh: DeviceMesh) -> None:
        """Refuse a parameter that cannot be sharded over `mesh`.

        Raises:
            MeshError: The two meshes share an axis.
            WrapError: A placement is neither a chunk nor a replica, or groups of chunks are not
                equal, or the local tensor's shape does not follow from the placements.
        """
        shared = sorted(set(mesh.ranks) & set(self.mesh.ranks) - {mesh.rank})
        if shared:
            msg = (
                f"parameter {name!r} is a DTensor on the mesh of ranks "
                f"{self.mesh.describe_ranks()}, and fully_shard got the mesh of ranks "
                f"{mesh.describe_ranks()}: the meshes must have this rank only in common, not "
                f"{shared} as well. Pass another axis of the same mesh, e.g. mesh['dp'] where the "
                f"DTensors are on mesh['tp'], or the DTensors' mesh and dp_mesh_dims."
            )
            raise MeshError(msg)
        for placement in self.placements:
            if not _num_groups(placement) and type(placement) is not Replicate:
                msg = (
                    f"parameter {name!r} is a DTensor with placements {self.placements}: "
                    f"fully_shard takes Shard(dim) and Replicate() only. Redistribute it first: "
                    f"nn.Parameter(param.redistribute(placements=[Replicate()]))."
                )
                raise WrapError(msg)
        cut = self.grouped
        others = [split for split in self.splits if split is not cut]
        if cut is not None and (
            any(split.num_groups > 1 or split.dim == cut.dim for split in others)
            or self.shape[cut.dim] % (cut.num_groups * cut.axis.size)
        ):
            msg = (
                f"parameter {name!r} is a DTensor of shape {self.shape} with placements "
                f"{self.placements}: fully_shard takes one _StridedShard, no other placement of "
                f"its dim, and groups that all ranks divide evenly. Redistribute it first: "
                f"nn.Parameter(param.redistribute(placements=[Replicate()]))."
            )
            raise WrapError(msg)
        local_shape = tuple((param if self.is_plain else param.to_local()).shape)
        if local_shape != self.local_shape:
            msg = (
                f"parameter {name!r} is a DTensor of shape {self.shape} with placements "
                f"{self.placements}: this rank's part should have shape {self.local_shape}, as "
                f"torch.chunk cuts, but has {local_shape}. Make it by distribute_tensor or "
                f"parallelize_module, not by from_local of other parts."
            )
            raise WrapError(msg)

    def to_part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole shape, plain or a DTensor."""
        if isinstance(whole, DTensor):
            if whole.device_mesh == self.torch_mesh:
                return torch_groups.waited(whole.redistribute(placements=self.shown).to_local())
            whole = whole.full_tensor()
        for split in self.splits:
            whole = split.cut(whole)
        return whole

    def part_indices(self, places: Tensor) -> Tensor:
        """Return where elements of the flattened whole are in the flattened part; -1: nowhere."""
        result, is_here = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
        part, split = self.part, self.grouped
        shape = self.shape if split is None else split.by_groups(self.shape)
        for dim, size in enumerate(shape):
            along = places // math.prod(shape[dim + 1 :]) % size - part.offsets[dim]
            is_here &= (along >= 0) & (along < part.shape[dim])
            result += along * math.prod(part.shape[dim + 1 :])
        return torch.where(is_here, result, -1)

    def to_whole(self, part: Tensor) -> Tensor:
        """Return the whole of which this rank has `part`. Cost: one all-gather per split."""
        for split in reversed(self.splits):
            part = split.gather(part)
        return part

    @torch.no_grad()
    def as_shown(self, part: Tensor) -> Tensor:
        """Return what modules see: the DTensor whose local tensor lies in the memory of `part`."""
        if self.is_plain:
            return part
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return DTensor.from_local(
            part,
            self.torch_mesh,
            self.shown,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )

    @torch.no_grad()
    def part_of_gradient(self, grad: Tensor) -> Tensor:
        """Return this rank's part of the gradient that autograd left in the parameter's ``.grad``.

        Cost: none if the gradient has the parameter's placements; else the collectives of DTensor,
        e.g. an all-reduce if every rank has the gradient of its part of the sequence. Sums over
        data-parallel axes are left to the reduction.
        """
        if self.of_gradients is not None:
            grad = DTensor.from_local(grad, self.torch_mesh, self.of_gradients, run_check=False)
        if self.data_dims and isinstance(grad, DTensor) and grad.device_mesh == self.torch_mesh:
            wanted = list(self.shown)
            for dim in self.data_dims:
                own = grad.placements[dim]
                if isinstance(own, Partial) and own.reduce_op == "sum":
                    wanted[dim] = own
            return torch_groups.waited(grad.redistribute(placements=wanted).to_local())
        return self.to_part(grad)

    @staticmethod
    def retire(param: Any, name: str) -> None:
        """Drop the memory of a DTensor that was replaced, and let any use of it raise."""
        torch_groups.set_local_tensor(param, torch.empty(0))
        param.__dict__["fqn"] = name
        param.__class__ = ReplacedDTensor

    def join(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh of the axes of `mesh` and then those of the DTensor."""
        names = None
        if mesh.mesh_dim_names is not None and self.mesh.mesh_dim_names is not None:
            both = (*mesh.mesh_dim_names, *self.mesh.mesh_dim_names)
            names = both if len(set(both)) == len(both) else None
        return DeviceMesh(
            device_type=mesh.device_type,
            shape=(*mesh.shape, *self.mesh.shape),
            ranks=_joint_ranks(mesh, self.mesh, self.torch_mesh),
            mesh_dim_names=names,
            rank=mesh.rank,
            backend=mesh.backend.with_axes(
                [m.backend.axis(axis) for m in (mesh, self.mesh) for axis in range(m.ndim)]
            ),
        )


def _num_groups(placement: Any) -> int:
    """Return of how many groups of a dim a placement gives each rank a chunk; 0: it cuts none."""
    if type(placement) is Shard:
        return 1
    return torch_groups.strided_split_factor(placement) or 0


def distributed_by_dim_0(param: nn.Parameter, mesh: TorchDeviceMesh) -> nn.Parameter:
    """Return a parameter whose dim 0 is cut over a 1-D mesh of torch.

    Each rank takes its part of its own values and gradient; nothing is sent. The new parameter
    keeps attributes that users have set, and hooks that run after its gradient was set.
    """
    part = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
    result = nn.Parameter(part, requires_grad=param.requires_grad)
    result.__dict__.update(param.__dict__)
    if param.grad is not None:
        result.grad = distribute_tensor(param.grad, mesh, [Shard(0)], src_data_rank=None)
    for hook in torch_autograd.post_accumulate_grad_hooks(param):
        result.register_post_accumulate_grad_hook(hook)
    return result


def _joint_ranks(outer: DeviceMesh, inner: DeviceMesh, torch_mesh: Any) -> tuple[int, ...]:
    """Return the ranks of the joint mesh: this rank, shifted along `outer` and along `inner`.

    Shifts are taken in the mesh that `torch_mesh` is a part of. If that mesh does not hold all
    ranks, a shift is a difference of ranks.
    """
    root = torch_groups.root_mesh(torch_mesh).mesh
    at = {rank: place for place, rank in enumerate(root.flatten().tolist())}
    if not {*outer.ranks, *inner.ranks} <= at.keys():
        return tuple(a + b - outer.rank for a in outer.ranks for b in inner.ranks)
    # A place is linear in the coordinates, so shifts of places add up as those of coordinates do.
    ranks = {place: rank for rank, place in at.items()}
    return tuple(ranks[at[a] + at[b] - at[outer.rank]] for a in outer.ranks for b in inner.ranks)


class ReplacedDTensor(DTensor):
    """Class of a DTensor parameter that `fully_shard` has replaced by another object.

    An object of DTensor's class cannot be changed into a sharded tensor in place. Code that still
    holds the old object, e.g. an optimizer made before, would silently train nothing. So any use
    raises.
    """

    __slots__ = ()

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the name; there are no values to show."""
        return f"ReplacedDTensor({self.__dict__['fqn']!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse all operators."""
        name = next((a.__dict__["fqn"] for a in args if isinstance(a, cls)), "?")
        msg = (
            f"parameter {name!r} was a DTensor, and fully_shard put another Parameter object in "
            f"its place: this one is not trained any more. Make the optimizer, and whatever else "
            f"holds parameters, after fully_shard; put modules that share one in one group."
        )
        raise StateError(msg)
