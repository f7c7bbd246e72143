"""Slots come and go behind storages: views stay valid, memory is used again, little is wasted."""

from __future__ import annotations

import gc
import types
import typing

import pytest
import torch
from recorded import Recorded

from shardkit._compat import torch_tensors
from shardkit._params.memory import Buffer, SlotPool

if typing.TYPE_CHECKING:
    from torch import Tensor

CPU = torch.device("cpu")
OF_WEIGHT: typing.Any = types.SimpleNamespace(name="weight")


class CommStreams:
    """Numbers its fences."""

    def __init__(self) -> None:
        self.num_fences = 0

    def fence(self) -> int:
        self.num_fences += 1
        return self.num_fences

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(nbytes)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)


def view_of(buffer: Buffer, *, offset: int = 0, numel: int | None = None) -> Tensor:
    """Return a view of bytes, as those that parameters are."""
    numel = buffer.nbytes - offset if numel is None else numel
    return torch.empty(0, dtype=torch.uint8).set_(buffer.storage, offset, (numel,), (1,))


def closed_buffer(nbytes: int) -> tuple[Buffer, Tensor]:
    """Return a buffer without memory and a view of it."""
    buffer = Buffer(nbytes, CPU, "send", OF_WEIGHT)
    view = view_of(buffer)
    buffer.close()
    return buffer, view


def give_and_take(pool: SlotPool, nbytes: int, fence: int, *, by_compute: bool = True) -> None:
    """Leave a free slot of a size in the pool."""
    buffer, _ = closed_buffer(nbytes)
    buffer.acquire(pool)
    buffer.release(pool, fence, by_compute=by_compute)


