"""Ranks as processes of their own, with the environment that a launcher sets, and no launcher."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing

from script_server import Forked, Scripts

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCRIPTS = Scripts()
ASK_SOON = {"SHARDKIT_ASK_AFTER_S": "2"}
LISTENING_PORTS = range(20_000, 30_000)  # The system gives connections a port above these.


class Ended(typing.NamedTuple):
    """How a process ended."""

    code: int | None  # Its exit status; None: it did not end in time.
    output: str  # Both of its streams.
    seconds: float  # From the start on.


def free_port() -> int:
    """Return a port that no connection of another process takes before it is listened at."""
    ports = random.SystemRandom().sample(LISTENING_PORTS, 100)
    for port in ports:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    msg = f"none of {ports} is free"
    raise RuntimeError(msg)


def environment_of(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """Return what a launcher sets."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_by_torchrun(
    source: str, folder: pathlib.Path, *options: str, limit_s: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks that torchrun starts; check that it ends well.

    Args:
        source: Its text.
        folder: Where it is written.
        options: Further options of torchrun.
        limit_s: For all of it.
        more: What is in the environment.
    """
    script = folder / "train.py"
    script.write_text(source)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, *options, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def start_ranks(
    program: Sequence[str],
    world_size: int,
    *,
    limit_s: float,
    by_rank: Callable[[int], dict[str, str]] = lambda _: {},
    below: Callable[[int], Sequence[str]] = lambda _: (),
    **more: str,
) -> list[Ended]:
    """Run a program as ranks; those that do not end in time are killed.

    Args:
        program: Its file, and arguments. It is run in a fork of a process that has imported torch,
            or by a Python of its own where it is run below a command or has a PYTHONPATH.
        world_size: How many.
        limit_s: For all of them.
        by_rank: What a rank has in its environment.
        below: The command by which a rank's Python is run.
        more: What all have in it.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="shardkit-ranks-") as folder:
        outputs = [pathlib.Path(folder, str(rank)) for rank in range(world_size)]
        processes: list[Forked | subprocess.Popen[bytes]] = []
        ended: dict[int, float] = {}
        codes: list[int | None] = []
        try:
            for rank, output in enumerate(outputs):
                environment = environment_of(rank, world_size, port, **more, **by_rank(rank))
                if below(rank) or "PYTHONPATH" in more:
                    command = [*below(rank), sys.executable, *program]
                    with output.open("wb") as file:
                        streams: typing.Any = {"stdout": file, "stderr": subprocess.STDOUT}
                        processes.append(subprocess.Popen(command, env=environment, **streams))
                else:
                    processes.append(SCRIPTS.start(program, environment, output))
            started = time.monotonic()
            while len(ended) < world_size and time.monotonic() - started < limit_s:
                for rank, process in enumerate(processes):
                    if below(rank):  # Such commands stop themselves when what they run is stopped.
                        process.send_signal(signal.SIGCONT)
                    if rank not in ended and process.poll() is not None:
                        ended[rank] = time.monotonic() - started
                time.sleep(0.1)
        finally:
            for process in processes:
                codes.append(process.poll())
                if codes[-1] is None:
                    process.send_signal(signal.SIGCONT)
                    process.kill()
                    process.wait()
        said = [output.read_text(errors="replace") for output in outputs]
        return [
            Ended(code, text, ended.get(rank, math.inf))
            for rank, (code, text) in enumerate(zip(codes, said, strict=True))
        ]
