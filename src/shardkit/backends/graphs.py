"""A graph of a device: work that is captured once, and started as a whole from then on."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.backends.device import AcceleratorDevice
    from shardkit.backends.process_group import ProcessGroupAxis


class StreamGraph:
    """`StepGraph` of an accelerator.

    Args:
        device: Device whose work is captured.
        axes: Axes of several ranks, over which the work communicates.
    """

    def __init__(self, device: AcceleratorDevice, axes: Sequence[ProcessGroupAxis]) -> None:
        self._device = device
        self._axes = axes
        self._graph = device.new_graph()
        self._stream = device.new_compute_stream()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """See `StepGraph.aside`."""
        device, before = self._device, self._device.current_stream()
        device.wait(self._stream, device.record(before))
        try:
            with device.on(self._stream):
                yield
        finally:
            device.wait(before, device.record(self._stream))

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """See `StepGraph.capturing`."""
        cause: BaseException | None = None
        try:
            with self._device.capturing(self._graph, self._stream):
                try:
                    yield
                except BaseException as error:
                    cause = error
                    raise
        except BaseException:
            if cause is not None:
                raise cause from cause.__cause__  # Not what the end of a broken capture says.
            raise

    def replay(self, of: str) -> None:
        """See `StepGraph.replay`."""
        issued = [axis.issue("replay", of, 0) for axis in self._axes]
        self._graph.replay()
        event = self._device.record(self._device.current_stream())
        for each in issued:
            if each is not None:
                each.started(functools.partial(self._device.has_passed, event))
