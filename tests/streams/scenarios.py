"""Small trainings on the simulated accelerator that use every wait of the backend.

Each trains a sharded model beside a plain one, on the batches of all ranks, and returns complaints:
what was not ordered, numbers that differ, waits of the host, memory that grows.
"""

from __future__ import annotations

import contextlib
import typing
from unittest import mock

import torch
import torch.distributed as dist
from captured_steps import CAPTURED
from irregular_steps import (
    dropped,
    interrupt,
    interrupted_forward,
    interrupted_gather,
    recovery,
    recovery_on_a_stream,
    skipped,
)
from simulation import simulation
from torch import nn
from trainings import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    Model,
    Run,
    Training,
    train,
)
from users_collectives import Gathers, Scatters

from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, Replicate, fully_shard
from shardkit._compat import torch_fsdp2

if typing.TYPE_CHECKING:
    from collections.abc import Callable

_LARGEST_NBYTES = 256  # Between the sizes of the root's group, 40 bytes, and of a block's.

# --- the scenarios --------------------------------------------------------------------------------


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
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return train(Training(run, tolerance=BF16_TOLERANCE, mp_policy=policy))


def fp16(run: Run) -> Training:
    """Reduction in fp16: half of the division comes before the sum."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    return train(Training(run, tolerance=BF16_TOLERANCE, mp_policy=policy))


def hybrid(run: Run) -> Training:
    """Sums over the shard axis go on to the replicate axis, on the next stream."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return train(Training(run, shape=(2, 1), tolerance=BF16_TOLERANCE, mp_policy=policy))


def hybrid_of_four(run: Run) -> Training:
    """Both axes have two ranks."""
    return train(Training(run, shape=(2, 2)))


def replicas_of_one(run: Run) -> Training:
    """A replicate axis of one rank."""
    return train(Training(run, shape=(1, 2)))


def replicated(run: Run) -> Training:
    """Biases have a replica on each rank: reductions take turns between two communicators."""

    def place(param: nn.Parameter) -> Replicate | None:
        return Replicate() if param.ndim == 1 else None

    return train(Training(run, shard_placement_fn=place))


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
        training.step_both(step)
    training.compare()
    return training


def accumulation(run: Run) -> Training:
    """Three micro-batches: one not synced, one not the last, one that ends the step."""
    training = Training(run)
    for step in range(1, 5):
        for part in range(3):
            training.model.set_requires_gradient_sync(part > 0)
            training.model.set_is_last_backward(part == 2)
            training.backward_both(3 * step + part, parts=3)
        training.update_both()
    training.compare()
    return training


def overlapping_backwards(run: Run) -> Training:
    """Micro-batches that are all reduced, while the next one computes."""
    training = Training(run, tolerance=FP32_TOLERANCE)
    for step in range(1, 4):
        for part in range(3):
            training.model.set_is_last_backward(part == 2)
            training.backward_both(3 * step + part, parts=3)
        training.update_both()
    training.compare()
    return training


def finalized_by_hand(run: Run) -> Training:
    """A call starts what backwards have left to reduce, and its handle waits for all."""
    training = Training(run)
    training.model.set_manual_backward_finalization(True)
    for step in range(1, 5):
        training.model.set_requires_gradient_sync(step % 2 == 0)
        for part in range(2):
            training.backward_both(2 * step + part, parts=2)
        training.model.set_requires_gradient_sync(True)
        training.model.finalize_backward(async_op=True).wait()
        training.update_both()
    training.compare()
    return training


def kept_storage(run: Run) -> Training:
    """Unsharded parameters keep their memory while they are resharded."""
    training = Training(run)
    training.model.set_keep_unsharded_storage(True)
    return train(training)


def partial_sums(run: Run) -> Training:
    """The all-reduce waits for the last micro-batch; sums over the shard axis are kept."""
    training = Training(run, shape=(2, 1))
    for step in range(1, 4):
        for part in range(3):
            training.model.set_requires_all_reduce(part == 2)
            training.backward_both(3 * step + part, parts=3)
        training.update_both()
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
            training.backward_both(2 * step + part, parts=2)
            with torch.no_grad():
                for param in (*training.model.parameters(), *training.plain.parameters()):
                    param.mul_(1.25 - 0.5 * part)
        training.update_both()
    training.compare()
    return training


