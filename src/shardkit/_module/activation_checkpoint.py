"""Activation checkpointing that works alike on every backend."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit import _compat
from shardkit._errors import StateError
from shardkit._module.saved_operators import SavedOperators
from shardkit._runtime.buffers import buffers_of, was_written
from shardkit._runtime.passes import open_passes
from shardkit._tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from shardkit._module.saved_operators import Operators
    from shardkit.backends.traced import Region


class CheckpointedForward:
    """Stands in for a module's forward.

    An object rather than a closure, so that deep copies and pickles of the module get their own.

    Args:
        module: The module whose forward it is.
        saved: The operators whose outputs are kept.
    """

    def __init__(self, module: nn.Module, saved: SavedOperators | None) -> None:
        self._module = module
        self._saved = saved

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; keep its inputs only, and run it again when backward comes."""
        passes = open_passes()
        if passes is None:
            has_buffers = next(self._module.buffers(), None) is not None
            forward = _Repeat(self._module, self._forward).run if has_buffers else self._forward
            options: dict[str, Any] = {}
            if self._saved is not None:
                options["context_fn"] = self._saved.contexts
            # `checkpoint` has keywords of its own, which the module's may be called like.
            bound = functools.partial(forward, **kwargs)
            return checkpoint(bound, *args, use_reentrant=False, **options)
        _compat.register_device_module("xla")
        repeat = _TracedRepeat(self._module, self._forward, passes.region, self._saved)
        return checkpoint(
            functools.partial(repeat.run, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # Of torch's generators; ours repeats by itself.
            context_fn=repeat.contexts,
        )


class _Repeat:
    """One forward and its repetition, which leaves buffers (running statistics) as they are.

    Args:
        module: The module whose forward it is.
        forward: The function that is run.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward
        self._versions: dict[int, int] | None = None
        self._written: set[int] = set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, the first time or again."""
        buffers = [*buffers_of(self._module)]
        if self._versions is not None:
            with _replaced(buffers, self._again):
                return self._forward(*args, **kwargs)
        self._versions = {id(b): _compat.version_of(b) for _, _, b in buffers}
        result = self._forward(*args, **kwargs)
        versions = self._versions
        self._written = {id(b) for child, _, b in buffers if was_written(child, b, versions[id(b)])}
        return result

    @_compat.without_dispatch_modes  # Of selective checkpointing: the first run has no such copy.
    def _again(self, buffer: Tensor) -> Tensor:
        """Return what the repetition has as a buffer, and may write to."""
        return buffer.clone() if id(buffer) in self._written else buffer


class _TracedRepeat:
    """The same on a backend that traces.

    Args:
        module: The module whose forward it is.
        forward: The function that is run.
        region: The region that traces it.
        saved: The operators whose outputs are kept.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        region: Region,
        saved: SavedOperators | None,
    ) -> None:
        self._module = module
        self._forward = forward
        self._region = region
        self._saved = saved
        self._drawing = region.drawing.again()
        self._is_again = False

    def contexts(self) -> tuple[Any, Any]:
        """Return contexts of the forward and of its repetition."""
        if self._saved is None:
            return contextlib.nullcontext(), self._again(contextlib.nullcontext())
        first, again = self._saved.contexts()
        return first, self._again(again)

    @contextlib.contextmanager
    def _again(self, context: Any) -> Iterator[None]:
        self._is_again = True
        # Outside of the root's forward modules hold whole buffers.
        buffers = [*buffers_of(self._module)]
        with self._drawing.again(), _replaced(buffers, self._enter), context:
            yield

    def _enter(self, buffer: Tensor) -> Tensor:
        return self._region.enter_shared(buffer.detach())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward."""
        if self._is_again:
            args, kwargs = map_tensors(self._later, args), map_tensors(self._later, kwargs)
        return self._forward(*args, **kwargs)

    @_compat.without_dispatch_modes  # Of selective checkpointing: the first run has no barrier.
    def _later(self, tensor: Tensor) -> Tensor:
        """Return an input that is there when backward is: or the compiler would run forward once.

        The graph of a repetition is only asked for what it saved.
        """
        [later] = self._region.after_progress([tensor.detach()])
        return later.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _replaced(
    buffers: Sequence[tuple[nn.Module, str, Tensor]], make: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let modules hold what `make` makes of their buffers."""
    made = {id(buffer): make(buffer) for _, _, buffer in buffers}
    for child, name, buffer in buffers:
        child._buffers[name] = made[id(buffer)]  # noqa: SLF001 - past the checks of `setattr`
    try:
        yield
    finally:
        for child, name, buffer in buffers:
            child._buffers[name] = buffer  # noqa: SLF001


def checkpoint_module(module: nn.Module, *, operators: Operators = None) -> nn.Module:
    """Have a module keep only its inputs between forward and backward, which runs forward again.

    Less memory for one more forward. Random numbers are repeated, autocast too; buffers, such as
    running statistics, are written once. Works on every backend, before or after `fully_shard`,
    which gathers the module's parameters once for the repetition and the backward:

        for block in model.blocks:
            fully_shard(checkpoint_module(block), mesh=mesh)

    `checkpoint_activations` does so for many modules of a model.

    Args:
        module: A module whose forward is a method of its class.
        operators: The operators whose outputs are kept as well, see `checkpoint_activations`.

    Returns:
        `module`.

    Raises:
        StateError: It is checkpointed already, has no forward, or one of its own beside its
            class's; or `operators` are none.

    Cost: none in collectives, unless sharded modules are inside the module: then backward gathers
    each of these for the repetition too.
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
    """Return why a module cannot be checkpointed, if so."""
    replaced = module.__dict__.get("forward")
    if isinstance(replaced, CheckpointedForward):
        return "is checkpointed already."
    if replaced is not None:
        return f"has a forward of its own, {replaced!r}."
    if type(module).forward is nn.Module.forward:
        return "has no forward: those who hold it call what is in it."
    return None
