"""The Trainer of transformers, with ``fsdp=True``, shards by shardkit."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from accelerate_runs import accelerate_ranks, make
from launched import TIMEOUT_S, forget_accelerate
from zoo import draw_tokens

import shardkit

if typing.TYPE_CHECKING:
    import pathlib

    from torch import Tensor

    from workers import Spawn

pytestmark = pytest.mark.frameworks

# Losses lie between 4 and 5: some units in their last place.
TOLERANCE = 3e-6
TOKENS = draw_tokens(torch.Generator().manual_seed(1), 64)
STEPS = 4
SAVE_STEPS = 2


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": TOKENS[index], "labels": TOKENS[index]}


def make_trainer(
    folder: str, fsdp: dict[str, typing.Any] | None, model: typing.Any, **options: typing.Any
) -> typing.Any:
    """Make a Trainer; with `fsdp`, its ``fsdp_config``, the model is sharded."""
    from transformers import Trainer, TrainingArguments

    chosen = {} if fsdp is None else {"fsdp": True, "fsdp_config": dict(fsdp)}
    settings = {
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": SAVE_STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    arguments = TrainingArguments(folder, **settings, **chosen)
    return Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())


def history(trainer: typing.Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def train_both(name: str, fsdp: dict[str, typing.Any], folder: str, optim: str) -> None:
    """Train replicated, sharded, and sharded from the checkpoint in the middle."""
    with accelerate_ranks():
        plain = make_trainer(f"{folder}/plain", None, make(name), optim=optim)
        plain.train()
        forget_accelerate()
        trainer = make_trainer(f"{folder}/sharded", fsdp, make(name), optim=optim)
        trainer.train()
        assert isinstance(trainer.model, shardkit.FSDPModule)
        for each, tolerance in (("loss", 1), ("eval_loss", 1), ("grad_norm", 5)):
            found, wanted = history(trainer, each), history(plain, each)
            assert len(found) >= STEPS // 2
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * TOLERANCE)
        expected = plain.model.state_dict()
        whole = trainer.accelerator.get_state_dict(trainer.model)
        for key, value in whole.items():
            # AdamW divides by the size of a gradient, also where it is all rounding.
            torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-4, msg=key)
        forget_accelerate()
        resumed = make_trainer(f"{folder}/sharded", fsdp, make(name, seed=1), optim=optim)
        resumed.train(resume_from_checkpoint=f"{folder}/sharded/checkpoint-{SAVE_STEPS}")
        assert history(resumed, "loss") == history(trainer, "loss")
        again = resumed.accelerator.get_state_dict(resumed.model)
        assert all(torch.equal(again[key], value) for key, value in whole.items())
        assert again.keys() == whole.keys()
        assert len(whole) == (len(expected) if dist.get_rank() == 0 else 0)
        prompt = TOKENS[:2, :4]
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(prompt)
        tokens = resumed.model.generate(prompt, attention_mask=mask, **options)
        assert torch.equal(tokens, plain.model.generate(prompt, attention_mask=mask, **options))


WRAP = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
CASES = {
    "sharded files": ("llama", {**WRAP, "state_dict_type": "SHARDED_STATE_DICT"}),
    "whole files": ("tied_llama", {**WRAP, "state_dict_type": "FULL_STATE_DICT"}),
    "checkpointing": ("gpt2", {**WRAP, "activation_checkpointing": True}),
    "kept, by classes": (
        "llama",
        {"reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    ),
    "loaded on one rank": ("tied_llama", {**WRAP, "cpu_ram_efficient_loading": True}),
}


@pytest.mark.parametrize(("name", "fsdp"), CASES.values(), ids=CASES)
def test_training_and_resuming_equal_replicated_training(
    spawn: Spawn, tmp_path: pathlib.Path, name: str, fsdp: dict[str, typing.Any]
) -> None:
    spawn(train_both, 2, name, fsdp, str(tmp_path), "adamw_torch", timeout_s=TIMEOUT_S)


def test_adafactor_trains_as_replicated(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    """Of transformers, which takes no DTensors of FSDP2."""
    fsdp = {**WRAP, "state_dict_type": "FULL_STATE_DICT"}
    spawn(train_both, 2, "llama", fsdp, str(tmp_path), "adafactor", timeout_s=TIMEOUT_S)


def save_nothing(folder: str) -> None:
    with accelerate_ranks():
        fsdp = {**WRAP, "state_dict_type": "SHARDED_STATE_DICT"}
        trainer = make_trainer(folder, fsdp, make("llama"), max_steps=1)
        trainer.train()  # Its checkpoints are complete: no warning.
        if dist.get_rank() == 0:
            with pytest.warns(UserWarning, match="save_model wrote no weights: with SHARDED_STATE"):
                trainer.save_model(f"{folder}/final")
        else:
            trainer.save_model(f"{folder}/final")


def test_a_model_that_is_not_saved_is_warned_of(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(save_nothing, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def save_the_best(folder: str) -> None:
    """Load the best checkpoint in the end, and save what transformers reads."""
    with accelerate_ranks():
        trainer = make_trainer(
            folder,
            {**WRAP, "state_dict_type": "FULL_STATE_DICT"},
            make("tied_llama"),
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            save_total_limit=1,
        )
        trainer.train()
        trainer.save_model(f"{folder}/final")
        whole = trainer.accelerator.get_state_dict(trainer.model)
        trainer.accelerator.wait_for_everyone()
        if dist.get_rank() == 0:
            loaded = type(make("tied_llama")).from_pretrained(f"{folder}/final")
            assert loaded.config.architectures == ["LlamaForCausalLM"]
            assert all(torch.equal(whole[k], v) for k, v in loaded.state_dict().items())
        found = trainer.predict(Sentences()).metrics["test_loss"]
        assert found == min(history(trainer, "eval_loss"))


def test_the_best_model_is_loaded_and_saved(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(save_the_best, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def find_the_best(folder: str) -> None:
    """Load the best checkpoint in the end, of pieces."""
    with accelerate_ranks():
        trainer = make_trainer(
            folder,
            {**WRAP, "state_dict_type": "SHARDED_STATE_DICT"},
            make("llama"),
            load_best_model_at_end=True,
            save_total_limit=1,
            learning_rate=0.3,
        )
        trainer.train()
        losses = history(trainer, "eval_loss")
        best = f"{folder}/checkpoint-{SAVE_STEPS * (1 + losses.index(min(losses)))}"
        assert trainer.state.best_model_checkpoint == best
        assert trainer.evaluate()["eval_loss"] == min(losses)


def test_ranks_find_the_same_best_checkpoint(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(find_the_best, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def smooth_labels(folder: str) -> None:
    with accelerate_ranks():
        losses = []
        for fsdp in (None, WRAP):
            trainer = make_trainer(folder, fsdp, make("llama"), label_smoothing_factor=0.1)
            trainer.train()
            losses.append(history(trainer, "loss"))
            forget_accelerate()
        torch.testing.assert_close(*losses, rtol=0, atol=TOLERANCE)


def test_smoothed_labels_are_shifted(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(smooth_labels, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def evaluate_first(folder: str) -> None:
    """Evaluate before there is an optimizer, then train twice, with recomputation."""
    with accelerate_ranks():
        found = []
        for fsdp in (None, {**WRAP, "activation_checkpointing": True}):
            trainer = make_trainer(folder, fsdp, make("llama"), save_strategy="no")
            first = trainer.evaluate()["eval_loss"]
            assert isinstance(trainer.model, shardkit.FSDPModule) == (fsdp is not None)
            if fsdp is None:  # After an evaluation the Trainer does not wrap the model in DDP.
                forget_accelerate()
                trainer = make_trainer(folder, fsdp, make("llama"), save_strategy="no")
            losses = []
            for _ in range(2):
                trainer.train()
                losses += history(trainer, "loss")
            found.append([first, *losses, trainer.predict(Sentences()).metrics["test_loss"]])
            forget_accelerate()
        torch.testing.assert_close(*found, rtol=0, atol=TOLERANCE)


def test_a_trainer_may_evaluate_first_and_train_twice(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    spawn(evaluate_first, 2, str(tmp_path), timeout_s=TIMEOUT_S)
