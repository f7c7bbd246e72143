"""Jobs that save, delete and recover beside each other, on a disk that fails or stops."""

from __future__ import annotations

import errno
import functools
import os
import pathlib
import shutil
import tempfile
import threading
import typing
import warnings
import zlib

import pytest
from hypothesis import Phase, settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shardkit._errors import CheckpointError
from shardkit.checkpoint._dcp import directory
from shardkit.checkpoint._dcp.manifest import Header, Manifest
from shardkit.checkpoint._files import disk

pytestmark = pytest.mark.helpers

_CALLS = ("rename", "mkdir", "unlink", "rmdir", "fsync", "listdir")
_READS = ("read_header", "read_manifest", "stamp")
_CHANGES = {"rename", "unlink", "rmdir", "exchange", "write"}


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
        self.at = ""  # The call before which it waits.
        self._act = act
        self._go = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self.start()
        self._arrived.acquire()

    def run(self) -> None:
        try:
            self.wait("begin")
            self._act()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.has_ended = True
            self._arrived.release()

    def wait(self, call: str) -> None:
        """Come to a call: wait for what becomes of it."""
        self.at = call
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


def gated(name: str, real: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
    """Let a job wait before each call."""

    def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        thread = threading.current_thread()
        if isinstance(thread, Job):
            thread.wait(name)
        return real(*args, **kwargs)

    return call


def no_exchange(*_: object) -> typing.NoReturn:
    raise OSError(errno.EINVAL, "Invalid argument")


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file in several calls."""
    thread = threading.current_thread()
    assert isinstance(thread, Job)
    with path.open("wb") as file:
        for start in range(0, len(content), 60):
            thread.wait("write")
            file.write(content[start : start + 60])
            file.flush()


def number_of(path: pathlib.Path) -> int:
    """Return which job has written a checkpoint, all of it."""
    number = int((path / ".metadata").read_bytes())
    header, _, body = (path / "shardkit.json").read_bytes().partition(b"\n")
    assert f'"step":{number},'.encode() in header, path
    assert body.endswith(b"}\n"), path
    return number


class Jobs(RuleBasedStateMachine):
    """Several jobs in one directory; after each call the last finished checkpoint is there."""

    mutation: typing.Callable[[pytest.MonkeyPatch], None] | None = None

    @initialize(has_exchange=strategies.booleans(), may_prune=strategies.booleans())
    def begin(self, has_exchange: bool, may_prune: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(disk, "own", self.own)
        self.patch.setattr(directory, "own", self.own)
        self.patch.setattr(
            disk.Owner, "is_alive", property(lambda owner: owner.pid in self.running)
        )
        exchange = directory.exchange if has_exchange else no_exchange
        self.patch.setattr(directory, "exchange", gated("exchange", exchange))
        if self.mutation is not None:
            self.mutation(self.patch)
        for name in _READS:
            self.patch.setattr(directory, name, gated(name, getattr(directory, name)))
        for name in _CALLS:
            self.patch.setattr(os, name, gated(name, getattr(os, name)))
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.jobs: list[Job] = []
        self.running: set[int] = set()
        self.clock = 0
        self.finished: dict[int, tuple[str, int, int]] = {}
        self.may_prune = may_prune
        self.is_pruned = False

    @staticmethod
    def own() -> disk.Owner:
        number = getattr(threading.current_thread(), "number", 0)
        return disk.Owner("host", number, "00000001", "1")

    @rule(overwrite=strategies.sampled_from([True, True, True, False]))
    def save(self, overwrite: bool) -> None:
        self.add(lambda number: self.save_to("x", number, overwrite=overwrite))

    @precondition(lambda self: self.may_prune)
    @rule()
    def save_and_prune(self) -> None:
        self.is_pruned = True
        self.add(lambda number: self.save_to(f"y{number}", number, keep_last=1))

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
        self, name: str, number: int, *, overwrite: bool = True, keep_last: int | None = None
    ) -> None:
        path = self.folder / name
        begun = self.tick()
        new = directory.prepare(path, overwrite=overwrite)
        before = directory.stamp(path)
        content = f"{number}".encode()
        write(new / ".metadata", content)
        header = Header(directory.next_sequence(self.folder), number, 1, "test")
        text = Manifest(header, {}, len(content), zlib.crc32(content)).dump()
        mine = directory.stamp(new)
        write(new / "shardkit.json", text)
        directory.commit(new, path, overwrite=overwrite, before=before, mine=mine)
        self.finished[number] = (name, begun, self.tick())
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
    @rule(data=strategies.data())
    def finish(self, data: strategies.DataObject) -> None:
        job = self.jobs[data.draw(strategies.sampled_from(sorted(self.running))) - 1]
        while job.number in self.running:
            self.go_on(job, "step")

    @precondition(lambda self: self.running)
    @rule(data=strategies.data())
    def kill(self, data: strategies.DataObject) -> None:
        self.go_on(self.jobs[data.draw(strategies.sampled_from(sorted(self.running))) - 1], "kill")

    @precondition(lambda self: self.running)
    @rule(data=strategies.data())
    def fail(self, data: strategies.DataObject) -> None:
        self.go_on(self.jobs[data.draw(strategies.sampled_from(sorted(self.running))) - 1], "fail")

    def go_on(self, job: Job, order: str) -> None:
        if job.number not in self.running:
            return
        call = job.at
        job.go_on(order)
        if order == "kill" or job.error is not None or job.has_ended:
            job.join(60)
            self.running.discard(job.number)
            expected = (Killed, CheckpointError) + (OSError,) * ("fail" in job.orders)
            if not isinstance(job.error, (*expected, type(None))):
                raise job.error
        if call in _CHANGES:
            self.check_a_copy()

    def check_a_copy(self) -> None:
        """Look at what is there if all jobs are killed at this moment."""
        with tempfile.TemporaryDirectory() as scratch:
            copy = pathlib.Path(scratch, "copy")
            shutil.copytree(self.folder, copy, symlinks=True)
            running, self.running = self.running, set()
            try:
                self.check(copy)
            finally:
                self.running = running

    def check(self, folder: pathlib.Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Nothing is passed over: nothing is damaged.
            newest = directory.newest(folder)
        found = {number_of(entry) for entry in folder.glob("[!.]*")}
        assert newest is None or not newest.name.startswith("."), newest
        outdated = self.outdated({number: times for number, (_, *times) in self.finished.items()})
        if self.finished:
            assert found - outdated, (found, self.finished)
            assert newest is not None
        of_x = {number: times for number, (name, *times) in self.finished.items() if name == "x"}
        if of_x and not self.is_pruned:
            assert newest == folder / "x"
            assert number_of(newest) not in self.outdated(of_x)

    @staticmethod
    def outdated(finished: dict[int, list[int]]) -> set[int]:
        """Return which saves were over before another one, which is over too, has begun."""
        begun_last = max((begin for begin, _ in finished.values()), default=0)
        return {number for number, (_, end) in finished.items() if end < begun_last}

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            while self.running:
                for number in sorted(self.running):
                    self.go_on(self.jobs[number - 1], "step")
            for name, keep_last in (("x", None), ("z", 1)):
                job = Job(0, functools.partial(self.save_to, name, 0, keep_last=keep_last))
                self.jobs.append(job)
                while not job.has_ended:
                    job.go_on("step")
                assert job.error is None
                assert list(self.folder.glob(".x.*")) == []
            assert list(self.folder.glob(".*")) == []
        finally:
            for job in self.jobs:
                if not job.has_ended:
                    job.go_on("kill")
            self.patch.undo()
            shutil.rmtree(self.folder)


def schedules(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # To shrink one takes an hour.
    )


TestJobs = pytest.mark.filterwarnings("ignore:.*:UserWarning")(Jobs.TestCase)
TestJobs.settings = schedules(int(os.environ.get("SHARDKIT_TEST_SCHEDULES", "30")))


# --- mutations ------------------------------------------------------------------------------------


def without_recovery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(directory, "recover", lambda _: None)


def delete_before_the_new_one_is_whole(patch: pytest.MonkeyPatch) -> None:
    prepare = directory.prepare

    def delete_and_prepare(path: pathlib.Path, *, overwrite: bool) -> pathlib.Path:
        if overwrite and path.exists():
            directory.delete(path, path)
        return prepare(path, overwrite=overwrite)

    patch.setattr(directory, "prepare", delete_and_prepare)


def as_if_all_other_jobs_were_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk.Aside, "is_abandoned", True)


def as_if_no_job_ever_died(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk.Aside, "is_abandoned", False)


def latest_takes_what_is_half_written(patch: pytest.MonkeyPatch) -> None:
    def newest_first(found: typing.Iterable[typing.Any]) -> list[typing.Any]:
        return sorted(found, key=lambda each: each[1].sequence, reverse=True)

    patch.setattr(directory, "_newest_first", newest_first)
    patch.setattr(directory, "problem", lambda _: "")


def a_checkpoint_gets_its_name_before_its_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(directory, "prepare", lambda path, **_: path.mkdir(exist_ok=True) or path)
    patch.setattr(directory, "commit", lambda *_, **__: None)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "mutation",
    [
        without_recovery,
        delete_before_the_new_one_is_whole,
        as_if_all_other_jobs_were_dead,
        as_if_no_job_ever_died,
        latest_takes_what_is_half_written,
        a_checkpoint_gets_its_name_before_its_manifest,
    ],
)
def test_mutations_are_found(mutation: typing.Callable[[pytest.MonkeyPatch], None]) -> None:
    """Within as many schedules as `nox -s fuzz` tries; most of them within 20."""

    class Mutated(Jobs):
        pass

    Mutated.mutation = staticmethod(mutation)
    with pytest.raises((AssertionError, OSError, ValueError, UserWarning)):
        run_state_machine_as_test(Mutated, settings=schedules(200))
