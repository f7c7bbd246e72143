"""Every wait, fence, kept reference and order of the accelerator's path, taken away one at a time.

The source names what orders, by a comment: ``# order: gathers wait for slots' readers``. A mutation
takes the statement of that name away, or puts another in its place. `mutated` gives the function of
that statement the code of the changed source; then some scenario must complain.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
import textwrap
import types
import typing

from scenarios import complaints

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

TAG = re.compile(r"# order: (.+)")
"""Names a statement: at its end, or on the line above it."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One defect."""

    module: str  # Below ``shardkit``.
    name: str  # Of the statement in its source that is taken away.
    scenario: str  # Which complains.
    options: tuple[str, ...] = ()  # Of the simulation.
    # What stands there instead; of a statement with a body, instead of the lines before it.
    new: str = "pass"

    def __str__(self) -> str:
        """Return a test's name."""
        return f"{self.module}: {self.name} [{self.scenario}]"

    @property
    def simulation_options(self) -> dict[str, bool]:
        """Return what `simulation.simulation` takes."""
        return {
            "batches": False,
            "keeps_memory": "older_torch" not in self.options,
            "has_host_engine": "no_host_engine" not in self.options,
        }


STREAMS = "backends.accelerator"
RUNTIME = "_runtime.runtime"
OLDER = ("older_torch",)

