"""Strategies of Lightning that shard with shardkit: one for its `Trainer`, one for `Fabric`.

from shardkit.integrations.lightning import ShardkitStrategy

trainer = Trainer(strategy=ShardkitStrategy(), devices=8)

from shardkit.integrations.lightning import ShardkitFabricStrategy

fabric = Fabric(strategy=ShardkitFabricStrategy(), devices=8)
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.fabric.strategies.model_parallel as fabric_module
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerModelParallel
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardkit._compat.once import wrap
from shardkit._errors import IntegrationError
from shardkit._module.fsdp_module import FSDPModule
from shardkit._module.materialize import materialize
from shardkit._text import number, read_as
from shardkit._wrapping.auto_shard import auto_shard
from shardkit.integrations._versions import check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from datetime import timedelta

    import torch

__all__ = ["ShardkitFabricStrategy", "ShardkitStrategy"]

_AXES = ("replicate", "data_parallel", "tensor_parallel")


class _Sharding:
    """The common part of both strategies: the mesh, the sharding, and what depends on them."""

    device_mesh: Any
    root_device: Any
    num_nodes: int
    num_processes: int

    def __init__(
        self,
        parallelize_fn: Callable[[Any, Any], Any] | None = None,
        *,
        replicate_size: int = 1,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        sizes = [
            read_as(number(1), "replicate_size", replicate_size, IntegrationError),
            read_as(number(1), "tensor_parallel_size", tensor_parallel_size, IntegrationError),
        ]
        options: dict[str, Any] = {
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "process_group_backend": process_group_backend,
            "timeout": timeout or default_pg_timeout,
        }
        if isinstance(self, FabricModelParallel):
            options["parallelize_fn"] = parallelize_fn
        super().__init__(**options)
        # Fabric needs this attribute for its own `no_backward_sync`.
        self._backward_sync_control = SimpleNamespace(no_backward_sync=_no_sync)
        check_version("lightning")
        if sizes[1] > 1 and parallelize_fn is None:
            msg = (
                f"tensor_parallel_size={tensor_parallel_size} needs a parallelize_fn(module, mesh) "
                f"that splits the module over mesh['tensor_parallel'], and then calls fully_shard."
            )
            raise IntegrationError(msg)
        self._fn = parallelize_fn
        self._replicate_size, self._tensor_parallel_size = sizes

    def setup_environment(self) -> None:
        """Start the process group, and make the mesh."""
        world_size = self.num_nodes * self.num_processes
        per_shard = self._replicate_size * self._tensor_parallel_size
        if world_size % per_shard:
            msg = (
                f"{world_size} ranks are not divisible by replicate_size={self._replicate_size} "
                f"times tensor_parallel_size={self._tensor_parallel_size}. Change one of them."
            )
            raise IntegrationError(msg)
        self._data_parallel_size = world_size // self._tensor_parallel_size
        super().setup_environment()  # type: ignore[misc]
        if self._replicate_size > 1:
            shape = (self._replicate_size, world_size // per_shard, self._tensor_parallel_size)
            self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=_AXES)
            module = getattr(self, "lightning_module", None)
            if module is not None:
                module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's part of the data; replicas have different parts."""
        mesh = self.device_mesh
        size, rank = mesh["data_parallel"].size(), mesh["data_parallel"].get_local_rank()
        if self._replicate_size > 1:
            rank += size * mesh["replicate"].get_local_rank()
            size *= self._replicate_size
        return {"num_replicas": size, "rank": rank}

    def _shard(self, module: nn.Module) -> nn.Module:
        """Shard a module that is not sharded yet; give values to its tensors on meta."""
        if not _roots_in(module):
            module = self._parallelize(module)
        if not _roots_in(module):
            msg = (
                f"parallelize_fn has sharded nothing in {type(module).__name__}. Call "
                f"shardkit.fully_shard or shardkit.auto_shard in it, with mesh['data_parallel']."
            )
            raise IntegrationError(msg)
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            materialize(module)
        _rest_to_device(module, self.root_device)
        _update_properties(module, device=self.root_device)
        if self._replicate_size > 1:
            for root in _roots_in(module):
                root.check_replicas()
        return module

    def _parallelize(self, module: nn.Module) -> nn.Module:
        if self._fn is not None:
            result: nn.Module = self._fn(module, self.device_mesh)
            return result
        axes = "data_parallel" if self._replicate_size == 1 else _AXES[:2]
        for root in self._modules_to_shard(module):
            auto_shard(root, mesh=self.device_mesh[axes])
        return module

    def _modules_to_shard(self, module: nn.Module) -> list[nn.Module]:
        return [module]


