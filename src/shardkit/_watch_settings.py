"""What users choose of the watch over ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shardkit._errors import StateError


@dataclass(slots=True)
class WatchSettings:
    """What holds in this process.

    Attributes:
        ask_after_s: A rank that has waited so many seconds asks the others where they are.
        compare_values: At the first forward, compare the values that parameters had when they were
            sharded.
        check_gradients: In each backward, note whether this rank's own gradients are finite.
    """

    ask_after_s: float = 10.0
    compare_values: bool = True
    check_gradients: bool = False

    @classmethod
    def of_environment(cls) -> WatchSettings:
        """Return what the environment says."""
        return cls(
            ask_after_s=float(os.environ.get("SHARDKIT_ASK_AFTER_S", "10")),
            compare_values=os.environ.get("SHARDKIT_COMPARE_VALUES", "1") != "0",
            check_gradients=os.environ.get("SHARDKIT_CHECK_GRADIENTS", "0") != "0",
        )


watch_settings = WatchSettings.of_environment()


def set_watch(
    *,
    ask_after_s: float | None = None,
    compare_values: bool | None = None,
    check_gradients: bool | None = None,
) -> None:
    """Choose how the ranks watch each other; the same on every rank.

    A wait that ends is never cut short: whoever has waited long asks, and is told. Only what cannot
    end, because a rank is gone or does something else, ends in a `RankMismatchError`.

    Args:
        ask_after_s: Seconds of a wait after which a rank asks the others where they are. 10 by
            default, or what the environment's SHARDKIT_ASK_AFTER_S says. Longer is better with many
            ranks, for all of them answer.
        compare_values: Compare, at the first forward, samples of the values that parameters had
            when they were sharded. Yes by default, unless SHARDKIT_COMPARE_VALUES is 0.
        check_gradients: In each backward, note which of this rank's own gradients are not finite,
            for `FSDPModule.check_gradients`. Reads each gradient once more. No by default, unless
            SHARDKIT_CHECK_GRADIENTS is 1.

    Raises:
        StateError: A time that is not positive.
    """
    if ask_after_s is not None:
        if not ask_after_s > 0:
            msg = f"ask_after_s must be a positive number of seconds, got {ask_after_s}."
            raise StateError(msg)
        watch_settings.ask_after_s = float(ask_after_s)
    if compare_values is not None:
        watch_settings.compare_values = compare_values
    if check_gradients is not None:
        watch_settings.check_gradients = check_gradients