@pytest.fixture(params=["swap", "resize"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SlotPool:
    """Return a pool of this torch, and one of a torch that can only resize storages."""
    if request.param == "resize":
        monkeypatch.setattr(torch_tensors, "HAS_STORAGE_SWAP", False)
    elif not torch_tensors.HAS_STORAGE_SWAP:
        pytest.skip("torch before 2.12 cannot swap storages")
    made = SlotPool(CommStreams())
    assert made.keeps_memory == (request.param == "swap")
    return made


@pytest.fixture
def slots() -> SlotPool:
    """Return a pool that keeps memory."""
    if not torch_tensors.HAS_STORAGE_SWAP:
        pytest.skip("torch before 2.12 cannot swap storages")
    return SlotPool(CommStreams())


# --- buffers ------------------------------------------------------------------------------------


def test_a_closed_buffer_has_no_memory() -> None:
    buffer, view = closed_buffer(64)
    assert not buffer.has_memory
    assert buffer.storage.nbytes() == 0
    assert buffer.nbytes == 64
    assert view.shape == (64,)


def test_memory_comes_and_goes_behind_one_storage(pool: SlotPool) -> None:
    buffer, view = closed_buffer(64)
    storage = buffer.storage
    for value in range(3):
        buffer.acquire(pool)
        assert buffer.has_memory
        assert buffer.storage.nbytes() >= 64
        view.fill_(value)
        assert view.sum() == 64 * value
        buffer.release(pool, None, by_compute=True)
        assert not buffer.has_memory
        assert buffer.storage.nbytes() == 0
        assert buffer.storage is storage


def test_all_views_see_what_one_writes(pool: SlotPool) -> None:
    """Also views of views, which autograd saves."""
    buffer = Buffer(64, CPU, "send", OF_WEIGHT)
    whole, second = view_of(buffer), view_of(buffer, offset=32)
    matrix = second.view(4, 8).t()
    buffer.close()
    for value in (3, 5):
        buffer.acquire(pool)
        whole.zero_()
        second.fill_(value)
        assert whole[:32].eq(0).all()
        assert matrix.shape == (8, 4)
        assert matrix.eq(value).all()
        assert whole.data_ptr() + 32 == second.data_ptr() == matrix.data_ptr()
        buffer.release(pool, None, by_compute=True)


def test_a_gradient_is_right_though_the_memory_was_elsewhere_in_between(pool: SlotPool) -> None:
    """What ``F.linear`` saves is a view of the weight; forward and backward see other slots."""
    buffer = Buffer(4 * 4 * 4, CPU, "send", OF_WEIGHT)
    weight, gathered = (
        torch.empty(0).set_(buffer.storage, 0, (4, 4), (4, 1)) for _ in range(2)
    )  # each with a version counter of its own
    weight.requires_grad_()
    buffer.close()
    values, x = torch.randn(4, 4), torch.randn(2, 4, requires_grad=True)
    buffer.acquire(pool)
    gathered.copy_(values)
    loss = torch.nn.functional.linear(x, weight).sum()
    buffer.release(pool, None, by_compute=True)
    other, garbage = closed_buffer(buffer.nbytes)
    other.acquire(pool)
    garbage.fill_(255)
    buffer.acquire(pool)
    gathered.copy_(values)
    loss.backward()
    assert torch.equal(x.grad, values.sum(0).expand(2, 4))


def test_two_buffers_do_not_share_memory_while_both_have_some(pool: SlotPool) -> None:
    (one, first), (two, second) = closed_buffer(64), closed_buffer(64)
    one.acquire(pool)
    first.fill_(1)
    two.acquire(pool)
    second.fill_(2)
    assert first.eq(1).all()
    assert second.eq(2).all()


def test_an_empty_buffer_comes_and_goes_as_well(pool: SlotPool) -> None:
    buffer, view = closed_buffer(0)
    buffer.acquire(pool)
    assert view.numel() == 0
    buffer.release(pool, None, by_compute=True)


def test_memory_is_given_and_taken_once(pool: SlotPool) -> None:
    buffer, _ = closed_buffer(16)
    with pytest.raises(AssertionError):
        buffer.release(pool, None, by_compute=True)
    buffer.acquire(pool)
    with pytest.raises(AssertionError):
        buffer.acquire(pool)


# --- slots --------------------------------------------------------------------------------------


def test_a_slot_is_used_again_by_the_next_buffer(slots: SlotPool) -> None:
    (one, first), (two, second) = closed_buffer(64), closed_buffer(64)
    one.acquire(slots)
    address = first.data_ptr()
    one.release(slots, None, by_compute=True)
    two.acquire(slots)
    assert second.data_ptr() == address


def test_a_steady_rhythm_needs_as_many_slots_as_live_at_once(slots: SlotPool) -> None:
    """Six layers, two at a time: two addresses."""
    buffers = [closed_buffer(256) for _ in range(6)]
    addresses = set()
    previous = buffers[-1][0]
    for buffer, view in buffers * 3:
        buffer.acquire(slots)
        addresses.add(view.data_ptr())
        if previous.has_memory:
            previous.release(slots, None, by_compute=True)
        previous = buffer
    assert len(addresses) == 2


@pytest.mark.parametrize(
    ("slot_nbytes", "nbytes", "is_taken"),
    [(64, 64, True), (127, 64, True), (128, 64, True), (129, 64, False), (63, 64, False)],
)
def test_a_slot_is_taken_up_to_twice_the_size(
    slots: SlotPool, slot_nbytes: int, nbytes: int, *, is_taken: bool
) -> None:
    give_and_take(slots, slot_nbytes, fence=77)
    buffer, _ = closed_buffer(nbytes)
    assert (buffer.acquire(slots) == 77) == is_taken
    assert buffer.storage.nbytes() == (slot_nbytes if is_taken else nbytes)


def test_a_larger_slot_gives_views_the_memory_they_are_for(slots: SlotPool) -> None:
    give_and_take(slots, 100, fence=1)
    buffer, view = closed_buffer(64)
    buffer.acquire(slots)
    view.fill_(9)
    assert view.shape == (64,)
    assert view.long().sum() == 9 * 64


def test_the_smallest_slot_that_fits_is_taken(slots: SlotPool) -> None:
    buffers = [closed_buffer(nbytes)[0] for nbytes in (120, 70, 90)]
    for buffer in buffers:
        buffer.acquire(slots)
    for fence, buffer in enumerate(buffers):
        buffer.release(slots, f"of {fence}", by_compute=True)
    assert closed_buffer(64)[0].acquire(slots) == "of 1"
    assert closed_buffer(64)[0].acquire(slots) == "of 2"
    assert closed_buffer(64)[0].acquire(slots) == "of 0"


def test_a_slot_that_compute_has_passed_is_preferred(slots: SlotPool) -> None:
    """Though it is the larger one: nobody waits for a collective."""
    (small, _), (large, _) = closed_buffer(64), closed_buffer(120)
    for buffer in (small, large):
        buffer.acquire(slots)
    small.release(slots, "small", by_compute=False)
    large.release(slots, "large", by_compute=True)
    assert closed_buffer(64)[0].acquire(slots) == "large"


def test_the_only_slot_of_a_collective_is_not_waited_for(slots: SlotPool) -> None:
    """The last one sent: to wait for it would let compute and communication take turns."""
    buffers = [closed_buffer(64)[0] for _ in range(3)]
    for buffer in buffers:
        buffer.acquire(slots)
    buffers[0].release(slots, "older", by_compute=False)
    fence = closed_buffer(64)[0].acquire(slots)
    assert fence != "older", "new memory"
    buffers[1].release(slots, "newer", by_compute=False)
    assert closed_buffer(64)[0].acquire(slots) == "older"


def test_a_slot_of_a_collective_is_free_once_compute_has_waited(slots: SlotPool) -> None:
    buffer = closed_buffer(64)[0]
    buffer.acquire(slots)
    buffer.release(slots, "sent", by_compute=False)
    slots.passed("another")
    slots.passed("sent")
    assert closed_buffer(64)[0].acquire(slots) == "sent"


# --- fences -------------------------------------------------------------------------------------


def test_new_memory_is_free_after_all_compute_so_far(pool: SlotPool) -> None:
    """It may be memory that the allocator took back from compute just now."""
    assert closed_buffer(64)[0].acquire(pool) == 1
    assert closed_buffer(64)[0].acquire(pool) == 2


def test_used_memory_is_free_after_its_users(slots: SlotPool) -> None:
    give_and_take(slots, 64, fence=1234)
    assert closed_buffer(64)[0].acquire(slots) == 1234


# --- trimming -----------------------------------------------------------------------------------


def test_trim_gives_free_slots_back(slots: SlotPool) -> None:
    give_and_take(slots, 64, fence=1234)
    slots.trim()
    assert closed_buffer(64)[0].acquire(slots) != 1234


def test_trim_leaves_memory_in_use(pool: SlotPool) -> None:
    buffer, view = closed_buffer(64)
    buffer.acquire(pool)
    view.fill_(7)
    pool.trim()
    gc.collect()
    assert view.eq(7).all()
    buffer.release(pool, 5, by_compute=True)
    buffer.acquire(pool)
    view.fill_(8)
    assert view.eq(8).all()


# --- a model ------------------------------------------------------------------------------------


def test_training_is_the_same_on_a_torch_that_cannot_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for has_swap in (torch_tensors.HAS_STORAGE_SWAP, False):
        monkeypatch.setattr(torch_tensors, "HAS_STORAGE_SWAP", has_swap)
        recorded = Recorded((2, 4))
        optimizer = torch.optim.SGD(recorded.model.parameters(), lr=0.1)
        logs = []
        for seed in range(3):
            recorded.model.zero_grad()
            logs.append(recorded.step(seed=seed))
            optimizer.step()
        shards = [param.to_local() for param in recorded.model.parameters()]
        runs.append((logs, recorded.grads(), shards, recorded.model.memory_stats()))
    assert runs[0][0] == runs[1][0]
    assert runs[0][3] == runs[1][3]
    for tensors in (1, 2):
        for one, other in zip(runs[0][tensors], runs[1][tensors], strict=True):
            assert torch.equal(one, other)


def test_trim_keeps_what_a_collective_may_still_use(slots: SlotPool) -> None:
    """The allocator would give it to compute's next operator at once."""
    buffer = closed_buffer(64)[0]
    buffer.acquire(slots)
    buffer.release(slots, "sent", by_compute=False)
    slots.trim()
    slots.passed("sent")
    assert closed_buffer(64)[0].acquire(slots) == "sent"
    buffer = closed_buffer(96)[0]
    buffer.acquire(slots)
    buffer.release(slots, "sent", by_compute=False)
    slots.passed("sent")
    slots.trim()
    assert closed_buffer(96)[0].acquire(slots) != "sent"
