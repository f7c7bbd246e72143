"""Whole steps as graphs: a step runs a few times, is captured once, and then replayed."""

from __future__ import annotations

import contextlib
import itertools
import operator
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from shardkit._compat import torch_tensors
from shardkit._errors import ShardkitError, StateError
from shardkit._module.hooks import ModuleState, get_state, groups_in
from shardkit._params.state_dicts import map_leaves
from shardkit._settings import as_number, watch_settings
from shardkit._tree import iter_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardkit._runtime.group import ParamGroup
    from shardkit._runtime.runtime import Runtime
    from shardkit.backends.graphs import StreamGraph

P = ParamSpec("P")
R = TypeVar("R")

_LEAST_WARM_UP = 2
"""The first pass learns the order of groups, and the first step makes an optimizer's state."""


# --- what a graph takes for granted ---------------------------------------------------------------


class _Shape(NamedTuple):
    """What all inputs at one position have in common."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _shape_of(tensor: Tensor) -> Any:
    return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


_ANEW = "Put it back, or capture the step anew: shardkit.capture(step, model)."


def _differs(step: str, of: str, then: object, now: object, remedy: str = _ANEW) -> StateError:
    """Return an error: the graph was captured with `then`, and a step would find `now`."""
    return StateError(
        f"{step} was captured where {of} was {then}, and now it is {now}: a replay would not do "
        f"what the step does. {remedy}"
    )


def _modes(device_type: str) -> SimpleNamespace:
    """Return the modes of torch that change what operators do."""
    autocast = torch.is_autocast_enabled(device_type)
    return SimpleNamespace(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=torch.get_autocast_dtype(device_type) if autocast else None,
    )


class _Inputs:
    """The tensors that a graph reads, at fixed addresses."""

    def __init__(self, step: str, given: tuple[Any, ...], device: torch.device) -> None:
        self._step = step
        tensors = _tensors_in(given)
        _refuse_hidden(step, "an argument", given)
        for index, tensor in enumerate(tensors):
            if type(tensor) is not Tensor or tensor.requires_grad:
                kind = "one that requires a gradient" if tensor.requires_grad else type(tensor)
                msg = (
                    f"input {index} of {step} is {kind}: expected plain tensors without gradients, "
                    f"which are copied to fixed places. Pass data only, and use the rest by name."
                )
                raise StateError(msg)
            if tensor.device.type != device.type:
                msg = (
                    f"input {index} of {step} is on {tensor.device}, and the model on {device}: a "
                    f"graph copies nothing from the host. Pass "
                    f"tensor.to({device.type!r}, non_blocking=True)."
                )
                raise StateError(msg)
        self.tree = map_tensors(torch.clone, given)
        self._tensors = _tensors_in(self.tree)
        # Its containers are copies: code may change a list in place.
        shapes = map_tensors(_shape_of, given)
        self._skeleton = map_leaves(shapes, lambda e: set(e) if isinstance(e, set) else e)

    def fill(self, given: tuple[Any, ...]) -> None:
        """Copy new values to the same places; raise if shapes or other arguments differ."""
        skeleton = map_tensors(_shape_of, given)
        tensors = _tensors_in(given)
        if not _equal(skeleton, self._skeleton):
            shapes = (map(_shape_of, each) for each in (self._tensors, tensors))
            for index, (then, now) in enumerate(itertools.zip_longest(*shapes)):
                if then != now:
                    remedy = (
                        "Make all batches alike (drop_last=True, padding), or call the step itself "
                        "for the others."
                    )
                    raise _differs(self._step, f"input {index}", then, now, remedy)
            raise _differs(self._step, "the arguments", self._skeleton, skeleton)
        for static, tensor in zip(self._tensors, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)


def _tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors that `map_tensors` replaces."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def _refuse_hidden(step: str, what: str, tree: Any) -> None:
    """Raise if there are tensors where `map_tensors` does not replace them."""
    if len(_tensors_in(tree)) < sum(1 for _ in iter_tensors(tree)):
        msg = (
            f"{what} of {step} is an object with tensors in it, which are not copied to other "
            f"places: expected tensors in lists, tuples, dicts or dataclasses."
        )
        raise StateError(msg)


def _equal(a: Any, b: Any) -> bool:
    """Whether two trees are equal; objects that cannot be compared are equal only to themselves."""
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        return False


class _Facts:
    """Attributes of objects of one class that a step reads on the host.

    Args:
        owners: Names of the objects, and the objects.
        names: Names of the attributes, two or more, with dots between.
    """

    def __init__(self, owners: Iterable[tuple[str, Any]], *names: str) -> None:
        self._of, self._owners = zip(*owners, strict=True)
        self._names = names
        self._get = operator.attrgetter(*names)
        self._values = [*map(self._get, self._owners)]

    def check(self, step: str) -> None:
        """Raise if an attribute has changed."""
        if [*map(self._get, self._owners)] == self._values:
            return
        for of, owner, values in zip(self._of, self._owners, self._values, strict=True):
            for name, then, now in zip(self._names, values, self._get(owner), strict=True):
                if then != now:
                    what = f"{name.rpartition('.')[2]!r} of {of}"
                    raise _differs(step, what, _shown(then), _shown(now))


def _shown(value: Any) -> str:
    is_short = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if is_short else f"{type(value).__name__} {id(value):#x}"


def _facts_of(settings: Sequence[tuple[str, Any]]) -> _Facts:
    """Return the facts of users' settings, which are dataclasses of one class."""
    return _Facts(settings, *(field.name for field in fields(settings[0][1])))


