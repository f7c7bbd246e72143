"""Random lives of trainings: each is saved in one way, loaded in another one, and goes on.

A case is drawn from its number alone, so each failure can be run again. The plain training is in
float64, takes the whole batches, and goes on without a save.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import typing

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as of_torch

from checkpoints import whole
from one_by_one import Entries, OneByOne
from reference import full_parameters, make_mesh
from shardkit import FSDPModule, checkpoint, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WIDTH, BATCH = 5, 4
MESHES = [(2,), (2, 1)]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "lists": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "loop": lambda params: torch.optim.NAdam(params, lr=0.01, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "stateless": lambda params: torch.optim.SGD(params, lr=0.05),
    "rows": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "slots": lambda params: Slots(params, lr=0.05),
}
NOT_OF_TORCH = {"stateless", "slots"}
"""Optimizers that torch's functions refuse, or whose keys they change."""


class Slots(OneByOne):
    """Keeps its state in dicts by numbers, and in lists."""

    def step_one(self, param: Tensor, grad: Tensor, state: Entries, group: Entries) -> None:
        del group
        if not state:
            state["slots"] = {0: torch.zeros_like(param), 0.9: torch.zeros_like(param)}
            state["last"] = [torch.zeros_like(param), 0]
        for beta, slot in state["slots"].items():
            param.sub_(slot.mul_(beta).add_(grad), alpha=0.05)
        param.sub_(state["last"][0], alpha=0.05)
        state["last"][0].copy_(grad)


@dataclasses.dataclass(frozen=True)
class Life:
    """A training, how it is saved and loaded, and how the model is sharded before and after."""

    widths: list[int]
    optimizer: str
    way: str
    meshes: list[tuple[int, ...]]
    by_layers: list[bool]
    is_early: bool  # The save comes between a backward and its step.
    steps_before_load: int  # Steps of another training that the load ends.
    on_meta: bool
    goes_back: bool  # The training itself goes on for a step, and then back to what it has saved.


def drawn(number: int) -> Life:
    """Return the life of this number."""
    draw = random.Random(number)
    way = [*WAYS][number % len(WAYS)]
    known = [name for name in OPTIMIZERS if "torch" not in way or name not in NOT_OF_TORCH]
    is_alike, can_be_on_meta = way in ALIKE, way in FROM_META
    meshes, by_layers = draw.choices(MESHES, k=2), draw.choices([True, False], k=2)
    return Life(
        widths=draw.choices([1, 3, 8], k=draw.randint(1, 3)),
        optimizer=draw.choice(known),
        way=way,
        meshes=[meshes[0], meshes[0]] if is_alike or way == "pickles" else meshes,
        by_layers=[by_layers[0], by_layers[0]] if is_alike else by_layers,
        is_early=draw.random() < 0.3,
        steps_before_load=draw.choice([0, 0, 1, 2]),
        on_meta=can_be_on_meta and draw.random() < 0.4,
        goes_back=draw.random() < 0.3,
    )


class Model(nn.Module):
    """Layers of odd sizes, a tied and a frozen weight, a buffer, and state that is no tensor."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))
            for width in widths
        )
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3, WIDTH), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.notes = torch.zeros(2)

    def get_extra_state(self) -> typing.Any:
        return {"notes": [{"both": self.notes}, "a word"]}

    def set_extra_state(self, state: typing.Any) -> None:
        self.notes = state["notes"][0]["both"].clone()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.notes = self.notes + 1
        x = self.first(x) * (self.scale + 0.1 * self.notes.sum()) + self.frozen.sum(0)
        for layer in self.layers:
            x = x + layer(x)
        loss: Tensor = self.last(x).sin().square().mean()
        return loss


@dataclasses.dataclass
class Training:
    """A model and its optimizer."""

    model: nn.Module
    by: torch.optim.Optimizer

    def go_backward(self, number: int) -> None:
        """Go backward from the loss of a batch, of which each rank takes its share."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
        if isinstance(self.model, FSDPModule):
            batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
        self.model(batch).backward()

    def step(self) -> None:
        """Step, and drop the gradients."""
        self.by.step()
        self.by.zero_grad()

    def train(self, *numbers: int) -> None:
        """Take a step for each batch."""
        for number in numbers:
            self.go_backward(number)
            self.step()


def sharded(life: Life, place: int, seed: int, *, on_meta: bool = False) -> Training:
    """Make a sharded training, as it is before the save (0) or after the load (1)."""
    torch.manual_seed(seed)
    with torch.device("meta" if on_meta else "cpu"):
        model = Model(life.widths).double()
    mesh = make_mesh(life.meshes[place])
    for layer in model.layers if life.by_layers[place] else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Training(model, OPTIMIZERS[life.optimizer](model.parameters()))


# --- ways to save and to load ---------------------------------------------------------------------


def file_of_rank(path: str) -> str:
    return f"{path}_rank-{dist.get_rank():08d}-of-{dist.get_world_size():08d}.pth"


def write_by_first(path: str, states: object) -> None:
    if dist.get_rank() == 0:
        torch.save(states, path)
    dist.barrier()


def full_states(it: Training, functions: typing.Any) -> typing.Any:
    options = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return functions.get_state_dict(it.model, it.by, options=options)


