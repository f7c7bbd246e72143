"""Random settings: trainings with any choice of what `FSDPModule` lets users choose.

A case is drawn from its number alone, so each failure can be run again. The plain model goes
through the steps of all ranks. Where a policy casts, the plain model casts alike, and takes over
the sharded one's parameters after each step, so that rounding does not add up.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import typing
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from custom_collectives import Gather, Scatter
from reference import full, make_mesh, mean_over_ranks
from shardkit import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from shardkit.compression import PowerSGD, bf16_compress, compress_gradients, fp16_compress
from shardkit.optim import LocalOptimizer, MatrixOptimizer

if typing.TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH, VOCABULARY, ROWS = 6, 9, 3
NOTHING = -1
Kind = typing.Literal["experts", "wide", "shift"]
POLICIES: dict[str, dict[str, torch.dtype]] = {
    "none": {},
    "fp32": {"param_dtype": torch.float32},
    "bf16 and fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
    "reduced in bf16": {"reduce_dtype": torch.bfloat16},
    "reduced in fp32": {"reduce_dtype": torch.float32},
    "reduced in fp16": {"reduce_dtype": torch.float16},
}
COMPRESSIONS = ("bf16", "fp16", "full rank", "low rank")


# --- what is drawn --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a group casts."""

    name: str
    output_dtype: torch.dtype | None
    casts_inputs: bool

    @property
    def made(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            **POLICIES[self.name],
            output_dtype=self.output_dtype,
            cast_forward_inputs=self.casts_inputs,
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is chosen for a group; see the methods of `FSDPModule`."""

    divide_factor: float | None
    predivide_factor: float | str | None
    force_sum: bool
    doubles: bool
    max_buffers: int
    separate: bool
    comm_memory: bool
    custom: bool
    reshard_after_forward: bool | None
    reshard_after_backward: bool
    unshard_in_backward: bool
    next_in_forward: list[int] | None
    next_in_backward: list[int] | None
    reduce_unused: bool


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward: layers in order, and what each rank uses of each of them."""

    order: list[int]
    choices: list[list[int | None]]
    has_input_grads: bool


@dataclasses.dataclass(frozen=True)
class Micro:
    """A micro-batch: its forwards, how backward goes, and what is synced."""

    forwards: list[Forward]
    losses: typing.Literal["sum", "each", "twice"]
    sync: bool
    all_reduce: bool
    is_last: bool
    other: int | None  # A group that is synced if the others are not, and the other way round.


@dataclasses.dataclass(frozen=True)
class Step:
    before: str
    which: int
    settings: list[Settings] | None
    micros: list[Micro]
    clip: tuple[float, float, bool] | None
    event: bool
    unused: Micro


@dataclasses.dataclass(frozen=True)
class Training:
    kinds: list[Kind]
    widths: list[int]
    has_tokens: bool
    has_ends: bool
    ignores: list[bool]
    groups: list[list[int]]  # Layers of each group; more than one are a list.
    policies: list[Policy]  # Of the groups, of the tokens and of the root.
    offload: list[bool]
    reshard: list[bool | int | None]
    settings: list[Settings]
    policy_of_prefetch: tuple[bool, str]
    recomputed: list[int]
    orig_dtype: torch.dtype
    compression: str | None
    optimizer: str
    scheduler: str | None
    steps: list[Step]

    @property
    def tolerance(self) -> float:
        """How much gradients may differ, beside the largest one."""
        names = {policy.name for policy in self.policies}
        narrow = {"bf16 and fp32", "bf16", "reduced in bf16", "reduced in fp16"}
        if names & narrow or self.compression in ("bf16", "fp16"):
            return 0.06
        if (
            self.orig_dtype is torch.float32
            or names != {"none"}
            or any(policy.output_dtype for policy in self.policies)
        ):
            return 2e-4
        return 1e-9

    @property
    def is_exact(self) -> bool:
        return self.tolerance < 1e-8 and self.compression != "low rank"


def drawn(number: int, shape: tuple[int, ...]) -> Training:
    """Return the training of this number."""
    draw = random.Random(number)
    num = draw.randint(1, 4)
    kinds: list[Kind] = [draw.choice(["experts", "experts", "wide", "shift"]) for _ in range(num)]
    has_ends, has_tokens = draw.random() < 0.7, draw.random() < 0.4
    groups = _drawn_groups(draw, num)
    num_groups = len(groups) + 2
    casts = draw.random() < 0.4
    differ = draw.random() < 0.7
    policies = [_drawn_policy(draw, casts) for _ in range(num_groups)]
    if not differ:
        policies = policies[:1] * num_groups
    over = [True, None, False]
    over += [n for n in (2, 4) if shape[-1] % n == 0]
    may_skip = draw.random() < 0.4
    replicates = len(shape) == 2
    orig = draw.choice([torch.float64, torch.float64, torch.float64, torch.float32])
    training = Training(
        kinds=kinds,
        widths=[draw.choice([WIDTH, WIDTH, 300, 40_000]) for _ in range(num)],
        has_tokens=has_tokens,
        has_ends=has_ends,
        ignores=[draw.random() < 0.2 for _ in range(num)],
        groups=groups,
        policies=policies,
        offload=[draw.random() < 0.2 for _ in range(num_groups)],
        reshard=[draw.choice(over) for _ in range(num_groups)],
        settings=[_drawn_settings(draw, groups, i, kinds) for i in range(num_groups)],
        policy_of_prefetch=(draw.random() < 0.7, draw.choice(["pre", "pre", "post", "none"])),
        recomputed=[i for i in range(num) if draw.random() < 0.25],
        orig_dtype=orig,
        compression=draw.choice([None, *COMPRESSIONS]) if replicates else None,
        optimizer=draw.choice(
            ["sgd", "foreach", "loop", "fused", "local", "local fused", "matrix", "adafactor"]
        ),
        scheduler=draw.choice([None, "step", "cycle", "lambda"]),
        steps=[],
    )
    steps = [_drawn_step(draw, training, uses_all=may_skip) for _ in range(draw.randint(2, 4))]
    return dataclasses.replace(training, steps=steps)


def _drawn_groups(draw: random.Random, num: int) -> list[list[int]]:
    layers = list(range(num))
    way = draw.choice(["each", "each", "lists", "one", "some"])
    if way == "one":
        return [layers]
    if way == "lists":
        cut = draw.randint(0, num)
        return [part for part in (layers[:cut], layers[cut:]) if part]
    if way == "some":
        return [[i] for i in layers if draw.random() < 0.6]
    return [[i] for i in layers]


def _drawn_policy(draw: random.Random, casts: bool) -> Policy:
    if not casts:
        return Policy("none", None, True)
    output = draw.choice([None, None, torch.float32, torch.float64, torch.bfloat16])
    name = draw.choice([*POLICIES])
    if output is torch.bfloat16 and not name.startswith("bf16"):
        output = None
    return Policy(name, output, draw.random() < 0.7)


def _drawn_settings(
    draw: random.Random, groups: list[list[int]], index: int, kinds: list[Kind]
) -> Settings:
    num = len(groups) + 2
    is_shift = index < len(groups) and all(kinds[i] == "shift" for i in groups[index])
    is_tokens = index == len(groups)

    def some() -> list[int] | None:
        return (
            draw.sample(range(num), draw.randint(0, min(3, num))) if draw.random() < 0.3 else None
        )

    return Settings(
        divide_factor=draw.choice([None, None, 1.0, 3.0]),
        predivide_factor=draw.choice([None, None, "auto", 2.0, 8.0]),
        force_sum=draw.random() < 0.2,
        doubles=draw.random() < 0.15,
        max_buffers=draw.choice([1, 1, 2, 5]),
        separate=draw.random() < 0.2,
        comm_memory=draw.random() < 0.15,
        custom=draw.random() < 0.15,
        reshard_after_forward=draw.choice([None, None, True, False]),
        reshard_after_backward=draw.random() < 0.75,
        unshard_in_backward=not ((is_shift or is_tokens) and draw.random() < 0.6),
        next_in_forward=some(),
        next_in_backward=some(),
        reduce_unused=draw.random() < 0.8,
    )


def _drawn_step(draw: random.Random, training: Training, *, uses_all: bool) -> Step:
    num_micros = draw.choice([1, 1, 2, 3, 4])
    micros = [_drawn_micro(draw, training, uses_all=uses_all) for _ in range(num_micros)]
    micros[-1] = dataclasses.replace(
        micros[-1], sync=True, all_reduce=True, is_last=True, other=None
    )
    num_groups = len(training.groups) + 2
    settings = None
    if draw.random() < 0.3:
        settings = [
            _drawn_settings(draw, training.groups, i, training.kinds) for i in range(num_groups)
        ]
    return Step(
        before=draw.choice(
            [
                "nothing",
                "evaluate",
                "freeze",
                "freeze layer",
                "deepcopy",
                "state dicts",
                "drop",
                "unshard",
                "compress",
            ]
        ),
        which=draw.randrange(1000),
        settings=settings,
        micros=micros,
        clip=draw.choice(
            [
                None,
                (0.1, 2.0, True),
                (0.1, 2.0, False),
                (0.05, float("inf"), True),
                (0.5, 1.0, True),
            ]
        ),
        event=draw.random() < 0.3,
        unused=_drawn_micro(draw, training, uses_all=uses_all),
    )


def _drawn_micro(draw: random.Random, training: Training, *, uses_all: bool) -> Micro:
    num_groups = len(training.groups) + 2
    sync, all_reduce = draw.random() < 0.5, draw.random() < 0.5
    return Micro(
        forwards=[
            _drawn_forward(draw, training, uses_all=uses_all)
            for _ in range(draw.choice([1, 1, 1, 2]))
        ],
        losses=draw.choice(["sum", "sum", "each", "twice"]),
        sync=sync,
        all_reduce=all_reduce,
        is_last=draw.random() < 0.6,
        other=draw.randrange(num_groups) if draw.random() < 0.2 else None,
    )


def _drawn_forward(draw: random.Random, training: Training, *, uses_all: bool) -> Forward:
    num = len(training.kinds)
    order = list(range(num))
    way = draw.choice(["all", "all", "some", "again"])
    if way == "some":
        order = [i for i in order if draw.random() < 0.6]
    elif way == "again":
        order.insert(draw.randint(0, num), draw.randrange(num))
    if not order and not training.has_ends:
        order = [0]
    has_input_grads = draw.random() < 0.6
    choices: list[int | None] = [None]
    if not uses_all:
        choices += [0, 1, 2]
        if has_input_grads:
            choices.append(draw.choice([None, NOTHING]))
    by_rank = [draw.choices(choices, k=num) for _ in range(4)]
    return Forward(order, by_rank, has_input_grads)


# --- the model ------------------------------------------------------------------------------------


class Weights(nn.Module):
    """A module whose parameters are cast before they are used, if it is the plain one."""

    cast: torch.dtype | None = None

    def get(self, param: nn.Parameter) -> Tensor:
        return param if self.cast is None else param.to(self.cast)


class Linear(Weights):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, width) / width)
        self.bias = nn.Parameter(torch.randn(outputs) / width)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get(self.weight)
        return nn.functional.linear(x.to(weight.dtype), weight, self.get(self.bias))


