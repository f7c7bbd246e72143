"""Who can be connected within a host, and with whom."""

from __future__ import annotations

import ctypes
import os
import socket
import typing
from types import SimpleNamespace

import pytest

from shardkit import StateError
from shardkit._settings import shares_memory
from shardkit.backends import host_links

if typing.TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("text", "is_wanted"), [("0", False), ("1", True), ("no", False)])
def test_the_environment_decides(
    text: str,
    is_wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", text)
    assert shares_memory() == is_wanted


def test_the_environment_says_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", "perhaps")
    with pytest.raises(StateError, match="SHARDKIT_SHARED_MEMORY"):
        shares_memory()


def test_a_system_without_anonymous_memory_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert host_links._host() == ""  # noqa: SLF001 - of this system there is one


def test_who_does_not_know_the_secret_is_turned_away() -> None:
    address = host_links._Address("host", "\0shardkit-test", b"t" * 32, 1)  # noqa: SLF001
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address.name)
        listener.listen(8)
        listener.settimeout(0.5)
        strangers = []
        for hello in (b"x" * 34, b""):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(address.name)
            stranger.send(hello) if hello else stranger.close()
            strangers.append(stranger)
        friends = []
        for use in range(2):
            friend = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            friend.connect(address.name)
            friend.send(address.token + bytes([use, 1]))
            friends.append(friend)
        found: dict[tuple[int, int], socket.socket] = {}
        host_links._meet(listener, 0, [address, address], found)  # noqa: SLF001
        assert list(found) == [(0, 1), (1, 1)]
        for use, friend in enumerate(friends):
            found[use, 1].send(b"welcome")
            assert friend.recv(7) == b"welcome"
        for each in (*strangers, *friends, *found.values()):
            each.close()


@pytest.mark.parametrize(
    ("scope", "parent", "is_named"),
    [("0\n", 7, False), ("1\n", 7, True), ("1\n", 1, False), ("2\n", 7, False), (None, 7, False)],
)
def test_where_linux_asks_for_it_the_launcher_is_named(
    scope: str | None, parent: int, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of the tests may have no such restriction: what it is told is noted."""
    path, told = tmp_path / "ptrace_scope", list[typing.Any]()
    if scope is not None:
        path.write_text(scope)
    monkeypatch.setattr(host_links, "_PTRACE_SCOPE", path)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    library = SimpleNamespace(prctl=lambda *args: told.append(args))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    host_links._let_siblings_read()  # noqa: SLF001
    named = [(option, int(pid.value)) for option, pid, *_ in told]
    assert named == ([(0x59616D61, 7)] if is_named else [])
