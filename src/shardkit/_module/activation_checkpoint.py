"""Activation checkpointing that works alike on every backend, and policies that choose it."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardkit import _compat
from shardkit._errors import StateError, listed
from shardkit._module.fsdp_module import own_class
from shardkit._runtime.passes import buffers_of, open_passes, was_written
from shardkit._tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Literal

    from torch import Tensor

    from shardkit.backends.base import Region


# --- operators whose outputs are kept -------------------------------------------------------------

Operators: TypeAlias = (
    "Literal['matmuls', 'every_second_matmul'] | Collection[Any] | Callable[..., Any]"
    " | SavedOperators | None"
)

_MATMULS = frozenset(
    {"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::convolution"}
)
"""Products with weights. Not `bmm`: scores of attention are its outputs, which fill memory."""

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
    """Which outputs are kept. Operators stand here by names, because they cannot be pickled.

    Attributes:
        names: ``namespace::operator``, all overloads; those of higher-order operators are bare.
        counted: Operators of which only every `every`-th call is kept, the first one included.
        every: Distance between kept calls of `counted` operators.
        decide: A user's function in their place, see `create_selective_checkpoint_contexts`.
    """

    names: frozenset[str] = frozenset()
    counted: frozenset[str] = frozenset()
    every: int = 1
    decide: Callable[..., Any] | None = None

    @classmethod
    def of(cls, operators: Operators) -> SavedOperators | None:
        """Return what a user's choice means; None: nothing is kept.

        Raises:
            StateError: It is no such choice.
        """
        if operators is None or isinstance(operators, cls):
            return operators
        if operators == "matmuls":
            return cls(_MATMULS | _ATTENTION)
        if operators == "every_second_matmul":
            return cls(_ATTENTION, _MATMULS, every=2)
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
        for operator in operators:
            if not isinstance(operator, _compat.OPERATOR_KINDS):
                msg = (
                    f"operators has {operator!r}, which is a {type(operator).__name__} and no "
                    f"operator. Name those that torch dispatches, such as torch.ops.aten.mm or "
                    f"torch.ops.aten.addmm.default."
                )
                raise StateError(msg)
        return cls(frozenset(map(_compat.operator_name, operators)))

    def contexts(self) -> tuple[Any, Any]:
        """Return contexts of one forward and of its repetition."""
        if self.decide is not None:
            first, again = create_selective_checkpoint_contexts(self.decide)
            return first, again
        calls = _Calls(self)
        first, again = create_selective_checkpoint_contexts(calls.decide)
        return first, calls.from_the_beginning(again)


class _Calls:
    """Counts the calls of one forward, and again those of its repetition."""

    def __init__(self, saved: SavedOperators) -> None:
        self._saved = saved
        self._num_calls = 0
        self._names: dict[Any, str] = {}

    @contextlib.contextmanager
    def from_the_beginning(self, context: Any) -> Iterator[None]:
        """Enter a context of a repetition."""
        self._num_calls = 0
        with context:
            yield

    def decide(
        self, _: SelectiveCheckpointContext, operator: Any, *__: Any, **___: Any
    ) -> CheckpointPolicy:
        """Say whether the output of this call is kept; torch <= 2.9 asks in the repetition too."""
        name = self._names.get(operator)
        if name is None:
            name = self._names[operator] = _compat.operator_name(operator)
        keep = name in self._saved.names
        if name in self._saved.counted:
            keep = self._num_calls % self._saved.every == 0
            self._num_calls += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


# --- checkpointed forwards ------------------------------------------------------------------------


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


# --- which modules --------------------------------------------------------------------------------


def checkpoint_activations(
    model: nn.Module,
    *,
    every: int = 1,
    classes: Sequence[type[nn.Module] | str] | type[nn.Module] | str | None = None,
    policy: Callable[[str, nn.Module], bool] | None = None,
    operators: Operators = None,
) -> list[str]:
    """Have chosen modules of a model compute their activations again in backward.

    Without `classes` and `policy` these are the model's repeated blocks: the members of each
    `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` of which at least two, with parameters and
    modules of their own, are of one class; the outermost ones count. In place, before or after
    `fully_shard`, on every backend; names of parameters stay. What of numbers and of collectives
    is said of `checkpoint_module` holds:

        checkpoint_activations(model, every=2)  # Half of the blocks.
        checkpoint_activations(model, classes="TransformerBlock", operators="matmuls")

    Args:
        model: The model that holds the modules, or is one of them (its name is ``""`` then).
        every: Choose the `every`-th, the 2 * `every`-th and so on of the modules found, in the
            order of `named_modules`. What torchtitan calls selective ``"2"`` is 2.
        classes: Classes, subclasses of these included, or names of classes, as they were before
            `fully_shard`; bare or with their module. All modules of these are found.
        policy: A function that is called with a module's name and itself, in the place of
            `classes`.
        operators: Operators whose outputs are kept as well, so that they are not computed again.
            ``"matmuls"``: products with weights, convolutions and fused attention;
            ``"every_second_matmul"``: attention, and of the others the first, third, ... of each
            module; operators such as ``[torch.ops.aten.mm]``, all overloads of each; or a function
            as of `torch.utils.checkpoint.create_selective_checkpoint_contexts`. A module must not
            write to such an output in place, and its backward cannot run twice. None: nothing is
            kept but inputs.

    Returns:
        Names of the modules chosen, as in `model.named_modules()`.

    Raises:
        StateError: Nothing is chosen (the message has the classes with the nearest names), a chosen
            one has no forward, or is checkpointed already, or an argument is none of these. No
            module is changed then.

    Cost: see `checkpoint_module`.
    Source: Chen et al., arXiv:1604.06174; by operators: Korthikanti et al., arXiv:2205.05198.
    """
    saved = SavedOperators.of(operators)
    if type(every) is not int or every < 1:
        msg = f"every must be an int of at least 1, got {every!r}. 2 chooses half of the modules."
        raise StateError(msg)
    if classes is not None and policy is not None:
        msg = "give classes or policy, not both: a policy may look at the classes itself."
        raise StateError(msg)
    if policy is not None:
        found = [(name, m) for name, m in model.named_modules() if policy(name, m)]
    elif classes is not None:
        found = _of_classes(model, classes)
    else:
        found = list(_repeated_blocks(model))
    chosen = found[every - 1 :: every]
    if not chosen:
        raise StateError(_nothing_chosen(model, classes, policy, every=every, num_found=len(found)))
    for name, module in chosen:
        complaint = complaint_of(module)
        if complaint is not None:
            msg = f"{name!r}, a {own_class(module).__name__}, {complaint} {_REMEDY}"
            raise StateError(msg)
    for _, module in chosen:
        checkpoint_module(module, operators=saved)
    return [name for name, _ in chosen]


_REMEDY = (
    "Call checkpoint_activations once per model, before others replace forwards, and choose "
    "modules that are called. Nothing was changed."
)


# --- what is found --------------------------------------------------------------------------------


def _of_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str] | type[nn.Module] | str
) -> list[tuple[str, nn.Module]]:
    wanted = [classes] if isinstance(classes, (str, type)) else list(classes)
    for item in wanted:
        if not isinstance(item, (str, type)):
            msg = (
                f"classes has {item!r}, which is a {type(item).__name__}: expected classes or "
                f"names of classes. Choose single modules by policy."
            )
            raise StateError(msg)
    types = tuple(item for item in wanted if isinstance(item, type))
    names = {item for item in wanted if isinstance(item, str)}
    found = []
    matched: set[str | type] = set()
    for name, module in model.named_modules():
        own = own_class(module)
        mine = {own.__name__, f"{own.__module__}.{own.__qualname__}"} & names
        mine_types = {cls for cls in types if isinstance(module, cls)}
        if mine or mine_types:
            found.append((name, module))
            matched |= mine | mine_types
    missing = [item for item in wanted if item not in matched]
    if found and missing:
        shown = ", ".join(_shown(item) for item in missing)
        msg = f"no module of the model is a {shown}. {_classes_in(model, missing)}"
        raise StateError(msg)
    return found


def _repeated_blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the members of containers that repeat a class, the outermost ones only."""
    blocks: set[nn.Module] = set()
    inside = ""
    for name, module in model.named_modules(prefix=prefix):
        if inside and name.startswith(inside):
            continue
        if module in blocks:
            inside = f"{name}."
            yield name, module
        elif isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            children = [child for child in module.children() if _is_composite(child)]
            counts = Counter(map(own_class, children))
            blocks |= {child for child in children if counts[own_class(child)] > 1}


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module has parameters, and is more than one of torch's layers."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    is_layer = own_class(module).__module__.startswith("torch.nn.")
    has_parameters = next(module.parameters(), None) is not None
    has_modules = next(module.children(), None) is not None
    return has_parameters and (has_modules or not is_layer)