class Shift(Weights):
    """A layer whose backward reads no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.scale: Tensor | None = None

    def forward(self, x: Tensor, chosen: int | None) -> Tensor:
        if chosen == NOTHING:
            return 2 * x
        return x + self.get(self.bias)


class Tokens(Weights):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.get(self.weight))


class Layer(nn.Module):
    """Experts of which a forward uses some, and a wide layer."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        num = 3 if kind == "experts" else 1
        self.experts = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(num))
        self.wide = Linear(WIDTH, width)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, chosen: int | None) -> Tensor:
        if chosen == NOTHING:
            return 2 * x
        experts = self.experts if chosen is None else [self.experts[chosen % len(self.experts)]]
        y = torch.stack([expert(x) for expert in experts]).sum(0)
        scale = self.scale.to(y.dtype)
        return x + torch.tanh(y + self.wide(x)[:, :WIDTH]) * scale


class Model(nn.Module):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.tokens = Tokens() if training.has_tokens else None
        self.first = Linear(WIDTH, WIDTH) if training.has_ends else None
        self.layers = nn.ModuleList(
            Shift() if kind == "shift" else Layer(kind, width)
            for kind, width in zip(training.kinds, training.widths, strict=True)
        )
        self.last = Linear(WIDTH, 2) if training.has_ends else None
        self.recomputed = training.recomputed

    def forward(
        self,
        x: Tensor,
        tokens: Tensor,
        order: list[int],
        choices: list[int | None],
        has_input_grads: bool,
    ) -> Tensor:
        if has_input_grads:
            x = x.clone().requires_grad_()
        if self.tokens is not None:
            x = x + self.tokens(tokens)
        if self.first is not None:
            x = self.first(x)
        for index in order:
            layer, chosen = self.layers[index], choices[index]
            if index in self.recomputed:
                x = checkpoint(layer, x, chosen, use_reentrant=False)
            else:
                x = layer(x, chosen)
        if self.last is not None:
            x = self.last(x)
        return x.double().sin().mean()


