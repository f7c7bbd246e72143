"""What a captured step has read on the host may change in place: a replay compares it."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import nn

from shardkit import StateError
from shardkit._module.capture import _Inputs, _Updates

HOST = torch.device("cpu")


@pytest.mark.parametrize("constants", [[1, 2], {1, 2}, {1: 2}, [{"a": [1]}, 3], ([1], 2)])
def test_containers_of_constants(constants: typing.Any) -> None:
    inputs = _Inputs("step", (torch.ones(2), constants), HOST)
    inputs.fill((torch.zeros(2), constants))
    changed = constants[0] if type(constants) is tuple else constants
    changed.pop() if not isinstance(changed, dict) else changed.clear()
    with pytest.raises(StateError, match="the arguments was"):
        inputs.fill((torch.zeros(2), constants))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_learning_rate_that_is_a_tensor(device_type: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), torch.tensor(0.5))
    updates = _Updates("step", device_type)
    updates.note(optimizer)
    updates.check()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    if device_type == "cpu":  # It is a tensor of the device, which a replay reads.
        updates.check()
        return
    with pytest.raises(StateError, match=r"'lr' of SGD was 0\.5, and now it is 0\.25"):
        updates.check()


def test_tensors_of_the_host_in_a_tuple() -> None:
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), torch.tensor(0.5), betas=betas)
    updates = _Updates("step", "cuda")
    updates.note(optimizer)
    updates.check()
    betas[0].fill_(0.5)
    with pytest.raises(StateError, match=r"'betas' of Adam was \(0\.8999.*now it is \(0\.5, "):
        updates.check()
