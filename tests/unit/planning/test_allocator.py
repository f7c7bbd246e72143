"""The caching allocator of plans: it reserves what torch's allocator reserved on a card."""

from __future__ import annotations

import json
import pathlib

import pytest

from shardkit.planning._allocator import reserved_nbytes
from shardkit.planning._meter import HeldMemory

MIB = 2**20
HISTORY = pathlib.Path(__file__).parents[2] / "golden" / "allocations_of_an_h100.json"


def memories_of(history: list[int]) -> list[HeldMemory]:
    """Return memory that comes with a size, and goes with minus its number, counted from 1."""
    found: list[HeldMemory] = []
    for position, entry in enumerate(history):
        if entry > 0:
            found.append(HeldMemory(entry, "", "", position))
        else:
            found[-entry - 1].died = position
    return found


def test_it_reserves_what_a_card_reserved() -> None:
    """An H100 (torch 2.11) trained a transformer as one rank of a fake group of 4 x 8."""
    recorded = json.loads(HISTORY.read_text())
    assert reserved_nbytes(memories_of(recorded["history"])) == recorded["reserved"]


@pytest.mark.parametrize(
    ("history", "reserved"),
    [
        ([1], 2 * MIB),
        ([1, MIB, 900_000], 2 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([11 * MIB], 12 * MIB),
        ([30 * MIB, -1, 10 * MIB, 10 * MIB, 9 * MIB], 30 * MIB),
        ([30 * MIB, -1, 10 * MIB, 10 * MIB, -2, -3, 30 * MIB], 30 * MIB),
        # A rest of 1 MiB is not worth a cut, so it is lost to the next one.
        ([12 * MIB, -1, 11 * MIB, MIB + 1], 32 * MIB),
        # What is freed between others fits nothing larger.
        ([10 * MIB, 10 * MIB, -1, 12 * MIB], 32 * MIB),
    ],
)
def test_segments_are_cut_and_joined(history: list[int], reserved: int) -> None:
    assert reserved_nbytes(memories_of(history)) == reserved


def test_memory_that_takes_over_a_place_is_not_allocated() -> None:
    first, second = HeldMemory(12 * MIB, "", "", 1, 3), HeldMemory(12 * MIB, "", "", 2)
    assert reserved_nbytes([first, second]) == 24 * MIB
    second.takes_over = first
    assert reserved_nbytes([first, second]) == 12 * MIB


def test_memory_of_the_host_does_not_count() -> None:
    assert reserved_nbytes([HeldMemory(12 * MIB, "", "", 1, on_host=True)]) == 0
