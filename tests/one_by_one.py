"""Optimizers of tests, which step one parameter after the other."""

from __future__ import annotations

import typing

import torch
from torch import Tensor

Entries = dict[str, typing.Any]


class OneByOne(torch.optim.Optimizer):
    """Steps each parameter that has a gradient by the rule of a subclass, `step_one`."""

    def __init__(self, params: typing.Any, **defaults: typing.Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.step_one(param, param.grad, self.state[param], group)

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        """Step a parameter."""
        raise NotImplementedError
