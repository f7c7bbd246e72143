"""Lightning's own strategies for FSDP2 train, save and load under `install` alone."""

from __future__ import annotations

import pathlib
import typing

import pytest
import torch
import torch.distributed as dist
from launched import TIMEOUT_S, set_launchers_variables
from torch import Tensor, nn

import shardkit

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.frameworks

TOLERANCE = 2e-6  # Losses lie around 1.


def shard(net: nn.Module, mesh: typing.Any) -> nn.Module:
    """Shard as scripts for FSDP2 do."""
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


@torch.no_grad()
def whole(module: nn.Module) -> dict[str, Tensor]:
    return {k: p.full_tensor().clone() for k, p in module.named_parameters()}  # type: ignore[operator]


def fit_and_go_on(folder: pathlib.Path, *, distributed: bool) -> tuple[list[float], typing.Any]:
    """Train, save in the middle, and go on from there in another module."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning_modules import Lit, make_loader, make_net

    class Own(Lit):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.seed = seed
            del self.net, self.heads

        def configure_model(self) -> None:
            self.net = shard(make_net(self.seed), self.device_mesh)

        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

    def fit(module: Own, epochs: int, path: str | None = None) -> lightning.Trainer:
        trainer = lightning.Trainer(
            strategy=ModelParallelStrategy(save_distributed_checkpoint=distributed),
            accelerator="cpu",
            devices=2,
            max_epochs=epochs,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, make_loader(), ckpt_path=path)
        return trainer

    first, second = Own(0), Own(1)
    fit(first, 1).save_checkpoint(str(folder / "half.ckpt"))
    fit(second, 2, str(folder / "half.ckpt"))
    return first.losses + second.losses, whole(second)


def fabric_and_go_on(folder: pathlib.Path, *, distributed: bool) -> tuple[list[float], typing.Any]:
    """The same by Fabric."""
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy
    from lightning_modules import make_data, make_net

    losses: list[float] = []
    x, y = make_data().tensors

    def train(path: pathlib.Path | None, seed: int) -> tuple[typing.Any, typing.Any, typing.Any]:
        strategy = ModelParallelStrategy(shard, save_distributed_checkpoint=distributed)
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(make_net(seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = fabric.setup_optimizers(optimizer)
        if path is not None:
            fabric.load(path, {"model": model, "optimizer": optimizer})
        for step in range(3):
            part = slice(10 * step + 5 * dist.get_rank(), 10 * step + 5 * dist.get_rank() + 5)
            loss = (model(x[part]) - y[part]).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return fabric, model, optimizer

    fabric, model, optimizer = train(None, 0)
    fabric.save(folder / "half", {"model": model, "optimizer": optimizer})
    _, model, _ = train(folder / "half", 1)
    return losses, whole(model)


def beside_fsdp2(go: typing.Any, folder: str, *, distributed: bool) -> None:
    set_launchers_variables()
    expected, expected_params = go(pathlib.Path(folder, "fsdp2"), distributed=distributed)
    with shardkit.install():
        found, params = go(pathlib.Path(folder, "shardkit"), distributed=distributed)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    for name, value in expected_params.items():
        torch.testing.assert_close(params[name], value, rtol=0, atol=1e-5, msg=name)


def by_kind(folder: str, kind: str, distributed: bool) -> None:
    go = {"Trainer": fit_and_go_on, "Fabric": fabric_and_go_on}[kind]
    beside_fsdp2(go, folder, distributed=distributed)


@pytest.mark.parametrize("kind", ["Trainer", "Fabric"])
@pytest.mark.parametrize("distributed", [False, True])
def test_training_goes_on_as_with_fsdp2(
    spawn: Spawn, tmp_path: pathlib.Path, kind: str, distributed: bool
) -> None:
    for name in ("fsdp2", "shardkit"):
        (tmp_path / name).mkdir()
    spawn(by_kind, 2, str(tmp_path), kind, distributed, timeout_s=TIMEOUT_S)
