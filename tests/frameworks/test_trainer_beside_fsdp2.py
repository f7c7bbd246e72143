"""The Trainer of transformers under `install` alone, beside FSDP2."""

from __future__ import annotations

import contextlib
import dataclasses
import typing

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from accelerate_runs import accelerate_ranks, fsdp2, make, without_compiler
from launched import TIMEOUT_S, forget_accelerate
from test_transformers_trainer import SAVE_STEPS, STEPS, TOKENS, TOLERANCE, history, make_trainer

import shardkit

if typing.TYPE_CHECKING:
    import pathlib

    from torch import Tensor, nn

    from workers import Spawn

pytestmark = pytest.mark.frameworks


def generating() -> typing.Any:
    """Make a callback that generates after the second step."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_end(self, _: object, state: typing.Any, __: object, **given: object) -> None:
            if state.global_step == SAVE_STEPS:
                model: typing.Any = given["model"]
                model.eval()
                self.tokens = generate(model)
                model.train()

    return Callback()


def generate(model: typing.Any) -> Tensor:
    prompt = TOKENS[:2, :4]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


@dataclasses.dataclass
class Run:
    """A training that ended."""

    logged: dict[str, list[float]]  # Numbers of each step by what they are.
    tokens: list[Tensor]  # What was generated in the middle, and in the end.
    parameters: dict[str, Tensor]  # Whole ones by name, on the first rank.
    is_sharded: bool  # Whether shardkit has sharded the model.
    is_coded: bool  # Whether the optimizer keeps codes.


def keeps_codes(trainer: typing.Any) -> bool:
    optimizer = trainer.optimizer.optimizer
    state = getattr(optimizer, "inner", optimizer).state
    values = [value for entries in state.values() for value in entries.values()]
    locals_ = [getattr(value, "_local_tensor", value) for value in values]
    return any(type(value).__name__ == "OptimState8bit" for value in locals_)


def train(
    folder: str, case: Case, model: nn.Module, resume: str | None = None, export: str | None = None
) -> Run:
    """Train, or go on from a checkpoint; write the whole model to `export`."""
    forget_accelerate()
    trainer = make_trainer(folder, case.fsdp, model, **case.options)
    callback = generating()
    trainer.add_callback(callback)
    with without_compiler():
        trainer.train(resume_from_checkpoint=resume)
    if export is not None:
        trainer.save_model(export)
    return Run(
        {name: history(trainer, name) for name in ("loss", "eval_loss", "grad_norm")},
        [*([] if resume else [callback.tokens]), generate(trainer.model)],
        trainer.accelerator.get_state_dict(trainer.model),
        isinstance(trainer.model, shardkit.FSDPModule),
        keeps_codes(trainer),
    )


def assert_alike(found: Run, wanted: Run, tolerance: float) -> None:
    assert found.is_coded == wanted.is_coded
    for name, values in wanted.logged.items():
        assert len(values) >= STEPS // 2
        rtol = 2e-3 if tolerance > TOLERANCE else 2e-5 if name == "grad_norm" else 0
        torch.testing.assert_close(found.logged[name], values, rtol=rtol, atol=tolerance, msg=name)
    assert all(map(torch.equal, found.tokens, wanted.tokens[-len(found.tokens) :]))
    assert found.parameters.keys() == wanted.parameters.keys()
    for key, value in found.parameters.items():
        # AdamW divides by the size of a gradient, also where it is all rounding.
        torch.testing.assert_close(
            value, wanted.parameters[key], rtol=0, atol=30 * tolerance, msg=key
        )


def train_both(case: Case, folder: str) -> None:
    """Train by FSDP2, by shardkit, and by shardkit from the checkpoints of both in the middle."""
    half = f"checkpoint-{SAVE_STEPS}"
    with accelerate_ranks(fsdp2()):
        wanted = train(f"{folder}/fsdp2", case, case.make())
        assert not wanted.is_sharded
        assert wanted.is_coded == bool(case.sizes)
    with accelerate_ranks(shardkit.install()):
        export = f"{folder}/export" if case.fsdp.get("state_dict_type") == FULL else None
        found = train(f"{folder}/shardkit", case, case.make(), export=export)
        assert found.is_sharded
        assert len(found.parameters) == (len(wanted.parameters) if dist.get_rank() == 0 else 0)
        assert_alike(found, wanted, case.tolerance)
        again = train(f"{folder}/a", case, case.make(1), f"{folder}/shardkit/{half}")
        assert again.logged == found.logged
        assert all(torch.equal(again.parameters[k], v) for k, v in found.parameters.items())
        with refused(case):
            other = train(f"{folder}/b", case, case.make(1), f"{folder}/fsdp2/{half}")
            assert_alike(other, wanted, case.tolerance)
        if export and dist.get_rank() == 0:
            loaded = type(case.make()).from_pretrained(export).state_dict()
            assert all(torch.equal(loaded[k], v) for k, v in found.parameters.items())
    with accelerate_ranks(fsdp2()), refused(case):
        back = train(f"{folder}/c", case, case.make(1), f"{folder}/shardkit/{half}")
        assert_alike(back, wanted, case.tolerance)


def refused(case: Case) -> contextlib.AbstractContextManager[object]:
    """Expect torchao's error where pieces of codes are cut elsewhere: it cuts between blocks."""
    if case.sizes:
        error = torch.distributed.checkpoint.CheckpointException
        return pytest.raises(error, match=r"align with block boundary|Only support aten\.slice")
    return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained."""

    model: str  # Name in the zoo.
    fsdp: dict[str, typing.Any]  # The Trainer's ``fsdp_config``.
    # More arguments of the Trainer.
    options: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    tolerance: float = TOLERANCE  # Largest difference of losses.
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)  # Fields of the model's config.

    def make(self, seed: int = 0) -> nn.Module:
        return make(self.model, seed, **self.sizes)


WRAP = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
BF16 = 2e-3  # Losses in a dtype of 8 bits.
CODED = 1e-4  # Gradients differ by rounding, so that some numbers get the next code.
# Matrices that are coded on both ranks; norms are too small for that.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
CASES = {
    "bf16, whole files": Case("llama", {**WRAP, "state_dict_type": FULL}, {"bf16": True}, BF16),
    "8 bits": Case(
        "llama",
        {**WRAP, "state_dict_type": SHARDED},
        {"optim": "adamw_torch_8bit"},
        CODED,
        WIDE,
    ),
    "8 bits, whole files": Case(
        "llama", {**WRAP, "state_dict_type": FULL}, {"optim": "adamw_torch_8bit"}, BF16
    ),
    "on the host": Case("llama", {**WRAP, "offload_params": True}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_and_resuming_equal_those_by_fsdp2(
    spawn: Spawn, tmp_path: pathlib.Path, case: Case
) -> None:
    spawn(train_both, 2, case, str(tmp_path), timeout_s=TIMEOUT_S)
