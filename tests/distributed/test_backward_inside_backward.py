"""User code that calls backward inside of a backward, once for each part of a batch."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import full_grads
from shardkit import fully_shard
from workers import Spawn, on_ranks

NUM_TILES = 3


class _Tiled(torch.autograd.Function):
    """Runs a module on parts of its input, so that activations of one part are alive at a time."""

    @staticmethod
    def forward(ctx: typing.Any, module: nn.Module, x: Tensor, sums: bool, *_: Tensor) -> Tensor:
        ctx.module, ctx.sums = module, sums
        ctx.params = [*module.parameters()]
        ctx.save_for_backward(x)
        return torch.cat([module(tile) for tile in x.chunk(NUM_TILES)])

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> typing.Any:
        (x,), of_tiles = ctx.saved_tensors, []
        totals = [torch.zeros_like(param) for param in ctx.params]
        for index, part in enumerate(grad.chunk(NUM_TILES)):
            tile = x.chunk(NUM_TILES)[index].detach().requires_grad_()
            is_last = index == NUM_TILES - 1
            handles = [
                param.register_hook(_sum_up(param, total, is_last=is_last))
                for param, total in zip(ctx.params, totals, strict=True)
                if ctx.sums
            ]
            with torch.enable_grad():
                out = ctx.module(tile)
            torch.autograd.backward(out, part)
            for handle in handles:
                handle.remove()
            of_tiles.append(tile.grad)
        return None, torch.cat(of_tiles), None, *[None] * len(ctx.params)


def _sum_up(param: Tensor, total: Tensor, *, is_last: bool) -> typing.Any:
    """Return a hook that adds the gradients of tiles, and gives the sum to the last one alone."""

    def hook(grad: Tensor) -> Tensor | None:
        total.add_(grad)
        if not is_last:
            return None
        param.grad = None  # What autograd has added up for the other tiles.
        return total

    return hook


class Block(nn.Module):
    """A layer that also has a parameter outside of what is tiled; of over 1 MiB if it is wide."""

    def __init__(self, width: int, sums: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 6))
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        params = self.mlp.parameters()
        tiled: Tensor = _Tiled.apply(self.mlp, x, self.sums, *params)  # type: ignore[no-untyped-call]
        return x + tiled


def tiles_beside_plain(width: int, layers: bool, sums: bool, num_backwards: int) -> float:
    """Return by how much a gradient differs from the mean of plain ones over the ranks."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), Block(width, sums), Block(width, sums)).double()
    model = copy.deepcopy(plain)
    if layers:
        for layer in model[1:]:
            fully_shard(layer)
    fully_shard(model)
    num_ranks = dist.get_world_size()
    for _ in range(num_backwards):
        batches = torch.randn(num_ranks, 7, 6, dtype=torch.float64)
        model(batches[dist.get_rank()]).square().mean().backward()
        for batch in batches:
            # The hooks drop what is in `.grad`, so each rank's gradients need a model of their own.
            alone = copy.deepcopy(plain)
            alone.zero_grad()
            (alone(batch).square().mean() / num_ranks).backward()
            for param, other in zip(plain.parameters(), alone.parameters(), strict=True):
                assert other.grad is not None
                param.grad = other.grad if param.grad is None else param.grad + other.grad
    found, expected = full_grads(model), full_grads(plain)
    differences = [(found[name] - grad).abs().max().item() for name, grad in expected.items()]
    return max(differences)


@pytest.mark.parametrize("sums", [False, True], ids=["added", "summed by hooks"])
@pytest.mark.parametrize("layers", [False, True], ids=["root", "layers"])
@pytest.mark.parametrize("width", [6, 40_000])
def test_tiles_of_a_batch(spawn: Spawn, width: int, layers: bool, sums: bool) -> None:
    """Gradients of tiles stay in `.grad` until all have come, so code may sum and drop them."""
    for found in spawn(tiles_beside_plain, 2, width, layers, sums, 2):
        assert found < 1e-12


def test_tiles_of_a_batch_on_one_rank(spawn: Spawn) -> None:
    [found] = spawn(tiles_beside_plain, 1, 6, True, True, 2)
    assert found < 1e-12


@on_ranks(2)
def test_a_model_that_a_hook_calls_has_its_present_values() -> None:
    """Those of its last evaluation are still unsharded, because it is a root."""
    student = fully_shard(nn.Linear(6, 6))
    teacher = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plain = copy.deepcopy(teacher)
    for module in (teacher[0], teacher):
        fully_shard(module)
    x, found = torch.randn(4, 6), []

    @torch.no_grad()
    def note(_: Tensor) -> None:
        found.append(teacher(x))

    for factor in (2, 3):
        with torch.no_grad():
            teacher(x)
            for param in (*teacher.parameters(), *plain.parameters()):
                param.mul_(factor)
        out = student(x)
        out.register_hook(note)
        out.sum().backward()
        torch.testing.assert_close(found.pop(), plain(x))


