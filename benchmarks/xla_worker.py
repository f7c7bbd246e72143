"""One contender on XLA, in its own process: it takes steps on request.

Arguments: contender, address to connect to (`xla_case.Worker`), and sizes of the model as JSON.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn

import shardkit
from models import GPT, GPTShape

_SEED = 0
_seeding = threading.Lock()


class Contender:
    """A model with its optimizer and batch.

    Args:
        make: A function that shards a model and returns it.
        shape: Sizes of the model.
        num_ranks: Number of ranks whose batches the model gets at once.
        rank: The first of these ranks.
        sync: A function that runs the traced graph.
    """

    def __init__(
        self,
        make: Callable[[GPT], Any],
        shape: GPTShape,
        *,
        num_ranks: int,
        rank: int,
        sync: Callable[[], None],
    ) -> None:
        with _seeding:
            torch.manual_seed(_SEED)
            model = GPT(shape)
        self.model = make(model.to(torch_xla.device()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._sync = sync
        generator = torch.Generator().manual_seed(_SEED)
        size = (xr.global_runtime_device_count(), shape.batch, shape.sequence + 1)
        batches = torch.randint(shape.vocab, size, generator=generator)
        tokens = batches[rank : rank + num_ranks].flatten(0, 1)
        self._batch = [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
        self._batch = [part.to(torch_xla.device()) for part in self._batch]
        self.mark: Callable[[Tensor], None] = lambda _: None
        self.loss = float("nan")

    def step(self) -> float:
        """Take a step; return the seconds until all devices are done."""
        for part in self._batch:
            self.mark(part)
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(*self._batch)
        loss.backward()
        self.optimizer.step()
        self._sync()
        xm.wait_device_ops()
        seconds = time.perf_counter() - begin
        self.loss = float(loss.detach())
        return seconds


# --- contenders -----------------------------------------------------------------------------------


def _shardkit(model: GPT) -> nn.Module:
    mesh = shardkit.init_device_mesh("xla", (xr.global_runtime_device_count(),))
    for block in model.blocks:
        shardkit.fully_shard(block, mesh)
    sharded: nn.Module = shardkit.fully_shard(model, mesh)
    return sharded


def spmd_shardkit(shape: GPTShape) -> Contender:
    """`shardkit.fully_shard` in SPMD mode."""
    num = xr.global_runtime_device_count()
    return Contender(_shardkit, shape, num_ranks=num, rank=0, sync=torch_xla.sync)


def spmd_torch_xla(shape: GPTShape) -> Contender:
    """`SpmdFullyShardedDataParallel`, of every block and of the model."""
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
        SpmdFullyShardedDataParallel,
    )

    num = xr.global_runtime_device_count()
    mesh = xs.Mesh(list(range(num)), (num,), ("fsdp",))

    def shard_output(output: Any, mesh: xs.Mesh) -> None:
        if output.ndim:  # The loss has no dim that could be split.
            xs.mark_sharding(output, mesh, ("fsdp", *(None for _ in output.shape[1:])))

    def make(model: GPT) -> nn.Module:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = SpmdFullyShardedDataParallel(
                block, mesh=mesh, shard_output=shard_output
            )
        return SpmdFullyShardedDataParallel(model, mesh=mesh, shard_output=shard_output)

    contender = Contender(make, shape, num_ranks=num, rank=0, sync=torch_xla.sync)
    contender.mark = lambda part: xs.mark_sharding(part, mesh, ("fsdp", None))
    return contender


def _replica(make: Callable[[GPT], Any], shape: GPTShape) -> Contender:
    from shardkit.backends.xla.replica import run_graph

    return Contender(make, shape, num_ranks=1, rank=xr.global_ordinal(), sync=run_graph)


def replica_shardkit(shape: GPTShape) -> Contender:
    """`shardkit.fully_shard` under ``torch_xla.launch``."""
    return _replica(_shardkit, shape)


def _xla_fsdp(shape: GPTShape, *, flatten_parameters: bool) -> Contender:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    # With pinned layouts it would gather by all-reduce, which moves twice as much.
    options = {"pin_layout_in_collective_ops": False, "flatten_parameters": flatten_parameters}

    def make(model: GPT) -> nn.Module:
        with _seeding:  # It runs graphs, which threads on the CPU must not do at once.
            for i, block in enumerate(model.blocks):
                model.blocks[i] = XlaFullyShardedDataParallel(block, **options)
            return XlaFullyShardedDataParallel(model, **options)

    return _replica(make, shape)


def replica_torch_xla(shape: GPTShape) -> Contender:
    """`XlaFullyShardedDataParallel`, of every block and of the model."""
    return _xla_fsdp(shape, flatten_parameters=False)


def replica_torch_xla_flat(shape: GPTShape) -> Contender:
    """The same with ``flatten_parameters=True``."""
    return _xla_fsdp(shape, flatten_parameters=True)


# --- protocol -------------------------------------------------------------------------------------

_command: Any = None
_told: threading.Barrier | None = None


def _serve(name: str, address: str, shape: GPTShape, *, is_first: bool) -> None:
    """Take steps on request: receive a number of steps, send seconds; None asks for the loss."""
    global _command  # noqa: PLW0603 - the first thread's command to the others
    contender: Contender = globals()[name](shape)
    with Client(address) if is_first else threading.Lock() as connection:
        while True:
            if is_first:
                _command = connection.recv()
            if _told is not None:
                _told.wait()
            command = _command
            if _told is not None:
                _told.wait()
            if command == "end":
                return
            answer: Any = contender.loss
            if command is not None:
                answer = [contender.step() for _ in range(command)]
            if is_first:
                connection.send(answer)


def _serve_replica(index: int, name: str, address: str, shape: GPTShape) -> None:
    global _told  # noqa: PLW0603 - one for all threads
    with _seeding:
        _told = _told or threading.Barrier(xr.addressable_device_count())
    torch.set_num_threads(1)
    _serve(name, address, shape, is_first=index == 0)


def main(name: str, address: str, sizes: str) -> None:
    """Serve until the end is requested."""
    shape = GPTShape(**json.loads(sizes))
    if name.startswith("replica"):
        torch_xla.launch(_serve_replica, args=(name, address, shape))
        return
    torch.set_num_threads(1)
    xr.use_spmd()
    _serve(name, address, shape, is_first=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
