"""Jobs that save, delete and recover beside each other, on a disk that fails or stops."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import tempfile
import threading
import typing
import zlib

import pytest
from hypothesis import Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.manifest import Header, Manifest
from shardkit.checkpoint._files import asides

pytestmark = pytest.mark.helpers

_CALLS = ("rename", "mkdir", "unlink", "rmdir", "fsync", "listdir")
_READS = ("read_header", "read_manifest", "stamp", "exchange")


class Killed(BaseException):
    """What the process does not see of its end."""


class Job(threading.Thread):
    """A job that goes on by one call of the file system at a time."""

    def __init__(self, number: int, act: typing.Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.error: BaseException | None = None
        self.has_ended = False
        self.orders: list[str] = []
        self._act = act
        self._go = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self.start()
        self._arrived.acquire()

    def run(self) -> None:
        try:
            self.wait()
            self._act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.has_ended = True
            self._arrived.release()

    def wait(self) -> None:
        """Come to a call: wait for what becomes of it."""
        if "kill" in self.orders:
            raise Killed
        self._arrived.release()
        self._go.acquire()
        if self.orders[-1] == "kill":
            raise Killed
        if self.orders[-1] == "fail":
            raise OSError(errno.EIO, "Input/output error")

    def go_on(self, order: str) -> None:
        """Let the call do something else than wait: "step", "fail" or "kill"."""
        self.orders.append(order)
        self._go.release()
        assert self._arrived.acquire(timeout=60)


def gated(real: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
    """Let a job wait before each call."""

    def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        thread = threading.current_thread()
        if isinstance(thread, Job):
            thread.wait()
        return real(*args, **kwargs)

    return call


def no_exchange(*_: object) -> typing.NoReturn:
    raise OSError(errno.EINVAL, "Invalid argument")


class Jobs(RuleBasedStateMachine):
    """Several jobs in one directory; after each call the last finished checkpoint is there."""

    @initialize(has_exchange=strategies.booleans())
    def begin(self, has_exchange: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(asides, "own", self.own)
        self.patch.setattr(directory, "own", self.own)
        self.patch.setattr(
            asides.Owner, "is_alive", property(lambda owner: owner.pid in self.running)
        )
        if not has_exchange:
            self.patch.setattr(directory, "exchange", no_exchange)
        for name in _READS:
            self.patch.setattr(directory, name, gated(getattr(directory, name)))
        for name in _CALLS:
            self.patch.setattr(os, name, gated(getattr(os, name)))
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.jobs: list[Job] = []
        self.running: set[int] = set()
        self.clock = 0
        self.finished: dict[int, tuple[int, int]] = {}
        self.begun: dict[int, int] = {}
        self.is_pruned = False

    @staticmethod
    def own() -> asides.Owner:
        number = getattr(threading.current_thread(), "number", 0)
        return asides.Owner("host", number, "00000001", "1")

    @rule(overwrite=strategies.sampled_from([True, True, True, False]))
    def save(self, overwrite: bool) -> None:
        self.add(lambda number: self.save_to("x", number, overwrite=overwrite))

    @rule()
    def save_and_prune(self) -> None:
        self.is_pruned = True
        self.add(lambda number: self.save_to(f"y{number}", number, overwrite=True, keep_last=1))

    @rule()
    def recover(self) -> None:
        self.add(lambda _: directory.recover(self.folder / "x"))

    def add(self, act: typing.Callable[[int], None]) -> None:
        if len(self.running) >= 4:
            return
        number = len(self.jobs) + 1
        self.running.add(number)
        self.jobs.append(Job(number, lambda: act(number)))

    def save_to(
        self, name: str, number: int, *, overwrite: bool, keep_last: int | None = None
    ) -> None:
        path = self.folder / name
        self.begun[number] = self.tick()
        new = directory.prepare(path, overwrite=overwrite)
        before = directory.stamp(path)
        content = f"{number}".encode()
        (new / ".metadata").write_bytes(content)
        header = Header(directory.next_sequence(self.folder), number, 1, "test")
        text = Manifest(header, {}, len(content), zlib.crc32(content)).dump()
        threading.current_thread().wait()  # type: ignore[attr-defined]
        (new / "shardkit.json").write_bytes(text)
        directory.commit(new, path, overwrite=overwrite, before=before)
        self.finished[number] = (self.begun[number], self.tick())
        if keep_last is not None:
            directory.prune(path, keep_last)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), steps=strategies.integers(1, 12))
    def step(self, data: strategies.DataObject, steps: int) -> None:
        job = self.jobs[data.draw(strategies.sampled_from(sorted(self.running))) - 1]
        for _ in range(steps):
            self.go_on(job, "step")

    @precondition(lambda self: self.running)
    @rule(data=strategies.data(), order=strategies.sampled_from(["kill", "fail"]))
    def stop(self, data: strategies.DataObject, order: str) -> None:
        self.go_on(self.jobs[data.draw(strategies.sampled_from(sorted(self.running))) - 1], order)

    def go_on(self, job: Job, order: str) -> None:
        if job.number not in self.running:
            return
        job.go_on(order)
        if order == "kill" or job.error is not None or job.has_ended:
            job.join(60)
            self.running.discard(job.number)
            if not isinstance(job.error, (Killed, OSError, CheckpointError, type(None))):
                raise job.error

    @invariant()
    def the_last_finished_is_there(self) -> None:
        if not hasattr(self, "folder"):
            return
        with tempfile.TemporaryDirectory() as scratch:
            copy = pathlib.Path(scratch, "copy")
            shutil.copytree(self.folder, copy, symlinks=True)
            running, self.running = self.running, set()  # All are killed at this moment.
            try:
                self.check(copy)
            finally:
                self.running = running

    def check(self, folder: pathlib.Path) -> None:
        directory.recover(folder / "x")
        for entry in folder.glob("[!.]*"):
            assert directory.problem(entry) == "", entry
        begun_last = max((begin for begin, _ in self.finished.values()), default=0)
        outdated = {n for n, (_, end) in self.finished.items() if end < begun_last}
        directory._recover_all(folder)  # noqa: SLF001 - without the rest of `latest`
        found = [header.step for _, header in directory._newest_first(directory.headers(folder))]  # noqa: SLF001
        if self.finished:
            assert set(found) - outdated, (found, self.finished)
        if not self.is_pruned and self.finished:
            assert found
            assert found[0] not in outdated

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            while self.running:
                for number in sorted(self.running):
                    self.go_on(self.jobs[number - 1], "step")
                self.the_last_finished_is_there()
            job = Job(0, lambda: self.save_to("x", 0, overwrite=True))
            self.jobs.append(job)
            while not job.has_ended:
                job.go_on("step")
            assert job.error is None
            assert list(self.folder.glob(".x.*")) == []
        finally:
            for job in self.jobs:
                if not job.has_ended:
                    job.go_on("kill")
            self.patch.undo()
            shutil.rmtree(self.folder)


TestJobs = pytest.mark.filterwarnings("ignore:.*:UserWarning")(Jobs.TestCase)
TestJobs.settings = settings(
    max_examples=int(os.environ.get("SHARDKIT_TEST_SCHEDULES", "25")),
    stateful_step_count=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # To shrink one takes an hour.
)
