"""A sharded model and its plain twin: what a user may do to both, one action after another.

A new action is a method with `@action`: it does one thing to both, and returns nothing. Its
arguments are numbers from 0 to 9, which every rank gets alike; it can be done at any time, or does
nothing. After each action `problem` looks at everything. `script` prints a sequence as a program.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import itertools
import logging
import math
import pathlib
import shutil
import tempfile
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from defects import put_in
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint as recompute

from shardkit import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    Replicate,
    StateError,
    auto_shard,
    checkpoint,
    checkpoint_activations,
    fully_shard,
    init_device_mesh,
    register_fsdp_forward_method,
    summon_full_params,
)
from shardkit._module.hooks import state_of
from shardkit.compression import PowerSGD, compress_gradients
from shardkit.optim import LocalOptimizer, MatrixOptimizer

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

WIDTH, DEPTH, ROWS = 6, 3, 4
AXES = ("replicate", "shard")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Of the largest element. Sums come in another order, and errors grow by training."""
ACTIONS: dict[str, int] = {}  # Names of actions, and how many numbers each takes.
KEEPING: set[str] = set()
"""Names of actions after which an output from before may still go backward."""
LAYOUTS = (
    *("layers", "one group", "list", "kept", "parts", "mapping", "recomputed", "meshes"),
    *("offloaded", "tied", "replicated", "compressed", "two dtypes", "cast", "reduced"),
)
"""Ways to shard. In the last four some numbers are computed in fp32."""
ALIKE = LAYOUTS[:8]  # Those in which a checkpoint of one of the others goes on, here.


