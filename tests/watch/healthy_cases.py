"""Trainings in which a rank takes long, or lives in an unusual place, and nothing is wrong.

A rank alone runs one: python healthy_cases.py CASE FOLDER [HYBRID]. It prints the loss of each step
and what the parameters are at the end; nothing of that depends on the case.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import typing

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardkit import checkpoint, fully_shard, init_device_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Callable

LONG_S = float(os.environ.get("LONG_S", "25"))
SIZES = (48, 64, 80, 33)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(17, hidden), nn.Linear(hidden, 17)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Training:
    """A training of a few blocks, the same in each case."""

    def __init__(self, folder: pathlib.Path, mesh: typing.Any) -> None:
        self.folder = folder
        self.mesh = mesh
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # This is the rank that takes long: the last one.
        self.is_odd = self.rank == self.world_size - 1
        torch.manual_seed(0)
        self.model = nn.Sequential(*map(Block, SIZES), nn.Linear(17, 1)).double()
        self.kept = list(range(len(SIZES)))
        self.losses: list[str] = []

    def shard(self) -> None:
        for block in [*self.model][:-1]:
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(8, 17, generator=generator, dtype=torch.float64)

    def step(self, before_backward: Callable[[], object] = lambda: None) -> None:
        loss = self.model(self.batch(len(self.losses))).square().mean()
        before_backward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item().hex())

    def result(self) -> str:
        whole = [p.full_tensor().sum().item().hex() for p in self.model.parameters()]
        return f"result {self.losses} {whole}"


# --- what a rank does between the steps -----------------------------------------------------------


def nothing(run: Training) -> None:
    del run


def sleep(run: Training) -> None:
    if run.is_odd:
        time.sleep(LONG_S)


def compute_in_python(run: Training) -> None:
    end = time.monotonic() + LONG_S
    while run.is_odd and time.monotonic() < end:
        sum(range(1000))


def _hold_the_lock(seconds: float) -> None:
    """Let no other thread of this process run Python."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


def hold_the_lock(run: Training) -> None:
    if run.is_odd:
        _hold_the_lock(LONG_S)


def hold_the_lock_twice(run: Training) -> None:
    for _ in range(2):
        if run.is_odd:
            _hold_the_lock(LONG_S / 2)
        run.model(run.batch(0))
        time.sleep(0.5)


def load_a_large_pickle(run: Training) -> None:
    if run.is_odd:
        content = pickle.dumps([str(i) for i in range(1_000_000)])
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            pickle.loads(content)


def fork_loader_workers(run: Training) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(64, 3))
    loader = torch.utils.data.DataLoader(data, 8, num_workers=2 if run.is_odd else 0)
    assert sum(len(batch) for (batch,) in loader) == 64


def be_stopped(run: Training) -> None:
    """For a while, by somebody from outside."""
    _be_stopped(is_meant=run.is_odd)


def stop_with_the_store(run: Training) -> None:
    """Without a launcher rank 0 holds the store."""
    _be_stopped(is_meant=run.rank == 0)


def _be_stopped(*, is_meant: bool) -> None:
    if is_meant:
        going_on = f"import os, time; time.sleep({LONG_S / 2}); os.kill({os.getpid()}, 18)"
        with subprocess.Popen([sys.executable, "-c", going_on]):
            os.kill(os.getpid(), signal.SIGSTOP)


def wait_in_a_debugger(run: Training) -> None:
    """It waits for input, which comes late."""
    if run.is_odd:
        reading, writing = os.pipe()
        threading.Timer(LONG_S, os.write, [writing, b"c\n"]).start()
        sys.stdin = os.fdopen(reading)
        breakpoint()  # noqa: T100


def save_slowly(run: Training, group: typing.Any = None, *, slow: bool | None = None) -> None:
    """Save; the odd rank writes its files for long."""
    from shardkit.checkpoint._dcp.writer import CheckpointWriter

    original = CheckpointWriter.write_data

    def write_data(self: typing.Any, *args: typing.Any) -> typing.Any:
        if run.is_odd if slow is None else slow:
            time.sleep(LONG_S)
        return original(self, *args)

    CheckpointWriter.write_data = write_data  # type: ignore[method-assign]
    checkpoint.save(run.folder / "saved", run.model, run.optimizer, process_group=group)
    CheckpointWriter.write_data = original  # type: ignore[method-assign]


def let_one_replica_save(run: Training) -> None:
    """The others go on and wait for it in their next step."""
    group = run.mesh.get_group("shard")
    if run.mesh.get_local_rank("replicate") == 1:
        save_slowly(run, group, slow=True)


def evaluate_in_a_plain_copy(run: Training) -> None:
    plain = nn.Linear(17, 1)
    end = time.monotonic() + LONG_S
    while run.is_odd and time.monotonic() < end:
        plain(torch.ones(4, 17))


def log_to_a_slow_disk(run: Training) -> None:
    norm = nn.utils.get_total_norm([p.detach() for p in run.model.parameters()])
    if run.is_odd:
        with (run.folder / "log").open("w") as file:
            file.write(str(norm.item()))
            time.sleep(LONG_S)


def compile_in_the_first_step(run: Training) -> None:
    """As slow as a large model: in the middle of a forward."""
    handle = run.model[1].register_forward_pre_hook(lambda *_: sleep(run))
    with torch.no_grad():
        run.model(run.batch(0))
    handle.remove()


