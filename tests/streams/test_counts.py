"""What a steady step issues on each stream: no more kernels, collectives or waits than it needs."""

from __future__ import annotations

import collections
import functools
import typing

import pytest
import torch
from simulation import simulation
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import Model, Training

from shardkit import MixedPrecisionPolicy
from shardkit.backends.watch.watchdog import current_watchdog
from step_counts import ABOUT, Counts, check, golden, python_calls

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.streams

NUM_GROUPS = 5  # Four blocks and the root.
BF16, FP32 = torch.bfloat16, torch.float32

VARIANTS: dict[str, dict[str, typing.Any]] = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "wide_reduction": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)},
    "narrow_reduction": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
    "hybrid": {"shape": (2, 2)},
    "lora": {},
    "older_torch": {},
    "older_wide_reduction": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    },
}


def freeze(model: Model) -> None:
    for block in model.blocks:
        block.inner.requires_grad_(False)


def steady_step(variant: str) -> tuple[Counts, list[int], list[int]]:
    """Return what a fifth step issues, by stream and operator; peaks; slots made, of all steps."""
    keeps_memory = not variant.startswith("older")
    with simulation(batches=False, keeps_memory=keeps_memory) as (sim, watch):
        change = freeze if variant == "lora" else (lambda _: None)
        training = Training((sim, watch), change=change, **VARIANTS[variant])
        for step in range(1, 7):
            watch.notes = step == 5
            with training.counted(step):
                training.backward(step)
                watch.notes = False
                training.step()
        made = [sim.num_made.get(step, 0) for step in range(1, 7)]
        calls = python_calls(functools.partial(training.backward, 7))
        sim.step = 0
    found: collections.Counter[str] = collections.Counter()
    for issued in watch.issued:
        is_ours = issued.is_collective or any(label != "a tensor" for label in issued.writes)
        if is_ours or not issued.stream.startswith("compute"):
            found[f"{issued.stream}: {issued.op}"] += 1
    counts = {"groups": NUM_GROUPS, **dict(sorted(found.items()))}
    counts[f"{ABOUT} calls of Python, forward and backward"] = calls  # It runs beside the device.
    return counts, training.peaks, made


def section_of(variant: str) -> str:
    return f"simulated device, {variant}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_steady_step_issues_what_it_needs(spawn: Spawn, variant: str) -> None:
    """No copy stands between a gather and its first reader: compute copies gradients only.

    Of five groups the root and the last block stay for backward, so eight are gathered. With two
    buckets in each block (``lora``) there are two casts, and both travel in one collective.
    """
    num_ranks = 4 if variant == "hybrid" else 2
    for counts, peaks, made in spawn(steady_step, num_ranks, variant):
        check(section_of(variant), counts)
        assert len(set(peaks[2:])) == 1, f"peaks of memory: {peaks}"
        assert len(set(made[2:])) == 1, f"slots made: {made}"


def peak_of(variant: str) -> int:
    return steady_step(variant)[1][-1]


@pytest.mark.parametrize(
    ("older", "newer"), [("older_torch", "zero3"), ("older_wide_reduction", "wide_reduction")]
)
def test_send_buffers_do_not_pile_up_without_slots(spawn: Spawn, older: str, newer: str) -> None:
    """Where memory cannot be handed on, it is freed as soon as the next reduction starts."""
    assert max(spawn(peak_of, 2, older)) <= min(spawn(peak_of, 2, newer))


# --- beside FSDP2 ---------------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Counts operators that write, without collectives and without those that only allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: typing.Any,
        types: typing.Any,
        args: typing.Any = (),
        kwargs: typing.Any = None,
    ) -> typing.Any:
        del types
        schema = func._schema
        returns = schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        name = schema.name
        if func.namespace in ("aten", "fsdp") and not is_view and "empty" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def kernels_of_fsdp2(*, is_narrow: bool) -> float:
    """Return how many kernels FSDP2 launches for one reduction, whatever divides the sum."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    counts: list[int] = []
    original = module.foreach_reduce

    def counted(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        with Kernels() as kernels:
            result = original(*args, **kwargs)
        divisions = ("aten::div_", "aten::mul_", "aten::div")  # gloo cannot; NCCL averages.
        counts.append(sum(name not in divisions for name in kernels.names))
        return result

    module.foreach_reduce = counted
    try:
        policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16 if is_narrow else None)
        model = Model()
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
        model(torch.ones(3, 7)).sum().backward()
    finally:
        module.foreach_reduce = original
    return sum(counts) / len(counts)


@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_reduction_takes_no_more_kernels_than_that_of_fsdp2(
    spawn: Spawn, *, is_narrow: bool
) -> None:
    theirs = min(spawn(kernels_of_fsdp2_narrow if is_narrow else kernels_of_fsdp2_wide, 2))
    expected = golden(section_of("narrow_reduction" if is_narrow else "zero3"))
    ours = expected["compute: _foreach_copy_"] + expected.get("the reduce stream: copy_", 0)
    assert ours / NUM_GROUPS <= theirs


def kernels_of_fsdp2_wide() -> float:
    return kernels_of_fsdp2(is_narrow=False)


def kernels_of_fsdp2_narrow() -> float:
    return kernels_of_fsdp2(is_narrow=True)


# --- the host -------------------------------------------------------------------------------------


def waits(*, has_host_engine: bool) -> list[tuple[str, int]]:
    """Return what the host waits for in steady steps, and how many steps ago that was issued."""
    with simulation(has_host_engine=has_host_engine) as (sim, watch):
        training = Training((sim, watch))
        for step in range(1, 8):
            with training.counted(step):
                training.backward(step)
                nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
                training.step()
        sim.step = 0
    return [(sync.what, sync.step - sync.of_step) for sync in sim.syncs if sync.step > 3]


def waits_with_host_engine() -> list[tuple[str, int]]:
    return waits(has_host_engine=True)


def waits_without_host_engine() -> list[tuple[str, int]]:
    return waits(has_host_engine=False)


def test_the_host_never_waits_for_the_device(spawn: Spawn) -> None:
    assert spawn(waits_with_host_engine, 2) == [[], []]


def test_without_an_engine_of_the_host_it_is_a_whole_step_ahead(
    spawn: Spawn,
) -> None:
    for found in spawn(waits_without_host_engine, 2):
        assert {ago for _, ago in found} == {1}, found
        assert len(found) == 4, "once in a step"


def agreements_of_micro_batches() -> tuple[int, int]:
    """Return how often ranks had to agree in five steps of micro-batches, and in five later ones.

    On an accelerator gathers and reductions are collectives of one process group.
    """
    with simulation(batches=False) as run:
        training = Training(run)
        counts = []
        for step in range(1, 11):
            if step == 6:
                counts.append(current_watchdog().num_counted_in)
            for micro in range(3):
                training.model.set_requires_gradient_sync(micro == 2)
                training.backward(step, 3)
            training.step()
        return counts[0], current_watchdog().num_counted_in - counts[0]


def test_steady_steps_of_micro_batches_agree_to_nothing(spawn: Spawn) -> None:
    for first, steady in spawn(agreements_of_micro_batches, 2):
        assert first > 0
        assert steady == 0
