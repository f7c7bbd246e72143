"""A training run that computes nothing: two steps of one rank on meta, and what they held."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from shardkit._errors import ConfigError
from shardkit._events import observe
from shardkit._module.fsdp_module import FSDPModule
from shardkit._module.hooks import get_state
from shardkit._tree import iter_tensors, map_tensors
from shardkit._wrapping.activations import checkpoint_activations
from shardkit._wrapping.auto_shard import auto_shard
from shardkit.backends.dry import dry_world, init_dry_mesh, is_on_host
from shardkit.planning._kernels import (
    fused_attention,
    seen_random_states,
    without_packed_sequences,
)
from shardkit.planning._meter import MemoryMeter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit._mesh import DeviceMesh

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Run:
    """What is trained, and how. `dataclasses.replace` makes variants.

    Attributes:
        model: Model on meta; each dry run takes a copy.
        batch: Inputs of the model on meta, positional or by name: one micro-batch of a rank.
        mesh: Size of each axis: (shard,) or (replicate, shard).
        device: Type of the devices: ``cpu``, or an accelerator.
        rank: Number of the rank.
        options: Options of `auto_shard`.
        shard: Function of model and mesh that shards, in the place of `auto_shard`.
        recompute: Options of `checkpoint_activations`; None: nothing is computed again.
        optimizer: Function that makes the optimizer of parameters; None: there is none.
        loss: Function of the model's output that returns the loss.
        accumulate: Number of micro-batches of a step.
    """

    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]
    mesh: tuple[int, ...]
    device: str = "cuda"
    rank: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None
    recompute: Mapping[str, Any] | None = None
    optimizer: MakeOptimizer | None = torch.optim.AdamW
    loss: Callable[[Any], Tensor] | None = None
    accumulate: int = 1

    @property
    def on_cpu(self) -> bool:
        """Whether ranks are gloo's on CPUs."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a dry run saw.

    Attributes:
        meter: Records of memory, collectives and events.
        begin: Position at which the second step began.
        first_collective: Number of collectives before that.
        padding_nbytes: Bytes of this rank's shards that belong to no parameter.
        num_params: Number of elements of all parameters.
    """

    meter: MemoryMeter
    begin: int
    first_collective: int
    padding_nbytes: int
    num_params: int


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are on meta; those it has stay."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        made = nn.Parameter(empty, tensor.requires_grad) if _is_param(tensor) else empty
        made.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = made
    result: nn.Module = copy.deepcopy(module, memo)
    return result


def _is_param(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def batch_on_meta(batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Return a batch as the arguments of a model, on meta."""
    moved = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), batch)
    if isinstance(moved, Mapping):
        return dict(moved)
    return tuple(moved) if isinstance(moved, (tuple, list)) else (moved,)


def dry_run(run: Run, *, is_timed: bool = False) -> DryRun:
    """Shard a copy of the model and make two steps, of which the second is as all that follow.

    Args:
        run: Run to make.
        is_timed: Whether operators are recorded, for `time_of`.

    Raises:
        ConfigError: An operator of the model needs values, which tensors on meta have not.
        StateError: This process has a process group.
    """
    model = on_meta(run.model)
    meter = MemoryMeter(on_cpu=run.on_cpu, is_timed=is_timed)
    world = dry_world(math.prod(run.mesh), run.rank, has_streams=not run.on_cpu)
    with world, meter, observe(meter.told, meter.clock) as observer:
        names = ("replicate", "shard")[-len(run.mesh) :]
        mesh = init_dry_mesh(run.mesh, names)
        num_params = sum(param.numel() for param in model.parameters())
        # A number of each value that ranks compare, and what C++ makes of Python's numbers.
        meter.hold(8 * len([*model.parameters()]) + 64, "scalars")
        _shard(run, model, mesh)
        batch = map_tensors(_copied, run.batch)
        for tensor in iter_tensors(batch):
            meter.label(tensor, "batch", "batch")
        for name, buffer in model.named_buffers():
            meter.label(buffer, "buffers", name)
        for name, param in model.named_parameters():
            meter.label(_local(param), "parameters", name)
        optimizer = None if run.optimizer is None else _optimizer(run, model)
        step = _Step(run, model, optimizer, batch)
        with (
            _named_modules(model, meter),
            fused_attention(on_cpu=run.on_cpu),
            without_packed_sequences(),
            seen_random_states(meter.note) if run.on_cpu else contextlib.nullcontext(),
            _explained(meter),
        ):
            observer.tell("step", "1")
            step.run(meter)
            begin, first = meter.position, len(meter.collectives)
            observer.tell("step", "2")
            step.run(meter)
            step.drop()
        padding = _padding_nbytes(model)
    return DryRun(meter, begin, first, padding, num_params)


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def _local(tensor: Any) -> Tensor:
    while hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    found: Tensor = tensor
    return found.detach()


