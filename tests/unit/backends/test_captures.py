"""While a CUDA graph is captured no other thread asks the device; what a broken one leaves."""

from __future__ import annotations

import contextlib
import inspect
import threading
import typing
from contextlib import nullcontext

import pytest
import torch

from shardkit._compat import torch_devices
from shardkit._compat.once import once
from shardkit.backends.device import AcceleratorDevice


class Graph:
    """What is used of torch's class."""

    def capture_begin(self, *, fails: bool = False) -> None:
        if fails:
            raise RuntimeError

    def capture_end(self) -> None:
        """Torch's ends it."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type("Graph", (), dict(vars(Graph)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cls)
    note: typing.Any = torch_devices._note_captures  # noqa: SLF001
    monkeypatch.setattr(torch_devices, "_note_captures", once(inspect.unwrap(note)))


def may_ask() -> bool:
    with torch_devices.unless_capturing() as found:
        return found


def test_nobody_asks_during_a_capture() -> None:
    assert may_ask()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    first.capture_begin()
    assert not may_ask()
    second.capture_begin()
    first.capture_end()
    assert not may_ask()
    second.capture_end()
    assert may_ask()


def test_a_capture_that_does_not_begin_is_none() -> None:
    assert may_ask()
    graph: typing.Any = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError):
        graph.capture_begin(fails=True)
    assert may_ask()


def test_a_capture_waits_for_who_asks() -> None:
    graph = torch.cuda.CUDAGraph()
    assert may_ask()
    thread = threading.Thread(target=graph.capture_begin)
    with torch_devices.unless_capturing():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(5)
    assert not thread.is_alive()
    graph.capture_end()
    assert may_ask()


class Cuda:
    """A device's module whose captures end well, or not."""

    def __init__(self, *, breaks: bool) -> None:
        self.breaks = breaks
        self.now = "the user's stream"

    def current_stream(self, index: int) -> str:
        assert index == 1
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: str) -> typing.Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    @contextlib.contextmanager
    def graph(self, *_: object, pool: tuple[int, int], **__: object) -> typing.Iterator[None]:
        assert pool == self.graph_pool_handle()
        before, self.now = self.now, "the stream of the capture"
        yield
        if self.breaks:
            msg = "operation failed due to a previous error during capture"
            raise RuntimeError(msg)  # Before it goes back to the stream of before.
        self.now = before


@pytest.mark.parametrize("breaks", [False, True])
def test_what_a_broken_capture_leaves_is_undone(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    undone: list[object] = []
    monkeypatch.setattr(torch_devices, "end_broken_capture", lambda *given: undone.append(given))
    device = AcceleratorDevice.__new__(AcceleratorDevice)
    cuda = Cuda(breaks=breaks)
    device.device, device._module = torch.device("cuda", 1), cuda  # noqa: SLF001
    expected = pytest.raises(RuntimeError, match="previous error") if breaks else nullcontext()
    stream: typing.Any = None
    with expected, device.capturing(None, stream):
        pass
    assert undone == ([(1, (0, 7))] if breaks else [])
    assert cuda.now == "the user's stream"
