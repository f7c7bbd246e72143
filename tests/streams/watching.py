"""Notes which memory every operator uses on which stream, and lets side streams run late.

A dispatch mode, as ``torch.cuda._sanitizer`` is one. It sees what runs below autograd: operators on
plain tensors, and the collectives of torch.distributed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import typing

import torch
import torch.distributed as dist
from clocks import DEVICE, HOST
from simulated_device import Block, SimulatedEvent, Simulation, label_of_caller
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit._compat import torch_tensors

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_PLAIN = (Tensor, nn.Parameter)
_NO_DATA = {"aten::set_", "aten::resize_", "aten::record_stream"}
_READ_BY_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}
_MAY_COPY = {"aten::to", "aten::contiguous", "aten::reshape", "aten::flatten"}
"""Without autograd they come here as a whole: a view, or a kernel."""
_UNINITIALIZED = ("aten::empty", "aten::new_empty")


@dataclasses.dataclass(frozen=True)
class Issued:
    """Something that was issued, for counts."""

    step: int  # In which step.
    stream: str  # Name of the stream; "the host" for operators on the host's memory.
    op: str  # Name of the operator, without overload.
    writes: tuple[str, ...]  # What memory it writes.
    nbytes: int  # Bytes that it writes.
    is_collective: bool  # It communicates.


class SimulatedWork(dist.Work):
    """A collective of the device under way."""

    def __init__(self, simulation: Simulation, event: SimulatedEvent) -> None:
        super().__init__()
        self._simulation = simulation
        self._event = event

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait."""
        del timeout
        self._simulation.current.wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether it has run."""
        return self._event.query()


@functools.cache
def _written_arguments(func: typing.Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return which arguments an operator writes, by position and by name."""
    written = [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(i for i, _ in written), frozenset(name for _, name in written)


def _tensors(values: typing.Any) -> list[Tensor]:
    """Return the tensors in arguments or results: these hold no other containers."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(value: typing.Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)


@functools.cache
def _is_view(func: typing.Any) -> bool:
    """Whether an operator returns its argument's memory, and neither reads nor writes it."""
    arguments, returns = func._schema.arguments, func._schema.returns
    aliases = [a.alias_info for a in (*arguments, *returns) if a.alias_info is not None]
    is_lift = func._schema.name == "aten::lift_fresh"
    return bool(aliases) and not any(alias.is_write for alias in aliases) and not is_lift


def _in_shardkit() -> bool:
    """Whether the library itself, and not a test, calls an operator."""
    frame = sys._getframe(2)
    while frame is not None and (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return frame is not None and "/shardkit/" in frame.f_code.co_filename


class Watch(TorchDispatchMode):
    """Runs operators as the simulated device would."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation
        self.issued: list[Issued] = []  # What was issued, while `notes` is set.
        self.notes = False  # Whether to keep a list.
        self._thread = threading.get_ident()
        self._is_busy = False
        self._works: list[SimulatedWork] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile compile; it would leave alone what other modes watch."""
        return True

    def __torch_dispatch__(
        self,
        func: typing.Any,
        types: Sequence[type],
        args: tuple[typing.Any, ...] = (),
        kwargs: dict[str, typing.Any] | None = None,
    ) -> typing.Any:
        """Run an operator, or have it run later."""
        kwargs = kwargs or {}
        if func._schema.name in _MAY_COPY and threading.get_ident() == self._thread:
            with self:
                return func.decompose(*args, **kwargs)
        if _is_view(func) and all(cls in _PLAIN for cls in types):
            return func(*args, **kwargs)
        if threading.get_ident() != self._thread or self._is_busy:
            return func(*args, **kwargs)  # An engine's own thread.
        if any(cls not in _PLAIN for cls in types):
            return NotImplemented
        self._is_busy = True
        try:
            if func.namespace == "c10d":
                return self._collective(func, args, kwargs)
            return self._operator(func, args, kwargs)
        finally:
            self._is_busy = False

    # --- operators ---

    def _operator(
        self, func: typing.Any, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]
    ) -> typing.Any:
        name = func._schema.name
        inputs = _tensors((args, kwargs))
        if name in _NO_DATA or any(tensor.device.type != "cpu" for tensor in inputs):
            return func(*args, **kwargs)
        if name == "aten::lift_fresh":
            return self._lift(func, args)
        written = self._written(func, args, kwargs)
        used = {id(t): self.simulation.block_of(t) for t in inputs}
        blocks = [block for block in used.values() if block is not None]
        # The library's random numbers are those of the host's generator, drawn once.
        is_drawn = kwargs.get("generator") is not None and _in_shardkit()
        on_host = is_drawn or self._is_on_host(name, blocks)
        if not written and name in _READ_BY_HOST:
            return self._read(func, args, kwargs, blocks, on_host=on_host)
        if on_host:
            return self._run_on_host(func, args, kwargs, used, written)
        return self._run_on_device(func, args, kwargs, used, written)

    def _written(
        self, func: typing.Any, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]
    ) -> list[Tensor]:
        positions, names = _written_arguments(func)
        values = [args[i] for i in positions if i < len(args)]
        return _tensors(values + [value for name, value in kwargs.items() if name in names])

    def _is_on_host(self, name: str, blocks: Sequence[Block]) -> bool:
        """Whether an operator runs on the host: all that it uses lies there."""
        kinds = {block.kind for block in blocks if not block.is_scalar}
        if kinds == {HOST, DEVICE} and name != "aten::copy_" and not _in_shardkit():
            # A test that compares them; with a card it would bring both to the host.
            self.simulation.synchronize(SimulatedEvent(self.simulation.current), "a test")
            return True
        if kinds == {HOST, DEVICE} and name != "aten::copy_":
            here = " and ".join(str(block) for block in blocks)
            self.simulation.checker.findings.append(
                f"{name} mixes memory of the host and of the device: {here}."
            )
        if not kinds and blocks:
            return True  # Numbers of the host only.
        return kinds == {HOST}

    def _lift(self, func: typing.Any, args: tuple[typing.Any, ...]) -> typing.Any:
        """Numbers that Python had: of the host where the library asks, else a test's data."""
        result = func(*args)
        block = self.simulation.block_of(args[0])
        if block is not None:
            block.is_scalar = args[0].ndim == 0
            if block.is_scalar or _in_shardkit():
                block.kind = HOST
                block.label = "numbers that Python had"
        return result

    def _read(
        self,
        func: typing.Any,
        args: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        blocks: Sequence[Block],
        *,
        on_host: bool,
    ) -> typing.Any:
        """Let the host have a value."""
        simulation = self.simulation
        line = simulation.checker.host
        if not on_host:
            line = simulation.current.line
        simulation.checker.run(line, func._schema.name, blocks, ())
        if not on_host:
            simulation.synchronize(SimulatedEvent(simulation.current), func._schema.name)
        return func(*args, **kwargs)

    def _run_on_host(
        self,
        func: typing.Any,
        args: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        used: dict[int, Block | None],
        written: Sequence[Tensor],
    ) -> typing.Any:
        result = func(*args, **kwargs)
        fresh = self._fresh(result, args, kwargs)
        if not written and not fresh and _tensors(result):
            return result  # A view.
        self._note(func, "the host", used, written)
        writes = [used[id(t)] for t in written]
        reads = [block for key, block in used.items() if key not in {id(t) for t in written}]
        self.simulation.checker.run(
            self.simulation.checker.host,
            func._schema.name,
            [block for block in reads if block is not None],
            [block for block in writes if block is not None],
        )
        return self._own(result, fresh, HOST)

    def _run_on_device(
        self,
        func: typing.Any,
        args: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        used: dict[int, Block | None],
        written: Sequence[Tensor],
    ) -> typing.Any:
        simulation, name = self.simulation, func._schema.name
        stream = simulation.current
        is_late = stream is not simulation.compute or simulation.graph is not None
        if is_late and written:
            returned = tuple(written[: len(func._schema.returns)])
            result = returned if len(returned) > 1 else next(iter(returned), None)
        else:
            result = func(*args, **kwargs)
            fresh = self._fresh(result, args, kwargs)
            if not written and not fresh and _tensors(result):
                return result  # A view.
            result = self._own(result, fresh, DEVICE)
            if name.startswith(_UNINITIALIZED):
                for tensor in _tensors(result):
                    block = simulation.block_of(tensor)
                    if block is not None and block.memory is not None:
                        block.memory.fill(0xFF)
                return result
        self._note(func, stream.line.name, used, written)
        targets = list(written) if written else [t for t in _tensors(result) if t.numel()]
        writes = [block for t in targets if (block := simulation.block_of(t)) is not None]
        written_ids = {id(t) for t in written}
        reads = [b for key, b in used.items() if b is not None and key not in written_ids]
        if name == "aten::copy_":
            args = self._transfer(args, kwargs, used)
        simulation.checker.run(stream.line, name, reads, writes)
        if is_late:
            self._issue_late(func, args, kwargs, targets, writes_arguments=bool(written))
        if name == "aten::copy_" and self._blocks_host(args, kwargs, used):
            simulation.synchronize(SimulatedEvent(stream), "a blocking copy to the host")
        return result

    def _transfer(
        self,
        args: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        used: dict[int, Block | None],
    ) -> tuple[typing.Any, ...]:
        """Return the arguments of a copy: what is not pinned is staged before the call returns."""
        source = used.get(id(args[1])) if isinstance(args[1], Tensor) else None
        if source is None or source.kind != HOST or source.is_scalar:
            return args
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not non_blocking:
            event = SimulatedEvent(self.simulation.current)
            self.simulation.synchronize(event, "a blocking copy to the device")
        if source.is_pinned:
            return args
        if self.simulation.graph is not None:
            self.simulation.graph.refuse("a copy from memory that is not page-locked")
        self.simulation.checker.run(self.simulation.checker.host, "stage", [source], ())
        return (args[0], args[1].clone(), *args[2:])

    def _blocks_host(
        self,
        args: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        used: dict[int, Block | None],
    ) -> bool:
        """Whether a copy to the host returns when it is done: unless pinned and not blocking."""
        target, source = used.get(id(args[0])), used.get(id(args[1]))
        if target is None or target.kind != HOST or source is None or source.kind != DEVICE:
            return False
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return not (non_blocking and target.is_pinned)

    def _issue_late(
        self,
        func: typing.Any,
        args: tuple[typing.Any, ...],
        kwargs: dict[str, typing.Any],
        targets: Sequence[Tensor],
        *,
        writes_arguments: bool,
    ) -> None:
        simulation = self.simulation
        call_args, call_kwargs = pytree.tree_map_only(Tensor, simulation.alias, (args, kwargs))
        into = [simulation.alias(target) for target in targets]
        if not writes_arguments:
            for target in into:
                if target.is_contiguous():
                    target.view(-1).view(torch.uint8).fill_(0xFF)

        def run() -> None:
            with torch.no_grad(), torch_tensors.preserve_versions(into), _unwatched():
                result = func(*call_args, **call_kwargs)
                if not writes_arguments:
                    values = [value for value in _tensors(result) if value.numel()]
                    for target, value in zip(into, values, strict=True):
                        target.copy_(value)

        simulation.current.issue(run)

    def _fresh(
        self, result: typing.Any, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]
    ) -> list[Tensor]:
        """Return the tensors of a result that lie in memory of their own."""
        storages = {t.untyped_storage()._cdata for t in _tensors((args, kwargs)) if _has_storage(t)}
        return [
            tensor
            for tensor in _tensors(result)
            if _has_storage(tensor) and tensor.untyped_storage()._cdata not in storages
        ]

    def _own(self, result: typing.Any, fresh: Sequence[Tensor], kind: str) -> typing.Any:
        """Return a result whose fresh tensors lie in memory made by the simulation."""
        if not fresh:
            return result
        label = label_of_caller()
        if isinstance(result, Tensor):
            return self.simulation.copy_of(result, label, kind)
        ids = {id(tensor) for tensor in fresh}
        return pytree.tree_map_only(
            Tensor,
            lambda t: self.simulation.copy_of(t, label, kind) if id(t) in ids else t,
            result,
        )

    def _note(
        self,
        func: typing.Any,
        stream: str,
        used: dict[int, Block | None],
        written: Sequence[Tensor],
        *,
        is_collective: bool = False,
    ) -> None:
        if self.simulation.graph is not None and stream != "the host":
            self.simulation.graph.use(used.values())
        if self.notes:
            blocks = [used.get(id(t)) for t in written]
            labels = tuple(block.label for block in blocks if block is not None)
            name = func._schema.name.split("::")[1]
            nbytes = sum(t.nbytes for t in written)
            step = self.simulation.step
            self.issued.append(Issued(step, stream, name, labels, nbytes, is_collective))

    # --- collectives ---

    def _collective(
        self, func: typing.Any, args: tuple[typing.Any, ...], kwargs: dict[str, typing.Any]
    ) -> typing.Any:
        simulation = self.simulation
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        used = {id(t): simulation.block_of(t) for t in _tensors(list(given.values()))}
        blocks = [block for block in used.values() if block is not None]
        if blocks and all(block.kind == HOST for block in blocks):
            simulation.checker.run(simulation.checker.host, func._schema.name, blocks, blocks)
            if not simulation.has_host_engine:  # The device's engine keeps the order of issue.
                simulation.run_all()
            return func(*args, **kwargs)
        group = dist.ProcessGroup.unbox(given["process_group"])
        reads = [v for k, v in given.items() if "input" in k]
        writes = [v for k, v in given.items() if "input" not in k]
        read, written = _tensors(reads), _tensors(writes)
        is_async = bool(given.get("async_op", True))
        issuing = simulation.current
        stream = simulation.new_stream(f"a stream of {group.group_name}") if is_async else issuing
        if is_async:
            stream.wait_event(SimulatedEvent(issuing))
        self._note(func, stream.line.name, used, written, is_collective=True)
        simulation.checker.run(
            stream.line,
            func._schema.name,
            [b for t in read if (b := used[id(t)]) is not None],
            [b for t in written if (b := used[id(t)]) is not None],
        )
        call = pytree.tree_map_only(Tensor, simulation.alias, (args, kwargs))
        run = functools.partial(_run_collective, func, *call)
        with simulation.on(stream):
            simulation.run_in_order(run)
        work = SimulatedWork(simulation, SimulatedEvent(stream))
        self._works.append(work)  # Torch holds what is not Python's of it.
        boxed = work.boxed()
        if len(func._schema.returns) == 1:
            return boxed
        first = given[names[0]]
        return (first, boxed)


def _run_collective(
    func: Callable[..., typing.Any], args: typing.Any, kwargs: dict[str, typing.Any]
) -> None:
    """Run a collective now and wait for it."""
    # Those that are made in inference mode have no version.
    tensors = [tensor for tensor in _tensors((args, kwargs)) if not tensor.is_inference()]
    with torch.no_grad(), torch_tensors.preserve_versions(tensors), _unwatched():
        result = func(*args, **kwargs)
        work = result[-1] if isinstance(result, tuple) else result
        dist.Work.unbox(work).wait()


def _unwatched() -> typing.Any:
    from torch.utils import _python_dispatch

    return _python_dispatch._disable_current_modes()


def _has_storage(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided
