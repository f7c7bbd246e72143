"""Lightning's Fabric with `ShardkitFabricStrategy`: the user's own loop, replicated or sharded."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from launched import TIMEOUT_S, set_launchers_variables
from torch import Tensor, nn

import shardkit

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.frameworks

TOLERANCE = 2e-6  # Losses lie around 1.
STEPS = 6


def make_fabric(strategy: typing.Any, **options: typing.Any) -> typing.Any:
    import lightning

    set_launchers_variables()
    fabric = lightning.Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options
    )
    fabric.launch()
    return fabric


def sharding(**options: typing.Any) -> typing.Any:
    from shardkit.integrations.lightning import ShardkitFabricStrategy

    return ShardkitFabricStrategy(**options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randn(
        4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
    )
    return numbers[:, :5], numbers[:, 5:]


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return (model(x) - y).square().mean()


def train(
    fabric: typing.Any, model: typing.Any, optimizer: typing.Any, steps: range
) -> list[tuple[float, float]]:
    """Take a step after each second batch, with clipping; return losses and norms."""
    found = []
    for step in steps:
        is_last = step % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = loss_of(model, step)
            fabric.backward(loss / 2)
        if is_last:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            found.append((float(loss.detach()), float(norm)))
    return found


def set_up(strategy: typing.Any, seed: int = 0) -> tuple[typing.Any, typing.Any, typing.Any]:
    from lightning_modules import make_net

    fabric = make_fabric(strategy)
    net = make_net(seed)
    return fabric, *fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))


def assert_alike(model: typing.Any, plain: typing.Any) -> None:
    expected = dict(plain.module.named_parameters())
    for name, value in model.module.named_parameters():
        assert isinstance(value, shardkit.ShardedTensor)
        found = value.full_tensor()
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-5, msg=name)


def train_both(options: dict[str, typing.Any]) -> None:
    plain = set_up("ddp")
    expected = train(*plain, range(STEPS))
    sharded = set_up(sharding(**options))
    found = train(*sharded, range(STEPS))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert_alike(sharded[1], plain[1])


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {}), (3, {}), (4, {"replicate_size": 2})]
)
def test_training_equals_replicated_training(
    spawn: Spawn, ranks: int, options: dict[str, typing.Any]
) -> None:
    spawn(train_both, ranks, options, timeout_s=TIMEOUT_S)


def find_unsynced() -> list[bool]:
    """Say for each of four batches whether gradients wait for the next one."""
    fabric, model, optimizer = set_up(sharding())
    found = []
    for step in range(4):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(loss_of(model, step))
        found.append(model.module.memory_stats()["unsynced_grad_nbytes"] > 0)
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_nothing_is_sent_without_sync(spawn: Spawn) -> None:
    assert spawn(find_unsynced, 2, timeout_s=TIMEOUT_S) == [[True, False, True, False]] * 2


def parallelize(model: typing.Any, mesh: typing.Any) -> typing.Any:
    """Shard as written for Lightning's own strategy, with tensor parallelism where there is any."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if mesh["tensor_parallel"].size() > 1:
        for block in model.blocks:
            plan = {"inner": ColwiseParallel(output_layouts=Replicate())}
            parallelize_module(block, mesh["tensor_parallel"], plan)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy)


def train_with_own_function() -> None:
    """Compare with plain training: the ranks of tensor parallelism have the same batch."""
    with shardkit.install():
        strategy = sharding(parallelize_fn=parallelize, tensor_parallel_size=2)
        fabric = make_fabric(strategy)
        from lightning_modules import make_net

        plain = make_net()
        model = fabric.setup_module(make_net())
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        assert strategy.distributed_sampler_kwargs == {
            "num_replicas": 2,
            "rank": dist.get_rank() // 2,
        }
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(STEPS):
            numbers = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
            mine = numbers[dist.get_rank() // 2]
            fabric.backward((model(mine[:, :5]) - mine[:, 5:]).square().mean())
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            (plain(numbers[..., :5]) - numbers[..., 5:]).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        expected = dict(plain.named_parameters())
        for name, value in model.module.named_parameters():
            found = value.full_tensor()
            torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-6, msg=name)


def test_functions_for_fsdp2_shard_with_tensor_parallelism(spawn: Spawn) -> None:
    spawn(train_with_own_function, 4, timeout_s=TIMEOUT_S)


def save_and_load(folder: str, distributed: bool) -> None:
    fabric, model, optimizer = set_up(sharding(save_distributed_checkpoint=distributed))
    train(fabric, model, optimizer, range(STEPS))
    fabric.save(f"{folder}/saved", {"model": model, "optimizer": optimizer, "step": STEPS})
    expected = train(fabric, model, optimizer, range(STEPS, 2 * STEPS))

    fabric, other, its_optimizer = set_up(sharding(save_distributed_checkpoint=distributed), seed=1)
    state = {"model": other, "optimizer": its_optimizer, "step": 0}
    left = fabric.load(f"{folder}/saved", state)
    assert (state["step"], left) == (STEPS, {})
    assert train(fabric, other, its_optimizer, range(STEPS, 2 * STEPS)) == expected
    for name, value in other.module.named_parameters():
        assert torch.equal(value, model.module.get_parameter(name)), name


@pytest.mark.parametrize("distributed", [True, False])
def test_training_goes_on_from_a_checkpoint(
    spawn: Spawn, tmp_path: pathlib.Path, *, distributed: bool
) -> None:
    spawn(save_and_load, 2, str(tmp_path), distributed, timeout_s=TIMEOUT_S)
    assert (tmp_path / "saved").is_dir() == distributed


def load_whole_file(folder: str) -> None:
    """Read a plain model's file into a sharded one."""
    from lightning_modules import make_net

    plain = make_net()
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), f"{folder}/plain.pt")
    dist.barrier()
    fabric, model, _ = set_up(sharding(), seed=1)
    fabric.load_raw(f"{folder}/plain.pt", model)
    for name, value in model.module.named_parameters():
        assert torch.equal(value.full_tensor(), plain.get_parameter(name)), name


def test_a_plain_file_is_loaded(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(load_whole_file, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def start_on_meta() -> None:
    from lightning_modules import Net, make_net

    fabric = make_fabric(sharding())
    with fabric.init_module(empty_init=True):
        net = Net()
    assert net.enter.weight.is_meta
    torch.manual_seed(0)
    model = fabric.setup_module(net)
    expected = make_net()
    for name, value in model.module.named_parameters():
        assert torch.equal(value.full_tensor(), expected.get_parameter(name)), name


def test_a_module_on_meta_gets_its_values(spawn: Spawn) -> None:
    spawn(start_on_meta, 2, timeout_s=TIMEOUT_S)


def train_in_bfloat16() -> float:
    """Compare autocast in both: the last loss differs by bfloat16's rounding at most."""
    losses = []
    for strategy in ("ddp", sharding()):
        from lightning_modules import make_net

        fabric = make_fabric(strategy, precision="bf16-mixed")
        net = make_net()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        losses.append(train(fabric, model, optimizer, range(STEPS))[-1][0])
    return abs(losses[0] - losses[1])


def test_autocast_of_fabric(spawn: Spawn) -> None:
    assert max(spawn(train_in_bfloat16, 2, timeout_s=TIMEOUT_S)) < 2e-3
