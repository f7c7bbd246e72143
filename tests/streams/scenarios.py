"""Small trainings on the simulated accelerator that use every wait of the backend.

Each trains a sharded model beside a plain one, on the batches of all ranks, and returns complaints:
what was not ordered, numbers that differ, waits of the host, memory that grows.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import typing

import numpy as np
import torch
import torch.distributed as dist
from simulation import simulation
from torch import Tensor, nn
from torch.nn import functional as F

from reference import make_mesh
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

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
        if slots._free:
            self.complaints.append(f"{len(slots._free)} slots stay between steps")

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


# --- the scenarios --------------------------------------------------------------------------------

Run = tuple["Simulation", "Watch"]


def zero3(run: Run) -> Training:
    """Parameters are gathered for each forward and backward."""
    return train(Training(run))


def zero2(run: Run) -> Training:
    """Parameters stay from forward to backward."""
    return train(Training(run, reshard_after_forward=False))


def mixed_precision(run: Run) -> Training:
    """Compute in bf16, reduction in fp32: send buffers are larger than parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(Training(run, tolerance=BF16_TOLERANCE, mp_policy=policy))


def kept_slots(run: Run) -> Training:
    """The same without resharding: compute takes slots that reductions have left."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(
        Training(run, tolerance=BF16_TOLERANCE, mp_policy=policy, reshard_after_forward=False)
    )


def bf16_reduction(run: Run) -> Training:
    """Reduction in bf16, whose results are cast."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return train(Training(run, tolerance=BF16_TOLERANCE, mp_policy=policy))


def fp16(run: Run) -> Training:
    """Reduction in fp16: half of the division comes before the sum."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    return train(Training(run, tolerance=BF16_TOLERANCE, mp_policy=policy))


def hybrid(run: Run) -> Training:
    """Sums over the shard axis go on to the replicate axis, on the next stream."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return train(Training(run, shape=(2, 1), tolerance=BF16_TOLERANCE, mp_policy=policy))


def hybrid_of_four(run: Run) -> Training:
    """Both axes have two ranks."""
    return train(Training(run, shape=(2, 2)))


def replicas_of_one(run: Run) -> Training:
    """A replicate axis of one rank."""
    return train(Training(run, shape=(1, 2)))


def lora(run: Run) -> Training:
    """Frozen parameters beside trainable ones: two buckets per group."""

    def freeze(model: Model) -> None:
        for block in model.blocks:
            block.inner.requires_grad_(False)

    return train(Training(run, change=freeze))


def kept_parts(run: Run) -> Training:
    """Between forward and backward each rank keeps a half; of four ranks."""

    def shard(model: Model, mesh: typing.Any) -> None:
        for block in model.blocks:
            fully_shard(block, mesh, reshard_after_forward=2)
        fully_shard(model, mesh)

    training = Training(run, shape=(4,), shard=shard)
    for step in range(1, 4):
        for block in training.model.blocks:
            block.unshard()
        for block in training.model.blocks:
            block.reshard()  # More slots than are needed: the next ones are older than the parts.
        training.backward(step)
        training.backward_plain(step)
        training.step()
        training.step(1)
    training.compare()
    return training


def accumulation(run: Run) -> Training:
    """Three micro-batches: one not synced, one not the last, one that ends the step."""
    training = Training(run)
    for step in range(1, 5):
        for part in range(3):
            training.model.set_requires_gradient_sync(part > 0)
            training.model.set_is_last_backward(part == 2)
            training.backward(3 * step + part, parts=3)
            training.backward_plain(3 * step + part, parts=3)
        training.step()
        training.step(1)
    training.compare()
    return training


def overlapping_backwards(run: Run) -> Training:
    """Micro-batches that are all reduced, while the next one computes."""
    training = Training(run, tolerance=FP32_TOLERANCE)
    for step in range(1, 4):
        for part in range(3):
            training.model.set_is_last_backward(part == 2)
            training.backward(3 * step + part, parts=3)
            training.backward_plain(3 * step + part, parts=3)
        training.step()
        training.step(1)
    training.compare()
    return training


