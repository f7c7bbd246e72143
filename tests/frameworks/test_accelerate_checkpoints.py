"""What `Accelerator` saves of sharded models, and loads into them."""

from __future__ import annotations

import pathlib
import typing

import pytest
import torch
import torch.distributed as dist
from accelerate_runs import MICRO_BATCHES, accelerate_ranks, make, prepare, replicated
from launched import TIMEOUT_S, forget_accelerate

from checkpoints import assert_same
from shardkit import checkpoint
from shardkit.optim import MatrixOptimizer

if typing.TYPE_CHECKING:
    from torch import Tensor

    from workers import Spawn

pytestmark = pytest.mark.frameworks

ADAMW = {"optimizer": torch.optim.AdamW, "learning_rate": 1e-2}


def save_and_go_on(kind: str, folder: str) -> None:
    """Train on from a saved state, in another model, and compare with the one that went on."""
    plugin = {"state_dict_type": kind, "activation_checkpointing": True}
    with accelerate_ranks():
        first = prepare(make("tied_llama"), plugin=plugin, **ADAMW)
        first.train("tied_llama", range(MICRO_BATCHES))
        first.accelerator.save_state(folder)
        first.train("tied_llama", range(MICRO_BATCHES, 2 * MICRO_BATCHES))
        expected = first.parameters()
        forget_accelerate()
        second = prepare(make("tied_llama", seed=1), plugin=plugin, **ADAMW)
        second.accelerator.load_state(folder)
        second.train("tied_llama", range(MICRO_BATCHES, 2 * MICRO_BATCHES))
        assert second.losses == first.losses[MICRO_BATCHES:]
        assert_same(second.parameters(), expected)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_training_goes_on_from_a_saved_state(
    spawn: Spawn, tmp_path: pathlib.Path, kind: str
) -> None:
    spawn(save_and_go_on, 2, kind, str(tmp_path), timeout_s=TIMEOUT_S)
    names = {path.name for path in tmp_path.iterdir()}
    whole = {"pytorch_model_fsdp.bin", "optimizer.bin"}
    assert whole <= names if kind == "FULL_STATE_DICT" else {"pytorch_model_fsdp_0"} <= names


def save_two_optimizers(folder: str) -> None:
    """Accelerate saves one optimizer for each model; shardkit takes what it has prepared."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    with accelerate_ranks():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        muon = MatrixOptimizer([layer.weight], torch.optim.Muon, lr=0.02)
        model, *optimizers = accelerator.prepare(
            layer, muon, torch.optim.AdamW([layer.bias], lr=0.01)
        )

        def step() -> dict[str, Tensor]:
            accelerator.backward(model(torch.ones(4, 8)).square().mean())
            for each in optimizers:
                each.step()
                each.zero_grad()
            return {name: param.full_tensor() for name, param in model.named_parameters()}

        step()
        with pytest.raises(IndexError):  # Where this is gone, the page may say so.
            accelerator.save_state(f"{folder}/state")
        checkpoint.save(f"{folder}/saved", model, optimizers)
        expected = step()
        checkpoint.load(f"{folder}/saved", model, optimizers)
        assert_same(step(), expected)


def test_two_optimizers_of_one_model_are_saved_by_shardkit(
    spawn: Spawn, tmp_path: pathlib.Path
) -> None:
    spawn(save_two_optimizers, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def export(folder: str) -> None:
    """Write the whole model in the ways there are, and read it into plain ones."""
    from accelerate import load_checkpoint_in_model

    with accelerate_ranks():
        plain = replicated("tied_llama")
        expected = plain.model.module.state_dict()
        run = prepare(make("tied_llama"), plugin={})
        run.train("tied_llama", range(MICRO_BATCHES))
        whole = run.parameters()
        is_main = run.accelerator.is_main_process
        assert set(whole) == (set(expected) if is_main else set())
        assert all(type(value) is torch.Tensor for value in whole.values())
        run.accelerator.save_model(run.model, f"{folder}/model")
        model = run.accelerator.unwrap_model(run.model)
        assert model is run.model
        model.save_pretrained(
            f"{folder}/pretrained", is_main_process=is_main, state_dict=run.parameters()
        )
        run.accelerator.wait_for_everyone()
        loaded = make("tied_llama", seed=1)
        load_checkpoint_in_model(loaded, f"{folder}/model")
        pretrained = type(loaded).from_pretrained(f"{folder}/pretrained")
        assert pretrained.config.architectures == [type(loaded).__name__]
        for each in (loaded, pretrained):
            for name, value in each.state_dict().items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=3e-6)
        if is_main:
            assert_same(pretrained.state_dict(), whole)


def test_whole_models_are_exported(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(export, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def merge(folder: str) -> None:
    """Merge a directory of pieces into one file by Accelerate's own function."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    with accelerate_ranks():
        run = prepare(make("llama"), plugin={"state_dict_type": "SHARDED_STATE_DICT"})
        run.train("llama", range(2))
        run.accelerator.save_state(folder)
        whole = run.parameters()
        if dist.get_rank() == 0:
            path = pathlib.Path(folder)
            merge_fsdp_weights(str(path / "pytorch_model_fsdp_0"), str(path / "merged"))
            assert_same(load_file(path / "merged" / "model.safetensors"), whole)
        else:
            run.accelerator.wait_for_everyone()


def test_pieces_are_merged_by_accelerate(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(merge, 2, str(tmp_path), timeout_s=TIMEOUT_S)
