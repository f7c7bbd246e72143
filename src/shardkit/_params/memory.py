"""Memory of communication buffers: a few slots that come and go behind fixed storages.

The unsharded parameters of a bucket are views of ONE storage for its whole life: autograd saves
views of them, and a tensor pointed elsewhere between forward and backward would train on wrong
weights without an error. Only the memory behind the storage comes and goes. With torch >= 2.12 a
slot is swapped under the storage and back, so nothing is mapped anew within a step. Older torch
resizes the storage, which is correct but slower. Buffers of gradients work in the same way and use
the same slots: memory that held a group's gradients soon holds the next group's parameters.

All memory belongs to the compute stream: it is allocated and freed in the order of that stream.
Code that writes it from another stream waits for the slot's fence first.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from shardkit import _events
from shardkit._compat import torch_tensors
from shardkit._compat.once import once
from shardkit._errors import FreedParameterError
from shardkit._tree import iter_tensors

if TYPE_CHECKING:
    from shardkit._tensor.spec import ShardSpec
    from shardkit.backends.base import CommStreams
    from shardkit.backends.device import Event


# --- the heap of the host -------------------------------------------------------------------------

_LEAST_NBYTES = 2**20


@functools.cache
def _trim() -> Any:
    """Return glibc's ``malloc_trim``; None: another C library, which does not have it."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None


def give_back(freed_nbytes: int) -> None:
    """Give the pages of freed memory back to the system, if much was freed on the host.

    glibc keeps freed tensors of up to 32 MiB, and often cannot reuse their place for the next ones:
    torch asks for aligned memory, so a hole of exactly the same size is too small. A model whose
    layers are made, cut and freed one after the other would keep most of them in memory.
    """
    trim = _trim()
    if trim is not None and freed_nbytes >= _LEAST_NBYTES:
        trim(0)


# --- slots ----------------------------------------------------------------------------------------

_LARGEST_WASTE = 2
"""Limit for reuse: a buffer takes a free slot that is at most this many times as large."""


@dataclass(slots=True, eq=False)
class Slot:
    """Memory that is or was behind a storage."""

    # Storage that holds the memory while the slot is free, and is empty while the slot is used.
    storage: torch.UntypedStorage
    nbytes: int  # Size of the memory in bytes.
    free_after: Event | None  # Fence after which the memory may be written.


class Buffer:
    """A storage for the life of a bucket, which has memory behind it for some of the time.

    Make its views between construction and `close`, since making a view needs memory.

    Args:
        nbytes: Size of the memory in bytes while there is any.
        device: Device of the memory.
        kind: Word for the kind of buffer, for events: ``unsharded``, ``send``, ``receive``.
        of: Cut of its first parameter, which has the name.
    """

    def __init__(self, nbytes: int, device: torch.device, kind: str, of: ShardSpec) -> None:
        self.nbytes = nbytes
        self._kind = kind
        self._of = of
        self.storage = torch.UntypedStorage(nbytes, device=device)
        self.slot: Slot | None = None  # Current memory; None: the views must not be used.
        self._kept: Slot | None = None

    def close(self) -> None:
        """Give the first memory back, after the views were made."""
        self.storage.resize_(0)

    @property
    def has_memory(self) -> bool:
        """Whether the views may be used."""
        return self.slot is not None

    def acquire(self, pool: SlotPool) -> Event | None:
        """Get memory from a pool, or what was kept; return the fence after which to write it."""
        assert self.slot is None
        kept, self._kept = self._kept, None
        self.slot = pool.acquire(self.storage, self.nbytes) if kept is None else kept
        if _events.observer is not None:
            self._tell("take")
        return self.slot.free_after  # order: whoever writes a buffer waits for its slot

    def release(
        self, pool: SlotPool, fence: Event | None, *, by_compute: bool, keep: bool = False
    ) -> None:
        """Give the memory back; its users, on the compute stream or not, are done at `fence`.

        With `keep` it stays behind the storage until the next use, at its address.
        """
        assert self.slot is not None
        if _events.observer is not None:
            self._tell("return")
        if keep:
            kept = self._kept = self.slot
            kept.free_after = fence  # order: whoever writes kept memory waits for its last use
        else:
            pool.release(self.storage, self.slot, fence, by_compute=by_compute)
        self.slot = None

    def settle(self) -> None:
        """Note that compute has waited for all uses of memory that was kept."""
        if self._kept is not None:
            self._kept.free_after = None

    def _tell(self, event: Literal["take", "return"]) -> None:
        assert _events.observer is not None
        assert self.slot is not None
        name = f"{self._kind} {self._of.name}"
        _events.observer.tell(event, name, nbytes=self.slot.nbytes)


