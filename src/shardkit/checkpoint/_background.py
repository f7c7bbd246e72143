"""Saves that go on while training does: one at a time, each with a handle.

A process, or its default process group, that ends while one is under way waits for it. What is
never complete is named.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardkit import _compat
from shardkit._errors import CheckpointError
from shardkit._progress import Meter
from shardkit.backends.groups import new_group
from shardkit.checkpoint._agreement import quote, rank_of
from shardkit.checkpoint._dcp.staging import Staging
from shardkit.checkpoint._job import Job, write

if TYPE_CHECKING:
    import types
    from pathlib import Path

END_LIMIT_S = 600.0
"""How long the end of a process, or of the default process group, waits for a save."""

_SIGTERM_LIMIT_S = 25.0  # torchrun, SLURM and Kubernetes kill 30 s after SIGTERM.
_SILENT_S = 5.0  # Who waits no longer than this says nothing.

_logger = logging.getLogger("shardkit")


class SaveHandle:
    """A checkpoint that is being written."""

    def __init__(self, job: Job, state: dict[str, Any] | Exception, group: Any) -> None:
        """Start to write; or to tell other ranks why this one has nothing to write."""
        self._path = job.path
        self._group = group
        self._state: dict[str, Any] | Exception | None = state
        self._error: BaseException | None = None
        self._is_asked = False
        self._is_given_up = False
        self._rank = rank_of(group)
        # A daemon: the end of the process waits for it by `end`, which has a limit.
        self._thread = threading.Thread(
            target=self._write, args=(job,), name="shardkit-save", daemon=True
        )
        self._catch_sigterm()
        self._thread.start()

    def _write(self, job: Job) -> None:
        state = self._state
        progress = False if job.progress is None else job.progress

        def collected() -> dict[str, Any]:
            assert state is not None
            if isinstance(state, Exception):
                raise state
            return state

        try:
            with Meter(progress, f"saving {job.path.name}", rank=rank_of(self._group)) as meter:
                write(job, collected, self._group, meter)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
        finally:
            self._state = None
            if signal.getsignal(signal.SIGTERM) == self._end_by_sigterm:
                # Only main threads may call signal.signal, and one that is blocked in a collective
                # would not come to call a handler: SIGTERM ends the process at once, as before.
                ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)

    def _catch_sigterm(self) -> None:
        """Let SIGTERM wait for this save, if the user has no handler of it."""
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGTERM)
            is_ours = isinstance(getattr(handler, "__self__", None), SaveHandle)
            if handler is signal.SIG_DFL or is_ours:
                signal.signal(signal.SIGTERM, self._end_by_sigterm)

    def _end_by_sigterm(self, number: int, _: types.FrameType | None) -> None:
        self.end(_SIGTERM_LIMIT_S, "SIGTERM")
        self.tell_error()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def done(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is done, at most `timeout` seconds.

        Raises:
            TimeoutError: It is not.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            msg = f"{quote(self._path)} is not complete after {timeout} s."
            raise TimeoutError(msg)

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its path.

        Args:
            timeout: Limit in seconds; None: as long as it takes.

        Raises:
            CheckpointError: It was not saved; the same on all ranks.
            TimeoutError: It is not complete yet.
        """
        self.wait(timeout)
        self._is_asked = True
        if self._error is not None:
            raise self._error
        return self._path

    def unheard_error(self) -> BaseException | None:
        """Wait until it is done; return its error if nobody has asked for the result."""
        self.wait()
        heard, self._is_asked = self._is_asked, True
        return None if heard else self._error

    def end(self, limit_s: float, what: str) -> None:
        """Wait until it is done, at most so many seconds; tell if it takes longer.

        Args:
            limit_s: Limit in seconds.
            what: Name of what waits, for the log.
        """
        if self._is_given_up:
            return
        silent_s = min(_SILENT_S, limit_s / 2)
        try:
            self._thread.join(silent_s)
            if self._thread.is_alive() and self._rank == 0:
                where = quote(self._path)
                _logger.warning("%s waits at most %.0f s for %s.", what, limit_s, where)
            self._thread.join(limit_s - silent_s)
        finally:  # Also after a ctrl-C.
            if self._thread.is_alive():
                self._is_given_up = True
                _logger.error(
                    "rank %d: %s is not complete after %.0f s, and is given up. Ask for the "
                    "result() of the last async_save: it waits as long as it takes.",
                    *(self._rank, quote(self._path), limit_s),
                )

    def tell_error(self) -> None:
        """Log the error of a save that is done, if nobody has asked for the result."""
        if self.done() and (error := self.unheard_error()) is not None:
            is_of_all = isinstance(error, CheckpointError)  # Then one rank is enough.
            if self._rank == 0 or not is_of_all:
                path = quote(self._path)
                text = str(error) if is_of_all else f"{path} was not saved: {error!r}"
                _logger.error("rank %d: %s", self._rank, text)


class Background:
    """What asynchronous saves share: one at a time, their memory, their process group."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._last: SaveHandle | None = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._groups_in: Any = None
        self._ends_are_seen = False

    def start(self, job: Job, group: Any) -> SaveHandle:
        """Copy a state, and write the copy in the background.

        If that fails on one rank, the others have begun to write: all hear of it as of any error.
        """
        state: dict[str, Any] | Exception
        try:
            state = self.staging.copy(job.collect())
        except Exception as error:  # noqa: BLE001 - raised on all ranks by `result`
            state = error
        if not self._ends_are_seen:
            self._ends_are_seen = True
            _compat.before_threads_end(self._end_process)
            _compat.before_world_ends(self._end_world)
        self._last = SaveHandle(job, state, group)
        return self._last

    def _end_process(self) -> None:
        if self._last is not None:
            self._last.end(END_LIMIT_S, "the end of the process")
            self._last.tell_error()

    def _end_world(self) -> None:
        if self._last is not None:
            self._last.end(END_LIMIT_S, "destroy_process_group")

    def wait(self) -> None:
        """Wait for the save under way."""
        if self._last is not None:
            self._last.wait()

    def last_error(self) -> BaseException | None:
        """Wait for the save under way; return its error if nobody has asked for its result."""
        last, self._last = self._last, None
        return None if last is None else last.unheard_error()

    def group_like(self, group: Any) -> Any:
        """Return a gloo group of the ranks of `group`; the first time a collective of them.

        The background thread needs one of its own: collectives of one group that two threads issue
        come in another order on each rank.
        """
        if not dist.is_initialized():
            return None
        if self._groups_in is not dist.group.WORLD:
            self._groups.clear()
            self._groups_in = dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            self._groups[ranks] = new_group(ranks, "gloo")
        return self._groups[ranks]
