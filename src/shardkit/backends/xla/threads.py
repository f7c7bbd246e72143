"""Running the graphs of replicas, which are threads of one process on the CPU."""

from __future__ import annotations

import threading

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from shardkit._errors import StateError

_WAIT_SECONDS = 300

_lock = threading.Lock()
_gate: threading.Barrier | None = None


def run_graph() -> None:
    """Run what this replica has traced; wherever graphs hold collectives, call it on all replicas.

    On the CPU replicas are threads, whose collectives meet only if they come from one compiled
    program: so one thread compiles, the others find it, and nobody traces meanwhile.

    Raises:
        StateError: On the CPU: another replica did not come.
    """
    num_threads = xr.addressable_device_count()
    if xr.device_type() != "CPU" or num_threads == 1 or xr.world_size() == 1:
        torch_xla.sync()
        return
    gate = _gate_of(num_threads)
    try:
        gate.wait(_WAIT_SECONDS)
        with _lock:
            torch_xla.sync()
        gate.wait(_WAIT_SECONDS)
        xm.wait_device_ops()
        gate.wait(_WAIT_SECONDS)
    except threading.BrokenBarrierError as error:
        msg = (
            f"another replica has not come to run its graph within {_WAIT_SECONDS} s, or has "
            f"failed there: look for its error. All replicas must take the same steps."
        )
        raise StateError(msg) from error
    except BaseException:
        gate.abort()  # The others would wait in vain.
        raise


def _gate_of(num_threads: int) -> threading.Barrier:
    global _gate  # noqa: PLW0603 - one for all threads
    with _lock:
        if _gate is None or _gate.broken:
            _gate = threading.Barrier(num_threads)
        return _gate
