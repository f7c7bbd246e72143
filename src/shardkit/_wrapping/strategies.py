"""Strategies of data parallelism by name: what each shards, and the calls for it."""

from __future__ import annotations

import enum
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardkit._errors import MeshError, StateError, WrapError
from shardkit._mesh import SHARD_AXIS, DeviceMesh
from shardkit._settings import refuse_texts
from shardkit._text import nearest

if TYPE_CHECKING:
    from shardkit.backends import TorchDeviceMesh

REPLICATE_AXIS = "replicate"

StrategyName = Literal[
    "replicate",
    "zero1",
    "zero2",
    "zero3",
    "hybrid",
    "hybrid_zero2",
    "NO_SHARD",
    "ddp",
    "SHARD_GRAD_OP",
    "FULL_SHARD",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
]
"""Names of strategies and their aliases."""


@dataclass(frozen=True)
class Strategy:
    """A strategy: what is sharded, and the calls of `fully_shard` and setters for it.

    Get one by `strategy`.

    Attributes:
        name: Name that `strategy` takes.
        aliases: Other names of it: those of FSDP1 and Accelerate.
        shards: Parts of the training state of which a rank has only its shard.
        mesh_rule: Shape of the mesh in words, where n is the number of ranks.
        mesh_ndim: Number of axes of that mesh.
        reshard_after_forward: Argument of `fully_shard`.
        reshard_after_backward: Argument of `set_reshard_after_backward`. False: one gather serves
            all micro-batches of a step.
        reduces_each_micro_batch: Whether gradients are reduced in every backward. False: unsharded
            gradients are summed, and reduced in the last backward of a step.
    """

    name: str
    aliases: tuple[str, ...]
    shards: str
    mesh_rule: str = "(n,)"
    mesh_ndim: int = 1
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    reduces_each_micro_batch: bool = True

    # --- use ---

    def arguments(self, mesh: DeviceMesh | TorchDeviceMesh | None = None) -> dict[str, Any]:
        """Return arguments of `fully_shard`.

            arguments = strategy("zero2").arguments(mesh)
            fully_shard(layer, **arguments)

        Args:
            mesh: Mesh to pass on, if it fits. None: `fully_shard` makes the 1-D mesh of all ranks.

        Raises:
            MeshError: The mesh has another shape than the strategy needs, or None is passed and the
                strategy needs another mesh.
        """
        arguments: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward}
        if mesh is not None:
            self.check_mesh_shape(tuple(mesh.shape))
            arguments["mesh"] = mesh
        elif self.mesh_ndim > 1:
            msg = (
                f"the strategy {self.name!r} wants a mesh of shape {self.mesh_rule}, and without "
                f"one fully_shard makes a 1-D mesh. Pass init_device_mesh(device_type, "
                f"strategy({self.name!r}).mesh_shape(world_size))."
            )
            raise MeshError(msg)
        return arguments

    def prepare(self, model: Any) -> Any:
        """Call the setters of the strategy on the sharded root, and return the root.

        `auto_shard` does this. After `fully_shard` by hand, call it once.

        Raises:
            StateError: The model is not sharded.
        """
        _refuse_plain(model, "prepare")
        if not self.reshard_after_backward:
            model.set_reshard_after_backward(False)
        return model

    def begin_micro_batch(self, model: Any, *, is_last: bool) -> None:
        """Set whether the micro-batch that begins is the last of its step. Call it on the root.

        Without this call every backward reduces, which is correct but costs a reduction each.

        Raises:
            StateError: The model is not sharded, or `is_last` is a text.
        """
        _refuse_plain(model, "begin_micro_batch")
        refuse_texts(StateError, is_last=is_last)
        if not self.reduces_each_micro_batch:
            model.set_requires_gradient_sync(is_last)

    # --- meshes ---

    def mesh_shape(self, world_size: int, ranks_per_copy: int | None = None) -> tuple[int, ...]:
        """Return the shape of the strategy's mesh over `world_size` ranks.

        Args:
            world_size: Number of ranks.
            ranks_per_copy: Number of ranks that share one copy of the model, for hybrid strategies
                only. None: the ranks of a host, from the launcher's `LOCAL_WORLD_SIZE`.

        Raises:
            MeshError: There is no such shape.
        """
        if self.mesh_ndim == 1:
            return (world_size,)
        if self.name == "replicate":
            return (world_size, 1)
        if ranks_per_copy is None:
            local = os.environ.get("LOCAL_WORLD_SIZE")
            ranks_per_copy = int(local) if local is not None and local.isdecimal() else None
            hosts = os.environ.get("GROUP_WORLD_SIZE", "")
            if ranks_per_copy and hosts.isdecimal() and int(hosts) * ranks_per_copy != world_size:
                msg = (
                    f"the strategy {self.name!r} makes a copy of the model on each host, and the "
                    f"{hosts} hosts have {world_size} ranks, but this one has {ranks_per_copy}. "
                    f"Start as many ranks on each host, or pass ranks_per_copy."
                )
                raise MeshError(msg)
        if ranks_per_copy is None or ranks_per_copy < 1 or world_size % ranks_per_copy:
            msg = (
                f"the strategy {self.name!r} wants a mesh of shape {self.mesh_rule}: {world_size} "
                f"ranks in copies of {ranks_per_copy}. Pass a mesh, or ranks_per_copy that divides "
                f"{world_size}; under a launcher it is LOCAL_WORLD_SIZE."
            )
            raise MeshError(msg)
        return (world_size // ranks_per_copy, ranks_per_copy)

    def check_mesh_shape(self, shape: tuple[int, ...]) -> None:
        """Raise if the strategy has no mesh of this shape.

        Raises:
            MeshError: The shape does not fit the strategy.
        """
        fits = len(shape) == self.mesh_ndim and (self.name != "replicate" or shape[-1] == 1)
        if not fits:
            msg = (
                f"the strategy {self.name!r} wants a mesh of shape {self.mesh_rule}, got {shape}. "
                f"Make one by init_device_mesh(device_type, "
                f"strategy({self.name!r}).mesh_shape({math.prod(shape)})), or choose a strategy "
                f"for this mesh."
            )
            raise MeshError(msg)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names for the axes of its mesh."""
        return (REPLICATE_AXIS, SHARD_AXIS)[-self.mesh_ndim :]


def _refuse_plain(model: Any, method: str) -> None:
    """Refuse a model without the setters of a sharded one; a compiled one has them, too."""
    if not hasattr(model, "set_requires_gradient_sync"):
        msg = (
            f"{method} takes the sharded root, got a {type(model).__name__} that is not sharded. "
            f"Call auto_shard or fully_shard on it first."
        )
        raise StateError(msg)


STRATEGIES = (
    Strategy(
        name="replicate",
        aliases=("NO_SHARD", "ddp"),
        shards="nothing",
        mesh_rule="(n, 1)",
        mesh_ndim=2,
        reshard_after_forward=False,
        reduces_each_micro_batch=False,
    ),
    Strategy(
        name="zero1",
        aliases=(),
        shards="the optimizer's state",
        reshard_after_forward=False,
        reshard_after_backward=False,
        reduces_each_micro_batch=False,
    ),
    Strategy(
        name="zero2",
        aliases=("SHARD_GRAD_OP",),
        shards="gradients and the optimizer's state; parameters between steps",
        reshard_after_forward=False,
    ),
    Strategy(
        name="zero3",
        aliases=("FULL_SHARD",),
        shards="parameters, gradients and the optimizer's state",
    ),
    Strategy(
        name="hybrid",
        aliases=("HYBRID_SHARD",),
        shards="as zero3, within each copy of the model",
        mesh_rule="(copies, n / copies)",
        mesh_ndim=2,
    ),
    Strategy(
        name="hybrid_zero2",
        aliases=("_HYBRID_SHARD_ZERO2",),
        shards="as zero2, within each copy of the model",
        mesh_rule="(copies, n / copies)",
        mesh_ndim=2,
        reshard_after_forward=False,
    ),
)
"""All strategies."""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


_BY_NAME = {name: each for each in STRATEGIES for name in (each.name, *each.aliases)}


def strategy(name: StrategyName | enum.Enum | Strategy) -> Strategy:
    """Return a strategy of data parallelism by its name.

    | name | FSDP1's name | mesh of n ranks | what is sharded |
    | --- | --- | --- | --- |
    | ``replicate`` | ``NO_SHARD`` | (n, 1) | nothing, as in DDP |
    | ``zero1`` | | (n,) | optimizer state |
    | ``zero2`` | ``SHARD_GRAD_OP`` | (n,) | gradients, optimizer state; parameters between steps |
    | ``zero3`` | ``FULL_SHARD`` | (n,) | parameters, gradients, optimizer state |
    | ``hybrid`` | ``HYBRID_SHARD`` | (copies, n / copies) | as zero3, within a copy |
    | ``hybrid_zero2`` | ``_HYBRID_SHARD_ZERO2`` | (copies, n / copies) | as zero2, within a copy |

    Args:
        name: One of these names, in upper or lower case, with or without ``_`` and ``-``; or a
            member of torch's enum ``ShardingStrategy``; or a `Strategy`, which is returned.

    Raises:
        WrapError: There is no such strategy.

    Source: ZeRO, arXiv:1910.02054; PyTorch FSDP.
    """
    if isinstance(name, Strategy):
        return name
    text = str(name.name if isinstance(name, enum.Enum) else name)
    for known, found in _BY_NAME.items():
        if _plain(known) == _plain(text):
            return found
    msg = f"there is no strategy {name!r}. {nearest(text, _BY_NAME)}"
    raise WrapError(msg)
