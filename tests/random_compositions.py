"""Random compositions: tensor parallelism, experts and adapters under any way to shard and train.

A case is drawn from its number alone, so each failure can be run again. The plain model goes
through the steps of all ranks, in float64. Between steps the state may move to a model that is
spread over the ranks in another way.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import typing
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as api
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from reference import mean_over_ranks
from shardkit import FSDPModule, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.tensor.placement_types import Placement

WIDTH, HIDDEN, VOCABULARY, SEQUENCE, NUM_EXPERTS, BATCH = 6, 10, 12, 4, 4, 2
AXES = ("replicate", "shard", "tp")
Shape = tuple[int, int, int]
SHAPES: dict[int, list[Shape]] = {
    2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)],
    4: [(1, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1)],
}


@dataclasses.dataclass(frozen=True)
class Made:
    """What a model computes."""

    has_experts: list[bool]
    has_adapters: bool
    is_tied: bool
    frozen: float


@dataclasses.dataclass(frozen=True)
class Spread:
    """How a model is spread over the ranks."""

    shape: Shape  # Sizes of `AXES`.
    # What a rank of tensor parallelism has between layers.
    stream: typing.Literal["whole", "parts", "dtensors"]
    moves_tokens: bool  # Experts lie on the ranks of the shard axis, which have data of their own.
    # Modules of which each is a group, beside the root.
    groups: typing.Literal["blocks", "a list", "layers", "none"]
    # Of `fully_shard`, one after the other: what is freed, and what is not sharded.
    options: list[tuple[bool | None, bool]]
    is_recomputed: bool
    prefetches: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """What is done before a step, its micro-batches, and what happens to the gradients."""

    before: typing.Literal["nothing", "evaluate", "unshard", "freeze", "move"]
    module: int
    sync: list[bool]
    way: typing.Literal["backward", "both at once", "grad"]
    clip: float | None
    spread: Spread


@dataclasses.dataclass(frozen=True)
class Training:
    made: Made
    spread: Spread
    optimizer: dict[str, bool]
    steps: list[Step]


def drawn(number: int, num_ranks: int) -> Training:
    """Return the training of this number."""
    draw = random.Random(number)
    made = Made(
        has_experts=[draw.random() < 0.4 for _ in range(draw.randint(1, 3))],
        has_adapters=draw.random() < 0.3,
        is_tied=draw.random() < 0.2,
        frozen=draw.choice([0.0, 0.0, 0.3]),
    )
    return Training(
        made=made,
        spread=_drawn_spread(draw, num_ranks, made),
        optimizer=draw.choice([{"foreach": True}, {"foreach": False}, {"fused": True}]),
        steps=[_drawn_step(draw, num_ranks, made) for _ in range(3)],
    )


def _drawn_spread(draw: random.Random, num_ranks: int, made: Made) -> Spread:
    shape = draw.choice(SHAPES[num_ranks])
    return Spread(
        shape=shape,
        stream=draw.choice(["whole"] if any(made.has_experts) else ["whole", "parts", "dtensors"]),
        moves_tokens=shape[2] == 1 and draw.random() < 0.7,
        groups=draw.choice(["blocks", "a list", "layers", "none"]),
        options=[(draw.choice([True, None, False]), draw.random() < 0.3) for _ in range(8)],
        is_recomputed=draw.random() < 0.3,
        prefetches=draw.random() < 0.3,
    )


def _drawn_step(draw: random.Random, num_ranks: int, made: Made) -> Step:
    return Step(
        before=draw.choice(["nothing", "evaluate", "unshard", "freeze", "move"]),
        module=draw.randrange(100),
        sync=[*draw.choices([True, False], k=draw.randint(0, 2)), True],
        way=draw.choice(["backward", "both at once", "grad"]),
        clip=draw.choice([None, 0.1]),
        spread=_drawn_spread(draw, num_ranks, made),
    )


# --- the model ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of stacked experts, of which a rank of the axis `over` has some."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.over: DeviceMesh | None = None
        self.place: Placement = Replicate()  # Of the tokens on that axis.

    def forward(self, x: Tensor) -> Tensor:
        gates, weight, first = self.router(x).softmax(-1), self.weight, 0
        if self.over is not None:
            x, gates = (
                DTensor.from_local(each, self.over, [self.place]).full_tensor(
                    grad_placements=[Partial()]
                )
                for each in (x, gates)
            )
            weight = typing.cast("DTensor", weight).to_local()
            first = self.over.get_local_rank() * len(weight)
        outputs = torch.tanh(torch.einsum("btd,edh->bteh", x, weight))
        mixed = (outputs * gates[..., first : first + len(weight), None]).sum(2)
        if self.over is None:
            return mixed
        part: typing.Any = DTensor.from_local(mixed, self.over, [Partial()])
        whole: Tensor = part.redistribute(placements=[self.place]).to_local()
        return whole


class Adapted(nn.Module):
    """A frozen layer, and what is trained of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, HIDDEN).requires_grad_(requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class MLP(nn.Module):
    def __init__(self, has_adapter: bool) -> None:
        super().__init__()
        self.up = Adapted() if has_adapter else nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, has_experts: bool, has_adapter: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Experts() if has_experts else MLP(has_adapter)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(self.norm(x))
        return y


class Model(nn.Module):
    def __init__(self, made: Made) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(each, made.has_adapters) for each in made.has_experts)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if made.is_tied:
            self.head.weight = self.tokens.weight
        self.is_recomputed = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_recomputed else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# --- how it is spread -----------------------------------------------------------------------------


