"""Saves that go on while training does: one at a time, each with a handle."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardkit._progress import Meter
from shardkit.backends.groups import new_group
from shardkit.checkpoint._agreement import quote, rank_of
from shardkit.checkpoint._dcp.staging import Staging
from shardkit.checkpoint._job import Job, write

if TYPE_CHECKING:
    from pathlib import Path


class SaveHandle:
    """A checkpoint that is being written."""

    def __init__(self, job: Job, state: dict[str, Any] | Exception, group: Any) -> None:
        """Start to write; or to tell other ranks why this one has nothing to write."""
        self._job = job
        self._group = group
        self._state: dict[str, Any] | Exception | None = state
        self._error: BaseException | None = None
        self._is_asked = False
        # Not a daemon: a script that ends waits until its last checkpoint is on the disk.
        self._thread = threading.Thread(target=self._write, name="shardkit-save")
        self._thread.start()

    def _write(self) -> None:
        job, state = self._job, self._state
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
            msg = f"{quote(self._job.path)} is not complete after {timeout} s."
            raise TimeoutError(msg)

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its path.

        Args:
            timeout: In seconds; None: as long as it takes.

        Raises:
            CheckpointError: It was not saved; the same on all ranks.
            TimeoutError: It is not complete yet.
        """
        self.wait(timeout)
        self._is_asked = True
        if self._error is not None:
            raise self._error
        return self._job.path

    def unheard_error(self) -> BaseException | None:
        """Wait until it is done; return its error if nobody has asked for the result."""
        self.wait()
        heard, self._is_asked = self._is_asked, True
        return None if heard else self._error


class Background:
    """What asynchronous saves share: one at a time, their memory, their process group."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._last: SaveHandle | None = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._groups_in: Any = None

    def start(self, job: Job, group: Any) -> SaveHandle:
        """Copy a state, and write the copy in the background.

        If that fails on one rank, the others have begun to write: all hear of it as of any error.
        """
        state: dict[str, Any] | Exception
        try:
            state = self.staging.copy(job.collect())
        except Exception as error:  # noqa: BLE001 - raised on all ranks by `result`
            state = error
        self._last = SaveHandle(job, state, group)
        return self._last

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
