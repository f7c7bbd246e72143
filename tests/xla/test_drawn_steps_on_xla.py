"""Sequences of what users do, drawn by number, to a model on XLA devices and to its plain twin."""

from __future__ import annotations

import os
import random
import typing

import pytest
import torch
import torch_xla
import twins
from torch import Tensor, nn
from twins import ACTIONS, ROWS, WIDTH
from xla_ranks import on_xla

if typing.TYPE_CHECKING:
    from shardkit import DeviceMesh

NUM_SEQUENCES = int(os.environ.get("SHARDKIT_TEST_SEQUENCES", "5"))
STEPS = 12
LAYOUTS = (
    *("layers", "one group", "list", "kept", "tied", "mapping", "recomputed"),
    *("two dtypes", "cast", "reduced"),
)
REFUSED = {
    "set_recompute": "torch's checkpoint, which does not repeat the random numbers of ranks",
    "write_in_forward": "forwards that write to parameters",
    "scaled_step": "gradients in fp64, which a scaler of torch_xla multiplies by fp32",
}
"""Actions that XLA devices do not take, and why."""
ASKS_GROUPS = {"checkpoint", "full_file", "torch_state_dicts"}  # Actions that need a process group.


class XlaTwins(twins.Twins):
    """`Twins` whose sharded model computes for all ranks at once."""

    device_type = "xla"

    def put(self, plain: nn.Module) -> typing.Any:
        return on_xla(plain)

    def choose_optimizers(self, first: int, *, has_two: bool) -> None:
        """Choose one of those that take pieces without an address."""
        del has_two
        self.makes = [twins.OPTIMIZERS[first % 4]]

    def draw(self, *, wants_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Draw a batch of all ranks, for both."""
        self.num_batches += 1
        generator = torch.Generator().manual_seed(self.num_batches)
        shape = (self.mesh.size() * ROWS, WIDTH)
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        both = whole, whole.to("xla")
        for x in both:
            x.requires_grad_(wants_grad)
        return both

    def mean(self, own: Tensor) -> Tensor:
        return own.detach().cpu()

    def difference(self, ours: Tensor, theirs: Tensor) -> str | None:
        return super().difference(ours.cpu(), theirs.cpu())

    def evaluate(self, way: int) -> None:
        """Run without gradients; operators of torch_xla fail in inference mode."""
        super().evaluate(way - way % 2)

    def unshard(self, which: int, way: int) -> None:
        """Look at unsharded parameters; writes are refused."""
        super().unshard(which, way - way % 2)

    def problem(self) -> str | None:
        torch_xla.sync()
        return super().problem()

    def problem_of_memory(self) -> str | None:
        """Return nothing: traced tensors have no memory that the host knows."""

    def expect_freed(self) -> None:
        """Expect nothing, as above."""


def drawn(seed: int) -> tuple[str, list[tuple[str, list[int]]]]:
    draw = random.Random(seed)
    names = draw.choices(
        [name for name in ACTIONS if name not in {*REFUSED, *ASKS_GROUPS}], k=STEPS
    )
    actions = [(name, [draw.randrange(10) for _ in range(ACTIONS[name])]) for name in names]
    return draw.choice(LAYOUTS), actions


@pytest.mark.parametrize("seed", range(NUM_SEQUENCES))
def test_any_sequence_is_that_of_the_plain_model(seed: int, mesh: DeviceMesh) -> None:
    layout, actions = drawn(seed)
    # Of one axis only: torch_xla takes a graph that it has compiled for another mesh, if all else
    # is equal.
    pair = XlaTwins((mesh.size(),), layout)
    for number, (name, numbers) in enumerate(actions, start=1):
        problem = pair.problem_after(name, *numbers)
        assert problem is None, f"action {number} of {actions} in {layout!r}: {problem}"