def cast_to(value: typing.Any, dtype: torch.dtype | None) -> typing.Any:
    is_cast = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value


def cast_alike(module: nn.Module, policy: Policy) -> None:
    """Let a plain module compute as a sharded one with a policy does."""
    made = policy.made
    for child in module.modules():
        if isinstance(child, Weights) and child.cast is None:
            child.cast = made.param_dtype or next(child.parameters()).dtype
    if made.param_dtype is not None and made.cast_forward_inputs:
        module.register_forward_pre_hook(
            lambda _, args: tuple(cast_to(each, made.param_dtype) for each in args)
        )
    if made.output_dtype is not None:
        module.register_forward_hook(lambda _, __, output: cast_to(output, made.output_dtype))


# --- sharding and settings ------------------------------------------------------------------------


class Event:
    """What an optimizer's stream would record."""

    num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def double(gradients: Tensor) -> None:
    gradients.mul_(2)


class Run:
    """A plain model and the same one sharded."""

    def __init__(
        self, number: int, shape: tuple[int, ...], training: Training | None = None
    ) -> None:
        self.training = training = training or drawn(number, shape)
        self.number = number
        self.mesh = make_mesh(shape)
        self.num_ranks, self.me = dist.get_world_size(), dist.get_rank()
        torch.manual_seed(number)
        self.plain = Model(training).to(training.orig_dtype)
        self.model: typing.Any = copy.deepcopy(self.plain)
        self.names: dict[str, int] = {}  # Group of each parameter.
        self.ignored: set[str] = set()
        self._shard()
        self._cast_plain()
        self.settings = training.settings
        self.divided: set[int] = set()
        self.choose(training.settings)
        self.hook: typing.Any = None
        self.compress()
        self.optimizers = [self.make_optimizer(m, is_plain=m is self.plain) for m in self.both]
        self.schedulers = [self.make_scheduler(o) for o in self.optimizers]
        self.events: list[Event] = []
        self.sums: dict[str, list[Tensor]] = {}
        self.worst = 0.0
        self.at = 0

    @property
    def both(self) -> tuple[typing.Any, nn.Module]:
        return self.model, self.plain

    def modules_of(self, model: typing.Any) -> list[list[typing.Any]]:
        """Return the modules of each group: of layers, of tokens, and the root."""
        found = [[model.layers[i] for i in group] for group in self.training.groups]
        return [*found, [] if model.tokens is None else [model.tokens], [model]]

    def _shard(self) -> None:
        training = self.training
        names = {id(param): name for name, param in self.model.named_parameters()}
        ignored = {
            layer.scale
            for layer, is_ignored in zip(self.model.layers, training.ignores, strict=True)
            if is_ignored and layer.scale is not None
        }
        self.ignored = {names[id(param)] for param in ignored}
        for index, modules in enumerate(self.modules_of(self.model)):
            if not modules:
                continue
            for module in modules:
                for param in module.parameters():
                    self.names.setdefault(names[id(param)], index)
            options: dict[str, typing.Any] = {"mesh": self.mesh, "ignored_params": ignored}
            options["mp_policy"] = training.policies[index].made
            options["reshard_after_forward"] = training.reshard[index]
            if training.offload[index]:
                options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
            fully_shard(modules if len(modules) > 1 else modules[0], **options)
        self.model.set_prefetch_policy(
            forward=training.policy_of_prefetch[0],
            backward=typing.cast("typing.Any", training.policy_of_prefetch[1]),
        )

    def _cast_plain(self) -> None:
        for index, modules in enumerate(self.modules_of(self.plain)):
            for module in modules:
                cast_alike(module, self.training.policies[index])

    def choose(self, settings: list[Settings]) -> None:
        """Set everything for each group."""
        self.settings = settings
        heads = [modules[0] if modules else None for modules in self.modules_of(self.model)]
        varies = any(
            any(c is not None for by_rank in f.choices for c in by_rank)
            for step in self.training.steps
            for micro in (*step.micros, step.unused)
            for f in micro.forwards
        )
        for index, (module, chosen) in enumerate(zip(heads, settings, strict=True)):
            if module is None:
                continue
            if chosen.divide_factor is not None or index in self.divided:
                self.divided.add(index)
                module.set_gradient_divide_factor(chosen.divide_factor or self.num_ranks)
            module.set_gradient_predivide_factor(chosen.predivide_factor)
            module.set_force_sum_reduction_for_comms(chosen.force_sum)
            module.set_all_reduce_hook(None)
            if chosen.doubles:
                module.set_all_reduce_hook(double)
            module.set_reduce_scatter_max_input_buffers(chosen.max_buffers, recurse=False)
            module.set_separate_reduce_scatter_group(chosen.separate, recurse=False)
            module.set_custom_all_gather(None)
            module.set_custom_reduce_scatter(None)
            module.set_allocate_memory_from_process_group_for_comm(chosen.comm_memory)
            if chosen.custom:
                module.set_custom_all_gather(Gather())
                module.set_custom_reduce_scatter(Scatter())
            if chosen.reshard_after_forward is not None:
                module.set_reshard_after_forward(chosen.reshard_after_forward, recurse=False)
            module.set_reshard_after_backward(chosen.reshard_after_backward, recurse=False)
            module.set_unshard_in_backward(chosen.unshard_in_backward)
            module.set_reduce_scatter_unused_params(chosen.reduce_unused or varies, recurse=False)
        self.prefetch()

    def prefetch(self) -> None:
        heads = [modules[0] if modules else None for modules in self.modules_of(self.model)]
        for module, chosen in zip(heads, self.settings, strict=True):
            if module is None:
                continue
            for wanted, choose in (
                (chosen.next_in_forward, module.set_modules_to_forward_prefetch),
                (chosen.next_in_backward, module.set_modules_to_backward_prefetch),
            ):
                if wanted is not None:
                    choose([heads[i] for i in wanted if heads[i] is not None])

    def compress(self) -> None:
        which = self.training.compression
        if which is None:
            return
        before = self.hook
        hooks: dict[str, typing.Any] = {
            "bf16": lambda: bf16_compress,
            "fp16": lambda: fp16_compress,
            "full rank": lambda: PowerSGD(10_000, start_after=0, min_compression_rate=0.0),
            "low rank": lambda: PowerSGD(1, start_after=2, min_compression_rate=1.0),
        }
        self.hook = hooks[which]()
        compress_gradients(self.model, self.hook)
        if isinstance(before, PowerSGD):
            self.hook.load_state_dict(before.state_dict())

    # --- optimizers -------------------------------------------------------------------------------

    def make_optimizer(  # noqa: PLR0911 - one each
        self, model: nn.Module, *, is_plain: bool
    ) -> torch.optim.Optimizer:
        name = self.training.optimizer
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": rest, "lr": 0.02}]
        if matrices:
            groups.append({"params": matrices, "lr": 0.05})
        adam: dict[str, typing.Any] = {"lr": 0.02, "eps": 1e-3}
        if name == "sgd":
            return torch.optim.SGD(groups, lr=0.02, momentum=0.9)
        if name == "matrix":
            options = {"lr": 0.02}
            if is_plain:
                return torch.optim.Adafactor(groups, **options)
            return MatrixOptimizer(groups, torch.optim.Adafactor, **options)
        if name == "adafactor":
            return torch.optim.Adafactor(groups, lr=0.02)
        if name.startswith("local"):
            fused = "fused" in name
            if is_plain:
                return torch.optim.AdamW(groups, fused=fused, **adam)
            return LocalOptimizer(groups, torch.optim.AdamW, fused=fused, **adam)
        ways = {"foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}
        return torch.optim.AdamW(groups, **ways[name], **adam)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> typing.Any:
        name = self.training.scheduler
        of = torch.optim.lr_scheduler
        if name == "step":
            return of.StepLR(optimizer, 1, gamma=0.7)
        if name == "lambda":
            return of.LambdaLR(
                optimizer, [lambda n: 1 / (n + 1), lambda n: 0.9**n][: len(optimizer.param_groups)]
            )
        if name == "cycle" and self.training.optimizer not in ("matrix", "adafactor"):
            return of.OneCycleLR(optimizer, max_lr=0.03, total_steps=10)
        return None

    # --- losses and gradients ---------------------------------------------------------------------

    def draw(self) -> tuple[Tensor, Tensor]:
        self.at += 1
        generator = torch.Generator().manual_seed(1000 * self.number + self.at)
        xs = torch.randn(self.num_ranks, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        tokens = torch.randint(VOCABULARY, (self.num_ranks, ROWS), generator=generator)
        return xs.to(self.training.orig_dtype), tokens

    def losses(
        self, model: nn.Module, micro: Micro, batches: list[tuple[Tensor, Tensor]], rank: int
    ) -> list[Tensor]:
        return [
            model(xs[rank], tokens[rank], f.order, f.choices[rank], f.has_input_grads)
            for f, (xs, tokens) in zip(micro.forwards, batches, strict=True)
        ]

    def backward(self, micro: Micro, losses: list[Tensor], scale: float) -> None:
        if micro.losses == "each":
            for loss in reversed(losses):
                (loss * scale).backward()
            return
        total = torch.stack(losses).sum() * scale
        if micro.losses == "twice":
            total.backward(retain_graph=True)
            (0.5 * total).backward()
        else:
            total.backward()

    def micro(self, micro: Micro, *, drops: bool = False) -> None:
        self.model.set_requires_gradient_sync(micro.sync)
        self.model.set_requires_all_reduce(micro.all_reduce)
        self.model.set_is_last_backward(micro.is_last)
        if micro.other is not None:
            for module in self.modules_of(self.model)[micro.other][:1]:
                module.set_requires_gradient_sync(not micro.sync, recurse=False)
        batches = [self.draw() for _ in micro.forwards]
        before = [event.num_waits for event in self.events]
        losses = self.losses(self.model, micro, batches, self.me)
        assert [event.num_waits for event in self.events] == [max(n, 1) for n in before]
        self.backward(micro, losses, 1.0)
        mine = mean_over_ranks(torch.stack(losses).sum())
        if drops:
            return
        wholes = []
        for rank in range(self.num_ranks):
            theirs = self.losses(self.plain, micro, batches, rank)
            wholes.append(torch.stack(theirs).sum().detach())
            self.backward(micro, theirs, 1 / self.num_ranks)
        whole = torch.stack(wholes).mean().double()
        self.compare("loss", mine, whole, self.training.tolerance, 0.1)

    def compare(
        self, what: str, ours: Tensor, theirs: Tensor, tolerance: float, scale: float = 0
    ) -> None:
        apart = (ours.double() - theirs.double()).abs().max().item()
        of = max(theirs.abs().max().item(), scale)
        assert apart <= tolerance * of + 1e-12, f"{what}: {apart:.3g} of {of:.3g}"

    def average_ignored(self) -> None:
        for name, param in self.model.named_parameters():
            if name not in self.ignored:
                continue
            used = torch.tensor(param.grad is not None, dtype=torch.int64)
            dist.all_reduce(used)
            if used:
                grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
                dist.all_reduce(grad)
                param.grad = grad / self.num_ranks
            else:
                param.grad = None

    def compare_gradients(self) -> None:
        training = self.training
        wanted = {}
        for name, param in self.plain.named_parameters():
            grad = param.grad
            if grad is not None and name not in self.ignored:
                chosen = self.settings[self.names[name]]
                factor = self.num_ranks / (chosen.divide_factor or self.num_ranks)
                grad = param.grad = grad * factor * (2 if chosen.doubles else 1)
            wanted[name] = grad
        found = {name: full(param.grad) for name, param in self.model.named_parameters()}
        assert found.keys() == wanted.keys()
        none = {name for name in found if (found[name] is None) != (wanted[name] is None)}
        assert not none, f"gradients are None in one model only: {none}"
        largest = max((g.abs().max().item() for g in wanted.values() if g is not None), default=0.0)
        errors: dict[str, Tensor] = {}
        if training.compression == "low rank":
            errors = {n: e.full_tensor() for n, e in self.hook.state_dict()["error"].items()}
        for name, grad in wanted.items():
            is_compressed = name in errors
            if grad is not None and not is_compressed:
                self.compare(f"grad of {name}", found[name], grad, training.tolerance, largest / 20)
            if is_compressed:
                chosen = self.settings[self.names[name]]
                times = 2 if chosen.doubles else 1
                zero = torch.zeros(errors[name].shape, dtype=torch.float64)
                sums = self.sums.setdefault(name, [zero.clone(), zero.clone()])
                if grad is not None:
                    sums[0] += found[name].double() / times
                    sums[1] += grad.double() / times
                tolerance = max(training.tolerance, 1e-6)
                self.compare(
                    f"sum of gradients of {name}",
                    sums[0] + errors[name],
                    sums[1],
                    tolerance,
                    largest / 20,
                )
        if not training.is_exact:
            for name, param in self.plain.named_parameters():
                param.grad = None if found[name] is None else found[name].clone()

    # --- steps ------------------------------------------------------------------------------------

    def before(self, step: Step) -> None:  # noqa: C901, PLR0912 - an action each
        """Do what comes before a step."""
        training = self.training
        if step.before == "evaluate":
            micro = step.unused
            batches = [self.draw() for _ in micro.forwards]
            with torch.no_grad():
                losses = self.losses(self.model, micro, batches, self.me)
                mine = mean_over_ranks(torch.stack(losses).sum())
                wholes = [
                    torch.stack(self.losses(self.plain, micro, batches, rank)).sum()
                    for rank in range(self.num_ranks)
                ]
            self.compare("loss", mine, torch.stack(wholes).mean(), training.tolerance, 0.1)
        elif step.before == "freeze":
            names = [n for n, _ in self.plain.named_parameters() if n.endswith("weight")]
            if names:
                name = names[step.which % len(names)]
                params = [dict(m.named_parameters())[name] for m in self.both]
                for param in params:
                    param.requires_grad_(not param.requires_grad)
        elif step.before == "freeze layer" and training.has_ends:
            index = step.which % len(training.kinds)
            for model in self.both:
                params = list(model.layers[index].parameters())
                wanted = not params[0].requires_grad
                for param in params:
                    param.requires_grad_(wanted)
        elif step.before == "deepcopy":
            self.copy()
        elif step.before == "state dicts":
            self.model.load_state_dict(self.model.state_dict())
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step.before == "drop":
            flags = {"sync": step.which % 2 == 0, "all_reduce": step.which % 2 == 1}
            if len(self.mesh.shape) == 1:
                flags["sync"] = False
            flags["all_reduce"] = flags["all_reduce"] and not flags["sync"]
            self.micro(
                dataclasses.replace(step.unused, is_last=True, other=None, **flags), drops=True
            )
            self.model.reset_iter_state()
            for model in self.both:
                model.zero_grad()
        elif step.before == "unshard":
            sharded = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
            sharded[step.which % len(sharded)].unshard(async_op=step.which % 2 == 0)
        elif step.before == "compress":
            self.compress()

    def copy(self) -> None:
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self.model = copy.deepcopy(self.model)
        for model in self.both:
            model.zero_grad()  # A copy of a Parameter has no gradient.
        self.compress()
        self.prefetch()
        mine = self.make_optimizer(self.model, is_plain=False)
        scheduler = self.make_scheduler(mine)
        mine.load_state_dict(states[0])
        if scheduler is not None:
            scheduler.load_state_dict(self.schedulers[0].state_dict())
        self.optimizers[0], self.schedulers[0] = mine, scheduler
        self.events.clear()

    def step(self, step: Step) -> None:
        self.before(step)
        if step.settings is not None:
            self.choose(step.settings)
        for micro in step.micros:
            self.micro(micro)
        self.average_ignored()
        self.compare_gradients()
        tolerance = self.training.tolerance
        tolerance = tolerance if tolerance < 1e-8 else 1e-5
        if step.clip is not None:
            max_norm, order, is_own = step.clip
            if is_own:
                norm = self.model.clip_grad_norm_(max_norm, order)
            else:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, order)
            whole = nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm, order)
            self.compare("norm", full_number(norm), whole, max(tolerance, 1e-9))
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad(set_to_none=step.which % 3 != 0)
        if step.event:
            self.events = [Event()]
            self.model.set_post_optim_event(self.events[0])
        else:
            self.events = []
        whole_params = dict(self.plain.named_parameters())
        for name, param in self.model.named_parameters():
            found, wanted = full(param.detach()), whole_params[name]
            self.compare(name, found, wanted.detach(), max(tolerance, 1e-9), 0.1)
            if not self.training.is_exact:
                wanted.data.copy_(found)

    def go(self) -> None:
        for number, step in enumerate(self.training.steps):
            try:
                self.step(step)
            except BaseException as error:
                error.add_note(f"in step {number}")
                raise
        self.model.check_replicas()


def full_number(norm: Tensor) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train(number: int, shape: tuple[int, ...], training: Training | None = None) -> None:
    """Go through a training, and compare."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="shardkit")
        run = Run(number, shape, training)
        run.go()


def train_all(numbers: Iterable[int], shape: tuple[int, ...]) -> None:
    for number in numbers:
        try:
            train(number, shape)
        except BaseException as error:
            error.add_note(f"in training {number} on {shape}")
            raise
