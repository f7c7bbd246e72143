"""A small sharded model beside a plain one, both trained on the simulated accelerator."""

from __future__ import annotations

import contextlib
import copy
import gc
import typing

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from reference import make_mesh
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulated_device import Simulation
    from watching import Watch


FP32_TOLERANCE = 1e-5  # Of parameters of about 1, after sums in another order.
BF16_TOLERANCE = 5e-2  # A step of 0.1 along gradients below 1 that are rounded to 2**-8.
WIDTH = 7  # Not a multiple of 4: there are gaps between parameters.


class Block(nn.Module):
    """Two layers; the second may go without its bias."""

    uses_bias = True
    is_skipped = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and what the layers make of it."""
        bias = self.outer.bias if self.uses_bias else None
        return x + F.linear(torch.tanh(self.inner(x)), self.outer.weight, bias)


class Model(nn.Module):
    """Blocks, which are groups of their own, and a head, which is the root's."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number per row."""
        for block in self.blocks:
            x = x if block.is_skipped else block(x)
        return self.head(x * self.scale.to(x.dtype))


class Training:
    """A sharded model and a plain one that should stay equal.

    Args:
        run: The simulation and what watches it.
        shape: Of the mesh.
        tolerance: Of parameters.
        change: Changes the plain model before it is sharded.
        shard: Shards a model, by default each block and then the root.
        options: Of `fully_shard`.
    """

    def __init__(
        self,
        run: tuple[Simulation, Watch],
        *,
        shape: tuple[int, ...] = (2,),
        tolerance: float = FP32_TOLERANCE,
        change: Callable[[Model], object] = lambda _: None,
        shard: Callable[..., object] | None = None,
        **options: typing.Any,
    ) -> None:
        self.simulation, self.watch = run
        self.tolerance = tolerance
        self.complaints: list[str] = []
        self.peaks: list[int] = []
        self.plain = Model()
        change(self.plain)
        self.model: typing.Any = copy.deepcopy(self.plain)
        self.mesh = make_mesh(shape)
        shard = shard or shard_each
        shard(self.model, self.mesh, **options)
        self.optimizers = [
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1, momentum=0.9)
            for each in (self.model, self.plain)
        ]

    def batch(self, index: int, rank: int | None = None) -> Tensor:
        """Return a rank's batch, this one's by default."""
        rank = dist.get_rank() if rank is None else rank
        generator = torch.Generator().manual_seed(100 * index + rank)
        return torch.randn(6, WIDTH, generator=generator)

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the mean square of a model's error."""
        return (model(x).float() - x.sum(1, keepdim=True)).square().mean()

    def backward_plain(self, index: int, parts: int = 1) -> None:
        """Add the gradients of all ranks' batches."""
        batches = [self.batch(index, rank) for rank in range(dist.get_world_size())]
        (self.loss(self.plain, torch.cat(batches)) / parts).backward()

    def backward(self, index: int, parts: int = 1) -> None:
        """Add this rank's gradients of the sharded model."""
        (self.loss(self.model, self.batch(index)) / parts).backward()

    def step(self, optimizer: int = 0) -> None:
        """Take a step of the sharded model's optimizer, or of the plain one's."""
        self.optimizers[optimizer].step()
        self.optimizers[optimizer].zero_grad()

    def backward_both(self, index: int, parts: int = 1) -> None:
        """Forward and backward of a batch, sharded and plain."""
        self.backward(index, parts)
        self.backward_plain(index, parts)

    def update_both(self) -> None:
        """Let both optimizers step, and empty the gradients."""
        self.step()
        self.step(1)

    def step_both(self, index: int) -> None:
        """One step of both: a batch, and the optimizers."""
        self.backward_both(index)
        self.update_both()

    @contextlib.contextmanager
    def counted(self, step: int) -> Iterator[None]:
        """Note what the sharded model does as one step."""
        gc.collect()
        self.simulation.step = step
        before = self.simulation.peak_nbytes = self.simulation.nbytes
        yield
        self.peaks.append(self.simulation.peak_nbytes - before)

    def compare(self) -> None:
        """Complain about parameters that differ."""
        for (name, param), expected in zip(
            self.model.named_parameters(), self.plain.parameters(), strict=True
        ):
            # By numpy: both are here by now, one on the host, maybe, and one on the device.
            found, wanted = (t.detach().numpy() for t in (param.full_tensor(), expected))
            difference = np.abs(found - wanted).max().item()
            if not difference <= self.tolerance:  # NaN is not.
                self.complaints.append(f"parameter {name!r} differs by {difference:.3g}")

    def complain_of_memory(self) -> None:
        """Complain about peaks that change after the third step."""
        if len(set(self.peaks[2:])) > 1:
            self.complaints.append(f"peaks of memory change: {self.peaks}")

    def complain_of_slots(self) -> None:
        """Complain about memory that is kept between steps, where the optimizer wants it."""
        slots = self.model._shardkit_state.runtime.slots
        if slots.free:
            self.complaints.append(f"{len(slots.free)} slots stay between steps")

    def complain_of_syncs(self, *, allowed: int = 0) -> None:
        """Complain about waits of the host after the third step."""
        steady = [s for s in self.simulation.syncs if s.step > 2 and s.of_step >= s.step - allowed]
        for sync in steady:
            self.complaints.append(f"the host waits in step {sync.step}: {sync.what}")


def shard_each(model: Model, mesh: typing.Any, **options: typing.Any) -> None:
    """Shard each block and then the root."""
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)


def train(training: Training, steps: int = 5) -> Training:
    """Train for some steps, each with one backward; look at memory and waits of the host."""
    for step in range(1, steps + 1):
        with training.counted(step):
            training.backward(step)
            training.step()
        training.simulation.step = 0
        training.backward_plain(step)
        training.step(1)
    training.complain_of_memory()
    training.complain_of_syncs()
    training.complain_of_slots()
    training.compare()
    return training


Run = tuple["Simulation", "Watch"]
