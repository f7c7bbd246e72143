"""The search for the model of parameters that no group holds."""

from __future__ import annotations

from torch import nn

from shardkit._module.optimizers import _found_in


def test_a_module_that_another_thread_is_making_is_passed_over() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    unmade = nn.Linear.__new__(nn.Linear)  # As in the middle of a deepcopy: without attributes.
    found, names = _found_in([*model.parameters()])
    assert found is model
    assert names == ["'0.weight'", "'0.bias'"]
    assert type(unmade) is nn.Linear  # It was there meanwhile.
