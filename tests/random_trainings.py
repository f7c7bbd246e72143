"""Random trainings: ranks that use different parameters, in forwards and backwards of any order.

A case is drawn from its number alone, so each failure can be run again. The plain model goes
through the steps of all ranks, in float64.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import typing
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference import full_parameters
from shardkit import DeviceMesh, FSDPModule, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Iterable


WIDTH = 6
ALL = None
NOTHING = -1
Choice = int | None
"""The expert of a layer that a forward uses: one of three, all of them, or no parameter at all."""


Mode = typing.Literal["trained", "detached", "no_grad", "kept"]
"""What a forward is for: its loss goes backward, is a constant of other losses, or is kept."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward of the model: its input, what it is for, and what each rank uses of each layer."""

    shift: float
    mode: Mode
    choices: list[list[Choice]]
    has_input_grads: bool  # The first layer's input requires a gradient.


@dataclasses.dataclass(frozen=True)
class Step:
    """Forwards, the losses that are made of them, and how backward goes through these."""

    forwards: list[Forward]
    losses: typing.Literal["sum", "product", "each", "reversed"]
    twice: bool  # Each graph is retained for a second backward.
    synced: list[bool]
    """Which backwards average over the ranks. The last one does, or a call after it."""
    ends_by_call: bool  # Gradients are averaged by a call after the last backward.


@dataclasses.dataclass(frozen=True)
class Training:
    """A model, how it is sharded, and its steps."""

    widths: list[int]
    order: list[int]
    recomputed: int | None
    has_ends: bool  # The root has parameters, before and after the layers.
    in_one_group: bool
    reshard_after_forward: bool | None
    steps: list[Step]


def drawn(number: int) -> Training:
    """Return the training of this number."""
    draw = random.Random(number)
    layers = range(draw.randint(1, 3))
    again = draw.choice([0, 0, 1, 2])
    return Training(
        widths=[draw.choice([WIDTH, 40_000]) for _ in layers],  # below and above 1 MiB
        order=[*layers, *(draw.choice(layers) for _ in range(again))],
        recomputed=draw.choice([None, *layers]),
        has_ends=draw.random() < 0.6,
        in_one_group=draw.random() < 0.2,
        reshard_after_forward=draw.choice([True, None, False]),
        steps=[_drawn_step(draw, len(layers)) for _ in range(3)],
    )


def _drawn_step(draw: random.Random, num_layers: int) -> Step:
    others = draw.choices(typing.get_args(Mode), k=draw.randint(0, 2))
    modes: list[Mode] = ["trained", *others]
    draw.shuffle(modes)
    return Step(
        forwards=[_drawn_forward(draw, mode, num_layers) for mode in modes],
        losses=draw.choice(["sum", "product", "each", "reversed"]),
        twice=draw.random() < 0.3,
        synced=draw.choices([True, False], k=8),
        ends_by_call=draw.random() < 0.3,
    )


def _drawn_forward(draw: random.Random, mode: Mode, num_layers: int) -> Forward:
    has_input_grads = draw.random() < 0.7
    choices: list[Choice] = [ALL, 0, 1, 2]
    if has_input_grads:  # or else a rank that uses nothing would have nothing to train
        choices.append(draw.choice([ALL, NOTHING]))
    by_rank = [draw.choices(choices, k=num_layers) for _ in range(4)]
    return Forward(draw.random(), mode, by_rank, has_input_grads)


