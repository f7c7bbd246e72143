"""An exchange on a side stream keeps its memory until the compute stream is behind it."""

from __future__ import annotations

import typing

import torch

from shardkit.backends.accelerator import PeerHandle


class Device:
    """A device and its compute stream: notes what is waited for."""

    def __init__(self) -> None:
        self.waited: list[typing.Any] = []

    def current_stream(self) -> Device:
        return self

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


def make_handle(device: Device) -> PeerHandle:
    memory: typing.Any = (torch.zeros(2), torch.zeros(2))
    given: typing.Any = device
    event: typing.Any = "exchanged"
    return PeerHandle(given, event, memory, None)


def test_a_handle_that_is_dropped_is_waited_for() -> None:
    device = Device()
    handle = make_handle(device)
    assert device.waited == []
    del handle
    assert device.waited == ["exchanged"]


def test_a_handle_that_was_waited_for_costs_nothing_more() -> None:
    device = Device()
    handle = make_handle(device)
    handle.wait()
    del handle
    assert device.waited == ["exchanged"]