def set_both(it: Training, states: typing.Any, functions: typing.Any, **options: bool) -> None:
    functions.set_state_dict(
        *(it.model, it.by),
        **dict(zip(("model_state_dict", "optim_state_dict"), states, strict=True)),
        options=checkpoint.StateDictOptions(**options),
    )


def set_from_first(path: str, it: Training, functions: typing.Any) -> None:
    states = ({}, {}) if dist.get_rank() else torch.load(path)
    set_both(it, states, functions, full_state_dict=True, broadcast_from_rank0=True)


def load_by_torch(path: str, it: Training) -> None:
    states = dict(zip("ab", of_torch.get_state_dict(it.model, it.by), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_both(it, states.values(), of_torch)


def set_consolidated(path: str, it: Training) -> None:
    if dist.get_rank() == 0:
        checkpoint.consolidate(path, f"{path}.pt", optimizer=True)
    dist.barrier()
    set_both(it, torch.load(f"{path}.pt").values(), checkpoint)


def set_own(it: Training, states: typing.Any) -> None:
    it.model.load_state_dict(states[0])
    it.by.load_state_dict(states[1])


def save(path: str, it: Training) -> None:
    checkpoint.save(path, it.model, it.by)


def save_pieces(path: str, it: Training) -> None:
    torch.save(checkpoint.local_state_dict(it.model, it.by), file_of_rank(path))
    dist.barrier()


def own_states(it: Training) -> list[typing.Any]:
    return [it.model.state_dict(), it.by.state_dict()]


Act = typing.Callable[[str, Training], object]
WAYS: dict[str, tuple[Act, Act]] = {
    "checkpoint": (save, lambda path, it: checkpoint.load(path, it.model, it.by)),
    "in the background": (
        lambda path, it: checkpoint.async_save(path, it.model, it.by),
        lambda path, it: checkpoint.load(path, it.model, it.by),
    ),
    "consolidated": (save, set_consolidated),
    "torch's own": (
        lambda path, it: dcp.save(
            dict(zip("ab", of_torch.get_state_dict(it.model, it.by), strict=True)),
            checkpoint_id=path,
        ),
        load_by_torch,
    ),
    "torch, from the first": (
        lambda path, it: write_by_first(path, full_states(it, of_torch)),
        lambda path, it: set_from_first(path, it, of_torch),
    ),
    "from the first": (
        lambda path, it: write_by_first(path, full_states(it, checkpoint)),
        lambda path, it: set_from_first(path, it, checkpoint),
    ),
    "as of a plain model": (
        lambda path, it: write_by_first(path, whole(own_states(it))),
        lambda path, it: set_own(it, torch.load(path)),
    ),
    "pieces": (
        save_pieces,
        lambda path, it: checkpoint.load_local_state_dict(
            it.model, torch.load(file_of_rank(path)), it.by
        ),
    ),
    "joined pieces": (save_pieces, set_consolidated),
    "pickles": (
        lambda path, it: torch.save(own_states(it), file_of_rank(path)),
        lambda path, it: set_own(it, torch.load(file_of_rank(path), weights_only=False)),
    ),
}
ALIKE = {"pieces"}
FROM_META = {"checkpoint", "in the background", "consolidated", "from the first", "pieces"}


# --- a life ---------------------------------------------------------------------------------------


def worst_difference(number: int, folder: str) -> float:
    """Return by how much a parameter differs from plain training's, after each part of a life."""
    life, path, found = drawn(number), f"{folder}/{number}", []
    save_to, load_from = WAYS[life.way]
    torch.manual_seed(number)
    plain_model = Model(life.widths).double()
    plain = Training(plain_model, OPTIMIZERS[life.optimizer](plain_model.parameters()))
    mine = sharded(life, 0, number)

    def compare(it: Training) -> None:
        ours, theirs = full_parameters(it.model), full_parameters(plain.model)
        found.extend((ours[name] - theirs[name]).abs().max().item() for name in theirs)
        assert it.model.calls == plain.model.calls
        assert torch.equal(it.model.notes, plain.model.notes)

    for it in (plain, mine):
        it.train(0, 1)
        it.go_backward(2)
        if not life.is_early:
            it.step()
    saved = copy.deepcopy(plain)
    saving = save_to(path, mine)
    if life.is_early:
        mine.step()
        plain.step()
        compare(mine)
    if life.goes_back:
        mine.train(3)
    if isinstance(saving, checkpoint.SaveHandle):
        saving.result()
    dist.barrier()
    other = sharded(life, 1, number + 1, on_meta=life.on_meta)
    if not life.on_meta:
        other.train(*range(life.steps_before_load))
    for it in (other, mine) if life.goes_back else (other,):
        load_from(path, it)
        plain = copy.deepcopy(saved)
        plain.by.zero_grad()
        it.by.zero_grad()
        compare(it)
        for step in (4, 5):
            it.train(step)
            plain.train(step)
            compare(it)
    return max(found)


def worst_differences(numbers: Iterable[int], folder: str) -> dict[int, float]:
    """Return the difference of each life, by its number."""
    found = {}
    for number in numbers:
        try:
            found[number] = worst_difference(number, folder)
        except BaseException as error:
            error.add_note(f"in {drawn(number)}, number {number}")
            raise
    return found
