"""Who can be connected within a host, and with whom."""

from __future__ import annotations

import os
import socket

import pytest

from shardkit import StateError
from shardkit._settings import shares_memory
from shardkit.backends import host_links


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
