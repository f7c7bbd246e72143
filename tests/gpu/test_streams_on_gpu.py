"""On a card: steady steps never wait for it, and no stream races with another."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import typing

import pytest
import sanitized_training
import torch
from torch import nn

import one_card
from models import CASES
from one_card import CardRanks, reduce_by_buffers, take_steps
from shardkit import MixedPrecisionPolicy

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


HERE = pathlib.Path(__file__).parent
WARM_UP = 3

IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, typing.Any]] = {
    "zero-3": {"reshard_after_forward": True},
    "zero-2": {"reshard_after_forward": False},
    "default": {},
    "bf16": {"mp_policy": IN_BF16, "reshard_after_forward": True},
    "bf16, zero-2": {"mp_policy": IN_BF16, "reshard_after_forward": False},
}


# --- hidden synchronization -----------------------------------------------------------------------


def refuses_to_wait() -> bool:
    """Whether torch raises, in its debug mode, where the host waits for the card."""
    number = torch.ones(1, device=one_card.CARD)
    try:
        number.item()
    except RuntimeError:
        return True
    return False


def take_steps_without_waiting(
    name: str,
    options: dict[str, typing.Any],
    mesh_shape: tuple[int, ...],
    optimizer_options: dict[str, bool],
    clip: str,
) -> bool:
    """Train some steps in which waiting is an error; return whether it really was one."""
    ranks, case = CardRanks(mesh_shape), CASES[name]
    model = ranks.shard(case, ranks.make(case), **options)
    if clip == "module":
        reduce_by_buffers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer_options)
    batches = [ranks.batch(case, step) for step in range(WARM_UP + 4)]

    def before_step() -> None:
        if clip == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=True)
        elif clip == "module":
            model.clip_grad_norm_(0.05)

    take_steps(case, model, optimizer, batches[:WARM_UP], before_step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        take_steps(case, model, optimizer, batches[WARM_UP:], before_step)
        return refuses_to_wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("optimizer_options", "clip"),
    [({"foreach": True}, "torch"), ({"fused": True}, "module"), ({"fused": True}, "none")],
    ids=["foreach, clipped by torch", "fused, clipped by the module", "fused"],
)
@pytest.mark.parametrize("options", OPTIONS)
def test_steady_steps_do_not_wait_for_the_card(
    on_card: Spawn, options: str, optimizer_options: dict[str, bool], clip: str
) -> None:
    """Those that the module clips reduce by way of buffers and streams, as several ranks do."""
    found = on_card(
        take_steps_without_waiting, 1, "gpt", OPTIONS[options], (1,), optimizer_options, clip
    )
    assert found == [True]


@pytest.mark.parametrize("name", ["mlp", "unused", "frozen"])
@pytest.mark.parametrize("options", ["default", "bf16"])
def test_steady_steps_on_a_hybrid_mesh_do_not_wait_for_the_card(
    on_card: Spawn, options: str, name: str
) -> None:
    found = on_card(
        take_steps_without_waiting, 1, name, OPTIONS[options], (1, 1), {"foreach": True}, "module"
    )
    assert found == [True]


def accumulate_without_waiting() -> bool:
    ranks, case = CardRanks(), CASES["gpt"]
    model = ranks.shard(case, ranks.make(case), mp_policy=IN_BF16)
    reduce_by_buffers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [ranks.batch(case, step) for step in range(3)]

    def step() -> None:
        for i, batch in enumerate(batches):
            model.set_requires_gradient_sync(i == 2)
            case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
        return refuses_to_wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_accumulation_does_not_wait_for_the_card(on_card: Spawn) -> None:
    assert on_card(accumulate_without_waiting, 1) == [True]


# --- races ----------------------------------------------------------------------------------------


def run_sanitized(kind: str) -> subprocess.CompletedProcess[str]:
    """Run `sanitized_training` in a process of its own, under torch's sanitizer."""
    path = os.pathsep.join((str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, str(HERE / "sanitized_training.py"), kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=one_card.TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("kind", sanitized_training.KINDS)
def test_training_is_free_of_races(kind: str) -> None:
    done = run_sanitized(kind)
    assert "CSAN" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert sanitized_training.DONE in done.stdout


def test_the_sanitizer_finds_a_race_where_there_is_one() -> None:
    """Else the test above would show nothing."""
    done = run_sanitized(sanitized_training.RACE)
    assert done.returncode != 0
    assert "CSAN detected a possible data race" in done.stderr, done.stderr