def make_a_communicator_late(run: Training) -> None:
    """One shard group of a hybrid mesh makes another process group, and takes long."""
    members = run.mesh.get_group("shard")
    ranks = dist.get_process_group_ranks(members)
    if run.is_odd:
        time.sleep(LONG_S)
    if run.world_size - 1 in ranks:
        group = dist.new_group(ranks, use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=group)


def broadcast_for_long(run: Training) -> None:
    """A part of the ranks, whose source is late."""
    group = run.mesh.get_group("shard")
    ranks = dist.get_process_group_ranks(group)
    if run.world_size - 1 not in ranks:
        return
    if run.is_odd:
        time.sleep(LONG_S)
    for _ in range(20):
        dist.broadcast(torch.ones(1 << 20), src=max(ranks), group=group)


def use_own_collectives(run: Training) -> None:
    if run.is_odd:
        time.sleep(LONG_S)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    found = [None] * run.world_size
    dist.all_gather_object(found, run.rank)
    assert found == list(range(run.world_size))


def train_another_model_beside(run: Training) -> None:
    """And one under DDP, of which one rank comes late."""
    other = fully_shard(nn.Linear(9, 9), mesh=run.mesh)
    plain = nn.parallel.DistributedDataParallel(nn.Linear(9, 9))
    for _ in range(3):
        other(torch.ones(1, 9)).sum().backward()
        sleep(run)
        plain(torch.ones(1, 9)).sum().backward()


def drop_layers(run: Training) -> None:
    """At random, alike on all ranks; one of them is late."""
    numbers = torch.Generator().manual_seed(7)
    for _ in range(12):
        kept = torch.rand(len(SIZES), generator=numbers) < 0.7
        x = run.batch(0)
        for block, is_kept in zip([*run.model][:-1], kept, strict=True):
            x = block(x) if is_kept else x
        run.model[-1](x)
    sleep(run)
    run.model(run.batch(0))


def accumulate(run: Training) -> None:
    for _ in range(3):
        run.model.set_requires_gradient_sync(False)
        run.model(run.batch(0)).sum().backward()
        sleep(run)
        run.model.set_requires_gradient_sync(True)
        run.model(run.batch(0)).sum().backward()
        run.optimizer.zero_grad()


def catch_the_same_exception(run: Training) -> None:
    """On all ranks, one of them late."""

    def refuse(*_: object) -> None:
        sleep(run)
        raise ValueError

    handle = run.model[2].register_forward_pre_hook(refuse)
    try:
        run.model(run.batch(0))
    except ValueError:
        handle.remove()


BETWEEN_STEPS: dict[str, Callable[[Training], None]] = {
    case.__name__: case
    for case in (
        nothing,
        sleep,
        compute_in_python,
        hold_the_lock,
        hold_the_lock_twice,
        load_a_large_pickle,
        fork_loader_workers,
        be_stopped,
        stop_with_the_store,
        wait_in_a_debugger,
        save_slowly,
        evaluate_in_a_plain_copy,
        log_to_a_slow_disk,
        compile_in_the_first_step,
        use_own_collectives,
        train_another_model_beside,
        drop_layers,
        accumulate,
        catch_the_same_exception,
    )
}
ON_HYBRID_MESHES: dict[str, Callable[[Training], None]] = {
    case.__name__: case
    for case in (nothing, let_one_replica_save, make_a_communicator_late, broadcast_for_long)
}


# --- how a rank begins and ends -------------------------------------------------------------------


def begin_with_a_file(folder: pathlib.Path) -> None:
    """Ranks that meet in a file; the last one comes late."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)


def begin_with_a_prefix(folder: pathlib.Path) -> None:
    """Over two prefixes of a file."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore("b", dist.PrefixStore("a", dist.FileStore(f"{folder}/s", world_size)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def second_world(folder: pathlib.Path) -> None:
    """A training before, in a world that was destroyed."""
    run = Training(folder, init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)))
    run.shard()
    run.step()
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


BEGINS: dict[str, Callable[[pathlib.Path], None]] = {
    case.__name__: case for case in (begin_with_a_file, begin_with_a_prefix, second_world)
}


def end_late(run: Training) -> None:
    """One rank has something to do after the others have ended."""
    dist.destroy_process_group()
    if run.is_odd:
        time.sleep(LONG_S * 0.8)


def end_late_without_destroying(run: Training) -> None:
    if run.is_odd:
        time.sleep(LONG_S * 0.8)


def end_without_destroying(run: Training) -> None:
    del run


ENDS: dict[str, Callable[[Training], None]] = {
    case.__name__: case for case in (end_late, end_late_without_destroying, end_without_destroying)
}


def main() -> None:
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    world_size = int(os.environ["WORLD_SIZE"])
    if name in BEGINS:
        BEGINS[name](folder)
    if sys.argv[3:]:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    run = Training(folder, mesh)
    run.shard()
    if name in BEGINS:
        sleep(run)
    act = {**BETWEEN_STEPS, **ON_HYBRID_MESHES}.get(name, nothing)
    if name == "compile_in_the_first_step":
        act(run)
    for number in range(4):
        run.step()
        if number == 2 and name != "compile_in_the_first_step":
            act(run)
    print(run.result(), flush=True)
    if name in ENDS:
        ENDS[name](run)
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
