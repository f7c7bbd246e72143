"""What is compared: shardkit, torch FSDP2, torch DDP, the floor below all, and plain torch.

All contenders train the same model, from the same seed, with ``AdamW(foreach=True)``. There are
exceptions: `LOCAL` and `FLAT` use ``AdamW(fused=True)``, and two more use Muon for the matrices of
the blocks. `EXPERTS` and `FSDP2_EXPERTS` train a mixture of experts. For both the same code first
splits the experts over some ranks, as DTensors. In mixed precision the contenders cannot all do the
same arithmetic, so each does the nearest that it offers:

=========== ============================================================================
shardkit    ``param_dtype`` compute, fp32 reduction, fp32 shards for the optimizer
torch FSDP2 the same policy
torch DDP   autocast over fp32 parameters. DDP keeps no fp32 copy of low-precision
            parameters, so autocast is the usual way: every weight is cast again in every
            forward, and norms and gradients stay fp32
floor       a model in ``param_dtype``, its 1/N of optimizer state in fp32
plain torch nothing: in its cases the parameters are stored in the dtype of the compute
=========== ============================================================================
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from experts import ExpertsShape, MixtureOfExperts
from llama import Llama, LlamaShape
from models import GPT, GPTShape, Many, ManyShape, add_adapters

SHARDKIT = "shardkit"
FSDP2 = "torch FSDP2"
DDP = "torch DDP"
FLOOR = "floor"
PLAIN = "plain torch"
LOCAL = "shardkit, local fused"
MATRIX = "shardkit, Muon"
FSDP2_MUON = "torch FSDP2, Muon"
EXPERTS = "shardkit, one call"
FSDP2_EXPERTS = "torch FSDP2, two groups"
ONE_GROUP = "one group"
LISTS = "shardkit, lists of 64"
FLAT = "plain fused"  # The floor, whose 1/N of the optimizer state is updated by the fused kernel.
BESIDE = "shardkit beside"
"""shardkit of another commit: the environment variable below has its folder ``src``."""
BESIDE_SOURCE = "SHARDKIT_BENCH_BESIDE"

CONTENDERS = (SHARDKIT, FSDP2, DDP, FLOOR)

Model = GPT | Llama | MixtureOfExperts | Many


@dataclass(frozen=True)
class Workload:
    """What is trained: a model, and the precision of its compute."""

    # Sizes of the model and of a rank's batch.
    shape: GPTShape | LlamaShape | ExpertsShape | ManyShape
    # Compute dtype of mixed precision; None computes as the parameters are stored.
    param_dtype: torch.dtype | None = None
    # Dtype of the parameters, hence of the optimizer; None: fp32.
    stored_dtype: torch.dtype | None = None
    # Dtype of gradients in reductions; None: the dtype in which they are computed.
    reduce_dtype: torch.dtype | None = torch.float32
    compiled: bool = False  # Whether the forward of each layer is compiled by itself.
    # Argument of `fully_shard`, of shardkit and FSDP2; None: the default.
    reshard_after_forward: bool | None = None
    microbatches: int = 1  # Backwards in each step; gradients are synced in the last one.
    # Rank of the adapters beside each linear layer of the blocks, which alone are trained; 0: there
    # are no adapters, and everything is trained.
    adapter_rank: int = 0
    recompute: bool = False  # Whether backward runs each block's forward again.


class Optimizer(Protocol):
    """An object that takes optimizer steps."""

    def step(self) -> object:
        """Take a step."""


@dataclass(frozen=True)
class Several:
    """Optimizers that step one after the other."""

    optimizers: tuple[torch.optim.Optimizer, ...]

    def step(self) -> None:
        """Step all optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Trainer:
    """A model that is ready to train, however it is distributed."""

    model: nn.Module  # The model, which returns its loss.
    optimizer: Optimizer  # The optimizer of the parameters that this rank updates.
    # A function that makes the context of every forward.
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    set_sync: Callable[[bool], object] = lambda _: None
    """Called before a forward: whether its backward syncs gradients."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run one forward."""
        with self.autocast():
            loss: Tensor = self.model(inputs, targets)
        return loss


def missing(name: str) -> str | None:
    """Say why a contender cannot run here, or return None if it can."""
    if name == BESIDE:
        return None if BESIDE_SOURCE in os.environ else "option --beside names its source"
    if name not in (SHARDKIT, LOCAL, MATRIX, EXPERTS, ONE_GROUP):
        return None
    try:
        importlib.import_module("shardkit")
    except ImportError as error:
        return str(error)
    return None


