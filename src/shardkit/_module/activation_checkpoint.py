"""Activation checkpointing that works alike on every backend."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardkit._compat import torch_devices, torch_modules, torch_tensors
from shardkit._errors import StateError
from shardkit._runtime.passes import RegionTensors, buffers_of, open_passes, was_written
from shardkit._tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from shardkit.backends.base import Region


# --- operators whose outputs are kept -------------------------------------------------------------

Operators: TypeAlias = (
    "Literal['matmuls', 'every_second_matmul'] | Collection[Any] | Callable[..., Any]"
    " | SavedOperators | None"
)

_MATMULS = frozenset(
    {"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::convolution"}
)
"""Products with weights. Not `bmm`: its outputs are attention scores, which fill memory."""

_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
    }
)


@dataclass(frozen=True)
class SavedOperators:
    """Which outputs are kept. Operators are given by name, because they cannot be pickled."""

    # Names ``namespace::operator``, for all overloads; higher-order operators have bare names.
    names: frozenset[str] = frozenset()
    # Operators of which only every second call is kept, the first one included.
    counted: frozenset[str] = frozenset()
    # A user's function that decides instead; see `create_selective_checkpoint_contexts`.
    decide: Callable[..., Any] | None = None

    @classmethod
    def of(cls, operators: Operators) -> SavedOperators | None:
        """Return the operators that a user's choice means; None: nothing is kept."""
        if operators is None or isinstance(operators, cls):
            return operators
        if operators == "matmuls":
            return cls(_MATMULS | _ATTENTION)
        if operators == "every_second_matmul":
            return cls(_ATTENTION, _MATMULS)
        if isinstance(operators, str) or (
            not callable(operators) and not hasattr(operators, "__iter__")
        ):
            msg = (
                f"operators must be 'matmuls', 'every_second_matmul', operators such as "
                f"[torch.ops.aten.mm], a function of torch's create_selective_checkpoint_contexts, "
                f"or None, got {operators!r}."
            )
            raise StateError(msg)
        if callable(operators):
            return cls(decide=operators)
        operators = tuple(operators)
        for operator in operators:
            if not isinstance(operator, torch_tensors.OPERATOR_KINDS):
                msg = (
                    f"operators has {operator!r}, which is a {type(operator).__name__} and no "
                    f"operator. Name those that torch dispatches, such as torch.ops.aten.mm or "
                    f"torch.ops.aten.addmm.default."
                )
                raise StateError(msg)
        return cls(frozenset(map(torch_tensors.operator_name, operators)))

    @property
    def contexts(self) -> Callable[[], tuple[Any, Any]]:
        """A function that returns the contexts of one forward and of its repetition."""
        # A compiler takes partials of functions, and no bound methods. That of torch 2.9 takes no
        # dataclass among their arguments.
        return functools.partial(_selective_contexts, self.names, self.counted, self.decide)