_piece_of: Callable[[Any], Any] = operator.attrgetter("param.local_piece")
_gradient_of: Callable[[Any], Any] = operator.attrgetter("param.grad")


class _Frozen:
    """Values that a captured step has read on the host."""

    def __init__(self, step: str, roots: Sequence[ModuleState]) -> None:
        self._step = step
        self._runtimes: list[Any] = [state.runtime for state in roots]  # They have run.
        groups = [group for runtime in self._runtimes for group in runtime.groups]
        self._entries = [e for group in groups for bucket in group.buckets for e in bucket.entries]
        self._pieces = [*map(_piece_of, self._entries)]
        modules = dict.fromkeys(m for state in roots for m in state.module.modules())
        self._facts = [
            _Facts([("the root", state) for state in roots], "runtime", "settings"),
            _facts_of([("the root", state.settings) for state in roots]),
            _Facts([(repr(group.name), group) for group in groups], "buckets", "settings"),
            _facts_of([(repr(group.name), group.settings) for group in groups]),
            _facts_of([(repr(group.name), group.settings.comm) for group in groups]),
            _Facts([(repr(e.name), e) for e in self._entries], "param.requires_grad", "name"),
            _Facts(
                [(type(module).__name__, module) for module in modules], "training", "__class__"
            ),
        ]
        self._device_type = groups[0].device.type
        self._modes = _modes(self._device_type)

    def check(self) -> None:
        """Raise if a step would now differ from the captured one."""
        for facts in self._facts:
            facts.check(self._step)
        if not all(map(operator.is_, map(_piece_of, self._entries), self._pieces)):
            pairs = zip(self._entries, self._pieces, strict=True)
            name = next(entry.name for entry, piece in pairs if _piece_of(entry) is not piece)
            raise _differs(self._step, f"the memory of {name!r}", "another one", "this one")
        modes = _modes(self._device_type)
        if modes != self._modes:
            raise _differs(self._step, "a mode of torch", self._modes, modes)
        for runtime in self._runtimes:
            unfinished = runtime.unfinished
            if unfinished is not None:
                raise _cannot(self._step, "replayed", unfinished, _FINISH)
            if not runtime.groups[0].mesh.backend.is_current:
                why = "the process groups of its capture have been destroyed"
                raise _cannot(self._step, "replayed", why, "Build and shard the model anew.")


