"""Configurations that are planned and run: models, training, and what a plan says of both."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import typing

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit
from shardkit import (
    CPUOffloadPolicy,
    DeviceMesh,
    MixedPrecisionPolicy,
    checkpoint_activations,
    fully_shard,
)
from shardkit.optim import LocalOptimizer, MatrixOptimizer
from shardkit.planning._allocator import reserved_nbytes
from shardkit.planning._run import Run, batch_on_meta, dry_run
from wrapped_models import Stack

if typing.TYPE_CHECKING:
    from shardkit._events import StepEvent

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_SUMMED_WIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mlp(nn.Module):
    """Layers of a size that is not a multiple of anything."""

    def __init__(self, width: int = 250, depth: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Mixture(nn.Module):
    """Experts of a fixed capacity: each takes the tokens that score highest with it."""

    def __init__(self, width: int = 96, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 4 * width) / 16)
        self.down = nn.Parameter(torch.randn(num_experts, 4 * width, width) / 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        capacity = rows.shape[0] // scores.shape[1]
        weights, chosen = scores.t().topk(capacity, dim=1)
        taken = rows[chosen.flatten()].view(*chosen.shape, -1)
        outputs = torch.bmm(F.silu(torch.bmm(taken, self.up)), self.down) * weights.unsqueeze(-1)
        added = torch.zeros_like(rows).index_add(0, chosen.flatten(), outputs.flatten(0, 1))
        return x + added.view_as(x)


class Experts(nn.Module):
    """Blocks of a mixture, and a head."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(depth))
        self.head = nn.Linear(96, 11)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Guarded(nn.Module):
    """Layers that enter autocast themselves, or leave it."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            )
            for _ in range(8)
        )
        self.head = nn.Linear(width, 11)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            for block in self.blocks:
                x = torch.cat([x[:, :16], block(x)[:, 16:]], dim=1)
            with torch.autocast(x.device.type, enabled=False):
                outputs = self.head(x.float())
        return F.mse_loss(outputs, torch.zeros_like(outputs))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapters(nn.Module):
    """Adapted layers, and a frozen embedding in front."""

    def __init__(self, width: int = 320) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(Adapted(width), nn.ReLU(), Adapted(width)) for _ in range(4)
        )
        self.head = nn.Linear(width, 64)
        self.tokens.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Recurrent(nn.Module):
    """Recurrent layers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True, dropout=0.1)
        gru = nn.GRU(48, 64, batch_first=True, bidirectional=True)
        self.blocks = nn.ModuleList([lstm, gru, nn.RNN(128, 32, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        """Go through all layers."""
        for block in self.blocks:
            x, _ = block(x)
        return x


class Wide(nn.Module):
    """A block of ConvNeXt: each channel is filtered alone, and the channels come last then."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filters = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.filters(x).permute(0, 2, 3, 1)
        return x + self.layers(self.norm(y)).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class Images(nn.Module):
    """Blocks of both kinds, at two resolutions."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        stem, smaller = nn.Conv2d(3, 64, 4, stride=4), nn.Conv2d(64, 192, 2, stride=2)
        blocks = [stem, Wide(64), Residual(64), smaller, Wide(192), Residual(192)]
        self.blocks = nn.ModuleList(blocks).to(memory_format=memory_format)
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _images() -> Tensor:
    return torch.linspace(-1, 1, 4 * 3 * 64 * 64).view(4, 3, 64, 64)


def _stack() -> nn.Module:
    return Stack(dim=128, num_blocks=4)


def _rows() -> Tensor:
    return torch.ones(96, 250)


def _tokens() -> Tensor:
    return torch.zeros(6, 40, dtype=torch.long)


def _vectors() -> Tensor:
    return torch.linspace(-1, 1, 4 * 32 * 96).view(4, 32, 96)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration."""

    model: typing.Callable[[], nn.Module]
    batch: typing.Callable[[], Tensor]
    mesh: tuple[int, ...] = (2,)
    options: dict[str, typing.Any] = dataclasses.field(default_factory=dict)
    optimizer: typing.Any = torch.optim.AdamW
    recompute: dict[str, typing.Any] | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    sets: tuple[tuple[str, typing.Any], ...] = ()

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard as people do: the blocks, then the root."""
        for block in typing.cast("typing.Any", model).blocks:
            fully_shard(block, mesh, **self.options)
        root = fully_shard(model, mesh, **self.options)
        for name, value in self.sets:
            getattr(root, name)(value)

    def prepare(self, model: nn.Module) -> None:
        """Have blocks computed again."""
        if self.recompute is not None:
            checkpoint_activations(model, **self.recompute)


class SplitCase(Case):
    """The blocks are split over two ranks, and sharded over the two others."""

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard over one axis of a mesh of torch."""
        del mesh
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        for block in typing.cast("typing.Any", model).blocks:
            parallelize_module(block, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(block, both["shard"])
        fully_shard(model, both["shard"])


def _sgd(params: typing.Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _momentum(params: typing.Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _fused(params: typing.Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def _with_masters(params: typing.Any) -> torch.optim.Optimizer:
    return LocalOptimizer(params, torch.optim.AdamW, fused=True, master_dtype=torch.float64)


def _by_lists(params: typing.Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, foreach=True)


def _muon(params: typing.Any) -> torch.optim.Optimizer:
    return MatrixOptimizer([p for p in params if p.dim() == 2], torch.optim.Muon)


def _plain_muon(params: typing.Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2])


def _few_rows() -> Tensor:
    """Return a batch so small that steps of optimizers need the most memory."""
    return torch.ones(1, 250)


NUM_CHEAP = 5  # So many of the cases are tried in the session `tests`, the others in `helpers`.
EIGHT_RANKS = ["eight ranks", "experts, hybrid on eight ranks"]
"""These are tried in the session `eight_ranks`."""

CASES: dict[str, Case] = {
    "dense": Case(Mlp, _rows),
    "transformer": Case(_stack, _tokens),
    "experts": Case(Experts, _vectors),
    "adapters": Case(Adapters, _tokens),
    "recompute": Case(_stack, _tokens, recompute={}),
    "bf16": Case(Mlp, _rows, options={"mp_policy": BF16}),
    "accumulation": Case(Mlp, _rows, accumulate=3),
    "hybrid": Case(_stack, _tokens, (2, 2)),
    "kept": Case(Mlp, _rows, options={"reshard_after_forward": False}),
    "kept in part": Case(Mlp, _rows, (4,), options={"reshard_after_forward": 2}),
    "bf16 summed in fp32": Case(_stack, _tokens, options={"mp_policy": BF16_SUMMED_WIDE}),
    "four ranks": Case(_stack, _tokens, (4,)),
    "momentum": Case(Mlp, _rows, optimizer=_momentum),
    "no state": Case(_stack, _tokens, optimizer=_sgd),
    "every second block": Case(_stack, _tokens, recompute={"every": 2}),
    "hybrid in bf16": Case(Mlp, _rows, (2, 2), options={"mp_policy": BF16}),
    "experts in bf16": Case(Experts, _vectors, options={"mp_policy": BF16}),
    "few experts": Case(lambda: Experts(depth=2), _vectors),
    "experts again": Case(Experts, _vectors, (4,), recompute={}),
    "adapters kept": Case(Adapters, _tokens, options={"reshard_after_forward": False}),
    "recurrent": Case(Recurrent, lambda: torch.randn(8, 24, 32)),
    "images": Case(Images, _images),
    "channels last": Case(
        functools.partial(Images, torch.channels_last),
        lambda: _images().to(memory_format=torch.channels_last),
    ),
    "autocast": Case(_stack, _tokens, recompute={"every": 2}, autocast=torch.bfloat16),
    "autocast by layers": Case(Guarded, _vectors),
    "fused": Case(Mlp, _few_rows, optimizer=_fused),
    "masters": Case(Mlp, _few_rows, optimizer=_with_masters),
    "rows and columns": Case(Mlp, _few_rows, optimizer=_by_lists),
    "averages": Case(Mlp, _few_rows, optimizer=torch.optim.ASGD),
    "matrices": Case(Mlp, _few_rows, optimizer=_muon),
    "matrices, three ranks": Case(Mlp, _few_rows, (3,), optimizer=_muon),
    "matrices of all ranks": Case(Mlp, _few_rows, optimizer=_plain_muon),
    "tensor parallel": SplitCase(Mlp, _rows, (4,)),
    "offloaded": Case(Mlp, _rows, options={"offload_policy": CPUOffloadPolicy()}),
    "accumulation, hybrid": Case(
        _stack, _tokens, (2, 2), accumulate=2, sets=(("set_reshard_after_backward", False),)
    ),
    "eight ranks": Case(_stack, _tokens, (8,), recompute={}),
    "experts, hybrid on eight ranks": Case(
        Experts, _vectors, (2, 4), options={"mp_policy": BF16_SUMMED_WIDE}
    ),
}


# --- what a step does, and what a plan says of it -------------------------------------------------

Edge = tuple[typing.Any, ...]


@dataclasses.dataclass
class Seen:
    """What a step did."""

    collectives: list[tuple[str, int]]  # Names and bytes of the collectives.
    edges: list[Edge]  # What the core told, beginnings and ends each on its own, in order.
    # The most bytes at once between two edges, before the first and after the last.
    peaks: list[int]
    reserved: int = 0  # What the allocator of a card reserves, in a plan.


def edges_of(events: list[StepEvent]) -> list[Edge]:
    found: list[tuple[int, Edge]] = []
    for e in events:
        what = (e.kind, e.name, e.group, e.phase, e.nbytes, e.axis, e.num_ranks)
        found.append((e.opened, (*what, "begin")))
        if e.closed > e.opened:
            found.append((e.closed, (*what, "end")))
    edges = [edge for _, edge in sorted(found)]
    first: dict[int, int] = {}  # Groups of other models came before.
    numbers = [first.setdefault(edge[2], len(first)) for edge in edges]
    return [(*e[:2], number, *e[3:]) for e, number in zip(edges, numbers, strict=True)]


def without_frees(edges: list[Edge], peaks: list[int]) -> list[int]:
    """Join stretches between which buffers go to the allocator: all are told before one goes."""
    joined = peaks[:1]
    for edge, peak in zip(edges, peaks[1:], strict=True):
        if edge[0] == "free":
            joined[-1] = max(joined[-1], peak)
        else:
            joined.append(peak)
    return joined


_MEMORY_AND_TRAFFIC = {
    *("allocate", "free", "take", "return"),
    *("gather", "reduce_scatter", "all_reduce", "reshard"),
}


def of_memory_and_traffic(edges: list[Edge]) -> list[Edge]:
    return [edge for edge in edges if edge[0] in _MEMORY_AND_TRAFFIC and edge[-1] == "begin"]


class Training:
    """A rank that trains as people do; after two steps its next step is as all that follow.

    With `from_meta` no device holds a whole layer before the first forward, and the allocator of a
    card begins with shards alone.
    """

    def __init__(self, case: Case, device: str = "cpu", *, from_meta: bool = False) -> None:
        self.case = case
        mesh = shardkit.init_device_mesh(device, case.mesh)
        self.model = case.model().to("meta" if from_meta else device)
        case.prepare(self.model)
        case.shard(self.model, mesh)
        if from_meta:
            self.model.to_empty(device="cpu" if "offload_policy" in case.options else device)
            for param in self.model.parameters():
                nn.init.uniform_(param, -0.05, 0.05)
        if from_meta and device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()
        self.batch = case.batch().to(device)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = case.optimizer(params)
        self.output = self.loss = None
        self.step()
        self.step()

    def step(self) -> None:
        """Make a step."""
        for number in range(self.case.accumulate):
            if self.case.accumulate > 1:
                self.model.set_requires_gradient_sync(number == self.case.accumulate - 1)
            autocast = self.case.autocast
            with torch.autocast(self.batch.device.type, autocast, enabled=autocast is not None):
                self.output = self.model(self.batch)
                self.loss = self.output.sum()
            self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def planned(case: Case, rank: int, device: str = "cpu") -> Seen:
    """Plan the same."""

    def shard(model: typing.Any, mesh: typing.Any) -> None:
        case.prepare(model)
        case.shard(model, mesh)

    run = Run(
        case.model(),
        batch_on_meta(case.batch()),
        case.mesh,
        device=device,
        rank=rank,
        shard=shard,
        optimizer=case.optimizer,
        loss=torch.sum,
        accumulate=case.accumulate,
        autocast=case.autocast,
    )
    meter = dry_run(run)
    events = meter.events
    collectives = [(c.op, c.nbytes) for c in meter.collectives]
    edges, totals = edges_of(events), meter.totals()
    at = {e.opened: e.begin for e in events} | {e.closed: e.end for e in events}
    places = [meter.begin, *(int(at[place]) for place in sorted(at)), meter.position]
    peaks = [max(totals[a : b + 1]) for a, b in itertools.pairwise(places)]
    reserved = reserved_nbytes(meter.memories)
    return Seen(collectives, edges, without_frees(edges, peaks), reserved)
