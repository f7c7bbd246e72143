"""``python -m shardkit plan``. Needs the extra ``cli``."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import platform
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from shardkit._errors import ConfigError
from shardkit._settings import MixedPrecisionPolicy
from shardkit._text import nearest
from shardkit.backends.device import accelerator_type
from shardkit.config import Config, from_config
from shardkit.planning._api import plan
from shardkit.planning._kernels import switch_cache_off

# --- what is written on the command line ----------------------------------------------------------

_DOES_NOT_FIT = 3  # 2 means a wrong command line.


def read_shape(text: str, what: str) -> tuple[int, ...]:
    """Return the numbers in a text such as ``2x4096``.

    Raises:
        ConfigError: The text has anything but positive numbers.
    """
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        msg = f"{what} must be positive numbers with x between them, such as 2x8, got {text!r}."
        raise ConfigError(msg)
    return tuple(map(int, parts))


def read_batch(texts: list[str]) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Return tensors on meta for texts of the form ``[NAME=]SHAPE[:DTYPE]``.

    The default dtype is int64, for tokens.

    Raises:
        ConfigError: A text has another form, or only some have names.
    """
    found: list[tuple[str, Tensor]] = []
    for text in texts:
        name, _, rest = text.rpartition("=")
        shape, _, dtype_name = rest.partition(":")
        dtype = _dtype(dtype_name or "int64")
        found.append((name, torch.empty(read_shape(shape, "--batch"), dtype=dtype, device="meta")))
    names = {name for name, _ in found}
    if "" not in names and len(names) == len(found):
        return dict(found)
    if names != {""}:
        msg = f"--batch must have another name for each input or for none, got {' '.join(texts)}."
        raise ConfigError(msg)
    return tuple(tensor for _, tensor in found)


def read_model(text: str) -> tuple[nn.Module, Any]:
    """Return a model on meta, and the batch that comes with it, or None.

    Args:
        text: ``module:function``, which returns a model, or a model and a batch; or the path of a
            config.json of transformers or of its folder, for the model that `architectures` in it
            names, or else for a causal language model.

    Raises:
        ConfigError: The text names nothing of this kind, or the function raises an `OSError`, or
            returns anything else.
    """
    path = Path(text)
    if path.exists():
        return _model_of_transformers(path), None
    module_name, colon, _ = text.partition(":")
    refusal = (
        f"MODEL must be module:function, or a config.json of transformers that is there, got "
        f"{text!r}"
    )
    if not colon:
        msg = f"{refusal}, which is no file and names no function."
        raise ConfigError(msg)
    make = _named(text, refusal)
    if isinstance(make, nn.Module) or not callable(make):
        msg = (
            f"MODEL must name a function that returns a model, so that no memory is taken for it; "
            f"{text!r} is of type {type(make).__name__}. Write a function that makes it."
        )
        raise ConfigError(msg)
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as error:
        msg = f"MODEL must name a function that needs no arguments; {text!r}: {error}."
        raise ConfigError(msg) from error
    try:
        with torch.device("meta"):
            made = make()
    except OSError as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = sys.modules[module_name].__file__
        where = next((f for f in reversed(frames) if f.filename == file), frames[-1])
        msg = f"{text} failed at line {where.lineno} of {where.filename}: {error}."
        raise ConfigError(msg) from error
    match made:
        case nn.Module():
            return made, None
        case (nn.Module() as model, batch):
            return model, batch
    msg = (
        f"MODEL must name a function that returns a model, or a tuple of a model and a batch; "
        f"{text!r} returned an object of type {type(made).__name__}."
    )
    raise ConfigError(msg)


def read_optimizer(text: str) -> Any:
    """Return the name of an optimizer as it is, and what ``module:function`` names.

    Raises:
        ConfigError: The text names nothing.
    """
    refusal = (
        f"--optimizer must be adamw, adam, sgd or none, or module:function of parameters that "
        f"returns an optimizer, got {text!r}"
    )
    return _named(text, refusal) if ":" in text else text


def _named(text: str, refusal: str) -> Any:
    """Return what ``module:name`` names.

    Raises:
        ConfigError: It names nothing; the error begins with `refusal`.
    """
    module_name, _, name = text.partition(":")
    sys.path.insert(0, "")  # As in `python -m`.
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        msg = f"{refusal}: {error}."
        if isinstance(error, AttributeError) and module_name in sys.modules:
            msg += f" {nearest(name, vars(sys.modules[module_name]))}"
        raise ConfigError(msg) from error


def _model_of_transformers(path: Path) -> nn.Module:
    if path.suffix == ".py":
        msg = (
            f"MODEL is {str(path)!r}, which is a script. Name its function: {path.stem}:make_model."
        )
        raise ConfigError(msg)
    try:
        import transformers
    except ImportError as error:
        msg = f"the config {str(path)!r} needs transformers: pip install transformers."
        raise ConfigError(msg) from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
        with torch.device("meta"):
            name = next(iter(config.architectures or ()), "")
            if hasattr(transformers, name):
                model: nn.Module = getattr(transformers, name)._from_config(config)  # noqa: SLF001
            else:
                model = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        msg = f"{str(path)!r} must be a config of a model of transformers: {error}"
        raise ConfigError(msg) from error
    switch_cache_off(model)
    return model


# --- the command ----------------------------------------------------------------------------------