def _selective_contexts(
    names: frozenset[str], counted: frozenset[str], decide: Callable[..., Any] | None
) -> tuple[Any, Any]:
    """Return contexts that keep what a `SavedOperators` of these fields names."""
    calls = {False: itertools.count(), True: itertools.count()}
    name_of = functools.cache(torch_tensors.operator_name)

    def by_name(
        context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        """Decide whether to keep the output of this call; torch <= 2.9 asks again on repeat."""
        name = name_of(operator)
        keep = name in names
        if name in counted:
            keep = next(calls[context.is_recompute]) % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    # A compiler takes modes, and no other contexts around them.
    first, again = create_selective_checkpoint_contexts(decide or by_name)
    return first, again


class _EachTime:
    """A context that is made anew at each entry, since a backward may run more than once."""

    def __init__(self, make: Callable[[Any], Any], inner: Any) -> None:
        self._make = functools.partial(make, inner)

    def __enter__(self) -> None:
        self._made = self._make()
        self._made.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self._made.__exit__(*error)


# --- checkpointed forwards ------------------------------------------------------------------------


class CheckpointedForward:
    """Stand-in for a module's forward.

    It is an object and not a closure, so that deep copies and pickles of the module get their own.
    """

    def __init__(self, module: nn.Module, saved: SavedOperators | None) -> None:
        self._module = module
        self._saved = saved
        # By holder, name and mode: whether a forward has written the buffer.
        self._writes: dict[tuple[nn.Module, str, bool], bool] = {}

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    def _compiled_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward in a compiled graph, or uncompiled, if the graph breaks in it."""
        if not torch.compiler.is_compiling() and torch_modules.in_functional_call():
            msg = (
                f"a checkpointed {type(self._module).__name__.removeprefix('FSDP')} is compiled, "
                f"its graph breaks, and torch.func.functional_call calls it: the values are gone "
                f"when backward runs forward again. Remove the break, which "
                f"compile(fullgraph=True) names, or do not compile this module."
            )
            raise StateError(msg)
        return self._forward(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and keep only its inputs; backward runs it again."""
        has_buffers = next(self._module.buffers(), None) is not None
        # A compiled graph would write buffers twice, so torch may not compile what has some.
        is_compiled = torch.compiler.is_compiling() and not has_buffers
        if not is_compiled and torch_modules.in_functional_call():
            return self._forward(*args, **kwargs)  # Its values are gone when backward runs.
        passes = open_passes()
        run: Callable[..., Any] = self._compiled_forward if is_compiled else self._forward
        options: dict[str, Any] = {}
        buffers = BuffersBefore(self._module, self._writes)
        if passes is not None:
            torch_devices.register_device_module("xla")
            traced = _TracedRepeat(run, buffers, passes.region, self._saved)
            run = traced.run
            # The random state is for torch's generators; ours repeats by itself.
            options = {"preserve_rng_state": False, "context_fn": traced.contexts}
        else:
            if has_buffers:
                run = _Repeat(run, buffers).run
            if self._saved is not None:
                options["context_fn"] = self._saved.contexts
        # Keywords of the module may have the same names as those of `checkpoint`.
        run = functools.partial(run, **kwargs)
        output = checkpoint(run, *args, use_reentrant=False, **options)
        # Autocast would keep its copies of the weights until it ends. No backward reads them.
        if not is_compiled:
            torch.clear_autocast_cache()
        return output


class BuffersBefore:
    """Values that buffers of a module had before a forward, for those that the forward writes.

    Which these are is known after the first forward, so that one copies all of them.
    """

    def __init__(self, module: nn.Module, writes: dict[tuple[nn.Module, str, bool], bool]) -> None:
        self.module = module  # The module.
        # Whether forwards write a buffer, by holder, name and mode; forwards add to it.
        self._writes = writes
        self._values: dict[tuple[nn.Module, str], Tensor] = {}

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the forward, and keep what it has written as it was before, if it may be repeated."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        buffers = [*buffers_of(self.module)]
        # What a forward writes may depend on the mode, as in batch normalization.
        keys = [(child, name, child.training) for child, name, _ in buffers]
        known = zip(keys, buffers, strict=True)
        wanted = {id(b): b for key, (*_, b) in known if self._writes.get(key, True)}
        copies = {key: copy_of_buffer(buffer) for key, buffer in wanted.items()}
        versions = {id(b): torch_tensors.version_of(b) for *_, b in buffers}
        result = forward(*args, **kwargs)
        for key, (child, name, buffer) in zip(keys, buffers, strict=True):
            is_other = child._buffers.get(name) is not buffer  # noqa: SLF001
            is_written = is_other or was_written(child, buffer, versions[id(buffer)])
            self._writes[key] = is_written or self._writes.get(key, False)
            if is_written:
                self._values[child, name] = copies.get(id(buffer), buffer)
        return result

    @contextlib.contextmanager
    def shown(self, make: Callable[[Tensor], Tensor] = lambda buffer: buffer) -> Iterator[None]:
        """Let modules hold copies of the values, and what `make` returns for other buffers."""
        buffers, values = [*buffers_of(self.module)], self._values
        made: dict[int, Tensor] = {}
        for child, name, buffer in buffers:
            if id(buffer) not in made:
                before = values.get((child, name))
                made[id(buffer)] = make(buffer) if before is None else copy_of_buffer(before)
        for child, name, buffer in buffers:
            child._buffers[name] = made[id(buffer)]  # noqa: SLF001 - past the checks of `setattr`
        try:
            yield
        finally:
            for child, name, buffer in buffers:
                child._buffers[name] = buffer  # noqa: SLF001


# Selective checkpointing must not see copies, because both runs make others.
@torch_tensors.without_dispatch_modes
def copy_of_buffer(buffer: Tensor) -> Tensor:
    return buffer.detach().clone()


class _Repeat:
    """One forward and its repetition, which reads buffers as they were, and writes copies."""

    def __init__(self, forward: Callable[..., Any], buffers: BuffersBefore) -> None:
        self._forward = forward  # Function that runs the module's forward.
        self._buffers = buffers  # Buffers of the module.
        self._has_run = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, the first time or again."""
        if self._has_run:
            with self._buffers.shown():
                return self._forward(*args, **kwargs)
        self._has_run = True
        return self._buffers.run(self._forward, args, kwargs)


@dataclass(eq=False)
class _TracedRepeat:
    """One forward and its repetition on a backend that traces."""

    forward: Callable[..., Any]
    buffers: BuffersBefore
    region: Region
    saved: SavedOperators | None
    is_again: bool = False

    def __post_init__(self) -> None:
        """Note the state of the random numbers at the beginning of the forward."""
        self._drawing = self.region.drawing.again()

    def contexts(self) -> tuple[Any, Any]:
        """Return contexts of the forward and of its repetition."""
        nothing = contextlib.nullcontext()
        first, again = (nothing, nothing) if self.saved is None else self.saved.contexts()
        return first, _EachTime(self._again, again)

    @contextlib.contextmanager
    def _again(self, context: Any) -> Iterator[None]:
        self.is_again = True
        # Outside the root's forward modules hold whole tensors.
        held = RegionTensors(self.region)
        held.enter_params(self.buffers.module)
        try:
            with self._drawing.again(), self.buffers.shown(self._enter), context:
                yield
        finally:
            held.restore()

    def _enter(self, buffer: Tensor) -> Tensor:
        return self.region.enter_shared(buffer.detach())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        if not self.is_again:
            return self.buffers.run(self.forward, args, kwargs)
        args, kwargs = map_tensors(self._later, args), map_tensors(self._later, kwargs)
        return self.forward(*args, **kwargs)

    # Selective checkpointing must not see this barrier, because the first run has none.
    @torch_tensors.without_dispatch_modes
    def _later(self, tensor: Tensor) -> Tensor:
        """Tie an input to backward; otherwise the compiler would merge the two forwards.

        Of the repetition's graph only the tensors that it saved are used.
        """
        [later] = self.region.after_progress([tensor.detach()])
        return later.requires_grad_(tensor.requires_grad)


def checkpoint_module(module: nn.Module, *, operators: Operators = None) -> nn.Module:
    """Let a module keep only its inputs after forward; backward runs its forward again.

    This saves memory and costs one more forward. The repetition has the same random numbers and the
    same autocast. Buffers, such as running statistics, are written once, and the repetition reads
    what the forward has read. In `torch.func.functional_call`, whose values are gone when backward
    runs, nothing is repeated, and so no memory is saved. It works on every backend, before or after
    `fully_shard`, which gathers the module's parameters once for the repetition and the backward:

        for block in model.blocks:
            fully_shard(checkpoint_module(block), mesh=mesh)

    `checkpoint_activations` does this for many modules of a model.

    Args:
        module: A module whose forward is a method of its class.
        operators: The operators whose outputs are kept as well, see `checkpoint_activations`.

    Returns:
        `module`.

    Raises:
        StateError: The module is checkpointed already, has no forward, or has a forward of its own
            beside that of its class. Or `operators` has something that is no operator.

    Cost: no collectives, unless sharded modules are inside the module: then backward gathers each
    of these for the repetition, too. A copy of each buffer that the forward writes.
    """
    saved = SavedOperators.of(operators)
    complaint = complaint_of(module)
    if complaint is not None:
        msg = (
            f"this {type(module).__name__} {complaint} Call checkpoint_module once per module, "
            f"before others replace its forward."
        )
        raise StateError(msg)
    forward = CheckpointedForward(module, saved)
    module.forward = functools.wraps(type(module).forward)(forward)
    return module


def complaint_of(module: nn.Module) -> str | None:
    """Return why a module cannot be checkpointed; None: it can."""
    if not isinstance(module, nn.Module):
        return "is no module."
    replaced = module.__dict__.get("forward")
    if isinstance(replaced, CheckpointedForward):
        return "is checkpointed already."
    if replaced is not None:
        return f"has a forward of its own, {replaced!r}."
    if type(module).forward is nn.Module.forward:
        return "has no forward: those who hold it call what is in it."
    return None
