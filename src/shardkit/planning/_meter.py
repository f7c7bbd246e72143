"""Records of a dry run: every storage from its first operator to its end, and every operator.

A mode sees operators and their results, and weak references report when memory is free. Buffers
keep one storage while their memory comes and goes, so events report it (`take`, `return`). Nothing
is evaluated during the run: what existed at an instant is computed from the records afterwards.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit._compat.torch_autograd import is_from_engine
from shardkit._events import StepEvent, StepObserver
from shardkit._text import dtype_name
from shardkit._tree import iter_tensors, map_tensors
from shardkit.backends.dry import is_on_host, size_of_group
from shardkit.planning._cpu_kernels import AS_LARGE_AS_INPUT, scratch_on_cpu
from shardkit.planning._kernels import flops_of, kernel_of, scratch_on_cuda

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True, eq=False)
class HeldMemory:
    """A piece of memory."""

    nbytes: int
    kind: str  # Kind of its content, such as ``activations``; corrected when more is known.
    name: str  # Name of the module, parameter or group to which it belongs.
    born: int  # Position in the run at which it was allocated.
    died: int | None = None  # Position at which it was freed; None: it was not freed.
    on_host: bool = False  # Whether it is memory of the host, while the device has its own.
    # Names of all parts of its content, in order: a shard holds many parameters.
    labels: dict[str, None] = field(default_factory=dict)
    # Memory whose place it has, which was not freed then; None: it was allocated.
    takes_over: HeldMemory | None = None


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """A collective that was issued."""

    op: str  # Name of the collective, such as ``all_gather``.
    nbytes: int  # Bytes of the whole tensor that is gathered, scattered or reduced.
    num_ranks: int


class Operator(NamedTuple):
    """An operator that computes something; views do not count."""

    after: int  # Number of starts and ends of events that came before it.
    kind: str  # Kind of the operator: ``product`` or a kind in `HardwareProfile.memory`.
    dtype: str  # Name of the dtype of the result.
    flops: int  # Number of floating-point operations; 0 except for products and attention.
    nbytes: int  # Bytes of inputs and results.
    owner: str  # Name of the module, or of the part of the step.
    is_again: bool  # Whether it belongs to a recompute.


_FUNCTION_NAMES = (
    "exp gelu silu tanh sigmoid erf pow _softmax _log_softmax native_layer_norm native_group_norm "
    "sin cos log sqrt rsqrt softplus native_dropout bernoulli random normal uniform topk sort elu"
)
_FUNCTIONS = frozenset(
    f"{name}{suffix}"
    for name in _FUNCTION_NAMES.split()
    for suffix in ("", "_", "_backward", "_backward_data")
)
"""Operators with much computation for each element."""

_MADE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "set_", "resize_"})
"""Operators that allocate memory and write nothing."""

_WITH_A_TEMPORARY = "allgather_base"
"""Collective that gloo carries out in a temporary, from which it copies the result."""

_WRITTEN_IN_PLACE = frozenset({"add", "scatter_add", "scatter", "index_put", "put"})
"""Operators for which formulas of backward write into their first input unless a mode is on."""


def _nothing(tensor: Tensor) -> Tensor:
    """Return an argument for a collective in place of a tensor on meta."""
    return torch.empty(0, dtype=tensor.dtype) if tensor.is_meta else tensor


class MemoryMeter(TorchDispatchMode):
    """Records memory and collectives of the code that runs inside of it."""

    def __init__(self, *, on_cpu: bool, is_timed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_cpu = on_cpu  # Whether the memory is the CPU's.
        self._is_timed = is_timed  # Whether operators are recorded.
        self.memories: list[HeldMemory] = []  # Records of all memory, in the order of birth.
        # Records of the collectives of the step, in the order of issue.
        self.collectives: list[IssuedCollective] = []
        # Records of its operators that compute, in order, if they are recorded.
        self.operators: list[Operator] = []
        self.events: list[StepEvent] = []  # Events that the core reported in it.
        # Observer that delivers the events, for `observed_by`; its times are positions.
        self.observer = StepObserver(self._told, lambda: float(self.position))
        self.position = 0  # Number of allocations and frees so far.
        self.begin = 0  # Position at which the step began.
        # Names of the modules whose forward is under way, the innermost last.
        self.modules: list[str] = []
        self.in_torch_optim = False  # Whether the optimizer that steps is one of torch.
        # Name of the module in which an operator raised; None: none did.
        self.failed: str | None = None
        self.padding_nbytes = 0  # Bytes of the rank's shards that belong to no parameter.
        self.param_dtypes: tuple[str, ...] = ()  # Names of the dtypes of parameters.
        self._alive: dict[int, tuple[HeldMemory | None, Any]] = {}
        self._taken: defaultdict[str, list[HeldMemory]] = defaultdict(list)
        self._spare: defaultdict[int, deque[HeldMemory]] = defaultdict(deque)
        self._summed: tuple[HeldMemory, HeldMemory] | None = None

    def begin_step(self) -> None:
        """Record a step from now on. Of what came before only the memory counts."""
        self.begin = self.position
        self.observer.forget([event.group for event in self.observer.under_way])
        del self.collectives[:], self.operators[:], self.events[:]

    # --- what runs ---

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and record its results."""
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return func(*args, **(kwargs or {}))  # DTensor only computes shapes.
        if any(kind is not Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # Its inner operators come here again.
        if func.namespace in {"c10d", "_c10d_functional"}:
            self._issued(func, args)
        if func.namespace == "c10d":
            try:
                return func(*args, **(kwargs or {}))
            except NotImplementedError:  # torch 2.9 has none of them on meta, 2.13 some.
                return func(*map_tensors(_nothing, args), **map_tensors(_nothing, kwargs or {}))
        in_torch_optim = self.in_torch_optim and self.observer.phase == "optimizer"
        run = kernel_of(func, args, in_torch_optim=in_torch_optim, on_cpu=self._on_cpu)
        try:
            out = run(*args, **(kwargs or {}))
        except (NotImplementedError, RuntimeError):
            self.failed = self.modules[-1] if self.modules else None
            raise
        self._ran(func, args, kwargs or {}, out)
        return out

    def _ran(self, func: Any, args: Any, options: Any, out: Any) -> None:
        """Record an operator, its results, and memory that it took while it ran."""
        name = func.overloadpacket.__name__
        tensors = (out,) if isinstance(out, Tensor) else tuple(iter_tensors(out))
        self._computed(func, args, options, tensors)
        is_buffer = func is torch.ops.aten.set_.source_Storage_storage_offset
        if self._on_cpu and name in AS_LARGE_AS_INPUT:
            storage = tensors[0].untyped_storage()
            storage.resize_(max(storage.nbytes(), args[0].nbytes))
        for tensor in tensors:
            self.note(tensor, is_buffer=is_buffer)
        scratch = scratch_on_cpu if self._on_cpu else scratch_on_cuda
        for nbytes in filter(None, scratch(name, args, options, tensors)):
            self._die(self.born(nbytes, *self._owner()))
        if name in _WRITTEN_IN_PLACE and is_from_engine():
            self._note_sum(args[0], out)

    def _computed(self, func: Any, args: Any, options: Any, results: tuple[Tensor, ...]) -> None:
        """Record an operator, unless it computes nothing or is a part of a collective."""
        if not self._is_timed or self.observer.is_within("wait"):
            return
        name = func.overloadpacket.__name__
        is_new = any(t.untyped_storage()._cdata not in self._alive for t in results)  # noqa: SLF001
        is_written = name.endswith("_") or name.startswith("_foreach") or "out" in options
        if name in _MADE or not (is_new or is_written):
            return
        tensors = [*iter_tensors((args, options)), *(results if is_new else ())]
        if not tensors:
            return
        last = results[0] if results else tensors[0]
        flops = flops_of(func, args, options, results)
        kind = "new" if is_new else "in_place"
        if flops:
            kind = "product"
        elif is_on_host(last.untyped_storage()):
            kind = "host"
        elif name in _FUNCTIONS:
            kind = "function"
        dtype, nbytes = dtype_name(last.dtype), sum(t.nbytes for t in tensors)
        is_again = self.observer.phase == "backward" and bool(self.modules)
        owner = self._owner()[1]
        done = Operator(self.observer.position, kind, dtype, flops, nbytes, owner, is_again)
        self.operators.append(done)

    def note(self, tensor: Tensor, *, is_buffer: bool = False) -> None:
        """Record a storage if it is new; events report the memory of buffers instead."""
        storage, memory = tensor.untyped_storage(), None
        key = storage._cdata  # noqa: SLF001 - the only name of a storage's address
        if key in self._alive:
            return
        if not is_buffer:
            memory = self.born(storage.nbytes(), *self._owner())
            memory.on_host = is_on_host(storage)

        def end(_: Any) -> None:
            del self._alive[key]
            if memory is not None:
                self._die(memory)

        self._alive[key] = (memory, weakref.ref(storage, end))

    def _note_sum(self, first: Tensor, out: Tensor) -> None:
        """Note what the engine writes into a gradient in place if nobody else has it, as a sum.

        That is so without a mode; with one it makes a new tensor. Nobody else had a tensor that is
        freed at once. A view shares its memory with the tensor that it is a view of.
        """
        if first._is_view():  # noqa: SLF001
            return
        part, total = (
            self._alive.get(each.untyped_storage()._cdata, (None, None))[0]  # noqa: SLF001
            for each in (first, out)
        )
        if part is not None and total is not None and part.nbytes == total.nbytes:
            self._summed = part, total

    def _owner(self) -> tuple[str, str]:
        """Return the kind and the owner of new memory."""
        phase, computing = self.observer.phase, None
        for event in reversed(self.observer.under_way):
            if event.kind == "wait":
                return "collectives", event.name
            if event.kind == "compute":
                computing = event
                break
        if phase == "optimizer":
            return "temporaries", "optimizer"
        if phase == "forward" or (computing is not None and computing.phase == "recompute"):
            return "activations", self.modules[-1] if self.modules else "outside of modules"
        return "temporaries", "backward" if computing is None else f"backward of {computing.name}"

    def born(self, nbytes: int, kind: str, name: str) -> HeldMemory:
        """Record memory that exists from now on."""
        self.position += 1
        memory = HeldMemory(nbytes, kind, name, self.position)
        self.memories.append(memory)
        return memory

    def _die(self, memory: HeldMemory) -> None:
        if self._summed is not None:
            (part, total), self._summed = self._summed, None
            if part is memory and total.born == self.position:
                total.takes_over, part.died = part, total.born
                return
        self.position += 1
        memory.died = self.position

    def _issued(self, func: Any, args: Any) -> None:
        """Record a collective, with the bytes of its largest argument or of its result."""
        name = func.__name__.partition(".")[0].strip("_")
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), args[-1])
        if not isinstance(group, (torch.ScriptObject, str)):
            return  # A wait, for example.
        size = size_of_group(group)
        nbytes = max(sum(tensor.nbytes for tensor in iter_tensors(arg)) for arg in args)
        if isinstance(group, str) and name.startswith("all_gather"):  # One of DTensor.
            nbytes *= size
        self.collectives.append(IssuedCollective(name, nbytes, size))
        if self._on_cpu and name == _WITH_A_TEMPORARY:
            self._die(self.born(nbytes, *self._owner()))

    # --- what the core reports ---

    def _told(self, event: StepEvent) -> None:
        """Receive an event."""
        self.events.append(event)
        nbytes = event.nbytes
        before = None
        if event.kind in {"take", "free"}:
            before = self._spare[nbytes].popleft()
        elif event.kind == "return":
            before = self._taken[event.name].pop()
        if before is not None:
            self._die(before)
        if event.kind in {"allocate", "return"}:
            after = self.born(nbytes, "spare buffers", "kept for reuse")
            self._spare[nbytes].append(after)
        elif event.kind == "take":
            kind, _, name = event.name.partition(" ")
            after = self.born(nbytes, kind, name)
            self._taken[event.name].append(after)
        else:
            return
        if before is not None:
            after.takes_over = before

    # --- what is known later ---

    def label(self, tensor: Tensor, kind: str, name: str, *, on_host: bool | None = None) -> None:
        """Label memory that exists now; memory of buffers is ignored."""
        storage = tensor.untyped_storage()
        memory, _ = self._alive.get(storage._cdata, (None, None))  # noqa: SLF001
        if memory is None:
            return
        if memory.kind != kind:
            memory.labels.clear()
        memory.labels[name] = None
        first, num_others = next(iter(memory.labels)), len(memory.labels) - 1
        memory.kind, memory.name = kind, f"{first} and {num_others} more" if num_others else first
        if on_host is not None:
            memory.on_host = on_host

    def peak_nbytes(self, kind: str | None = None, *, on_host: bool = False) -> int:
        """Return the most bytes at one time in the step, of one kind or of all kinds."""
        return max(self.totals(kind, on_host=on_host)[self.begin :])

    def totals(self, kind: str | None = None, *, on_host: bool = False) -> list[int]:
        """Return the bytes that existed after each position, of one kind or of all kinds."""
        changes = [0] * (self.position + 1)
        for memory in self.memories:
            if memory.on_host == on_host and kind in {None, memory.kind}:
                changes[memory.born] += memory.nbytes
                if memory.died is not None:
                    changes[memory.died] -= memory.nbytes
        return list(itertools.accumulate(changes))

    def at(self, position: int) -> list[HeldMemory]:
        """Return the memory of the device that existed after a position."""
        return [
            m
            for m in self.memories
            if not m.on_host and m.born <= position and (m.died is None or m.died > position)
        ]
