"""Chooses the groups that go to the host, so that the others fit into a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit._errors import WrapError
from shardkit._policy import CPUOffloadPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._wrapping.plan import PlannedUnit


def offload_to_fit(units: Sequence[PlannedUnit], budget_nbytes: int) -> None:
    """Offload groups, those that save most first, until the rest fits.

    Counted is what a rank keeps of a group between steps: its shard and, where it is trained, the
    gradients and two tensors of optimizer state (AdamW). Groups that are on the host already stay
    there. Of equal groups the one that is sharded first goes first.

    Args:
        units: All groups; their arguments are changed.
        budget_nbytes: The bytes that may stay on the device.

    Raises:
        WrapError: The budget is no number of bytes.
    """
    if budget_nbytes < 0:
        msg = f"offload_budget_nbytes must be 0 or more bytes, got {budget_nbytes}."
        raise WrapError(msg)
    on_device = [
        unit for unit in units if not isinstance(unit.arguments["offload_policy"], CPUOffloadPolicy)
    ]
    excess = sum(unit.state_nbytes for unit in on_device) - budget_nbytes
    for unit in sorted(on_device, key=lambda unit: -unit.state_nbytes):
        if excess <= 0 or not unit.state_nbytes:
            return
        excess -= unit.state_nbytes
        unit.arguments["offload_policy"] = CPUOffloadPolicy()
        unit.plan()
