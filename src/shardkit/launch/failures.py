"""What is shown last where ranks fail: which one failed first, and its traceback."""

from __future__ import annotations

import json
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_PARTED = "RankMismatchError: "
_ERROR_FILE = "error.json"


@dataclass(frozen=True)
class Failure:
    """How one rank of this host failed.

    Attributes:
        rank: Its number in the world.
        local_rank: Its number on this host.
        at: Time in seconds since 1970.
        message: Type and text of its exception, or how its process ended.
        traceback: Traceback of its exception; empty: its process ended without one.
    """

    rank: int
    local_rank: int
    at: float
    message: str
    traceback: str

    @property
    def verdict(self) -> str | None:
        """What the ranks found out about each other, if that is how it ended."""
        return self.message.removeprefix(_PARTED) if self.message.startswith(_PARTED) else None


def failures_of(error: ChildFailedError, logs: Path) -> list[Failure]:
    """Return how ranks of this host failed, in the order in which they did.

    Torchrun ends the others when it sees the first process that has failed. What those have left
    in their error files until then counts as well.

    Args:
        error: The error that torchrun's agent raised.
        logs: Folder of this launch alone, in which it keeps what ranks wrote.
    """
    rank_0 = next(rank - failure.local_rank for rank, failure in error.failures.items())
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda path: int(path.name.split("_")[1]))
    files = {
        int(file.parent.name): file
        for attempt in attempts[-1:]
        for file in attempt.glob(f"*/{_ERROR_FILE}")
    }
    read = {local: _of_file(file, rank_0 + local, local) for local, file in files.items()}
    found = [failure for failure in read.values() if failure is not None]
    found += [
        _without_file(rank, failure)
        for rank, failure in error.failures.items()
        if read.get(failure.local_rank) is None and failure.exitcode != -signal.SIGTERM
    ]
    if not found:  # All of them were ended, by somebody else.
        found = [_without_file(*error.get_first_failure())]
    # By time; who only heard of another's failure comes after those who did not.
    return sorted(found, key=lambda failure: (failure.verdict is not None, failure.at))


def _of_file(file: Path, rank: int, local_rank: int) -> Failure | None:
    """Return what a rank left; None: it was ended while it wrote."""
    try:
        content = json.loads(file.read_text())["message"]
    except ValueError:
        return None
    # The time in the file has whole seconds only.
    at = file.stat().st_mtime
    if not isinstance(content, dict):
        return Failure(rank, local_rank, at, str(content), "")
    traceback = content.get("extraInfo", {}).get("py_callstack", "")
    return Failure(rank, local_rank, at, content.get("message", ""), traceback)


def _without_file(rank: int, failure: ProcessFailure) -> Failure:
    how = _how_it_ended(failure)
    return Failure(rank, failure.local_rank, failure.timestamp, how, "")


def _how_it_ended(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        number = -failure.exitcode
        name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        cause = " The system does that where memory runs out." if name == "SIGKILL" else ""
        return f"process {failure.pid} was ended by {name}.{cause}"
    return (
        f"process {failure.pid} ended with exit status {failure.exitcode} and no exception; its "
        f"own lines above may say why"
    )


def report(failures: list[Failure], num_ranks: int) -> str:
    """Return what is shown last: the verdict, if there is one, and the first rank's traceback.

    Args:
        failures: Result of `failures_of`, at least one.
        num_ranks: Number of ranks of this host.
    """
    first, *others = failures
    host, when = socket.gethostname(), time.strftime("%H:%M:%S", time.localtime(first.at))
    count = f"{len(failures)} of {num_ranks} ranks on {host} failed"
    lines = [f"shardkit launch: {count}, first rank {first.rank} at {when}."]
    lines += [
        f"rank {other.rank}: {other.message.splitlines()[0]}"
        for other in others
        if other.verdict is None
    ]
    told = next((each for each in others if each.verdict is not None), None)
    if told is not None and first.verdict is None:
        lines += ["", f"What rank {told.rank} was told:", str(told.verdict)]
    lines += ["", f"rank {first.rank}:", first.traceback.rstrip() or first.message]
    return "\n".join(lines)