MUTATIONS = (
    # --- gathers ---
    Mutation(STREAMS, "gathers wait for slots' readers", "zero3"),
    Mutation(STREAMS, "gathers wait for writes to shards", "by_hand"),
    Mutation(STREAMS, "gathers wait for the optimizer's event", "optimizer_event"),
    Mutation(
        RUNTIME,
        "compute waits for the optimizer's event where it reads shards",
        "optimizer_event_of_replicas",
    ),
    Mutation(STREAMS, "compute waits for the gather", "zero3"),
    Mutation(STREAMS, "the host waits for the last copy from its shards", "offload"),
    Mutation(STREAMS, "the host waits for copies of offloaded shards", "offload"),
    Mutation(STREAMS, "gathers run on their own stream", "zero3", new="if True:"),
    # --- captured steps ---
    Mutation(STREAMS, "all streams join a capture", "captured"),
    Mutation(RUNTIME, "all streams join compute before a capture ends", "captured"),
    Mutation(RUNTIME, "a capture uses no slots of before it", "captured"),
    Mutation(RUNTIME, "a capture gathers anew what was gathered before it", "captured"),
    Mutation(RUNTIME, "a capture uses no parts that were kept before it", "captured_kept_parts"),
    Mutation(RUNTIME, "a capture comes after the optimizer's event", "captured_on_a_users_stream"),
    Mutation(
        STREAMS,
        "a capture does not wait for streams of a dropped model",
        "captured_beside_a_dropped_model",
    ),
    # --- reductions ---
    Mutation(STREAMS, "reductions wait for compute", "zero3"),
    Mutation(STREAMS, "a stream waits for the one before it", "hybrid"),
    Mutation(STREAMS, "a stream waits for the one before it", "hook_on_a_stream"),
    Mutation(STREAMS, "compute waits for the results", "zero3"),
    Mutation(
        STREAMS,
        "compute waits for every stream that results end on",
        "hybrid",
        new="events = [stream.record_event() for stream in dict.fromkeys(ends)][:1]",
    ),
    Mutation(
        STREAMS,
        "send buffers wait for the reduce-scatter",
        "zero3",
        new="ends = [self._gather, *(self._start_one(each, handle, of) for each in prepared)]",
    ),
    Mutation(STREAMS, "the host waits for offloaded results", "offload"),
    Mutation(STREAMS, "memory lives until compute waits for the results", "hybrid"),
    Mutation(STREAMS, "earlier sums live until they are added", "partial_sums"),
    Mutation(
        STREAMS,
        "a result lives until it is copied to the host",
        "offload",
        new="result = self._device.empty(reduction.out_numel, reduction.out_dtype)",
    ),
    Mutation(
        STREAMS,
        "a sum over the shard axis lives until it is all-reduced",
        "hybrid",
        new="into = self._device.empty(reduction.out_numel, reduction.send.dtype)",
    ),
    Mutation(STREAMS, "after an error compute waits for what was issued", "recovery"),
    Mutation(STREAMS, "compute waits for the last use of send buffers", "zero3", OLDER),
    Mutation(STREAMS, "compute waits for a slot's last use", "kept_slots"),
    Mutation(STREAMS, "compute waits for all streams", "recovery"),
    Mutation(
        STREAMS, "compute waits for hooks' streams when it waits for all", "recovery_on_a_stream"
    ),
    # --- comparisons ---
    Mutation(STREAMS, "the host waits for compared numbers", "zero3", ("no_host_engine",)),
    Mutation(
        STREAMS,
        "numbers lie in memory that the reduce stream allocates",
        "dropped",
        ("no_host_engine",),
        new=(
            "with self._device.on(self._gather):\n"
            "    on_device = self._device.empty(tensor.numel(), tensor.dtype)"
        ),
    ),
    # --- process groups ---
    Mutation(
        "backends.process_group", "the stream waits for a user's collective", "custom_collectives"
    ),
    # --- the pool of slots ---
    Mutation(
        "_params.memory",
        "whoever writes a slot waits for its last use",
        "zero3",
        new="slot.free_after = None",
    ),
    Mutation(
        "_params.memory",
        "whoever writes kept memory waits for its last use",
        "kept_storage",
        new="kept.free_after = None",
    ),
    Mutation(
        "_params.memory",
        "slots wait for compute to pass",
        "overlapping_backwards",
        new="is_passed = True",
    ),
    Mutation(
        "_params.memory",
        "slots that a collective may use are not freed",
        "overlapping_backwards",
        new="self._passed.clear(); self._waiting.clear()",
    ),
    Mutation(
        "_params.memory",
        "whoever writes resized memory waits for its allocation",
        "zero3",
        OLDER,
        new="return Slot(storage, nbytes, None)",
    ),
    Mutation(
        "_params.memory",
        "whoever writes new memory waits for its allocation",
        "zero3",
        new="return Slot(self._streams.new_storage(nbytes), nbytes, None)",
    ),
    Mutation(
        "_params.memory", "whoever writes a buffer waits for its slot", "zero3", new="return None"
    ),
    # --- gradients ---
    Mutation(
        "_params.flat_store",
        "gradients wait for their slot",
        "kept_slots",
        new="self._send.acquire(pool)",
    ),
    Mutation(
        "_params.gradients",
        "send buffers wait for the reduction",
        "zero3",
        new="each.close_send(pool, pool.fence())",
    ),
    Mutation("_params.gradients", "compute waits until send buffers are free", "zero3", OLDER),
    Mutation(
        "_params.gradients",
        "gradients wait for the reduction",
        "zero3",
        new="outs = started.handle._outs[started.first : last]",
    ),
    Mutation("_params.gradients", "slots are passed once compute has waited", "zero3"),
    # --- the runtime ---
    Mutation(
        "_runtime.runtime",
        "a forward waits for writes to shards",
        "by_hand",
        new="self.gathers._followed = [*self._noted_versions]",
    ),
    Mutation(
        "_runtime.traffic", "gathers wait for writes inside of a forward", "writes_in_forward"
    ),
    Mutation(
        "_runtime.runtime", "after an error compute waits for all streams", "interrupted_gather"
    ),
    Mutation("_runtime.runtime", "a dropped model's memory waits for all streams", "dropped"),
    Mutation(
        "_runtime.backward", "after a backward the host waits for copies", "offload_without_sync"
    ),
    Mutation("_runtime.runtime", "after an error the host waits for copies", "offload_interrupted"),
    Mutation("_runtime.runtime", "after a forward the host waits for copies", "offload"),
    Mutation("_runtime.runtime", "after a reshard the host waits for copies", "offload"),
    Mutation("_runtime.traffic", "compute waits for the gather before its use", "zero3"),
    Mutation("_runtime.runtime", "gathers wait for the optimizer's event", "optimizer_event"),
    # --- groups and buckets ---
    Mutation("_runtime.traffic", "freeing waits for the gather", "skipped"),
    Mutation(
        "_runtime.traffic",
        "a slot's next user waits for the last reader",
        "zero3",
        new="fence = self._noted_fence = "
        "getattr(self, '_noted_fence', None) or self._streams.fence()",
    ),
    Mutation("_runtime.traffic", "gathers wait for kept parts", "kept_parts"),
    # --- reductions ---
    Mutation("_runtime.traffic", "the optimizer waits for all reductions", "zero3"),
    Mutation(
        "_runtime.traffic",
        "a group's reduction waits for its previous one",
        "overlapping_backwards",
    ),
)


