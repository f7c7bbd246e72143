"""The ranks of a case on replicas of `torch_xla.launch`, each a thread of one process.

`main` is what the processes of `replica_pool` run: each replica calls what that sends, and sends
back what the calls returned or raised.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import multiprocessing.connection
import pickle
import threading
import traceback
import typing

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from xla_graphs import num_compiles
from xla_ranks import finish_graph, on_xla

import models
from parity import Ranks
from reference import AXES
from shardkit import DeviceMesh, init_device_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from models import Case

MOST_SECONDS = 200  # A call that hangs ends the process, with the stacks of its threads.
_lock = threading.Lock()  # torch's generator and settings are those of the whole process


class ReplicaRanks(Ranks):
    """`Ranks` of which this thread is one.

    Args:
        mesh_shape: By default all replicas are shards.
    """

    mesh: DeviceMesh

    def __init__(self, mesh_shape: tuple[int, ...] | None = None) -> None:
        shape = mesh_shape or (xr.world_size(),)
        super().__init__(init_device_mesh("xla", shape, mesh_dim_names=AXES[-len(shape) :]))
        self.compiles: list[int] = []

    @property
    def world_size(self) -> int:
        return self.mesh.size()

    def make(self, case: Case) -> nn.Module:
        return case.make()  # By `_seeded`. A seed set here would change what others draw meanwhile.

    def put(self, plain: nn.Module) -> typing.Any:
        with _lock:
            return on_xla(plain)

    def send(self, by_rank: Sequence[Tensor]) -> Tensor:
        return self.send_loss(by_rank).to(torch_xla.device())

    def mean(self, loss: Tensor) -> Tensor:
        total = loss.detach()
        if self.world_size > 1:
            total = xm.all_reduce(xm.REDUCE_SUM, total, pin_layout=False)
        finish_graph()
        return total.cpu().double() / self.world_size

    def send_loss(self, by_rank: Sequence[Tensor]) -> Tensor:
        return by_rank[self.mesh.get_rank()]

    def end_step(self) -> None:
        """Run what was traced; note how often something has been compiled so far."""
        finish_graph()
        self.compiles.append(num_compiles())


def run_on_replica(
    mesh_shape: tuple[int, ...], case: Callable[..., typing.Any], *args: typing.Any
) -> typing.Any:
    """Run a case on this replica; its last step compiles nothing."""
    ranks = ReplicaRanks(mesh_shape)
    found = case(ranks, *args)
    assert len(ranks.compiles) > 2, "of fewer steps the last one compiles something"
    assert ranks.compiles[-1] == ranks.compiles[-2], "the last step compiled something"
    return found


# --- the process ----------------------------------------------------------------------------------


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model as all replicas make it, although they draw from one generator."""
    with _lock:
        torch.manual_seed(0)
        return make()


class _Meeting:
    """Where the replicas of this process meet before and after each call."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(xr.addressable_device_count())
        self.call: bytes | None = None
        self.outcomes: dict[int, tuple[bool, typing.Any]] = {}


@functools.cache
def _the_meeting() -> _Meeting:
    for name, case in models.CASES.items():
        make = functools.partial(_seeded, case.make)
        models.CASES[name] = dataclasses.replace(case, make=make)
    return _Meeting()


def serve(index: int, address: str) -> None:
    """Answer calls until the other end closes: what a replica does."""
    with _lock:
        meeting = _the_meeting()
    torch.set_num_threads(1)
    connection = None
    if index == 0:
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)  # If nobody calls.
        with multiprocessing.connection.Listener(address) as listener:
            connection = listener.accept()
        faulthandler.cancel_dump_traceback_later()
    while True:
        if connection is not None:
            try:
                meeting.call = connection.recv_bytes()
            except EOFError:
                meeting.call = None
            meeting.outcomes = {}
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        meeting.barrier.wait()
        if meeting.call is None:
            faulthandler.cancel_dump_traceback_later()
            return
        meeting.outcomes[index] = _outcome(meeting.call)
        meeting.barrier.wait()
        faulthandler.cancel_dump_traceback_later()
        if connection is not None:
            connection.send_bytes(
                pickle.dumps([meeting.outcomes[i] for i in sorted(meeting.outcomes)])
            )


def _outcome(call: bytes) -> tuple[bool, typing.Any]:
    """Return whether a call returned, and what, or its traceback."""
    try:
        fn, args = pickle.loads(call)
        return True, fn(*args)
    except BaseException:  # noqa: BLE001 - the other end judges
        traceback.print_exc()  # The others may end the process, for they wait in vain.
        return False, traceback.format_exc()


def main(address: str) -> None:
    torch_xla.launch(serve, args=(address,))
