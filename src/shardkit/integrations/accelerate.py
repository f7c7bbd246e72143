"""shardkit in place of FSDP2 inside of Hugging Face Accelerate.

    import shardkit.integrations.accelerate

    shardkit.integrations.accelerate.use()
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ...))
    model, optimizer = accelerator.prepare(model, optimizer)

`Accelerator.prepare` chooses the modules as for FSDP2, and calls shardkit's `fully_shard`. A model
that is already sharded stays as it is.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate.accelerator
import accelerate.state
import accelerate.utils.fsdp_utils
import torch
import torch.distributed.fsdp
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, parse_flag_from_env
from accelerate.utils.other import is_compiled_module
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from shardkit._compat import torch_autograd
from shardkit._errors import IntegrationError, OptimizerError, warn_user
from shardkit._install import Installed, catch_up, install, once, refuse_or_warn
from shardkit._module.fsdp_module import FSDPModule
from shardkit._module.optimizers import cut_whole_state, is_of_torchao
from shardkit.checkpoint import load_full
from shardkit.integrations._tied_modules import tied_modules_together
from shardkit.integrations._versions import check_version, replacing
from shardkit.optim import LocalOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["use"]

_FSDP2 = 2

_in_use: list[Installed] = []

_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that `Accelerator.prepare` has sharded."""


def use() -> Installed:
    """Make Accelerate shard with shardkit if its settings say ``fsdp_version: 2``.

    Call it before `Accelerator` is made, or around everything: ``with use():``. It includes
    `shardkit.install`. Ranks on the CPU are then sharded, too; Accelerate itself leaves them to
    DistributedDataParallel. A second call changes nothing.

    Returns:
        An object whose `undo()` restores Accelerate, as does the end of ``with use():``. Models
        that are sharded stay sharded.

    Raises:
        IntegrationError: Accelerate or transformers is older than the tested versions (transformers
            is checked at its import); or an `Accelerator` on the CPU was made before. Later, when
            an `Accelerator` is made: it asks for FSDP1, or for a device of XLA. When a model is
            prepared: only parts of it are sharded, or only the first rank is to load values of
            which some are DTensors or quantized.
        OptimizerError: When an optimizer is prepared: it inherits from one of torchao, and its
            attributes do not give the arguments to make it again.
    """
    check_version("accelerate")
    return once(_in_use, _replace_all)


@replacing("accelerate")
def _replace_all(used: Installed) -> None:
    _refuse_too_late()
    used.after_import("transformers", _check_transformers)
    used.at_undo(install().undo)
    state = accelerate.state.AcceleratorState
    used.wrap(state, "__init__", _also_on_cpu)
    accelerator = accelerate.accelerator.Accelerator
    used.wrap(accelerator, "_prepare_fsdp2", _also_sharded)
    used.wrap(accelerator, "_prepare_tp", _keep_unsplit)
    used.wrap(accelerator, "prepare", _also_alone)
    used.wrap(accelerate.accelerator, "fsdp2_switch_optimizer_parameters", _with_own_state)
    utils = accelerate.utils.fsdp_utils
    used.replace(utils, "fsdp2_load_full_state_dict", _load_full_state_dict)
    used.wrap(utils, "fsdp2_prepare_auto_wrap_policy", _only_groups)
    if "get_optimizer_state_dict" not in utils.load_fsdp_optimizer.__code__.co_names:  # 1.12
        _load_sharded_optimizers(used)
    used.after_import("transformers.trainer", functools.partial(_mend_trainer, used))


def _check_transformers(_: object) -> None:
    try:
        check_version("transformers")
    except IntegrationError as error:
        refuse_or_warn("transformers", error)


def _load_sharded_optimizers(used: Installed) -> None:
    """Make optimizers without steps loadable: version 1.12 reads their entries in `state_dict`."""
    original = accelerate.utils.fsdp_utils.load_fsdp_optimizer

    @functools.wraps(original)
    def load(
        plugin: Any, accelerator: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any
    ) -> None:
        if plugin.state_dict_type != StateDictType.FULL_STATE_DICT:
            state = get_optimizer_state_dict(model, optimizer)
            optimizer.state_dict = lambda: state
        try:
            original(plugin, accelerator, optimizer, model, *args, **kwargs)
        finally:
            vars(optimizer).pop("state_dict", None)

    for module in (accelerate.utils.fsdp_utils, accelerate.utils, accelerate.accelerator):
        used.replace(module, original.__name__, load)
    used.after_import("transformers.trainer", lambda m: used.replace(m, original.__name__, load))


