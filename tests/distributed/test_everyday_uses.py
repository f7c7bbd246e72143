"""What people do with parameters, gradients and optimizer state, on ranks and on a plain tensor."""

from __future__ import annotations

import copy
import math
import pickle
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkit
from everyday_uses import COLUMNS, EVERYDAY, LOSSES, ROWS
from reference import assert_nothing_wrong, make_mesh
from shardkit import ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers

# Reductions over pieces add up in another order; inverses multiply that.
TOLERANCES = {"rtol": 1e-5, "atol": 1e-5}
# Over these meshes, data-parallel and tensor-parallel, the parameter is split before it is cut.
SPLIT = {(1, 3): Shard(1), (2, 2): Shard(0)}
KINDS = ("parameter", "gradient", "state", "data")


class Holder(nn.Module):
    """A parameter behind a small one, so that its cuts fall inside rows."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.first = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator))

    def forward(self, scale: float) -> Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        return ((weight * scale).sin() * 3).sum() + self.first.sum()


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(0.7).backward()
    optimizer.step()
    return optimizer


def sharded_holder(plain: Holder, mesh_shape: tuple[int, ...]) -> Holder:
    """Shard a copy over a mesh; over those of `SPLIT` the parameter is split before."""
    sharded = copy.deepcopy(plain)
    if mesh_shape not in SPLIT:
        return fully_shard(sharded, make_mesh(mesh_shape))
    mesh = init_torch_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    placement = SPLIT[mesh_shape]
    sharded.weight = nn.Parameter(distribute_tensor(sharded.weight.data, mesh["tp"], [placement]))
    return fully_shard(sharded, mesh["dp"])


def tensors_of(mesh_shape: tuple[int, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (sharded, plain) of each kind, after a step."""
    plain = Holder()
    sharded = sharded_holder(plain, mesh_shape)
    found = []
    for module in (sharded, plain):
        optimizer = stepped(module)
        weight = module.weight
        state = optimizer.state[weight]["exp_avg"]
        found.append((weight, weight.grad, state, weight.data))
    return dict(zip(KINDS, zip(*found, strict=True), strict=True))


def as_plain(result: typing.Any) -> typing.Any:
    if isinstance(result, Tensor):
        if hasattr(result, "full_tensor"):
            result = result.full_tensor()
        assert type(result) in (Tensor, nn.Parameter), type(result)
        return result.detach()
    if isinstance(result, (list, tuple)):
        return [as_plain(item) for item in result]
    return result


def wrong_uses(mesh_shape: tuple[int, ...], kind: str) -> list[str]:
    """Return the uses whose result is not that of the plain tensor."""
    sharded, plain = tensors_of(mesh_shape)[kind]
    assert isinstance(sharded, ShardedTensor)
    start = plain.detach().clone()
    wrong = []
    with torch.no_grad():
        for name, use in EVERYDAY.items():
            sharded.copy_(start)
            plain.copy_(start)
            try:
                expected = as_plain(use(plain, start.clone()))
                result = as_plain(use(sharded, start.clone()))
                torch.testing.assert_close(result, expected, **TOLERANCES)
                torch.testing.assert_close(as_plain(sharded), as_plain(plain), **TOLERANCES)
            except Exception as error:  # noqa: BLE001 - all are shown together
                wrong.append(f"{name}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), *SPLIT], ids=str)
def test_everyday_uses_are_those_of_the_whole(
    spawn: Spawn, mesh_shape: tuple[int, ...], kind: str
) -> None:
    by_rank = spawn(wrong_uses, math.prod(mesh_shape), mesh_shape, kind)
    assert_nothing_wrong(by_rank)


def wrong_gradients(mesh_shape: tuple[int, ...]) -> list[str]:
    """Return the losses whose gradient is not the plain parameter's, also on top of a step's."""
    wrong = []
    x = torch.linspace(-1, 1, COLUMNS * 3).view(COLUMNS, 3)
    for name, loss in LOSSES.items():
        plain = Holder()
        sharded = sharded_holder(plain, mesh_shape)
        whole = plain.weight.detach() + 0.5
        try:
            for times in range(2):
                for module in (sharded, plain):
                    (loss(module.weight, whole, x) + module(0.7)).backward()
                    loss(module.weight, whole, x).backward()
                grad = sharded.weight.grad
                assert isinstance(grad, ShardedTensor), type(grad)
                assert grad.to_local().shape == sharded.weight.to_local().shape, times
                torch.testing.assert_close(grad.full_tensor(), plain.weight.grad, **TOLERANCES)
            (grad,) = torch.autograd.grad(loss(sharded.weight, whole, x), [sharded.weight])
            (expected,) = torch.autograd.grad(loss(plain.weight, whole, x), [plain.weight])
            torch.testing.assert_close(grad.full_tensor(), expected, **TOLERANCES)
        except Exception as error:  # noqa: BLE001 - all are shown together
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), *SPLIT], ids=str)
def test_gradients_of_uses_are_pieces_of_the_wholes(
    spawn: Spawn, mesh_shape: tuple[int, ...]
) -> None:
    by_rank = spawn(wrong_gradients, math.prod(mesh_shape), mesh_shape)
    assert_nothing_wrong(by_rank)