_nbytes_of = operator.attrgetter("nbytes")


class SlotPool:
    """The slots of one root on one device."""

    def __init__(self, streams: CommStreams) -> None:
        self._streams = streams
        # Free slots in order of size, then of age; those that compute has not passed are apart.
        self._passed: list[Slot] = []
        self._waiting: list[Slot] = []
        # Whether slots are reused, and not freed and allocated again.
        self.keeps_memory = torch_tensors.HAS_STORAGE_SWAP

    def acquire(self, storage: torch.UntypedStorage, nbytes: int) -> Slot:
        """Put a free or new slot of at least `nbytes` behind an empty `storage`."""
        if not self.keeps_memory:
            self._streams.resize_storage(storage, nbytes)
            if _events.observer is not None:
                _events.observer.tell("allocate", "buffer", nbytes=nbytes)
            # order: whoever writes resized memory waits for its allocation
            return Slot(storage, nbytes, self._streams.fence())
        slot = self._take(nbytes)
        torch_tensors.swap_storage(storage, slot.storage)
        return slot

    def release(
        self, storage: torch.UntypedStorage, slot: Slot, fence: Event | None, *, by_compute: bool
    ) -> None:
        """Take the memory from `storage`; without `keeps_memory` it must be unused by now."""
        if not self.keeps_memory:
            self._streams.resize_storage(storage, 0)
            if _events.observer is not None:
                _events.observer.tell("free", "buffer", nbytes=slot.nbytes)
            return
        torch_tensors.swap_storage(storage, slot.storage)
        slot.free_after = fence  # order: whoever writes a slot waits for its last use
        is_passed = by_compute or fence is None  # order: slots wait for compute to pass
        if is_passed:
            insort(self._passed, slot, key=_nbytes_of)
        else:
            self._waiting.append(slot)

    def fence(self) -> Event | None:
        """Return a mark of all compute issued so far, for memory that is no slot."""
        return self._streams.fence()

    def passed(self, fence: Event | None) -> None:
        """Note that the compute stream has waited for a fence."""
        waiting, self._waiting = self._waiting, []
        for slot in waiting:
            if slot.free_after is fence:
                insort(self._passed, slot, key=_nbytes_of)
            else:
                self._waiting.append(slot)

    @property
    def free(self) -> list[Slot]:
        """Slots that no buffer has."""
        return [*self._passed, *self._waiting]

    def trim(self) -> None:
        """Give free slots back to the allocator.

        Slots that a collective may still use are kept: the allocator follows the order of the
        compute stream, which has not waited for the collective.
        """
        if _events.observer is not None:
            for slot in self._passed:
                _events.observer.tell("free", "buffer", nbytes=slot.nbytes)
        self._passed.clear()  # order: slots that a collective may use are not freed

    def drop(self) -> None:
        """Give all free slots back, after compute has waited for all streams.

        The memory of a slot belongs to the graph in which it was allocated, or to none. Code inside
        a graph cannot wait for fences from outside, and vice versa.
        """
        self._passed.clear()
        self._waiting.clear()

    def _take(self, nbytes: int) -> Slot:
        """Return a free slot that fits without much waste, or a new one.

        Of the slots that fit, it returns the oldest of the smallest that the compute stream has
        passed: the gather waits for its last use. It returns a slot that a collective may still use
        only if there is another such slot: the older of two is probably done, but a wait for the
        last one would serialize compute and communication.
        """
        largest = nbytes * _LARGEST_WASTE
        at = bisect_left(self._passed, nbytes, key=_nbytes_of)
        if at < len(self._passed) and self._passed[at].nbytes <= largest:
            return self._passed.pop(at)
        waiting = [slot for slot in self._waiting if nbytes <= slot.nbytes <= largest]
        if len(waiting) > 1:
            self._waiting.remove(waiting[0])
            return waiting[0]
        if _events.observer is not None:
            _events.observer.tell("allocate", "buffer", nbytes=nbytes)
        # order: whoever writes new memory waits for its allocation
        return Slot(self._streams.new_storage(nbytes), nbytes, self._streams.fence())


