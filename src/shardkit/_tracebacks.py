"""What users see of a `ShardkitError`: their own lines, then what it says.

Frames of shardkit and torch say nothing about it, and there are many. They are left out where an
error ends the program. The environment's ``SHARDKIT_TRACEBACK=full`` shows them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from pathlib import Path

from shardkit._errors import ShardkitError

_VARIABLE = "SHARDKIT_TRACEBACK"
_OWN_FOLDER = str(Path(__file__).parent) + os.sep


def show_short() -> None:
    """Have Python print tracebacks without these frames, unless somebody else prints them."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def shorten(error: BaseException) -> int:
    """Leave frames of shardkit and torch out of an error, and causes that have no others.

    An error that is not shardkit's stays as it is.

    Returns:
        Number of frames that were left out.
    """
    if not isinstance(error, ShardkitError) or os.environ.get(_VARIABLE, "").lower() == "full":
        return 0
    count = 0
    seen: BaseException | None = error
    while seen is not None:
        frames = list(_frames(seen.__traceback__))
        kept = [frame for frame in frames if not _is_hidden(frame)]
        if kept:
            count += len(frames) - len(kept)
            seen.__traceback__ = _chain(kept)
        cause = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        of_cause = _frames(None if cause is None else cause.__traceback__)
        if of_cause and all(map(_is_hidden, of_cause)):
            count += len(of_cause)
            seen.__cause__ = cause = None  # Its reason is in what the error says.
        seen = cause
    return count


def _show(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    if error.__traceback__ is trace and (count := shorten(error)):
        sys.stderr.write(
            f"{count} frames of shardkit and torch are left out; {_VARIABLE}=full shows them.\n"
        )
        trace = error.__traceback__
    sys.__excepthook__(kind, error, trace)


def _frames(trace: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _chain(frames: list[types.TracebackType]) -> types.TracebackType | None:
    result: types.TracebackType | None = None
    for trace in reversed(frames):
        result = types.TracebackType(result, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return result


def _is_hidden(trace: types.TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    torch = getattr(sys.modules.get("torch"), "__file__", None) or ""
    folders = (_OWN_FOLDER, str(Path(torch).parent) + os.sep) if torch else (_OWN_FOLDER,)
    return file.startswith(folders) or file == contextlib.__file__