def build(name: str, workload: Workload, device: torch.device) -> Trainer:
    """Make a contender's trainer on this rank, of the default process group's world.

    Args:
        name: One of the names in this module.
        workload: The workload that the contender trains.
        device: The device on which this rank computes.
    """
    torch.manual_seed(0)
    with device:
        model = workload.shape.build()
    model.to(workload.stored_dtype)
    if workload.adapter_rank:
        add_adapters(model, workload.adapter_rank)
    if workload.recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if workload.compiled:
        for block in model.blocks:
            # Not the module: for all contenders the hooks of sharding stay outside the graph.
            block.forward = torch.compile(block.forward, fullgraph=True)
    return _BUILDERS[name](model, workload, device)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(_trained(parameters), lr=3e-4, foreach=True)


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _shard_by_block(model: Model, shard: Callable[[nn.Module], object]) -> Trainer:
    """Make each block a group; the embeddings, last norm and head belong to the root's group."""
    for block in model.blocks:
        shard(block)
    shard(model)
    root: Any = model
    return Trainer(model, _adamw(model.parameters()), set_sync=root.set_requires_gradient_sync)


def shardkit_of(name: str) -> Any:
    """Import shardkit in this rank: from this tree, or for `BESIDE` from the option's folder.

    Raises:
        RuntimeError: Another shardkit was imported instead.
    """
    if name != BESIDE:
        # Imported here: the other contenders can be measured without shardkit.
        return importlib.import_module("shardkit")
    source = os.environ[BESIDE_SOURCE]
    sys.path.insert(0, source)
    found = importlib.import_module("shardkit")
    if not str(found.__file__).startswith(source):
        message = f"shardkit was imported from {found.__file__}, not from {source}"
        raise RuntimeError(message)
    return found


def _shardkit(
    model: Model, workload: Workload, device: torch.device, *, name: str = SHARDKIT
) -> Trainer:
    shardkit = shardkit_of(name)
    mesh = shardkit.init_device_mesh(
        device.type, (dist.get_world_size(),), mesh_dim_names=("shard",)
    )
    policy = shardkit.MixedPrecisionPolicy(
        param_dtype=workload.param_dtype, reduce_dtype=workload.reduce_dtype
    )
    reshard = workload.reshard_after_forward
    shard = partial(shardkit.fully_shard, reshard_after_forward=reshard)
    return _shard_by_block(model, partial(shard, mesh=mesh, mp_policy=policy))


def _one_group(model: Model, workload: Workload, device: torch.device) -> Trainer:
    del workload, device
    shardkit_of(SHARDKIT).fully_shard(model)
    return Trainer(model, _adamw(model.parameters()))


def _lists(model: Model, workload: Workload, device: torch.device) -> Trainer:
    del workload, device
    shard = shardkit_of(SHARDKIT).fully_shard
    for first in range(0, len(model.blocks), 64):
        shard([*model.blocks[first : first + 64]])
    shard(model)
    return Trainer(model, _adamw(model.parameters()))


def _local(model: Model, workload: Workload, device: torch.device) -> Trainer:
    from shardkit.optim import LocalOptimizer

    _shardkit(model, workload, device)
    optimizer = LocalOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)
    return Trainer(model, optimizer)


def _fsdp2(model: Model, workload: Workload, device: torch.device) -> Trainer:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(
        param_dtype=workload.param_dtype, reduce_dtype=workload.reduce_dtype
    )
    shard = partial(fully_shard, reshard_after_forward=workload.reshard_after_forward)
    return _shard_by_block(model, partial(shard, mesh=mesh, mp_policy=policy))


