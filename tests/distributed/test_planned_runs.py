"""What a dry run foretells is what ranks do: collectives, buffers, and the most bytes at once."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import sys
import typing

import pytest
import torch
import torch.distributed as dist
from simulation import simulated
from torch import Tensor, nn

from allocated import Issued, mark, past_shared_memory, peaks_of, start_counting
from planned_runs import (
    CASES,
    EIGHT_RANKS,
    NUM_CHEAP,
    Edge,
    Seen,
    Training,
    edges_of,
    of_memory_and_traffic,
    planned,
    without_frees,
)
from shardkit._compat import torch_tensors
from shardkit._events import StepEvent, StepObserver, observed_by
from shardkit.planning._meter import MemoryMeter
from shardkit.planning._recurrent import recurrent_layers

if typing.TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

    from workers import Spawn


class CountedRun(Training):
    """A rank whose memory is counted."""

    def __init__(self, name: str) -> None:
        start_counting()
        self.before = max(peaks_of(lambda: None))
        super().__init__(CASES[name])

    def told(self) -> tuple[list[Edge], list[int]]:
        """Make a step, and return what was told in it, and the most bytes between two edges."""
        events: list[StepEvent] = []

        def clock() -> float:
            mark()
            return 0.0

        def step() -> None:
            with observed_by(StepObserver(events.append, clock)):
                self.step()

        peaks = [peak - self.before for peak in peaks_of(step)]
        edges = edges_of(events)
        return edges, without_frees(edges, peaks)


@past_shared_memory()
def run_case(name: str) -> Seen:
    """Count the memory of the third step to the sixth, and the collectives of the seventh.

    Gloo's thread may let go of what was sent a moment late: not in all steps at the same place.
    """
    run = CountedRun(name)
    edges, peaks = run.told()
    for _ in range(3):
        again, of_step = run.told()
        assert edges == again
        peaks = list(map(min, peaks, of_step))
    with Issued() as issued:
        run.step()
    return Seen(issued.found, edges, peaks)


_ROOMS = ("_runtime/", "_params/", "backends/")
_BUFFER_NBYTES = 2**20


@functools.cache
def _place(code: types.CodeType) -> str:
    """Return where a function of the runtime is; empty: it is none."""
    _, _, path = code.co_filename.rpartition("/shardkit/")
    is_function = path.startswith(_ROOMS) and "<" not in code.co_qualname
    return f"{path}:{code.co_qualname}" if is_function else ""


@contextlib.contextmanager
def _called(enter: Callable[[str], object], leave: Callable[[str], object]) -> Iterator[None]:
    """Tell of calls of functions of the runtime, and of their ends."""

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        if event in {"call", "return"} and (place := _place(frame.f_code)):
            (enter if event == "call" else leave)(place)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def _buffer_in(mutated: str) -> Iterator[list[str]]:
    """Have a function hold memory while it is called; yield what has its name once it was."""
    held: list[Tensor] = []
    calls, has_been = [0], []

    def enter(place: str) -> None:
        if place == mutated:
            calls[0] += 1
            has_been[:] = [place]
            if not held:
                held.append(torch.empty(_BUFFER_NBYTES, dtype=torch.uint8))

    def leave(place: str) -> None:
        if place == mutated:
            calls[0] -= 1
            if not calls[0]:
                held.clear()

    with _called(enter, leave):
        yield has_been


@past_shared_memory()
def run_with_buffers(name: str, plans: list[list[int]]) -> dict[str, bool]:
    """Say of each function of the runtime that a step calls whether a buffer in it is found."""
    run, plan = CountedRun(name), plans[dist.get_rank()]
    run.step()
    steps = [run.told()[1], run.told()[1]]  # What gloo's thread holds late is in one of them.
    assert too_little(plan, list(map(min, *steps))) == []
    own: dict[str, None] = {}
    with _called(own.setdefault, own.get):
        run.told()
    of_all: list[typing.Any] = [None] * len(plans)
    dist.all_gather_object(of_all, list(own))
    found = {}
    for place in sorted({place for each in of_all for place in each}):
        with _buffer_in(place) as has_been:
            _, peaks = run.told()
        if has_been:
            found[place] = too_little(plan, peaks) != []
    return found


def run_case_on_streams(name: str) -> Seen:
    """The same on a simulated accelerator, whose memory nobody counts."""
    return simulated(_run_uncounted, name)


def _run_uncounted(name: str) -> Seen:
    run, events = Training(CASES[name]), list[StepEvent]()
    with Issued() as issued, observed_by(StepObserver(events.append)):
        run.step()
    return Seen(issued.found, edges_of(events), [])


def _check(name: str, spawn: Spawn) -> None:
    case = CASES[name]
    for rank, real in enumerate(spawn(run_case, math.prod(case.mesh), name, timeout_s=300)):
        plan = planned(case, rank)
        assert plan.collectives == real.collectives
        assert plan.edges == real.edges
        assert max(real.peaks) <= max(plan.peaks) <= 1.03 * max(real.peaks)


_OTHER_NBYTES = 2**18
"""Kernels of the CPU have some scratch memory, and gloo's thread lets go of what it sent later."""