def _is_offloaded(param: Any) -> bool:
    return is_on_host(_local(param).untyped_storage())


def _shard(run: Run, model: nn.Module, mesh: DeviceMesh) -> None:
    if run.recompute is not None:
        checkpoint_activations(model, **run.recompute)
    if run.shard is not None:
        run.shard(model, mesh)
    else:
        auto_shard(model, mesh=mesh, **run.options)


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    assert run.optimizer is not None
    optimizer = run.optimizer([p for p in model.parameters() if p.requires_grad])
    for group in optimizer.param_groups:
        # What torch chooses on an accelerator, it does not on meta.
        if not run.on_cpu and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


class _Step:
    """A step as a plain loop makes it: names keep the last output until the next one is there."""

    def __init__(
        self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any
    ) -> None:
        self._run = run
        self._model = model
        self._optimizer = optimizer
        self._batch = batch
        self._output: Any = None
        self._loss: Any = None

    def run(self, meter: MemoryMeter) -> None:
        """Make the step."""
        for number in range(self._run.accumulate):
            if self._run.accumulate > 1 and isinstance(self._model, FSDPModule):
                is_last = number == self._run.accumulate - 1
                self._model.set_requires_gradient_sync(is_last)
            self._output = self._forward()
            self._loss = self._loss_of(self._output)
            self._loss.backward()
        params = list(self._model.named_parameters())
        for name, param in params:
            if param.grad is not None:
                meter.label(_local(param.grad), "gradients", name)
        if self._optimizer is None:
            self._model.zero_grad()
            return
        self._optimizer.step()
        names = {id(param): name for name, param in params}
        for key, state in self._optimizer.state.items():
            name, host = names.get(id(key), "?"), _is_offloaded(key)
            for tensor in iter_tensors(state):
                meter.label(_local(tensor), "optimizer state", name, on_host=host)
        self._optimizer.zero_grad()

    def drop(self) -> None:
        """Let the last output go."""
        self._output = self._loss = None

    def _forward(self) -> Any:
        if isinstance(self._batch, dict):
            return self._model(**self._batch)
        return self._model(*self._batch)

    def _loss_of(self, output: Any) -> Tensor:
        if self._run.loss is not None:
            return self._run.loss(output)
        found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if found is None:
            found = next((t for t in iter_tensors(output) if t.requires_grad), None)
        if found is None:
            msg = (
                "the model returns no tensor that requires a gradient, so a plan knows no loss. "
                "Pass loss=, a function of the model's output."
            )
            raise ConfigError(msg)
        return found if found.dim() == 0 else found.sum()


@contextlib.contextmanager
def _named_modules(model: nn.Module, meter: MemoryMeter) -> Iterator[None]:
    """Tell a meter which module's forward is under way."""
    names = {module: name or "the root" for name, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        del args
        meter.modules.append(names.get(module, type(module).__name__))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if meter.modules:
            meter.modules.pop()

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _explained(meter: MemoryMeter) -> Iterator[None]:
    """Say where an operator needs values, or a tensor that is not on meta.

    Raises:
        ConfigError: One does.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError, TypeError) as error:
        text, where = str(error), meter.failed or "the model"
        if "meta" not in text.lower():
            raise
        msg = (
            f"a plan computes nothing, and the forward of {where} needs values: {text}. Plan "
            f"with a model that does not decide by values, for example with experts of a fixed "
            f"capacity."
        )
        if "expected device" in text:
            msg = (
                f"a plan computes on meta, and the forward of {where} has a tensor elsewhere: "
                f"{text} Make it a buffer of the model (register_buffer)."
            )
        raise ConfigError(msg) from error


def _padding_nbytes(model: nn.Module) -> int:
    """Return the bytes of this rank's shards that no parameter has."""
    states = [get_state(module) for module in model.modules()]
    groups = dict.fromkeys(s.group for s in states if s is not None and s.group is not None)
    padding = 0
    for group in groups:
        for bucket in group.buckets:
            layout, rank = bucket.store.layout, bucket.plan.axis.rank
            owned = 0
            for index in range(len(bucket.entries)):
                start, stop = layout.owned_range(index, rank)
                owned += stop - start
            padding += bucket.store.shard_nbytes - owned * bucket.plan.orig_dtype.itemsize
    return padding
