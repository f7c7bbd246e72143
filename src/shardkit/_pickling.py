"""Pickles of sharded tensors: what `torch.save` writes, and how tensors are rebuilt.

A rank's file holds its own pieces. A pickle of a tensor holds the piece, how the whole is cut,
which piece it is, and a description of the mesh. A process group cannot be written. So loading
binds the piece to a mesh of this process that has the same description. A piece travels to another
process of this machine (`torch.multiprocessing`) in shared memory.

`rebuild_tensor` is one of torch's safe globals, so that ``torch.load(weights_only=True)`` loads
state dicts. Its name and arguments are a file format: new arguments come last, with a default.
"""

from __future__ import annotations

import contextlib
import copyreg
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardkit._compat import torch_tensors
from shardkit._errors import MeshError, ShardedTensorError
from shardkit._layout import Box, EvenLayout, FlatLayout
from shardkit._mesh import DeviceMesh, known_meshes
from shardkit._tensor import dcp_protocol
from shardkit._tensor.sharded import ShardedTensor, user_attributes
from shardkit._tensor.spec import ShardSpec, traced_spec
from shardkit.backends import mesh_of_world

Description = tuple[str, tuple[int, ...], tuple[int, ...], tuple[str, ...] | None]
"""Device type, shape, ranks and names of a mesh."""


def reduce_tensor(tensor: ShardedTensor) -> tuple[Any, tuple[Any, ...]]:
    """Return how to pickle a sharded tensor, without its gradient, as for other parameters.

    The piece shares its flat's storage, which torch.save writes once for all pieces in it.
    """
    spec, mesh = tensor.spec, tensor.spec.mesh
    spec.check_saved()
    problem, remedy = "", "Save full_tensor(), called on all ranks."
    if spec.tensor_parallel is not None:
        problem = "split over a tensor-parallel mesh as well, and such shards cannot be pickled"
    elif spec.subclass is not None:
        problem = f"a {spec.subclass.cls.__name__}, which a pickle cannot describe"
    elif spec.packing is not None:
        problem = f"a {spec.packing.cls.__name__}, which a pickle cannot describe"
        remedy = "Save by shardkit.checkpoint.save or torch.distributed.checkpoint."
    if problem:
        msg = f"sharded {spec.name!r} is {problem}. {remedy}"
        raise ShardedTensorError(msg)
    is_param = isinstance(tensor, nn.Parameter)
    is_chosen = is_param and torch_tensors.is_grad_dtype_chosen(tensor)
    return rebuild_tensor, (
        tensor.local_piece.detach(),
        spec.name,
        tuple(spec.shape),
        tuple(spec.layout.cut(spec.index)),
        spec.axis.rank,
        describe(mesh),
        tensor.requires_grad,
        is_param,
        user_attributes(tensor) if is_param else {},
        *((torch_tensors.grad_dtype_of(tensor),) if is_chosen else ()),
    )


def rebuild_tensor(  # noqa: PLR0913, PLR0917 - a file format
    piece: Tensor,
    name: str,
    shape: tuple[int, ...],
    cut: tuple[int, int, int, int],
    position: int,
    described: Description,
    requires_grad: bool,  # noqa: FBT001
    is_param: bool,  # noqa: FBT001
    attributes: dict[str, Any],
    *grad_dtype: torch.dtype | None,
) -> ShardedTensor:
    """Return a sharded tensor that was pickled, bound to a mesh of this process.

    Raises:
        MeshError: This process has no such mesh.
        ShardedTensorError: The piece belongs to another rank, or is read without its values.
    """
    if type(piece).__name__ == "FakeTensor":
        msg = (
            f"sharded {name!r} is loaded under a FakeTensorMode, without its values. Such a reader "
            f"takes the bytes of the whole, {tuple(shape)}, from the file by itself, and this file "
            f"holds a shard. Load it by torch.load without that mode, or save the model by "
            f"shardkit.checkpoint.save or torch.distributed.checkpoint."
        )
        raise ShardedTensorError(msg)
    mesh = find_mesh(f"sharded {name!r}", described)
    axis = mesh.backend.axis(mesh.ndim - 1)
    if axis.rank != position:
        msg = (
            f"what is read here holds shard {position} of sharded {name!r}, but this process (rank "
            f"{mesh.rank}) is at position {axis.rank} of the shard axis. Load on every rank the "
            f"file that this rank saved. To send values to other ranks, send full_tensor(), called "
            f"on all ranks."
        )
        raise ShardedTensorError(msg)
    if mesh.backend.is_traced:
        spec = traced_spec(EvenLayout.plan([shape], world_size=axis.size), 0, mesh, name)
    else:
        spec = ShardSpec(FlatLayout.of_one(shape, cut), 0, mesh=mesh, axis=axis, name=name)
    spec.annotate_sharding(piece)
    sharded = ShardedTensor(piece, spec)
    if not is_param:
        sharded.requires_grad_(requires_grad)
        return sharded
    result: Any = nn.Parameter(sharded, requires_grad=requires_grad)
    result.__dict__.update(attributes)
    for dtype in grad_dtype:  # Written if the user chose one.
        result.grad_dtype = dtype
    assert isinstance(result, ShardedTensor)
    return result


def describe(mesh: DeviceMesh) -> Description:
    """Return the description by which another process finds its mesh."""
    return mesh.device_type, tuple(mesh.shape), tuple(mesh.ranks), mesh.mesh_dim_names


def reduce_mesh(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
    """Return how to pickle a mesh, which modules and objects of users may hold."""
    return find_mesh, ("an object that holds a DeviceMesh", describe(mesh))


def find_mesh(what: str, described: Description) -> DeviceMesh:
    """Return the newest mesh of this description, preferably an equal one; or a fitting world."""
    device_type, shape, ranks, names = described
    fitting = [
        mesh
        for mesh in known_meshes()
        if mesh.backend.is_current
        and (mesh.device_type, mesh.shape) == (device_type, tuple(shape))
        and mesh.rank in mesh.ranks
    ]
    for mesh in fitting:
        if (mesh.ranks, mesh.mesh_dim_names) == (tuple(ranks), names):
            return mesh
    if fitting:
        return fitting[0]
    world = mesh_of_world(device_type, shape, names)
    if world is not None:
        return world
    processes = f"Start {len(ranks)} processes (torchrun --nproc-per-node) and"
    start = f"On {len(ranks)} of them" if device_type == "xla" else processes
    msg = (
        f"{what} was saved on a mesh of {device_type!r} devices of shape {shape}"
        f"{f' with axes {names}' if names else ''}, and this process has no such mesh. {start} "
        f"make it before loading: init_device_mesh({device_type!r}, {tuple(shape)}"
        f"{f', mesh_dim_names={names}' if names else ''}). What is to be read on other meshes or "
        f"devices is saved by shardkit.checkpoint.save."
    )
    raise MeshError(msg)


# --- to another process of this machine -----------------------------------------------------------


class SavedPiece(Tensor):
    """A sharded tensor's piece in a process without its mesh; it can only go to a checkpoint.

    The process that ``dcp.async_save`` may start for writing gets such pieces.
    """

    __torch_function__ = torch_tensors.disabled_torch_function

    # The piece, 1-D; shape of the whole; boxes of the piece that this rank writes; the name.
    described: tuple[Tensor, tuple[int, ...], list[Box], str]

    @staticmethod
    def __new__(
        cls: type[Self], piece: Tensor, shape: tuple[int, ...], boxes: list[Box], name: str
    ) -> Self:
        """Wrap a piece."""
        self: Self = torch_tensors.make_wrapper(cls, shape, dtype=piece.dtype, device=piece.device)
        self.described = (piece, shape, boxes, name)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        """Show name and shape."""
        return f"SavedPiece({self.described[-1]!r}, shape={tuple(self.shape)})"

    def __create_write_items__(self, fqn: str, tensor: object) -> list[Any]:
        """Return the items that a distributed checkpoint writes."""
        del tensor
        return dcp_protocol.create_write_items(fqn, *self.described)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the tensor that a distributed checkpoint writes."""
        return dcp_protocol.get_tensor_shard(index, *self.described)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse all operators."""
        del types, kwargs
        name = next((arg.described[-1] for arg in args if isinstance(arg, cls)), "?")
        msg = (
            f"{func} on sharded {name!r} in a process that has no mesh like the one it is sharded "
            f"over: it can only be saved to a distributed checkpoint there. Send full_tensor(), or "
            f"make the mesh in that process before receiving."
        )
        raise ShardedTensorError(msg)


def reduce_for_process(tensor: ShardedTensor) -> tuple[Any, tuple[Any, ...]]:
    """Return how to send a sharded tensor to another process of this machine."""
    spec = tensor.spec
    piece = tensor.local_piece.detach()
    described = None
    if spec.tensor_parallel is None and spec.subclass is None and spec.packing is None:
        described = (piece, *reduce_tensor(tensor)[1][1:])
    boxes = dcp_protocol.boxes_to_write(spec)
    return rebuild_in_process, (described, (piece, tuple(spec.shape), boxes, spec.name))


def rebuild_in_process(
    described: tuple[Any, ...] | None, saved: tuple[Tensor, tuple[int, ...], list[Box], str]
) -> Tensor:
    """Return a sharded tensor that was sent, or a `SavedPiece` if there is no such mesh."""
    if described is not None:
        with contextlib.suppress(MeshError):
            return rebuild_tensor(*described)
    return SavedPiece(*saved)


def mesh_of_restored(param: Any) -> DeviceMesh:
    """Return the mesh of a parameter whose module was unpickled.

    Raises:
        MeshError: This process has no such mesh.
    """
    if isinstance(param, SavedPiece):
        msg = (
            f"a module that holds sharded {param.described[-1]!r} was sent to a process that has "
            f"no mesh like the one it is sharded over. If it was in a dataset, which workers of a "
            f"loader get by 'spawn' or 'forkserver', give the dataset what it needs of the model "
            f"(a config, full_tensor()), or start workers by 'fork'."
        )
        raise MeshError(msg)
    mesh: DeviceMesh = param.spec.mesh
    return mesh


class Pickled:
    """Record of pickles in this process, without those for other processes of this machine."""

    count = 0  # Number of sharded tensors.
    name = ""  # Name of the last one.
    num_pieces = 0  # Number of pieces that make up its whole, each on another rank.
    is_told = False  # Whether a warning said that other ranks have pickled nothing.


def _reduce_and_note(tensor: ShardedTensor) -> tuple[Any, tuple[Any, ...]]:
    result = reduce_tensor(tensor)
    Pickled.count += 1
    Pickled.name, Pickled.num_pieces = tensor.spec.name, tensor.spec.axis.size
    return result


copyreg.pickle(ShardedTensor, _reduce_and_note)
copyreg.pickle(DeviceMesh, reduce_mesh)
ForkingPickler.register(ShardedTensor, reduce_for_process)
torch.serialization.add_safe_globals([rebuild_tensor])
