"""On a card: layers compiled by `torch.compile`, and captured in a CUDA graph."""

from __future__ import annotations

import importlib.util
import os
import shutil
import typing

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import one_card
from models import CASES, SEQUENCE, Case, squared_error
from one_card import CardDifferences, CardRanks, compare_training
from reference import TRAINED, assert_within
from shardkit import MixedPrecisionPolicy

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


COMPILE_TIMEOUT_S = 300

HAS_INDUCTOR = importlib.util.find_spec("triton") is not None and any(
    map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))
)
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            not HAS_INDUCTOR, reason="inductor needs triton, and a C compiler for its launchers"
        ),
    ),
]

WIDTH = 32


class Block(nn.Module):
    """Equal layers, so that one graph fits all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Model(nn.Module):
    """Four such layers between two that the root keeps: their inputs all require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(16, WIDTH, generator=generator),
        torch.randn(16, 5, generator=generator),
    )


CASE = Case(Model, lambda model: list(model.blocks), draw_batch, squared_error)


# --- torch.compile --------------------------------------------------------------------------------


def train_compiled(
    backend: str, reshard_after_forward: bool | None
) -> tuple[CardDifferences, dict[str, int]]:
    """Return differences to plain training, and what was compiled in all steps."""
    ranks = CardRanks()
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    counters.clear()
    model, plain = ranks.pair(CASE, reshard_after_forward=reshard_after_forward)
    for block in model.blocks:
        block.compile(backend=backend)
    differences = compare_training(CASE, model, plain, ranks, steps=2)
    with torch._dynamo.config.patch(error_on_recompile=True):  # noqa: SLF001 - torch's documented way
        later = compare_training(CASE, model, plain, ranks, steps=6)
    for kind, value in later.items():
        differences[kind] = max(differences[kind], value)
    return differences, {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_layers_train_as_plain_ones_in_one_graph(
    on_card: Spawn, world_size: int, backend: str, reshard_after_forward: bool | None
) -> None:
    found = on_card(
        train_compiled, world_size, backend, reshard_after_forward, timeout_s=COMPILE_TIMEOUT_S
    )
    for differences, compiled in found:
        assert compiled == {"graphs": 1, "breaks": 0}
        assert_within([differences], **TRAINED)


def train_compiled_in_bf16(backend: str) -> tuple[float, dict[str, int]]:
    """Return how far losses of compiled and eager training are apart, and what was compiled.

    Its parameters are memory that comes and goes: generated code must not keep addresses.
    """
    ranks = CardRanks()
    torch._dynamo.reset()  # noqa: SLF001 - torch's documented way
    counters.clear()
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    plain = ranks.make(CASE)
    models = [ranks.shard(CASE, plain, mp_policy=policy) for _ in range(2)]
    for block in models[0].blocks:
        block.compile(backend=backend)
    losses: list[list[float]] = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for step in range(8):
            patch = torch._dynamo.config.patch(error_on_recompile=step > 1)  # noqa: SLF001
            with patch:
                loss = CASE.loss(model, ranks.batch(CASE, step))
                loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    worst = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    return worst, {"graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_train_in_bf16(on_card: Spawn, backend: str) -> None:
    for worst, compiled in on_card(train_compiled_in_bf16, 1, backend, timeout_s=COMPILE_TIMEOUT_S):
        assert compiled == {"graphs": 1}
        # Fused kernels keep fp32 between operators where eager ones round to bf16 (2**-9 each);
        # a model with the weights of another step is off by more after 8 steps at this rate.
        assert worst < 2.0**-4


# --- CUDA graphs ----------------------------------------------------------------------------------


@torch.no_grad()
def capture_layer(options: dict[str, typing.Any]) -> list[float]:
    """Capture one layer's forward while its parameters are unsharded by hand.

    Returns:
        How far replays are from eager forwards, relative to the largest number there.
    """
    ranks, case = CardRanks(), CASES["gpt"]
    model = ranks.shard(case, ranks.make(case), **options)
    batch = ranks.batch(case, 0)
    with torch.enable_grad():  # A step, so that everything has run once.
        case.loss(model, batch).backward()
    model.zero_grad()
    layer = model.blocks[0]
    dtype = options["mp_policy"].param_dtype if options else torch.float32
    layer.unshard()
    x = torch.randn(3, SEQUENCE, 32, device=one_card.CARD, dtype=dtype)

    # The layer's own forward: calling the layer would gather and free as well.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer.forward(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer.forward(x)

    differences = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=generator))
        expected = layer.forward(x)
        output.zero_()
        graph.replay()
        differences.append(((output - expected).abs().max() / expected.abs().max()).item())
    layer.reshard()
    with torch.enable_grad():  # And training goes on.
        case.loss(model, batch).backward()
    assert all(param.grad is not None for param in model.parameters())
    return differences


@pytest.mark.parametrize(
    "options",
    [{}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}],
    ids=["fp32", "bf16"],
)
def test_a_layer_that_is_unsharded_by_hand_is_captured(
    on_card: Spawn, options: dict[str, typing.Any]
) -> None:
    # Libraries may choose another kernel in a capture, by the workspace there: a rounding or two.
    tolerance = 2.0**-7 if options else 1e-5
    for differences in on_card(capture_layer, 1, options):
        assert max(differences) <= tolerance, differences