# --- errors ---------------------------------------------------------------------------------------


def _shown(item: type | str) -> str:
    return item if isinstance(item, str) else item.__name__


def _classes_in(model: nn.Module, wanted: Sequence[type | str]) -> str:
    """Return a sentence on the classes of a model, the ones with the nearest names first."""
    counts = Counter(
        own_class(module).__name__
        for module in model.modules()
        if next(module.parameters(), None) is not None
    )
    names = [name for name, _ in counts.most_common()]
    near = [
        match
        for item in wanted
        for match in difflib.get_close_matches(_shown(item).rpartition(".")[2], names, 3, 0.4)
    ]
    ordered = list(dict.fromkeys((*near, *names)))
    return f"Classes in it: {listed(ordered, lambda name: f'{name} ({counts[name]})')}."


def _nothing_chosen(
    model: nn.Module,
    classes: Sequence[type[nn.Module] | str] | type[nn.Module] | str | None,
    policy: object,
    *,
    every: int,
    num_found: int,
) -> str:
    model_class = own_class(model).__name__
    if num_found:
        return (
            f"of {num_found} modules found in this {model_class} none is chosen by every={every}. "
            f"Pass a smaller number."
        )
    wanted: list[type | str] = []
    if policy is not None:
        why = f"the policy chose no module of this {model_class}."
    elif classes is not None:
        wanted = [classes] if isinstance(classes, (str, type)) else list(classes)
        why = f"no module of this {model_class} is a {' or '.join(map(_shown, wanted)) or '?'}."
    else:
        why = (
            f"no blocks that repeat were found in the containers of this {model_class}. Name their "
            f"classes."
        )
    return f"{why} {_classes_in(model, wanted)}"
