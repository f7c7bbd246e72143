"""Runs scripts in processes of their own, without the seconds in which each would import torch.

This is a program: `Scripts` starts it. It imports torch once, and is forked for each script. The
fork runs the script as its main module, to the end of the interpreter: what is registered for the
end of a process runs, and the exit status is Python's own. It imports shardkit itself, which reads
the environment then.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import types
import typing

TAKE_LONG = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
"""What shardkit imports, and the first step of an optimizer."""


class Forked:
    """A script's process, with what `subprocess.Popen` has."""

    def __init__(self, server: Scripts, pid: int) -> None:
        """Keep both."""
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit status, minus the signal if it was killed; None while it runs."""
        return self._server.ask("poll", self.pid)

    def wait(self) -> int:
        """Wait for the end; return the exit status."""
        return self._server.ask("wait", self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        self.send_signal(signal.SIGKILL)


class Scripts:
    """The server, seen from the tests and their threads; it ends with them."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._server: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, *question: object) -> typing.Any:
        """Send a question, and return its answer."""
        with self._lock:
            if self._server is None:
                self._server = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps(question) + "\n")
            self._server.stdin.flush()
            line = self._server.stdout.readline()
            if not line:
                msg = f"{__file__} has ended"
                raise RuntimeError(msg)
            return json.loads(line)

    def start(
        self, program: typing.Sequence[str], environment: dict[str, str], output: pathlib.Path
    ) -> Forked:
        """Start a script.

        Args:
            program: Path of the script, and its arguments.
            environment: All of its variables.
            output: File to which both of its streams go.
        """
        folder = str(pathlib.Path.cwd())
        return Forked(self, self.ask("start", list(program), environment, str(output), folder))


# --- the server -----------------------------------------------------------------------------------


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def serve() -> list[str]:
    """Answer until there is no more question; in a fork return its program."""
    living: set[int] = set()
    codes: dict[int, int] = {}
    for line in iter(sys.stdin.readline, ""):
        what, *args = json.loads(line)
        if what == "start":
            if (pid := os.fork()) == 0:
                return prepare(*args)
            living.add(pid)
            codes.pop(pid, None)  # Of an earlier process with this id.
            answer(pid)
            continue
        (pid,) = args
        if pid in living:
            ended, status = os.waitpid(pid, os.WNOHANG if what == "poll" else 0)
            if ended:
                living.remove(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
        answer(codes.get(pid))
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return []


def prepare(program: list[str], environment: dict[str, str], output: str, folder: str) -> list[str]:
    """Make this fork what a new process of the program is."""
    for source, flags, targets in (
        (os.devnull, os.O_RDONLY, [0]),
        (output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, [1, 2]),
    ):
        opened = os.open(source, flags)
        for target in targets:
            os.dup2(opened, target)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # Asked for while torch was imported.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = program
    sys.path[0] = str(pathlib.Path(program[0]).parent)
    return program


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # After ctrl-C the input ends, then all ranks.
    for name in TAKE_LONG:
        importlib.import_module(name)
    path, *_ = serve() or [""]
    if path:
        main = types.ModuleType("__main__")
        main.__file__ = path
        sys.modules["__main__"] = main
        exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), main.__dict__)
