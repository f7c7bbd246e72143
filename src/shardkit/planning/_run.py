"""A training run without computation: two steps of one rank on meta, and their memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardkit._compat.torch_autograd import optimizers_on_meta
from shardkit._errors import ConfigError, OptimizerError
from shardkit._events import observed_by
from shardkit._module.fsdp_module import FSDPModule
from shardkit._module.hooks import groups_in
from shardkit._text import dtype_name, listed
from shardkit._tree import iter_tensors, map_tensors
from shardkit._wrapping.activations import checkpoint_activations
from shardkit._wrapping.auto_shard import auto_shard
from shardkit.backends.dry import dry_world, init_dry_mesh, is_on_host
from shardkit.planning._autocast import Autocast
from shardkit.planning._kernels import (
    fused_attention,
    seen_random_states,
    switch_cache_off,
    transformers_without_values,
)
from shardkit.planning._meter import MemoryMeter
from shardkit.planning._recurrent import recurrent_layers

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Run:
    """The arguments of `plan`, as they are meant. `dataclasses.replace` makes variants."""

    model: nn.Module
    batch: tuple[Any, ...] | dict[str, Any]  # Inputs by position or by name, on meta.
    mesh: tuple[int, ...]
    device: str = "cuda"
    rank: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None
    # Options of `checkpoint_activations`; None: nothing is recomputed.
    recompute: Mapping[str, Any] | None = None
    optimizer: MakeOptimizer | None = torch.optim.AdamW
    loss: Callable[[Any], Tensor] | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether ranks are on CPUs, with gloo."""
        return self.device == "cpu"


def copied(run: Run) -> tuple[nn.Module, dict[str, Any]]:
    """Return copies of a run's model, on meta, and of its options, which refer to that copy.

    Raises:
        ConfigError: Something in them cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*run.model.parameters(), *run.model.buffers()):
        empty = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        is_param = isinstance(tensor, nn.Parameter)
        made = nn.Parameter(empty, tensor.requires_grad) if is_param else empty
        made.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = made
    try:
        found: tuple[nn.Module, dict[str, Any]] = copy.deepcopy((run.model, {**run.options}), memo)
    except Exception as error:
        msg = (
            f"a plan shards a copy of the model, and copy.deepcopy of this "
            f"{type(run.model).__name__} and the options raises {type(error).__name__}: {error}. "
            f"Plan with a model that holds nothing of this kind (locks, open files, outputs of a "
            f"forward), or give its class a __deepcopy__."
        )
        raise ConfigError(msg) from error
    return found


def batch_on_meta(batch: Any) -> tuple[Any, ...] | dict[str, Any]:
    """Return a batch as the arguments of a model, on meta."""
    moved = map_tensors(functools.partial(torch.empty_like, device="meta"), batch)
    if isinstance(moved, Mapping):
        return dict(moved)
    return tuple(moved) if isinstance(moved, (tuple, list)) else (moved,)


@torch.inference_mode(mode=False)
@torch.enable_grad()
def dry_run(run: Run, *, is_timed: bool = False) -> MemoryMeter:
    """Shard a copy of the model and make two steps, of which the second is like all that follow.

    The steps train, also where gradients are off around this call. If they are timed, operators are
    recorded, for `time_of`.

    Returns:
        The records of the second step.

    Raises:
        ConfigError: An operator of the model needs values, which tensors on meta lack; or the model
            cannot be copied.
        StateError: This process has a process group.
    """
    model, options = copied(run)
    meter = MemoryMeter(on_cpu=run.on_cpu, is_timed=is_timed)
    world = dry_world(math.prod(run.mesh), run.rank, has_streams=not run.on_cpu)
    as_on_device = optimizers_on_meta(on_cpu=run.on_cpu)
    with world, meter, observed_by(meter.observer), as_on_device:
        names = ("replicate", "shard")[-len(run.mesh) :]
        mesh = init_dry_mesh(run.mesh, names)
        # One number for each value that ranks compare, and the scalars that C++ makes.
        meter.born(8 * len([*model.parameters()]) + 512, "buffers", "scalars")
        if run.recompute is not None:
            switch_cache_off(model)  # A repetition would write to it.
            checkpoint_activations(model, **run.recompute)
        if run.shard is not None:
            run.shard(model, mesh)
        else:
            auto_shard(model, mesh=mesh, **options)
        batch = map_tensors(torch.empty_like, run.batch)
        for tensor in iter_tensors(batch):
            meter.label(tensor, "batch", "batch")
        # Buffers, and parameters that no group has, were made before the meter came.
        named = {"buffers": model.named_buffers(), "parameters": model.named_parameters()}
        for kind, tensors in named.items():
            for name, tensor in tensors:
                meter.note(_local(tensor))
                meter.label(_local(tensor), kind, name)
        optimizer = _optimizer(run, model)
        made = getattr(optimizer, "optimizer_class", type(optimizer))  # The one that steps.
        meter.in_torch_optim = made.__module__.startswith("torch.optim")
        autocast = Autocast(run.device)
        with (
            _named_modules(model, meter),
            autocast.on_meta(),
            fused_attention(autocast.lowered, on_cpu=run.on_cpu),
            transformers_without_values(),
            seen_random_states(meter.note) if run.on_cpu else contextlib.nullcontext(),
            recurrent_layers() if run.on_cpu else contextlib.nullcontext(),
            _explained(meter),
            torch.autograd.set_detect_anomaly(False),  # Its checks read values.
        ):
            _two_steps(run, model, optimizer, batch, meter)
        meter.padding_nbytes = _padding_nbytes(model)
        meter.param_dtypes = tuple(sorted({dtype_name(p.dtype) for p in model.parameters()}))
    return meter


def _local(tensor: Any) -> Tensor:
    while hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    found: Tensor = tensor
    return found.detach()


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer | None:
    if run.optimizer is None:
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        msg = "a plan is of a training step, and no parameter of the model requires a gradient."
        raise ConfigError(msg)
    optimizer = run.optimizer(trained)
    if not hasattr(optimizer, "param_groups"):
        msg = (
            f"optimizer must be a function of parameters that returns an optimizer; it returned an "
            f"object of type {type(optimizer).__name__}."
        )
        raise ConfigError(msg)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        msg = (
            f"a plan makes one forward and backward a step, and {type(optimizer).__name__} makes "
            f"as many as it wants: its step needs a closure. Plan with optimizer=None, and add "
            f"its state."
        )
        raise ConfigError(msg)
    return optimizer


def _two_steps(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    meter: MemoryMeter,
) -> None:
    """Make two steps as a plain loop does, where names keep the last output until the next one."""
    for _ in range(2):
        meter.begin_step()
        for left in reversed(range(run.accumulate)):
            if run.accumulate > 1 and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(not left)
            with torch.autocast(run.device, run.autocast, enabled=run.autocast is not None):
                output = _forward(model, batch)
                loss = _loss_of(run, output)
            loss.backward()
        names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        for param, name in names.items():
            if param.grad is not None:
                meter.label(_local(param.grad), "gradients", name)
        if optimizer is not None:
            optimizer.step()
            for key, state in optimizer.state.items():
                # Some optimizers keep other state under a key that is no parameter.
                host = key in names and is_on_host(_local(key).untyped_storage())
                for tensor in iter_tensors(state):
                    name = names.get(key, "?")
                    meter.label(_local(tensor), "optimizer state", name, on_host=host)
        (model if optimizer is None else optimizer).zero_grad()


def _forward(model: nn.Module, batch: Any) -> Any:
    """Return the model's output; an error in its forward also says what the batch was."""
    try:
        return model(**batch) if isinstance(batch, dict) else model(*batch)
    except Exception as error:
        tensors = listed(iter_tensors(batch), lambda each: f"{tuple(each.shape)} of {each.dtype}")
        error.add_note(f"while a plan ran the model's forward with this batch: {tensors}")
        raise


