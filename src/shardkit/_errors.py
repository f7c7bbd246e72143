"""The exceptions of shardkit.

Each names the parameter or module, says what was expected and what came, and ends with a remedy.
Facts that all ranks share are checked before anything is sent, so that all ranks raise::

    ShardkitError
    ├── MeshError              a mesh that cannot be used: no process group, rank not in it
    ├── LayoutError            a layout that cannot be planned, a shape that does not fit one
    ├── WrapError              `fully_shard` refuses; the module is as it was before the call
    ├── ShardedTensorError     an operation that would be wrong on a sharded tensor
    ├── FreedParameterError    an unsharded parameter was used after its memory was given back
    ├── RankMismatchError      ranks of one process group disagree about the model or the step
    ├── NonFiniteGradientError gradients are infinite or not a number
    ├── OptimizerError         a class of optimizers that cannot be run as it was asked for
    ├── StateError             a call at a time when it cannot be carried out
    ├── ConfigError            a config file with unknown, wrong or contradictory fields
    ├── LaunchError            ranks that cannot be started, or hosts that do not meet
    ├── IntegrationError       another package has a version, or settings, that do not fit shardkit
    └── CheckpointError        a checkpoint that cannot be written, or cannot be loaded as it is
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from pathlib import Path


def warn_user(message: str, *, is_first_rank: bool = True) -> None:
    """Warn at the user's line that led here, skipping lines of shardkit and torch."""
    if not is_first_rank:
        return
    level = 2
    frame = sys._getframe(1)  # noqa: SLF001 - documented for this use
    while frame.f_back is not None and _is_of_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in ("shardkit", "torch")


class ShardkitError(Exception):
    """Base class of every exception that shardkit raises on purpose."""


class MeshError(ShardkitError, ValueError):
    """A mesh cannot be made or used."""


class LayoutError(ShardkitError, ValueError):
    """A layout cannot be planned, or a tensor does not fit it."""


class WrapError(ShardkitError, ValueError):
    """`fully_shard` refuses its arguments; nothing has been changed."""


class ShardedTensorError(ShardkitError, RuntimeError):
    """An operation would be wrong on a `ShardedTensor`, or would not reach its shards."""


class FreedParameterError(ShardkitError, RuntimeError):
    """An unsharded parameter was used after its group was resharded."""


class RankMismatchError(ShardkitError, RuntimeError):
    """Ranks that must agree do not."""


class NonFiniteGradientError(ShardkitError, FloatingPointError):
    """Gradients are infinite or not a number."""


class StateError(ShardkitError, RuntimeError):
    """A call came at a time when it cannot be carried out."""


class IntegrationError(ShardkitError, RuntimeError):
    """A package cannot use shardkit: its version is too old, or its settings do not fit."""


class OptimizerError(ShardkitError, ValueError):
    """An optimizer's class or options cannot be used in the way that was asked for."""


class ConfigError(ShardkitError, ValueError):
    """A config file cannot be read, or its fields cannot be carried out; nothing was changed."""


class LaunchError(ShardkitError, RuntimeError):
    """Ranks cannot be started, or hosts do not meet."""


class CheckpointError(ShardkitError, RuntimeError):
    """A checkpoint cannot be written, or what is on disk cannot be loaded."""


# --- tracebacks -----------------------------------------------------------------------------------
#
# The many frames of shardkit and torch do not explain an error. They are left out when the error
# ends the program. The environment variable ``SHARDKIT_TRACEBACK=full`` shows them.

_VARIABLE = "SHARDKIT_TRACEBACK"
_OWN_FOLDER = str(Path(__file__).parent) + os.sep


def show_short() -> None:
    """Let Python print tracebacks without these frames, unless other code prints them."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def shorten(error: BaseException) -> int:
    """Remove frames of shardkit and torch from an error; return how many.

    An error that is not shardkit's is not changed.
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
            seen.__cause__ = cause = None  # The error's message has the reason.
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