def too_little(planned: list[int], real: list[int]) -> list[tuple[int, int, int]]:
    """Return the stretches of which a plan says too little, with both numbers of bytes."""
    pairs = enumerate(zip(planned, real, strict=True))
    return [(i, plan, found) for i, (plan, found) in pairs if plan + _OTHER_NBYTES < found]


_CHEAP = list(CASES)[:NUM_CHEAP]


@pytest.mark.parametrize("name", _CHEAP)
def test_a_plan_is_what_ranks_do(name: str, spawn: Spawn) -> None:
    _check(name, spawn)


@pytest.mark.eight_ranks
@pytest.mark.parametrize("name", EIGHT_RANKS)
def test_a_plan_is_what_eight_ranks_do(name: str, spawn: Spawn) -> None:
    _check(name, spawn)


_CPU = pathlib.Path("/proc/cpuinfo").read_text()
as_onednn_is_known = pytest.mark.skipif(
    torch.__version__ < (2, 11) or "avx512f" not in _CPU or "amx_tile" in _CPU,
    reason="Measured with AVX-512, without AMX, and not with oneDNN 3.7, which torch 2.10 has.",
)
_OF_ONEDNN = ("recurrent", "images", "channels last")
_MORE = [name for name in CASES if name not in (*_CHEAP, *EIGHT_RANKS, *_OF_ONEDNN)]


@pytest.mark.helpers
@pytest.mark.parametrize(
    "name", [*_MORE, *(pytest.param(name, marks=as_onednn_is_known) for name in _OF_ONEDNN)]
)
def test_a_plan_is_what_ranks_do_in_more_cases(name: str, spawn: Spawn) -> None:
    _check(name, spawn)


# --- recurrent layers ---

_WIDE = (20, 64, 64, 128)  # Length, rows, inputs, size of the state.
RECURRENT: dict[str, tuple[type[nn.RNNBase], tuple[int, ...], dict[str, typing.Any]]] = {
    "lstm": (nn.LSTM, _WIDE, {}),
    "lstm of several layers": (nn.LSTM, (50, 8, 32, 64), {"num_layers": 3, "dropout": 0.5}),
    "lstm with rows first": (nn.LSTM, _WIDE, {"batch_first": True}),
    "lstm without biases": (nn.LSTM, _WIDE, {"bias": False}),
    "lstm of both directions": (nn.LSTM, _WIDE, {"bidirectional": True, "num_layers": 2}),
    "lstm of odd sizes": (nn.LSTM, (30, 8, 150, 170), {}),
    "lstm of large weights": (nn.LSTM, (4, 2, 256, 512), {}),
    "lstm in bf16": (nn.LSTM, _WIDE, {"dtype": torch.bfloat16}),
    "lstm of large weights in bf16": (nn.LSTM, (4, 2, 512, 256), {"dtype": torch.bfloat16}),
    "lstm in fp64": (nn.LSTM, _WIDE, {"dtype": torch.float64}),
    "lstm with a projection": (nn.LSTM, _WIDE, {"proj_size": 32}),
    "gru": (nn.GRU, _WIDE, {}),
    "gru of several layers": (nn.GRU, _WIDE, {"num_layers": 2, "bidirectional": True}),
    "rnn": (nn.RNN, _WIDE, {}),
    "rnn of both directions": (nn.RNN, _WIDE, {"nonlinearity": "relu", "bidirectional": True}),
}