class Layer(nn.Module):
    """Experts of which a forward uses some, beside a weight that makes the layer small or large."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor, chosen: Choice) -> Tensor:
        if chosen == NOTHING:
            return 2 * x
        experts = self.experts if chosen is ALL else [self.experts[chosen]]
        y = torch.stack([expert(x) for expert in experts]).sum(0)
        return x + torch.tanh(y + self.wide(x)[:, :WIDTH])


class Model(nn.Module):
    """Layers in an order that may come back to them; most often between parameters of the root."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if training.has_ends else None
        self.layers = nn.ModuleList(Layer(width) for width in training.widths)
        self.last = nn.Linear(WIDTH, 2) if training.has_ends else nn.Identity()
        self.order, self.recomputed = training.order, training.recomputed

    def forward(self, x: Tensor, choices: list[Choice], has_input_grads: bool) -> Tensor:
        if has_input_grads:
            x = x.clone().requires_grad_() if self.first is None else self.first(x)
        for index in self.order:
            layer, chosen = self.layers[index], choices[index]
            if index == self.recomputed:
                x = checkpoint(layer, x, chosen, use_reentrant=False)
            else:
                x = layer(x, chosen)
        loss: Tensor = self.last(x).sin().mean()
        return loss


def losses_of(
    model: nn.Module, step: Step, x: Tensor, rank: int, kept: list[Tensor]
) -> list[Tensor]:
    """Carry out the forwards of a rank; return what it goes backward from.

    Losses that never go backward are put into `kept`, whose graphs live as long as it.
    """
    trained, constant = [], torch.ones_like(x[0, 0])
    for forward in step.forwards:
        with torch.no_grad() if forward.mode == "no_grad" else contextlib.nullcontext():
            loss = model(x + forward.shift, forward.choices[rank], forward.has_input_grads)
        if forward.mode == "trained":
            trained.append(loss)
        elif forward.mode == "kept":
            kept.append(loss)
        else:
            constant = constant + loss.detach()
    if step.losses == "product":
        trained = [torch.stack(trained).prod()]
    elif step.losses == "sum":
        trained = [torch.stack(trained).sum()]
    elif step.losses == "reversed":
        trained.reverse()
    return [loss * constant for loss in trained]


def go_backward(model: nn.Module, step: Step, losses: list[Tensor], scale: float) -> None:
    """Go backward from each loss; twice, if the step says so."""
    backwards = [(loss * scale, step.twice) for loss in losses]
    if step.twice:
        backwards = [each for loss, _ in backwards for each in ((loss, True), (2 * loss, False))]
    for index, (loss, retains) in enumerate(backwards):
        if isinstance(model, FSDPModule):
            is_last = index == len(backwards) - 1
            model.set_requires_gradient_sync(
                not step.ends_by_call if is_last else step.synced[index]
            )
        loss.backward(retain_graph=retains)
    if isinstance(model, FSDPModule) and step.ends_by_call:
        model.synchronize_gradients()


def worst_difference(number: int, mesh: DeviceMesh) -> float:
    """Return by how much a parameter differs from plain training's after the steps."""
    training, device = drawn(number), mesh.device_type
    torch.manual_seed(number)
    plain = Model(training).double().to(device)
    model = copy.deepcopy(plain)
    groups = [[*model.layers]] if training.in_one_group else model.layers
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=training.reshard_after_forward)
    fully_shard(model, mesh=mesh)
    options = {"lr": 0.1, "foreach": number % 2 == 0}
    optimizers = [torch.optim.SGD(each.parameters(), **options) for each in (model, plain)]
    num_ranks, me = dist.get_world_size(), dist.get_rank()
    for step in training.steps:
        batches = torch.randn(num_ranks, 3, WIDTH, dtype=torch.float64).to(device)
        kept: list[Tensor] = []
        go_backward(model, step, losses_of(model, step, batches[me], me, kept), 1.0)
        for rank, batch in enumerate(batches):
            go_backward(plain, step, losses_of(plain, step, batch, rank, kept), 1 / num_ranks)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = full_parameters(model), full_parameters(plain)
    assert found.keys() == expected.keys()
    differences = [(found[name] - expected[name]).abs().max().item() for name in expected]
    return max(differences)


def worst_differences(numbers: Iterable[int], mesh: DeviceMesh) -> dict[int, float]:
    """Return the difference of each training, by its number; inf if it warns of anything."""
    found = {}
    for number in numbers:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found[number] = worst_difference(number, mesh)
        if said:
            print(number, *(each.message for each in said))
            found[number] = math.inf
    return found