@contextlib.contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Run the function in which the named statement stands from the changed source.

    Raises:
        AssertionError: The source has no such name, or twice.
    """
    module = importlib.import_module(f"shardkit.{mutation.module}")
    source = inspect.getsource(module)
    path = _path_to(source, mutation.name)
    code = compile(change(source, mutation), str(module.__file__), "exec")
    found: typing.Any = module
    for name in path:
        code = next(
            each
            for each in code.co_consts
            if isinstance(each, types.CodeType) and each.co_name == name
        )
        found = getattr(found, name)
    function = inspect.unwrap(found)
    saved = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = saved


def _path_to(source: str, name: str) -> list[str]:
    """Return the names of the class and the function in which a named statement stands."""
    line, path = named_statements(source)[name].lineno, []
    node: ast.AST = ast.parse(source)
    while not isinstance(node, ast.FunctionDef):
        node = next(
            each
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.ClassDef | ast.FunctionDef)
            and each.lineno <= line <= typing.cast("int", each.end_lineno)
        )
        path.append(node.name)
    return path


def named_statements(source: str) -> dict[str, ast.stmt]:
    """Return the statements that have a name.

    Raises:
        AssertionError: Two have the same, or a name stands where no statement is.
    """
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    found: dict[str, ast.stmt] = {}
    for number, line in enumerate(source.splitlines(), start=1):
        if tag := TAG.search(line):
            at = number + line.lstrip().startswith("#")
            around = [each for each in statements if at in range(each.lineno, last_line(each) + 1)]
            assert around, f"no statement at {tag[0]!r}"
            assert tag[1] not in found, f"{tag[0]!r} stands there twice"
            found[tag[1]] = max(around, key=lambda each: each.lineno)
    return found


def last_line(statement: ast.stmt) -> int:
    """Return where a statement ends, or where its body begins."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if body else typing.cast("int", statement.end_lineno)


def change(source: str, mutation: Mutation) -> str:
    """Return source with a mutation.

    Raises:
        AssertionError: It has no such name.
    """
    statement = named_statements(source).get(mutation.name)
    assert statement is not None, f"{mutation.module} has no {mutation.name!r}"
    lines = source.splitlines()
    new = textwrap.indent(mutation.new, " " * statement.col_offset)
    lines[statement.lineno - 1 : last_line(statement)] = new.splitlines()
    return "\n".join(lines) + "\n"


def complaints_of(mutation: Mutation) -> list[str]:
    """Return what its scenario finds, in this process."""
    with mutated(mutation):
        try:
            found: list[str] = complaints(mutation.scenario, mutation.simulation_options)
        except (NameError, AttributeError):
            raise  # What the mutation puts in does not fit: nothing was shown.
        except Exception as error:  # noqa: BLE001 - a defect may break anything
            found = [f"{type(error).__name__}: {error}"]
    return found
