"""CUDA graphs of steps whose work communicates over process groups."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from shardkit.backends.watch.watchdog import channel_of, current_watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch.distributed as dist

    from shardkit.backends.device import AcceleratorDevice


class StreamGraph:
    """A graph of an accelerator, whose work communicates over process groups."""

    def __init__(self, device: AcceleratorDevice, groups: Sequence[dist.ProcessGroup]) -> None:
        self._device = device
        self._groups = groups
        self._graph = device.new_graph()
        self._stream = device.new_compute_stream()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Let compute run on the stream where it is captured later.

        It runs after all compute issued so far, and before all compute issued later.
        """
        device, before = self._device, self._device.current_stream()
        self._stream.wait_event(before.record_event())
        try:
            with device.on(self._stream):
                yield
        finally:
            before.wait_event(self._stream.record_event())

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture compute instead of running it."""
        current_watchdog().has_captured = True
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
                raise cause from cause.__cause__  # Hide the error at the end of a broken capture.
            raise

    def replay(self, of: str) -> None:
        """Run the captured work, in the order of the current stream; the host goes on.

        Args:
            of: Name of the step, by which ranks compare what they are about to do.
        """
        issued = [channel_of(group).issue("replay", of, 0) for group in self._groups]
        self._graph.replay()
        event = self._device.current_stream().record_event()
        for each in issued:
            each.started(self._device, event)
