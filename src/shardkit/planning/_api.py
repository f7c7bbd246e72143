"""`plan`: the memory and traffic of a run, before it is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import ConfigError
from shardkit._module.checks import check_kinds, checked_ignored, find_params
from shardkit._settings import refuse_non_functions, refuse_texts
from shardkit._text import byte_size, read_as
from shardkit._wrapping.strategies import strategy as strategy_of
from shardkit.planning._plan import RunPlan, plan_of

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "none": None,
}


def plan(  # noqa: PLR0913 - what a run consists of, in one call
    model: nn.Module,
    batch: Any,
    *,
    mesh: int | Sequence[int],
    device: str = "cuda",
    rank: int = 0,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] | None = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    recompute: bool | Mapping[str, Any] = False,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None,
    budget: int | str | None = None,
    hardware: str | None = None,
    choose: bool = False,
    **options: Any,
) -> RunPlan:
    """Predict what a rank holds and sends in a step, without computing or sending anything.

        with torch.device("meta"):
            model = Model()
        tokens = torch.empty(2, 4096, dtype=torch.long, device="meta")
        print(shardkit.plan(model, tokens, mesh=(512, 8), policy={Block}, budget=80 * 2**30))

    Two steps of one rank run on meta tensors, through the real hooks and the real schedule, with a
    process group of torch that does nothing. Every storage is counted while it exists. The report
    is about the second step, in which gradients and the optimizer's state exist. It is the step of
    a plain loop: the last output and loss live until the next ones exist.

    Tensors are counted, and scratch memory of those kernels that take much: on CUDA sums over rows
    and the backward of attention, on the CPU also convolutions, 16-bit products, norms, FFT and
    linear algebra. Memory of the driver and of collective libraries is not counted. What the
    caching allocator of CUDA reserves is a number of its own.

    Args:
        model: Model that is not sharded. It does not change: a copy on meta is sharded. Call
            `model.train()` before: until then models of `from_pretrained` neither drop nor
            checkpoint activations.
        batch: One micro-batch of a rank: a tensor, positional arguments, or a dict of arguments.
            Only shapes and dtypes count.
        mesh: Number of ranks, or size of each axis, (replicate, shard).
        device: Type of the devices: ``"cpu"``, where ranks use gloo, or an accelerator, where they
            behave as with NCCL.
        rank: Number of the rank.
        optimizer: Name (``"adamw"``, ``"adam"``, ``"sgd"``, ``"none"``), or a function of the
            parameters that returns one.
        loss: Function of the model's output that returns the loss. None: the output's ``loss``, or
            the sum of its first tensor that requires a gradient if it has no ``loss``.
        recompute: Whether backward recomputes the activations of repeated blocks; or options of
            `checkpoint_activations`.
        accumulate: Number of micro-batches in a step; the last one syncs.
        autocast: Dtype of `torch.autocast` around forward and loss; None: the script enters none.
            A model's own autocast counts in both cases.
        shard: Function of model and mesh that calls `fully_shard` itself, without `options`.
        budget: Bytes that a device may hold, such as ``"80GiB"``. If the run does not fit, changes
            are tried.
        hardware: Name of a profile (``"a100"``, ``"cpu"``, ``"h100"``, ``"h200"``, ``"mi300x"``,
            ``"tpu-v5p"``), or the path of one, to predict the time of a step. With device ``"cpu"``
            it must be a profile of a CPU.
        choose: Whether to try other meshes, groups, recompute and offload, and to name the fastest
            runs that fit. Needs `hardware`. Without `budget`, the memory in the profile is the
            limit.
        **options: Options of `auto_shard`: `policy`, `strategy`, `mp_policy`, ...; None: not given.

    Raises:
        ConfigError: An argument is wrong, the model needs values in its forward, or its ``loss`` is
            None.
        StateError: This process has a process group.
        WrapError: An error of `auto_shard`.

    Cost: about 40 µs for each operator of two steps, and the same again for each change that is
    tried. Choosing tries 10 to 20 more.
    """
    # Backends are imported only when they are needed.
    from shardkit.planning._advice import advise, choose_among
    from shardkit.planning._profile import read_profile
    from shardkit.planning._run import Run, batch_on_meta, dry_run

    _check_kinds(model, optimizer, autocast, loss, recompute)
    refuse_texts(ConfigError, choose=choose)
    refuse_non_functions(ConfigError, shard=shard)
    device = _device_type(device)
    options = {name: value for name, value in options.items() if value is not None}
    if "ignored_params" in options:  # Each dry run reads them.
        options["ignored_params"] = checked_ignored(options["ignored_params"])
    shape = _shape_of(mesh, options.get("strategy"))
    size, rank = math.prod(shape), _integer("rank", rank)
    accumulate = _integer("accumulate", accumulate)
    most = None if budget is None else read_as(byte_size, "budget", budget, ConfigError)
    if not 0 <= rank < size:
        msg = f"rank must be from 0 to {size - 1} on a mesh of {shape}, got {rank}."
        raise ConfigError(msg)
    if accumulate < 1:
        msg = f"accumulate must be 1 micro-batch of a step or more, got {accumulate}."
        raise ConfigError(msg)
    if shard is not None and options:
        msg = f"shard takes the place of {', '.join(options)}. Pass one or the other."
        raise ConfigError(msg)
    if choose and (hardware is None or shard is not None):
        msg = "choose needs hardware, the name of a profile, and options in the place of shard."
        raise ConfigError(msg)
    profile = None if hardware is None else read_profile(str(hardware))
    if profile is not None:
        profile.check_run(device, size)
    check_kinds(find_params([model], set()))  # Copies need shapes.
    run = Run(
        model,
        batch_on_meta(batch),
        shape,
        device=device,
        rank=rank,
        options=options,
        shard=shard,
        recompute={True: {}, False: None}[recompute] if isinstance(recompute, bool) else recompute,
        optimizer=OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        loss=loss,
        accumulate=accumulate,
        autocast=autocast,
    )
    result = plan_of(run, dry_run(run, is_timed=profile is not None), most, profile)
    if profile is not None and choose:
        limit = int(profile.memory_nbytes) if most is None else most
        result = replace(result, choices=choose_among(run, limit, profile))
    if most is None or result.fits:
        return result
    return replace(result, advice=advise(run, result.peak_nbytes, most))


def _shape_of(mesh: int | Sequence[int], strategy: Any) -> tuple[int, ...]:
    """Return the size of each axis; a strategy chooses it for a number of ranks."""
    if isinstance(mesh, str):
        msg = f"mesh must be a number of ranks, or sizes of axes such as (2, 8), got {mesh!r}."
        raise ConfigError(msg)
    sizes = mesh if isinstance(mesh, Iterable) else (mesh,)
    shape = tuple(_integer("each number of mesh", size) for size in sizes)
    if strategy is not None and sizes is not mesh:
        shape = strategy_of(strategy).mesh_shape(shape[0])
    if len(shape) not in (1, 2) or min(shape) < 1:
        msg = f"mesh must be (shard,) or (replicate, shard), each of 1 rank or more, got {shape}."
        raise ConfigError(msg)
    return shape


def _check_kinds(model: Any, optimizer: Any, autocast: Any, loss: Any, recompute: Any) -> None:
    if not isinstance(model, nn.Module):
        msg = f"a plan takes a module first, which may be on meta, got {model!r}."
        raise ConfigError(msg)
    if loss is not None and not callable(loss):
        msg = f"loss must be a function of the model's output, or None, got {loss!r}."
        raise ConfigError(msg)
    if not isinstance(recompute, (bool, Mapping)):
        msg = f"recompute must be True, False or a dict such as {{'every': 2}}, got {recompute!r}."
        raise ConfigError(msg)
    if not callable(optimizer) and optimizer not in (*OPTIMIZERS, None):
        msg = f"optimizer must be one of {', '.join(OPTIMIZERS)}, or a function, got {optimizer!r}."
        raise ConfigError(msg)
    if autocast is not None and not isinstance(autocast, torch.dtype):
        msg = f"autocast must be a dtype such as torch.bfloat16, or None, got {autocast!r}."
        raise ConfigError(msg)


def _integer(name: str, value: Any) -> int:
    """Return an integer, also of NumPy, as one of Python."""
    try:
        return index(value)
    except TypeError:
        msg = f"{name} must be an integer, got {value!r}."
        raise ConfigError(msg) from None


def _device_type(device: str) -> str:
    """Return the type of a device.

    Raises:
        ConfigError: Torch does not know the device, or plans do not support it.
    """
    try:
        found = torch.device(device).type
    except (RuntimeError, TypeError):
        found = ""
    if found in {"", "meta", "xla"}:
        msg = (
            f"device must be 'cpu' or the type of an accelerator with streams, such as 'cuda', got "
            f"{device!r}. Plans know no others."
        )
        raise ConfigError(msg)
    return found
