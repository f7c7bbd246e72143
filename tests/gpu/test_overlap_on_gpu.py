"""On a card: gathers run beside the compute of the layer before, and arrive where they are used.

With one rank and bf16 compute a gather is a cast from the fp32 shard, on the gather stream. Every
layer here ends with a kernel that takes a known time and nearly no room (`Pause`), which stands for
compute: a trace then tells where each layer's compute ends, whatever kernels libraries choose, and
no gather has to wait until a large kernel leaves the card.
"""

from __future__ import annotations

import dataclasses
import typing

import gpu_traces
import torch
from gpu_traces import Work
from torch import Tensor, nn

import one_card
from one_card import CARD, CardRanks
from shardkit import MixedPrecisionPolicy, fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


NUM_LAYERS = 6
WIDTH = 2048  # 8 MiB of bf16: more than what travels together with others.
PAUSE_CYCLES = 600_000  # Some 0.3 ms; the cast of a layer takes a tenth of it or less.
PAUSE_KERNEL = "spin_kernel"
HEAD_START_MS = 250  # The host issues a whole step in that time, also under a profiler.


class Pause(torch.autograd.Function):
    """Identity that takes a while, on the card, in forward and in backward."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor) -> Tensor:
        del ctx
        torch.cuda._sleep(PAUSE_CYCLES)  # noqa: SLF001 - torch's own tests use it
        return x.view_as(x)

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> Tensor:
        del ctx
        torch.cuda._sleep(PAUSE_CYCLES)  # noqa: SLF001
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Pause.apply(self.linear(x))


@dataclasses.dataclass(frozen=True)
class Step:
    """A step on the card, in the order of start."""

    pauses: list[Work]  # One per layer in forward, then one per layer in backward.
    compute: list[Work]  # All of the compute stream, from the first layer on.
    gathers: list[list[Work]]  # By layer, as gathered: in forward, then again in backward.
    num_forward: int  # Of `gathers`, those of forward.


def make_step(works: list[Work], kernels_per_gather: int) -> Step:
    """Sort what a trace says."""
    head_start, *pauses = (work for work in works if PAUSE_KERNEL in work.name)
    assert len(pauses) == 2 * NUM_LAYERS, [work.name for work in pauses]
    stream = head_start.stream
    assert {pause.stream for pause in pauses} == {stream}
    step = [work for work in works if work.start >= head_start.end]
    others = [work for work in works if work.stream != stream]
    assert len(others) % kernels_per_gather == 0, [work.name for work in others]
    size = kernels_per_gather
    gathers = [others[i : i + size] for i in range(0, len(others), size)]
    assert NUM_LAYERS < len(gathers) <= 2 * NUM_LAYERS, [work.name for work in others]
    compute = [work for work in step if work.stream == stream]
    return Step(pauses, compute, gathers, NUM_LAYERS)


def hidden_time(step: Step) -> float:
    """Return how much gathers run before the compute of the layer before theirs ends."""
    hidden = 0.0
    forward, backward = step.pauses[:NUM_LAYERS], step.pauses[NUM_LAYERS:]
    for layer, gather in enumerate(step.gathers[: step.num_forward]):
        if layer > 0:
            hidden += gpu_traces.time_before(gather, forward[layer - 1].end)
    again = step.gathers[step.num_forward :]
    for layer, gather in zip(reversed(range(len(again))), again, strict=True):
        # The last layers may have been kept from forward. Backward comes to them in reverse.
        before = backward[NUM_LAYERS - 2 - layer] if layer < NUM_LAYERS - 1 else forward[-1]
        hidden += gpu_traces.time_before(gather, before.end)
    return hidden


def copies_of_plain_step() -> list[str]:
    """Return what plain training in bf16 copies in a step: the derivative of the loss copies."""
    model = make_layers().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = make_batch()

    def train() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    train()
    return [work.name for work in gpu_traces.record(train) if work.is_copy]


def make_layers() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))).to(CARD)


def make_batch() -> Tensor:
    return torch.randn(256, WIDTH, device=CARD, dtype=torch.bfloat16)


def profile_step() -> dict[str, typing.Any]:
    """Return what a steady step showed."""
    ranks = CardRanks()
    model = make_layers()
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, ranks.mesh, policy, reshard_after_forward=True)
    fully_shard(model, ranks.mesh, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = make_batch()

    def forward_only() -> None:
        one_card.delay_card(HEAD_START_MS)
        with torch.no_grad():
            model(x)

    def train() -> None:
        optimizer.zero_grad()
        one_card.delay_card(HEAD_START_MS)
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        train()
    forward_only()
    gpu_traces.record(train)  # The first trace of a process takes long to begin.
    forward = gpu_traces.record(forward_only)
    works = gpu_traces.record(train)

    stream = next(work.stream for work in forward if PAUSE_KERNEL in work.name)
    casts = [work for work in forward if work.stream != stream]
    assert casts, "nothing ran beside the compute stream: gathers are not on a stream of their own"
    assert len(casts) % NUM_LAYERS == 0, [work.name for work in casts]
    step = make_step(works, len(casts) // NUM_LAYERS)
    all_gathers = [work for gather in step.gathers for work in gather]
    last_forward = step.pauses[NUM_LAYERS - 1]
    return {
        "gather_us": gpu_traces.time_of(all_gathers),
        "hidden_us": hidden_time(step),
        "under_kernels_us": gpu_traces.time_under(all_gathers, step.compute),
        "gather_streams": len({work.stream for work in all_gathers}),
        "copies_in_forward": [
            work.name for work in step.compute if work.is_copy and work.start < last_forward.end
        ],
        "copies": [work.name for work in step.compute if work.is_copy],
        "plain_copies": copies_of_plain_step(),
        "late": [
            index
            for index, gather in enumerate(step.gathers[:NUM_LAYERS])
            if gather[-1].end > step.pauses[index].start
        ],
    }


def test_gathers_run_under_compute_and_need_no_copy(on_card: Spawn) -> None:
    [found] = on_card(profile_step, 1)
    assert found["gather_streams"] == 1
    assert not found["late"], "layers computed before their gather had ended"
    # All but the first gather of a step can be hidden, and all together.
    assert found["hidden_us"] > 0.5 * found["gather_us"], found
    # Parameters are computed with where they arrive: nothing is copied out of a buffer.
    assert not found["copies_in_forward"]
    # And in backward: the cast of each gradient to fp32, and nothing that plain training lacks.
    assert len(found["copies"]) <= NUM_LAYERS + len(found["plain_copies"]), found
    assert len(found["plain_copies"]) <= 1, found["plain_copies"]
