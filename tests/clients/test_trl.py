"""TRL's SFTTrainer, with and without adapters of peft, under `install` alone, beside FSDP2."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
import torch.distributed as dist
from accelerate_runs import accelerate_ranks, fsdp2, make
from launched import TIMEOUT_S
from zoo import draw_tokens

import shardkit

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from torch import Tensor

    from workers import Spawn

pytestmark = pytest.mark.clients

TOLERANCE = 1e-5  # Losses lie between 4 and 5.
STEPS = 4


@dataclasses.dataclass
class Tuned:
    """What a training ended with."""

    losses: list[float]  # Of each step.
    norms: list[float]  # Of gradients, of each step.
    # What `save_model` wrote, as peft or transformers reads it; of the first rank.
    saved: dict[str, Tensor]
    is_sharded: bool  # Whether shardkit has sharded the model.


def tune(folder: str, seed: int, *, adapters: bool, resume: str | None = None) -> Tuned:
    """Train as a script for TRL does, and read what was saved."""
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, 96)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<eos>")), eos_token="<eos>", pad_token="<eos>"
    )
    rows = draw_tokens(torch.Generator().manual_seed(1), 64).tolist()
    settings = SFTConfig(
        folder,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
        },
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        packing=False,
        gradient_checkpointing=False,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = make("llama", 0 if adapters else seed)  # A checkpoint of adapters has no more.
    torch.manual_seed(seed)
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        peft_config=lora if adapters else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    trainer.accelerator.wait_for_everyone()
    base = make("llama")
    saved: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        if adapters:
            base = PeftModel.from_pretrained(base, f"{folder}/final").merge_and_unload()
        else:
            base = type(base).from_pretrained(f"{folder}/final")
        saved = base.state_dict()
    logged = trainer.state.log_history
    losses, norms = (
        [each[name] for each in logged if name in each] for name in ("loss", "grad_norm")
    )
    return Tuned(losses, norms, saved, isinstance(trainer.model, shardkit.FSDPModule))


def beside_fsdp2(folder: str, adapters: bool) -> float:
    """Return the largest difference; go on from each other's checkpoint in the middle."""
    half = f"checkpoint-{STEPS // 2}"
    with accelerate_ranks(fsdp2()):
        wanted = tune(f"{folder}/fsdp2", 0, adapters=adapters)
    with accelerate_ranks(shardkit.install()):
        found = tune(f"{folder}/shardkit", 0, adapters=adapters)
    with accelerate_ranks(shardkit.install()):
        other = tune(f"{folder}/b", 1, adapters=adapters, resume=f"{folder}/fsdp2/{half}")
    assert len(wanted.losses) == STEPS
    assert [run.is_sharded for run in (wanted, found, other)] == [False, True, True]
    differences = []
    # The log of the resumed run begins with FSDP2's own lines, which its checkpoint has.
    for run, first in ((found, 0), (other, STEPS // 2)):
        pairs = [*zip(run.losses, wanted.losses, strict=True)][first:]
        pairs += [*zip(run.norms, wanted.norms, strict=True)][first:]
        differences += [abs(a - b) for a, b in pairs]
        for name, value in wanted.saved.items():
            torch.testing.assert_close(run.saved[name], value, rtol=0, atol=1e-4, msg=name)
    if wanted.saved:
        plain = make("llama").state_dict()
        assert any(not torch.equal(plain[name], value) for name, value in wanted.saved.items())
    return max(differences)


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_fine_tuning_equals_that_by_fsdp2(
    spawn: Spawn, tmp_path: pathlib.Path, tell: Callable[[str, str, str], None], adapters: bool
) -> None:
    largest = max(spawn(beside_fsdp2, 2, str(tmp_path), adapters, timeout_s=TIMEOUT_S))
    case = "LoRA of peft" if adapters else "all parameters"
    tell("trl", f"SFTTrainer, {case}, saved and gone on", f"{largest:.1e}")
    assert largest <= TOLERANCE
