"""A mesh of which only the shape is known: for plans of ranks that are not there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardkit._errors import MeshError
from shardkit._mesh import DeviceMesh
from shardkit.backends.base import MeshBackend

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class _Axis:
    """The size of an axis, seen from its first rank."""

    size: int
    rank: int = 0

    def __getattr__(self, name: str) -> NoReturn:
        msg = f"a mesh that is only a shape has no ranks to communicate with ({name})."
        raise MeshError(msg)


class ShapeOnly(MeshBackend):
    """Answers what a plan asks: as an accelerator, whose memory is not the host's."""

    has_own_memory = True
    batches_small_groups = True

    def __init__(self, shape: Sequence[int]) -> None:
        self.device = torch.device("meta")
        self._shape = tuple(shape)

    def process_group(self, axis: int) -> NoReturn:
        """There is none."""
        msg = f"axis {axis} of a mesh that is only a shape has no process group."
        raise MeshError(msg)

    def axis(self, axis: int) -> Any:
        """Return the size of an axis."""
        return _Axis(self._shape[axis])

    def for_axes(self, axes: Sequence[int]) -> ShapeOnly:
        """Return that of a submesh."""
        return ShapeOnly([self._shape[axis] for axis in axes])

    def receive_chunks(self, _: Any) -> int:
        """Return 0, as on accelerators."""
        return 0


def mesh_of_shape(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh that can be planned for, seen from its first rank.

    Raises:
        MeshError: A size is no positive int.
    """
    if not shape or min(shape) < 1:
        msg = f"a mesh shape is one or two positive numbers of ranks, got {tuple(shape)}."
        raise MeshError(msg)
    sizes = tuple(shape)
    return DeviceMesh("meta", sizes, tuple(range(math.prod(sizes))), None, 0, ShapeOnly(sizes))


def is_shape_only(mesh: DeviceMesh) -> bool:
    """Whether a mesh has no ranks."""
    return isinstance(mesh.backend, ShapeOnly)
