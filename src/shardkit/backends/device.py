"""Streams, events and memory of an accelerator; only this module asks torch for them.

Every accelerator that torch knows offers them under the same names, so one class serves all
accelerators. Tests replace it by a simulated device, which needs no card (`tests/streams`).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardkit._compat import torch_devices
from shardkit._errors import MeshError, StateError
from shardkit._text import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor


# --- streams and events ---------------------------------------------------------------------------


class Event(Protocol):
    """A point on a stream, as torch's device modules record it. A fence is an event or None."""

    def query(self) -> bool:
        """Whether all work before the event is done."""

    def synchronize(self) -> None:
        """Block the host until all work before the event is done."""


class Stream(Protocol):
    """A queue of work on a device, as torch's device modules make it."""

    def record_event(self) -> Event:
        """Return an event that comes after all work issued so far."""

    def wait_event(self, event: Event) -> None:
        """Let work issued from now on come after `event`."""


# --- devices ------------------------------------------------------------------------------------

_NEEDED = ("Stream", "Event", "stream", "current_stream", "current_device", "set_device")
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "xla", "npu", "mtia", "hpu", "musa", "mlu")
"""Names for hints in errors only: packages add other types."""


class AcceleratorDevice:
    """The device of this process.

    Streams and events have the classes of the device's module (``torch.cuda.Stream``, ...), like
    those of users.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = device_module(device.type)

    @classmethod
    def current(cls, device_type: str) -> AcceleratorDevice:
        """Return the current device of a type."""
        return cls(torch.device(device_type, device_module(device_type).current_device()))

    # --- streams and events ---

    def new_stream(self) -> Stream:
        """Return a stream of high priority.

        Collectives of the next group must not queue behind the kernels of this group.
        """
        stream: Stream = self._module.Stream(self.device, priority=-1)
        return stream

    def current_stream(self) -> Stream:
        """Return the stream on which operators run now, which is usually that of compute."""
        # The index is a number; torch would have to look up a device object.
        stream: Stream = self._module.current_stream(self.device.index)
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context in which operators and collectives run on `stream`."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def has_passed(self, event: Event) -> bool | None:
        """Whether an event has passed; None: a graph is being captured, which forbids the query.

        It is for threads beside the user's: a thread that has chosen no device would wake device 0.
        """
        with torch_devices.unless_capturing() as may_ask:
            if not may_ask:
                return None
            with self._module.device(self.device.index):
                return event.query()

    # --- graphs ---

    def new_graph(self) -> Any:
        """Return an empty graph of torch.

        Raises:
            StateError: Torch has no graphs for this device.
        """
        if not hasattr(self._module, "CUDAGraph"):
            name = self.device.type
            msg = (
                f"a step on device {name!r} cannot be captured: torch.{name} has no CUDA graphs. "
                f"Call the step itself."
            )
            raise StateError(msg)
        return self._module.CUDAGraph()

    def new_compute_stream(self) -> Stream:
        """Return a stream for the user's work; the default stream cannot be captured."""
        stream: Stream = self._module.Stream(self.device)
        return stream

    @contextlib.contextmanager
    def capturing(self, graph: Any, stream: Stream) -> Iterator[None]:
        """Capture the work issued on `stream`, and on streams that wait for it."""
        with torch_devices.unless_capturing() as is_free:  # From now on captures are counted.
            if not is_free:
                msg = "a step cannot be captured while another CUDA graph is: end that first."
                raise StateError(msg)
        # Other threads, such as the collective library's, may ask the device about earlier work.
        mode, pool = "thread_local", self._module.graph_pool_handle()
        options = {"pool": pool, "stream": stream, "capture_error_mode": mode}
        try:
            # Torch (2.9 to 2.15) does not leave the stream of a capture whose end raises.
            with self.on(self.current_stream()), self._module.graph(graph, **options):
                yield
        except BaseException:
            torch_devices.end_broken_capture(self.device.index, pool)
            raise

    def is_capturing(self) -> bool:
        """Whether work issued on the current stream is captured."""
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and ask()

    # --- memory ---

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the device, 1-D; it belongs to the current stream."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def empty_on_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return memory of the host, 1-D; copies from and to `pinned` memory overlap."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device; it belongs to the current stream."""
        return torch.UntypedStorage(nbytes, device=self.device)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage other memory, or none; the current stream may reuse the old at once."""
        storage.resize_(nbytes)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a small host tensor on the device, other tensors as they are. Blocks the host."""
        return tensor.to(self.device)


def use_own_device(device_type: str, local_rank: str | None = None) -> None:
    """Make the device with the rank's number on its host current, as launchers intend.

    If the rank sees fewer devices, the launcher shows it only its own device, and the current
    device stays. It also stays if the number is not known.

    Args:
        device_type: Type of the device; the host and XLA have no device to choose.
        local_rank: The number; None: LOCAL_RANK of the environment.
    """
    number = os.environ.get("LOCAL_RANK", "") if local_rank is None else local_rank
    if device_type in ("cpu", "xla") or not number.isdecimal():
        return
    module = device_module(device_type)
    if int(number) < module.device_count():
        module.set_device(int(number))


@contextlib.contextmanager
def own_random_numbers(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Draw inside from `seed`, if there is one, without a change of the users' generators."""
    module = None if device.type in ("cpu", "xla") else torch.get_device_module(device)
    devices = [] if module is None else [module.current_device()]
    with torch.random.fork_rng(devices, device_type="cuda" if module is None else device.type):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if module is not None:
                module.manual_seed(seed)
        yield


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerator; None: it has none with streams."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    try:
        device_module(accelerator.type)
    except MeshError:
        return None
    return accelerator.type


def device_module(device_type: str) -> Any:
    """Return torch's module of a device type: ``torch.cuda``, ``torch.xpu``, ``torch.npu``, ...

    Raises:
        MeshError: Torch knows no such accelerator, or it has no streams.
    """
    known = "meshes can be made for 'cpu', 'xla' and accelerators with streams ('cuda', 'xpu', ...)"
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:
        # Common names of accelerators are not similar to any device type.
        found = accelerator_type() or "cuda" if device_type in {"gpu", "accelerator"} else None
        near = nearest(device_type, _DEVICE_TYPES) if found is None else f"Write {found!r}."
        msg = (
            f"unknown device type {device_type!r}. {near} {known[0].upper()}{known[1:]}. If a "
            f"package adds it to torch (torch_npu, ...), import that package first."
        )
        raise MeshError(msg) from None
    if missing := [name for name in _NEEDED if not hasattr(module, name)]:
        msg = (
            f"device type {device_type!r} cannot be sharded over: torch.{device_type} has no "
            f"{missing[0]!r}; {known}."
        )
        raise MeshError(msg)
    return module
