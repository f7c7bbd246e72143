"""Every wait, fence, kept reference and order of the accelerator's path, taken away one at a time.

A mutation replaces a piece of source by another. `mutated` imports shardkit anew with it; then some
scenario must complain. `untouched` says of other lines that deal with order why none needs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import sys
import typing

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

_OF_TESTS = (
    "clocks",
    "irregular_steps",
    "models",
    "reference",
    "scenarios",
    "simulated_device",
    "simulation",
    "trainings",
    "users_collectives",
    "watching",
)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One defect.

    Attributes:
        module: Below ``shardkit``.
        old: What stands in its source, once.
        new: What stands there instead.
        scenario: Which complains.
        options: Of the simulation.
    """

    module: str
    old: str
    new: str
    scenario: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Say where it is, for a test's name."""
        return f"{self.module}: {self.old.strip().splitlines()[0]} [{self.scenario}]"

    @property
    def simulation_options(self) -> dict[str, bool]:
        """Return what `simulation.simulation` takes."""
        return {
            "batches": False,
            "keeps_memory": "older_torch" not in self.options,
            "has_host_engine": "no_host_engine" not in self.options,
        }


STREAMS = "backends.accelerator_streams"
OLDER = ("older_torch",)

MUTATIONS = (
    # --- gathers ---
    Mutation(
        STREAMS,
        "            if event is not None:\n                self._device.wait(self._gather, event)",
        "            pass",
        "zero3",
    ),
    Mutation(
        STREAMS,
        "        self._device.wait(self._gather, self.fence())",
        "        pass",
        "by_hand",
    ),
    Mutation(
        STREAMS,
        "        self._device.wait(self._gather, event)\n\n    def join",
        "        pass\n\n    def join",
        "optimizer_event",
    ),
    Mutation(
        STREAMS,
        "        self._device.wait(self._device.current_stream(), self._event)",
        "        pass",
        "zero3",
    ),
    Mutation(STREAMS, "            self._host_read = event", "            pass", "offload"),
    Mutation(
        STREAMS,
        "        if event is not None:\n            self._device.synchronize(event)\n\n    # --- coll",
        "        pass\n\n    # --- coll",
        "offload",
    ),
    Mutation(
        STREAMS,
        "        with self._device.on(self._gather):\n            for gather",
        "        if True:\n            for gather",
        "zero3",
    ),
    # --- reductions ---
    Mutation(
        STREAMS,
        "        self._device.wait(self._reduce, self.fence())\n        try",
        "        try",
        "zero3",
    ),
    Mutation(
        STREAMS,
        "        self._device.wait(stream, self._device.record(before))\n",
        "",
        "hybrid",
    ),
    Mutation(
        STREAMS,
        "        self._device.wait(stream, self._device.record(before))\n",
        "",
        "hook_on_a_stream",
    ),
    Mutation(
        STREAMS,
        "        for event in self._ends:\n            self._device.wait(stream, event)\n",
        "        for event in self._ends:\n",
        "zero3",
    ),
    Mutation(
        STREAMS,
        "        events = [self._device.record(stream) for stream in dict.fromkeys(ends)]",
        "        events = [self._device.record(stream) for stream in dict.fromkeys(ends)][:1]",
        "hybrid",
    ),
    Mutation(
        STREAMS,
        "            ends = [self._reduce, *",
        "            ends = [self._gather, *",
        "zero3",
    ),
    Mutation(
        STREAMS,
        "            if self._is_on_host:\n                self._device.synchronize(event)\n",
        "",
        "offload",
    ),
    Mutation(
        STREAMS,
        "        self._kept.append(tensor)\n",
        "",
        "hybrid",
    ),
    Mutation(
        STREAMS, "            handle.keep(reduction.carry)", "            pass", "partial_sums"
    ),
    Mutation(
        STREAMS,
        "            result = handle.keep(self._device.empty(reduction.out_numel, reduction.out_dtype))",
        "            result = self._device.empty(reduction.out_numel, reduction.out_dtype)",
        "offload",
    ),
    Mutation(
        STREAMS,
        "            into = handle.keep(self._device.empty(reduction.out_numel, reduction.send.dtype))",
        "            into = self._device.empty(reduction.out_numel, reduction.send.dtype)",
        "hybrid",
    ),
    Mutation(
        STREAMS,
        "            self.join()  # What was issued still writes memory that nobody will wait for.",
        "            pass",
        "recovery",
    ),
    Mutation(
        STREAMS,
        "        self._device.wait(self._device.current_stream(), self.fence)",
        "        pass",
        "zero3",
        OLDER,
    ),
    Mutation(
        STREAMS,
        "            self._device.wait(self._device.current_stream(), fence)",
        "            pass",
        "kept_slots",
    ),
    Mutation(
        STREAMS,
        "            self._device.wait(compute, self._device.record(stream))",
        "            pass",
        "recovery",
    ),
    Mutation(
        STREAMS,
        "                self._hook_streams.setdefault(reduction.hook_stream)\n",
        "",
        "recovery_on_a_stream",
    ),
    # --- comparisons ---
    Mutation(
        STREAMS,
        "        self._device.synchronize(self._event)\n",
        "",
        "zero3",
        ("no_host_engine",),
    ),
    Mutation(
        STREAMS,
        "            on_device = self._device.empty(tensor.numel(), tensor.dtype)\n            on_device.copy_",
        "            with self._device.on(self._gather):\n                on_device = self._device.empty(tensor.numel(), tensor.dtype)\n            on_device.copy_",
        "dropped",
        ("no_host_engine",),
    ),
    # --- process groups ---
    Mutation(
        "backends.process_group",
        "        if self.work is not None and not async_op:\n            self.work.wait()\n",
        "",
        "custom_collectives",
    ),
    # --- the pool of slots ---
    Mutation(
        "_params.memory",
        "        slot.free_after = fence\n",
        "        slot.free_after = None\n",
        "zero3",
    ),
    Mutation(
        "_params.memory",
        "        slot.is_passed = by_compute or fence is None",
        "        slot.is_passed = True",
        "overlapping_backwards",
    ),
    Mutation(
        "_params.memory",
        "        self._free = [slot for slot in self._free if not slot.is_passed]",
        "        self._free.clear()",
        "overlapping_backwards",
    ),
    Mutation(
        "_params.memory",
        "            return Slot(storage, nbytes, self._streams.fence())",
        "            return Slot(storage, nbytes, None)",
        "zero3",
        OLDER,
    ),
    Mutation(
        "_params.memory",
        "            return Slot(self._streams.new_storage(nbytes), nbytes, self._streams.fence())",
        "            return Slot(self._streams.new_storage(nbytes), nbytes, None)",
        "zero3",
    ),
    Mutation(
        "_params.memory",
        "        return self._slot.free_after",
        "        return None",
        "zero3",
    ),
    # --- gradients ---
    Mutation(
        "_params.send_buffer",
        "            streams.wait_fence(self._send.acquire(pool))\n            self._has",
        "            self._send.acquire(pool)\n            self._has",
        "kept_slots",
    ),
    Mutation(
        "_params.gradients",
        "            each.close_send(pool, handle.fence)",
        "            each.close_send(pool, pool.fence())",
        "zero3",
    ),
    Mutation(
        "_params.gradients",
        "                started.handle.wait_sent()\n",
        "",
        "zero3",
        OLDER,
    ),
    Mutation(
        "_params.gradients",
        "            outs = started.handle.wait()[started.first : last]",
        "            outs = started.handle._outs[started.first : last]",
        "zero3",
    ),
    Mutation(
        "_params.gradients",
        "            pool.passed(started.handle.fence)\n            for each",
        "            for each",
        "zero3",
    ),
    # --- the runtime ---
    Mutation(
        "_runtime.runtime",
        "        self.gathers.follow_writes(self._noted_versions)\n",
        "        self.gathers._followed = [*self._noted_versions]\n",
        "by_hand",
    ),
    Mutation(
        "_runtime.gathers",
        "        self._follow_late_writes(groups)\n",
        "",
        "writes_in_forward",
    ),
    Mutation(
        "_runtime.runtime",
        "        self.streams.join()  # Memory is about to be given back that collectives may still use.\n",
        "",
        "interrupted_gather",
    ),
    Mutation(
        "_runtime.runtime", "                streams.join()\n", "                pass\n", "dropped"
    ),
    Mutation(
        "_runtime.backward",
        "        self._gathers.trim()\n        self._gathers.settle_host_reads()",
        "        self._gathers.trim()",
        "offload_without_sync",
    ),
    Mutation(
        "_runtime.runtime",
        "        self.used.reset()\n        self.gathers.settle_host_reads()",
        "        self.used.reset()",
        "offload_interrupted",
    ),
    Mutation(
        "_runtime.runtime",
        "        self.gathers.carry_out(self.schedule.end_pass(needs_backward=needs_backward))\n        self.gathers.settle_host_reads()",
        "        self.gathers.carry_out(self.schedule.end_pass(needs_backward=needs_backward))",
        "offload",
    ),
    Mutation(
        "_runtime.runtime",
        "        self.gathers.carry_out(self.schedule.reshard(group.index))\n        self.gathers.settle_host_reads()",
        "        self.gathers.carry_out(self.schedule.reshard(group.index))",
        "offload",
    ),
    Mutation(
        "_runtime.gathers",
        "                self.wait(group)\n            elif",
        "                pass\n            elif",
        "zero3",
    ),
    Mutation(
        "_runtime.runtime",
        "            self.streams.after_optimizer(event)",
        "            pass",
        "optimizer_event",
    ),
    # --- groups and buckets ---
    Mutation(
        "_runtime.gathers",
        "        self.wait(group)\n        group.show(unsharded=False)\n        axis",
        "        group.show(unsharded=False)\n        axis",
        "skipped",
    ),
    Mutation(
        "_runtime.gathers",
        "            fence = self._streams.fence()\n            for store",
        "            fence = self._noted_fence = getattr(self, '_noted_fence', None) or self._streams.fence()\n            for store",
        "zero3",
    ),
    Mutation(
        "_runtime.gathers",
        "            fences += [part.fence for part in parts if part is not None]\n",
        "",
        "kept_parts",
    ),
    # --- reductions ---
    Mutation(
        "_runtime.reductions",
        "        self._used.start(self._streams)\n        self.finish_all()",
        "        self._used.start(self._streams)",
        "zero3",
    ),
    Mutation(
        "_runtime.reductions",
        "            self._finish_through(group)\n        many",
        "            pass\n        many",
        "overlapping_backwards",
    ),
)


