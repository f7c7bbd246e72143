"""torchao's optimizers under Accelerate, whose compiled steps take no sharded tensors."""

from __future__ import annotations

import typing
import warnings

import pytest
import torch
from accelerate_runs import accelerate_ranks, make, without_compiler
from launched import TIMEOUT_S, forget_accelerate
from zoo import ZOO

from shardkit import OptimizerError
from shardkit.optim import LocalOptimizer

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.frameworks

LEARNING_RATE = 1e-2
STEPS = 3


class Prepared(typing.NamedTuple):
    """What `Accelerator.prepare` has returned, of a model, an optimizer and its schedule."""

    accelerator: typing.Any
    model: typing.Any
    optimizer: typing.Any
    schedule: typing.Any

    def train(self) -> list[float]:
        """Train; return the losses of this rank, and norms."""
        numbers = []
        for step in range(STEPS):
            inputs, labels = ZOO["llama"].batch(torch.Generator().manual_seed(step))
            loss = self.model(inputs, labels=labels).loss
            self.accelerator.backward(loss)
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            numbers += [float(loss.detach()), float(norm)]
        return numbers


def prepare(kind: type | None = None, *, scale: float | None = None, **options: object) -> Prepared:
    """Prepare a model, an optimizer (by default AdamW8bit), and a schedule of it."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torchao.optim import AdamW8bit

    forget_accelerate()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if scale is not None:  # Accelerate makes it for fp16, and has that on accelerators only.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model = make("llama")
    optimizer = (kind or AdamW8bit)(model.parameters(), lr=LEARNING_RATE, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    prepared = Prepared(accelerator, *accelerator.prepare(model, optimizer, schedule))
    if scale is not None:  # Only then `clip_grad_norm_` unscales.
        accelerator.native_amp, vars(accelerator.state)["_mixed_precision"] = True, "fp16"
    return prepared


def train_scaled() -> None:
    with accelerate_ranks(), without_compiler():
        wanted = prepare().train()
        scaled = prepare(scale=8.0)
        assert scaled.train() == wanted  # A power of two rounds nothing.
        assert not scaled.optimizer.step_was_skipped
        assert isinstance(scaled.optimizer.optimizer, LocalOptimizer)
        skipped = prepare(scale=float("inf"))
        before = [param.full_tensor() for param in skipped.model.parameters()]
        skipped.train()
        assert skipped.optimizer.step_was_skipped
        after = [param.full_tensor() for param in skipped.model.parameters()]
        assert all(map(torch.equal, before, after))


def test_a_gradient_scaler_steps_what_is_stepped_without(spawn: Spawn) -> None:
    spawn(train_scaled, 2, timeout_s=TIMEOUT_S)


def follow_a_schedule() -> None:
    """Also after a state dict was loaded, of which torch makes new groups."""
    with accelerate_ranks(), without_compiler(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*optimizer.step.*")
        run = prepare()
        run.train()
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.train()
        number = 2 * STEPS * run.accelerator.num_processes
        for optimizer in (run.optimizer, run.optimizer.optimizer.inner):
            [group] = optimizer.param_groups
            assert float(group["lr"]) == pytest.approx(LEARNING_RATE * 0.5**number)


def test_a_schedule_from_before_leads_what_steps(spawn: Spawn) -> None:
    spawn(follow_a_schedule, 2, timeout_s=TIMEOUT_S)


def run_hooks() -> None:
    """Those from before, one of which is removed; and one that comes later."""
    from torchao.optim import AdamW8bit

    calls: list[str] = []

    def note(name: str) -> typing.Callable[..., None]:
        return lambda optimizer, *_: calls.append(f"{name} {len(optimizer.state) > 0}")

    made: list[typing.Any] = []

    def make_hooked(params: object, **options: object) -> torch.optim.Optimizer:
        made.append(AdamW8bit(params, **options))
        made[0].register_step_pre_hook(note("before"))
        made[0].register_step_post_hook(note("after"))
        made[0].register_state_dict_pre_hook(note("saving"))
        made[0].register_load_state_dict_post_hook(note("loaded"))
        made.append(made[0].register_step_post_hook(note("removed")))
        return made[0]

    with accelerate_ranks(), without_compiler():
        run = prepare(make_hooked)
        made[1].remove()
        del calls[:]  # Accelerate has loaded what state there is.
        made[0].register_step_post_hook(note("late"))
        run.train()
        step = ["before True", "after True", "late True"]
        assert calls == ["before False", *step[1:], *step, *step], calls
        del calls[:]
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        assert calls == ["saving True", "loaded True"]


def test_hooks_from_before_run(spawn: Spawn) -> None:
    spawn(run_hooks, 2, timeout_s=TIMEOUT_S)


def prepare_subclasses() -> list[str]:
    from torchao.optim import AdamW8bit

    class HandsOn(AdamW8bit):  # type: ignore[misc]
        def __init__(self, params: object, **options: object) -> None:
            super().__init__(params, **{"betas": (0.8, 0.9), **options})

    class Fixes(AdamW8bit):  # type: ignore[misc]
        def __init__(self, params: object, *, lr: float) -> None:
            super().__init__(params, lr, block_size=64)

    class Hides(AdamW8bit):  # type: ignore[misc]
        def __init__(self, params: object, *, lr: float, block: int = 256) -> None:
            super().__init__(params, lr, block_size=block)

    found = []
    with accelerate_ranks(), without_compiler():
        for kind, options in ((HandsOn, {"block_size": 128}), (Fixes, {}), (Hides, {})):
            run = prepare(kind, **options)
            run.train()
            inner = run.optimizer.optimizer.inner
            found.append(f"{type(inner).__name__} {inner.defaults['betas']} {inner.block_size}")
        with pytest.raises(OptimizerError, match=r"Hides .* block_size=256 instead of 64"):
            prepare(Hides, block=64)
        made = prepare(lambda params, lr: LocalOptimizer(params, Hides, lr=lr, block=64))
        made.train()
        found.append(str(made.optimizer.optimizer.inner.block_size))
    return found


def test_subclasses_step_with_the_settings_that_they_have(spawn: Spawn) -> None:
    wanted = ["HandsOn (0.8, 0.9) 128", "Fixes (0.9, 0.999) 64", "Hides (0.9, 0.999) 256", "64"]
    assert spawn(prepare_subclasses, 2, timeout_s=TIMEOUT_S) == [wanted] * 2
