"""What tests of checkpoints have in common: training on one global batch, whole states.

Runs inside workers. Every step has one global batch, of which each rank takes an equal part, so
that training means the same on every number of ranks.
"""

from __future__ import annotations

import dataclasses
import typing

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_by_torch
from torch.distributed.tensor import DTensor

from models import CASES, Case
from reference import AXES, OPTIMIZERS, full, make_mesh, shard
from shardkit import checkpoint

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 12  # Divisible by 1, 2, 3 and 4 ranks.

WholeState = dict[str, typing.Any]
Outcome = tuple[WholeState, list[float]]


def global_batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Draw the samples of a step: equal on every rank and for every number of ranks."""
    generator = torch.Generator().manual_seed(500 + step)
    parts = [case.batch(generator) for _ in range(BATCH)]
    xs, ys = zip(*parts, strict=True)
    return torch.cat(xs)[:BATCH], torch.cat(ys)[:BATCH]


def train_on_shares(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]
) -> list[float]:
    """Train on the global batches of `steps`; return their losses, means over all ranks."""
    losses = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        batch = tuple(part.chunk(world_size)[rank] for part in global_batch(case, step))
        loss = case.loss(model, batch)
        loss.backward()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def make_sharded(
    case: Case, mesh_shape: Sequence[int], *, seed: int = 0, optimizer: str = "adamw"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a case's model, sharded over a mesh, and its optimizer."""
    torch.manual_seed(seed)
    model = shard(case, case.make(), make_mesh(mesh_shape))
    return model, OPTIMIZERS[optimizer](model.parameters())


def whole(value: object) -> object:
    """Return a state in which all tensors are plain and whole, and nobody else's. Collective."""
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(entry) for entry in value]
    if isinstance(value, DTensor):
        return value.detach().full_tensor().clone()
    if isinstance(value, Tensor):
        return full(value.detach()).clone()
    return value


def whole_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> WholeState:
    """Return the whole model and optimizer state, by order of parameters. Collective."""
    return {
        "model": whole(model.state_dict()),
        "optimizers": [whole(optimizer.state_dict()) for optimizer in optimizers],
    }


def leaves(value: object, path: str = "") -> dict[str, object]:
    """Return what is in nested dicts and lists, by the path to it."""
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    else:
        return {path: value}
    found: dict[str, object] = {}
    for key, entry in entries:
        found |= leaves(entry, f"{path}.{key}")
    return found


def is_same(actual: object, expected: object) -> bool:
    """Whether two values are equal, tensors bit for bit, in shape and in dtype."""
    if not isinstance(expected, Tensor):
        return actual == expected
    return (
        isinstance(actual, Tensor)
        and actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and torch.equal(actual, expected)
    )


def assert_same(actual: object, expected: object) -> None:
    """Check that nested states are equal, bit for bit."""
    have, wanted = leaves(actual), leaves(expected)
    assert have.keys() == wanted.keys()
    differing = [path for path in wanted if not is_same(have[path], wanted[path])]
    assert not differing, {path: (_short(have[path]), _short(wanted[path])) for path in differing}


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)} norm {value.double().norm().item():.6g}"
    return str(value)


def mixed_dtypes_gpt() -> nn.Module:
    """Make a GPT of which some layers are kept in half precision."""
    model = CASES["gpt"].make()
    for block in model.blocks:
        block.fc1.to(torch.bfloat16)
        block.fc1.register_forward_pre_hook(_to_bfloat16)
        block.fc1.register_forward_hook(_to_float32)
    return model


def _to_bfloat16(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    del module
    return (args[0].bfloat16(),)


def _to_float32(module: nn.Module, args: object, output: Tensor) -> Tensor:
    del module, args
    return output.float()


CHECKPOINT_CASES = {
    **CASES,
    "mixed": dataclasses.replace(CASES["gpt"], make=mixed_dtypes_gpt),
}


def make_fsdp2(
    case: Case, mesh_shape: Sequence[int], *, seed: int = 0, optimizer: str = "adamw"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a case's model as torch's FSDP2 shards it, and its optimizer."""
    torch.manual_seed(seed)
    model = case.make()
    mesh = init_torch_mesh("cpu", tuple(mesh_shape), mesh_dim_names=AXES[-len(mesh_shape) :])
    for module in (*case.groups(model), model):
        fully_shard_by_torch(module, mesh=mesh)
    return model, OPTIMIZERS[optimizer](model.parameters())


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 50])


def save_and_train(name: str, mesh_shape: tuple[int, ...], folder: str) -> Outcome:
    """Train, save, train on."""
    case = CHECKPOINT_CASES[name]
    model, optimizer = make_sharded(case, mesh_shape)
    scheduler = schedule_of(optimizer)
    train_on_shares(case, model, optimizer, range(2))
    scheduler.step()
    checkpoint.save(folder, model, optimizer, step=2, scheduler=scheduler)
    return whole_state(model, optimizer), train_on_shares(case, model, optimizer, range(2, 4))


def load_and_train(folder: str, steps: tuple[int, int]) -> Outcome:
    """Load a model of the case "gpt", train it on."""
    model, optimizer = make_sharded(CASES["gpt"], (2,), seed=7)
    checkpoint.load(folder, model, optimizer)
    return whole_state(model, optimizer), train_on_shares(
        CASES["gpt"], model, optimizer, range(*steps)
    )