# --- freed parameters -----------------------------------------------------------------------------

NAME_ATTRIBUTE = "_shardkit_fqn"
"""Attribute in which an unsharded parameter keeps its name; other parameters do not have it."""

_READ_MEMORY = ("T", "mT", "H", "mH", "data", "real", "imag")
"""Attributes that are tensors over the same memory."""
_NEED_NO_MEMORY = (
    "__set__",
    "__delete__",
    "__len__",
    "dim",
    "element_size",
    "is_complex",
    "is_floating_point",
    "nelement",
    "numel",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "stride",
)


def is_unsharded(param: nn.Parameter) -> bool:
    """Whether a parameter is the unsharded one that a bucket shows while it is in use."""
    return NAME_ATTRIBUTE in param.__dict__


def _needs_no_memory(func: Any) -> bool:
    """Whether a torch function can be called on a parameter without memory."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _READ_MEMORY
    return name in _NEED_NO_MEMORY


class _Freed:
    """The common part of the classes of parameters without memory."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        """Show the name; there are no values to show."""
        shape = tuple(self.shape)
        return f"{type(self).__name__}({self.__dict__[NAME_ATTRIBUTE]!r}, shape={shape})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let attributes be read and hooks work; refuse everything else."""
        del types
        if _needs_no_memory(func):
            with torch_tensors.plain_torch_functions():
                return func(*args, **(kwargs or {}))
        given = iter_tensors([args, kwargs or {}])
        raise _freed_error(next((a for a in given if isinstance(a, _Freed)), None))


def _freed_error(param: Any) -> FreedParameterError:
    name = "?" if param is None else param.__dict__[NAME_ATTRIBUTE]
    return FreedParameterError(
        f"unsharded parameter {name!r} is used outside its module's forward and backward: its "
        f"memory has been given back. Do not keep it; take the sharded one from "
        f"module.parameters(), or call unshard() on its module around the use. If its forward "
        f"returns it, or a view of it, shard that module by reshard_after_forward=False."
    )


class FreedParameter(_Freed, nn.Parameter):  # type: ignore[misc]  # Tensor.__repr__ takes more.
    """Class of an unsharded parameter whose memory was freed: any use raises, with its name.

    Reading freed memory can kill the process. So the class of the Parameter object is exchanged,
    and not its contents, which costs nothing.
    """


class FreedLeaf(_Freed, Tensor):  # type: ignore[misc]
    """Class of a tensor under an unsharded parameter, while its memory is freed."""

    def __deepcopy__(self, memo: object) -> Any:
        """Return itself: a module may refer to it, and a copy gets new tensors in its forward."""
        del memo
        return self


def refuse_leaf(tensor: Tensor | None, name: str) -> None:
    """Let any use of a plain tensor raise: the memory of the named parameter is gone."""
    if tensor is not None:
        tensor.__dict__[NAME_ATTRIBUTE] = name
        tensor.__class__ = FreedLeaf


def allow_leaf(tensor: Any) -> None:
    """Let it be used again."""
    is_freed = type(tensor) is FreedLeaf
    if is_freed:
        tensor.__class__ = Tensor


@once
def class_without_memory(cls: type) -> type:
    """Return the class that replaces the class of an unsharded parameter, e.g. a DTensor's."""
    if cls is nn.Parameter:
        return FreedParameter

    def refuse(self: Any, *args: object, **kwargs: object) -> Any:
        del args, kwargs
        raise _freed_error(self)

    methods = ("to_local", "full_tensor", "redistribute")  # They are not functions of torch.
    return type(f"Freed{cls.__name__}", (_Freed, cls), dict.fromkeys(methods, refuse))
