"""On a card: whole steps captured by `shardkit.capture`, beside the same steps as they are."""

from __future__ import annotations

import copy
import gc
import time
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import one_card
import shardkit
from models import CASES, Case
from one_card import CardRanks, make_card_mesh, reduce_by_buffers
from shardkit import MixedPrecisionPolicy, StateError, fully_shard
from shardkit._compat.torch_groups import init_fake_process_group

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers import Spawn

pytestmark = one_card.NEEDS_CARD

NUM_STEPS = 20
FAKE_SIZE = 64
LARGE = 2**26  # Elements of a tensor, 256 MiB.
BF16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)


def make_step(case: Case, model: nn.Module, *, num_parts: int) -> Callable[..., Tensor]:
    """Return a step of micro-batches, with clipping and the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    sharded: typing.Any = model

    def step(*batch: Tensor) -> Tensor:
        losses = []
        for part in range(num_parts):
            sharded.set_requires_gradient_sync(part == num_parts - 1)
            loss = case.loss(model, batch) / num_parts
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([*losses, norm])

    return step


OPTIONS: dict[str, dict[str, typing.Any]] = {
    "zero3": {"reshard_after_forward": True},
    "zero2": {"reshard_after_forward": False},
    "bf16": {"reshard_after_forward": True, "mp_policy": BF16},
}
# Libraries may choose other kernels in a capture, by the workspace there.
TOLERANCES = {
    name: 2.0**-6 if "mp_policy" in options else one_card.LOSS_TOLERANCE * NUM_STEPS
    for name, options in OPTIONS.items()
}


def train_captured(
    options: dict[str, typing.Any],
    num_parts: int,
    mesh_shape: Sequence[int] | None = None,
    before_step: Callable[[int], object] = lambda _: None,
) -> float:
    """Train two copies, one by replays; return how far their losses and norms are apart."""
    torch.manual_seed(0)
    ranks, case = CardRanks(mesh_shape), CASES["gpt"]
    plain = ranks.make(case)
    models = [ranks.shard(case, copy.deepcopy(plain), **options) for _ in range(2)]
    for model in models:
        reduce_by_buffers(model)
    eager = make_step(case, models[0], num_parts=num_parts)
    step = shardkit.capture(make_step(case, models[1], num_parts=num_parts), models[1])
    worst = 0.0
    for index in range(NUM_STEPS):
        batch = ranks.batch(case, index % 5)
        before_step(index)
        wanted, found = eager(*batch), step(*batch)
        worst = max(worst, ((found - wanted).abs() / wanted.abs()).max().item())
        if index in (2, 10):  # Memory that stays before the capture, and between replays.
            with torch.no_grad():
                for model in models:
                    case.loss(model, batch)
    assert step.is_captured
    return worst


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_replays_train_as_steps_do(on_card: Spawn, name: str, num_parts: int) -> None:
    (worst,) = on_card(train_captured, 1, OPTIONS[name], num_parts)
    assert worst <= TOLERANCES[name]


def capture_in_torchs_own_graph() -> str:
    ranks, case = CardRanks(), CASES["gpt"]
    model, batch = ranks.shard(case, ranks.make(case)), ranks.batch(case, 0)
    case.loss(model, batch).backward()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            case.loss(model, batch)
    except StateError as error:
        case.loss(model, batch).backward()  # And training goes on.
        return str(error)
    return "nothing was raised"


def test_a_forward_in_torchs_own_capture_is_refused(on_card: Spawn) -> None:
    (found,) = on_card(capture_in_torchs_own_graph, 1)
    assert "shardkit.capture(step, model)" in found


def draw() -> list[float]:
    return torch.rand(8, device=one_card.CARD).tolist()


def read_a_value() -> tuple[str, int, bool]:
    """Return the error, the bytes that stay reserved, and whether random numbers go on."""
    ranks, case = CardRanks(), CASES["gpt"]
    model = ranks.shard(case, ranks.make(case))
    case.loss(model, ranks.batch(case, 0)).backward()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # Captures before leave the workspaces of libraries.

    def step(*batch: Tensor) -> float:
        large = torch.ones(LARGE, device=one_card.CARD)
        loss = case.loss(model, batch) * large.mean()
        loss.backward()
        for param in model.parameters():
            param.grad = None
        return loss.item()

    captured, said = shardkit.capture(step, model), "nothing was raised"
    torch.cuda.manual_seed(5)
    draw()
    try:
        for index in range(4):
            captured(*ranks.batch(case, index))
    except StateError as error:
        said = str(error)
    found = draw()
    torch.cuda.manual_seed(5)
    expected = [draw() for _ in range(2)][1]
    case.loss(model, ranks.batch(case, 0)).backward()
    del captured, step
    gc.collect()
    torch.cuda.empty_cache()
    return said, torch.cuda.memory_reserved() - before, found == expected


def test_a_step_that_reads_a_value_is_refused_and_all_goes_on(on_card: Spawn) -> None:
    [(said, reserved, numbers_go_on)] = on_card(read_a_value, 1)
    assert "cannot be captured" in said
    assert numbers_go_on
    assert reserved < LARGE * 4, "memory of the broken graph stays reserved"


def time_steps() -> list[list[float]]:
    """Return what the host takes for steps of 48 layers as they are, and for replays of them."""
    dist.destroy_process_group()
    init_fake_process_group(0, FAKE_SIZE)
    mesh = make_card_mesh((FAKE_SIZE,))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(48))).to(one_card.CARD)
    for layer in model:
        fully_shard(layer, mesh, reshard_after_forward=True)
    fully_shard(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(8, 64, device=one_card.CARD)
    found = []
    for step in (train, shardkit.capture(train, model)):
        for _ in range(10):
            step(x)
        seconds = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(x)
            seconds.append(time.perf_counter() - start)
        found.append(sorted(seconds))
    dist.destroy_process_group()
    return found


def test_the_host_is_done_with_a_replay_much_sooner(on_card: Spawn) -> None:
    (found,) = on_card(time_steps, 1)
    step_s, replay_s = (seconds[len(seconds) // 2] for seconds in found)
    print(f"host: {step_s * 1e6:.0f} us a step, {replay_s * 1e6:.0f} us a replay")
    assert replay_s < step_s / 8
