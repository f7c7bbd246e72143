"""What the tests on XLA ask of compiles and graphs, and the optimizers that they train with."""

from __future__ import annotations

import typing

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

if typing.TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Of a small eps, noise in gradients that are nearly zero makes whole steps.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def num_compiles() -> int:
    """Return how often XLA has compiled a graph in this process."""
    data = met.metric_data("CompileTime")
    return 0 if data is None else data[0]


def own_graph(tensors: list[Tensor]) -> str:
    """Return the HLO of what tensors are computed by, not run yet."""
    xm.wait_device_ops()  # What a run has not delivered yet would crash the next line.
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(tensors)  # noqa: SLF001
    return text


def sharding_of(tensor: Tensor) -> str:
    spec: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)  # noqa: SLF001
    return spec