def _split(model: Model, spread: Spread, mesh: DeviceMesh) -> None:
    """Split all layers over the axis of tensor parallelism."""
    is_local = spread.stream != "dtensors"
    stream = Replicate() if spread.stream == "whole" else Shard(1)
    plan: dict[str, typing.Any] = {
        "tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=stream, use_local_output=is_local
        ),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if spread.stream != "whole":
        plan |= {"norm": SequenceParallel(use_local_output=is_local)}
        plan |= {"blocks.*.norm": SequenceParallel(use_local_output=is_local)}
        gathers = PrepareModuleInput(
            input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=True
        )
        plan |= {"blocks.*.inner": gathers}
    for name, module in model.named_modules():
        if isinstance(module, MLP):
            up = [f"{name}.up"]
            up = [f"{name}.up.base", f"{name}.up.b"] if isinstance(module.up, Adapted) else up
            plan |= {each: ColwiseParallel() for each in up}
            plan[f"{name}.down"] = RowwiseParallel(output_layouts=stream, use_local_output=is_local)
    needs_grad = {name: param.requires_grad for name, param in model.named_parameters()}
    tied = model.head.weight is model.tokens.weight
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.tokens.weight
    for name, param in model.named_parameters():  # `SequenceParallel` forgets it.
        param.requires_grad_(needs_grad[name])


def spread_over_ranks(model: Model, spread: Spread) -> tuple[Model, int]:
    """Split and shard a model; return it, and which batch this rank gets."""
    mesh = init_device_mesh("cpu", spread.shape, mesh_dim_names=AXES)
    over, place = (mesh["shard"], Shard(0)) if spread.moves_tokens else (mesh["tp"], Replicate())
    experts: set[int] = set()
    if mesh["tp"].size() > 1:
        _split(model, spread, mesh["tp"])
    for module in model.modules():
        if isinstance(module, Experts) and over.size() > 1:
            module.over, module.place = over, place
            whole = module.weight
            part: Tensor = distribute_tensor(whole.detach(), over, [Shard(0)])
            module.weight = nn.Parameter(part, requires_grad=whole.requires_grad)
            experts.add(id(module.weight))
    data = mesh["replicate", "shard"]
    blocks = list(model.blocks)
    groups: dict[str, list[typing.Any]] = {
        "blocks": [*blocks],
        "a list": [blocks],
        "layers": [layer for block in blocks for layer in (block.norm, block.inner)],
        "none": [],
    }
    for group, (frees, keeps_small) in zip(
        [*groups[spread.groups], model], spread.options, strict=False
    ):

        def place_of(param: Tensor, keeps_small: bool = keeps_small) -> typing.Any:
            if spread.moves_tokens and id(param) in experts:
                return mesh["replicate"]
            return Replicate() if keeps_small and param.ndim == 1 else None

        fully_shard(group, mesh=data, reshard_after_forward=frees, shard_placement_fn=place_of)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module, after in itertools.pairwise(sharded[1:]):
        if spread.prefetches:
            module.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([module])
    for module in sharded:
        module.set_gradient_divide_factor(data.size())
    model.is_recomputed = spread.is_recomputed
    return model, dist.get_rank() // spread.shape[2]


# --- training -------------------------------------------------------------------------------------


