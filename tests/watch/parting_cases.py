"""Ways in which one rank parts from the others. A rank alone runs one: python parting_cases.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit import checkpoint, fully_shard, init_device_mesh, set_watch

if typing.TYPE_CHECKING:
    from collections.abc import Callable

SMALL, LARGE = (48, 64, 80, 96), (9000, 12000, 10000, 11000)
"""Hidden features of the blocks: groups that travel together, and groups that travel alone."""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, hidden), nn.Linear(hidden, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Blocks of different sizes, run in an order that may be changed."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(32, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(map(Block, sizes))
        self.order = list(range(len(sizes)))
        self.bad_block: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for index in self.order:
            x = self.blocks[index](x)
            if index == self.bad_block:
                msg = "bad batch"
                raise ValueError(msg)
        return self.head(x)


class Run:
    """A training of which one rank does something else."""

    def __init__(
        self,
        culprit: int,
        mesh_shape: tuple[int, ...],
        sizes: tuple[int, ...],
        device_type: str = "cpu",
    ) -> None:
        self.device_type = device_type
        self.mesh = init_device_mesh(device_type, mesh_shape)
        self.is_odd = dist.get_rank() == culprit % dist.get_world_size()  # This rank does.
        torch.manual_seed(0)
        self.model = Model(sizes).to(device_type)

    def shard(self) -> None:
        for block in self.model.blocks:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self) -> Tensor:
        return self.model(torch.ones(4, 32, device=self.device_type)).mean()

    def step(self, num_backwards: int = 1) -> None:
        loss = self.loss()
        for left in reversed(range(num_backwards)):
            loss.backward(retain_graph=left > 0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def by_name(
    *cases: tuple[Callable[[Run], None], str],
) -> dict[str, tuple[Callable[[Run], None], str]]:
    """Return what a rank does, and what the error says of it, by the name of the function."""
    return {case.__name__: (case, said) for case, said in cases}


# --- what a rank does instead ---------------------------------------------------------------------


def skip_a_block(run: Run) -> None:
    run.model.order = [0, 1, 3] if run.is_odd else [0, 1, 2, 3]


def swap_two_blocks(run: Run) -> None:
    run.model.order = [0, 2, 1, 3] if run.is_odd else [0, 1, 2, 3]


def end_a_block_early(run: Run) -> None:
    run.model.order = [0, 1, 2] if run.is_odd else [0, 1, 2, 3]


def run_a_block_twice(run: Run) -> None:
    run.model.order = [0, 1, 1, 2, 3] if run.is_odd else [0, 1, 2, 3]


def freeze_a_parameter(run: Run) -> None:
    run.model.blocks[1].up.weight.requires_grad_(not run.is_odd)


def take_an_extra_micro_batch(run: Run) -> None:
    for _ in range(3 if run.is_odd else 2):
        run.loss().backward()


def go_backward_twice(run: Run) -> None:
    run.step(2 if run.is_odd else 1)


def go_backward_never(run: Run) -> None:
    if run.is_odd:
        run.loss()
    else:
        run.step()


def catch_an_exception_in_forward(run: Run) -> None:
    run.model.bad_block = 2 if run.is_odd else None
    try:
        run.step()
    except ValueError:
        run.model.bad_block = None


def catch_an_exception_in_backward(run: Run) -> None:
    def refuse(_: Tensor) -> None:
        if run.is_odd:
            msg = "bad gradient"
            raise ValueError(msg)

    loss = run.loss()
    loss.register_hook(refuse)
    try:
        loss.backward()
    except ValueError:
        return
    run.optimizer.step()


def gather_a_parameter(run: Run) -> None:
    if run.is_odd:
        run.model.blocks[0].up.weight.full_tensor()


def compute_a_norm(run: Run) -> None:
    if run.is_odd:
        run.model.blocks[0].up.weight.norm()


def clip(run: Run) -> None:
    run.loss().backward()
    if run.is_odd:
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


def evaluate(run: Run) -> None:
    if run.is_odd:
        with torch.no_grad():
            run.loss()


def get_a_whole_state_dict(run: Run) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if run.is_odd:
        get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))


def save(run: Run) -> None:
    if run.is_odd:
        checkpoint.save(Path(tempfile.gettempdir(), "never"), run.model)


def unshard_by_hand(run: Run) -> None:
    if run.is_odd:
        run.model.blocks[2].unshard()


def wait_in_a_barrier(run: Run) -> None:
    if run.is_odd:
        dist.barrier()


IN_PROCESS = by_name(
    (skip_a_block, "blocks.3"),
    (swap_two_blocks, "blocks.2"),
    (end_a_block_early, "blocks.3"),
    (run_a_block_twice, "blocks.1"),
    (freeze_a_parameter, "blocks.1.up.weight"),
    (take_an_extra_micro_batch, "take as many micro-batches"),
    (go_backward_twice, "Tensor.backward"),
    (go_backward_never, "in forward"),
    (catch_an_exception_in_forward, "before that it met ValueError: bad batch"),
    (catch_an_exception_in_backward, "in forward"),
    (gather_a_parameter, "ShardedTensor.full_tensor"),
    (compute_a_norm, "Tensor.norm"),
    (clip, "clip_grad_norm_"),
    (evaluate, "in forward"),
    (get_a_whole_state_dict, "get_model_state_dict"),
    (save, "in save"),
    (unshard_by_hand, "all-gather"),
    (wait_in_a_barrier, "in barrier"),
)
"""By name: what a rank does, and what the error says of it."""


def part(
    name: str, culprit: int, mesh_shape: tuple[int, ...], sizes: tuple[int, ...], *, is_late: bool
) -> None:
    """Train; one rank parts from the others at the first step, or later."""
    set_watch(ask_after_s=1, ask_unexpected_after_s=0.5)
    run = Run(culprit, mesh_shape, sizes)
    run.shard()
    if is_late:
        for _ in range(4):
            run.step()
    IN_PROCESS[name][0](run)
    for _ in range(4):
        run.step()
    dist.barrier()  # Where a rank has less to do than others.


# --- what takes a process of its own ------------------------------------------------------------


def end(run: Run) -> None:
    if run.is_odd:
        sys.exit(0)


def raise_an_exception(run: Run) -> None:
    if run.is_odd:
        msg = "no data"
        raise ValueError(msg)


def destroy_the_process_group(run: Run) -> None:
    if run.is_odd:
        dist.destroy_process_group()
        time.sleep(8)
        sys.exit(0)


def be_killed(run: Run) -> None:
    if run.is_odd:
        os.kill(os.getpid(), signal.SIGKILL)


def be_stopped(run: Run) -> None:
    if run.is_odd:
        os.kill(os.getpid(), signal.SIGSTOP)


def lose_the_network(run: Run) -> None:
    if run.is_odd:
        cut = ("ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down")
        subprocess.run(cut, check=True)


def sleep(run: Run) -> None:
    if run.is_odd:
        time.sleep(60)


IN_OWN_PROCESS = by_name(
    (end, "has ended: its script is through"),
    (raise_an_exception, "has ended by ValueError: no data at parting_cases.py"),
    (destroy_the_process_group, "has destroyed its process group"),
    (be_killed, "is gone"),
)


def main() -> None:
    """Run a case as a rank of a launcher that sets the environment only.

    Arguments: the case, the rank that parts, "first" or "late", the type of device.
    """
    name, culprit, is_late = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "late"
    run = Run(culprit, (int(os.environ["WORLD_SIZE"]),), SMALL, *sys.argv[4:])
    run.shard()
    for _ in range(4 if is_late else 0):
        run.step()
    others = {case.__name__: (case, "") for case in (sleep, be_stopped, lose_the_network)}
    {**IN_PROCESS, **IN_OWN_PROCESS, **others}[name][0](run)
    for _ in range(4):
        run.step()
    run.loss().item()  # An accelerator is done with all of it.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
