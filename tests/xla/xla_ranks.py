"""The ranks of a case on XLA: this process computes for all of them."""

from __future__ import annotations

import copy
import typing

import virtual_devices  # noqa: F401 - sets the environment, before torch_xla is imported

# isort: split

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor, nn

from parity import Ranks
from reference import AXES
from shardkit import DeviceMesh, init_device_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def run_on_xla(
    mesh_shape: tuple[int, ...], case: Callable[..., typing.Any], *args: typing.Any
) -> typing.Any:
    """Run a case in this process, the only one."""
    # A mesh of its own: its collectives are numbered from 0, so that what another case has compiled
    # need not be compiled again.
    mesh = init_device_mesh("xla", mesh_shape, mesh_dim_names=AXES[-len(mesh_shape) :])
    torch.manual_seed(0)
    try:
        return case(XlaRanks(mesh), *args)
    finally:
        torch.set_default_dtype(torch.float32)
        torch_xla.sync()  # A case that failed may have left half a graph.


class XlaRanks(Ranks):
    """`Ranks` of which this process is all: what is passed and compared is that of all ranks."""

    mesh: DeviceMesh

    @property
    def world_size(self) -> int:
        return self.mesh.size()

    def put(self, plain: nn.Module) -> typing.Any:
        return on_xla(plain)

    def send(self, by_rank: Sequence[Tensor]) -> Tensor:
        return torch.cat([*by_rank]).to("xla")

    def mean(self, loss: Tensor) -> Tensor:
        return loss.detach().cpu().double()

    def send_loss(self, by_rank: Sequence[Tensor]) -> Tensor:
        return torch.stack([*by_rank]).mean()

    def end_step(self) -> None:
        torch_xla.sync()


def on_xla(model: nn.Module) -> nn.Module:
    """Return a copy on the XLA device, with its ties: `to` alone makes a parameter per place."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return copy.deepcopy(model).to("xla")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def finish_graph() -> None:
    """Run what has been traced, here or on all replicas, of which each calls this."""
    if xr.is_spmd():
        torch_xla.sync()
    else:
        from shardkit.backends.xla import replica

        replica.run_graph()  # Of `torch_xla.sync()` replicas on the CPU hang.
