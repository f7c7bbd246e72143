"""Where a thread is: the user's line, and what it called."""

from __future__ import annotations

import sys
import threading
import typing

import torch
from torch import nn
from torch.nn.utils import parametrize

from shardkit.backends.watch.status import (
    CodePlace,
    is_in_collective,
    main_frame,
    place_of,
    stack_of,
)

if typing.TYPE_CHECKING:
    import types


class Looks(nn.Module):
    """Notes where it is called from."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame = main_frame()
        assert frame is not None
        self.found = place_of(frame.f_back)  # Of `main_frame` itself.
        return x


def test_the_line_of_the_user_is_found_below_library_code() -> None:
    found: list[CodePlace] = []

    def key(_: int) -> int:
        found.append(place_of(main_frame()))
        return 0

    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: (key(0), grad)[1])
    x.sum().backward()
    assert found[0].file == "test_place.py"
    assert found[0].function == "key"


def test_what_the_line_called_is_named() -> None:
    """From a thread that looks while the main one is inside of torch."""
    found: list[CodePlace] = []
    event = threading.Event()

    def look() -> None:
        event.wait()
        found.append(place_of(main_frame()))

    thread = threading.Thread(target=look)
    thread.start()
    event.set()
    thread.join()
    assert found[0].function == "test_what_the_line_called_is_named"
    assert found[0].inside == "Thread.join"


def test_only_a_collective_itself_waits() -> None:
    """Not what writes a checkpoint, although that is in torch.distributed, too."""
    c10d = sys.modules["torch.distributed.distributed_c10d"].__file__
    other = c10d.replace("_c10d", "_files")
    names: dict[str, object] = {"look": lambda: is_in_collective(sys._getframe(1))}  # noqa: SLF001
    exec(compile("def gather(f): return f()", c10d, "exec"), names)
    exec(compile("def write(): return look()", other, "exec"), names)
    exec(compile("def reduce(): return look()", c10d, "exec"), names)
    assert names["reduce"]()  # type: ignore[operator]
    assert not names["gather"](names["write"])  # type: ignore[operator]


def test_a_frame_of_the_user_inside_a_forward_is_the_place() -> None:
    module = Looks()
    module(torch.ones(1))
    assert module.found.function == "forward"
    assert module.found.inside == ""


def test_the_stack_has_every_frame() -> None:
    assert "test_the_stack_has_every_frame" in stack_of(main_frame())
    assert stack_of(None) == ""


def test_a_main_thread_that_has_ended_has_no_place() -> None:
    assert place_of(None) == CodePlace()


def test_a_context_manager_is_named_by_its_function() -> None:
    found: list[CodePlace] = []

    def see(frame: types.FrameType, *_: object) -> None:
        if frame.f_code.co_name == "cached":
            found.append(place_of(frame))

    sys.setprofile(see)
    try:
        with parametrize.cached():
            pass
    finally:
        sys.setprofile(None)
    assert found[0].function == "test_a_context_manager_is_named_by_its_function"
    assert found[0].inside == "cached"