def _roots_in(module: nn.Module) -> list[Any]:
    """Return the outermost sharded modules."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in _roots_in(child)]


def _rest_to_device(module: nn.Module, device: torch.device) -> None:
    """Move tensors outside of sharded modules: metrics, and buffers of the module itself."""
    if isinstance(module, FSDPModule):
        return
    if not _roots_in(module):
        module.to(device)
        return
    for param in module.parameters(recurse=False):
        param.data = param.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))
    for child in module.children():
        _rest_to_device(child, device)


@contextlib.contextmanager
def _no_sync(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for root in _roots_in(module) if enabled else []:
            stack.enter_context(root.no_sync())
        yield


class ShardkitFabricStrategy(_Sharding, FabricModelParallel):
    """Shards a module that is passed to ``fabric.setup`` or ``fabric.setup_module``.

        fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardkitFabricStrategy())
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)

    Parameters stay the same objects, so the optimizer may be made before. A module that is already
    sharded stays as it is. A module that ``fabric.init_module(empty_init=True)`` put on meta gets
    its values from `shardkit.materialize`. Saving, loading, clipping and `no_backward_sync` work as
    with Lightning's `ModelParallelStrategy`, and the files are the same.

    Args:
        parallelize_fn: Function ``fn(module, mesh)`` that shards the module and returns it. The
            mesh is torch's, with the axes ``"data_parallel"`` and ``"tensor_parallel"``, and
            ``"replicate"`` before them if there are replicas. None: `shardkit.auto_shard` over the
            data-parallel axes.
        replicate_size: Number of replicas of the model; each of them is sharded (hybrid sharding).
        tensor_parallel_size: Number of ranks that get the same batch and split each layer.
        save_distributed_checkpoint: Whether each rank writes its shards into a directory. False:
            the first rank writes one file with whole tensors.
        process_group_backend: Setting of Lightning's strategy.
        timeout: Setting of Lightning's strategy; None: its default.

    Raises:
        IntegrationError: Lightning is older than the tested versions; a size is less than 1, or the
            number of ranks is not divisible by the sizes; there is tensor parallelism without a
            `parallelize_fn`; or the `parallelize_fn` shards nothing.
    """

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module; called by `fabric.setup_module`."""
        return self._shard(module)


class ShardkitStrategy(_Sharding, TrainerModelParallel):
    """Shards a `LightningModule` for Lightning's `Trainer`.

        trainer = Trainer(accelerator="cpu", devices=2, strategy=ShardkitStrategy())
        trainer.fit(lightning_module)

    If there is no `parallelize_fn`, and `configure_model` has sharded nothing by ``fully_shard``,
    each module that the `LightningModule` holds is sharded by `shardkit.auto_shard`. Each is a
    separate root, so `training_step` must call it, and not only modules inside of it. For modules
    without a forward (``ModuleList``), the modules in them are sharded instead. Gradients are
    accumulated without communication (`accumulate_grad_batches`). Saving, loading and clipping work
    as with Lightning's `ModelParallelStrategy`, and the files are the same.

    Args:
        parallelize_fn: Argument of `ShardkitFabricStrategy`; it gets the `LightningModule`.
        replicate_size: Argument of `ShardkitFabricStrategy`.
        tensor_parallel_size: Argument of `ShardkitFabricStrategy`.
        save_distributed_checkpoint: Argument of `ShardkitFabricStrategy`.
        process_group_backend: Setting of Lightning's strategy.
        timeout: Setting of Lightning's strategy; None: its default.

    Raises:
        IntegrationError: The same as for `ShardkitFabricStrategy`; also, without a
            `parallelize_fn`, for parameters that belong to the `LightningModule` itself, whose
            gradients would not be averaged.
    """

    model: Any

    def setup(self, trainer: Any) -> None:
        """Shard the module, then make the optimizers; called by the `Trainer`."""
        self.accelerator.setup(trainer)
        self.model = self._shard(self.precision_plugin.convert_module(self.model))
        self.barrier()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _modules_to_shard(self, module: nn.Module) -> list[nn.Module]:
        own = [name for name, param in module.named_parameters(recurse=False)]
        if own:
            msg = (
                f"parameter {own[0]!r} belongs to {type(module).__name__} itself, which is not "
                f"sharded, so its gradient would not be averaged. Put it into a module that "
                f"training_step calls, or pass a parallelize_fn that shards the whole."
            )
            raise IntegrationError(msg)
        found = []
        for child in module.children():
            if not any(True for _ in child.parameters()):
                continue
            has_forward = type(child).forward is not nn.Module.forward
            found += [child] if has_forward else self._modules_to_shard(child)
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer; called by the `Trainer` when it saves a checkpoint.

        Torch looks for the optimizer's parameters in the `LightningModule`. There a root that still
        waits for a backward, such as the generator of a GAN, would show unsharded ones.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate without communication; called by the `Trainer` between optimizer steps."""
        return _no_sync(self.model)


def _also_shardkit(original: Callable[[object], bool], module: object) -> bool:
    """Make Lightning's checkpoint functions treat sharded modules as distributed ones."""
    return (isinstance(module, nn.Module) and bool(_roots_in(module))) or original(module)


# Functions that the strategies above inherit call it. For other strategies nothing changes.
wrap(fabric_module, "_has_dtensor_modules", _also_shardkit)
