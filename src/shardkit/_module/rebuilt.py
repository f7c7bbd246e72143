"""Buffers that no file has, computed again by the modules that hold them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from shardkit._module.materialize import Filling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


def rebuild_buffers(model: nn.Module, buffers: list[Tensor]) -> None:
    """Have modules compute buffers on meta; those that cannot be computed stay there.

    As `materialize` does, which asks the same methods of modules. All else in the model keeps its
    values, and random numbers drawn later are those that would have been drawn without it. A buffer
    of random numbers gets the same ones on all ranks.

    Cost: see `materialize`.
    """
    wanted = [buffer for buffer in buffers if buffer.is_meta]
    if wanted:
        filling = Filling(model, only=wanted)
        with torch.inference_mode(mode=False), torch.no_grad(), _own_numbers(filling.device):
            filling.run_where_possible()


@contextlib.contextmanager
def _own_numbers(device: torch.device) -> Iterator[None]:
    """Draw from generators that begin at 0, and leave others where they are."""
    accelerator = None
    if device.type not in ("cpu", "xla"):
        accelerator = torch.get_device_module(device)
    own = [] if accelerator is None else [accelerator.current_device()]
    with torch.random.fork_rng(devices=own, device_type=device.type if own else "cuda"):
        torch.default_generator.manual_seed(0)
        if accelerator is not None:
            accelerator.manual_seed(0)
        yield