class _Updates:
    """Optimizers that take a step in the graph, and the settings that the graph holds of them."""

    def __init__(self, step: str, device_type: str) -> None:
        self._step = step
        self._device_type = device_type
        self._of: dict[Optimizer, tuple[Any, list[dict[str, Any]]]] = {}
        self._loaded: set[Optimizer] = set()

    def note(self, optimizer: Optimizer, *_: Any) -> None:
        """Note an optimizer's step in the capture; meanwhile this is a hook of all optimizers."""
        if optimizer not in self._of:
            self._of[optimizer] = (_state_of(optimizer), self._numbers_of(optimizer))
            optimizer.register_load_state_dict_post_hook(self._loaded.add)

    def check(self) -> None:
        """Raise if a step of an optimizer would now differ from the captured one."""
        for optimizer, (state, groups) in self._of.items():
            name = type(optimizer).__name__
            if optimizer in self._loaded or _state_of(optimizer) is not state:
                what = f"the state of {name}"
                raise _differs(self._step, what, "another one", "one that was loaded")
            num_groups = len(optimizer.param_groups)
            if len(groups) != num_groups:
                raise _differs(
                    self._step, f"the number of groups of {name}", len(groups), num_groups
                )
            for then, now in zip(groups, self._numbers_of(optimizer), strict=True):
                for key, value in now.items():
                    was = then.get(key)
                    # A replay reads tensors of the device again, so their values may change.
                    if was is value or (not isinstance(value, Tensor) and _equal(was, value)):
                        continue
                    remedy = (
                        f"Where {name} takes a tensor of the device for it "
                        f"(lr=torch.tensor(..., device=...), capturable=True), change that in "
                        f"place. Else leave the optimizer's step out of what is captured."
                    )
                    raise _differs(self._step, f"{key!r} of {name}", was, value, remedy)

    def _numbers_of(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Return the current settings, so that a later change in place does not change these."""

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.device.type != self._device_type:
                return leaf.tolist()  # A graph holds the values of the host's tensors.
            return set(leaf) if isinstance(leaf, set) else leaf

        return [
            {key: map_leaves(value, copied) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]


def _state_of(optimizer: Optimizer) -> Any:
    """Return the dict where an optimizer keeps its state; None: it makes one at each request."""
    return vars(optimizer).get("state")


class _Gradients:
    """The gradients of all parameters before and after a step."""

    def __init__(self, step: str, groups: Iterable[ParamGroup]) -> None:
        self._step = step
        self._entries = [e for group in groups for bucket in group.buckets for e in bucket.entries]
        self._are_dropped = False
        self.note_left()

    def note_dropped(self) -> None:
        """Note whether a step empties the gradients that are there when it begins."""
        pairs = zip(self._entries, self._left, strict=True)
        before = [(entry.param.grad, grad) for entry, grad in pairs if grad is not None]
        self._are_dropped = bool(before) and all(now is not grad for now, grad in before)

    def empty(self) -> None:
        """Remove all gradients, before a step that empties them itself or adds to none."""
        for entry in self._entries:
            entry.param.grad = None

    def note_left(self) -> None:
        """Note the gradients that a step has left; in a graph they are at fixed addresses."""
        self._left = self._found = [*map(_gradient_of, self._entries)]

    def check(self) -> None:
        """Raise if a step would add to gradients that were not there at the capture."""
        self._found = [*map(_gradient_of, self._entries)]
        for entry, found, grad in zip(self._entries, self._found, self._left, strict=True):
            if found is None or (found is grad and self._are_dropped):
                continue
            msg = (
                f"{entry.name!r} has a gradient, to which {self._step} would add; the graph was "
                f"captured without one. Call optimizer.zero_grad() before, or in the step."
            )
            raise StateError(msg)

    def show(self) -> None:
        """Set the gradients that a replay has computed, where `check` found others or none."""
        for entry, found, grad in zip(self._entries, self._found, self._left, strict=True):
            if found is not grad:
                entry.param.grad = grad


# --- what cannot be captured ----------------------------------------------------------------------

_FINISH = (
    "Let the step end with a backward that syncs: set_requires_gradient_sync(True), "
    "set_requires_all_reduce(True) and set_is_last_backward(True) before the last micro-batch."
)


def _cannot(step: str, what: str, why: str, remedy: str) -> StateError:
    return StateError(f"{step} cannot be {what}: {why}. {remedy}")


def _refuse(step: str, groups: Iterable[ParamGroup]) -> None:
    """Raise if a step of these groups does something that a graph cannot."""
    for group in groups:
        for bucket in group.buckets:
            if bucket.plan.is_offloaded:
                why = f"{bucket.entries[0].name!r} is offloaded, and the host waits for its copies"
                raise _cannot(step, "captured", why, "Leave offload_policy out of fully_shard.")
        if group.settings.comm_memory:
            why = f"buffers of {group.name!r} are the communication engine's, and not the graph's"
            remedy = "Leave set_allocate_memory_from_process_group_for_comm out."
            raise _cannot(step, "captured", why, remedy)
    if watch_settings.check_gradients:
        why = "each backward notes which gradients are finite, and a replay notes nothing"
        remedy = "Call shardkit.set_watch(check_gradients=False)."
        raise _cannot(step, "captured", why, remedy)


# --- users ----------------------------------------------------------------------------------------


class CapturedStep(Generic[P, R]):
    """A captured step, as `capture` returns it; call it like the step.

    Attributes:
        num_calls: Number of calls that have returned.
    """

    def __init__(self, step: Callable[P, R], models: Sequence[nn.Module], warm_up: int) -> None:
        self.num_calls = 0
        self._step = step
        self._name = getattr(step, "__name__", type(step).__name__)
        self._models = models
        self._warm_up = warm_up
        modules = models if all(isinstance(m, nn.Module) for m in models) else ()
        groups = list(dict.fromkeys(g for m in modules for g in groups_in(m, recurse=True)))
        if not groups:
            msg = (
                f"capture takes a step, here {self._name}, and then the sharded modules that it "
                f"trains, came {[type(model).__name__ for model in models]}. Write "
                f"capture(step, model), after fully_shard."
            )
            raise StateError(msg)
        _refuse(self._name, groups)
        self._device = groups[0].mesh.backend.device
        axes = dict.fromkeys(axis for group in groups for axis in group.axes)
        self._graph: StreamGraph = groups[0].mesh.backend.new_graph(list(axes))
        self._gradients = _Gradients(self._name, groups)
        self._inputs: _Inputs | None = None
        self._runtimes: list[Runtime] = []
        self._checks: list[Callable[[], None]] = []  # Before a replay; none: it is not captured.
        self._written: list[Tensor] = []
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the next call is a replay."""
        return bool(self._checks)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Take a step.

        Args:
            *args: Arguments of the step. Tensors have the shapes, strides, dtypes and device of the
                first call; other arguments are equal to those of the first call.
            **kwargs: Further arguments of the step.

        Returns:
            Result of the step; tensors are copies, without a graph of autograd, in lists, tuples,
            dicts or dataclasses.

        Raises:
            StateError: The step cannot be captured, or a replay would not do what the step does.
            RankMismatchError: Other ranks are about to do something else.

        Cost: that of the step in the first calls. Then the copies of inputs and outputs, the start
        of one graph, and the comparison of the values that the host would read.
        """
        given = (args, kwargs)
        if self._error is not None:
            why = "its capture failed before"
            raise _cannot(self._name, "replayed", why, "Capture it anew.") from self._error
        if self.is_captured:
            self._check()
        if self._inputs is None:
            self._inputs = _Inputs(self._name, given, self._device)
        else:
            self._inputs.fill(given)
        if self.num_calls < self._warm_up:
            result: R = self._run_once()
        else:
            if not self.is_captured:
                self._capture()
            self._graph.replay(self._name)
            self._gradients.show()
            torch.autograd.graph.increment_version(self._written)
            result = map_tensors(torch.clone, self._result)
        self.num_calls += 1
        return result

    def _check(self) -> None:
        for runtime in self._runtimes:
            runtime.tidy_up()
            runtime.streams.note_step()
        with torch_tensors.plain_torch_functions():  # Attributes of subclasses are read faster.
            for check in self._checks:
                check()

    def _call(self) -> Any:
        assert self._inputs is not None
        args, kwargs = self._inputs.tree
        result = self._step(*args, **kwargs)
        _refuse_hidden(self._name, "the result", result)
        return map_tensors(Tensor.detach, result)

    def _run_once(self) -> Any:
        """Take a step on the stream of the capture; note whether it empties gradients."""
        with self._graph.aside():
            self._gradients.note_left()
            result = self._call()
            self._gradients.note_dropped()
            return map_tensors(torch.clone, result)

    def _capture(self) -> None:
        states = [s for m in self._models for each in m.modules() if (s := get_state(each))]
        runtimes = dict.fromkeys(s.runtime for s in states if s.runtime is not None)
        self._runtimes = list(runtimes)
        if not runtimes:
            why = "its first calls ran none of the models that capture got"
            raise _cannot(self._name, "captured", why, "Pass the models that it trains.")
        roots = [s for s in states if s.runtime is not None and s.runtime.settings is s.settings]
        groups = [group for runtime in self._runtimes for group in runtime.groups]
        _refuse(self._name, groups)
        with self._graph.aside():
            for runtime in self._runtimes:
                runtime.tidy_up()
                self._refuse_unfinished("the calls before have left it so")
                runtime.settle()
        self._gradients.note_left()
        self._gradients.check()
        self._gradients.empty()
        frozen = _Frozen(self._name, roots)
        pieces: list[Any] = [e.param for g in groups for b in g.buckets for e in b.entries]
        versions = [torch_tensors.version_of(param.local_piece) for param in pieces]
        updates = _Updates(self._name, self._device.type)
        noting = register_optimizer_step_pre_hook(updates.note)
        try:
            with self._graph.capturing():
                self._capture_on_streams()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            noting.remove()
            for runtime in self._runtimes:
                runtime.streams.end_fork()
        self._gradients.note_left()
        self._written = [
            param.local_piece
            for param, version in zip(pieces, versions, strict=True)
            if torch_tensors.version_of(param.local_piece) != version
        ]
        self._checks = [frozen.check, updates.check, self._gradients.check]

    def _capture_on_streams(self) -> None:
        """Call the step; all streams begin and end with the capture."""
        for runtime in self._runtimes:
            runtime.streams.fork()
        try:
            self._result = self._call()
        except BaseException as error:
            # Only inside the capture can code wait for captured events.
            with contextlib.suppress(Exception):
                self._forget_step()
            if isinstance(error, ShardkitError) or not isinstance(error, Exception):
                raise
            remedy = (
                "A graph has no part of the host: leave out .item(), prints of values, copies from "
                "and to the host, GradScaler.step, and conditions on values. What the host has to "
                "decide belongs between calls."
            )
            raise _cannot(self._name, "captured", f"{error}", remedy) from error
        self._refuse_unfinished("a replay begins anew")
        for runtime in self._runtimes:
            runtime.settle()

    def _refuse_unfinished(self, why: str) -> None:
        for runtime in self._runtimes:
            unfinished = runtime.unfinished
            if unfinished is not None:
                raise _cannot(self._name, "captured", f"{unfinished}, and {why}", _FINISH)

    def _give_up(self, error: BaseException) -> None:
        """Drop a step that was captured in part; none of it has run."""
        self._error = error
        self._result = None
        self._forget_step()
        self._gradients.empty()

    def _forget_step(self) -> None:
        for runtime in self._runtimes:
            runtime.reset()
            runtime.settle()


def capture(step: Callable[P, R], *models: nn.Module, warm_up: int = 3) -> CapturedStep[P, R]:
    """Capture a step of sharded models in a CUDA graph, and replay it in later calls.

    Each call of the result is one step, on each rank::

        step = shardkit.capture(train_step, model)
        for batch in loader:
            loss = step(batch)

    The first calls run the step as it is. The next call captures the step and replays it, and later
    calls replay it. A step may hold several backwards, clipping, and the optimizer's step.
    `docs/howto/cuda-graphs.md` says what the graph cannot do, and what is compared before each
    replay.

    Args:
        step: Function of tensors and constants that trains; the same on all ranks.
        *models: Sharded models that the step uses.
        warm_up: Number of calls that run the step as it is, at least 2.

    Returns:
        The step.

    Raises:
        StateError: The models cannot be captured: they are offloaded, their device has no graphs,
            or there is no engine for the host.
        ValueError: `warm_up` is less than 2.

    Cost: nothing before the first call. The graph keeps the memory of one step.
    """
    if not as_number(warm_up) >= _LEAST_WARM_UP:
        msg = (
            f"warm_up of capture must be at least {_LEAST_WARM_UP}, came {warm_up}: the first pass "
            f"learns the order of groups, and the first step makes the state of optimizers."
        )
        raise ValueError(msg)
    return CapturedStep(step, models, warm_up)
