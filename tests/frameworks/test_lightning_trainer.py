"""Lightning's Trainer with `ShardkitStrategy` trains as with its own DDP."""

from __future__ import annotations

import importlib.metadata
import typing

import pytest
import torch
from launched import TIMEOUT_S, set_launchers_variables
from torch import Tensor, nn

import shardkit

if typing.TYPE_CHECKING:
    import pathlib

    from workers import Spawn

pytestmark = pytest.mark.frameworks

TOLERANCE = 2e-6  # Losses lie between 1 and 5.
EPOCHS = 2


def make_trainer(folder: str, strategy: typing.Any, **options: typing.Any) -> typing.Any:
    import lightning
    import torch.distributed as dist

    settings = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        **options,
    }
    return lightning.Trainer(strategy=strategy, **settings)


def fit(folder: str, strategy: typing.Any, module: typing.Any, **options: typing.Any) -> typing.Any:
    """Train a module, and return its trainer."""
    from lightning_modules import make_loader

    path = options.pop("ckpt_path", None)
    trainer = make_trainer(folder, strategy, **options)
    trainer.fit(module, make_loader(), make_loader(), ckpt_path=path)
    return trainer


@torch.no_grad()
def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters, also of sharded modules."""
    return {
        name: (p.full_tensor() if isinstance(p, shardkit.ShardedTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }


def assert_alike(module: typing.Any, plain: typing.Any) -> None:
    torch.testing.assert_close(module.losses, plain.losses, rtol=0, atol=TOLERANCE)
    expected = whole(plain)
    for name, value in whole(module).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)


def train_both(folder: str, options: dict[str, typing.Any]) -> None:
    from lightning_modules import Lit

    from shardkit.integrations.lightning import ShardkitStrategy

    set_launchers_variables()
    plain, module = Lit(), Lit()
    expected = fit(folder, "ddp", plain, **options).callback_metrics["val_loss"]
    trainer = fit(folder, ShardkitStrategy(), module, **options)
    assert all(isinstance(p, shardkit.ShardedTensor) for p in module.parameters())
    assert {type(m).__name__ for m in module.children()} == {"FSDPNet", "ModuleList"}
    assert_alike(module, plain)
    found = trainer.callback_metrics["val_loss"]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


CLIPPING = {
    "by norm": {},
    "by value": {"gradient_clip_algorithm": "value"},
    "every batch": {"accumulate_grad_batches": 1},
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", CLIPPING.values(), ids=CLIPPING)
def test_training_equals_replicated_training(
    spawn: Spawn, tmp_path: pathlib.Path, options: dict[str, typing.Any], ranks: int
) -> None:
    spawn(train_both, ranks, str(tmp_path), options, timeout_s=TIMEOUT_S)


def go_on(folder: str, distributed: bool) -> None:
    """Train from a checkpoint of the first epoch, in another module."""
    from lightning_modules import Lit, make_loader

    from shardkit.integrations.lightning import ShardkitStrategy

    def strategy() -> typing.Any:
        return ShardkitStrategy(save_distributed_checkpoint=distributed)

    set_launchers_variables()
    once, half, rest = Lit(), Lit(), Lit(seed=1)
    fit(folder, strategy(), once)
    fit(folder, strategy(), half, max_epochs=1).save_checkpoint(f"{folder}/half.ckpt")
    trainer = fit(folder, strategy(), rest, ckpt_path=f"{folder}/half.ckpt")
    assert rest.losses == once.losses[len(half.losses) :]
    expected = whole(once)
    for name, value in whole(rest).items():
        assert torch.equal(value, expected[name]), name
    [found] = trainer.validate(rest, make_loader(), verbose=False)
    assert found["val_loss"] == float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("distributed", [True, False])
def test_training_goes_on_from_a_checkpoint(
    spawn: Spawn, tmp_path: pathlib.Path, *, distributed: bool
) -> None:
    spawn(go_on, 2, str(tmp_path), distributed, timeout_s=TIMEOUT_S)
    assert (tmp_path / "half.ckpt").is_dir() == distributed


def go_on_by_hand(folder: str, distributed: bool) -> None:
    from lightning_modules import Adversarial

    from shardkit.integrations.lightning import ShardkitStrategy

    def strategy() -> typing.Any:
        return ShardkitStrategy(save_distributed_checkpoint=distributed)

    set_launchers_variables()
    options: dict[str, typing.Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    plain, half, rest = Adversarial(), Adversarial(), Adversarial(seed=2)
    fit(folder, "ddp_find_unused_parameters_true", plain, **options)
    trainer = fit(folder, strategy(), half, max_epochs=1, **options)
    shown = [p for p in half.parameters() if not isinstance(p, shardkit.ShardedTensor)]
    assert shown  # The generator still waits for a backward.
    trainer.save_checkpoint(f"{folder}/half.ckpt")
    fit(folder, strategy(), rest, ckpt_path=f"{folder}/half.ckpt", **options)
    rest.losses = half.losses + rest.losses
    assert_alike(rest, plain)


@pytest.mark.parametrize("distributed", [True, False])
def test_two_networks_go_on_from_a_checkpoint(
    spawn: Spawn, tmp_path: pathlib.Path, *, distributed: bool
) -> None:
    spawn(go_on_by_hand, 2, str(tmp_path), distributed, timeout_s=TIMEOUT_S)


def read_whole_file(folder: str) -> None:
    """Write one file from a sharded module, and go on from it under DDP."""
    from lightning_modules import Lit

    from shardkit.integrations.lightning import ShardkitStrategy

    set_launchers_variables()
    once, half, rest = Lit(), Lit(), Lit(seed=1)
    fit(folder, "ddp", once)
    strategy = ShardkitStrategy(save_distributed_checkpoint=False)
    fit(folder, strategy, half, max_epochs=1).save_checkpoint(f"{folder}/half.ckpt")
    fit(folder, "ddp", rest, ckpt_path=f"{folder}/half.ckpt")
    torch.testing.assert_close(rest.losses, once.losses[len(half.losses) :], rtol=0, atol=TOLERANCE)


def test_whole_files_are_read_without_shardkit(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(read_whole_file, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def configure_model(folder: str) -> None:
    """Shard in `configure_model`, as under Lightning's own strategy, from meta, on replicas."""
    from lightning_modules import Lit, Net

    from shardkit.integrations.lightning import ShardkitStrategy

    class Late(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net = None

        def configure_model(self) -> None:
            if self.net is not None:
                return
            with torch.device("meta"):
                self.net = Net()
            mesh = self.device_mesh["replicate", "data_parallel"]
            for block in self.net.blocks:
                shardkit.fully_shard(block, mesh=mesh)
            for module in (self.net, *self.heads):
                shardkit.fully_shard(module, mesh=mesh)
            torch.manual_seed(0)  # For what the strategy gives values to.

    set_launchers_variables()
    plain, module = Lit(), Late()
    fit(folder, "ddp", plain)
    fit(folder, ShardkitStrategy(replicate_size=2), module)
    assert next(module.parameters()).device_mesh.shape == (2, 2)
    assert_alike(module, plain)


def test_a_module_may_shard_itself_on_replicas(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(configure_model, 4, str(tmp_path), timeout_s=TIMEOUT_S)


def count_unsynced(folder: str) -> list[bool]:
    """Say for each batch whether gradients wait for the next one."""
    from lightning_modules import Lit

    from shardkit.integrations.lightning import ShardkitStrategy

    class Watching(Lit):
        def on_after_backward(self) -> None:
            waiting.append(self.net.memory_stats()["unsynced_grad_nbytes"] > 0)

    set_launchers_variables()
    waiting: list[bool] = []
    fit(folder, ShardkitStrategy(), Watching(), max_epochs=1, limit_train_batches=4)
    return waiting


def test_nothing_is_sent_between_steps(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    assert (
        spawn(count_unsynced, 2, str(tmp_path), timeout_s=TIMEOUT_S)
        == [[True, False, True, False]] * 2
    )


def differ(folder: str) -> None:
    """Give replicas other values."""
    import torch.distributed as dist
    from lightning_modules import Lit

    from shardkit.integrations.lightning import ShardkitStrategy

    set_launchers_variables()
    fit(folder, ShardkitStrategy(replicate_size=2), Lit(seed=dist.get_rank()))


def test_replicas_that_differ_are_refused(spawn_errors: Spawn, tmp_path: pathlib.Path) -> None:
    for error in spawn_errors(differ, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        assert error.type_name == "RankMismatchError"


def refuse(folder: str, kind: str) -> None:
    from lightning_modules import Lit

    from shardkit.integrations.lightning import ShardkitStrategy

    set_launchers_variables()
    module = Lit()
    if kind == "own":
        module.scale = nn.Parameter(torch.ones(()))
    options = {
        "own": {},
        "sizes": {"replicate_size": 3},
        "no size": {"replicate_size": 0},
        "tensor parallel": {"tensor_parallel_size": 2},
        "nothing": {"parallelize_fn": lambda module, mesh: module},  # noqa: ARG005
    }
    fit(folder, ShardkitStrategy(**options[kind]), module)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("own", "parameter 'scale' belongs to Lit itself"),
        ("sizes", "2 ranks are not divisible by replicate_size=3"),
        ("no size", "replicate_size must be an integer of at least 1, got 0"),
        ("tensor parallel", "needs a parallelize_fn"),
        ("nothing", "parallelize_fn has sharded nothing in Lit"),
    ],
)
def test_what_is_refused(
    spawn_errors: Spawn, tmp_path: pathlib.Path, kind: str, message: str
) -> None:
    for error in spawn_errors(refuse, 2, str(tmp_path), kind, timeout_s=TIMEOUT_S):
        assert error.type_name == "IntegrationError"
        assert message in error.message


def move_the_rest() -> None:
    """Meta plays the accelerator that the strategy was given."""
    from lightning_modules import Lit

    from shardkit.integrations.lightning import ShardkitFabricStrategy

    set_launchers_variables()
    module = Lit()
    module.register_buffer("weights", torch.ones(3))
    module.metric = nn.BatchNorm1d(3, affine=False)
    shardkit.auto_shard(module.net)
    held = next(module.net.parameters())
    strategy = ShardkitFabricStrategy()
    strategy.parallel_devices = [torch.device("meta")]
    strategy.setup_module(module)  # What both strategies do.
    assert module.device == torch.device("meta")
    rest = [module.weights, module.metric.running_mean, *module.heads.parameters()]
    assert all(tensor.is_meta for tensor in rest)
    assert "weights" in module.state_dict()
    assert next(module.net.parameters()) is held
    assert not held.is_meta


def test_what_is_not_sharded_goes_to_the_device(spawn: Spawn) -> None:
    spawn(move_the_rest, 1, timeout_s=TIMEOUT_S)


@pytest.mark.filterwarnings("ignore:pkg_resources is deprecated")  # Lightning 2.3 asks for it.
def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.integrations.lightning import ShardkitStrategy

    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.1.4")
    with pytest.raises(shardkit.IntegrationError, match=r"lightning 2\.1\.4 is installed"):
        ShardkitStrategy()