def plan_command(  # noqa: PLR0913, PLR0917 - options of a command
    model: Annotated[
        str | None,
        typer.Argument(
            help="module:function that returns a model, or a model and a batch; or a config.json "
            "of transformers.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Ranks, or REPLICATExSHARD, e.g. 512x8. If not given that of the config."
        ),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            help="An input of a rank's micro-batch, [NAME=]SHAPE[:DTYPE]; tokens (int64) if no "
            "dtype is given. Several times for several inputs.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Type of the devices; cpu: ranks of gloo. If not given that of the config, or "
            "cuda; of --calibrate, that of this machine.",
        ),
    ] = None,
    rank: Annotated[int, typer.Option(help="Whose memory.")] = 0,
    wrap: Annotated[
        list[str] | None, typer.Option(help="A class of modules that form groups.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="A name such as zero2.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of compute, e.g. bfloat16.")] = None,
    reduce_dtype: Annotated[
        str | None, typer.Option("--reduce-dtype", help="Of reductions.")
    ] = None,
    recompute: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--recompute", help="Compute activations of blocks again in backward.")
    ] = False,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1,
    autocast: Annotated[
        str | None, typer.Option(help="Dtype of torch.autocast around forward and loss.")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw, adam, sgd or none; or module:function of parameters that returns one."
        ),
    ] = "adamw",
    config: Annotated[
        str | None,
        typer.Option(help="A config file, in the place of --wrap, --strategy and dtypes."),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="What a device may hold, e.g. 80GiB.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="A profile for the time, e.g. h100, or its path.")
    ] = None,
    choose: Annotated[  # noqa: FBT002 - a flag
        bool, typer.Option("--choose", help="Name the fastest ways to shard that fit.")
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Measure this machine's ranks, under a launcher, and write a profile there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,  # noqa: FBT002
) -> None:
    """Predict what a rank holds and sends in a step, before anything is launched.

    Exits with 3 if the run does not fit into the budget.

    Examples:
        python -m shardkit plan train:make_model --mesh 16 --batch 8x2048 --budget 80GiB

        python -m shardkit plan llama/config.json --mesh 64x8 --wrap LlamaDecoderLayer
        --batch input_ids=1x8192 --batch labels=1x8192 --dtype bfloat16 --recompute

        python -m shardkit plan train:make_model --batch 8x2048 --config fsdp.yaml

        python -m shardkit launch --nproc-per-node 8 -m shardkit plan --calibrate here.toml
    """
    if calibrate is not None:
        _calibrate(calibrate, device or accelerator_type() or "cpu")
        return
    made, given = _what(model, batch)
    read = None if config is None else from_config(config)
    shape = _mesh_of(mesh, read)
    if read is not None:
        device = device or read.settings.device_type
        beside: dict[str, object] = {"--wrap": wrap, "--strategy": strategy, "--dtype": dtype}
        beside |= {"--reduce-dtype": reduce_dtype, "--choose": choose}
        if others := [name for name, value in beside.items() if value]:
            msg = f"--config takes the place of {', '.join(others)}. Give one or the other."
            raise ConfigError(msg)
    dtypes = _dtype(dtype), _dtype(reduce_dtype)
    # Without a terminal, this shows nothing.
    with Console(stderr=True).status("planning"):
        found = plan(
            made,
            given,
            mesh=shape[0] if len(shape) == 1 else shape,
            device=device or "cuda",
            rank=rank,
            optimizer=read_optimizer(optimizer),
            recompute=recompute,
            accumulate=accumulate,
            autocast=_dtype(autocast),
            budget=budget,
            hardware=hardware,
            choose=choose,
            shard=None if read is None else read.shard,
            policy=None if wrap is None else set(wrap),
            strategy=strategy,
            mp_policy=MixedPrecisionPolicy(*dtypes) if any(dtypes) else None,
        )
    if as_json:
        facts = {"fits": found.fits, "margin_nbytes": found.margin_nbytes}
        print(json.dumps({**facts, **asdict(found)}, indent=2))
    else:
        print(found)
    if not found.fits:
        raise typer.Exit(_DOES_NOT_FIT)


def _what(model: str | None, batch: list[str] | None) -> tuple[nn.Module, Any]:
    """Return the model and the batch."""
    if model is None:
        msg = "MODEL must be given, unless --calibrate is."
        raise ConfigError(msg)
    made, own_batch = read_model(model)
    given = own_batch if batch is None else read_batch(batch)
    if given is None:
        msg = "--batch must be given, such as 8x2048: the function returned a model alone."
        raise ConfigError(msg)
    return made, given


def _mesh_of(mesh: str | None, config: Config | None) -> tuple[int, ...]:
    """Return the mesh of the command line, or else of the config file."""
    shape = None if config is None else config.mesh_shape()
    if mesh is not None:
        shape = read_shape(mesh, "--mesh")
    if shape is None:
        msg = (
            "--mesh must be given, such as 512x8, or a --config with num_processes or a "
            "parallelism_config."
        )
        raise ConfigError(msg)
    return shape


def _calibrate(path: Path, device: str) -> None:
    """Measure the ranks of this world; the first one writes the file."""
    from shardkit.planning._calibrate import calibrate
    from shardkit.planning._profile import profile_text

    if path.suffix != ".toml":
        msg = f"--calibrate must be the path of a .toml file, as for --hardware, got {str(path)!r}."
        raise ConfigError(msg)
    profile = calibrate(device)
    if os.environ.get("RANK", "0") == "0":
        host, size = platform.node(), os.environ.get("WORLD_SIZE", "1")
        about = f"Measured by python -m shardkit plan --calibrate on {size} ranks, {host}."
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile_text(profile, about), encoding="utf-8")


def _dtype(name: str | None) -> torch.dtype | None:
    found = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(found, torch.dtype):
        msg = f"a dtype must be one of torch's such as bfloat16, got {name!r}."
        raise ConfigError(msg)
    return found
