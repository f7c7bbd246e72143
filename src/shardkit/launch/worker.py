"""Runs a script in one rank, like Python itself, and writes a file if the script fails.

It is a separate program: ``python worker.py [--install] [--module] SCRIPT ARGS``. It imports
nothing of shardkit or torch before the script does, because the script may first set options for
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.machinery
import os
import runpy
import signal
import sys
import types
from pathlib import Path

_HIDDEN = {__file__, "<frozen runpy>", runpy.__file__}
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Run a script; if it raises, write torchrun's error file and exit with 1."""
    is_module = install = False
    while arguments[0] in {"--install", "--module"}:
        is_module |= arguments[0] == "--module"
        install |= arguments[0] == "--install"
        arguments = arguments[1:]
    faulthandler.enable()
    _end_with_launcher()
    sys.argv = arguments
    sys.path[0] = str(Path.cwd() if is_module else Path(arguments[0]).resolve().parent)
    _say_restart()
    try:
        if install:
            from shardkit._install import install as take_over

            take_over()
        if is_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            _run_file(arguments[0])
    except Exception as error:  # noqa: BLE001 - it is shown like Python does
        _leave_error_file(error)
        sys.last_value = error  # As Python does; shardkit reads it if the script sets a hook.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _end_with_launcher() -> None:
    """Let Linux send SIGTERM to this rank if its launcher is killed, and so cannot send it."""
    with contextlib.suppress(OSError, AttributeError):  # Other systems have no such call.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _run_file(file: str) -> None:
    """Run a file as the module ``__main__``, which stays until the process ends."""
    module = types.ModuleType("__main__")
    module.__file__ = str(Path(file).resolve())
    module.__dict__["__builtins__"] = __builtins__
    # Python's own loader of source files: its encoding, its errors.
    loader = importlib.machinery.SourceFileLoader("__main__", module.__file__)
    module.__loader__ = loader
    sys.modules["__main__"] = module
    source = loader.get_data(module.__file__)
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - what this is for


def _leave_error_file(error: Exception) -> None:
    """Write the file that torchrun's ``@record`` writes, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _HIDDEN:
        trace = trace.tb_next
    error.__traceback__ = trace
    if "shardkit._errors" in sys.modules:
        sys.modules["shardkit._errors"].shorten(error)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _say_restart() -> None:
    """Print once on each host that the ranks start again."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ.get("LOCAL_RANK") == "0":
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        ranks = os.environ.get("WORLD_SIZE", "?")
        sys.stderr.write(f"shardkit launch: restart {attempt} of {most}, with {ranks} ranks\n")


if __name__ == "__main__":
    main(sys.argv[1:])
