"""The code inside a process that has one card to itself during its turn."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from contenders import Workload
from measure import HostClock, Training, clock_for
from memory import meter_for

_UNTIMED_STEPS = 2  # The allocator's cache was emptied after the last turn.

# torch 2.13 renamed both; 2.9 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class OneCardRank:
    """One contender, on a card that the others use in their turns."""

    def __init__(self, device: torch.device, contender: str, workload: Workload) -> None:
        """Start the count of memory, then build the contender."""
        self._device = device
        self._meter = meter_for(device)
        self._training = Training(device, contender, workload)
        self._single_group: dist.ProcessGroup | None = None
        # A fake group returns arbitrary values, perhaps NaN, and the speed of a card's products
        # depends on the values. So with it all contenders begin every step with similar numbers.
        self._is_fake = dist.get_backend() == "fake"
        self._ranges = [_range_of(piece) for piece in self._training.pieces()]

    def first_losses(self, num_steps: int) -> list[float]:
        """Train the first steps, which compile and allocate; return their losses."""
        losses = [self._training.step().item() for _ in range(num_steps)]
        self._rest()
        return losses

    def peak(self, num_steps: int) -> int:
        """Return the most bytes of tensors that live at once, in steps after the first ones."""

        def train() -> None:
            for _ in range(num_steps):
                self._training.step()

        peak = self._meter.peak_during(train)
        self._rest()
        return peak

    def steps(self, num_steps: int) -> list[float]:
        """Return the seconds of steps, by events on the card's stream."""
        self._take_untimed_steps()
        self._synchronize()
        clocks = []
        for _ in range(num_steps):
            self._draw_parameters()
            clock = clock_for(self._device)
            self._training.step(clock.mark)
            clock.mark()
            clocks.append(clock)
        seconds = [sum(clock.intervals_s()) for clock in clocks]
        self._rest()
        return seconds

    def issue(self, num_steps: int) -> list[float]:
        """Return the seconds that the host takes to issue forward and backward, without waiting."""
        self._take_untimed_steps()
        seconds = []
        for _ in range(num_steps):
            self._draw_parameters()
            self._synchronize()
            clock = HostClock()
            self._training.step(clock.mark)
            clock.mark()
            forward, backward, *_ = clock.intervals_s()
            seconds.append(forward + backward)
        self._rest()
        return seconds

    def copies(self, numel: int, num_groups: int) -> float:
        """Return the host's additional seconds for a fake group of many ranks instead of one.

        The time is that of two all-gathers and a reduce-scatter for each of `num_groups`, less the
        time of the same collectives in a group of one rank.

        Args:
            numel: Number of elements of a group's parameters, in bf16.
            num_groups: Number of groups.
        """
        self._single_group = self._single_group or dist.new_group([0])
        spent = dict.fromkeys((None, self._single_group), 0.0)
        for group in spent:
            piece = torch.zeros(
                -(-numel // dist.get_world_size(group)), dtype=torch.bfloat16, device=self._device
            )
            whole = piece.new_zeros(piece.numel() * dist.get_world_size(group))
            for timed in (False, True):
                self._synchronize()
                begin = time.perf_counter()
                for _ in range(num_groups if timed else 1):
                    _all_gather(whole, piece, group=group)
                    _all_gather(whole, piece, group=group)
                    _reduce_scatter(piece, whole, group=group)
                spent[group] = time.perf_counter() - begin
        self._rest()
        return spent[None] - spent[self._single_group]

    def _take_untimed_steps(self) -> None:
        for _ in range(_UNTIMED_STEPS):
            self._draw_parameters()
            self._training.step()

    def _draw_parameters(self) -> None:
        if self._is_fake:
            for piece, (low, high) in zip(self._training.pieces(), self._ranges, strict=True):
                piece.uniform_(low, high)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _rest(self) -> None:
        """Leave the card to the others: free unused memory, with no work under way."""
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _range_of(piece: Tensor) -> tuple[float, float]:
    return (piece.min().item(), piece.max().item()) if piece.numel() else (0.0, 0.0)