def _layer_and_batch(name: str) -> tuple[nn.RNNBase, Tensor]:
    cls, (length, rows, size, hidden), options = RECURRENT[name]
    shape = (rows, length, size) if options.get("batch_first") else (length, rows, size)
    layer = cls(size, hidden, **options)
    return layer, torch.ones(shape, dtype=layer.all_weights[0][0].dtype, requires_grad=True)


def _step(layer: nn.RNNBase, batch: Tensor) -> None:
    layer(batch)[0].sum().backward()


def peaks_of_layers() -> dict[str, int]:
    """Return the most bytes that live at once in a forward and a backward of each layer."""
    start_counting()
    found = {}
    for name in RECURRENT:
        (before,) = peaks_of(lambda: None)
        layer, batch = _layer_and_batch(name)
        _step(layer, batch)  # The first time oneDNN compiles.
        layer.zero_grad()
        batch.grad = None
        (peak,) = peaks_of(functools.partial(_step, layer, batch))
        found[name] = peak - before
        del layer, batch
    return found


@pytest.mark.helpers
@as_onednn_is_known
def test_recurrent_layers_take_as_much_as_planned(spawn: Spawn) -> None:
    real = spawn(peaks_of_layers, 1)[0]
    for name, peak in real.items():
        layer, batch = _layer_and_batch(name)
        meter, batch = MemoryMeter(on_cpu=True), batch.detach().to("meta").requires_grad_()
        with meter, recurrent_layers():
            for tensor in (batch, *layer.to("meta").parameters()):
                meter.note(tensor)
            _step(layer, batch)
        assert peak <= max(meter.totals()) <= 1.03 * peak, name


_PLACES = {
    "_params/flat_store.py:SendBuffer.write",
    "_params/memory.py:SlotPool.acquire",
    "_runtime/agreement.py:UsedParameters.finish",
    "_runtime/backward.py:Backward.exit_backward",
    "_runtime/runtime.py:Runtime.enter_forward",
    "_runtime/traffic.py:Gathers._wait",
    "backends/gloo.py:Exchange.finish",
    "backends/process_group.py:WorkHandle.wait",
}
"""Some of the functions that every step calls."""
_UNSEEN = {"_runtime/agreement.py:note_step"}
"""The optimizer's temporaries are gone when it runs, and no edge lies between."""


needs_swap = pytest.mark.skipif(
    not torch_tensors.HAS_STORAGE_SWAP,
    reason="Torch before 2.12 resizes storages, which a plan sees an event later than ranks do.",
)


@needs_swap
@pytest.mark.helpers
def test_a_buffer_in_any_function_of_the_runtime_is_found(spawn: Spawn) -> None:
    plans = [planned(CASES["few experts"], rank).peaks for rank in range(2)]
    for found in spawn(run_with_buffers, 2, "few experts", plans, timeout_s=600):
        assert len(found) > 200
        assert _PLACES - found.keys() == set()
        assert {place for place, is_found in found.items() if not is_found} <= _UNSEEN


@needs_swap
@pytest.mark.streams
@pytest.mark.parametrize("name", ["bf16", "hybrid", "accumulation"])
def test_a_plan_for_an_accelerator_is_what_its_ranks_do(name: str, spawn: Spawn) -> None:
    case = CASES[name]
    for rank, real in enumerate(
        spawn(run_case_on_streams, math.prod(case.mesh), name, timeout_s=300)
    ):
        plan = planned(case, rank, "cuda")
        assert plan.collectives == real.collectives
        assert of_memory_and_traffic(plan.edges) == of_memory_and_traffic(real.edges)