def offload_interrupted(run: Run) -> Training:
    """Right after a forward that raised the host writes parameters."""
    training = Training(run, offload_policy=CPUOffloadPolicy())
    for step in range(1, 4):
        handle = training.model.blocks[2].register_forward_pre_hook(interrupt)
        with contextlib.suppress(ValueError):
            training.model(training.batch(step))
        handle.remove()
        with torch.no_grad():
            for param in (*training.model.parameters(), *training.plain.parameters()):
                param.mul_(1.25 if step % 2 else 0.75)
        training.step_both(step)
    training.compare()
    return training


def _train_offloaded(training: Training) -> Training:
    """Train; between steps the host writes parameters right after a forward."""
    for step in range(1, 4):
        training.step_both(step)
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


def custom_collectives(run: Run) -> Training:
    """The user's own collectives, which return while they are under way."""
    training = Training(run)
    training.model.set_custom_all_gather(Gathers())
    training.model.set_custom_reduce_scatter(Scatters())
    for block in training.model.blocks:
        block.set_custom_all_gather(Gathers())
        block.set_custom_reduce_scatter(Scatters())
    return train(training)


def symmetric_memory(run: Run) -> Training:
    """Small groups communicate out of symmetric memory: here the root's, and not the blocks'."""
    training = Training(run)
    comms = Gathers(), Scatters()
    kinds = [lambda *_, comm=comm: comm for comm in comms]
    with mock.patch.object(torch_fsdp2, "symmetric_kinds", return_value=kinds):
        for module in (training.model, *training.model.blocks):
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm(max_bytes=_LARGEST_NBYTES)
    train(training)
    for comm in comms:
        if not comm.nbytes or max(comm.nbytes) > _LARGEST_NBYTES:
            training.complaints.append(f"{type(comm).__name__} got {sorted(set(comm.nbytes))} B")
    return training


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
    return _step_on_a_stream(Training(run))


def optimizer_event_of_replicas(run: Run) -> Training:
    """The same, and forwards read the shards: each rank holds all of them."""
    return _step_on_a_stream(Training(run, shape=(2, 1)))


def _step_on_a_stream(training: Training) -> Training:
    simulation = training.simulation
    stream = simulation.new_stream("the optimizer's stream")
    for step in range(1, 4):
        training.backward_both(step)
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
        training.step_both(step)
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


def writes_in_forward(run: Run) -> Training:
    """A block is written inside of the root's forward, before its own, as momentum encoders are."""
    training = Training(run, reshard_after_forward=True)

    def write(module: nn.Module, *_: object) -> None:
        blocks = training.model.blocks if module is training.model.blocks[0] else None
        target = blocks[2] if blocks is not None else training.plain.blocks[2]
        with torch.no_grad():
            for param in target.parameters():
                param.mul_(0.9)

    for model in (training.model, training.plain):
        model.blocks[0].register_forward_hook(write)
    return train(training)


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
        replicated,
        lora,
        kept_parts,
        accumulation,
        overlapping_backwards,
        finalized_by_hand,
        kept_storage,
        partial_sums,
        offload,
        unpinned_offload,
        offload_without_sync,
        offload_interrupted,
        partial_offload,
        custom_collectives,
        symmetric_memory,
        hook_on_a_stream,
        separate_reductions,
        optimizer_event,
        optimizer_event_of_replicas,
        by_hand,
        writes_in_forward,
        clipping,
        unused_parameters,
        recovery,
        recovery_on_a_stream,
        skipped,
        dropped,
        interrupted_gather,
        interrupted_forward,
        *CAPTURED,
    )
}
NUM_RANKS = {
    "hybrid_of_four": 4,
    "kept_parts": 4,
    "captured_hybrid": 4,
    "captured_kept_parts": 4,
}


def complaints(name: str, options: dict[str, bool]) -> list[str]:
    """Run a scenario; return what is wrong. Options are those of `simulation`."""
    try:
        with simulation(**options) as run:
            return SCENARIOS[name](run).complaints
    except AssertionError as error:
        return [str(error)]