def _split_experts(model: Model, workload: Workload) -> tuple[DeviceMesh, DeviceMesh]:
    """Split the experts; return the mesh of ranks with the same experts, and that of all ranks."""
    assert isinstance(workload.shape, ExpertsShape)
    assert isinstance(model, MixtureOfExperts)
    ep = workload.shape.ep
    sizes = (dist.get_world_size() // ep, ep)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("efsdp", "ep"))
    for block in model.blocks:
        block.split(mesh["ep"])
    world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return mesh["efsdp"], world


def _experts_shardkit(model: Model, workload: Workload, device: torch.device) -> Trainer:
    del device
    shardkit = shardkit_of(SHARDKIT)
    efsdp, world = _split_experts(model, workload)
    experts = {id(p) for name, p in model.named_parameters() if ".experts." in name}

    def shard(module: nn.Module) -> None:
        shardkit.fully_shard(
            module, mesh=world, shard_placement_fn=lambda p: efsdp if id(p) in experts else None
        ).set_gradient_divide_factor(world.size())

    return _shard_by_block(model, shard)


def _experts_fsdp2(model: Model, workload: Workload, device: torch.device) -> Trainer:
    """Shard as torchtitan does: experts are a group of their own, prefetched with their block."""
    del device
    efsdp, world = _split_experts(model, workload)

    def shard(module: nn.Module) -> None:
        if experts := getattr(module, "experts", None):
            fully_shard(experts, mesh=efsdp)
            experts.set_gradient_divide_factor(world.size())
            experts.set_force_sum_reduction_for_comms(True)  # gloo does not multiply.
        fully_shard(module, mesh=world)

    trainer = _shard_by_block(model, shard)
    blocks: Any = model.blocks
    for block, after in pairwise(blocks):
        block.set_modules_to_forward_prefetch([after, after.experts])
        after.set_modules_to_backward_prefetch([block, block.experts])
    return trainer


def _muon(
    model: Model, make_muon: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> Trainer:
    """Let Muon step the blocks' matrices, and AdamW the rest."""
    matrices = [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    ids = {id(param) for param in matrices}
    rest = [param for param in model.parameters() if id(param) not in ids]
    return Trainer(model, Several((make_muon(matrices), _adamw(rest))))


def _matrix(model: Model, workload: Workload, device: torch.device) -> Trainer:
    from shardkit.optim import MatrixOptimizer

    _shardkit(model, workload, device)
    return _muon(model, lambda params: MatrixOptimizer(params, torch.optim.Muon, lr=1e-2))


def _fsdp2_muon(model: Model, workload: Workload, device: torch.device) -> Trainer:
    _fsdp2(model, workload, device)
    return _muon(model, lambda params: torch.optim.Muon(params, lr=1e-2))


def _ddp(model: Model, workload: Workload, device: torch.device) -> Trainer:
    # If gradients are views of the buckets, DDP saves one copy of them: its best case.
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def set_sync(on: bool) -> None:  # noqa: FBT001 - as `set_requires_gradient_sync`
        replica.require_backward_grad_sync = on  # What `no_sync` sets.

    trainer_for = partial(Trainer, replica, _adamw(replica.parameters()), set_sync=set_sync)
    if workload.param_dtype is None:
        return trainer_for()
    return trainer_for(partial(torch.autocast, device.type, dtype=workload.param_dtype))


def _floor(
    model: Model, workload: Workload, device: torch.device, *, fused: bool = False
) -> Trainer:
    """Compute as on one device and update 1/N of the state, without communication.

    The updates use constant gradients, go to copies and never reach the model. So the cost is that
    of perfect sharding, but the model does not learn. It keeps a whole model and whole gradients,
    so it is a bound of time, not of memory.
    """
    del device
    masters = _first_part(_trained(model.parameters()), dist.get_world_size())
    for master in masters:
        master.grad = torch.full_like(master, 1e-3)
    optimizer = torch.optim.AdamW(masters, lr=3e-4, foreach=not fused, fused=fused)
    return Trainer(model.to(workload.param_dtype), optimizer)


def _first_part(parameters: list[nn.Parameter], parts: int) -> list[nn.Parameter]:
    """Copy the first 1/``parts`` of all elements, with the parameters laid end to end."""
    left = sum(parameter.numel() for parameter in parameters) // parts
    pieces = []
    for parameter in parameters:
        piece = parameter.detach().flatten()[:left].clone()
        left -= piece.numel()
        if piece.numel():
            pieces.append(nn.Parameter(piece))
    return pieces


def _plain(model: Model, workload: Workload, device: torch.device) -> Trainer:
    del workload, device
    return Trainer(model, _adamw(model.parameters()))


_BUILDERS: dict[str, Callable[[Model, Workload, torch.device], Trainer]] = {
    SHARDKIT: _shardkit,
    BESIDE: partial(_shardkit, name=BESIDE),
    FSDP2: _fsdp2,
    DDP: _ddp,
    FLOOR: _floor,
    LOCAL: _local,
    MATRIX: _matrix,
    FSDP2_MUON: _fsdp2_muon,
    EXPERTS: _experts_shardkit,
    FSDP2_EXPERTS: _experts_fsdp2,
    ONE_GROUP: _one_group,
    LISTS: _lists,
    FLAT: partial(_floor, fused=True),
    PLAIN: _plain,
}