class Run:
    """A plain model, and the same one spread over the ranks, in training."""

    def __init__(self, number: int) -> None:
        self.number, self.training = number, drawn(number, dist.get_world_size())
        self.plain = self._new(number)
        draw = random.Random(number)
        for param in self.plain.blocks.parameters():
            param.requires_grad_(param.requires_grad and draw.random() >= self.training.made.frozen)
        self.expected = self._optimizer_of(self.plain)
        self._spread(self.training.spread, number)
        self.worst = 0.0

    def _new(self, seed: int) -> Model:
        torch.manual_seed(seed)
        return Model(self.training.made).double()

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        # With a smaller eps, steps would be large where gradients are rounding errors.
        return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3, **self.training.optimizer)

    def _spread(self, spread: Spread, seed: int) -> None:
        model = self._new(seed)
        for param, own in zip(model.parameters(), self.plain.parameters(), strict=True):
            param.requires_grad_(own.requires_grad)
        self.model, self.mine = spread_over_ranks(model, spread)
        self.num_batches = dist.get_world_size() // spread.shape[2]
        self.optimizer = self._optimizer_of(self.model)

    def loss(self, at: int, batch: int | None = None) -> Tensor:
        """Return the loss of this rank's batch, or the plain model's of a batch."""
        model = self.model if batch is None else self.plain
        which = self.mine if batch is None else batch
        generator = torch.Generator().manual_seed(1000 * self.number + 10 * at + which)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def note(self, found: Tensor, expected: Tensor) -> None:
        """Note how a tensor differs."""
        self.worst = max(self.worst, (found - expected).abs().max().item())

    def note_all(self, of: typing.Callable[[Tensor], Tensor | None] = lambda param: param) -> None:
        """Note how parameters, or what they have, differ."""
        expected = dict(self.plain.named_parameters())
        for name, param in self.model.named_parameters():
            found, wanted = of(param), of(expected.pop(name))
            assert (found is None) == (wanted is None), name
            if found is not None and wanted is not None:
                self.note(typing.cast("DTensor", found).full_tensor(), wanted)
        assert not expected

    def before(self, step: Step) -> None:
        """Do what comes before a step."""
        if step.before == "evaluate":
            with torch.no_grad():
                whole = [self.loss(99, batch) for batch in range(self.num_batches)]
                self.note(mean_over_ranks(self.loss(99)), torch.stack(whole).mean())
        elif step.before == "unshard":
            sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
            sharded[step.module % len(sharded)].unshard()
        elif step.before == "freeze":
            for model in (self.model, self.plain):
                param = list(model.parameters())[step.module % len(list(model.parameters()))]
                param.requires_grad_(not param.requires_grad)
        elif step.before == "move" and self._can_move:
            is_full = step.module % 2 == 0 or step.spread.shape != self.training.spread.shape
            options = api.StateDictOptions(full_state_dict=is_full)
            old = (self.model, self.optimizer)
            state, of_optimizer = api.get_state_dict(*old, options=options)
            self._spread(step.spread, self.number + 1)
            api.set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state,
                optim_state_dict=of_optimizer,
                options=options,
            )
            self.note_all()

    @property
    def _can_move(self) -> bool:
        """Whether torch takes the optimizer's state; of a new optimizer it counts a step."""
        return bool(self.expected.state) and all(p.requires_grad for p in self.plain.parameters())

    def go_backward(self, params: list[nn.Parameter], losses: list[Tensor], way: str) -> None:
        """Make gradients, and add them to those that are there."""
        if way != "grad":
            torch.stack(losses).sum().backward()
            return
        params = [param for param in params if param.requires_grad]
        grads = torch.autograd.grad(torch.stack(losses).sum(), params, allow_unused=True)
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:  # torch's fused steps take it for contiguous.
                before = 0 if param.grad is None else param.grad
                param.grad = before + grad.contiguous()

    def step(self, number: int, step: Step) -> None:
        self.before(step)
        if step.way == "grad":
            self.model.reshard()  # Or else parameters that were unsharded by hand get gradients.
        for micro, sync in enumerate(step.sync):
            at = [10 * number + micro] * (1 + (step.way == "both at once"))
            self.model.set_requires_gradient_sync(sync or step.way == "grad")
            losses = [self.loss(each) for each in at]
            self.go_backward(list(self.model.parameters()), losses, step.way)
            whole = [
                self.loss(each, batch) / self.num_batches
                for each in at
                for batch in range(self.num_batches)
            ]
            self.go_backward(list(self.plain.parameters()), whole, step.way)
            self.note(mean_over_ranks(torch.stack(losses).sum()), torch.stack(whole).sum())
        self.note_all(lambda param: param.grad)
        models = [(self.model, self.optimizer), (self.plain, self.expected)]
        for model, optimizer in models:
            if step.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), step.clip)
            optimizer.step()
            optimizer.zero_grad()
        self.note_all()


def worst_difference(number: int) -> float:
    """Return by how much a loss, a gradient or a parameter differs from plain training's."""
    run = Run(number)
    for at, step in enumerate(run.training.steps):
        run.step(at, step)
    return run.worst


def worst_differences(numbers: Iterable[int]) -> dict[int, float]:
    """Return the difference of each training, by its number; raise what it warns of."""
    found = {}
    for number in numbers:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module="shardkit")
            found[number] = worst_difference(number)
    return found