@contextlib.contextmanager
def mutated(mutation: Mutation | None) -> Iterator[None]:
    """Import shardkit, and the tests' modules over it, anew, with a mutation.

    Raises:
        AssertionError: The source has no such piece, or several.
    """
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}
    finder = _Finder(mutation)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(saved)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("shardkit", *_OF_TESTS)


class _Finder:
    """Finds one module of shardkit with another source."""

    def __init__(self, mutation: Mutation | None) -> None:
        self._mutation = mutation

    def find_spec(
        self, name: str, path: typing.Any = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to load a module; None if it is left as it is."""
        del target
        if self._mutation is None or name != f"shardkit.{self._mutation.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self._mutation)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from changed source, which is never cached."""

    def __init__(self, name: str, path: str, mutation: Mutation) -> None:
        super().__init__(name, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> typing.Any:
        """Compile the changed source."""
        path = self.get_filename(fullname)
        return compile(change(self.get_data(path).decode(), self._mutation), path, "exec")


def change(source: str, mutation: Mutation) -> str:
    """Return source with a mutation.

    Raises:
        AssertionError: It has no such piece, or several.
    """
    count = source.count(mutation.old)
    assert count == 1, f"{mutation.module} has {count} times: {mutation.old!r}"
    return source.replace(mutation.old, mutation.new)


def complaints_of(mutation: Mutation, *, is_applied: bool = True) -> list[str]:
    """Return what its scenario finds, in this process."""
    with mutated(mutation if is_applied else None):
        scenarios = importlib.import_module("scenarios")
        name, options = mutation.scenario, mutation.simulation_options
        try:
            found: list[str] = scenarios.complaints(name, options)
        except Exception as error:  # noqa: BLE001 - a defect may break anything
            found = [f"{type(error).__name__}: {error}"]
    return found
