"""What is known of processes on this machine: by /proc, and on macOS by `ps` and `sysctl`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import typing

import pytest

from shardkit import _processes

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


@pytest.fixture(params=["Linux", "macOS"])
def system(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The system as it is, and one without /proc whose `sysctl` knows the boot."""
    if request.param == "macOS":
        if shutil.which("ps") is None:
            pytest.skip("needs ps, which macOS has")
        monkeypatch.setattr(_processes, "_PROCESSES", tmp_path / "proc")
        program = tmp_path / "sysctl"
        program.write_text('#!/bin/sh\n[ "$2" = kern.bootsessionuuid ] && echo 5B0D-11\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return str(request.param)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as started:
        yield started
        started.kill()


def when(state: str, pid: int, start: str) -> str:
    """Return a process's state, which may take a moment to be the expected one."""
    end = time.monotonic() + 10
    while (found := _processes.process_state(pid, start)) != state and time.monotonic() < end:
        time.sleep(0.01)
    return found


@pytest.mark.usefixtures("system")
def test_what_another_process_does(process: subprocess.Popen[bytes]) -> None:
    start = _processes.start_of(process.pid)
    assert start.isdecimal()
    assert when("busy", process.pid, start) == "busy"
    process.send_signal(signal.SIGSTOP)
    assert when("stopped", process.pid, start) == "stopped"
    assert _processes.start_of(process.pid) == start
    assert _processes.process_state(process.pid, start + "1") == "gone"
    process.kill()
    assert when("gone", process.pid, start) == "gone"  # It waits for its parent.
    assert _processes.start_of(process.pid) == ""
    process.wait()
    assert _processes.process_state(process.pid, start) == "gone"
    assert _processes.start_of(process.pid) == ""


@pytest.mark.usefixtures("system")
def test_a_process_is_the_same_for_all_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _processes.start_of(os.getpid()), _processes.boot_and_namespace()
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "fr_FR.UTF-8")
    assert (_processes.start_of(os.getpid()), _processes.boot_and_namespace()) == before
    assert all(before)


def test_a_boot_is_told_from_another(system: str) -> None:
    found = _processes.boot_and_namespace()
    assert (found == "5B0D-11") == (system == "macOS")
    assert _processes.machine_id() == found


def test_where_nothing_is_known(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is judged: a process may be busy, and its id another one's."""
    monkeypatch.setattr(_processes, "_PROCESSES", tmp_path / "proc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _processes.boot_and_namespace() == ""
    assert _processes.machine_id()
    assert _processes.start_of(os.getpid()) == "0"
    assert _processes.process_state(os.getppid(), "1") == "silent"