def _mend_trainer(used: Installed, trainer_module: Any) -> None:
    """Mend what the Trainer does wrong, without a message, with any model that is sharded.

    It writes nothing; its ranks take different checkpoints for the best one; or it smooths the
    labels of a causal model, which it knows by the name of the class, without shifting them.
    """
    original = trainer_module.Trainer.save_model

    @functools.wraps(original)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call and output_dir is not None and self.is_fsdp_enabled:
            # Each rank looks next whether the best checkpoint exists. With files of pieces the
            # first rank made the folder of this one at about that time.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
        original(self, output_dir, _internal_call)
        if _internal_call or not self.is_fsdp_enabled or not self.args.should_save:
            return  # Other functions write the files of a checkpoint.
        kind = self.accelerator.state.fsdp_plugin.state_dict_type
        if kind != StateDictType.FULL_STATE_DICT:
            warnings.warn(
                f"save_model wrote no weights: with {kind.name} the Trainer leaves that to its "
                f"checkpoints. Pass fsdp_config={{'state_dict_type': 'FULL_STATE_DICT', ...}}, or "
                f"call shardkit.checkpoint.save_full(path, trainer.model) on all ranks.",
                stacklevel=2,
            )

    used.replace(trainer_module.Trainer, "save_model", save_model)
    name = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    known = getattr(trainer_module, name)
    sharded = {f"FSDP{key}": f"FSDP{kind}" for key, kind in known.items()}
    used.replace(trainer_module, name, {**known, **sharded})


def _refuse_too_late() -> None:
    made = accelerate.state.AcceleratorState._shared_state
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if wanted and made.get("distributed_type") == DistributedType.MULTI_CPU:
        msg = (
            "an Accelerator was made before, which replicates models on the CPU instead of "
            "sharding them. Call shardkit.integrations.accelerate.use() before Accelerator(...)."
        )
        raise IntegrationError(msg)


