"""A sharded model and its plain twin: what a user may do to both, one action after another.

A new action is a method with `@action`: it does one thing to both, and says by its return value
nothing. Its arguments are numbers from 0 to 9, which every rank gets alike. After each action
`compare` looks at everything.
"""

from __future__ import annotations

import copy
import pathlib
import shutil
import tempfile
import typing
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit import checkpoint, fully_shard, init_device_mesh

WIDTH, DEPTH, ROWS = 6, 3, 4
TOLERANCE: dict[str, typing.Any] = {"rtol": 1e-9, "atol": 1e-11}  # fp64; sums in another order.
ACTIONS: dict[str, int] = {}
"""Names of actions, and how many numbers each takes."""


def action(method: typing.Callable[..., None]) -> typing.Callable[..., None]:
    code = method.__code__
    ACTIONS[method.__name__] = code.co_argcount - 1
    return method


class Net(nn.Module):
    """Blocks of which a forward may use the first few; any of them may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, depth: int = DEPTH, raise_at: int = DEPTH) -> Tensor:
        for i, block in enumerate(self.blocks[:depth]):
            if i == raise_at:
                msg = "a mistake in the forward"
                raise ArithmeticError(msg)
            x = torch.tanh(block(x)) + x
        if self.training:
            self.seen += 1
        return x * self.scale


class Twins:
    """Both models, and their optimizers.

    Args:
        shape: Of the mesh.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        names = ("replicate", "shard")[-len(shape) :]
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        self.plain = Net().double()
        self.sharded = self.shard(copy.deepcopy(self.plain))
        self.make = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
        self.optimizers = [self.make(net.parameters()) for net in (self.plain, self.sharded)]
        self.objects = [*self.sharded.parameters()]
        self.num_batches = 0

    def shard(self, model: nn.Module) -> typing.Any:
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    @property
    def both(self) -> tuple[Net, typing.Any]:
        return self.plain, self.sharded

    def replace(self, model: typing.Any) -> None:
        """Go on with another sharded model of the same values, and with the optimizer's state."""
        optimizer = self.make(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(self.optimizers[1].state_dict()))
        for ours, theirs in zip(model.parameters(), self.sharded.parameters(), strict=True):
            if ours.grad is None and theirs.grad is not None:
                ours.grad = theirs.grad.clone()
        self.sharded, self.optimizers[1] = model, optimizer
        self.objects = [*model.parameters()]

    def losses(self, depth: int = DEPTH) -> tuple[Tensor, Tensor]:
        """Return the plain loss over the batches of all ranks, and the sharded one of this rank."""
        self.num_batches += 1
        generator = torch.Generator().manual_seed(self.num_batches)
        batches = torch.randn(
            self.mesh.size(), ROWS, WIDTH, generator=generator, dtype=torch.float64
        )
        plain = self.plain(batches.flatten(0, 1), depth).square().mean()
        return plain, self.sharded(batches[self.mesh.get_rank()], depth).square().mean()

    # --- actions ----------------------------------------------------------------------------------

    @action
    def step(self, num: int) -> None:
        """Train a step of one to three micro-batches."""
        num = num % 3 + 1
        for i in range(num):
            self.sharded.set_requires_gradient_sync(i == num - 1)
            for loss in self.losses():
                if loss.requires_grad:
                    (loss / num).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @action
    def backward(self, depth: int) -> None:
        """Add gradients, of the first blocks only."""
        for loss in self.losses(depth % DEPTH + 1):
            if loss.requires_grad:
                loss.backward()

    @action
    def step_by_what_is_there(self) -> None:
        if all(param.grad is None for param in self.plain.parameters()):
            return  # That is told, where another model has gradients.
        for optimizer in self.optimizers:
            optimizer.step()

    @action
    def zero_grad(self, to_none: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none % 2 == 0)

    @action
    def clip(self) -> None:
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.5) for net in self.both]
        torch.testing.assert_close(norms[1].double(), norms[0].double(), **TOLERANCE)

    @action
    def evaluate(self) -> None:
        """Run without gradients, in turns in both modes of modules."""
        for net in self.both:
            net.eval()
        with torch.no_grad():
            plain, sharded = self.losses()
        total = sharded.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / self.mesh.size(), plain, **TOLERANCE)
        for net in self.both:
            net.train()

    @action
    def freeze(self, which: int) -> None:
        """Freeze a block, or train it again."""
        for net in self.both:
            block = net.blocks[which % DEPTH]
            block.requires_grad_(not block.weight.requires_grad)

    @action
    def write(self, which: int) -> None:
        """Write a parameter in place."""
        with torch.no_grad():
            for net in self.both:
                param = [*net.parameters()][which % (2 * DEPTH + 1)]
                param.mul_(0.9).add_(0.01)

    @action
    def unshard(self, block: int) -> None:
        """Look at whole parameters, and change one by the context for it."""
        module = self.sharded.blocks[block % DEPTH]
        module.unshard()
        torch.testing.assert_close(
            module.weight.detach().clone(), self.plain.blocks[block % DEPTH].weight.detach()
        )
        module.reshard()

    @action
    def raise_in_forward(self, block: int) -> None:
        for net in self.both:
            try:
                net(torch.zeros(ROWS, WIDTH, dtype=torch.float64), raise_at=block % DEPTH)
            except ArithmeticError:
                continue
            msg = "the forward did not raise"
            raise AssertionError(msg)

    @action
    def load_state_dict(self, factor: int) -> None:
        for net in self.both:
            state = net.state_dict()
            net.load_state_dict({name: value * (1 - factor / 50) for name, value in state.items()})

    @action
    def deepcopy(self) -> None:
        self.replace(copy.deepcopy(self.sharded))

    @action
    def checkpoint(self) -> None:
        """Save, and go on with an object that has loaded it."""
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        path = pathlib.Path(folder[0], "x")
        checkpoint.save(path, self.sharded, self.optimizers[1])
        model = Net().double()
        for block, old in zip(model.blocks, self.plain.blocks, strict=True):
            block.requires_grad_(old.weight.requires_grad)
        model = self.shard_freshly(model)
        optimizer = self.make(model.parameters())
        checkpoint.load(path, model, optimizer)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
        self.replace(model)
        self.optimizers[1] = optimizer

    def shard_freshly(self, model: nn.Module) -> typing.Any:
        """Shard values that are other ones on no rank."""
        for param in model.parameters():
            nn.init.zeros_(param)
        return self.shard(model)

    @action
    def new_optimizer(self, kind: int) -> None:
        """Exchange both optimizers for ones of another class."""
        if kind % 2:
            self.make = lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-3)
        else:
            self.make = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)
        self.optimizers = [self.make(net.parameters()) for net in self.both]

    # --- comparison -------------------------------------------------------------------------------

    def compare(self) -> None:
        """Compare values, gradients, identities and memory."""
        ours, theirs = ([*net.named_parameters()] for net in (self.sharded, self.plain))
        for (name, mine), (_, other) in zip(ours, theirs, strict=True):
            whole = mine.detach().full_tensor()
            torch.testing.assert_close(whole, other.detach(), **TOLERANCE, msg=name)
            assert mine.requires_grad == other.requires_grad, name
            assert (mine.grad is None) == (other.grad is None), f"{name}: a gradient, or none"
            if other.grad is not None:
                grad = mine.grad.full_tensor()
                torch.testing.assert_close(grad, other.grad, **TOLERANCE, msg=f"{name}.grad")
        pairs = zip(self.objects, (param for _, param in ours), strict=True)
        assert all(before is now for before, now in pairs), "parameters are other objects"
        assert torch.equal(self.sharded.seen, self.plain.seen)
        stats = self.sharded.memory_stats()
        assert stats["unsynced_grad_nbytes"] == 0
        # The root's own group stays after a forward without a backward.
        assert stats["unsharded_nbytes"] < WIDTH * WIDTH * 8, "memory of a block is not freed"


def perform(shape: tuple[int, ...], actions: list[tuple[str, list[int]]]) -> None:
    """Run actions, and compare after each; what one warns about is an error."""
    twins = Twins(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, (name, numbers) in enumerate(actions):
            try:
                getattr(twins, name)(*numbers)
                twins.compare()
            except BaseException as error:
                error.add_note(f"in action {i + 1} of {len(actions)}: {name}{tuple(numbers)}")
                raise
