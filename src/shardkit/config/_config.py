"""`Config`: a config file, applied to models."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardkit._errors import ConfigError
from shardkit._module.activation_checkpoint import checkpoint_module
from shardkit._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardkit._tensor.sharded import ShardedTensor
from shardkit._wrapping.auto_shard import auto_shard
from shardkit._wrapping.strategies import Strategy, strategy
from shardkit.backends import accelerator_type, tensor_parallel_of
from shardkit.config._meshes import in_words
from shardkit.config import _contradictions, _meshes, _states, _sync
from shardkit.config._schema import Found, Settings, settings_of
from shardkit.config._source import read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim import Optimizer

    from shardkit._mesh import DeviceMesh
    from shardkit._module.fsdp_module import FSDPModule
    from shardkit._wrapping.strategies import StrategyName
    from shardkit.backends import TorchDeviceMesh

CONFIG_VARIABLE = "SHARDKIT_CONFIG"
"""Where ``python -m shardkit launch`` leaves the path of the config file for its ranks."""

_DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def from_config(source: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Config:
    """Read what ``accelerate config`` or ``python -m shardkit config`` wrote.

        config = shardkit.from_config("fsdp.yaml")
        model = config.apply(Model())

    The guide "Config files" says what each field means.

    Args:
        source: A file of YAML or JSON, or a dict of the same fields. None: the file that ``python
            -m shardkit launch --config`` was given, from the environment's SHARDKIT_CONFIG.

    Raises:
        ConfigError: PyYAML is missing (``pip install 'shardkit[config]'``), the file cannot be
            read, or fields are unknown, wrong or contradictory: all of them, each with its line
            and what to write.

    Cost: no collective, no process group.
    """
    if source is None and not (source := os.environ.get(CONFIG_VARIABLE)):
        msg = (
            f"from_config() without a file reads the one that {CONFIG_VARIABLE} in the environment "
            f"names, and it is not set. Start the script by `python -m shardkit launch --config "
            f"F`, or pass the file: from_config(F)."
        )
        raise ConfigError(msg)
    found = Found(read(source))
    _contradictions.check(found)
    found.raise_complaints()
    return Config(found.document.plain(), settings_of(found))


class Config:
    """A config that has been read: what it means, and what carries it out.

    Get one by `from_config`.

    Args:
        fields: Fields as they were written.
        settings: Meaning of the fields.

    Attributes:
        settings: Meaning of the fields, in shardkit's terms. Not to be changed.
    """

    def __init__(self, fields: dict[str, Any], settings: Settings) -> None:
        self._fields = fields
        self._mesh: DeviceMesh | None = None
        self._tensor_parallel_mesh: TorchDeviceMesh | None = None
        self.settings = settings

    # --- what it says ---

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they were written."""
        return dict(self._fields)

    @property
    def notes(self) -> tuple[str, ...]:
        """Fields that were written and change nothing, each with the reason."""
        return self.settings.notes

    @property
    def device_type(self) -> str:
        """Where parameters are computed with: ``"cpu"``, ``"cuda"``, ..."""
        return self.settings.device_type or accelerator_type() or "cpu"

    def strategy(self) -> Strategy:
        """Return what is sharded: of FULL_SHARD `zero3`, and so on."""
        return strategy(cast("StrategyName", self.settings.strategy))

    def policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes of `mixed_precision`, as Accelerate has them.

        Compute and reductions are in the dtype; with `fsdp_version` 1 buffers are, too. Where the
        model is replicated (MULTI_GPU, MULTI_CPU) gradients are reduced in fp32.
        """
        dtype = _DTYPES[self.settings.precision]
        if dtype is None:
            return MixedPrecisionPolicy()
        if not self.settings.is_fsdp:
            return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        buffer_dtype = dtype if self.settings.fsdp_version == 1 else None
        return MixedPrecisionPolicy(dtype, dtype, buffer_dtype=buffer_dtype)

    def offload_policy(self) -> OffloadPolicy:
        """Return where shards are, as of `fsdp_offload_params`."""
        return CPUOffloadPolicy() if self.settings.offload_params else OffloadPolicy()

    def describe(self) -> str:
        """Return what the config comes to, a line for each choice, then the notes."""
        settings, policy = self.settings, self.policy()
        chosen = self.strategy()
        wrapped = {
            "TRANSFORMER_BASED_WRAP": ", ".join(settings.transformer_layer_cls_to_wrap or ())
            or "what the model's _no_split_modules names",
            "SIZE_BASED_WRAP": f"modules from {settings.min_num_params:,} parameters on",
            "NO_WRAP": "the whole model",
        }
        repeated = "each group" if settings.activation_checkpointing else "no"
        prefetch = f"forward {settings.forward_prefetch}, backward {settings.backward_prefetch}"
        lines = [
            f"strategy: {chosen.name} (split among ranks: {chosen.shards})",
            f"mesh: {self.device_type}, {in_words(settings)}",
            f"groups: {wrapped[settings.wrap]}",
            f"mixed precision: {policy if settings.precision != 'no' else 'no'}",
            f"offload: {'to the CPU' if settings.offload_params else 'no'}",
            f"activation checkpointing: {repeated}",
            f"prefetch: {prefetch}".replace("None", "as by default"),
            f"rank 0's values for all: {'yes' if settings.sync_module_states else 'no'}",
            f"state dict: {settings.state_dict_type}",
            *settings.notes,
        ]
        return "\n".join(lines)

    # --- what it does ---

    def mesh(self) -> DeviceMesh:
        """Return the mesh that models are sharded over: 1-D, or (replicate, shard).

        It is made once, over all ranks; call it on all of them. On an accelerator the current
        device is set first: that of ``LOCAL_RANK``.

        Raises:
            MeshError: The ranks are not as many as the config says, or no launcher started this
                process.

        Cost: one process group per axis.
        """
        if self._mesh is None:
            self._mesh, self._tensor_parallel_mesh = _meshes.make(
                self.settings, self.strategy(), self.device_type
            )
        return self._mesh

    def tensor_parallel_mesh(self) -> TorchDeviceMesh | None:
        """Return torch's 1-D mesh of the ``tp`` axis; None: `tp_size` is 1.

        parallelize_module(model, config.tensor_parallel_mesh(), plan)
        config.apply(model)
        """
        self.mesh()
        return self._tensor_parallel_mesh

    def apply(
        self, model: nn.Module, *, param_init_fn: Callable[[nn.Module], object] | None = None
    ) -> FSDPModule:
        """Shard a model as the config says, in place. Call it on all ranks.

        With `mixed_precision`, parameters that are trained become fp32 first, as in Accelerate, and
        the outermost module's output is fp32. Unlike Accelerate it opens no autocast: norms,
        softmax and losses inside the model are in the dtype, too; open `torch.autocast` where
        they should be fp32. With `fsdp_sync_module_states` or
        `fsdp_cpu_ram_efficient_loading`, which are the default, all ranks get rank 0's values; the
        model of other ranks may be on the meta device. The optimizer may be made before or after.

        Args:
            model: A model that is not sharded, on the host, on the mesh's device, or on meta.
            param_init_fn: Gives values to a model that is on meta on all ranks, see `materialize`.
                Without it such a model stays on meta: call `materialize`, or load a checkpoint.

        Returns:
            `model`.

        Raises:
            ConfigError: A name of `fsdp_ignored_modules` fits no module; no parameter is split,
                though `tp_size` is above 1. Nothing has been changed.
            WrapError: The model cannot be sharded so, see `auto_shard`: a class of
                `fsdp_transformer_layer_cls_to_wrap` is not there, for instance. Parameters are
                what they were before.
            MeshError: See `mesh`.

        Cost: if rank 0's values are sent, broadcasts of all of them in parts of 16 MiB; memory for
        the pieces and one part. Else none.
        """
        settings, mesh = self.settings, self.mesh()
        self._check(model)
        ignored = self._ignored_params(model)
        kept = [(param, param.dtype, param.device) for param in model.parameters()]
        values = _sync.take_values(model, mesh, ignored) if settings.sync_module_states else None
        try:
            self._shard(model, mesh, ignored)
        except BaseException:
            if values is not None:
                values.put_back()
            for param, dtype, device in kept:
                if not isinstance(param, ShardedTensor):
                    param.data = param.data.to(device, dtype)
            raise
        chosen = {"forward": settings.forward_prefetch, "backward": settings.backward_prefetch}
        if given := {name: each for name, each in chosen.items() if each is not None}:
            cast("Any", model).set_prefetch_policy(**given)
        if values is not None:
            values.send(model)
        elif param_init_fn is not None:
            from shardkit._module.materialize import materialize

            materialize(model, param_init_fn)
        return cast("FSDPModule", model)

    def save(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Save training state into a directory, by `fsdp_state_dict_type`. Call it on all ranks.

        - ``SHARDED_STATE_DICT``: as `shardkit.checkpoint.save`: a file of each rank, which load at
          every number of ranks.
        - ``FULL_STATE_DICT``: whole tensors by their names, ``pytorch_model_fsdp.bin`` and
          ``optimizer.bin``, as Accelerate calls them; rank 0 writes.
        - ``LOCAL_STATE_DICT``: each rank its pieces, which load with the same config only.

        If it is killed meanwhile, `load` loads what was saved before.

        Raises:
            CheckpointError: It cannot be written, or `path` holds a checkpoint already
                (``SHARDED_STATE_DICT``).

        Cost: see `save`, `save_full` with `gather_optimizer_state`, `local_state_dict`.
        """
        _states.save(self.settings.state_dict_type, path, model, optimizer)

    def load(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Load what `save` wrote, in place. Call it on all ranks.

        Raises:
            CheckpointError: It is not there, does not fit, or is of two saves.
        """
        _states.load(self.settings.state_dict_type, path, model, optimizer)

    # --- parts of apply ---

    def _shard(self, model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
        settings = self.settings
        if settings.precision != "no":
            _make_masters(model, ignored)
        _move(model, mesh, ignored, offload=settings.offload_params)
        policy = self.policy()
        root = dataclasses.replace(policy, output_dtype=torch.float32)
        auto_shard(
            model,
            mesh,
            self._wrap_policy(),
            units={"": {"mp_policy": root}} if settings.precision != "no" else (),
            strategy=self.strategy(),
            before=checkpoint_module if settings.activation_checkpointing else None,
            mp_policy=policy,
            offload_policy=self.offload_policy(),
            ignored_params=ignored,
        )

    def _wrap_policy(self) -> Any:
        settings = self.settings
        if settings.wrap == "TRANSFORMER_BASED_WRAP":
            names = settings.transformer_layer_cls_to_wrap
            return "no_split_modules" if names is None else set(names)
        if settings.wrap == "SIZE_BASED_WRAP":
            from shardkit._wrapping.protocol import size_policy

            return size_policy(settings.min_num_params)
        return "no_wrap"

    def _check(self, model: nn.Module) -> None:
        sizes = self.settings.parallelism
        if sizes is None or sizes.tp_size == 1:
            return
        if all(tensor_parallel_of(param) is None for param in model.parameters()):
            msg = (
                f"tp_size is {sizes.tp_size}, but no parameter of this {type(model).__name__} is "
                f"split. Before apply call parallelize_module(model, "
                f"config.tensor_parallel_mesh(), plan), or write tp_size: 1."
            )
            raise ConfigError(msg)

    def _ignored_params(self, model: nn.Module) -> set[nn.Parameter]:
        pattern = self.settings.ignored_modules
        if pattern is None:
            return set()
        modules = [m for name, m in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not modules:
            names = [repr(name) for name, _ in model.named_modules() if name]
            msg = (
                f"fsdp_ignored_modules is {pattern!r}, which is the whole name of no module of "
                f"this {type(model).__name__}. Its modules have names such as "
                f"{', '.join(names[:3])}."
            )
            raise ConfigError(msg)
        return {param for module in modules for param in module.parameters()}


def _make_masters(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Make parameters that are trained fp32: optimizers step in it."""
    for param in model.parameters():
        if param.requires_grad and param.is_floating_point() and param not in ignored:
            wide = torch.promote_types(param.dtype, torch.float32)
            if param.dtype != wide:
                param.data = param.data.to(wide)


def _move(model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter], *, offload: bool) -> None:
    """Move a model to the mesh's device, but for what is on meta, or stays on the host."""
    device = mesh.backend.device
    for param in model.parameters():
        stays = offload and param not in ignored
        if not param.is_meta and param.device != device and not stays:
            param.data = param.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                setattr(module, name, buffer.to(device))
