"""Memory that a process group offers: who asks for it, and that it can be given up."""

from __future__ import annotations

import types
import typing

import pytest
import torch
from recorded import Recorded

from recording import RecordingStreams
from shardkit._compat import torch_groups, torch_tensors
from shardkit.backends.accelerator import AcceleratorAxis, AcceleratorStreams


class Offers:
    """A process group's backend that has memory to offer, or not."""

    def __init__(self, *, any_memory: bool) -> None:
        self.any_memory = any_memory
        self.num_allocated = 0

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        del device
        return self.any_memory

    def allocate_tensor(self, nbytes: int, **kwargs: typing.Any) -> torch.Tensor:
        self.num_allocated += 1
        return torch.empty(nbytes, **kwargs)


def axis_of(offers: Offers) -> AcceleratorAxis:
    axis = AcceleratorAxis.__new__(AcceleratorAxis)
    axis.group = offers
    return axis


def test_memory_comes_from_an_axis_that_offers_any_until_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_groups, "process_group_backend", lambda group, _: group)
    streams = AcceleratorStreams.__new__(AcceleratorStreams)
    streams._device = types.SimpleNamespace(  # noqa: SLF001 - no card is needed to choose
        device=torch.device("cpu"), new_storage=torch.UntypedStorage
    )
    poor, rich = Offers(any_memory=False), Offers(any_memory=True)
    counts = []
    for axes in ([rich], [poor], [poor, rich], []):
        streams.allocate_from([axis_of(offers) for offers in axes])
        assert streams.new_storage(64).nbytes() == 64
        counts.append(rich.num_allocated)
    assert counts == [1, 1, 2, 2]
    assert poor.num_allocated == 0


def test_switching_off_undoes_switching_on(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[int] = []
    monkeypatch.setattr(RecordingStreams, "allocate_from", lambda _, axes: named.append(len(axes)))
    recorded = Recorded()
    first, second, *_ = recorded.model.layers
    recorded.step()
    assert named == []
    first.set_allocate_memory_from_process_group_for_comm(True)
    second.set_allocate_memory_from_process_group_for_comm(True)
    recorded.step()
    assert named == [1]
    first.set_allocate_memory_from_process_group_for_comm(False)
    assert named == [1], "the other module has it still, and they share buffers"
    second.set_allocate_memory_from_process_group_for_comm(False)
    recorded.step()
    assert named == [1, 0]


@pytest.mark.skipif(
    not torch_tensors.HAS_STORAGE_SWAP,
    reason="torch before 2.12 cannot swap storages, so no memory is kept for another use",
)
def test_memory_of_the_other_kind_is_not_used_again() -> None:
    recorded = Recorded()
    with torch.no_grad():
        recorded.run()  # Forward gives its slots back; only a backward trims them.
    slots = recorded.model._shardkit_state.runtime.slots  # noqa: SLF001
    assert slots.free
    recorded.model.set_allocate_memory_from_process_group_for_comm(True)
    assert not slots.free
