"""While a CUDA graph is captured no other thread asks the device; none begins while one does."""

from __future__ import annotations

import threading
import typing

import pytest
import torch

from shardkit._compat import torch_devices


class Graph:
    """What is used of torch's class."""

    def capture_begin(self, *, fails: bool = False) -> None:
        if fails:
            raise RuntimeError

    def capture_end(self) -> None:
        """Torch's ends it."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[None]:
    cls = type("Graph", (), dict(vars(Graph)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cls)
    torch_devices._note_captures.cache_clear()  # noqa: SLF001
    yield
    torch_devices._note_captures.cache_clear()  # noqa: SLF001


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