class Encoder(nn.Module):
    """A model that uses one of its parameters on some parts of a batch only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.mlp = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1, 6))
        self.uses_scale = True

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.mlp(self.table(tokens))
        return found * self.scale if self.uses_scale else found


def backward_by_parts(model: nn.Module, tokens: Tensor, uses: typing.Sequence[bool]) -> None:
    """Do as GradCache: a hook in the loss's backward runs the model with one part after another."""
    parts, encoder = tokens.chunk(len(uses)), typing.cast("Encoder", model)

    def encoded(index: int) -> Tensor:
        encoder.uses_scale = uses[index]
        result: Tensor = model(parts[index])
        return result

    with torch.no_grad():
        found = [encoded(index) for index in range(len(uses))]
    leaves = [each.requires_grad_() for each in found]
    everything = torch.cat(leaves)
    loss = (everything @ everything.T).logsumexp(1).mean()
    loss.backward()  # type: ignore[no-untyped-call]

    def go_on(_: Tensor) -> None:
        with torch.enable_grad():
            for index, leaf in enumerate(leaves):
                assert leaf.grad is not None
                (encoded(index) * leaf.grad).sum().backward()

    start = loss.detach().requires_grad_()
    start.register_hook(go_on)
    start.backward()  # type: ignore[no-untyped-call]


USES = {
    "by all parts": ([True] * 3, [True] * 3),
    "by no part": ([False] * 3, [False] * 3),
    "by the last part": ([False, False, True], [False, False, True]),
    "by the first part": ([True, False, False], [True, False, False]),
    "by other parts on each rank": ([False, True, False], [True, False, True]),
    "by one rank": ([False] * 3, [True] * 3),
}


def parts_beside_plain(width: int, layers: bool, uses: tuple[list[bool], list[bool]]) -> float:
    torch.manual_seed(0)
    plain = Encoder(width).double()
    model = copy.deepcopy(plain)
    if layers:
        fully_shard(model.mlp)
    fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (plain, model)]
    for _ in range(2):
        batches = torch.randint(10, (2, 6))
        backward_by_parts(model, batches[dist.get_rank()], uses[dist.get_rank()])
        for batch, used in zip(batches, uses, strict=True):
            backward_by_parts(plain, batch, used)
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {name: param.full_tensor() for name, param in model.named_parameters()}
    return max((found[name] - p).abs().max().item() for name, p in plain.named_parameters())


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("layers", [False, True], ids=["root", "layers"])
@pytest.mark.parametrize("width", [6, 40_000])
def test_a_hook_runs_the_model_with_one_part_after_another(
    spawn: Spawn, width: int, layers: bool, uses: str
) -> None:
    """A parameter that one part does not use may get its gradient in another part's backward."""
    for found in spawn(parts_beside_plain, 2, width, layers, USES[uses]):
        assert found < 1e-12


def backwards_inside_one_another(at: int) -> float:
    """Let a hook on a layer's output, in one forward's backward, call that of another forward."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    model = copy.deepcopy(plain)
    fully_shard(model)
    batches = torch.randn(dist.get_world_size(), 2, 4, 6, dtype=torch.float64)

    def backward(module: nn.Module, one: Tensor, other: Tensor) -> None:
        inner = module(other).square().sum()
        hook = module.get_submodule(str(at)).register_forward_hook(
            lambda _module, _inputs, output: (
                output.register_hook(lambda _: inner.backward()) and None
            )
        )
        outer = module(one).square().sum()
        hook.remove()
        outer.backward()

    backward(model, *batches[dist.get_rank()])
    for batch in batches:
        backward(plain, *batch)
    found, expected = full_grads(model), full_grads(plain)
    share = dist.get_world_size()
    return max((found[name] - g / share).abs().max().item() for name, g in expected.items())


@pytest.mark.parametrize("at", range(4))
def test_a_hook_calls_backward_of_another_forward(spawn: Spawn, at: int) -> None:
    for found in spawn(backwards_inside_one_another, 2, at):
        assert found < 1e-12


def trains_another_model_inside(is_inside_layer: bool) -> float:
    """In a hook of a model's backward train another one; return how far it is from a plain one."""
    torch.manual_seed(0)
    plain: typing.Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()
    critic, actor = copy.deepcopy(plain), copy.deepcopy(plain)
    for model in (critic, actor):
        fully_shard(model[0])
        fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, critic)]
    batches = torch.randn(3, dist.get_world_size(), 4, 6, dtype=torch.float64)
    norms: list[float] = []

    def train_critic(x: Tensor) -> None:
        optimizers[1].zero_grad()
        with torch.enable_grad():
            critic(x).square().mean().backward()
        norms.append(float(nn.utils.get_total_norm(p.grad for p in critic.parameters())))
        optimizers[1].step()

    for parts in batches:
        x = parts[dist.get_rank()]
        hook = actor.get_submodule("1" if is_inside_layer else "").register_forward_hook(
            lambda _module, _inputs, output, x=x: (
                output.register_hook(lambda _: train_critic(x)) and None
            )
        )
        loss = actor(x).square().mean()
        hook.remove()
        loss.backward()
        optimizers[0].zero_grad()
        plain(parts.flatten(0, 1)).square().mean().backward()
        norms[-1] -= float(nn.utils.get_total_norm(p.grad for p in plain.parameters()))
        optimizers[0].step()
    found = {name: param.full_tensor() for name, param in critic.named_parameters()}
    away = [(found[name] - p).abs().max().item() for name, p in plain.named_parameters()]
    return max(*away, *map(abs, norms))


@pytest.mark.parametrize("is_inside_layer", [False, True], ids=["root", "layer"])
def test_a_hook_trains_another_model(spawn: Spawn, is_inside_layer: bool) -> None:
    """Its gradients are there when its own backward returns."""
    for found in spawn(trains_another_model_inside, 2, is_inside_layer):
        assert found < 1e-12
