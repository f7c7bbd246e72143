"""Connections between ranks of one host, all of them in this process."""

from __future__ import annotations

import socket

from hypothesis import strategies as st

GATHERS, REDUCTIONS = range(2)

SIX_TRANSFERS = {
    "order": st.permutations(range(6)),
    "sizes": st.lists(st.integers(1, 300_000), min_size=6, max_size=6),
    "lanes": st.lists(st.sampled_from([GATHERS, REDUCTIONS]), min_size=6, max_size=6),
}
"""Order in which a rank waits for six transfers, and their sizes and lanes."""


def connections(size: int) -> list[list[socket.socket]]:
    """Return a connection with each other rank, in rank order, for each of some ranks."""
    found: list[list[socket.socket]] = [[] for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, end in zip((low, high), ends, strict=True):
                found[rank].append(end)
    return found