def redistribute_and_print() -> list[str]:
    """Return what is wrong with methods of DTensor, and what is printed by one rank alone."""
    plain, sharded = Holder(), sharded_holder(Holder(), (2,))
    weight = sharded.weight
    if dist.get_rank() == 0:  # The others would be waited for.
        for text in (repr(weight), f"{weight}", str(weight.data[1]), str([weight.t()])):
            assert "'weight'" in text, text
            assert "(7, 5)" in text, text
    for replica in (Replicate(), shardkit.Replicate()):
        whole = weight.redistribute(placements=[replica])
        assert whole.placements == (shardkit.Replicate(),)
        assert torch.equal(whole.to_local(), plain.weight)
        assert type(whole * 2) is Tensor
    assert weight.redistribute(weight.device_mesh, weight.placements) is weight
    (whole.to_local() ** 2).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), 2 * plain.weight.detach())
    with pytest.raises(shardkit.ShardedTensorError, match=r"'weight' cannot be .*Shard\(dim=0\)"):
        weight.redistribute(placements=[Shard(0)])
    array = weight.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    np_copy = weight.detach().__array__()
    np_copy[0] = 0
    return []


def test_methods_of_dtensor_and_printing_on_one_rank(spawn: Spawn) -> None:
    assert spawn(redistribute_and_print, 2) == [[], []]


def copy_and_pickle_on_one_rank() -> list[str]:
    """Do it after an evaluation, after which the root's parameters stay gathered on all ranks."""
    model = sharded_holder(Holder(), (2,))
    optimizer = stepped(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for act in (copy.deepcopy, pickle.dumps):
            with torch.no_grad():
                model(0.7)
            if dist.get_rank() == 0:
                act(model)
            for _ in range(2):
                optimizer.zero_grad()
                model(0.7).backward()
                optimizer.step()
    return [str(each.message) for each in caught]


def test_one_rank_copies_and_pickles_the_model(spawn: Spawn) -> None:
    for (message,) in spawn(copy_and_pickle_on_one_rank, 2):
        assert message.startswith("position 0 of the process group has pickled its shard")


def warnings_of_large_gathers() -> list[str]:
    model = fully_shard(nn.Linear(600, 500))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.weight.sum()
            model.weight.data.mul_(2.0)
            model.weight.sum(0)
            model.bias.sort()
            repr(model.weight[0])
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in caught]


def test_a_large_gather_is_said_once_for_each_operator_at_the_users_line(spawn: Spawn) -> None:
    [message], others = spawn(warnings_of_large_gathers, 2)
    assert others == []  # One rank says it.
    start = "test_everyday_uses.py: aten.sum.dim_IntList needs the whole of sharded 'weight'"
    assert message.startswith(start)
    for part in ("(500, 600)", "1 MiB", "full_tensor()", "register_fsdp_forward_method()"):
        assert part in message


def shard_what_was_broadcast() -> None:
    """Send rank 0's values to all ranks in place, and shard at once, many times."""
    for _ in range(100):
        module = nn.Linear(8, 8)
        for param in module.parameters():
            dist.broadcast(param.requires_grad_(requires_grad=False), src=0)
        module.requires_grad_()
        fully_shard(module)


def test_sharding_right_after_a_broadcast_of_the_parameters(spawn: Spawn) -> None:
    """The thread of the process group still holds the last parameter for a moment."""
    assert spawn(shard_what_was_broadcast, 2) == [None, None]
