"""Accelerator ranks: one backend for every device that torch has streams and collectives for.

That is ``cuda`` (NCCL, and RCCL on AMD), ``xpu``, ``npu``, ... What it needs of the device is in
`device`; what runs on which stream in `accelerator_streams`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.backends.accelerator_axis import AcceleratorAxis
from shardkit.backends.accelerator_streams import AcceleratorStreams
from shardkit.backends.device import AcceleratorDevice
from shardkit.backends.process_group import ProcessGroupBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed import device_mesh as torch_mesh

    from shardkit.backends.base import AxisComm, CommStreams


class AcceleratorBackend(ProcessGroupBackend):
    """Meshes of accelerators: the current device of this process is its rank's."""

    is_host_synchronous = False
    has_own_memory = True
    copies_gradients_together = True

    def __init__(self, mesh: torch_mesh.DeviceMesh, axes: Sequence[int]) -> None:
        super().__init__(mesh, axes)
        self.accelerator = self.find_device(mesh.device_type)
        self.device = self.accelerator.device

    @staticmethod
    def find_device(device_type: str) -> AcceleratorDevice:
        """Return the device of this process."""
        return AcceleratorDevice.current(device_type)

    def make_axis(self, group: dist.ProcessGroup) -> AcceleratorAxis:
        """Return the communicator over a process group."""
        return AcceleratorAxis(group, self.accelerator)

    def zeros_on_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeros on the host, for shards that are offloaded."""
        return self.accelerator.empty_on_host(numel, dtype, pinned=pinned).zero_()

    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> AcceleratorStreams:
        """Make the three streams, or use those of another root."""
        assert share is None or isinstance(share, AcceleratorStreams)
        return AcceleratorStreams(self.accelerator, share)