def action(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method an action."""
    ACTIONS[method.__name__] = method.__code__.co_argcount - 1
    return method


def keeping(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method an action that changes no parameter and ends no forward."""
    KEEPING.add(method.__name__)
    return action(method)


class Raise(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> Tensor:
        del ctx, grad
        raise ArithmeticError


class Block(nn.Module):
    """A layer; its forward may write to its weight, and it or its backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_recomputed = False
        self.writes = False
        self.raises = ""

    @property
    def dtype(self) -> torch.dtype:
        return self.linear.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.3, 0.3)
        if self.raises == "forward":
            raise ArithmeticError
        out = self.linear(x.to(self.dtype)).to(x.dtype)
        if self.raises == "backward":
            out = Raise.apply(out)
        return x + (torch.tanh(out) if self.training else 0.5 * out)


class Net(nn.Module):
    """Blocks, of which a forward may use the first few, a scale, and a head to be exchanged.

    Args:
        layout: One of `LAYOUTS`.
    """

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.order = [*range(DEPTH)]  # In which the blocks run.
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head: nn.Module = nn.Identity()
        self.register_buffer("seen", torch.zeros(()))
        self.double()
        if layout == "two dtypes":
            self.blocks[1].float()
        elif layout == "tied":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor, depth: int = DEPTH, tap: int = 0) -> tuple[Tensor, Tensor]:
        """Return the result, and what came before block `tap`."""
        inner = x
        for i, place in enumerate(self.order[:depth]):
            block = self.blocks[place]
            if i == tap:
                inner = x
            x = recompute(block, x, use_reentrant=False) if block.is_recomputed else block(x)
        if self.training:
            self.seen += 1
        return self.head(x * self.scale), inner

    def short(self, x: Tensor) -> Tensor:
        """Return the result of the first block alone: a forward of another name."""
        return self.blocks[0](x) * self.scale


OPTIMIZERS: list[Callable[[typing.Any, bool], torch.optim.Optimizer]] = [
    lambda params, _: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    lambda params, _: torch.optim.AdamW(params, lr=1e-3, eps=1e-3),
    lambda params, _: torch.optim.Adagrad(params, lr=1e-3, eps=1e-3),
    lambda params, _: torch.optim.RMSprop(params, lr=1e-3, eps=1e-3, foreach=False),
    lambda params, is_plain: (torch.optim.AdamW if is_plain else local_adam)(
        params, lr=1e-3, eps=1e-3
    ),
]
"""Make optimizers of parameters or groups; told whether for the plain model."""


def local_adam(params: typing.Any, **options: typing.Any) -> torch.optim.Optimizer:
    return LocalOptimizer(params, torch.optim.AdamW, **options)


def muon(params: typing.Any, is_plain: bool) -> torch.optim.Optimizer:
    if is_plain:
        return torch.optim.Muon(params, lr=1e-3)
    return MatrixOptimizer(params, torch.optim.Muon, lr=1e-3)


class Twins:
    """Both models, and their optimizers.

    Args:
        shape: Of the mesh.
        layout: One of `LAYOUTS`.
    """

    device_type = "cpu"

    def __init__(self, shape: tuple[int, ...], layout: str = "layers") -> None:
        if layout == "compressed" and len(shape) == 1:
            shape = (*shape, 1)
        self.mesh = self.new_mesh(shape)
        self.other_mesh = self.new_mesh((1, self.mesh.size()))
        self.layout = layout
        torch.manual_seed(0)
        self.plain = Net(layout)
        self.sharded = self.shard(self.put(self.plain))
        self.choose_optimizers(0, has_two=LAYOUTS.index(layout) % 2 == 1)
        self.aside: dict[str, typing.Any] | None = None  # The same of models that were copied.
        self.num_batches = 0
        self.num_heads = 0
        self.pending: dict[str, Tensor] = {}  # Gradients that wait to be synced.
        self.has_dropped = False  # Some of them, of which a warning may tell once.
        self.held: tuple[Tensor, Tensor] | None = None  # Losses that wait for their backward.
        self.is_open = False  # A forward has not gone backward, or not all of it.
        self.handles: list[tuple[typing.Any, ...]] = []
        self.calls: tuple[list[str], list[str]] = ([], [])  # Of hooks.
        self.objects = dict(self.sharded.named_parameters())
        self.new_optimizers()

    # --- parts of actions -------------------------------------------------------------------------

    def new_mesh(self, shape: tuple[int, ...]) -> typing.Any:
        return init_device_mesh(self.device_type, shape, mesh_dim_names=AXES[-len(shape) :])

    def put(self, plain: nn.Module) -> typing.Any:
        """Return a copy, where it can be sharded."""
        return copy.deepcopy(plain)

    def choose_optimizers(self, first: int, *, has_two: bool) -> None:
        self.makes = [OPTIMIZERS[first % len(OPTIMIZERS)], muon][: has_two + 1]

    @property
    def options(self) -> dict[str, typing.Any]:
        options: dict[str, typing.Any] = {"mesh": self.mesh}
        if self.layout == "kept":
            options["reshard_after_forward"] = False
        elif self.layout == "parts" and self.mesh.size(-1) == 4:
            options["reshard_after_forward"] = 2
        elif self.layout == "offloaded":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        elif self.layout == "replicated":
            options["shard_placement_fn"] = lambda p: Replicate() if p.ndim == 1 else None
        elif self.layout == "meshes":
            options["shard_placement_fn"] = lambda p: self.other_mesh if p.ndim == 1 else None
        elif self.layout == "cast":
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64
            )
        elif self.layout == "reduced":
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        return options

    def shard(self, model: typing.Any) -> typing.Any:
        blocks = [] if self.layout == "one group" else list(model.blocks)
        if self.layout == "list":
            blocks = [blocks[:2], blocks[2]]
        elif self.layout == "tied":
            blocks = [[blocks[0], blocks[2]], blocks[1]]
        heads = [] if isinstance(model.head, nn.Identity) else [model.head]
        if self.layout == "mapping":
            ways = {"blocks.0": {"reshard_after_forward": False}, ("blocks.1", "blocks.2"): {}}
            auto_shard(model, self.mesh, ways | ({"head": {}} if heads else {}))
        else:
            for module in (*blocks, *heads, model):
                fully_shard(module, **self.options)
        if self.layout == "recomputed":
            checkpoint_activations(model, every=2)
        elif self.layout == "compressed":  # At full rank nothing is lost.
            hook = PowerSGD(WIDTH, start_after=0, min_compression_rate=0.1)
            compress_gradients(model, hook)
        register_fsdp_forward_method(model, "short")
        return model

    @property
    def both(self) -> tuple[typing.Any, typing.Any]:
        return self.plain, self.sharded

    def units(self) -> list[typing.Any]:
        """Return the sharded modules."""
        return [module for module in self.sharded.modules() if isinstance(module, FSDPModule)]

    def names(self, number: int, *, trainable: bool = False) -> str | None:
        """Return the name of some parameter; None if there is none."""
        found = [n for n, p in self.plain.named_parameters() if p.requires_grad or not trainable]
        return found[number % len(found)] if found else None

    def params(self, name: str) -> tuple[typing.Any, typing.Any]:
        """Return a parameter of both; a sharded model may show the unsharded one for a while."""
        return self.plain.get_parameter(name), self.objects[name]

    def optimizers_of(self, side: int) -> list[torch.optim.Optimizer]:
        """Make those of the plain model (0) or of the sharded one (1), without state."""
        return [
            make([{"params": [self.params(n)[side] for n in names]} for names in groups], side == 0)
            for make, groups in zip(self.makes, self.groups, strict=True)
        ]

    def new_optimizers(self, groups: list[list[list[str]]] | None = None) -> None:
        """Make both models' optimizers, without state.

        Args:
            groups: For each optimizer the names of the parameters of each group. By default two
                divide all parameters into matrices and others, as one has one group of all.
        """
        named = [*self.plain.named_parameters()]
        matrices = [n for n, p in named if p.ndim > 1 and len(self.makes) > 1]
        others = [n for n, _ in named if n not in matrices]
        self.groups = groups or [[others], [matrices]][: len(self.makes)]
        self.has_strangers = False  # Parameters that are in no model any more.
        self.optimizers = self.optimizers_of(0), self.optimizers_of(1)

    def all_optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self.optimizers[0], *self.optimizers[1]]

    def replace(self, plain: nn.Module, sharded: nn.Module, *, with_grads: bool) -> None:
        """Go on with other models of the same values, and optimizers that have loaded theirs."""
        before, groups = self.optimizers, None if self.has_strangers else self.groups
        if with_grads:
            for name, theirs in (*self.plain.named_parameters(), *self.objects.items()):
                new = sharded if theirs is self.objects[name] else plain
                ours = new.get_parameter(name)
                if ours.grad is None and theirs.grad is not None:
                    ours.grad = theirs.grad.clone()
        self.plain, self.sharded = plain, typing.cast("typing.Any", sharded)
        self.objects = dict(sharded.named_parameters())
        has_state = not self.has_strangers
        self.new_optimizers(groups)
        if has_state:
            for new, old in zip(self.all_optimizers(), itertools.chain(*before), strict=True):
                new.load_state_dict(copy.deepcopy(old.state_dict()))
        self.handles, self.pending = [], {}

    def draw(self, *, wants_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Draw a batch: that of all ranks, and that of this one."""
        self.num_batches += 1
        generator = torch.Generator().manual_seed(self.num_batches)
        shape = (self.mesh.size(), ROWS, WIDTH)
        batches = torch.randn(shape, generator=generator, dtype=torch.float64)
        whole, own = batches.flatten(0, 1).clone(), batches[self.mesh.get_rank()].clone()
        return whole.requires_grad_(wants_grad), own.requires_grad_(wants_grad)

    def losses(self, depth: int = DEPTH) -> tuple[Tensor, Tensor]:
        """Return the plain loss over the batches of all ranks, and the sharded one of this rank."""
        plain, sharded = (
            net(x, depth)[0].square().mean() for net, x in zip(self.both, self.draw(), strict=True)
        )
        return plain, sharded

    def backward(self, losses: Iterable[Tensor], **options: typing.Any) -> None:
        """Call backward of both, if there is something to train; gradients are synced."""
        for loss in losses:
            if loss.requires_grad:
                loss.backward(**options)
                self.settle()

    def settle(self) -> None:
        """A synced backward has brought what waited."""
        for name, grad in self.pending.items():
            param = self.plain.get_parameter(name)
            param.grad = grad if param.grad is None else param.grad + grad
        self.pending.clear()

    def drop(self) -> None:
        """Go on as users do after an exception, which costs what was not synced."""
        self.has_dropped |= bool(self.pending)
        self.pending.clear()
        for net in self.both:
            net.zero_grad()

    def outcomes(self, run: Callable[[int], None]) -> bool:
        """Do something to each; return whether it raised, which both do or neither."""
        raised = []
        for i in range(2):
            try:
                run(i)
            except ArithmeticError:
                raised.append(True)
            else:
                raised.append(False)
        assert raised[0] == raised[1], f"raised of plain and sharded model: {raised}"
        return raised[0]

    def assert_equal(self, ours: Tensor, theirs: Tensor, what: str = "value") -> None:
        text = self.difference(ours, theirs)
        assert text is None, f"{what}: {text}"

    def difference(self, ours: Tensor, theirs: Tensor) -> str | None:
        """Say how far tensors are apart, if they are."""
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{ours.dtype} of shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        apart = (ours - theirs).abs().max().item()
        scale = theirs.abs().max().item()
        tolerance = TOLERANCES[torch.float32 if self.layout in LAYOUTS[-4:] else ours.dtype]
        if apart <= tolerance * (scale + 1e-3):
            return None
        return f"differs by {apart:.1e} of {scale:.1e}"

    def mean(self, own: Tensor) -> Tensor:
        """Return the average over the ranks."""
        total = own.detach().clone()
        dist.all_reduce(total)
        return total / self.mesh.size()

    # --- training ---------------------------------------------------------------------------------

    @action
    def step(self, num: int, way: int) -> None:
        """Train a step of one to three micro-batches; gradients of all but the last wait."""
        num = num % 3 + 1
        self.sharded.set_manual_backward_finalization(way % 6 == 4)
        for i in range(num):
            with self.micro_batch(way, is_last=i == num - 1):
                for loss in self.losses():
                    if loss.requires_grad:
                        (loss / num).backward()
            if self.layout != "kept" and not self.keeps_after_backward():
                self.expect_freed()
        if way % 6 == 4:
            self.sharded.finalize_backward(async_op=True).wait()
            self.sharded.set_manual_backward_finalization(False)
        if any(param.requires_grad for param in self.plain.parameters()):
            self.settle()
            self.is_open = False
        for optimizer in self.all_optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def micro_batch(self, way: int, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Have the gradients wait, in one way or another, unless this one is the last."""
        if way % 6 == 0:
            self.sharded.set_requires_gradient_sync(is_last)
        elif way % 6 == 1 and not is_last:
            return typing.cast("typing.Any", self.sharded.no_sync())
        elif way % 6 == 2:
            self.sharded.set_requires_all_reduce(is_last)
        elif way % 6 == 3:
            self.sharded.set_is_last_backward(is_last)
        return contextlib.nullcontext()

    @keeping
    def add_gradients(self, depth: int) -> None:
        """Add gradients, of the first blocks only."""
        self.backward(self.losses(depth % DEPTH + 1))

    @keeping
    def accumulate(self, depth: int) -> None:
        """Add gradients that wait to be synced, beyond this action."""
        plain, sharded = self.losses(depth % DEPTH + 1)
        if not plain.requires_grad or self.mesh.size() == 1:
            return  # On one rank gradients are there at once.
        before = {name: param.grad for name, param in self.plain.named_parameters()}
        self.plain.zero_grad()
        plain.backward()
        for name, param in self.plain.named_parameters():
            if param.grad is not None:
                old = self.pending.get(name)
                self.pending[name] = param.grad if old is None else old + param.grad
            param.grad = before[name]
        with self.sharded.no_sync():
            sharded.backward()

    @keeping
    def synchronize(self) -> None:
        """Average the gradients that wait."""
        self.sharded.synchronize_gradients()
        self.settle()

    @action
    def update(self, which: int) -> None:
        """Step all optimizers or one by the gradients that are there."""
        pairs = [*zip(*self.optimizers, strict=True)]
        for pair in pairs if which % 3 == 0 else [pairs[which % len(pairs)]]:
            params = [param for group in pair[0].param_groups for param in group["params"]]
            if any(param.grad is not None for param in params):  # Else told, if another model has.
                for optimizer in pair:
                    optimizer.step()

    @action
    def scaled_step(self, which: int, way: int) -> None:
        """Train a step by a scaled loss; a gradient may overflow on the rank that has its rows."""
        name = self.names(which, trainable=True)
        if name is None or self.pending:
            return  # A scaler refuses steps without a gradient; and what waits is not scaled.
        scales = []
        params = self.params(name)
        for net, x, param, own in zip(self.both, self.draw(), params, self.optimizers, strict=True):
            net.zero_grad()
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**way)
            scaler.scale(net(x)[0].square().mean()).backward()
            if way > 4:
                param.grad[0].fill_(torch.inf)
            for optimizer in own:
                if any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
                    scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            net.zero_grad()
        assert scales[0] == scales[1], f"scale {scales[1]}, not {scales[0]}"

    @keeping
    def zero_grad(self, way: int) -> None:
        for optimizers, net in zip(self.optimizers, self.both, strict=True):
            for each in optimizers if way % 2 else [net]:
                each.zero_grad(set_to_none=way % 4 < 2)

    @keeping
    def set_gradient(self, which: int, way: int) -> None:
        """Give a parameter a gradient by hand, change the one that is there, or drop it."""
        for param in self.params(self.names(which, trainable=True) or self.names(which) or ""):
            if way % 3 == 0:
                param.grad = param.detach() * 0.1
            elif way % 3 == 1:
                param.grad = None
            elif param.grad is not None:
                param.grad.mul_(0.5)

    @keeping
    def clip(self, way: int) -> None:
        params = [*self.sharded.parameters()]
        if way % 3 == 0:
            norm = nn.utils.clip_grad_norm_(params, 0.5)
        elif way % 3 == 1:
            norm = self.sharded.clip_grad_norm_(0.5)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            nn.utils.clip_grads_with_norm_(params, 0.5, norm)
        wanted = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5)
        self.assert_equal(norm.double(), wanted.double(), "norm")

    @keeping
    def evaluate(self, way: int) -> None:
        """Run without gradients, in the other mode of modules."""
        modes = [(module, module.training) for net in self.both for module in net.modules()]
        for net in self.both:
            net.eval()
        with torch.inference_mode() if way % 2 else torch.no_grad():
            plain, sharded = self.losses()
        self.assert_equal(self.mean(sharded), plain, "loss")
        for module, mode in modes:
            module.training = mode

    @action
    def set_mode(self, block: int) -> None:
        """Let a block train or evaluate from now on."""
        for net in self.both:
            module = net.blocks[block % DEPTH]
            module.train(not module.training)

    @action
    def set_order(self, first: int, way: int) -> None:
        """Run the blocks in another order from now on."""
        order = [*self.plain.order]
        order.insert(way % DEPTH, order.pop(first % DEPTH))
        for net in self.both:
            net.order = order

    @action
    def set_recompute(self, block: int) -> None:
        for net in self.both:
            module = net.blocks[block % DEPTH]
            module.is_recomputed = not module.is_recomputed

    # --- backwards of all kinds -------------------------------------------------------------------

    @keeping
    def partial_backward(self, tap: int, way: int) -> None:
        """Go backward by a part of a graph, or twice, or by two graphs."""
        for net, x in zip(self.both, self.draw(wants_grad=True), strict=True):
            out, inner = net(x, tap=tap % DEPTH)
            self.is_open = True
            first, second = inner.square().mean(), out.square().mean()
            if way % 5 == 0:
                first.backward()  # The rest is dropped.
            elif way % 5 == 1:
                first.backward(retain_graph=True)
                second.backward()
            elif way % 5 == 2:
                second.backward(retain_graph=True)
                second.backward()
            elif way % 5 == 3:
                second.backward(retain_graph=True)
                out.mean().backward()
            else:
                (first + second).backward()
        self.settle()  # Also if the backward came to no parameter.

    @keeping
    def use_alone(self, which: int, way: int) -> None:
        """Run one block, outside of the model's forward, and perhaps go backward."""
        blocks = [net.short if which % 4 == DEPTH else net.blocks[which % 4] for net in self.both]
        if which % 4 != DEPTH and not isinstance(blocks[1], FSDPModule):
            return  # The model's own group is not gathered.
        losses = [block(x).square().mean() for block, x in zip(blocks, self.draw(), strict=True)]
        self.assert_equal(self.mean(losses[1]), losses[0].detach(), "loss")
        self.is_open = True
        if way % 2:
            self.backward(losses)

    @keeping
    def sync_some(self, which: int) -> None:
        """Let the gradients of one module wait, while those of the others are averaged."""
        if self.mesh.size() == 1 or self.pending:
            return
        module = self.units()[which % len(self.units())]
        group = state_of(module).group
        params = [param for bucket in group.buckets for param in bucket.sharded] if group else []
        own = [name for name, param in self.objects.items() if any(param is p for p in params)]
        module.set_requires_gradient_sync(False, recurse=False)
        losses = self.losses()
        if losses[0].requires_grad:
            before = {name: self.plain.get_parameter(name).grad for name in own}
            for name in own:
                self.plain.get_parameter(name).grad = None
            for loss in losses:
                loss.backward()
            for name in own:
                param = self.plain.get_parameter(name)
                if param.grad is not None:
                    self.pending[name] = param.grad
                param.grad = before[name]
        module.set_requires_gradient_sync(True, recurse=False)

    @keeping
    def two_forwards(self, way: int) -> None:
        """Run two forwards before their backwards, in either order, or drop one."""
        losses = [self.losses(), self.losses()]
        self.is_open = True
        if way % 3 == 0:
            losses.reverse()
        elif way % 3 == 1:
            losses.pop(0)
        for pair in losses:
            self.backward(pair)

    @keeping
    def begin(self, depth: int) -> None:
        """Run a forward whose backward comes in a later action, or never."""
        self.held = self.losses(depth % DEPTH + 1)
        self.is_open = True

    @keeping
    def finish(self) -> None:
        """Go backward by the forward of an earlier action."""
        if self.held is not None:
            held, self.held = self.held, None
            self.backward(held)

    @keeping
    def backward_for_some(self, first: int, num: int) -> None:
        """Add gradients of chosen parameters only."""
        names = [n for n, p in self.plain.named_parameters() if p.requires_grad]
        chosen = [names[(first + i) % len(names)] for i in range(num % 3 + 1)] if names else []
        if chosen:
            given = zip(*map(self.params, dict.fromkeys(chosen)), strict=True)
            for loss, params in zip(self.losses(), given, strict=True):
                loss.backward(inputs=params)
            self.settle()

    @keeping
    def gradients(self, way: int) -> None:
        """Ask for gradients by parameters, and perhaps train by their size."""
        names = [n for n, p in self.plain.named_parameters() if p.requires_grad]
        names = names if way % 3 else names[:1]
        if not names:
            return
        results = []
        given = zip(*map(self.params, names), strict=True)
        for loss, params in zip(self.losses(), given, strict=True):
            grads = torch.autograd.grad(loss, params, create_graph=way % 2 == 0)
            results.append(grads)
        for name, theirs, ours in zip(names, *results, strict=True):
            self.assert_equal(ours.detach().full_tensor(), theirs.detach(), f"gradient of {name}")
        if way % 2 == 0:
            self.backward([sum((g * g).sum() for g in grads) for grads in results])

    @keeping
    def penalty(self, depth: int) -> None:
        """Train by the size of the gradient by inputs, as WGAN-GP does."""
        inputs = self.draw(wants_grad=True)
        losses = []
        for net, x in zip(self.both, inputs, strict=True):
            out = net(x, depth % DEPTH + 1)[0]
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            losses.append((grad.norm(dim=1) - 1).square().mean())
        self.is_open |= not losses[0].requires_grad  # A backward by the graph may come.
        self.backward(losses)

    @keeping
    def functional(self, way: int, which: int) -> None:
        """Compute with other values than the model's, perhaps while a forward waits."""
        if way > 4:
            self.begin(which)
        flags = [block.is_recomputed for block in self.plain.blocks]
        for block in (block for net in self.both for block in net.blocks):
            block.is_recomputed = False  # Torch would recompute with the model's own values.
        losses, given = [], []
        for net, x in zip(self.both, self.draw(), strict=True):
            values = self.values(net, way, self.names(which))
            losses.append(functional_call(net, values, (x,))[0].square().mean())
            given.append(values)
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        for name, value in given[0].items() if way % 3 else ():
            self.assert_equal(self.mean(given[1][name].grad), value.grad, f"given {name}")
        named = self.plain.named_parameters()
        if any(param.requires_grad and name not in given[0] for name, param in named):
            self.settle()  # Else no group is used, and nothing that waits is synced.
        for block, flag in zip((b for n in self.both for b in n.blocks), flags * 2, strict=True):
            block.is_recomputed = flag

    def values(self, net: nn.Module, way: int, chosen: str | None) -> dict[str, Tensor]:
        """Return values for a functional call: computed of parameters, all whole, or one whole."""
        values: dict[str, Tensor] = {}
        for name in self.objects:
            param = self.params(name)[net is self.sharded]
            if way % 3 == 0:
                values[name] = param * 1.5
            elif way % 3 == 1 or name == chosen:
                whole = param.detach() if net is self.plain else param.detach().full_tensor()
                values[name] = (whole * 1.5).requires_grad_()
        return values

    # --- what raises ------------------------------------------------------------------------------

    @action
    def raise_in_forward(self, block: int) -> None:
        def run(i: int) -> None:
            self.both[i].blocks[block % DEPTH].raises = "forward"
            try:
                self.both[i](x[i])
            finally:
                self.both[i].blocks[block % DEPTH].raises = ""

        x = self.draw()
        assert self.outcomes(run), "the forward did not raise"
        self.drop()

    @action
    def raise_in_backward(self, block: int) -> None:
        def run(i: int) -> None:
            module = self.both[i].blocks[block % DEPTH]
            module.raises = "backward"
            try:
                loss = self.both[i](x[i])[0].square().mean()
                if loss.requires_grad:
                    loss.backward()
            finally:
                module.raises = ""

        x = self.draw()
        if self.outcomes(run):
            self.drop()
        elif any(param.requires_grad for param in self.plain.parameters()):
            self.settle()

    @action
    def raise_in_hook(self, which: int) -> None:
        def run(i: int) -> None:
            handle = params[i].register_hook(fail)
            try:
                loss = self.both[i](x[i])[0].square().mean()
                loss.backward()
            finally:
                handle.remove()

        def fail(_: Tensor) -> None:
            raise ArithmeticError

        name = self.names(which, trainable=True)
        if name is None:
            return
        params, x = self.params(name), self.draw()
        assert self.outcomes(run), "the backward did not raise"
        self.drop()

    @action
    def exchange_parameter(self, which: int, way: int) -> None:
        """Put another parameter, or none, in the place of one: which is refused. Put it back."""
        name = self.names(which) or ""
        path, _, attribute = name.rpartition(".")
        module, own = self.sharded.get_submodule(path), self.objects[name]
        other = None if way % 2 else nn.Parameter(own.detach().full_tensor())
        num_calls = len(self.calls[1])
        setattr(module, attribute, other)
        with pytest.raises(StateError, match=attribute):
            self.sharded(self.draw()[1])
        del self.calls[1][num_calls:]
        self.sharded.seen.copy_(self.plain.seen)
        setattr(module, attribute, own)
        self.drop()

    # --- hooks ------------------------------------------------------------------------------------

    @keeping
    def hook_gradient(self, which: int, way: int) -> None:
        """Mask or scale the gradient of a parameter from now on."""
        name = self.names(which, trainable=True)
        if name is None:
            return
        handles = []
        for param, calls in zip(self.params(name), self.calls, strict=True):

            def hook(grad: Tensor | None, calls: list[str] = calls) -> Tensor | None:
                if grad is None:  # Torch's, behind a module's hook for outputs that nobody uses.
                    return None
                calls.append(name)
                mask = torch.ones_like(grad)
                mask[: len(mask) // 2] = 0
                return (grad * mask, grad * 0.5, None)[way % 3]

            handles.append(param.register_hook(hook))
        self.handles.append(tuple(handles))

    @action
    def step_in_backward(self, which: int, way: int) -> None:
        """Update a parameter by its own hook as soon as its gradient has been added up."""
        name = self.names(which, trainable=True)
        if name is None or self.pending:
            return
        calls: tuple[list[str], list[str]] = ([], [])
        handles = []
        for param, own in zip(self.params(name), calls, strict=True):

            def update(param: typing.Any, own: list[str] = own) -> None:
                own.append(name)
                if way % 3 == 0:
                    param.grad.mul_(0.5)
                    return
                with torch.no_grad():
                    param.sub_(param.grad, alpha=0.01)
                if way % 3 == 1:
                    param.grad = None

            handles.append(param.register_post_accumulate_grad_hook(update))
        self.backward(self.losses(way % DEPTH + 1))
        for handle in handles:
            handle.remove()
        assert calls[0] == calls[1], f"calls of hooks: {calls[1]}, not {calls[0]}"

    @keeping
    def hook_module(self, which: int, way: int) -> None:
        """Change what goes into a module or comes out of it from now on."""
        handles = []
        for net, calls in zip(self.both, self.calls, strict=True):
            module = [*net.blocks, net][which % (DEPTH + 1)]

            def note(kind: str, calls: list[str] = calls) -> None:
                calls.append(f"{kind} of module {which % (DEPTH + 1)}")

            def before(_: object, args: typing.Any, note: typing.Any = note) -> typing.Any:
                note("forward pre hook")
                return (args[0] * 0.9, *args[1:])

            def after(*_: object, note: typing.Any = note) -> None:
                note("forward hook")

            def back(*_: object, note: typing.Any = note) -> None:
                note("backward hook")

            if way % 4 == 0:
                handle = module.register_forward_pre_hook(before)
            elif way % 4 == 1:
                handle = module.register_forward_hook(after)
            elif way % 4 == 2:
                handle = module.register_full_backward_hook(back)
            else:
                handle = module.register_full_backward_pre_hook(back)
            handles.append(handle)
        self.handles.append(tuple(handles))

    @keeping
    def unhook(self, which: int) -> None:
        """Remove a hook."""
        if self.handles:
            for handle in self.handles.pop(which % len(self.handles)):
                handle.remove()

    # --- values -----------------------------------------------------------------------------------

    @action
    def freeze(self, which: int) -> None:
        """Freeze a block or a parameter, or train it again."""
        names = [name for name in self.objects if name.startswith(f"blocks.{which % DEPTH}.")]
        for name in names if which % 2 else [self.names(which) or ""]:
            for param in self.params(name):
                param.requires_grad_(not param.requires_grad)

    @action
    def write(self, which: int, way: int) -> None:
        """Write a parameter in place, perhaps one that an evaluation has left gathered."""
        if way > 3:
            self.evaluate(0)
        for param in self.params(self.names(which) or ""):
            with torch.no_grad():
                if way % 4 == 0:
                    param.mul_(0.9).add_(0.01)
                elif way % 4 == 1:
                    param[0] = 0.1
                elif way % 4 == 2:
                    param.data.mul_(0.9)
                else:
                    nn.init.constant_(param, 0.1)
        if way > 3:
            self.evaluate(0)

    @action
    def convert(self, way: int) -> None:
        """Convert to fp32, perhaps evaluate or train a step, and convert back."""
        if self.layout == "two dtypes" or self.pending:
            return  # Gradients that wait would be lost, which is refused.
        for net in self.both:
            net.float()
        if way % 3:
            self.single_step(train=way % 3 == 1)
        for net in self.both:
            net.double()

    def single_step(self, *, train: bool) -> None:
        """Compute in fp32, and perhaps update parameters by what is exact in it."""
        inputs = [x.float() for x in self.draw()]
        with torch.set_grad_enabled(train):
            losses = [net(x)[0].square().mean() for net, x in zip(self.both, inputs, strict=True)]
        mean = self.mean(losses[1].double())
        assert math.isclose(mean.item(), losses[0].item(), rel_tol=1e-3), "losses in fp32"
        if train:
            self.backward(losses)
            for net in self.both:
                net.zero_grad()

    @action
    def write_in_forward(self, block: int) -> None:
        """Clamp a weight in its layer's forward."""
        if self.layout == "tied" and block % DEPTH != 1:
            return  # Torch refuses a backward by values from before the write.
        for net, x in zip(self.both, self.draw(), strict=True):
            module = net.blocks[block % DEPTH]
            was_recomputed, module.is_recomputed = module.is_recomputed, False
            module.writes = True
            loss = net(x)[0].square().mean()
            module.writes = False
            if loss.requires_grad:
                loss.backward()
            module.is_recomputed = was_recomputed
        if any(param.requires_grad for param in self.plain.parameters()):
            self.settle()

    @action
    def unshard(self, which: int, way: int) -> None:
        """Look at unsharded parameters of one module, and perhaps write them."""
        module = self.units()[which % len(self.units())]
        module.unshard()
        within = [unit for unit in self.units() if unit is not module]
        nested = {id(m) for unit in within if module not in unit.modules() for m in unit.modules()}
        own = {id(m) for m in module.modules()} - nested
        for name, inside in self.sharded.named_modules():
            for key, param in inside.named_parameters(recurse=False):
                if id(inside) in own and not hasattr(param, "full_tensor"):
                    other = self.plain.get_submodule(name).get_parameter(key)
                    value = param.detach().to(other.dtype, copy=True)
                    self.assert_equal(value, other.detach(), f"{name}.{key}")
                    if way % 2:
                        with torch.no_grad():
                            param.mul_(0.95)
                            other.mul_(0.95)
        module.reshard()

    @action
    def summon(self, which: int, way: int) -> None:
        """Write whole parameters, and perhaps gradients."""
        options = {"with_grads": way % 2 == 1, "writeback": way % 3 != 2}
        name = self.names(which) or ""
        with summon_full_params(self.sharded, **options):
            params = [net.get_parameter(name) for net in self.both]
            self.assert_equal(params[1].detach(), params[0].detach(), name)
            for param in params if options["writeback"] else params[1:]:
                with torch.no_grad():
                    param.mul_(0.95)
                    if options["with_grads"] and param.grad is not None:
                        param.grad.mul_(0.5)

    @action
    def load_state_dict(self, factor: int, way: int) -> None:
        """Load scaled values, of sharded parameters or whole ones."""
        for net in self.both:
            state = {name: value * (0.9 + factor / 100) for name, value in net.state_dict().items()}
            assign = False
            if net is self.sharded and way % 3 == 1:
                state = {n: getattr(v, "full_tensor", v.clone)() for n, v in state.items()}
            elif net is self.sharded and way % 3 == 2:
                assign = True
            net.load_state_dict(state, assign=assign)

    # --- other objects ----------------------------------------------------------------------------

    @action
    def deepcopy(self) -> None:
        """Go on with copies, for now."""
        before = {**vars(self), "aside": None}
        self.replace(*map(copy.deepcopy, self.both), with_grads=True)
        self.aside = before

    @action
    def return_to_other(self) -> None:
        """Go on with the models that were copied, or with the copies again."""
        if self.aside is not None:
            before = {**vars(self), "aside": None, "num_batches": 0}
            vars(self).update(self.aside)
            self.aside = before

    @action
    def average(self, num: int) -> None:
        """Average parameters over a step, and go on with the averages."""
        rule = get_ema_multi_avg_fn(0.5)
        averages = [AveragedModel(net, multi_avg_fn=rule) for net in self.both]
        for _ in range(2):
            self.step(num, num)
            for average, net in zip(averages, self.both, strict=True):
                average.update_parameters(net)
        self.replace(*(average.module for average in averages), with_grads=False)

    @action
    def swap_blocks(self, first: int, second: int) -> None:
        """Let two blocks exchange their places, and so the names of their parameters."""
        old = {param: name for name, param in self.plain.named_parameters()}
        first, second = (0, 2) if self.layout == "tied" else (first % DEPTH, second % DEPTH)
        for net in self.both:
            blocks = net.blocks
            blocks[first], blocks[second] = blocks[second], blocks[first]
        new = {old[param]: name for name, param in self.plain.named_parameters()}
        self.objects = {new[name]: param for name, param in self.objects.items()}
        self.pending = {new[name]: grad for name, grad in self.pending.items()}
        self.groups = [
            [[new.get(name, name) for name in names] for names in groups] for groups in self.groups
        ]

    @action
    def pickle(self) -> None:
        """Go on with models from a file of whole objects."""
        if any(v for m in self.plain.modules() for k, v in vars(m).items() if k.endswith("_hooks")):
            return  # Functions inside of functions cannot be pickled.
        news = []
        for net in self.both:
            file = io.BytesIO()
            torch.save(net, file)
            file.seek(0)
            news.append(torch.load(file, weights_only=False))
        self.replace(*news, with_grads=True)

    @action
    def torch_state_dicts(self, way: int) -> None:
        """Take and set state by torch's functions."""
        optimizers = self.optimizers[1]
        stateful = [param for optimizer in optimizers for param in optimizer.state]
        if self.has_strangers or len(stateful) < len(self.objects):
            return  # Torch refuses state of some parameters only.
        if not all(param.requires_grad for param in self.objects.values()):
            return  # Torch drops the state of frozen ones.
        if self.is_open:
            return  # Torch looks past `parameters()`, and finds what the backward needs.
        options = [
            StateDictOptions(),
            StateDictOptions(cpu_offload=True),
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
        ][way % 4]
        model, state = get_state_dict(self.sharded, optimizers, options=options)
        set_state_dict(
            self.sharded,
            optimizers,
            model_state_dict=model,
            optim_state_dict=state,
            options=options,
        )

    @action
    def full_file(self, way: int) -> None:
        """Write whole tensors to a file, spoil the values, and read them again."""
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        path = pathlib.Path(folder[0], "x")
        checkpoint.save_full(path, self.sharded, format=("torch", "safetensors")[way % 2])
        self.spoil(with_state=False)
        checkpoint.load_full(path, self.sharded)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])

    @action
    def checkpoint(self, num: int, way: int) -> None:
        """Save after a step, spoil what was saved, and go on with objects that have loaded it.

        They may be sharded in another way, and read a file of whole tensors.
        """
        self.step(num, 0)
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        path, file = (pathlib.Path(folder[0], name) for name in ("x", "whole"))
        optimizers = [] if self.has_strangers else self.optimizers[1]
        if way % 2:
            checkpoint.save(path, self.sharded, optimizers)
            self.spoil()
        else:
            saved = checkpoint.async_save(path, self.sharded, optimizers)
            self.spoil()
            saved.result()
        plain, sharded = self.like(self.plain), self.put(self.like(self.plain))
        plain.load_state_dict(self.plain.state_dict())
        if self.layout in ALIKE and way > 3:
            self.layout = ALIKE[way % len(ALIKE)]
        self.replace(plain, self.shard(sharded), with_grads=False)
        if optimizers:
            self.optimizers = self.optimizers[0], self.optimizers_of(1)
        checkpoint.load(path, self.sharded, self.optimizers[1] if optimizers else [])
        if way % 3 == 0:
            self.spoil(with_state=False)
            if dist.get_rank() == 0:
                checkpoint.consolidate(path, file)
            dist.barrier()
            checkpoint.load_full(file, self.sharded)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
        self.step(num, 0)

    @torch.no_grad()
    def spoil(self, *, with_state: bool = True) -> None:
        """Write other values to the sharded parameters, and to the state of their optimizers."""
        for param in self.objects.values():
            param.fill_(0.5)
        for optimizer in self.optimizers[1] if with_state else ():
            for state in optimizer.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    value.fill_(0.5)

    def like(self, old: typing.Any) -> typing.Any:
        """Make a plain model anew, as its script would: with the same head, frozen alike."""
        new: typing.Any = Net(self.layout)
        if not isinstance(old.head, nn.Identity):
            new.head = nn.Linear(WIDTH, old.head.out_features)
            new.head.double()
        new.order = old.order
        for name, param in old.named_parameters():
            new.get_parameter(name).requires_grad_(param.requires_grad)
        for ours, theirs in zip(new.modules(), old.modules(), strict=True):
            ours.training = theirs.training
        for ours, theirs in zip(new.blocks, old.blocks, strict=True):
            ours.is_recomputed = theirs.is_recomputed
        return new

    @action
    def new_optimizer(self, kind: int) -> None:
        """Exchange the optimizers for others, perhaps of another class, or one for two."""
        self.choose_optimizers(kind, has_two=kind % 2 == 1)
        self.new_optimizers()

    @action
    def put_in_head(self, size: int, way: int) -> None:
        """Put a new head in, amid training."""
        self.has_strangers |= not isinstance(self.plain.head, nn.Identity)
        self.num_heads += 1
        torch.manual_seed(self.num_heads)
        head = nn.Linear(WIDTH, size % 4 + 1).double()
        self.plain.head = head
        self.sharded.head = fully_shard(self.put(head), **self.options)
        names = [name for name in self.objects if not name.startswith("head.")]
        own = {f"head.{name}": param for name, param in self.sharded.head.named_parameters()}
        self.objects = {name: self.objects[name] for name in names} | own
        if way % 2:
            self.new_optimizers()
        else:
            own_group = ["head.weight", "head.bias"]
            self.groups = [[*self.groups[0], own_group], *self.groups[1:]]
            for optimizers, net in zip(self.optimizers, self.both, strict=True):
                optimizers[0].add_param_group({"params": list(net.head.parameters())})
        self.forget_head()

    @action
    def take_out_head(self, way: int) -> None:
        if isinstance(self.plain.head, nn.Identity):
            return
        for net in self.both:
            net.head = nn.Identity()
        for name in ("head.weight", "head.bias"):
            del self.objects[name]
        self.forget_head()
        if way % 2:
            self.new_optimizers()
        else:
            self.has_strangers = True

    def forget_head(self) -> None:
        """Nothing waits for the old one."""
        for name in ("head.weight", "head.bias"):
            self.pending.pop(name, None)

    @action
    def choose(self, which: int, way: int) -> None:
        """Choose when memory is given back and got."""
        module = self.units()[which % len(self.units())]
        if way % 5 == 0:
            module.set_reshard_after_forward(which % 2 == 0, recurse=False)
        elif way % 5 == 1:
            module.set_reshard_after_backward(which % 2 == 0)
        elif way % 5 == 2:
            ways = ("pre", "post", "none")
            self.sharded.set_prefetch_policy(forward=which % 2 == 0, backward=ways[which % 3])
        elif way % 5 == 3:
            module.set_modules_to_forward_prefetch(self.units()[1:3])
        else:
            module.set_modules_to_backward_prefetch(self.units()[1:2])
        self.evaluate(0)  # A choice counts from the next forward on.

    # --- comparison -------------------------------------------------------------------------------

    def keeps_after_backward(self) -> bool:
        return any(not state_of(m).group.settings.reshard_after_backward for m in self.with_group())

    def with_group(self) -> list[typing.Any]:
        return [module for module in self.units() if state_of(module).group is not None]

    def expect_freed(self) -> None:
        """After a backward no unsharded memory is left."""
        nbytes = self.sharded.memory_stats()["unsharded_nbytes"]
        assert nbytes == 0 or self.held is not None, f"{nbytes} bytes are left after a backward"

    def problem(self) -> str | None:
        """Compare values, gradients, identities and memory; say what differs."""
        shown = dict(self.sharded.named_parameters())
        if list(shown) != [name for name, _ in self.plain.named_parameters()]:
            return f"names: {[*shown]}"
        for name, param in shown.items():
            own = self.objects[name]
            text = self.problem_of(own, self.plain.get_parameter(name))
            text = text if param is own else " is another object"
            if text is not None:
                return f"{name}{text}"
        if not torch.equal(self.sharded.seen, self.plain.seen):
            return f"seen: {self.sharded.seen.item()}, not {self.plain.seen.item()}"
        counts = [collections.Counter(calls) for calls in self.calls]
        if counts[0] != counts[1]:
            return f"calls of hooks: {dict(counts[1])}, not {dict(counts[0])}"
        return self.problem_of_memory()

    def problem_of(self, ours: typing.Any, theirs: nn.Parameter) -> str | None:
        """Compare a parameter. All ranks gather the same, whatever they find."""
        text = self.difference(ours.detach().full_tensor(), theirs.detach())
        if text is not None:
            return f": {text}"
        if ours.requires_grad != theirs.requires_grad:
            return f".requires_grad is {ours.requires_grad}"
        if (ours.grad is None) != (theirs.grad is None):
            return f".grad is {'' if ours.grad is None else 'not '}None"
        if theirs.grad is None:
            return None
        text = self.difference(ours.grad.full_tensor(), theirs.grad)
        return text and f".grad: {text}"

    def problem_of_memory(self) -> str | None:
        stats = self.sharded.memory_stats()
        waits = stats["unsynced_grad_nbytes"] > 0
        if waits != bool(self.pending) and self.mesh.size() > 1:
            return f"{stats['unsynced_grad_nbytes']} bytes of gradients wait, {len(self.pending)}"
        runtime = state_of(self.sharded).runtime
        groups = [] if runtime is None else runtime.groups
        stores = [store for group in groups for store in group.gathered if store.has_memory]
        nbytes = sum(store.unsharded_nbytes for store in stores)
        if nbytes != stats["unsharded_nbytes"]:
            return f"{nbytes} bytes are unsharded, not {stats['unsharded_nbytes']} as is said"
        allowed = sum(
            group.unsharded_nbytes
            for group in groups
            if not (group.reshards_after_forward and group.settings.reshard_after_backward)
        )
        if self.is_open:  # What the backward needs first.
            allowed += max((group.unsharded_nbytes for group in groups), default=0)
        if nbytes > allowed:
            return f"{nbytes} bytes are unsharded, where at most {allowed} are kept"
        return None

    # --- a sequence -------------------------------------------------------------------------------

    def problem_after(self, name: str, *numbers: int) -> str | None:
        """Perform an action, and say what is wrong on this rank."""
        if name not in KEEPING:
            self.held = None
        with told() as texts:
            getattr(self, name)(*numbers)
            if sum(numbers) % 2:  # Does a forward see it? What is kept is gathered then.
                self.evaluate(0)
            text = self.problem()
        if self.has_dropped and any(DROPPED in each for each in texts):
            texts.remove(next(each for each in texts if DROPPED in each))
            self.has_dropped = False
        return text or next(iter(texts), None)

    def do(self, name: str, *numbers: int) -> None:
        """Perform an action, and compare.

        Raises:
            AssertionError: On all ranks, if on any of them the models differ, or something is told
                that is none of the user's mistakes.
        """
        text = self.problem_after(name, *numbers)
        found: list[str | None] = [None] * dist.get_world_size()
        has_problem = torch.tensor(text is not None, dtype=torch.int64)
        dist.all_reduce(has_problem, op=dist.ReduceOp.MAX)
        if has_problem:
            dist.all_gather_object(found, text)
            raise AssertionError(next(each for each in found if each is not None))


DROPPED = "an exception ended a step"
"""Words of the warning about gradients that an exception has dropped."""


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Collect what is warned and logged."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("shardkit"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
        warned = [f"{each.category.__name__}: {each.message}" for each in caught]
        texts += [text for text in warned if "Full backward hook is firing" not in text]  # Torch's.
    finally:
        logger.removeHandler(handler)


def perform(
    shape: tuple[int, ...],
    layout: str,
    actions: Sequence[tuple[str, list[int]]],
    defect: str | None = None,
) -> None:
    """Perform actions, perhaps with a defect of shardkit, and compare after each."""
    with put_in(defect):
        twins = Twins(shape, layout)
        for number, (name, numbers) in enumerate(actions, start=1):
            try:
                twins.do(name, *numbers)
            except BaseException as error:
                error.add_note(f"in action {number} of {len(actions)}: {name}{tuple(numbers)}")
                raise
        twins.sharded.check_replicas()


def script(shape: tuple[int, ...], layout: str, actions: Sequence[tuple[str, list[int]]]) -> str:
    """Return a program that performs a sequence."""
    num_ranks = torch.Size(shape).numel()
    start = f"torchrun --standalone --nproc-per-node {num_ranks} script.py"
    lines = [
        f"# PYTHONPATH=src:tests/machine {start}",
        "from twins import Twins",
        "",
        f"twins = Twins({shape}, {layout!r})",
    ]
    lines += [f"twins.do({', '.join(map(repr, (name, *numbers)))})" for name, numbers in actions]
    return "\n".join([*lines, ""])