def _also_on_cpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of Accelerate's state, so that ranks on the CPU are sharded, too."""
    plugin = kwargs.get("fsdp_plugin")
    is_first = not type(self)._shared_state
    if plugin is not None and is_first and plugin.fsdp_version != _FSDP2:
        msg = (
            f"Accelerate is asked for fsdp_version={plugin.fsdp_version}, which wraps modules "
            f"in FSDP1. shardkit takes the place of FSDP2: set fsdp_version=2 in the plugin, "
            f"or in the file of `accelerate config`."
        )
        raise IntegrationError(msg)
    is_rank = plugin is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1
    has_accelerator = torch.accelerator.is_available()
    if is_rank and is_first and not has_accelerator:
        if not (kwargs.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU")):
            warn_user(
                "no accelerator was found, so the ranks train on the CPU. If that is meant, "
                "pass Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true.",
                is_first_rank=os.environ.get("RANK", "0") == "0",
            )
        kwargs["cpu"] = True  # Otherwise each rank silently trains its own model.
    original(self, *args, **kwargs)
    if plugin is None or not is_first:
        return
    if is_rank and self.distributed_type == DistributedType.NO:
        cause = (
            "LOCAL_RANK is not set. Start the script by torchrun or accelerate launch, or set "
            "it to the number of this rank on its host."
            if has_accelerator and "LOCAL_RANK" not in os.environ
            else "a PartialState was made before that found no accelerator. Make the "
            "Accelerator first, or set ACCELERATE_USE_CPU=true."
        )
        msg = f"Accelerate takes this rank for a run of its own, since {cause}"
        raise IntegrationError(msg)
    if self.distributed_type == DistributedType.XLA:
        msg = (
            "Accelerate shards models on XLA devices by torch_xla, not by FSDP2. Leave the "
            "plugin out, and call shardkit.fully_shard on the model."
        )
        raise IntegrationError(msg)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        self.fsdp_plugin = plugin
        accelerate.state.PartialState._shared_state["distributed_type"] = self.distributed_type


def _also_sharded(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Wrap the preparation of models: sharded ones stay, and so do their optimizers' parameters.

    Accelerate finds an optimizer's new parameters by memory addresses, which sharded ones lack.
    """
    models = [each for each in args if isinstance(each, nn.Module)]
    if not any(isinstance(m, FSDPModule) for model in models for m in model.modules()):
        with tied_modules_together(models, torch.distributed.fsdp):
            prepared = original(self, *args)
        _note_for_transformers(prepared)
        _step_pieces(prepared)
        _prepared.update(each for each in prepared if isinstance(each, nn.Module))
        return prepared
    [model] = models  # Accelerate has refused several models.
    whole: Any = model._orig_mod if is_compiled_module(model) else model
    if not isinstance(whole, FSDPModule):
        msg = (
            f"parts of this {type(model).__name__} are sharded, and the whole is not. Call "
            f"fully_shard on it, too, or leave all of it to Accelerator.prepare."
        )
        raise IntegrationError(msg)
    if self.state.fsdp_plugin.activation_checkpointing and model not in _prepared:
        msg = (
            "Accelerate is asked for activation_checkpointing, and the model is sharded "
            "already, too late for that. Leave out the setting, and call "
            "shardkit.checkpoint_activations(model) before fully_shard."
        )
        raise IntegrationError(msg)
    _note_for_transformers(models)
    if model not in self._models:
        self._models.append(model)
    for first_pass in (True, False):
        args = tuple(
            each if each is model else self._prepare_one(each, first_pass=first_pass)
            for each in args
        )
    _step_pieces(args)
    return args


def _also_alone(
    original: Callable[..., Any],
    self: Any,
    *args: Any,
    device_placement: list[bool] | None = None,
) -> Any:
    """Prepare everything; a model may come without an optimizer, for evaluation.

    Accelerate asks for one, because FSDP2 replaces parameters. It gets one that never steps.
    """
    models = [each for each in args if isinstance(each, nn.Module)]
    has_optimizer = any(isinstance(each, torch.optim.Optimizer) for each in args)
    if not self.is_fsdp2 or len(models) != 1 or has_optimizer:
        return original(self, *args, device_placement=device_placement)
    optimizer = torch.optim.SGD(models[0].parameters())
    placed = None if device_placement is None else [*device_placement, False]
    *prepared, last = original(self, *args, optimizer, device_placement=placed)
    self._optimizers.remove(last)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _with_own_state(
    original: Callable[..., None], optimizer: Any, mapping: Mapping[int, nn.Parameter]
) -> None:
    """Wrap what gives an optimizer its new parameters: cut the state that it has, as Adagrad's.

    The keys of state are right: parameters are the same objects. Versions after 1.15 look for them
    by the addresses that parameters had.
    """
    inner = optimizer.optimizer
    state, inner.state = inner.state, {}
    try:
        original(optimizer, mapping)
    finally:
        inner.state = state
    cut_whole_state(inner)


def _keep_unsplit(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Wrap the preparation for tensor parallelism: parameters that are not split stay plain.

    Accelerate makes DTensors of them, by a class that transformers 5 does not have. FSDP2 needs
    that for norms of all parameters, and shardkit does not.
    """
    if not self.is_fsdp2:
        return original(self, *args)
    models = [each for each in args if isinstance(each, nn.Module)]
    params = [param for model in models for param in model.parameters()]
    if params and not any(isinstance(param, DTensor) for param in params):
        warn_user(
            f"tp_size={self.parallelism_config.tp_size}, and the model has no DTensors: ranks "
            f"of 'tp' compute the same. Call torch's parallelize_module(model, "
            f"accelerator.torch_device_mesh['tp'], ...) before prepare.",
            is_first_rank=self.is_main_process,
        )
    return args


def _step_pieces(prepared: Iterable[Any]) -> None:
    """Have torchao's optimizers step this rank's pieces: their compiled steps know only DTensors.

    A schedule still holds the original optimizer. It continues to write to the groups that are
    stepped, and the original's hooks run.
    """
    for each in prepared:
        made = getattr(each, "optimizer", None)
        if not isinstance(each, AcceleratedOptimizer) or made is None or not is_of_torchao(made):
            continue
        local = LocalOptimizer(made.param_groups, type(made), **_options_of(made))

        def share_groups(*_: Any, made: Any = made, local: Any = local) -> None:
            made.param_groups = local.param_groups  # Again after a state dict was loaded.

        share_groups()
        torch_autograd.share_optimizer_hooks(made, local)
        local.register_load_state_dict_post_hook(share_groups)
        local.register_step_post_hook(functools.partial(torch_autograd.note_step, made))
        each.optimizer = local
        each.__setstate__({})  # A GradScaler calls methods that it bound earlier.


def _options_of(optimizer: Any) -> dict[str, Any]:
    """Return the arguments with which an optimizer can be made again.

    Raises:
        OptimizerError: Its settings do not give the arguments.
    """
    kind, wanted = type(optimizer), _settings_of(optimizer)
    options = {name: wanted[name] for name in inspect.signature(kind).parameters if name in wanted}
    reason = "its constructor asks for more than its attributes tell"
    for _ in range(2):  # The second time with its **kwargs.
        try:
            again = _settings_of(kind([nn.Parameter(torch.zeros(1))], **options))
        except TypeError:
            break
        differing = {k: wanted[k] for k, v in again.items() if k in wanted and wanted[k] != v}
        if not differing:
            return options
        reason = "it would have " + ", ".join(
            f"{name}={again[name]!r} instead of {value!r}" for name, value in differing.items()
        )
        options |= differing
    msg = (
        f"{kind.__name__} inherits from an optimizer of torchao, and cannot be made again for this "
        f"rank's shards: {reason}. Have its constructor take all settings by the names of its "
        f"attributes, or pass prepare(...) a "
        f"shardkit.optim.LocalOptimizer(params, {kind.__name__}, ...)."
    )
    raise OptimizerError(msg)


def _settings_of(optimizer: Any) -> dict[str, Any]:
    """Return the numbers, texts and tuples with which an optimizer was made."""
    found = {**vars(optimizer), **optimizer.defaults}
    # A learning rate may be a tensor.
    found = {k: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for k, v in found.items()}
    kinds = (int, float, str, tuple, list, type(None))
    settings = {k: v for k, v in found.items() if isinstance(v, kinds) and not k.startswith("_")}
    settings.pop("param_groups")
    return settings


def _note_for_transformers(prepared: Iterable[Any]) -> None:
    """Make each rank run every layer and step that another rank runs, in transformers' models.

    The models check this attribute before ranks stop generating separately, or drop layers at
    random.
    """
    for model in prepared:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            vars(module)["_is_fsdp_managed_module"] = True


def _only_groups(original: Callable[..., Any], plugin: Any, model: nn.Module) -> Any:
    """Wrap the choice of modules: some that Accelerate's policies choose cannot be groups.

    Lists of modules may be large but are not called. Embeddings, the head and the norm before it
    become groups after all others (from 1.14 on), so no module around them can be a group.
    """
    policy = original(plugin, model)
    if policy is None:
        return None
    # Before 1.14 there is no such function, since the norm belongs to the root.
    find_norm = getattr(accelerate.utils.fsdp_utils, "_find_final_norm", lambda _: None)
    ends = {find_norm(model)}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        ends.add(getattr(model, getter, lambda: None)())

    def is_group(module: nn.Module) -> bool:
        if type(module).forward is nn.Module.forward or not policy(module):
            return False
        return module in ends or ends.isdisjoint(module.modules())

    return is_group


def _load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Send the first rank's whole tensors to a model on meta, in parts of 16 MiB.

    Raises:
        IntegrationError: The model has DTensors or quantized weights.
    """
    del cpu_offload  # The groups know whether to offload.
    for name, value in full_sd.items():
        if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
            msg = (
                f"Accelerate is asked for cpu_ram_efficient_loading, and {name!r} is a "
                f"{type(value).__name__}: the first rank can send plain tensors only. Set "
                f"cpu_ram_efficient_loading=False, and load the values on all ranks."
            )
            raise IntegrationError(msg)
    load_full(
        full_sd if accelerator.is_main_process else None,
        model,
        broadcast_from_rank0=True,
        progress=False,
    )
    return model


catch_up("accelerate")