def partial_sums(run: Run) -> Training:
    """The all-reduce waits for the last micro-batch; sums over the shard axis are kept."""
    training = Training(run, shape=(2, 1))
    for step in range(1, 4):
        for part in range(3):
            training.model.set_requires_all_reduce(part == 2)
            training.backward(3 * step + part, parts=3)
            training.backward_plain(3 * step + part, parts=3)
        training.step()
        training.step(1)
    training.compare()
    return training


def offload(run: Run) -> Training:
    """Shards, gradients and the optimizer's step on the host."""
    training = Training(run, offload_policy=CPUOffloadPolicy())
    return _train_offloaded(training)


def unpinned_offload(run: Run) -> Training:
    """The same in memory that is not page-locked."""
    return _train_offloaded(Training(run, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def partial_offload(run: Run) -> Training:
    """Only the blocks are offloaded."""

    def shard(model: Model, mesh: typing.Any) -> None:
        for block in model.blocks:
            fully_shard(block, mesh, offload_policy=CPUOffloadPolicy())
        fully_shard(model, mesh)

    return _train_offloaded(Training(run, shard=shard))


def offload_without_sync(run: Run) -> Training:
    """Right after a backward that is not synced the host writes parameters."""
    training = Training(run, offload_policy=CPUOffloadPolicy())
    for step in range(1, 4):
        for part in range(2):
            training.model.set_requires_gradient_sync(part > 0)
            training.backward(2 * step + part, parts=2)
            training.backward_plain(2 * step + part, parts=2)
            with torch.no_grad():
                for param in (*training.model.parameters(), *training.plain.parameters()):
                    param.mul_(1.25 - 0.5 * part)
        training.step()
        training.step(1)
    training.compare()
    return training


def offload_interrupted(run: Run) -> Training:
    """Right after a forward that raised the host writes parameters."""
    training = Training(run, offload_policy=CPUOffloadPolicy())
    for step in range(1, 4):
        handle = training.model.blocks[2].register_forward_pre_hook(_interrupt)
        with contextlib.suppress(ValueError):
            training.model(training.batch(step))
        handle.remove()
        with torch.no_grad():
            for param in (*training.model.parameters(), *training.plain.parameters()):
                param.mul_(1.25 if step % 2 else 0.75)
        training.backward(step)
        training.backward_plain(step)
        training.step()
        training.step(1)
    training.compare()
    return training


def _train_offloaded(training: Training) -> Training:
    """Train; between steps the host writes parameters right after a forward."""
    for step in range(1, 4):
        training.backward(step)
        training.backward_plain(step)
        training.step()
        training.step(1)
        with torch.no_grad():
            training.model(training.batch(step))
            for param in training.model.parameters():
                param.mul_(0.5)
            for param in training.plain.parameters():
                param.mul_(0.5)
        training.model.unshard()
        training.model.reshard()
        with torch.no_grad():
            for param in (*training.model.parameters(), *training.plain.parameters()):
                param.mul_(1.5)
    training.compare()
    return training


class CopyingComm:
    """A user's collectives, in buffers of their own."""

    def allocate(self, size: typing.Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(CopyingComm):
    """An all-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: typing.Any, **_: object
    ) -> typing.Any:
        """Gather."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)


class FailingGathers(Gathers):
    """An all-gather that raises when it is told to."""

    raises = False

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Gather, or raise."""
        if self.raises:
            message = "on purpose"
            raise ValueError(message)
        return super().__call__(*args, **kwargs)


class Scatters(CopyingComm):
    """A reduce-scatter."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: typing.Any,
        op: typing.Any,
        **_: object,
    ) -> typing.Any:
        """Reduce and scatter."""
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=True
        )


def custom_collectives(run: Run) -> Training:
    """The user's own collectives, which return while they are under way."""
    training = Training(run)
    training.model.set_custom_all_gather(Gathers())
    training.model.set_custom_reduce_scatter(Scatters())
    for block in training.model.blocks:
        block.set_custom_all_gather(Gathers())
        block.set_custom_reduce_scatter(Scatters())
    return train(training)


def hook_on_a_stream(run: Run) -> Training:
    """A user's hook doubles gradients on a stream of the user's, a factor halves them."""
    training = Training(run)
    stream = run[0].new_stream("the user's stream")
    for module in (training.model, *training.model.blocks):
        module.set_all_reduce_hook(lambda grad: grad.mul_(2.0), stream=stream)
        module.set_gradient_divide_factor(4.0)
    return train(training)


def separate_reductions(run: Run) -> Training:
    """Reductions on a communicator of their own."""
    training = Training(run)
    training.model.set_separate_reduce_scatter_group(True)
    return train(training)


def optimizer_event(run: Run) -> Training:
    """The optimizer runs on a stream of the user's, and an event tells when it is done."""
    training = Training(run)
    simulation = run[0]
    stream = simulation.new_stream("the optimizer's stream")
    for step in range(1, 4):
        training.backward(step)
        training.backward_plain(step)
        grads = [param.grad for param in training.model.parameters()]
        stream.wait_event(simulation.compute.record_event())
        with simulation.on(stream), torch.no_grad():
            for param, grad in zip(training.model.parameters(), grads, strict=True):
                param.to_local().add_(grad.to_local(), alpha=-0.1)
        event = stream.record_event()
        training.model.set_post_optim_event(event)
        with torch.no_grad():
            for param in training.plain.parameters():
                param.add_(param.grad, alpha=-0.1)
        with torch.no_grad():
            training.model(training.batch(step))  # Its gathers are after the event.
        simulation.compute.wait_event(event)
        for optimizer in training.optimizers:
            optimizer.zero_grad()
    training.compare()
    return training


def by_hand(run: Run) -> Training:
    """Parameters are unsharded by hand, written between steps, evaluated without gradients."""
    training = Training(run, reshard_after_forward=True)
    for step in range(1, 4):
        for block in training.model.blocks:
            block.unshard(async_op=True)
        training.backward(step)
        training.backward_plain(step)
        training.step()
        training.step(1)
        handle = training.model.blocks[1].unshard(async_op=True)
        handle.wait()
        whole = training.model.blocks[1].inner.weight.detach().clone()
        expected = training.plain.blocks[1].inner.weight
        if not (whole - expected).abs().max().item() <= training.tolerance:
            training.complaints.append("an unsharded parameter differs")
        training.model.blocks[1].reshard()
        for _ in range(2):  # Slots stay after such a forward, and are older than what follows.
            with torch.no_grad():
                training.model(training.batch(step))
                for param in (*training.model.parameters(), *training.plain.parameters()):
                    param.mul_(0.9)
        training.model.blocks[2].unshard()
        training.model.blocks[2].reshard()
    training.compare()
    return training


def clipping(run: Run) -> Training:
    """Norms and clipping between backward and step: no wait of the host."""
    training = Training(run)
    for step in range(1, 6):
        with training.counted(step):
            training.backward(step)
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
            training.step()
        training.simulation.step = 0
        training.backward_plain(step)
        nn.utils.clip_grad_norm_(training.plain.parameters(), 0.5)
        training.step(1)
    training.complain_of_memory()
    training.complain_of_syncs()
    training.compare()
    return training


def unused_parameters(run: Run) -> Training:
    """One bias that rank 0 does not use, and one that nobody uses, in every step."""
    training = Training(run)
    blocks = training.model.blocks, training.plain.blocks
    for some in blocks:
        some[1].uses_bias = False
    blocks[0][2].uses_bias = dist.get_rank() > 0
    num_ranks = dist.get_world_size()
    for step in range(1, 6):
        with training.counted(step):
            training.backward(step)
            training.step()
        training.simulation.step = 0
        for rank in range(num_ranks):
            blocks[1][2].uses_bias = rank > 0
            (training.loss(training.plain, training.batch(step, rank)) / num_ranks).backward()
        training.step(1)
    if run[0].has_host_engine:
        training.complain_of_syncs()
    training.compare()
    return training


def recovery(run: Run) -> Training:
    """A user's hook raises in the midst of a reduction; training goes on after it was caught."""
    return _recover(Training(run), None)


def _recover(training: Training, stream: typing.Any) -> Training:
    state = {"raises": False}

    def hook(grad: Tensor) -> None:
        grad.mul_(1.0)
        if state["raises"]:
            message = "on purpose"
            raise ValueError(message)

    for module in (training.model, *training.model.blocks):
        module.set_all_reduce_hook(hook, stream=stream)
    for step in range(1, 5):
        state["raises"] = step == 2
        try:
            training.backward(step)
        except ValueError:
            was_caught = True
        else:
            was_caught = False
        if was_caught:
            gc.collect()  # What the traceback held is free before anybody cleans up.
            torch.ones(WIDTH).add_(1)
            training.model.zero_grad()
            continue
        training.backward_plain(step)
        training.step()
        training.step(1)
    training.compare()
    return training


def recovery_on_a_stream(run: Run) -> Training:
    """The same with a hook on a stream of the user's."""
    stream = run[0].new_stream("the user's stream")
    return _recover(Training(run), stream)


def skipped(run: Run) -> Training:
    """All ranks go around the last block in every other step: it is gathered in vain."""
    training = Training(run)
    for step in range(1, 6):
        for each in (training.model, training.plain):
            each.blocks[3].is_skipped = step % 2 == 0
        training.backward(step)
        training.backward_plain(step)
        training.step()
        training.step(1)
    training.compare()
    return training


def dropped(run: Run) -> Training:
    """A model is dropped while its reductions are under way."""
    training = Training(run)
    other = Training(run)
    for step in range(1, 4):
        training.model.set_is_last_backward(False)
        training.backward(step)
        del training.model, training.optimizers
        gc.collect()
        training = Training(run)
        other.backward(step)
        other.backward_plain(step)
        other.step()
        other.step(1)
    other.compare()
    return other


def interrupted_gather(run: Run) -> Training:
    """A user's all-gather raises; training goes on after it was caught."""
    training = Training(run)
    failing = FailingGathers()
    training.model.blocks[2].set_custom_all_gather(failing)
    for step in range(1, 4):
        failing.raises = True
        with contextlib.suppress(ValueError):
            training.model(training.batch(step))
        failing.raises = False
        training.backward(step)
        training.backward_plain(step)
        training.step()
        training.step(1)
    training.compare()
    return training


def interrupted_forward(run: Run) -> Training:
    """A forward raises while parameters for the next layer are under way."""
    training = Training(run)
    for step in range(1, 4):
        training.backward(step)
        training.backward_plain(step)
        training.step()
        training.step(1)
        handle = training.model.blocks[1].register_forward_pre_hook(_interrupt)
        with contextlib.suppress(ValueError):
            training.model(training.batch(step))
        handle.remove()
    training.compare()
    return training


def _interrupt(*_: object) -> None:
    message = "on purpose"
    raise ValueError(message)


SCENARIOS: dict[str, Callable[[Run], Training]] = {
    each.__name__: each
    for each in (
        zero3,
        zero2,
        mixed_precision,
        kept_slots,
        bf16_reduction,
        fp16,
        hybrid,
        hybrid_of_four,
        replicas_of_one,
        lora,
        kept_parts,
        accumulation,
        overlapping_backwards,
        partial_sums,
        offload,
        unpinned_offload,
        offload_without_sync,
        offload_interrupted,
        partial_offload,
        custom_collectives,
        hook_on_a_stream,
        separate_reductions,
        optimizer_event,
        by_hand,
        clipping,
        unused_parameters,
        recovery,
        recovery_on_a_stream,
        skipped,
        dropped,
        interrupted_gather,
        interrupted_forward,
    )
}
NUM_RANKS = {"hybrid_of_four": 4, "kept_parts": 4}


def complaints(name: str, options: dict[str, bool]) -> list[str]:
    """Run a scenario; return what is wrong. Options are those of `simulation`."""
    try:
        with simulation(**options) as run:
            return SCENARIOS[name](run).complaints
    except AssertionError as error:
        return [str(error)]