def _loss_of(run: Run, output: Any) -> Tensor:
    if run.loss is not None:
        made: object = run.loss(output)
        if not isinstance(made, Tensor):
            msg = f"loss returned {made!r} for the model's output. Return the loss, a tensor."
            raise ConfigError(msg)
        return made
    if isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and hasattr(output, "loss"):
        msg = (
            f"the loss in the model's {type(output).__name__} is None, as in transformers without "
            f"labels. Add labels to the batch, or pass loss=, a function of the model's output."
        )
        raise ConfigError(msg)
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
    """Report to a meter which module's forward is under way."""
    names = {module: name or "the root" for name, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        del args
        meter.modules.append(names.get(module, type(module).__name__))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if meter.modules:
            meter.modules.pop()

    with (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ):
        yield


@contextlib.contextmanager
def _explained(meter: MemoryMeter) -> Iterator[None]:
    """Name the module, or the optimizer, if it needs values or a tensor that is not on meta.

    Raises:
        ConfigError: An operator does.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError, TypeError, OptimizerError) as error:
        text = str(error).rstrip(".! \n")
        where = f"the forward of {meter.failed}" if meter.failed else "the model, or its loss,"
        if "meta" not in text.lower():
            raise
        msg = (
            f"a plan computes nothing, and {where} needs values: {text}. Plan with a model that "
            f"does not decide by values, for example with experts of a fixed capacity."
        )
        if "expected device" in text:
            msg = (
                f"a plan computes on meta, and {where} has a tensor elsewhere: {text}. Make it "
                f"a buffer of the model (register_buffer)."
            )
        if meter.observer.phase == "optimizer":
            msg = (
                f"a plan computes nothing, and a step of the optimizer needs values, or a device "
                f"other than meta: {text}. Plan with an optimizer that has as much state, such as "
                f"torch.optim.AdamW, or torch.optim.SGD with momentum."
            )
        raise ConfigError(msg) from error


def _padding_nbytes(model: nn.Module) -> int:
    """Return the bytes of this rank's shards that belong to no parameter."""
    padding = 0
    for group in groups_in(model, recurse=True):
        for bucket in group.buckets:
            layout, rank = bucket.store.layout, bucket.plan.axis.rank
            ranges = [layout.owned_range(index, rank) for index in range(len(bucket.entries))]
            owned = sum(stop - start for start, stop in ranges)
            padding += bucket.store.shard_nbytes - owned * bucket.plan.orig_dtype.itemsize
    return padding
