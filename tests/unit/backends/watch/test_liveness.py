"""Connections to processes that do not answer: they stand as long as the processes exist."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import typing

import pytest

from shardkit.backends.watch.liveness import NOWHERE, Address, Connections, Listener

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

LISTENING = """
import os, time
from shardkit.backends.watch.liveness import Address, Listener
listener = Listener(Address("127.0.0.1", 1))
print(listener.address.port, flush=True)
"""


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], Address]]:
    """Start a process that listens, and never does anything about it."""
    command = [sys.executable, "-c", f"{LISTENING}time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        yield found, Address("127.0.0.1", int(found.stdout.readline()))
        found.kill()


def test_a_stopped_process_is_reached_until_it_has_ended(
    process: tuple[subprocess.Popen[str], Address],
) -> None:
    found, address = process
    found.send_signal(signal.SIGSTOP)
    connections = Connections()
    for _ in range(3):
        assert connections.reach([address]) == {address}
    assert connections.reach([]) == set()
    assert connections.reach([address, NOWHERE]) == {address}
    found.kill()
    found.wait()
    assert connections.reach([address]) == set()


def test_a_forked_process_does_not_listen_in_place_of_its_parent() -> None:
    """Workers of a loader may live on for a while."""
    script = f"{LISTENING}pid = os.fork()\nif not pid: time.sleep(60)\nprint(pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        address = Address("127.0.0.1", int(it.stdout.readline()))
        child = int(it.stdout.readline())
        try:
            assert it.wait(30) == 0
            assert Connections().reach([address]) == set()
        finally:
            subprocess.run(["kill", "-9", str(child)], check=True)


def test_nothing_is_known_of_those_that_are_not_reached() -> None:
    """Takes no longer for many: an address that nobody has, a port, and names that are none."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Address("127.0.0.1", closed.getsockname()[1])
    wrong = [nobody, NOWHERE, Address("192.0.2.1", 9), Address("192.0.2.2", 9)]
    wrong += [Address("no..name", 9), Address("x" * 300, 9)]
    listener = Listener(Address("127.0.0.1", 1))
    begun = time.monotonic()
    assert Connections().reach([*wrong, listener.address]) == {listener.address}
    assert time.monotonic() - begun < 4
    listener.close()


def test_connections_that_nobody_needs_any_more_leave_the_queue() -> None:
    listener = Listener(Address("127.0.0.1", 1))
    for _ in range(5):
        assert Connections().reach([listener.address])
    kept = Connections()
    assert kept.reach([listener.address])
    listener.clear()
    listener.clear()
    assert kept.reach([listener.address])  # Over a new one.
    listener.close()


@pytest.mark.parametrize(
    ("store", "own"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("no.such.name.invalid", "")],
)
def test_others_reach_this_process_as_they_reach_the_store(store: str, own: str) -> None:
    """A host may know its own name as an address of its loopback, and others as another one."""
    listener = Listener(Address(store, 1))
    assert listener.address.host == own
    assert Connections().reach([listener.address]) == ({listener.address} if own else set())
    listener.clear()
    listener.close()


def test_a_run_on_one_host_listens_on_its_loopback_only() -> None:
    listener = Listener(Address("localhost", 1))
    assert listener.address.host in ("127.0.0.1", "::1")
    assert not Connections().reach([Address("127.0.0.2", listener.address.port)])
    listener.close()
