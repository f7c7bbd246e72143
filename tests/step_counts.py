"""What a steady step takes, counted: the golden file of it, and what counts.

`tests/golden/step_counts.toml` has a section for each case. A number that moves is a failure, which
names it. If it is meant to move, write the file anew, and say in the commit what moved and why:

    SHARDKIT_NEW_COUNTS=1 pytest tests/distributed/test_step_counts.py tests/streams/test_counts.py

Counts of Python's calls are those of one version of Python and torch. Elsewhere they may differ by
5 %, and so may those whose name says it. All others are equal everywhere.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import platform
import re
import sys
import tomllib
import typing
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardkit
from shardkit import _events
from shardkit.backends import direct_reads, shared_memory

if typing.TYPE_CHECKING:
    import types
    from collections.abc import Callable, Mapping

Counts = dict[str, int]

_GOLDEN = Path(__file__).parent / "golden" / "step_counts.toml"
_RENEW = "SHARDKIT_NEW_COUNTS"
_CALLS = "calls of Python"
ABOUT = "about (5 %)"  # Begins the name of a count that is not the same in each run.
_TOLERANCE = 0.05
_OURS = str(Path(shardkit.__file__).parent)
# How often it looks for messages depends on when they come.
_UNSTEADY = shared_memory.__file__
# Python 3.12 runs the first ones where they stand; what resumes a generator depends on it as well.
_NOT_COUNTED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")


# --- the file -------------------------------------------------------------------------------------


def golden(section: str) -> Counts:
    """Return a section of the file; empty if it has none."""
    found: Counts = tomllib.loads(_GOLDEN.read_text()).get(section, {})
    return found


def check(section: str, found: Counts) -> None:
    """Compare what was counted with the golden file; or write it there, if that is asked for.

    Raises:
        AssertionError: A number has moved.
    """
    if os.environ.get(_RENEW):
        _write(section, found)
        return
    known, moved = golden(section), []
    for key in {**known, **found}:
        was, now = known.get(key, 0), found.get(key, 0)
        if not _is_same(key, was, now):
            moved.append(f"  {key}: {was} -> {now}")
    assert not moved, (
        f"a steady step of {section!r} takes other counts than {_GOLDEN.name} has:\n"
        + "\n".join(moved)
        + f"\nIf that is meant: {_RENEW}=1 pytest tests/distributed/test_step_counts.py "
        f"tests/streams/test_counts.py, and say in the commit what moved."
    )


def _is_same(key: str, was: int, now: int) -> bool:
    if was == now:
        return True
    may_differ = key.startswith(_CALLS) and _versions() != _golden_versions()
    return (may_differ or key.startswith(ABOUT)) and abs(now - was) <= _TOLERANCE * was


def _versions() -> str:
    python = ".".join(platform.python_version_tuple()[:2])
    return f"Python {python}, torch {'.'.join(torch.__version__.split('.')[:2])}"


def _golden_versions() -> str:
    """Return the versions with which calls of Python were counted."""
    versions: str = tomllib.loads(_GOLDEN.read_text())["versions"]
    return versions


def _write(section: str, found: Counts) -> None:
    """Put a section into the file; comments above a section and in front of the file stay."""
    groups = found.get("groups", 0)
    lines = [f'["{section}"]']
    known_counts = golden(section)
    for key, now in found.items():
        was = known_counts.get(key, 0)
        count = was if _is_same(key, was, now) else now
        is_shared = groups and key not in ("groups", "parameters")
        each = f"  # {count / groups:.1f} a group" if is_shared else ""
        lines.append(f'"{key}" = {count}{each}')
    text = _GOLDEN.read_text()
    text = re.sub(r'^versions = ".*"$', f'versions = "{_versions()}"', text, flags=re.MULTILINE)
    known = re.compile(rf'^\["{re.escape(section)}"\]\n(".*\n)*', flags=re.MULTILINE)
    new = "\n".join(lines) + "\n"
    text = known.sub(lambda _: new, text) if known.search(text) else f"{text}\n{new}"
    _GOLDEN.write_text(text)


# --- what counts ----------------------------------------------------------------------------------


def python_calls(run: Callable[[], object]) -> int:
    """Return how many of shardkit's functions are called in this thread while `run` runs."""
    number = 0

    def note(frame: types.FrameType, event: str, arg: object) -> None:
        del arg
        nonlocal number
        code = frame.f_code
        if event == "call" and code.co_name not in _NOT_COUNTED:
            name = code.co_filename
            number += name.startswith(_OURS) and name != _UNSTEADY

    _run_noted(run, sys.setprofile, note)
    return number


def python_instructions(run: Callable[[], object]) -> int:
    """Return how many instructions of shardkit's functions this thread carries out in `run`.

    Unlike calls these also grow with the length of what a loop goes through.
    """
    number = 0

    def note(frame: types.FrameType, event: str, arg: object) -> typing.Any:
        del arg
        nonlocal number
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) or name == _UNSTEADY:
            return None
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return note

    _run_noted(run, sys.settrace, note)
    return number


def _run_noted(
    run: Callable[[], object], install: Callable[[typing.Any], None], note: object
) -> None:
    """Run something while Python tells `note` what this thread does."""
    gc.collect()
    gc.disable()  # What it finds, and when, is not the step's.
    install(note)
    try:
        run()
    finally:
        install(None)
        gc.enable()


class Operators(TorchDispatchMode):
    """Counts collectives, copies and allocations of tensors; a list operator is one copy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self,
        func: typing.Any,
        types: typing.Any,
        args: typing.Any = (),
        kwargs: typing.Any = None,
    ) -> typing.Any:
        del types
        name = func.name().split("::")[-1].split(".")[0]
        if func.namespace == "c10d":
            self.counts["collectives"] += 1
        elif name in ("copy_", "_foreach_copy_", "cat", "_to_copy", "clone"):
            self.counts["copies"] += 1
        elif name.startswith(("empty", "new_empty", "zeros", "new_zeros")):
            self.counts["allocations of tensors"] += 1
        return func(*args, **(kwargs or {}))


def counts_of(steps: Mapping[str, Callable[[], object]]) -> Counts:
    """Return what each part of a step takes; the parts run three times, in order.

    Args:
        steps: Parts of a steady step, by name.
    """
    found: Counts = {}
    with mock.patch.object(shared_memory.Shared, "is_there", return_value=True):
        _count_calls(steps, found)
    memory: collections.Counter[str] = collections.Counter()
    ways = {
        "exchanges in shared memory": (shared_memory.SharedMemory, "share"),
        "direct reads": (direct_reads.DirectReads, "start"),
    }
    with _events.observed_by(_events.StepObserver(lambda event: memory.update([event.kind]))):
        for name, run in steps.items():
            with Operators() as operators, contextlib.ExitStack() as stack:
                uses = {
                    kind: stack.enter_context(
                        mock.patch.object(*way, autospec=True, side_effect=getattr(*way))
                    )
                    for kind, way in ways.items()
                }
                run()
            for kind in sorted(operators.counts):
                found[f"{kind}, {name}"] = operators.counts[kind]
            found |= {f"{kind}, {name}": use.call_count for kind, use in uses.items() if use.called}
    for kind in ("gather", "reduce_scatter", "take", "allocate"):
        found[f"events of {kind}"] = memory[kind]
    return found


def _count_calls(steps: Mapping[str, Callable[[], object]], found: Counts) -> None:
    for run in steps.values():
        python_calls(run)  # Something is asked once about each file on the stack: this one, too.
    for name, run in steps.items():
        found[f"{_CALLS}, {name}"] = python_calls(run)
