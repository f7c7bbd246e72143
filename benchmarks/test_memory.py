"""Known allocations compared with the meter's counts: ``pytest benchmarks/test_memory.py``."""

import threading
from collections.abc import Callable

import pytest
import torch

from memory import CpuMeter

MIB = 1 << 20
needs_swap = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="torch >= 2.12"
)


def _bytes(num_mib: int) -> torch.Tensor:
    return torch.empty(num_mib * MIB, dtype=torch.uint8)


def _two_at_once() -> None:
    first, second = _bytes(4), _bytes(8)
    del first, second
    _bytes(3)


def _one_after_another() -> None:
    for _ in range(5):
        _bytes(4)


def _swapped_and_regrown() -> None:
    full, empty = _bytes(4).untyped_storage(), _bytes(0).untyped_storage()
    full._swap_data_ptr_(empty)  # type: ignore[attr-defined]  # missing from the stubs
    empty.resize_(0)
    full.resize_(7 * MIB)


def _held_elsewhere() -> None:
    """Allocate in a thread that the profiler does not see; the next event must show it."""
    held: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: held.append(_bytes(6)))
    thread.start()
    thread.join()
    _bytes(1)


@pytest.mark.parametrize(
    ("work", "num_mib"),
    [
        (_two_at_once, 12),
        (_one_after_another, 4),
        pytest.param(_swapped_and_regrown, 7, marks=needs_swap),
        (_held_elsewhere, 7),
    ],
)
def test_peak_is_exact(work: Callable[[], None], num_mib: int) -> None:
    """Peaks are exactly the bytes that were allocated."""
    assert CpuMeter().peak_during(work) == num_mib * MIB


def test_bytes_made_between_two_blocks_count() -> None:
    """A meter counts from the moment it is made, not only inside the blocks that it runs."""
    meter = CpuMeter()
    kept = _bytes(2)
    assert meter.peak_during(lambda: None) == kept.nbytes
