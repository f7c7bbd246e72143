"""A wait for a save in the background that is interrupted."""

from __future__ import annotations

import functools
import signal
import threading
import typing

import pytest
import torch
from torch import nn

from shardkit import checkpoint
from shardkit.checkpoint._dcp import writer

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let writes wait for an event."""
    ready = threading.Event()
    real = writer.FileStream._write  # noqa: SLF001 - what calls the disk

    def write(*args: typing.Any) -> None:
        ready.wait()
        real(*args)

    monkeypatch.setattr(writer.FileStream, "_write", write)
    yield ready
    ready.set()
    checkpoint.release_staging_memory()


def interrupt(*_: object) -> typing.NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["the next save", "the result"])
def test_a_save_goes_on_after_an_interrupted_wait(
    tmp_path: pathlib.Path, disk: threading.Event, how: str
) -> None:
    model = nn.Linear(64, 64)
    nn.init.ones_(model.weight)
    first = checkpoint.async_save(tmp_path / "first", model)
    nn.init.zeros_(model.weight)
    save_again = functools.partial(checkpoint.async_save, tmp_path / "second", model)
    wait: Callable[[], object] = first.result if how == "the result" else save_again
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not first.done()
    threading.Timer(0.2, disk.set).start()
    checkpoint.async_save(tmp_path / "third", model).result()
    assert first.done()
    checkpoint.load(tmp_path / "first", model)
    assert torch.equal(model.weight, torch.ones(64, 64))  # The third did not overwrite it.
