"""By what a loss was multiplied, and what became of the optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit._errors import StateError

if TYPE_CHECKING:
    import torch


class LossScale:
    """A number, or a GradScaler, which is asked.

    Args:
        source: The number, or the GradScaler.

    Attributes:
        value: The scale as it was read last.
        may_skip: True if steps are skipped where gradients overflow.

    Raises:
        StateError: It is neither a GradScaler nor a finite number above 0.
    """

    def __init__(self, source: float | torch.amp.GradScaler) -> None:
        if isinstance(source, int | float):
            is_valid = 0.0 < source < float("inf")
        else:
            is_valid = hasattr(source, "is_enabled")
        if not is_valid:
            msg = (
                f"set_loss_scale takes a GradScaler, or a finite number above 0, got {source!r}. "
                f"Where the loss is not scaled, pass 1.0."
            )
            raise StateError(msg)
        self._scaler = None if isinstance(source, int | float) else source
        self._growth = 0
        self.value = float(source) if isinstance(source, int | float) else 1.0
        self.may_skip = self._scaler is not None and self._scaler.is_enabled()
        self.read()

    def read(self) -> str:
        """Read the scale.

        Returns:
            ``"same"``: the optimizer step that was under way when it was read before still is;
            ``"stepped"``; ``"skipped"``: the scale got lower.

        Cost: waits for the device where the scale is on one.
        """
        if self._scaler is None:
            return "same"
        before = self.value, self._growth
        state = self._scaler.state_dict()  # Empty where it is not enabled.
        value, self._growth = state.get("scale", 1.0), state.get("_growth_tracker", 0)
        if (value, self._growth) == before:
            return "same"
        self.value = value or self.value  # By 0 nothing can be divided.
        return "skipped" if value < before[0] else "stepped"
