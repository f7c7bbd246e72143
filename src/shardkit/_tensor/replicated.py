"""What `ShardedTensor.redistribute` returns for a replica: the whole, with DTensor's methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit import _compat

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh
    from shardkit._tensor.spec import ShardSpec


class ReplicatedTensor(Tensor):
    """A whole tensor, as plain as any: what operators return of it is of no class of ours."""

    spec: ShardSpec
    __torch_function__ = _compat.disabled_torch_function

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the sharded tensor."""
        return self.spec.mesh

    @property
    def placements(self) -> tuple[Any, ...]:
        """`Replicate` for each mesh axis."""
        return self.spec.replicas

    def to_local(self) -> Tensor:
        """Return the whole."""
        return self.as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """Return the whole."""
        return self.as_subclass(Tensor)


def is_replica(placements: Any) -> bool:
    """Whether placements, ours or torch's, ask for the same on each rank."""
    return all(type(placement).__name__ == "Replicate" for placement in placements)
