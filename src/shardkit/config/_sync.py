"""Rank 0's values of a model, for all ranks: no rank but it needs memory for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import ConfigError
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.base import first_of_all
from shardkit.backends.world import current_world_size

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh


@dataclass
class Values:
    """What rank 0's model holds, kept while the model is sharded on meta.

    Attributes:
        mesh: The mesh; all of its ranks make this object.
        state: A state dict; on ranks other than 0 its tensors are not looked at.
        other: Tensors that `load_full` does not fill: ignored parameters, and buffers that state
            dicts leave out.
        taken: Parameters that are on meta now, each with a parameter that has its values.
        places: All names of a buffer in this rank's model, by each of them.
    """

    mesh: DeviceMesh
    state: dict[str, Any]
    other: dict[str, Tensor]
    taken: list[tuple[nn.Parameter, nn.Parameter]]
    places: dict[str, list[str]]

    def put_back(self) -> None:
        """Give the values back to this rank's parameters, but for those that are sharded."""
        for param, values in self.taken:
            if not isinstance(param, ShardedTensor):
                torch.utils.swap_tensors(param, values)

    def send(self, model: nn.Module) -> None:
        """Give all ranks rank 0's values. Collective."""
        from shardkit.checkpoint import load_full
        from shardkit.checkpoint._state.broadcast import FromRank0

        self.taken.clear()
        load_full(self.state, model, broadcast_from_rank0=True, progress=False)
        self.state = {}
        device = self.mesh.backend.device
        for name, value in FromRank0(self.other, device=device).receive():
            _set(model, self.places.get(name, [name]), value.to(device))


def take_values(model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> Values | None:
    """Take the values out of a model, whose parameters are on meta from then on.

    Parameters stay the objects that they are, so optimizers and ties stay right.

    Returns:
        None: there is nothing to send: one rank, one process for all devices, or a model without
        values on rank 0.

    Raises:
        ConfigError: Replicas of torch_xla, each a process.

    Cost: one exchange of a flag per axis.
    """
    if mesh.backend.is_traced:
        if (current_world_size() or 1) > 1:
            msg = (
                "rank 0's values cannot be sent to replicas on XLA. Write "
                "fsdp_cpu_ram_efficient_loading: false and fsdp_sync_module_states: false, and "
                "make the model with the same seed on all of them."
            )
            raise ConfigError(msg)
        return None
    if mesh.size() == 1:
        return None
    is_on_meta = any(param.is_meta for param in model.parameters())
    axes = [mesh.backend.axis(axis) for axis in range(mesh.ndim)]
    if first_of_all(is_on_meta, axes):
        return None
    state = model.state_dict()
    other = {n: b.detach() for n, b in model.named_buffers() if n not in state}
    taken = []
    for param in set(model.parameters()) - ignored:
        other_param = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        if not param.is_meta:
            torch.utils.swap_tensors(param, other_param)
            taken.append((param, other_param))
    names_of: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names_of.setdefault(id(buffer), []).append(name)
    places = {name: names for names in names_of.values() for name in names}
    return Values(mesh, state, other, taken, places)


def _set(model: nn.Module, names: list[str], value: Tensor) -> None:
    """Give a value to what has these names; on meta it becomes one tensor again."""
    for name in names:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        current = getattr(module, own)
        if current.is_meta:
            value = value.to(current.dtype)  # Sharding has cast the others, maybe.
            setattr(module, own, value)
        else:
            current.data.copy_(value)
